"""This rank's word about a gradient in the agreement of the ranks."""

from __future__ import annotations

from gradwire._ops import Average, ReduceOp, Sum
from gradwire.torch import _agreement
from gradwire.torch._adapter import check_own_memory
from gradwire.torch._slots import Content, Kind, Slot, layout_of


def word_of(slot: Slot, op: ReduceOp, *, in_flight: bool, changed: bool, exchanged: bool) -> int:
    """Returns this rank's word.

    Args:
        slot: The gradient.
        op: The reduction.
        in_flight: Whether it was submitted.
        changed: Whether the program has changed it since.
        exchanged: Whether there was no step since the last exchange.

    Raises:
        InvalidRequest: The gradient has no memory of its own.
        AssertionError: The gradient can't be told from the last result.
    """
    word = _agreement.LEARNS if slot.parameter.requires_grad else _agreement.FROZEN
    gradient = slot.parameter.grad
    if gradient is not None:
        check_own_memory(gradient)
    used, present, content = in_flight, gradient is not None, Content.OWN
    if in_flight:
        word |= _agreement.IN_FLIGHT
        if not present:
            word |= _agreement.DROPPED
        elif changed:
            word |= _agreement.CHANGED
    else:
        content = slot.current_content(exchanged)
        present = present and not (slot.absent and content is Content.NOTHING)
        # The program may have written to the last result unnoticed. Averaging an unchanged
        # result again does no harm, unlike summing it again.
        again = op == Average and not exchanged
        used = content is Content.OWN or (again and content is Content.COMMON)
        if content is Content.OWN and slot.content is Content.COMMON and not slot.fired:
            word |= _agreement.WRITTEN
            if op == Sum and slot.lost_hooks:
                raise AssertionError(
                    f"the parameter {slot.name} was swapped with another one, and its gradient may "
                    "contain the last sum: call zero_grad() after the model is converted"
                )
    word |= _agreement.PRESENT if present else _agreement.LACKS
    if used:
        word |= _agreement.USED
    if op == Sum:
        if slot.base is not None:
            word |= _agreement.ADDED
        else:
            common = content is Content.COMMON
            word |= _agreement.COMMON if common else _agreement.FRESH
    return word | _kind_bits(slot, used or present, in_flight)


def _kind_bits(slot: Slot, exists: bool, in_flight: bool) -> int:
    """Returns how the gradient is exchanged, if this rank knows that."""
    if slot.kind is Kind.DENSE:
        # Before a gradient is sent, its place may have the layout of an earlier step. ``sent`` is
        # set if it waits for ``finish``.
        place = slot.place if in_flight and slot.sent is None else None
        mark = layout_of(slot.parameter).mark() if place is None else place.mark
        return _agreement.DENSE | _agreement.mark_bits(mark)
    if slot.kind is Kind.SPARSE:
        return _agreement.ALWAYS_SPARSE | _agreement.sparse_dim_bits(slot.sparse_dim)
    if not exists:
        return 0
    gradient = slot.parameter.grad
    if gradient is None or not gradient.is_sparse:
        return _agreement.DENSE
    return _agreement.SPARSE | _agreement.sparse_dim_bits(gradient.sparse_dim())
