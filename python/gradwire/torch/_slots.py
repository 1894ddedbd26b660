"""One parameter's gradient: where it is, whose it is, and what of it travels.

Each parameter has a *place* in shared memory, in the strides that autograd would give its gradient: kernels that
pair the raw memory of parameters, gradients and states may run on it. From the first backward pass on the
gradient is a view of that place. A gradient that turns up elsewhere (the first one; after ``model.zero_grad()``;
on another device) is copied there, and the bytes are counted. Whether a gradient is in its place is a question of
address, type and strides, and not of Python's objects, whose storage can be swapped.

What a parameter's gradient *is* decides what this rank contributes (``Content``): only what a rank has added
by itself is exchanged, and what an exchange has brought is not added up again.
"""

from __future__ import annotations

import zlib
from enum import Enum
from typing import Any, NamedTuple

import torch

from gradwire import _native
from gradwire._staging import session
from gradwire.torch import _cuda
from gradwire.torch._adapter import as_tensor, collectives, dense_strides, describe
from gradwire.torch._compression import Compressor, NoneCompressor
from gradwire.torch._mpi_ops import SparseHandle

_copied_bytes = 0


def gradient_bytes_copied() -> int:
    """Bytes of gradients that were not in shared memory when they were ready, and were copied there."""
    return _copied_bytes


def copied(tensor: torch.Tensor) -> None:
    """Counts a gradient that was copied into shared memory."""
    global _copied_bytes
    _copied_bytes += tensor.numel() * tensor.element_size()


class Content(Enum):
    """What a parameter's gradient is."""

    NOTHING = 0  # no gradient, or zeros that ``zero_grad`` has left in its place
    COMMON = 1  # what an exchange brought: the same on all ranks
    OWN = 2  # this rank's: a backward pass or the program has added to it


class Kind(Enum):
    """How a gradient travels; the same on all ranks, from its first exchange on."""

    DENSE = 0
    SPARSE = 1


class Layout(NamedTuple):
    """What a gradient's memory looks like."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]

    def mark(self) -> int:
        """16 bits that tell it from others."""
        return zlib.crc32(repr(self).encode()) & 0xFFFF


def layout_of(parameter: torch.Tensor) -> Layout:
    """What the parameter's gradient looks like, or is going to."""
    gradient = parameter.grad
    if gradient is not None and gradient.layout == torch.strided:
        dtype = gradient.dtype
    else:
        # Newer releases of PyTorch let a gradient be of another type than its parameter.
        dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    # On another device the place is where gradients pass through.
    on_cpu = parameter.device.type == "cpu"
    strides = dense_strides(parameter) if on_cpu else torch.empty(parameter.shape, device="meta").stride()
    return Layout(dtype, parameter.shape, strides)


class Place:
    """Shared memory for one gradient, in one layout."""

    def __init__(self, layout: Layout, parameter: torch.Tensor) -> None:
        self.layout, self.mark = layout, layout.mark()
        # When the parameter's change, its gradients' do.
        self.parameters = (parameter.dtype, parameter.stride())
        element, _ = describe(torch.empty(0, dtype=layout.dtype))
        self.buffer = session().buffer(element, list(layout.shape))
        self.memory = self._another()
        self.address = self.memory.data_ptr()
        # What the parameter has as its gradient. Programs may put another storage under it, but not under ours.
        self.view = self._another()

    def _another(self) -> torch.Tensor:
        """A tensor on this memory, with a storage of its own: ``share_memory_()`` moves whole storages."""
        if self.buffer.nbytes == 0:
            return torch.empty_strided(self.layout.shape, self.layout.strides, dtype=self.layout.dtype)
        made = torch.empty(0, dtype=self.layout.dtype)
        flat = as_tensor(self.buffer)
        return made.set_(flat.untyped_storage(), flat.storage_offset(), self.layout.shape, self.layout.strides)

    def holds(self, gradient: torch.Tensor) -> bool:
        """Whether a tensor is this memory, as it is laid out here."""
        dtype, _, strides = self.layout
        return (
            gradient.layout == torch.strided
            and gradient.data_ptr() == self.address
            and gradient.dtype == dtype
            and gradient.stride() == strides
        )

    def give(self) -> torch.Tensor:
        """The view for the parameter."""
        if not self.holds(self.view):
            self.view = self._another()
        return self.view


