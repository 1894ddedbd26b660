"""This rank's word about a gradient in the agreement of the ranks."""

from __future__ import annotations

from gradwire._ops import Average, ReduceOp, Sum
from gradwire.torch import _agreement, _checks, _left, _parts
from gradwire.torch._adapter import check_own_memory
from gradwire.torch._gradient_state import Content, Kind
from gradwire.torch._places import layout_of
from gradwire.torch._slots import Slot


def word_of(slot: Slot, op: ReduceOp, again: bool = False) -> int:
    """Returns this rank's word.

    Args:
        slot: The gradient.
        op: The reduction.
        again: Whether other ranks need the results as they were exchanged.

    Raises:
        InvalidRequest: The gradient has no memory of its own.
        AssertionError: The gradient was resized or spoiled, or may contain the last result.
    """
    word = _agreement.LEARNS if slot.learns else _agreement.FROZEN
    gradient = slot.parameter.grad
    if gradient is not None:
        check_own_memory(gradient)
        if gradient.shape != slot.parameter.shape:
            raise AssertionError(
                f"the gradient of {slot.name} has the shape {list(gradient.shape)}, but the "
                f"parameter {list(slot.parameter.shape)}: it was resized after the backward pass"
            )
    if _left.is_spoiled(gradient):
        raise AssertionError(
            f"the gradient of {slot.name} may contain a part of a result: its optimizer was "
            "deleted, or the job ended, while it was being exchanged. Set it to None, or call "
            "zero_grad(), before the backward pass"
        )
    used, present, content = slot.in_flight, gradient is not None, Content.OWN
    if slot.in_flight:
        word |= _agreement.IN_FLIGHT
        if not present:
            word |= _agreement.DROPPED
        elif was_changed(slot):
            word |= _agreement.CHANGED
    else:
        content = slot.current_content()
        if again and slot.content is Content.COMMON and (not present or was_changed(slot)):
            word |= _agreement.CHANGED
        present = present and not (slot.absent and content is Content.NOTHING)
        # The program may have written to the last result unnoticed. Averaging an unchanged
        # result again does no harm, unlike summing it again.
        again = op == Average and not slot.exchanged
        used = content is Content.OWN or (again and content is Content.COMMON)
        if slot.exchanged and content is Content.OWN and not slot.fired:
            # The program may have clipped it, as on all ranks, or set a gradient of this rank
            # alone: the ranks compare the values.
            word |= _agreement.REPLACED
            used = False
        elif content is Content.OWN and slot.content is Content.COMMON and not slot.fired:
            word |= _agreement.WRITTEN
            if op == Sum and slot.lost_hooks:
                raise AssertionError(
                    f"the parameter {slot.name} was swapped with another one, and its gradient may "
                    "contain the last sum: call zero_grad() of the optimizer after the "
                    "model is converted"
                )
    if slot.is_mixed and slot.fired:
        word |= _agreement.MIXED
    word |= _agreement.PRESENT if present else _agreement.LACKS
    if used:
        word |= _agreement.USED
    if op == Sum:
        if slot.base is not None:
            word |= _agreement.ADDED
        else:
            common = content is Content.COMMON
            word |= _agreement.COMMON if common else _agreement.FRESH
    return word | _kind_bits(slot, used or present)


def stepped_bits(slot: Slot) -> int:
    """Returns the bits for what a step sees of a gradient, for the next agreement."""
    if slot.parameter.grad is None:
        return _agreement.NOT_STEPPED
    known = {None: 0, True: _agreement.STEPPED_RESULT, False: _agreement.STEPPED_OTHER}
    return _agreement.STEPPED | known[slot.is_result]


def word_in_flight(slot: Slot) -> int:
    """Returns the word of a rank that only takes part in exchanges it has already started."""
    if not slot.in_flight:
        return 0
    return _agreement.IN_FLIGHT | _agreement.LEARNS | _kind_bits(slot, exists=False)


def _kind_bits(slot: Slot, exists: bool) -> int:
    """Returns how the gradient is exchanged, if this rank knows that."""
    if slot.kind is Kind.DENSE:
        # Before a gradient is sent, its place may have the layout of an earlier step. ``sent`` is
        # set if it waits for ``finish``.
        place = slot.place if slot.in_flight and slot.sent is None else None
        mark = layout_of(slot.parameter).mark() if place is None else place.mark
        return _agreement.DENSE | _agreement.mark_bits(mark)
    if slot.kind is Kind.SPARSE:
        return _agreement.ALWAYS_SPARSE | _agreement.sparse_dim_bits(slot.sparse_dim)
    # A sparse gradient, or none, is sent with this layout if other ranks have dense ones.
    bits = _agreement.mark_bits(layout_of(slot.parameter).mark())
    if not exists:
        return bits
    gradient = slot.parameter.grad
    if gradient is None or not gradient.is_sparse:
        return bits | _agreement.DENSE
    return bits | _agreement.SPARSE | _agreement.sparse_dim_bits(gradient.sparse_dim())


def was_changed(slot: Slot) -> bool:
    """Returns whether the program has written or replaced a gradient in flight."""
    gradient, seen = slot.parameter.grad, slot.seen
    if gradient is None or seen is None:
        return False
    if seen[0] != slot.stamp[0]:
        return True
    if slot.digest is not None:
        if slot.digest != _checks.digest(gradient):
            return True
        slot.is_quiet = seen == slot.stamp or not _parts.may_have_changed(gradient, slot.stamp[1])
        return False
    if seen == slot.stamp:
        return False
    changed = _parts.may_have_changed(gradient, slot.stamp[1])
    slot.is_quiet = slot.is_quiet and not changed
    return changed
