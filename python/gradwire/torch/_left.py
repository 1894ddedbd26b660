"""What is known about gradients whose optimizer, or its session, has ended.

This is kept with the gradient tensor, because another optimizer may have the same parameter later,
and nothing else lives exactly as long. (An attribute of the parameter would be saved with the
model, and hooks that hold what refers to their parameter are never freed.)

- A result remains a result: another optimizer must not sum it again.
- A gradient that was being exchanged in its memory is *spoiled*: it may contain a part of a result,
  and receive more. All ranks get one error until the program has cleared it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from gradwire import _native
from gradwire.torch._slots import Slot

_NAME = "_gradwire_left"
# Whether there is anything to look for.
_any = False


class Left:
    """What a slot has left with its gradient.

    Args:
        known: What it knew, if the gradient is a result.
        flight: The operation that may still write to the gradient.
    """

    def __init__(self, known: dict[str, Any] | None, flight: _native.Handle | None) -> None:
        self.known, self._flight = known, flight

    @property
    def is_spoiled(self) -> bool:
        """Whether the gradient's values are unknown."""
        return self.known is None

    @property
    def is_in_flight(self) -> bool:
        """Whether the operation may still write to the gradient."""
        return self._flight is not None and not self._flight.poll()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the gradient is like any other tensor."""

    def __reduce__(self) -> Any:
        # A saved gradient can be loaded without this package.
        return OrderedDict, ()


def _of(gradient: torch.Tensor | None) -> Left | None:
    left = None if gradient is None or not _any else vars(gradient).get(_NAME)
    return left if isinstance(left, Left) else None


def _leave(slot: Slot, left: Left) -> None:
    global _any
    _any = True
    vars(slot.parameter.grad)[_NAME] = left


def leave_spoiled(slot: Slot, flight: _native.Handle | None = None) -> None:
    """Marks the gradient as spoiled.

    Args:
        slot: The gradient.
        flight: The operation that may still write to it, if its session has not ended.
    """
    if slot.parameter.grad is not None:
        _leave(slot, Left(None, flight))


def leave_result(slot: Slot) -> None:
    """Marks the gradient as a result, when its optimizer is deleted."""
    if slot.parameter.grad is not None and _of(slot.parameter.grad) is None:
        # A tensor that refers to itself would never be freed.
        _leave(slot, Left({**slot.knowledge(), "stamped": None}, None))


def take(slot: Slot) -> None:
    """Takes what an earlier optimizer has left with the gradient."""
    left = _of(slot.parameter.grad)
    if left is not None and left.known is not None:
        slot.learn({**left.known, "stamped": slot.parameter.grad})
        del vars(slot.parameter.grad)[_NAME]


def is_spoiled(gradient: torch.Tensor | None) -> bool:
    """Returns whether a gradient may contain a part of a result."""
    left = _of(gradient)
    return left is not None and left.is_spoiled


def clear(slots: Iterable[Slot], zero_grad: Callable[[], None]) -> None:
    """Clears gradients; spoiled ones that are cleared in place are ordinary gradients then."""
    spoiled = [slot.parameter for slot in slots if is_spoiled(slot.parameter.grad)] if _any else []
    for parameter in spoiled:
        left = _of(parameter.grad)
        if parameter.grad is not None and left is not None and left.is_in_flight:
            parameter.grad = torch.zeros_like(parameter.grad)
    zero_grad()
    for parameter in spoiled:
        gradient = parameter.grad
        if gradient is not None and is_spoiled(gradient) and not bool(gradient.any()):
            del vars(gradient)[_NAME]
