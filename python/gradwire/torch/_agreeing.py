"""The agreement of an optimizer's ranks before a step: what this rank reports, and what follows.

``_agreement`` defines the words and decides what a union means; ``_words`` makes the word about a
gradient. The words include what one rank alone has done to a gradient since the backward pass, so
all ranks get the same result or the same error. Before an error, the ranks complete the exchanges
that they have started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from gradwire import _process_sets, _world
from gradwire._objects import start_allgather
from gradwire.torch import _agreement, _checks, _options
from gradwire.torch._agreement import Call
from gradwire.torch._flights import Flights
from gradwire.torch._functions import copies
from gradwire.torch._gradient_state import Content
from gradwire.torch._options import OptionsOf
from gradwire.torch._resumable import Waits
from gradwire.torch._slots import Slot
from gradwire.torch._spans import overlapping, spans_of
from gradwire.torch._words import stepped_bits, word_in_flight, word_of

# Exceptions that an exchange may raise, also from code of the program such as compressors.
ERRORS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_SAME_OPTIONS = "Set it to the same value on all ranks before the step"


def number_of(loss: Any) -> torch.Tensor | None:
    """Returns a closure's loss as a scalar of float64; None if it is not a number.

    A number is anything that ``float`` accepts: an optimizer can use it for decisions. The ranks
    may return different kinds of numbers.
    """
    if isinstance(loss, torch.Tensor):
        if loss.numel() != 1 or loss.is_complex():
            return None
        return loss.detach().to(torch.float64).reshape(())
    try:
        value = float(loss.item() if hasattr(loss, "item") else loss)  # NumPy has ``item``
    except (TypeError, ValueError, OverflowError):
        return None
    return torch.tensor(value, dtype=torch.float64, device="cpu")


class Agreeing(Flights):
    """The agreement of one optimizer's ranks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # The steps made since the last agreement, which are the same on all ranks, and the number
        # of joins at that time; None if the number is unknown.
        self._steps: int | None = None
        self._joins = 0
        # Whether the last of these steps has noted which gradients it sees, and ``copies()`` at
        # that time.
        self._has_looked, self._copies = False, 0
        # Whether an exchange has ended since the last step, and whether the program has cleared its
        # results and computed new gradients.
        self._is_unstepped = self._drops = False
        # Whether all ranks know the error that the present exchange raises.
        self.is_told = False
        # What this rank reports about the loss of its closure.
        self._loss = 0
        # The options of the optimizer, which sets this.
        self.options: OptionsOf
        # The options of the last step and their word, if the ranks did not agree in that step.
        self._stepped_with: tuple[list[dict[str, str]], int] | None = None
        super().__init__(*args, **kwargs)

    @property
    def exchanged(self) -> bool:
        """Whether all gradients have been exchanged, without a step since."""
        return all(slot.exchanged for slot in self.slots.values())

    def _begin(self, *args: Any) -> None:
        self._steps = self._stepped_with = None
        self._is_unstepped = self._drops = False
        super()._begin(*args)

    def _agree(
        self, call: Call, check: Callable[[], None], again: bool
    ) -> Waits[tuple[int, dict[Slot, int]]]:
        """Exchanges words; returns the union about the optimizer, and settled ones of gradients.

        ``again``: the ranks have met before, in different calls.
        """
        self.is_told = False
        if not self.identity.is_introduced:
            self.is_torn = self.is_exchanging = True
        yield from self.identity.introduce()
        turn = _agreement.AGAIN if again else _agreement.FIRST
        steps = self._steps_since(_process_sets.joins[tuple(self.process_set.ranks)])
        about = self.identity.mark | call.bits | turn | _agreement.steps_bits(steps)
        about |= self._remark() | self._loss
        holds = call is Call.STEP and self._is_unstepped and not self.fired
        holds = holds and any(slot.holds_result for slot in self._by_name)
        drops = self._drops and self.fired
        about |= (_agreement.HOLDS if holds else 0) | (_agreement.DROPS if drops else 0)
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
            own = [about, self._word_of_options(call), self._word_of_last_options()]
            own += [
                word_of(slot, self.op, again) | self._stepped_bits(slot) for slot in self._by_name
            ]
        except ERRORS as error:
            # TELL: the other ranks would wait for this one. After any other exception, such as one
            # of a signal handler, this rank may make the call again.
            problem, about = error, about | _agreement.FAILED
            own = [about, 0, 0, *(word_in_flight(slot) for slot in self._by_name)]
        self._steps = None  # unknown if the exchange fails
        self.is_torn = self.is_exchanging = True
        about, options, last_options, *unions = yield from self._agreement.exchange(
            self.identity.agreement, own
        )
        self._steps, self.is_told = 0, problem is not None
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
        if about & _agreement.FAILED:
            told = yield from self._told(_agreement.description(problem), "failures")
            refusal = _agreement.not_taking_part(told)
        elif refusal is None and about & _agreement.HOLDS and about & _agreement.DROPS:
            told = yield from self._told((holds, drops), "steps")
            refusal = _agreement.step_left_out(told)
        if refusal is not None:
            difference: Exception | None = _agreement.disagree(refusal)
        else:
            difference = yield from self._difference(about, words, steps)
            if difference is None:
                difference = yield from self._difference_of_options(options, last_options)
        if difference is not None:
            yield from self._end_flights(words)
            raise problem or difference
        words = {slot: _agreement.settled(word) for slot, word in words.items()}
        yield from self._compare_replaced(words)
        return about, words

    def _word_of_options(self, call: Call) -> int:
        """Returns a word of the optimizer's options; 0 if they are not compared.

        Until ``step``, a program may change options on one rank earlier than on others. Horovod
        scripts may make a first step with any options, so that there is a state to broadcast.
        """
        makes_step = self._exchanges > 0 and (call is Call.STEP or self._loss)
        if not makes_step or not self._compares_options:
            return 0
        return self.options.word(self.options.values())

    def note_options(self) -> None:
        """Notes the options of a step in which the ranks do not agree: they are compared later."""
        if self._exchanges > 1 and self.takes_part() and self._compares_options:
            values = self.options.values()
            self._stepped_with = values, self.options.word(values)

    @property
    def _compares_options(self) -> bool:
        return _world.session().check_gradients != "never"

    def _word_of_last_options(self) -> int:
        return 0 if self._stepped_with is None else self._stepped_with[1]

    def _stepped_bits(self, slot: Slot) -> int:
        """Returns the bits for what the last step has seen of a gradient, if there was a step."""
        if not self._steps or not self._has_looked or not slot.is_listed:
            return 0
        if self._copies != copies():
            return 0  # perhaps each rank makes the step for some of the parameters, and copies them
        return slot.stepped

    def _difference(
        self, about: int, words: dict[Slot, int], steps: int | None
    ) -> Waits[Exception | None]:
        """Returns the error of ranks whose last steps were different; None if equal."""
        if _agreement.steps_differ(about):
            told = yield from self._told(steps, "steps")
            return AssertionError(_agreement.steps_missing(told))
        for slot, word in words.items():
            if word & _agreement.STEPPED and word & _agreement.NOT_STEPPED:
                return AssertionError(_agreement.stepped_differently(slot.name))
            if word & _agreement.STEPPED_RESULT and word & _agreement.STEPPED_OTHER:
                return AssertionError(_agreement.stepped_with_another(slot.name))
        return None

    def _difference_of_options(self, options: int, last_options: int) -> Waits[Exception | None]:
        """Returns the error of ranks whose steps have other options; None if they are equal."""
        stepped_with, self._stepped_with = self._stepped_with, None
        if _checks.differ(last_options):
            own = self.options.with_names(stepped_with[0] if stepped_with else [])
            told = yield from self._told(own, "options")
            text = _options.difference(told)
            return None if text is None else _agreement.had_other_options(text)
        if _checks.differ(options):
            own = self.options.with_names(self.options.values())
            told = yield from self._told(own, "options")
            text = _options.difference(told)
            return None if text is None else _agreement.disagree(f"{text}. {_SAME_OPTIONS}")
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
        for first, slot in overlapping(spans_of((*flying, *rest))):
            if slot.in_flight:
                continue
            if first.in_flight and first.in_place(first.parameter.grad):
                raise AssertionError(
                    f"the gradient of {slot.name} was set to that of {first.name} or to a part of "
                    "it, which is being exchanged: set it to a copy, or before the backward pass"
                )
            slot.copy_gradient()

    def _steps_since(self, joins: int) -> int | None:
        """Returns the number of steps since the last agreement, if all ranks took part in it.

        ``joins``: the number of joins. Ranks that had joined need not have made the steps, so after
        another join, the number is unknown.
        """
        if joins != self._joins:
            self._joins, self._steps = joins, None
        return self._steps

    def _told(self, own: Any, what: str) -> Waits[list[tuple[int, Any]]]:
        """Sends a fact about this rank to all, for an error; returns each rank with its fact."""
        told: list[tuple[int, Any]] = yield start_allgather(
            (_world.rank(), own), f"{self.identity.prefix}{what}", self.process_set
        )
        return told

    def _remark(self) -> int:
        """Returns further bits for the word about the optimizer."""
        return 0

    def _learn(self, about: int) -> None:
        """Receives the union of the words about the optimizer."""

    def _end_flights_of_deleted(
        self, sent: dict[int, list[str]], words: dict[Slot, int]
    ) -> Waits[None]:
        """Completes exchanges that ranks have started with optimizers deleted since.

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

    @contextmanager
    def closure(self, loss: Any) -> Iterator[None]:
        """Returns a context in which the ranks agree on whether their closures return a loss."""
        self._loss = _agreement.NO_LOSS if number_of(loss) is None else _agreement.LOSS
        try:
            yield
        finally:
            self._loss = 0

    def begin_step(self) -> None:
        """Records that a step begins, which has not noted yet which gradients it sees."""
        self._has_looked = False

    def look(self, *_: Any) -> None:
        """Notes which gradients a step sees, after the program's hooks."""
        self._has_looked, self._copies = True, copies()
        for slot in self.slots.values():
            slot.stepped = stepped_bits(slot)

    def end_step(self, complete: bool) -> None:
        """Records that a step has ended.

        Args:
            complete: Whether the optimizer has made it, without an exception.
        """
        if complete and self._steps is not None:
            self._steps += 1
        self._is_unstepped = self._drops = False
