"""The exchange of an optimizer's gradients.

Gradients are submitted during the backward pass (``_backward``). Before a step (``finish``), the
ranks agree on what each of them brings (``_agreement``), submit the gradients that only other ranks
have computed, and wait for all. What one rank alone has done to a gradient since the backward pass
is part of the agreement, so all ranks get the same result or the same error. A wait that an
exception of the program interrupts, such as Ctrl-C, goes on in the next ``finish``.

    idle -- a backward pass --> fired -- the last of its passes --> submitted -- finish --> idle
                                  └--------------- finish ------------┘                (exchanged)

No rank decides alone that there is nothing to exchange: in every ``synchronize`` and every
``step``, all ranks agree, even if they exchange nothing. When a program reads the parameters of a
group, only ranks with gradients in flight do. So ranks may meet in different calls (``Call``). Then
those in a later call stay there until the others have come to it, which may not have changed their
gradients meanwhile: one rank alone may read them, but not clip them. A rank that stays can't come
to other optimizers, whose parameters the others may read next, so all exchange their gradients
first.

A ``Slot`` of ``_slots`` describes one gradient: its memory, content and passes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch

from gradwire import _world
from gradwire._objects import start_allgather
from gradwire._ops import Sum
from gradwire._staging import session
from gradwire._world import members, native_set
from gradwire.torch import _absent, _agreement, _checks, _left, _options, _parts
from gradwire.torch._adapter import collectives
from gradwire.torch._agreement import Call
from gradwire.torch._backward import Submissions
from gradwire.torch._batches import Stores
from gradwire.torch._functions import copies
from gradwire.torch._handles import Waiting
from gradwire.torch._options import Options
from gradwire.torch._places import layout_of
from gradwire.torch._resumable import Resumable, Waits
from gradwire.torch._slots import Content, Kind, Slot
from gradwire.torch._words import was_changed, word_in_flight, word_of

# The exchanges of all optimizers of this process.
_exchanges: weakref.WeakSet[Exchange] = weakref.WeakSet()


def _number(loss: Any) -> torch.Tensor | None:
    """Returns a closure's loss as a tensor; None if it is not a number."""
    if isinstance(loss, float):
        return torch.tensor(loss, dtype=torch.float64, device="cpu")
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss
    return None


