"""The agreement of the ranks, before a step, on what each of them contributes.

Each rank contributes a word of bits for each parameter, in the order of the names, behind a word
for the optimizer. It receives the union of all ranks' words. This is one small allreduce, which
runs concurrently with the submitted gradients. Then all ranks decide alike, from the union alone:

- If any rank has a gradient of its own, all exchange it; ranks without one contribute zeros. If no
  rank has one, as after ``synchronize``, nothing is exchanged.
- If only some ranks have a gradient that a step would see (of zeros, or an earlier result), all
  exchange it as well: with weight decay or momentum, zeros differ from no gradient.
- If the union has a problem, such as a gradient that one rank dropped during its exchange, all
  ranks raise the same error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

import torch

from gradwire import _native
from gradwire._errors import InvalidRequest
from gradwire._process_sets import ProcessSet, native_set
from gradwire._staging import session
from gradwire.torch._adapter import as_tensor
from gradwire.torch._resumable import Waits

# What a rank reports about a parameter.
USED = 1 << 0  # this rank has a gradient of its own, or one in flight
LEARNS = 1 << 1  # steps change it
FROZEN = 1 << 2  # it requires no gradient, or has left the optimizer's groups
DENSE = 1 << 3  # its gradients are exchanged as dense ones
SPARSE = 1 << 4  # this rank's gradient is sparse, and has not been exchanged before
ALWAYS_SPARSE = 1 << 5  # its gradients are exchanged as sparse ones
WRITTEN = 1 << 6  # the program has written to the result of the last exchange
_SPARSE_DIM = 8  # the first of eight bits, one of which is the number of sparse dimensions
_MARK = 16  # sixteen bits of the layout, and sixteen of its complement
_MARK_BITS = 16
PRESENT = 1 << 48  # a step would see a gradient here, possibly of zeros
LACKS = 1 << 49  # a step would see none
CHANGED = 1 << 50  # in flight, but the program has written to it or replaced it
DROPPED = 1 << 51  # in flight, but the program has dropped it
# For sums only, because a result must not be summed again:
COMMON = 1 << 52  # it is an unchanged result
ADDED = 1 << 53  # a backward pass has added to a result, which was set aside
FRESH = 1 << 54  # it contains no result
IN_FLIGHT = 1 << 55  # this rank has submitted it in the backward pass
# Set in a settled union: an unchanged result counts as a gradient of the rank.
AS_OWN = 1 << 56
REPLACED = 1 << 57  # the program has replaced the result since its exchange
MIXED = 1 << 58  # for sums only: a backward pass has added to what has replaced the result
STEPPED = 1 << 59  # the last step has seen a gradient here
NOT_STEPPED = 1 << 60  # the last step has seen none
STEPPED_RESULT = 1 << 61  # the last step has seen the result of the exchange
STEPPED_OTHER = 1 << 62  # the last step has seen what the program has set instead of it

# What a rank reports about the optimizer.
NEW = 1 << 0  # it has no number yet
FAILED = 1 << 1  # this rank raises an exception instead
_CALL = 2  # the first of three bits, one of which is the call that needs the gradients
FIRST = 1 << 5  # it exchanges new gradients
AGAIN = 1 << 6  # it meets ranks again whose calls differed from its own
LEAVES = 1 << 7  # the launcher has told this rank that the ranks will change
HOLDS = 1 << 8  # it makes a step with the results of the last exchange
DROPS = 1 << 9  # it has new gradients instead of a step with those results
_STEPS = 48  # four bits of the number of steps since the last agreement, and of its complement
_STEPS_BITS = 4
LOSS = 1 << 56  # its closure has returned a loss
NO_LOSS = 1 << 57  # its closure has returned none


# How much of the text of an exception other ranks get.
_MAX_TEXT = 500
_RECOVER = (
    "so the parameters may differ: copy parameters and optimizer to all ranks "
    "(broadcast_parameters and broadcast_optimizer_state), or start again from a checkpoint"
)


class Call(IntEnum):
    """A call that needs exchanged gradients."""

    NONE = 0
    READ = 1  # an access to the parameters of a group
    SYNCHRONIZE = 2
    STEP = 3

    @property
    def bits(self) -> int:
        """The bits in the word about the optimizer, so that a union has those of all calls."""
        return (1 << self >> 1) << _CALL


def last_call(word: int) -> Call:
    """Returns the last of the calls that ranks have met in, from a union."""
    return Call((word >> _CALL & 0b111).bit_length())


def first_call(word: int) -> Call:
    """Returns the first of the calls that ranks have met in, from a union."""
    calls = word >> _CALL & 0b111
    return Call((calls & -calls).bit_length())


def steps_bits(steps: int | None) -> int:
    """Returns the bits for a number of steps; none if it is unknown."""
    return 0 if steps is None else _with_complement(steps, _STEPS_BITS) << _STEPS


def steps_differ(word: int) -> bool:
    """Returns whether a union contains different numbers of steps."""
    return _differ(word >> _STEPS, _STEPS_BITS)


def _with_complement(value: int, bits: int) -> int:
    """Returns the low bits of a value and their complement: a union shows whether values differ."""
    low = (1 << bits) - 1
    return value & low | (~value & low) << bits


def _differ(word: int, bits: int) -> bool:
    """Returns whether a union contains the bits of different values."""
    return word & word >> bits & (1 << bits) - 1 != 0


def sparse_dim_bits(sparse_dim: int) -> int:
    """Returns the bit for this number of sparse dimensions."""
    return 1 << (_SPARSE_DIM + min(sparse_dim, 8) - 1)


def sparse_dim_of(word: int) -> int:
    """Returns the largest number of sparse dimensions in a word."""
    return max(((word >> _SPARSE_DIM) & 0xFF).bit_length(), 1)


def mark_bits(mark: int) -> int:
    """Returns the bits for a mark of 16 bits. A union shows whether marks differ."""
    return _with_complement(mark, _MARK_BITS) << _MARK


def marks_differ(word: int) -> bool:
    """Returns whether a union contains different marks."""
    return _differ(word >> _MARK, _MARK_BITS)


def settled(word: int) -> int:
    """Returns a union with the bits that follow from it: ``USED`` and ``AS_OWN``."""
    if word & PRESENT and word & LACKS:
        word |= USED
    if word & USED and word & COMMON and word & FRESH:
        word |= AS_OWN
    return word


def error_of(name: str, word: int, layout: object) -> Exception | None:
    """Returns the error that all ranks raise for a settled union.

    Args:
        name: The name of the parameter.
        word: The union.
        layout: The layout of the parameter on this rank.
    """
    if word & DENSE and marks_differ(word):
        return InvalidRequest(
            f"the gradient of {name} has a different dtype or different strides on some ranks "
            f"than on others (here {layout}): give the parameter the same memory format on all "
            "ranks",
            kind="invalid",
        )
    if word & LEARNS and word & FROZEN:
        return InvalidRequest(
            f"{name} requires a gradient only on some ranks, or only some have it in param_groups: "
            "freeze, unfreeze or remove it on all ranks",
            kind="invalid",
        )
    if word & CHANGED:
        return AssertionError(
            f"the gradient of {name} was changed while it was being exchanged, on this rank or "
            "another: after the backward pass, call optimizer.synchronize() before clipping, "
            "scaling or replacing gradients; and leave out DDP and other exchanges of gradients"
        )
    if word & DROPPED and word & PRESENT:
        return AssertionError(
            f"the gradient of {name} was dropped while it was being exchanged, but only on some "
            "ranks: after the backward pass, call optimizer.synchronize(), and drop it on all ranks"
        )
    if word & MIXED:
        return AssertionError(
            f"a backward pass has added to the gradient of {name}, which was replaced after "
            "synchronize() and may be a sum: write to it in place, or clear it before"
        )
    if word & USED and word & ADDED and word & (FRESH | WRITTEN):
        return AssertionError(
            f"only some ranks have cleared or written the gradient of {name} before the backward "
            "pass, while others have added to the last sum: clear it on all ranks"
        )
    return None


def refusal(about: int, turn: int) -> str | None:
    """Returns why all ranks refuse the step, from the union about the optimizer; None to go on.

    Args:
        about: The union.
        turn: ``FIRST`` or ``AGAIN``, as this rank has reported.
    """
    closures = about & (LOSS | NO_LOSS)
    if about & (FIRST | AGAIN) != turn:
        return (
            "the ranks make different calls of the optimizer: call synchronize(), step() and "
            "skip_synchronize() on all ranks"
        )
    if closures and last_call(about) is Call.STEP:
        return "only some ranks call step() with a closure: pass one on all ranks or on none"
    if closures == LOSS | NO_LOSS:
        return (
            "the closure has returned a loss only on some ranks: return a number on all ranks, for "
            "example a zero for an empty batch"
        )
    return None


def description(problem: BaseException | None) -> str | None:
    """Returns the text of an exception for other ranks; None if there is none."""
    if problem is None:
        return None
    text = str(problem)
    cut = f"{text[:_MAX_TEXT]}…" if len(text) > _MAX_TEXT else text
    return f"{type(problem).__name__}: {cut}"


def not_taking_part(told: Sequence[tuple[int, str | None]]) -> str:
    """Returns the text of the error that ranks can't take part in a step.

    Args:
        told: Each rank and the description of its exception; None if it takes part.
    """
    problem = next(text for _, text in told if text is not None)
    which = ", ".join(str(rank) for rank, text in told if text == problem)
    return f"rank {which} can't take part in the step: {problem}"


def steps_missing(told: Sequence[tuple[int, int | None]]) -> str:
    """Returns the text of the error that ranks have made different numbers of steps.

    Args:
        told: Each rank and its number of steps; None if it is unknown.
    """
    most = max(count for _, count in told if count is not None)
    behind = ", ".join(str(rank) for rank, count in told if count not in (most, None))
    return (
        f"rank {behind} has not completed the last step that other ranks have made, perhaps "
        f"because of an exception in it or in a hook, {_RECOVER}"
    )


def stepped_differently(name: str) -> str:
    """Returns the text of the error that only some ranks have made a step with a gradient."""
    return (
        f"only some ranks had a gradient of {name} in the last step, because it was dropped or set "
        f"after its exchange, before skip_synchronize() or in a hook, {_RECOVER}"
    )


def stepped_with_another(name: str) -> str:
    """Returns the text of the error that only some ranks have replaced a result before a step."""
    return (
        f"only some ranks have set the gradient of {name} to another tensor for the last step, "
        f"after its exchange, before skip_synchronize() or in a hook, {_RECOVER}"
    )


def step_left_out(told: Sequence[tuple[int, tuple[bool, bool]]]) -> str:
    """Returns the text of the error that only some ranks make a step after ``synchronize``.

    Args:
        told: Each rank, whether it makes the step, and whether it has new gradients instead.
    """
    steps = ", ".join(str(rank) for rank, (holds, _) in told if holds)
    without = ", ".join(str(rank) for rank, (_, drops) in told if drops)
    return (
        f"rank {without} has cleared the results of synchronize() and computed other gradients, "
        f"and rank {steps} calls step() with these results: make each step on all ranks or on none"
    )


def goes_with_its_group(word: int) -> bool:
    """Returns whether a gradient is in the request of its group, from a union."""
    return bool(word & IN_FLIGHT) or word & (LEARNS | FROZEN) == LEARNS


def had_other_options(what: str) -> Exception:
    """Returns the error that ranks have made the last step with different options.

    Args:
        what: The difference.
    """
    return AssertionError(f"in the last step, {what}, {_RECOVER}")


def deleted(ranks: Sequence[int]) -> str:
    """Returns the text of the error that ranks have deleted an optimizer others still use."""
    which = ", ".join(str(rank) for rank in ranks)
    return (
        f"rank {which} has deleted its optimizer while gradients were being exchanged, and uses "
        "another one with the same parameter names: clear all gradients and go on, or call "
        "synchronize() before on all ranks"
    )


def disagree(error: str) -> InvalidRequest:
    """Returns an error about optimizers that differ between the ranks."""
    return InvalidRequest(error, kind="invalid")


class Agreement:
    """Exchanges words under one name."""

    def __init__(self, process_set: ProcessSet, priority: int) -> None:
        self.process_set, self.priority = process_set, priority
        # None during an exchange: the memory of an abandoned one is not used again.
        self._memory: tuple[_native.Buffer, torch.Tensor] | None = None

    def forget(self) -> None:
        """Drops the memory of an ended session."""
        self._memory = None

    def exchange(self, name: str, words: Iterable[int]) -> Waits[list[int]]:
        """Exchanges the words; returns the union of all ranks' words."""
        own = torch.tensor(list(words), dtype=torch.int64, device="cpu")
        memory, self._memory = self._memory, None
        if memory is None or memory[1].numel() != own.numel():
            buffer = session().buffer("i64", [own.numel()])
            memory = buffer, as_tensor(buffer)
        memory[1].copy_(own)
        handle = session().allreduce(
            [memory[0]],
            "bit-or",
            name=name,
            priority=self.priority,
            process_set=native_set(self.process_set),
        )
        yield handle.wait
        self._memory = memory
        return memory[1].tolist()
