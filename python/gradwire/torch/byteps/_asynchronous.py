"""Asynchronous training: ranks don't wait for each other's steps.

Each step changes the parameters of its rank at once. In rounds, a thread sums the differences that
steps have made over all ranks, and adds the sum to the parameters that all ranks agree on. So
parameters = agreed parameters + own differences that are not yet in them.

```
step() ── difference ──► pending ──► flying ── sum over all ranks ──► agreed
```

Every few milliseconds, all ranks exchange a few numbers: whether any rank has a difference, how
many steps each rank has made, and which ranks have finished. If there is a difference, a round
begins. All ranks read the same numbers, so they do the same.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from gradwire import _world
from gradwire._byteps import ASYNC_BOUND
from gradwire._errors import GradwireError, InvalidRequest
from gradwire._ops import Sum
from gradwire._world import rank, size
from gradwire.torch._functions import broadcast_parameters
from gradwire.torch._reduce_ops import allreduce_
from gradwire.torch._wrapping import without_hooks
from gradwire.torch.byteps._flat import flats_of
from gradwire.torch.byteps._stepping import Stepping

# The pause between two exchanges of these numbers.
_INTERVAL_SECONDS = 0.005
# How long a rank that waits for slower ones sleeps between two checks for an error.
_LOOK_SECONDS = 0.1
# Added to the steps of a rank that has finished: nobody waits for it.
_FINISHED = 1 << 40

# Numbers the optimizers, which all ranks make in the same order.
_optimizers = itertools.count()
_running: weakref.WeakSet[Exchange] = weakref.WeakSet()


def bound() -> int:
    """Returns how many steps a rank may be ahead of the slowest one; 0 for any number.

    Raises:
        InvalidRequest: The variable is not a whole number from 0.
    """
    text = os.environ.get(ASYNC_BOUND, "0")
    if not text.isdecimal():
        raise InvalidRequest(
            f"{ASYNC_BOUND}={text}: it must be a whole number, or 0 for any number of steps",
            kind="invalid",
        )
    return int(text)


class Exchange:
    """The exchange of one optimizer's parameters, from the first step until all have finished.

    Args:
        name: The name of the exchange, the same on all ranks.
        named: The trainable parameters and their names, the same on all ranks.
        bound: How many steps a rank may be ahead of the slowest one; 0 for any number.
    """

    def __init__(self, name: str, named: list[tuple[str, torch.Tensor]], bound: int) -> None:
        self._name, self._bound = name, bound
        # Otherwise, ranks with other initial values would differ for ever.
        broadcast_parameters([(f"{self._name}.{name}", each) for name, each in named], 0)
        self._flats = flats_of(each for _, each in named)
        # What the parameters of this rank contained after its last step.
        self._seen = [flat.read() for flat in self._flats]
        self._agreed = [seen.clone() for seen in self._seen]
        self._pending, self._flying = ([flat.zeros() for flat in self._flats] for _ in range(2))
        # Guards everything below and the tensors above.
        self._changed = threading.Condition()
        self._steps, self._sent = 0, 0
        self._slowest = 0
        self._is_new = False
        self._has_finished = False
        self._failure: BaseException | None = None
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gradwire-async", daemon=True)
        self._thread.start()
        _running.add(self)

    def step(self, make: Callable[[], Any]) -> Any:
        """Makes a step of the optimizer, and gives the difference to the thread.

        Returns:
            What ``make`` returns.

        Raises:
            InvalidRequest: The parameters have changed since the last step.
            GradwireError: An exchange has failed.
        """
        self._check()
        for flat, seen in zip(self._flats, self._seen):
            for parameter, part in flat.views(seen):
                if not _same(parameter.detach(), part):
                    raise InvalidRequest(
                        "the parameters have changed between two steps, which asynchronous "
                        "training can't exchange: call optimizer.finish() on all ranks before "
                        "such a change; the next step() begins with the parameters of rank 0",
                        kind="invalid",
                    )
        result = make()
        made = [flat.read() for flat in self._flats]
        with self._changed:
            for pending, after, seen in zip(self._pending, made, self._seen):
                pending += after - seen
            self._seen = made
            self._steps += 1
        self._wake.set()
        self._take_in()
        self._wait_for_slowest()
        return result

    def finish(self) -> None:
        """Waits until all ranks have called it. Then all have the same parameters.

        Raises:
            GradwireError: An exchange has failed.
        """
        with self._changed:
            self._has_finished = True
        self._wake.set()
        while self._thread.is_alive():
            self._thread.join(_LOOK_SECONDS)
        _running.discard(self)
        self._check()
        self._is_new = True
        self._take_in()

    @property
    def has_ended(self) -> bool:
        """Whether all ranks have finished, so that the next step begins another exchange."""
        return self._has_finished and self._failure is None and not self._thread.is_alive()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _take_in(self) -> None:
        """Gives this rank the parameters that all agree on, and its own differences."""
        with self._changed:
            if not self._is_new:
                return
            self._is_new = False
            for at, flat in enumerate(self._flats):
                flat.write(self._agreed[at] + self._pending[at] + self._flying[at])
                # As rounded to the dtype of the parameters.
                self._seen[at] = flat.read()

    def _wait_for_slowest(self) -> None:
        with self._changed:
            while self._bound and self._steps - self._slowest > self._bound:
                self._check()
                self._changed.wait(_LOOK_SECONDS)

    def _run(self) -> None:
        try:
            while self._round():
                self._wake.wait(_INTERVAL_SECONDS)
                self._wake.clear()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _round(self) -> bool:
        """Exchanges the differences, if there are any. Returns False once all have finished."""
        told = torch.zeros(size() + 2, dtype=torch.int64)
        with self._changed:
            told[rank()] = self._steps + _FINISHED * self._has_finished
            told[-2] = self._steps > self._sent
            told[-1] = self._has_finished
        allreduce_(told, name=f"{self._name}.told", op=Sum)
        *steps, having, finished = told.tolist()
        with self._changed:
            self._slowest = min(steps)
            self._changed.notify_all()
        if not having:
            return bool(finished < len(steps))
        with self._changed:
            self._sent = self._steps
            self._flying, self._pending = self._pending, self._flying
            sums = [flying.clone() for flying in self._flying]
        for at, each in enumerate(sums):
            allreduce_(each, name=f"{self._name}.{at}", op=Sum)
        with self._changed:
            for agreed, flying, each in zip(self._agreed, self._flying, sums):
                agreed += each
                flying.zero_()
            self._is_new = True
        return True


def _same(parameter: torch.Tensor, seen: torch.Tensor) -> bool:
    """Returns whether a parameter has these values; NaN equals NaN."""
    own = parameter.to(seen.device, seen.dtype)
    return torch.equal(own, seen) or bool(((own == seen) | ((own != own) & (seen != seen))).all())


class Asynchronous(Stepping):
    """An optimizer whose steps don't wait for other ranks."""

    _name: str
    _named: list[tuple[str, torch.Tensor]]
    _most_ahead: int
    _exchange: Exchange | None = None

    @without_hooks
    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Makes a step of this rank alone, and exchanges the changes in the background.

        The first step waits for all ranks, and begins with the parameters of rank 0.

        Args:
            closure: As for the original optimizer.
            *args: Further arguments of its ``step``.
            **kwargs: Further arguments of its ``step``.

        Returns:
            What the original ``step`` returns.

        Raises:
            InvalidRequest: The parameters have changed since the last step.
            GradwireError: An exchange has failed; the subclass and ``kind`` tell why.
        """
        self._check_parameters()
        exchange = self._begun()
        _world.note_step()
        return exchange.step(lambda: self._original_step(closure, *args, **kwargs))

    def finish(self) -> None:
        """Waits until all ranks have called it. Then all have the same parameters.

        ``shutdown()`` and the end of the program call it. After another ``step()`` it must be
        called again.

        Raises:
            GradwireError: An exchange has failed; the subclass and ``kind`` tell why.

        Example:
            ```python
            optimizer.finish()
            if bps.rank() == 0:
                torch.save(model.state_dict(), "model.pt")
            ```
        """
        self._begun().finish()

    def _begun(self) -> Exchange:
        _world.session()  # raises in a forked child and after shutdown()
        if self._exchange is None or self._exchange.has_ended:
            self._exchange = Exchange(self._name, self._named, self._most_ahead)
        return self._exchange

    def _copied_for(self, made: Any, twins: dict[torch.Tensor, torch.Tensor]) -> None:
        begin(made, [(name, twins[each]) for name, each in self._named], self._most_ahead)


def begin(made: Any, named: list[tuple[str, torch.Tensor]], most_ahead: int) -> None:
    """Sets the attributes of a wrapped optimizer. Nothing is exchanged before the first step."""
    made._name = f"byteps.async.{next(_optimizers)}"
    made._named = [(name, each) for name, each in named if each.requires_grad]
    made._known = {each for _, each in named}
    made._most_ahead = most_ahead


def _finish_all() -> None:
    """Finishes at the end of the program; a failure is reported by the end of the session."""
    for exchange in list(_running):
        try:
            exchange.finish()
        except GradwireError:
            return


# Before the other callbacks, which may end what the exchange needs.
_world.before_shutdown.insert(0, _finish_all)
