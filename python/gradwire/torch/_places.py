"""Shared memory for gradients.

Each parameter has a *place* in shared memory, with the strides that autograd uses for its gradient,
so that fused kernels can run on it. A gradient is in its place if address, dtype and strides match.
To compare Python objects is not enough, because their storage can be swapped.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from gradwire._staging import session
from gradwire.torch._adapter import as_tensor, dense_strides, describe
from gradwire.torch._parts import is_a_part

# Returns the number of tensors on a storage. CPU builds of PyTorch before 2.6 lack it.
_users: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)

# Returns the number of users of a tensor, such as consumers of DLPack, which own its memory.
_uses: Callable[[Any], int] | None = getattr(torch.Tensor, "_use_count", None)


# Where a tensor's elements are, and in which order.
Where = tuple[Any, ...]


def where_is(tensor: torch.Tensor) -> Where:
    """Returns where a tensor's elements are; it changes with ``t()`` and ``conj()`` as well."""
    if tensor.layout != torch.strided:
        return (id(tensor),)
    return tensor.data_ptr(), tensor.stride(), tensor.is_conj(), tensor.is_neg()


class Layout(NamedTuple):
    """The memory layout of a gradient."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]

    def mark(self) -> int:
        """Returns 16 bits that identify the layout."""
        return zlib.crc32(repr(self).encode()) & 0xFFFF


def layout_of(parameter: torch.Tensor) -> Layout:
    """Returns the layout that the parameter's gradient has, or will have."""
    gradient = parameter.grad
    if gradient is not None and gradient.layout == torch.strided:
        dtype = gradient.dtype
    else:
        # In newer PyTorch releases, a gradient may have a different dtype than its parameter.
        dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    # For a parameter on another device, the place is a staging buffer.
    on_cpu = parameter.device.type == "cpu"
    strides = dense_strides(parameter) if on_cpu else _contiguous_strides(parameter.shape)
    return Layout(dtype, parameter.shape, strides)


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    # Dimensions of size 0 count as 1.
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


class Place:
    """Shared memory for one gradient, in one layout."""

    def __init__(self, layout: Layout, parameter: torch.Tensor) -> None:
        self.layout, self.mark = layout, layout.mark()
        # The gradient's layout changes with the parameter's dtype or strides.
        self.parameters = (parameter.dtype, parameter.stride())
        element, _ = describe(torch.empty(0, dtype=layout.dtype, device="cpu"))
        self.buffer = session().buffer(element, list(layout.shape))
        self.memory = self._another()
        self.where = where_is(self.memory)
        # The tensor that the parameter's gradients are views of, and its storage's number of users
        # without those views. Programs may move this storage, but not that of ``memory``.
        self._lent: torch.Tensor | None = None
        self._alone = 0

    def _another(self) -> torch.Tensor:
        """Returns a tensor on this memory with its own storage.

        ``share_memory_()`` moves whole storages.
        """
        if self.buffer.nbytes == 0:
            return torch.empty_strided(
                self.layout.shape, self.layout.strides, dtype=self.layout.dtype, device="cpu"
            )
        made = torch.empty(0, dtype=self.layout.dtype, device="cpu")
        flat = as_tensor(self.buffer)
        return made.set_(
            flat.untyped_storage(), flat.storage_offset(), self.layout.shape, self.layout.strides
        )

    def holds(self, gradient: torch.Tensor) -> bool:
        """Returns whether a tensor is this memory, with this layout."""
        return where_is(gradient) == self.where and gradient.dtype == self.layout.dtype

    def view_for_parameter(self) -> torch.Tensor:
        """Returns an exclusive view for the parameter; see ``is_free``."""
        if self._lent is None or not self.holds(self._lent):
            self._lent = self._another()
            self._alone = _users_of(self._lent)
        return self._lent.detach()

    @property
    def is_free(self) -> bool:
        """Whether nothing uses a gradient here any more: no tensor, view or array on its memory.

        The parameter must have released it.
        """
        if self._lent is None:
            return True
        # If PyTorch can't tell, each gradient gets a new place.
        return _users is not None and _users_of(self._lent) <= self._alone


def is_alone(gradient: torch.Tensor) -> bool:
    """Returns whether nothing else uses a gradient's memory: no tensor, array or storage."""
    # If PyTorch can't tell, something may use it.
    if _uses is None or (_users is None and (gradient._is_view() or is_a_part(gradient))):
        return False
    return _uses_of(gradient) <= _uses_of_an_unused_one()


@cache
def _uses_of_an_unused_one() -> int:
    """Returns the number of uses of a gradient that only PyTorch uses; releases differ."""
    with torch.inference_mode(False):
        parameter = torch.nn.Parameter(torch.empty(1, device="cpu"))
        parameter.grad = torch.empty(1, device="cpu")
    return _uses_of(parameter.grad)


def _uses_of(gradient: torch.Tensor) -> int:
    assert _uses is not None, "they are counted"
    return _uses(gradient) + _users_of(gradient)


def _users_of(tensor: torch.Tensor) -> int:
    """Returns how many tensors and Python objects use a tensor's storage, as far as known."""
    storage = tensor.untyped_storage()
    return (0 if _users is None else _users(storage._cdata)) + sys.getrefcount(storage)
