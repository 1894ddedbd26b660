"""Steps that are skipped after a loss: ``DistributedOptimizer(..., on_loss="skip")``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from gradwire.elastic import State
from gradwire.torch import _agreement
from gradwire.torch._agreement import Call
from gradwire.torch._gradients import Exchange
from gradwire.torch._slots import Slot
from gradwire.torch._stepping import Distributed
from gradwire.torch._voting import OwnState, Patience, Voting, check_is_only_one, wants_change


class PatientExchange(Patience, Exchange):
    """An exchange that notes the first loss instead of raising it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Whether any rank knows of a change that the launcher wants.
        self.leaves = False
        super().__init__(*args, **kwargs)

    def begin_epoch(self) -> None:
        """Continues with the ranks of the next epoch."""
        super().begin_epoch()
        self.leaves = False

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
        self.leaves = self.leaves or wants_change()
        return _agreement.LEAVES if self.leaves else 0

    def _learn(self, about: int) -> None:
        self.leaves = bool(about & _agreement.LEAVES)


class Skipping(Voting, Distributed):
    """The methods of a distributed optimizer that skips the step of a loss."""

    _exchange: PatientExchange

    def _begin_with(self, exchange: PatientExchange, state: State | None) -> None:
        """Makes it distributed, and makes its state the same on all ranks."""
        check_is_only_one()
        self._begin(exchange)
        states = [] if state is None else [state]
        own = OwnState(
            self,
            lambda: [(slot.name, parameter) for parameter, slot in exchange.slots.items()],
            states,
        )
        self._begin_voting(exchange, [own, *states])

    def _healing(self) -> contextlib.AbstractContextManager[Any]:
        return self._without_waiting()

    def _complete_exchange(self) -> None:
        self._finish_for_step()
        self._exchange.compare()

    def _compare(self) -> None:
        """Does nothing: the gradients were compared before the vote on the step."""

    def _step_now(self, *args: Any, **kwargs: Any) -> Any:
        return self._step_with_results(None, *args, **kwargs)

    def _leaves(self) -> bool:
        return self._exchange.leaves or (not self._exchange.takes_part() and wants_change())
