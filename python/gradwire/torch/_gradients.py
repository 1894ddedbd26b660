"""The exchange of an optimizer's gradients.

Gradients are submitted during the backward pass (``_backward``). Before a step (``finish``), the
ranks agree on what each of them contributes (``_agreement``), submit the gradients that only other
ranks have computed, and wait for all. The agreement includes what one rank alone has done to a
gradient since the backward pass, so all ranks get the same result or the same error. If an
exception of the program, such as Ctrl-C, interrupts a wait, the next ``finish`` continues it.

    idle -- a backward pass --> fired -- the last of its passes --> submitted -- finish --> idle
                                  └--------------- finish ------------┘                (exchanged)

No rank decides alone that there is nothing to exchange: in every ``synchronize`` and every
``step``, all ranks agree, even if they exchange nothing. When a program reads the parameters of a
group, only ranks with gradients in flight do. So ranks may meet in different calls (``Call``). Then
the ranks in a later call stay there until the others have reached it. The others must not change
their gradients meanwhile: one rank alone may read them, but not clip them. A rank that stays can't
take part in exchanges of other optimizers, whose parameters the others may read next. So all ranks
first exchange the gradients of those optimizers.

A ``Slot`` of ``_slots`` describes one gradient: its memory, content and passes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch

from gradwire import _world
from gradwire._errors import Cancelled
from gradwire._objects import start_allgather
from gradwire._ops import Sum
from gradwire._process_sets import native_set
from gradwire._staging import session
from gradwire._world import members
from gradwire.torch import _absent, _agreement, _checks, _left
from gradwire.torch._adapter import collectives
from gradwire.torch._agreeing import ERRORS, Agreeing, number_of
from gradwire.torch._agreement import Call
from gradwire.torch._gradient_state import Content
from gradwire.torch._places import layout_of
from gradwire.torch._resumable import Resumable, Waits
from gradwire.torch._slots import Slot
from gradwire.torch._words import was_changed

# The exchanges of all optimizers of this process.
_exchanges: weakref.WeakSet[Exchange] = weakref.WeakSet()


class Exchange(Agreeing):
    """The exchange of one optimizer's gradients."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # A call of ``finish`` that is not complete, and the gradients that the program has changed
        # since it was interrupted.
        self._finishing: tuple[Call, Resumable[bool]] | None = None
        self._changed: list[Slot] = []
        # The call of an interrupted exchange that was completed in an earlier call.
        self._ahead = Call.NONE
        # Whether other ranks wait in a later call than the one in which they met this rank.
        self._awaited = False
        # The exception that has interrupted the last exchange elsewhere than in a wait.
        self._interruption = ""
        # The number of ranks in the last exchange.
        self.contributors = 0
        super().__init__(*args, **kwargs)
        _exchanges.add(self)

    @property
    def in_flight(self) -> bool:
        """Whether anything was submitted but not yet waited for, in the current session."""
        if (self.submitted or self._finishing) and _world.is_rank():
            self.takes_part()
            return bool(self.submitted or self._finishing)
        return False

    @property
    def is_due(self) -> bool:
        """Whether a gradient has had all its backward passes, so that a step is next."""
        if self.in_flight:
            return True
        return (
            self.fired and _world.is_rank() and any(slot.delay == 0 for slot in self.slots.values())
        )

    # The step

    def finish(self, call: Call, check: Callable[[], None] = lambda: None) -> None:
        """Submits the remaining gradients that any rank has, and waits for everything.

        If only other ranks used a parameter, this rank contributes zeros. Parameters that no rank
        used stay unchanged.

        Args:
            call: The call that needs the gradients.
            check: Raises an exception if this rank can't take part; all ranks then raise one.
        """
        takes_part = self.takes_part()
        if self.is_torn and self._finishing is None:
            self._break_off()
        if not takes_part:
            check()
            native_set(self.process_set)  # raises if it is not registered
            self.contributors = 1
            return
        # A step may run in inference mode, but the gradients belong to the training.
        with torch.inference_mode(False):
            if self._finishing is not None:  # interrupted
                begun = self._finishing[0]
                # The other ranks did not wait for what the program has changed since.
                flying = [slot for _, slots in self.handles for slot in slots]
                self._changed += filter(was_changed, flying)
                self._complete()
                if begun > call:
                    self._ahead = begun
                if begun >= call:
                    return
            # With other gradients since then, this is another step. If some ranks have made the
            # interrupted one, the agreement tells all of them.
            if self._ahead < call or self.fired:
                self._finishing = call, Resumable(self._exchange(call, check))
                self._complete()
            elif self._ahead == call:
                self._ahead = Call.NONE

    def before(self, slot: Slot) -> None:
        """Called before a backward pass accumulates a gradient, if it is summed."""
        if self._is_unstepped and slot.exchanged and slot.parameter.grad is None:
            self._begin_anew()
        super().before(slot)

    def ready(self, slot: Slot) -> None:
        """Called when a backward pass has accumulated a gradient."""
        if self._finishing is not None and self.in_flight:
            # TELL: the program has dropped an interrupted step, for which the other ranks wait.
            call = self._finishing[0]
            try:
                self.finish(call)
            except AssertionError as error:
                raise AssertionError(
                    f"an exception has interrupted {call.name.lower()}(), and the program has gone "
                    "on with another backward pass: call it again before that, to continue it"
                ) from error
        if self._is_unstepped and slot.is_computed_anew:
            self._begin_anew()
        super().ready(slot)

    def _begin_anew(self) -> None:
        """Records that the program has cleared the results of an exchange without a step."""
        self._drops = True
        for slot in self.slots.values():
            # A gradient that the program has set since is not a changed result.
            slot.exchanged = slot.exchanged and slot.current_content() is Content.COMMON

    def _complete(self) -> None:
        """Runs ``_finishing`` to its end."""
        assert self._finishing is not None
        work = self._finishing[1]
        try:
            self._awaited = work.run()
        except BaseException as error:
            if not work.is_waiting:
                is_own = self.is_told or isinstance(error, ERRORS)
                if is_own or self.is_torn:
                    self._reset()
                else:
                    self._finishing = None  # it has not begun: the next call begins it
                self.is_torn = self.is_torn and not is_own
                self._interruption = f"{type(error).__name__}: {error}"[:200].rstrip(": ")
            raise
        finally:
            self._loads.start()  # even after a failure: their operations are in flight
        self._finishing, self._ahead = None, Call.NONE
        self.is_torn = self.is_exchanging = False
        self.contributors = members(self.process_set)

    def _break_off(self) -> NoReturn:
        """Ends the job on all ranks, because this one can't tell what it has started (TELL)."""
        cause = self._interruption or "perhaps of a signal handler"
        reason = (
            f"an exception ({cause}) has interrupted step() or backward() while this rank started "
            "operations, so it can't go on with the other ranks: end the training after such an "
            "exception"
        )
        _world.abort(reason)
        raise Cancelled(reason, kind="cancelled", rank=_world.rank())

    def _exchange(self, call: Call, check: Callable[[], None]) -> Waits[bool]:
        """Exchanges until all ranks are in this call; returns whether some are in a later one."""
        again = self._awaited
        while True:
            self._loads.start()
            about, words = yield from self._agree(call, check, again)
            self._submit_the_rest(words)
            self._loads.start()
            yield from self._wait()
            for slot in self._changed:
                words[slot] |= _agreement.CHANGED
            self._exchanges += bool(self.submitted)
            self._results(words)
            self._changed.clear()
            super()._reset()
            _absent.hide(self.slots.values(), look=False)
            self._is_unstepped, self._drops = True, False
            for slot in self.slots.values():
                slot.exchanged, slot.has_learned = True, slot.parameter.requires_grad
                if slot.parameter.grad is None:
                    slot.note_content(Content.NOTHING)
            first, last = _agreement.first_call(about), _agreement.last_call(about)
            if first is Call.READ and last > first:
                yield from self._read_others(reads=call is Call.READ)
            if first >= call:
                return last > call
            again = True

    def _read_others(self, reads: bool) -> Waits[None]:
        """Exchanges the gradients that ranks may wait for when they read other parameters.

        ``reads``: whether this rank is in a read. Only then are its other gradients due: a rank in
        a later call may already have computed gradients that a rank in a read computes next.
        """
        others: dict[tuple[int, int], list[Exchange]] = {}
        for other in _exchanges:
            if other is not self and other.process_set == self.process_set:
                others.setdefault(other.identity.key, []).append(other)
        due = [key for key, these in others.items() if reads and any(e.is_due for e in these)]
        told = yield start_allgather(due, f"{self.identity.prefix}others", self.process_set)
        for key in sorted({key for keys in told for key in keys}):
            # Optimizers with equal names have no numbers before their first step.
            if len(others.get(key, ())) == 1:
                yield partial(others[key][0].finish, Call.READ)

    def _results(self, words: dict[Slot, int]) -> None:
        """Records the results; raises the error of the ranks, if a step would be wrong."""
        errors: list[Exception] = []
        for slot in self.submitted:
            word = words[slot]
            # A gradient exchanged with its group may be unused on all ranks.
            used = bool(word & _agreement.USED)
            slot.absent = slot.absent and not used
            if word & _agreement.DROPPED and not word & _agreement.PRESENT:
                slot.parameter.grad = None  # on all ranks
            slot.note_content(Content.COMMON if used else slot.content)
        for slot in self.slots.values():
            word = words[slot]
            error = _agreement.error_of(slot.name, word, layout_of(slot.parameter))
            if error is not None:
                errors.append(error)
                slot.note_content(Content.OWN)  # for a step after this error
        for error in errors:
            raise error

    def compare(self) -> None:
        """With ``checks.gradients=always``, raises if a step's gradients differ between ranks.

        This detects what one rank alone has changed after ``synchronize``, or in a hook of a step.
        """
        if (
            not self.exchanged
            or not self.takes_part()
            or not _checks.compares(session().check_gradients)
        ):
            return
        words = [_checks.word(slot.parameter.grad) for slot in self._by_name]
        name = f"{self.identity.prefix}comparison"
        unions = Resumable(self._comparison.exchange(name, words)).run()
        for slot, union in zip(self._by_name, unions):
            if _checks.differ(union):
                raise AssertionError(
                    f"the ranks would make a step with different gradients of {slot.name}: after "
                    "synchronize(), change gradients in the same way on all ranks"
                )

    def _reset(self) -> None:
        self._finishing, self._ahead, self._awaited = None, Call.NONE, False
        self.is_exchanging = False
        self._changed.clear()
        super()._reset()

    def loss(self, loss: Any) -> Any:
        """Returns a closure's loss; if it is a number, reduced like the gradients.

        A tensor keeps its shape, and its element type if that is a float. Other numbers become a
        float.
        """
        own = number_of(loss)
        if own is None or not self.takes_part():
            return loss
        name = f"{self.identity.prefix}loss"
        reduced = collectives.allreduce(own, name, self.op, *self.scales, self.process_set).wait()
        if not isinstance(loss, torch.Tensor):
            return reduced.item()
        dtype = loss.dtype if loss.is_floating_point() else torch.get_default_dtype()
        return reduced.to(dtype).reshape(loss.shape)

    def copy(self, twins: Mapping[torch.Tensor, torch.Tensor]) -> Exchange:
        """Returns an exchange for copies of the parameters, without those removed meanwhile."""
        return type(self)(
            [(slot.name, twins[p]) for p, slot in self.slots.items() if p in twins],
            [[twins[s.parameter] for s in group if s.parameter in twins] for group in self.groups],
            compression=self.compression,
            passes=self.passes,
            op=self.op,
            predivide=self.predivide,
            sparse_as_dense=self.sparse_as_dense,
            process_set=self.process_set,
        )

    def set_passes(self, passes: int) -> None:
        """Changes the number of accumulated backward passes."""
        if self.in_flight:
            self.finish(Call.READ)
        self.passes = passes
        for slot in self.slots.values():
            slot.delay = passes

    # Around the step, and around what clears gradients

    def hide(self) -> None:
        """Removes zeros that represent no gradient, before a step."""
        self.begin_step()
        _absent.hide(self.slots.values())

    def stepped(self, complete: bool) -> None:
        """Records after a step that the gradients are the exchanged ones.

        Args:
            complete: Whether the optimizer has made the step, without an exception.
        """
        self.end_step(complete)
        self._ahead, self._awaited = Call.NONE, False
        for slot in self.slots.values():
            slot.exchanged = False
            slot.note_content(slot.content)
            may_be_used_again = not slot.computed or self._checks_values or slot.is_beside_its_place
            if self.op == Sum and slot.content is Content.COMMON and may_be_used_again:
                slot.keep()
            slot.computed = False

    def cleared(self, zero_grad: Callable[[], None]) -> None:
        """Clears the gradients with ``zero_grad``; those in shared memory stay there as zeros."""
        if _world.is_initialized() and not _world.is_rank():
            zero_grad()  # a forked child, whose gradients nobody exchanges
            return
        if _world.is_rank() and self.takes_part():
            self.watch()
        clear = partial(_absent.clear, self.slots.values(), zero_grad)
        _left.clear(self.slots.values(), clear)
        self._reset()
        self._drops = self._is_unstepped