class Exchange(Submissions):
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
        # The steps made since the last agreement, which are the same on all ranks, and the number
        # of joins at that time; None if the number is unknown.
        self._steps: int | None = None
        self._joins = 0
        # Whether the last of these steps has noted which gradients it sees, and ``copies`` then.
        self._has_looked, self._copies = False, 0
        # What this rank reports about the loss of its closure.
        self._loss = 0
        # Returns the options of the optimizer's groups.
        self.options: Callable[[], Options] = list
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
    def exchanged(self) -> bool:
        """Whether all gradients have been exchanged, without a step since."""
        return all(slot.exchanged for slot in self.slots.values())

    @property
    def is_due(self) -> bool:
        """Whether a gradient has had all its backward passes, so that a step is next."""
        if self.in_flight:
            return True
        return (
            self.fired and _world.is_rank() and any(slot.delay == 0 for slot in self.slots.values())
        )

    # The step

    def _agree(
        self, call: Call, check: Callable[[], None], again: bool
    ) -> Waits[tuple[int, dict[Slot, int]]]:
        """Exchanges the words; returns the union about the optimizer, and the settled ones.

        ``again``: the ranks have met before, in different calls.
        """
        yield from self.identity.introduce()
        turn = _agreement.AGAIN if again else _agreement.FIRST
        steps = self._steps_since(_world.joins[tuple(self.process_set.ranks)])
        about = self.identity.mark | call.bits | turn | _agreement.steps_bits(steps)
        about |= self._remark() | self._loss
        problem: Exception | None = None
        try:
            check()
            self.watch()  # some parameters may require gradients only now
            if again and self.fired:
                raise AssertionError(
                    "gradients were computed after this rank had exchanged those of a step that "
                    "other ranks make: call synchronize() on all ranks or on none"
                )
            self._separate()
            own = [about, self._word_of_options(call)]
            own += [
                word_of(slot, self.op, again) | self._stepped_bits(slot) for slot in self._by_name
            ]
        except Exception as error:
            # TELL: the other ranks would wait for this one.
            problem, about = error, about | _agreement.FAILED
            own = [about, 0, *(word_in_flight(slot) for slot in self._by_name)]
        self._steps = None  # if it fails
        about, options, *unions = yield from self._agreement.exchange(self.identity.agreement, own)
        self._steps = 0
        if _agreement.marks_differ(about):
            raise problem or _agreement.disagree(self.identity.several())
        self._learn(about)
        words = dict(zip(self._by_name, unions))
        if about & _agreement.NEW:
            sent = yield from self.identity.agree_on_number()
            if sent:
                yield from self._end_flights_of_deleted(sent, words)
                raise problem or AssertionError(_agreement.deleted(sorted(sent)))
        refusal = _agreement.refusal(about, turn)
        if refusal is not None:
            difference: Exception | None = _agreement.disagree(refusal)
        else:
            difference = yield from self._difference(about, options, words, steps)
        if difference is not None:
            yield from self._end_flights(words)
            raise problem or difference
        words = {slot: _agreement.settled(word) for slot, word in words.items()}
        yield from self._compare_replaced(words)
        return about, words

    def _word_of_options(self, call: Call) -> int:
        """Returns a word of the optimizer's options; 0 if they are not compared.

        Programs may change them on one rank before others until ``step``.
        """
        makes_step = call is Call.STEP or self._loss
        return _options.word(self.options()) if makes_step and self._checks_values else 0

    def _stepped_bits(self, slot: Slot) -> int:
        """Returns whether the last step has seen a gradient, if there was one."""
        if not self._steps or not self._has_looked or not slot.is_listed:
            return 0
        if self._copies != copies():
            return 0  # as if each rank makes the step for some of the parameters
        return _agreement.STEPPED if slot.stepped else _agreement.NOT_STEPPED

    def _difference(
        self, about: int, options: int, words: dict[Slot, int], steps: int | None
    ) -> Waits[Exception | None]:
        """Returns the error of ranks whose steps were different, or would be; None if equal."""
        if _agreement.steps_differ(about):
            told = yield from self._told(steps, "steps")
            return AssertionError(_agreement.steps_missing(told))
        for slot, word in words.items():
            if word & _agreement.STEPPED and word & _agreement.NOT_STEPPED:
                return AssertionError(_agreement.stepped_differently(slot.name))
        if _checks.differ(options):
            told = yield from self._told(self.options(), "options")
            text = _options.difference(told)
            return None if text is None else _agreement.disagree(text)
        return None

    def _separate(self) -> None:
        """Copies gradients that lie in the memory of another one, as after ``b.grad = a.grad``.

        A place has one result, and other ranks may have two gradients.

        Raises:
            AssertionError: The other one is being exchanged there already.
        """
        rest = [slot for slot in self._by_name if not slot.in_flight and slot.seen is not None]
        if not rest:
            return
        flying = [slot for slot in self.submitted if slot.seen is not None]
        found: dict[int, Slot] = {}
        for slot in (*flying, *rest):
            gradient = slot.parameter.grad
            if gradient is None or gradient.layout != torch.strided or gradient.numel() == 0:
                continue
            other = found.setdefault(gradient.data_ptr(), slot)
            if other is slot or slot.in_flight:
                continue
            if other.in_flight and other.in_place(other.parameter.grad):
                raise AssertionError(
                    f"the gradient of {slot.name} was set to that of {other.name}, which is being "
                    "exchanged: set it to a copy, or before the backward pass"
                )
            slot.parameter.grad = gradient.clone()

    def _steps_since(self, joins: int) -> int | None:
        """Returns the number of steps since the last agreement, if all ranks took part in it.

        ``joins``: the number of joins, so that ranks that had joined need not have made the steps.
        """
        if joins != self._joins:
            self._joins, self._steps = joins, None
        return self._steps

    def _told(self, own: Any, what: str) -> Waits[list[tuple[int, Any]]]:
        """Tells the ranks something about this one, for an error; returns what each has told."""
        told: list[tuple[int, Any]] = yield start_allgather(
            (_world.rank(), own), f"{self.identity.prefix}{what}", self.process_set
        )
        return told

    def _remark(self) -> int:
        """Returns further bits for the word about the optimizer."""
        return 0

    def _learn(self, about: int) -> None:
        """Receives the union of the words about the optimizer."""

    def _end_flights(self, words: dict[Slot, int]) -> Waits[None]:
        """Ends the exchange of what ranks have sent, although no step follows.

        Otherwise, results could arrive in later gradients.
        """
        started = {slot for _, slots in self.handles for slot in slots}
        aside = {
            slot: slot.parameter.grad
            for slot in self.slots.values()
            if slot not in started and slot.sparse is None
        }
        for slot in aside:
            slot.parameter.grad = None  # it need not be one that can be exchanged
        flying = {
            slot: word | _agreement.USED if word & _agreement.IN_FLIGHT else 0
            for slot, word in words.items()
        }
        self._submit_the_rest(flying)
        self._loads.start()
        yield from self._wait()
        for slot, gradient in aside.items():
            slot.parameter.grad = gradient
        for slot in self.slots.values():
            slot.note_content(Content.OWN)  # for a step after this error

    def _end_flights_of_deleted(
        self, sent: dict[int, list[str]], words: dict[Slot, int]
    ) -> Waits[None]:
        """Ends flights that ranks have begun with optimizers that they have deleted since.

        ``sent``: by rank, the names of the gradients that it has sent.
        """
        anywhere, here = {*chain(*sent.values())}, {*sent.get(_world.rank(), ())}
        for slot in self._by_name:
            words[slot] |= _agreement.IN_FLIGHT if slot.name in anywhere else 0
        self._delayed = [each for each in self._delayed if here.isdisjoint(s.name for s in each)]
        self.submitted.update(slot for slot in self._by_name if slot.name in here)
        yield from self._end_flights(words)
        self.identity.release_deleted()

    def _compare_replaced(self, words: dict[Slot, int]) -> Waits[None]:
        """Decides whether gradients that replace results are still the same on all ranks."""
        replaced = [
            slot
            for slot, word in words.items()
            if word & _agreement.REPLACED and not word & _agreement.USED
        ]
        if not replaced:
            return
        own = [_checks.word(slot.parameter.grad) for slot in replaced]
        unions = yield from self._comparison.exchange(f"{self.identity.prefix}replaced", own)
        for slot, union in zip(replaced, unions):
            if _checks.differ(union):
                words[slot] |= _agreement.USED | _agreement.AS_OWN
            else:
                slot.absent = False
                slot.note_content(Content.COMMON)

    def _submit_the_rest(self, words: dict[Slot, int]) -> None:
        """Submits the gradients that any rank has and this rank has not submitted."""
        for slot, word in words.items():
            if slot.kind is None and word & (_agreement.USED | _agreement.ALWAYS_SPARSE):
                dense = word & _agreement.DENSE and not word & _agreement.ALWAYS_SPARSE
                slot.kind = Kind.DENSE if dense else Kind.SPARSE
                slot.sparse_dim = 0 if dense else _agreement.sparse_dim_of(word)
            written = word & _agreement.WRITTEN and not slot.exchanged
            if (written or word & _agreement.AS_OWN) and not slot.fired:
                # On this rank, the program may have written the same value.
                slot.note_content(Content.OWN)
        delayed, self._delayed = self._delayed, []
        for request in delayed:
            for slot in request:
                slot.digest = None
            self._submit(request)
        for request in self._requests:
            # A rank that submitted a group in its backward pass has left out the frozen gradients.
            together = [s for s in request if words[s] & (_agreement.LEARNS | _agreement.IN_FLIGHT)]
            frozen = [[slot] for slot in request if slot not in together]
            for slots in (together, *frozen):
                used = any(words[slot] & _agreement.USED for slot in slots)
                if used and self.submitted.isdisjoint(slots):
                    self._submit(slots)

    def finish(self, call: Call, check: Callable[[], None] = lambda: None) -> None:
        """Submits the remaining gradients that any rank has, and waits for everything.

        If only other ranks used a parameter, this rank contributes zeros. Parameters that no rank
        used stay unchanged.

        Args:
            call: What needs the gradients.
            check: Raises an exception if this rank can't take part; all ranks then raise one.
        """
        if not self.takes_part():
            check()
            native_set(self.process_set)  # raises if it is not registered
            self.contributors = 1
            return
        # A step may run in inference mode, but the gradients belong to the training.
        with torch.inference_mode(False):
            if self._finishing is not None:  # interrupted
                begun = self._finishing[0]
                # The other ranks have not waited for what happened since.
                flying = [slot for _, slots in self.handles for slot in slots]
                self._changed += filter(was_changed, flying)
                self._complete()
                if begun > call:
                    self._ahead = begun
                if begun >= call:
                    return
            if self._ahead < call:
                self._finishing = call, Resumable(self._exchange(call, check))
                self._complete()
            elif self.fired:
                raise AssertionError(
                    "gradients were computed after this rank had exchanged those of a step that "
                    "other ranks have made: call synchronize() on all ranks or on none"
                )
            elif self._ahead == call:
                self._ahead = Call.NONE

    def _complete(self) -> None:
        """Runs ``_finishing`` to its end."""
        assert self._finishing is not None
        work = self._finishing[1]
        try:
            self._awaited = work.run()
        except BaseException:
            if not work.is_waiting:
                self._reset()
            raise
        finally:
            self._loads.start()  # even after a failure: their operations are in flight
        self._finishing, self._ahead = None, Call.NONE
        self.contributors = members(self.process_set)

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
            for slot in self.slots.values():
                slot.exchanged = True
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
        a later call may have computed those that one in a read computes next.
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

    def _wait(self) -> Waits[None]:
        """Waits for the requests and stores their results.

        It raises the first failure after waiting for the others.
        """
        waiting, stores = Waiting(), Stores()
        while self.handles:
            handle, slots = self.handles[0]
            complete = yield partial(waiting.wait, handle)
            for slot in slots if complete else ():
                if slot.must_store:
                    with torch.no_grad():
                        slot.store(self.compression, stores)
                    if slot.parameter.grad is not None:
                        _parts.written(slot.parameter.grad)
            self.handles.pop(0)
        with torch.no_grad():
            stores.start()
        for slot in [slot for slot in self.submitted if slot.sparse is not None]:
            if (yield partial(waiting.wait, slot.sparse)):
                slot.store_sparse()
        waiting.check()

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

        That sees what one rank alone has changed after ``synchronize``.
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

    def _begin(self, *args: Any) -> None:
        self._steps = None
        super()._begin(*args)

    def _reset(self) -> None:
        self._finishing, self._ahead, self._awaited = None, Call.NONE, False
        self._changed.clear()
        super()._reset()

    @contextmanager
    def closure(self, loss: Any) -> Iterator[None]:
        """Returns a context in which the ranks agree on whether their closures return a loss."""
        self._loss = _agreement.NO_LOSS if _number(loss) is None else _agreement.LOSS
        try:
            yield
        finally:
            self._loss = 0

    def loss(self, loss: Any) -> Any:
        """Returns a closure's loss; if it is a number, reduced like the gradients."""
        own = _number(loss)
        if own is None or not self.takes_part():
            return loss
        name = f"{self.identity.prefix}loss"
        reduced = collectives.allreduce(
            own.detach(), name, self.op, *self.scales, self.process_set
        ).wait()
        return reduced.item() if isinstance(loss, float) else reduced

    def copy(self, twins: Mapping[torch.Tensor, torch.Tensor]) -> Exchange:
        """Returns an exchange for copies of the parameters, which lack those removed meanwhile."""
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
        self._has_looked = False
        _absent.hide(self.slots.values())

    def look(self, *_: Any) -> None:
        """Notes which gradients a step sees, after the program's hooks."""
        self._has_looked, self._copies = True, copies()
        for slot in self.slots.values():
            slot.stepped = slot.parameter.grad is not None

    def stepped(self, complete: bool) -> None:
        """Records after a step that the gradients are the exchanged ones.

        Args:
            complete: Whether the optimizer has made the step, without an exception.
        """
        if complete and self._steps is not None:
            self._steps += 1
        self._ahead, self._awaited = Call.NONE, False
        for slot in self.slots.values():
            slot.exchanged = False
            slot.note_content(slot.content)
            may_be_used_again = not slot.computed or self._checks_values
            if self.op == Sum and slot.content is Content.COMMON and may_be_used_again:
                slot.keep()
            slot.computed = False

    def cleared(self, zero_grad: Callable[[], None]) -> None:
        """Clears the gradients with ``zero_grad``; those in shared memory stay there as zeros."""
        if _world.is_rank() and self.takes_part():
            self.watch()
        clear = partial(_absent.clear, self.slots.values(), zero_grad)
        _left.clear(self.slots.values(), clear)
        self._reset()
