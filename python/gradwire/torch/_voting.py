"""Steps that end with a vote, for optimizers that skip the step of a loss.

The unit is the step. If the exchange of a step has failed on any rank, all ranks skip the step, so
their parameters stay equal. Nothing is repeated, and all averages of a step contain the same ranks.

    heal -- backward passes -- exchange -- vote -- yes --> step
                                  └- a loss -┴--> rejoin -- the vote's outcome --> step or none

A loss only becomes known here, in ``step``. Until then, it is noted, and the program continues.

``heal`` gives new ranks the state of an old one. A new rank does this when it makes its optimizer,
the others in their next step. So the new rank begins with the step that they are in.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gradwire import _epochs, _world
from gradwire._errors import GradwireError, InvalidRequest
from gradwire.elastic import State
from gradwire.torch._functions import broadcast_optimizer_state, broadcast_parameters
from gradwire.torch._wrapping import Wrapped, without_hooks

_log = logging.getLogger("gradwire")


class Patience:
    """Notes the first loss of an epoch instead of raising it."""

    lost: GradwireError | None = None
    # The number of epochs that this process has joined since its first one.
    joined = 0

    def note(self, error: BaseException, joined: int) -> bool:
        """Notes an error if it is a loss; returns whether it is one.

        Args:
            error: The error.
            joined: ``joined`` when the operation was started.
        """
        if not isinstance(error, GradwireError) or not error.recoverable:
            return False
        if joined == self.joined:
            self.lost = self.lost or error
        return True

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """Notes a loss that is recoverable."""
        try:
            yield
        except GradwireError as error:
            if not self.note(error, self.joined):
                raise

    def begin_epoch(self) -> None:
        """Continues with the ranks of the next epoch."""
        self.lost = None
        self.joined += 1


def wants_change() -> bool:
    """Returns whether the launcher has told this rank that the ranks will change."""
    return _world.is_elastic() and _world.session().pending_change() is not None


class OwnState(State):
    """The tensors of a model, and the state of its optimizer.

    Args:
        optimizer: The optimizer.
        named: Returns the tensors with their names.
        others: The states that are copied after this one, and may be on disk.
    """

    def __init__(
        self,
        optimizer: Voting,
        named: Callable[[], list[tuple[str, torch.Tensor]]],
        others: list[State],
    ) -> None:
        super().__init__()
        self._optimizer, self._named, self._others = weakref.ref(optimizer), named, others

    def _stored(self) -> int:
        return max((state._stored() for state in self._others), default=0)

    def sync(self) -> None:
        """Copies them from the root to all ranks."""
        optimizer = self._optimizer()
        assert optimizer is not None, "it has this state"
        broadcast_parameters(self._named(), self._root)
        broadcast_optimizer_state(optimizer, self._root)


# The optimizers that skip steps. With two, a new rank would not know in whose step the others are.
_alive: weakref.WeakSet[Voting] = weakref.WeakSet()


def check_is_only_one() -> None:
    """Raises InvalidRequest if this process has such an optimizer already."""
    if len(_alive) > 0:
        gc.collect()  # optimizers are parts of reference cycles
    if len(_alive) > 0:
        raise InvalidRequest(
            "another optimizer with on_loss='skip' exists: a process can only have one, whose "
            "steps are those of the training",
            kind="invalid",
        )


class Voting(Wrapped):
    """The methods of an optimizer that skips the step of a loss."""

    _losses: Patience
    _states: list[State]
    # Whether the ranks have changed since the last ``_heal``.
    _changed: bool

    def _begin_voting(self, losses: Patience, states: list[State]) -> None:
        """Makes the states the same on all ranks."""
        self._losses, self._states = losses, states
        self._changed, self._skipped = True, 0
        _alive.add(self)
        self._heal()
        while losses.lost is not None:
            self._rejoin()
            self._heal()

    @property
    def skipped_steps(self) -> int:
        """The number of steps that this rank has skipped because of a loss."""
        return self._skipped

    # What subclasses define

    def _complete_exchange(self) -> None:
        """Completes the exchange of a step, unless something is lost."""
        raise NotImplementedError

    def _step_now(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the original step with exchanged gradients."""
        raise NotImplementedError

    def _leaves(self) -> bool:
        """Returns whether all ranks leave the epoch after this step, for a wanted change."""
        raise NotImplementedError

    def _healing(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context for the exchange of states."""
        return contextlib.nullcontext()

    # What they share

    def _heal(self) -> None:
        """Gives new ranks the state of an old one, if the ranks have changed."""
        if not self._changed:
            return
        with self._losses.patience(), self._healing():
            for state in self._states:
                state._begin(skip_sync=True)
            self._changed = False

    def _rejoin(self) -> bool | None:
        """Joins the next epoch; returns the outcome of an interrupted vote."""
        lost = self._losses.lost
        rejoined = _epochs.rejoin(None if lost is None else lost._failure)
        self._losses.begin_epoch()
        self._changed = True
        return rejoined.vote

    @without_hooks
    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Makes a step with the exchanged gradients, or none if a rank was lost meanwhile.

        Args:
            closure: Must be None.
            *args: Further arguments of the optimizer's ``step``.
            **kwargs: Further keyword arguments of the optimizer's ``step``.

        Returns:
            The result of the optimizer's ``step``; None if it is skipped.

        Raises:
            InvalidRequest: An argument is invalid. Nothing was started.
            GradwireError: The operation failed; the subclass and ``kind`` tell why.
        """
        if closure is not None:
            raise InvalidRequest(
                "step(closure) can't be used with on_loss='skip': a closure may be called several "
                "times, and after a loss its effects could not be undone",
                kind="invalid",
            )
        return self._voted(lambda: self._step_now(*args, **kwargs))

    def _vote_without_step(self) -> None:
        """Votes as ``step`` does, but makes no step: a scaler has found infinite gradients."""
        self._voted(lambda: None)

    def _voted(self, make: Callable[[], Any]) -> Any:
        """Makes a step, unless a rank was lost meanwhile."""
        self._heal()
        self._complete_exchange()
        cause, result = self._vote(), None
        if cause is None:
            result = make()
        else:
            self._skipped += 1
            _log.warning("skipped a step: %s", cause)
        if self._leaves():
            self._rejoin()
        return result

    def _vote(self) -> GradwireError | None:
        """Agrees with all ranks on whether to make the step; returns why not."""
        if not _world.is_elastic():
            return None
        losses = self._losses
        with losses.patience():
            if losses.lost is None:
                _world.session().vote(True)
        cause = losses.lost
        if cause is None:
            return None
        return None if self._rejoin() else cause

    def _copied_for(self, made: Any, twins: dict[torch.Tensor, torch.Tensor]) -> None:
        raise InvalidRequest(
            "an optimizer with on_loss='skip' can't be copied: a process can only have one",
            kind="invalid",
        )
