"""Zeros in shared memory that represent gradients which no rank has.

``zero_grad`` leaves zeros in shared memory, so that the next backward pass accumulates there. After
an exchange, neither the program nor a step may see the zeros of gradients that no rank has
computed: with momentum or weight decay, zeros differ from no gradient. The next ``zero_grad``
brings them back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from gradwire.torch._gradient_state import Content
from gradwire.torch._slots import Slot


def hide(slots: Iterable[Slot], look: bool = True) -> None:
    """Removes zeros that represent no gradient, so that a step skips such parameters.

    Args:
        slots: The gradients.
        look: Whether to look for writes that change no version.
    """
    for slot in slots:
        if slot.absent and slot.current_content(look) is Content.NOTHING:
            slot.parameter.grad = None


def clear(slots: Iterable[Slot], zero_grad: Callable[[], None]) -> None:
    """Clears gradients with an optimizer's ``zero_grad``; those in shared memory stay as zeros."""
    kept = [slot for slot in slots if slot.stays_in_place]
    # Absent gradients stay absent, however the others are cleared.
    hide(slots, look=False)
    before = {slot: slot.seen for slot in slots}
    zero_grad()
    dropped = ((slot, slot.free_place()) for slot in kept if slot.parameter.grad is None)
    forgotten = {slot: place for slot, place in dropped if place is not None}
    if forgotten:
        torch._foreach_zero_([place.memory for place in forgotten.values()])
    for slot, place in forgotten.items():
        slot.parameter.grad = place.view_for_parameter()
    for slot, seen in before.items():
        # An optimizer may leave some gradients unchanged.
        if seen != slot.seen or seen is None:
            slot.absent = False
            slot.note_content(Content.NOTHING)
    for slot in forgotten:
        slot.absent = True
        slot.note_content(Content.NOTHING)
