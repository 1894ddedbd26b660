"""Finds gradients that overlap in memory. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from gradwire.torch._slots import Slot


class Span(NamedTuple):
    """The memory of a gradient, as byte addresses."""

    start: int
    end: int
    # Whether the elements fill the span without gaps.
    dense: bool
    slot: Slot

    @classmethod
    def of(cls, slot: Slot) -> Span | None:
        """Returns the memory of a slot's gradient; None if it has none of its own."""
        gradient = slot.parameter.grad
        if gradient is None or gradient.layout != torch.strided or gradient.numel() == 0:
            return None
        reach = sum((size - 1) * step for size, step in zip(gradient.shape, gradient.stride()))
        start, bytes_each = gradient.data_ptr(), gradient.element_size()
        end = start + (reach + 1) * bytes_each
        return cls(start, end, end - start == gradient.numel() * bytes_each, slot)


def spans_of(slots: Iterable[Slot]) -> list[Span]:
    """Returns the memory of gradients that have some of their own."""
    return [span for span in map(Span.of, slots) if span is not None]


def overlapping(spans: list[Span]) -> Iterator[tuple[Slot, Slot]]:
    """Returns pairs of slots with gradients in the same memory, the earlier one in the list first.

    Strided parts of one tensor, such as its columns, may be interleaved. They only count if they
    begin with the same element.
    """
    order = {id(span.slot): number for number, span in enumerate(spans)}
    last: Span | None = None
    for span in sorted(spans, key=lambda each: (each.start, order[id(each.slot)])):
        if last is None or span.start >= last.end:
            last = span
            continue
        if span.start == last.start or (span.dense and last.dense):
            one, other = sorted((last, span), key=lambda each: order[id(each.slot)])
            yield one.slot, other.slot
        if span.end > last.end:
            last = span
