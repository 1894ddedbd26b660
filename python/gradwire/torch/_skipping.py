"""Steps that are skipped after a loss: ``DistributedOptimizer(..., on_loss="skip")``.

The unit is the step. Each ends with a vote: if its exchange has failed on any rank, all ranks skip
the step, so their parameters stay equal. Nothing is repeated, and no average contains different
ranks than another one of the same step.

    heal -- backward passes -- exchange -- vote -- yes --> step
                                  └- a loss -┴--> rejoin -- the vote's outcome --> step or none

A loss only becomes known here, in ``step``. Until then, it is noted, and the program continues.

``heal`` gives new ranks the state of an old one. A new rank does this when it makes its optimizer,
the others at the beginning of their next step. So the new rank begins with the step that they are
in.
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
from gradwire.torch import _agreement
from gradwire.torch._agreement import Call
from gradwire.torch._functions import broadcast_optimizer_state, broadcast_parameters
from gradwire.torch._gradients import Exchange
from gradwire.torch._slots import Slot
from gradwire.torch._stepping import Distributed
from gradwire.torch._wrapping import without_hooks

_log = logging.getLogger("gradwire")


class PatientExchange(Exchange):
    """An exchange that notes the first loss instead of raising it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.lost: GradwireError | None = None
        # Whether any rank knows of a change that the launcher wants.
        self.leaves = False
        super().__init__(*args, **kwargs)

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """Notes a loss that is recoverable."""
        try:
            yield
        except GradwireError as error:
            if not error.recoverable:
                raise
            self.lost = self.lost or error

    def begin_epoch(self) -> None:
        """Continues with the ranks of the next epoch."""
        self.lost, self.leaves = None, False

    def before(self, slot: Slot) -> None:
        """Called before a backward pass accumulates a gradient."""
        with self.patience():
            if self.lost is None:
                super().before(slot)

    def ready(self, slot: Slot) -> None:
        """Called when a backward pass has accumulated a gradient."""
        with self.patience():
            if self.lost is None:
                super().ready(slot)

    def finish(self, call: Call, check: Callable[[], None] = lambda: None) -> None:
        """Exchanges the gradients, unless something is lost."""
        with self.patience():
            if self.lost is None:
                super().finish(call, check)

    def compare(self) -> None:
        """Compares the gradients, unless something is lost."""
        with self.patience():
            if self.lost is None:
                super().compare()

    def _remark(self) -> int:
        self.leaves = self.leaves or _wants_change()
        return _agreement.LEAVES if self.leaves else 0

    def _learn(self, about: int) -> None:
        self.leaves = bool(about & _agreement.LEAVES)


def _wants_change() -> bool:
    """Returns whether the launcher has told this rank that the ranks will change."""
    return _world.is_elastic() and _world.session().pending_change() is not None


class _OwnState(State):
    """The parameters and the state of an optimizer."""

    def __init__(self, optimizer: Skipping) -> None:
        super().__init__()
        self._optimizer = weakref.ref(optimizer)

    def sync(self) -> None:
        """Copies them from the root to all ranks."""
        optimizer = self._optimizer()
        assert optimizer is not None, "it has this state"
        named = [(slot.name, parameter) for parameter, slot in optimizer._exchange.slots.items()]
        broadcast_parameters(named, self._root)
        broadcast_optimizer_state(optimizer, self._root)


# The optimizers that skip steps. With two, a new rank would not know in whose step the others are.
_alive: weakref.WeakSet[Skipping] = weakref.WeakSet()


class Skipping(Distributed):
    """The methods of an optimizer that skips the step of a loss."""

    _exchange: PatientExchange
    _states: list[State]
    # Whether the ranks have changed since the last ``_heal``.
    _changed: bool
    _skipped: int

    def _begin_with(self, exchange: PatientExchange, state: State | None) -> None:
        """Makes it distributed, and makes its state the same on all ranks."""
        if len(_alive) > 0:
            gc.collect()  # optimizers are parts of reference cycles
        if len(_alive) > 0:
            raise InvalidRequest(
                "another optimizer with on_loss='skip' exists: a process can only have one, whose "
                "steps are those of the training",
                kind="invalid",
            )
        self._begin(exchange)
        self._states = [_OwnState(self), *([] if state is None else [state])]
        self._changed, self._skipped = True, 0
        _alive.add(self)
        self._heal()
        while exchange.lost is not None:
            self._rejoin()
            self._heal()

    @property
    def skipped_steps(self) -> int:
        """The number of steps that this rank has skipped because of a loss."""
        return self._skipped

    def _heal(self) -> None:
        """Gives new ranks the state of an old one, if the ranks have changed."""
        if not self._changed:
            return
        with self._exchange.patience(), self._without_waiting():
            for state in self._states:
                state._begin(skip_sync=True)
            self._changed = False

    def _rejoin(self) -> bool | None:
        """Joins the next epoch; returns the outcome of an interrupted vote."""
        rejoined = _epochs.rejoin()
        self._exchange.begin_epoch()
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
        exchange = self._exchange
        self._heal()
        if self._should_synchronize:
            self._finish(Call.STEP)
        exchange.compare()
        cause, result = self._vote(), None
        if cause is None:
            result = self._step_with_results(None, *args, **kwargs)
        else:
            self._skipped += 1
            _log.warning("skipped a step: %s", cause)
        if exchange.leaves or (not exchange.takes_part() and _wants_change()):
            self._rejoin()
        return result

    def _vote(self) -> GradwireError | None:
        """Agrees with all ranks on whether to make the step; returns why not."""
        if not _world.is_elastic():
            return None
        exchange = self._exchange
        with exchange.patience():
            if exchange.lost is None:
                _world.session().vote(True)
        cause = exchange.lost
        if cause is None:
            return None
        return None if self._rejoin() else cause

    def _copied_for(self, made: Any, twins: dict[torch.Tensor, torch.Tensor]) -> None:
        raise InvalidRequest(
            "an optimizer with on_loss='skip' can't be copied: a process can only have one",
            kind="invalid",
        )