def _stamp(gradient: torch.Tensor) -> tuple[int, int]:
    """Changes when the gradient is replaced (the first number) or written to (the second)."""
    where = gradient.data_ptr() if gradient.layout == torch.strided else id(gradient)
    return where, gradient._version


class Slot:
    """One parameter's gradient and its exchange."""

    def __init__(self, name: str, operation: str, parameter: torch.Tensor, priority: int, passes: int) -> None:
        # Its own name, and that of its exchange.
        self.name, self.operation = name, operation
        self.parameter, self.priority = parameter, priority
        # Backward passes that are still to come before it is exchanged; whether there was one.
        self.delay, self.fired = passes, False
        # Those that go in one request with it; None where it goes alone.
        self.group: list[Slot] | None = None
        # Made when it is needed: a sparse gradient has no place of its size.
        self.place: Place | None = None
        # Known from the first exchange on; of a sparse one also how many of the dimensions are sparse.
        self.kind: Kind | None = None
        self.sparse_dim = 0
        # What the gradient was when it was last looked at.
        self.content, self.stamp = Content.NOTHING, (0, 0)
        # The zeros in its place stand for no gradient: a step must not see them.
        self.absent = False
        # What an exchange brought before, where it has to be added to what the next one brings.
        self.base: torch.Tensor | None = None
        # What is exchanged in its stead, what that is a copy of, and what the compressor has to know.
        self.travelling: tuple[_native.Buffer, torch.Tensor, Any] | None = None
        self.sparse: SparseHandle | None = None
        self.hooks: list[Any] = []
        # Submitted, and not waited for.
        self.under_way = False

    def unwatch(self) -> None:
        """Takes its parameter's hooks away."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    # Where it is

    def current(self) -> Place:
        """The gradient's place, in its layout of now."""
        layout = layout_of(self.parameter)
        if self.place is None or self.place.layout != layout:
            self.place = Place(layout, self.parameter)
        return self.place

    def in_place(self, gradient: torch.Tensor | None) -> bool:
        """Whether a gradient is the memory that is exchanged."""
        return gradient is not None and self.place is not None and self.place.holds(gradient)

    @property
    def keeps(self) -> bool:
        """Whether its place may stay its gradient's: it is, and the parameter is still of that layout."""
        place, parameter = self.place, self.parameter
        fits = place is not None and place.parameters == (parameter.dtype, parameter.stride())
        return fits and self.in_place(parameter.grad)

    # Whose it is

    def note(self, content: Content) -> None:
        """Remembers what the gradient is now."""
        gradient = self.parameter.grad
        self.content = Content.NOTHING if gradient is None else content
        self.stamp = (0, 0) if gradient is None else _stamp(gradient)

    def look(self, exchanged: bool) -> Content:
        """What the gradient is.

        ``exchanged``: since the last exchange there was no step; until then programs clip and scale what it brought.
        """
        gradient = self.parameter.grad
        if gradient is None:
            return Content.NOTHING
        if self.fired:
            return Content.OWN
        where, version = _stamp(gradient)
        if where == self.stamp[0] and (exchanged or version == self.stamp[1]):
            return self.content
        # Zeros that stand for none may have been moved, as ``module.double()`` does.
        return Content.NOTHING if self.absent and not gradient.any() else Content.OWN

    @property
    def seen(self) -> tuple[int, int] | None:
        """The gradient of this moment, to be compared with that of another one."""
        gradient = self.parameter.grad
        return None if gradient is None else _stamp(gradient)

    @property
    def changed(self) -> bool:
        """Whether the program has written to the gradient, or replaced it, while it was under way."""
        seen = self.seen
        return seen is not None and seen != self.stamp

    def set_aside(self) -> None:
        """Keeps what an exchange brought for later, so that it is not added up again."""
        gradient = self.parameter.grad
        assert gradient is not None
        with torch.no_grad():
            if gradient.layout == torch.strided:
                self.base = gradient.clone()
                gradient.zero_()
            else:
                self.base, self.parameter.grad = gradient, None

    # What travels

    def settled(self, gradient: torch.Tensor) -> _native.Buffer | None:
        """The gradient's place, with the gradient in it; None where there is more to it than a copy.

        One that was forgotten and made anew is copied: that is one pass, less than to clear it and to add to it.
        """
        place = self.place
        if place is None:
            return None
        if not place.holds(gradient):
            if gradient.layout != torch.strided or gradient.device.type != "cpu":
                return None
            if place.layout != layout_of(self.parameter):
                return None
            place.memory.copy_(gradient)
            copied(place.memory)
            self.parameter.grad = place.give()
        return place.buffer

    def gather_in(self, content: Content) -> Place:
        """Sees to it that this rank's contribution is in its place; a parameter without a gradient gives zeros."""
        place = self.current()
        gradient = self.parameter.grad
        # Unless another rank has one, what stands there then stands for none.
        self.absent = self.absent or gradient is None
        if gradient is None or content is Content.NOTHING:
            if self.parameter.is_cuda:
                _cuda.stage.settle()  # the last one may be on its way out of the place
            place.memory.zero_()
        elif not place.holds(gradient):
            if gradient.layout != torch.strided:
                gradient = gradient.to_dense()
            if gradient.device.type == "cpu":
                place.memory.copy_(gradient)
            else:
                collectives.adapter.load(gradient, place.buffer)
            copied(place.memory)
        if self.parameter.device.type == "cpu":
            if not self.in_place(self.parameter.grad):
                self.parameter.grad = place.give()
        elif gradient is None or self.parameter.grad is None or self.parameter.grad.layout != torch.strided:
            self.parameter.grad = torch.empty_like(self.parameter, dtype=place.layout.dtype)
        return place

    def load(self, compression: type[Compressor], content: Content) -> _native.Buffer:
        """What travels: the gradient's place itself, or what the compressor makes of it."""
        gradient = self.parameter.grad
        if self.parameter.is_cuda and gradient is not None and compression is not NoneCompressor:
            # Compressed before it is copied. The result is copied out to where the compressed one was.
            if gradient.layout != torch.strided:
                gradient = self.parameter.grad = gradient.to_dense()
            small, ctx = compression.compress(gradient)
            travelling = collectives.place(small)
            self.travelling = (travelling, small, ctx)
            copied(small)
            return travelling
        place = self.gather_in(content)
        if compression is NoneCompressor:
            return place.buffer
        small, ctx = compression.compress(place.memory)
        if small is place.memory:
            return place.buffer
        travelling = collectives.place(small)
        self.travelling = (travelling, small, ctx)
        return travelling

    def sparse_gradient(self, content: Content) -> torch.Tensor:
        """What this rank gives of a sparse gradient: no rows where it has none."""
        gradient = self.parameter.grad
        if gradient is None or content is Content.NOTHING:
            parameter, shape = self.parameter, self.parameter.shape
            indices = torch.empty((self.sparse_dim, 0), dtype=torch.int64, device=parameter.device)
            values = parameter.new_empty((0, *shape[self.sparse_dim :]), dtype=layout_of(parameter).dtype)
            return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)
        return gradient if gradient.is_sparse else gradient.to_sparse(self.sparse_dim)

    @property
    def must_store(self) -> bool:
        """Whether the exchanged gradient is not where it has to be yet."""
        at_home = self.place is not None and self.stamp[0] == self.place.address
        return not at_home or self.travelling is not None or self.base is not None

    def store(self, compression: type[Compressor]) -> None:
        """What was exchanged becomes the parameter's gradient; one that was forgotten meanwhile stays so."""
        gradient = self.parameter.grad
        travelling, self.travelling = self.travelling, None
        base, self.base = self.base, None
        if self.sparse is not None:
            result = self.sparse.wait()
            if gradient is not None or base is not None or self.content is Content.NOTHING:
                self.parameter.grad = result if base is None else (base + result).coalesce()
            return
        if gradient is None:
            return
        exchanged = self.place
        if travelling is not None:
            buffer, like, ctx = travelling
            large = compression.decompress(collectives.adapter.view(buffer, like), ctx)
            if like.is_cuda:
                gradient.copy_(large)
                exchanged = None
            elif exchanged is not None:
                exchanged.memory.copy_(large)
        if exchanged is not None and not exchanged.holds(gradient):
            collectives.adapter.store(exchanged.buffer, gradient)
        if base is not None:
            gradient.add_(base)
