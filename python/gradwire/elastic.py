"""Training that outlives the loss of ranks, and takes in new ones.

```python
import gradwire as gw
from gradwire import elastic

gw.init()  # under `gradwire run -np 4 --min-np 2 -- python train.py`


@elastic.run
def train(state):
    while state.step < 1000:
        state.weights = step_of(state.weights)
        state.step += 1
        if state.step % 10 == 0:
            state.commit()


train(elastic.ObjectState(weights=first_weights(), step=0))
```

The interface is Horovod's. ``run`` calls the function again after each change of the ranks. After a
loss, all ranks first return to the last commit, and a new rank receives the state of an old one.

No rank decides alone: a commit holds on all ranks or on none (VOTE), ranks interrupt their training
for a wanted change at the same commit, and before each call of the function they agree on whether
their states are the same. In a job that is not elastic, ``run`` calls the function once.
"""

from __future__ import annotations

import copy
import functools
import queue
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, TypeVar

from gradwire import _epochs, _native, _world
from gradwire._errors import GradwireError, InvalidRequest, PeerLost
from gradwire._objects import allgather_object, broadcast_object
from gradwire._world import is_elastic
from gradwire.common.exceptions import HostsUpdatedInterrupt

__all__ = ["HostsUpdatedInterrupt", "ObjectState", "State", "run", "run_fn"]

Result = TypeVar("Result")
# The epoch in which this process has last come to a meeting before a state is received.
_came_in = 0
# Horovod's codes of a change, which can be combined.
_REMOVED, _ADDED = 1, 2


class _Vote(Enum):
    """What this rank has voted for, until it knows the outcome."""

    NOTHING = 0
    LEAVE = 1  # to go on with the present state in the next epoch
    COMMIT = 2  # to save the present state
    END = 3  # to end the training


class State:
    """The state of a training, which all ranks save, restore and synchronize together.

    Subclasses define ``save``, ``restore`` and ``sync``.

    Args:
        bcast_object: Horovod's function to send an object from rank 0 to all ranks; called with the
            object. The default is ``broadcast_object``.
        get_rank: Horovod's function that returns the rank; ignored.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] | None = None,
        get_rank: Callable[[], int] | None = None,
    ) -> None:
        del get_rank
        self._broadcast = bcast_object
        # Changes that ``on_hosts_updated`` has noted, and the time of the last agreed change.
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], object]] = []
        # The rank whose state the others receive.
        self._root = 0
        # Whether this process has the state of the job, and not only its own initial state.
        self._holds = False
        self._vote = _Vote.NOTHING

    def _bcast_object(self, value: Any) -> Any:
        """Returns the object of the root."""
        if self._broadcast is not None:
            return self._broadcast(value)
        return broadcast_object(value, self._root, "elastic.state")

    # What programs call

    def commit(self) -> None:
        """Saves the state on all ranks or on none, and then looks for changes of the hosts.

        All ranks call it, at the same point of the training.

        Raises:
            HostsUpdatedInterrupt: The ranks will change.
            GradwireError: The operation failed; the subclass and ``kind`` tell why.
        """
        if not is_elastic():
            self._save_commit()
            return
        change = self._agree_on_change()
        self._agree_to(_Vote.COMMIT)
        self._save_commit()
        self._interrupt(change)

    def check_host_updates(self) -> None:
        """Interrupts the training on all ranks if hosts were added or removed.

        All ranks call it, at the same point of the training. The state is not saved, but it is not
        lost, either: the training continues with it.

        Raises:
            HostsUpdatedInterrupt: The ranks will change.
            GradwireError: The operation failed; the subclass and ``kind`` tell why.
        """
        if not is_elastic():
            return
        change = self._agree_on_change()
        if change:
            self._agree_to(_Vote.LEAVE)
        self._interrupt(change)

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Adds functions that are called when the ranks have changed, before ``sync``.

        Args:
            callbacks: The functions. For example, they adapt the learning rate to ``size()``.
        """
        self._reset_callbacks.extend(callbacks)

    # What subclasses define

    def save(self) -> None:
        """Saves the state in the memory of this process."""
        raise NotImplementedError

    def restore(self) -> None:
        """Returns to the saved state."""
        raise NotImplementedError

    def sync(self) -> None:
        """Makes the state the same on all ranks."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapts the state to new ranks; called before the reset callbacks."""

    # What happens around them

    def on_reset(self) -> None:
        """Called when the ranks have changed: calls ``reset`` and the reset callbacks."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Notes a change of the hosts for the next ``commit`` or ``check_host_updates``.

        Args:
            timestamp: The time of the change. If it is not later than that of the last agreed
                change, the change is ignored.
            update_res: Horovod's code: 1 if hosts were removed, 2 if hosts were added, 3 for both.
        """
        self._host_messages.put((timestamp, update_res))

    def _news(self) -> Any:
        """Returns what the other ranks need to know when all decide on a change."""

    def _learn(self, news: list[Any]) -> None:
        """Receives the ``_news`` of all ranks."""

    def _agree_on_change(self) -> int:
        """Returns the code of the changes that any rank knows of."""
        latest, change = self._last_updated_timestamp, 0
        while not self._host_messages.empty():
            timestamp, one = self._host_messages.get()
            if timestamp > self._last_updated_timestamp:
                latest, change = max(latest, timestamp), change | int(one)
        added, removed = _world.session().pending_change() or (False, False)
        change |= _ADDED * added | _REMOVED * removed
        told = allgather_object((latest, change, self._news()), "elastic.change")
        self._last_updated_timestamp = max(latest for latest, _, _ in told)
        self._learn([news for _, _, news in told])
        return functools.reduce(lambda all_of_them, one: all_of_them | one[1], told, 0)

    def _agree_to(self, vote: _Vote) -> None:
        """Votes. If a rank is lost meanwhile, ``_settle`` receives the outcome."""
        self._vote = vote
        _world.session().vote(True)
        self._vote = _Vote.NOTHING

    def _interrupt(self, change: int) -> None:
        if change:
            raise HostsUpdatedInterrupt(skip_sync=change == _REMOVED)

    def _settle(self, outcome: bool | None) -> bool:
        """Returns to the last commit after a loss, unless the interrupted vote has succeeded.

        Args:
            outcome: The outcome of the vote.

        Returns:
            Whether the ranks have agreed that the training has ended.
        """
        vote, self._vote = self._vote, _Vote.NOTHING
        if vote is _Vote.NOTHING or not outcome:
            self.restore()
        elif vote is _Vote.COMMIT:
            self._save_commit()
        return vote is _Vote.END and bool(outcome)

    def _save_commit(self) -> None:
        """Saves the state in a commit."""
        self.save()

    def _end(self) -> None:
        """Waits until the last commit is on disk, at the end of the training."""

    def _stored(self) -> int:
        """Returns the number of the newest commit on this rank's disk; 0 without one."""
        return 0

    def _load_stored(self) -> None:
        """Loads the newest commit on this rank's disk."""

    def _begin(self, skip_sync: bool) -> None:
        """Synchronizes the state before the function is called, unless no rank needs that.

        Args:
            skip_sync: This rank does not need it.

        Raises:
            PeerLost: No rank has the state, although the job is not new.
        """
        stored = 0 if self._holds else self._stored()
        own = (skip_sync and self._holds, self._holds, stored, _world.is_newcomer())
        told = allgather_object(own, _meeting())
        if not all(skip for skip, _, _, _ in told):
            # The root is the lowest rank that has the state: rank 0 may now be a newcomer. In a new
            # job, it is the rank with the newest commit on its disk.
            ages = [(holds, 0 if holds else stored) for _, holds, stored, _ in told]
            if max(ages) == (False, 0) and all(newcomer for _, _, _, newcomer in told):
                raise PeerLost(
                    "every rank that had the state of the training was lost before the new ranks "
                    "had received it: start the job again; a TorchState with directory= keeps "
                    "commits on disk, from which a job continues",
                    kind="worker-lost",
                )
            self._root = ages.index(max(ages))
            if stored > 0 and self._root == _world.rank():
                self._load_stored()
            self.sync()
        self._holds = True


class ObjectState(State):
    """A state of plain attributes.

    Args:
        bcast_object: Horovod's function to send an object from rank 0 to all ranks; called with the
            object. The default is ``broadcast_object``.
        get_rank: Horovod's function that returns the rank; ignored.
        **kwargs: The attributes and their first values, which can be copied and pickled.

    Example:
        ```python
        state = elastic.ObjectState(epoch=0, batch=0)
        state.batch += 1
        state.commit()
        ```
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = kwargs
        self._set(kwargs)
        self._saved_state = copy.deepcopy(kwargs)

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

    def save(self) -> None:
        """Saves copies of the attributes."""
        self._saved_state = copy.deepcopy(self._values())

    def restore(self) -> None:
        """Returns to the saved attributes."""
        self._set(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        """Copies the attributes of one rank to all ranks, and saves them."""
        if self._saved_state:
            self._set(self._bcast_object(self._values()))
        self.save()


def _meeting() -> str:
    """Returns the name of the operation in which the ranks find out whether one needs a state.

    The first one in an epoch has a time limit for new ranks, which may never come: see the
    coordinator's ``FUNCTION_MEETING``. Before a later one, a rank may compute for long.
    """
    global _came_in
    epoch = _world.session().epoch
    is_first, _came_in = epoch != _came_in, epoch
    return "elastic.begin" if is_first else "elastic.compare"


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Decorates a training function, which is called again whenever the ranks have changed.

    - After a loss, the ranks that are left return to their last commit.
    - After ``commit`` or ``check_host_updates`` has found a change of the hosts, they continue with
      the present state.

    Then a new rank receives the state of an old one, and all call the function. When it returns, a
    rank waits for the others. All other exceptions are raised as they are. One that ends the
    process is a loss for the other ranks, unless it is an error of Gradwire that no loss has caused
    (without ``recoverable``), such as a ``Disagreement``: that ends the job.

    Args:
        func: The function. Its first argument is the ``State``.

    Returns:
        A function with the same arguments. It returns what ``func`` returns.

    Example:
        ```python
        @elastic.run
        def train(state):
            while state.step < 1000:
                ...
        ```
    """
    return run_fn(func)


def run_fn(
    func: Callable[..., Result], reset: Callable[[], object] | None = None
) -> Callable[..., Result]:
    """Decorates a training function as ``run`` does.

    Args:
        func: The function. Its first argument is the ``State``.
        reset: Called when the ranks have changed, before the state is restored.

    Returns:
        A function with the same arguments. It returns what ``func`` returns.

    Raises:
        InvalidRequest: ``func`` is not a function. The decorated function also raises it, if its
            first argument is not a ``State``.
    """
    if not callable(func):
        raise InvalidRequest(f"func is a {type(func).__name__}, not a function", kind="invalid")

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Result:
        if not isinstance(state, State):
            raise InvalidRequest(
                f"the first argument is a {type(state).__name__}, not a State, such as "
                "ObjectState(step=0)",
                kind="invalid",
            )
        if not is_elastic():
            state._begin(skip_sync=False)
            result = func(state, *args, **kwargs)
            state._end()
            return result
        skip_sync = changed = False
        while True:
            loss: _native.Failure | None = None
            try:
                if changed:
                    state.on_reset()
                state._begin(skip_sync)
                result = func(state, *args, **kwargs)
                # A rank that has left can't help the others to repeat their last steps.
                state._agree_to(_Vote.END)
                state._end()
                return result
            except GradwireError as error:
                if not error.recoverable:
                    raise
                lost, loss, skip_sync = True, error._failure, False
            except HostsUpdatedInterrupt as change:
                lost, skip_sync = False, change.skip_sync
            rejoined = _epochs.rejoin(loss)
            changed, skip_sync = True, skip_sync and not rejoined.newcomers
            if reset is not None:
                reset()
            if lost and state._settle(rejoined.vote):
                state._end()
                return result

    return wrapper
