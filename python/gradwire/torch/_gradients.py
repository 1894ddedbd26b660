"""Gradients in shared memory, and their exchange while the backward pass is still under way.

Each parameter has a place in shared memory. Its gradient is a view of that place from the first
backward pass on: autograd adds into it, ``zero_grad`` clears it, and the exchange copies nothing.
A gradient that turns up elsewhere (the first one; after ``model.zero_grad()``, which forgets gradients; on
another device) is copied there, and the bytes are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from gradwire import _native
from gradwire._ops import Average, ReduceOp
from gradwire._staging import session
from gradwire._world import ProcessSet, native_set
from gradwire.torch import _cuda
from gradwire.torch._adapter import as_tensor, collectives, describe
from gradwire.torch._compression import Compressor, NoneCompressor
from gradwire.torch._mpi_ops import SparseHandle, sparse_allreduce_async

MORE_PASSES = (
    "the gradient of {name} was computed more than backward_passes_per_step={passes} times before step(): "
    "raise backward_passes_per_step to add gradients up, or call step() or synchronize() in between"
)

_copied_bytes = 0


def gradient_bytes_copied() -> int:
    """Bytes of gradients that were not in shared memory when they were ready, and were copied there."""
    return _copied_bytes


def copied(tensor: torch.Tensor) -> None:
    """Counts a gradient that was copied into shared memory."""
    global _copied_bytes
    _copied_bytes += tensor.numel() * tensor.element_size()


class Slot:
    """One parameter's gradient and its exchange."""

    def __init__(self, name: str, operation: str, parameter: torch.Tensor, priority: int, passes: int) -> None:
        # Its own name, and that of its exchange.
        self.name, self.operation = name, operation
        self.parameter, self.priority, self.delay = parameter, priority, passes
        # Those that go in one request with it; None where it goes alone.
        self.group: list[Slot] | None = None
        # Made when they are needed: a sparse gradient has no place of its size.
        self.buffer: _native.Buffer | None = None
        self.memory: torch.Tensor | None = None
        # What is exchanged in its stead, what that is a copy of, and what the compressor has to know.
        self.travelling: tuple[_native.Buffer, torch.Tensor, Any] | None = None
        self.sparse: SparseHandle | None = None
        # Of the last sparse gradient: how many of the dimensions are sparse.
        self.sparse_dim = 0

    def place(self) -> torch.Tensor:
        """The gradient's place in shared memory."""
        if self.buffer is None or self.memory is None:
            dtype, shape = describe(self.parameter)
            self.buffer = session().buffer(dtype, list(shape))
            self.memory = as_tensor(self.buffer)
        return self.memory

    def no_rows(self) -> torch.Tensor:
        """A sparse gradient of a parameter that this rank did not use."""
        shape = self.parameter.shape
        indices = torch.empty((self.sparse_dim, 0), dtype=torch.int64, device=self.parameter.device)
        values = self.parameter.new_empty((0, *shape[self.sparse_dim :]))
        return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)

    @property
    def is_in_place(self) -> bool:
        """Whether the parameter's gradient is the view of its place."""
        return self.memory is not None and self.parameter.grad is self.memory

    def settled(self, gradient: torch.Tensor) -> _native.Buffer | None:
        """The gradient's place, with the gradient in it; None where there is more to it than a copy.

        One that was forgotten and made anew is copied: that is one pass, less than to clear it and to add to it.
        """
        place = self.memory
        if gradient is not place:
            if place is None or gradient.layout != torch.strided or gradient.device.type != "cpu":
                return None
            place.copy_(gradient)
            copied(place)
            self.parameter.grad = place
        return self.buffer

    def gather_in(self) -> _native.Buffer:
        """Sees to it that the gradient is in its place; a parameter without one gives zeros."""
        place = self.place()
        gradient = self.parameter.grad
        if gradient is None:
            if self.parameter.is_cuda:
                _cuda.stage.settle()  # the last one may be on its way out of the place
            place.zero_()
        elif gradient is not place:
            if gradient.layout != torch.strided:
                gradient = gradient.to_dense()
            assert self.buffer is not None
            collectives.adapter.load(gradient, self.buffer)
            copied(place)
        if self.parameter.device.type == "cpu":
            self.parameter.grad = place
        elif gradient is None or gradient.layout != torch.strided:
            self.parameter.grad = torch.empty_like(self.parameter)
        assert self.buffer is not None
        return self.buffer

    def load(self, compression: type[Compressor]) -> _native.Buffer:
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
        buffer = self.gather_in()
        if compression is NoneCompressor:
            return buffer
        small, ctx = compression.compress(self.place())
        if small is self.place():
            return buffer
        travelling = collectives.place(small)
        self.travelling = (travelling, small, ctx)
        return travelling

    def store(self, compression: type[Compressor]) -> None:
        """The exchanged gradient becomes the parameter's."""
        gradient = self.parameter.grad
        if self.travelling is not None:
            travelling, like, ctx = self.travelling
            self.travelling = None
            large = compression.decompress(collectives.adapter.view(travelling, like), ctx)
            if gradient is not None and like.is_cuda:
                gradient.copy_(large)
                return
            self.place().copy_(large)
        if gradient is not None and gradient is not self.memory:
            assert self.buffer is not None
            collectives.adapter.store(self.buffer, gradient)


class Exchange:
    """The slots of one optimizer, and what of them is on its way."""

    def __init__(
        self,
        named: Iterable[tuple[str, torch.Tensor]],
        groups: Sequence[Sequence[torch.Tensor]],
        *,
        prefix: str,
        compression: type[Compressor],
        passes: int,
        op: ReduceOp,
        predivide: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.prefix, self.compression, self.passes = prefix, compression, passes
        self.op = op
        self.sparse_as_dense, self.process_set = sparse_as_dense, process_set
        named = list(named)
        # What is used first in the next forward pass goes first; the backward pass ends with it.
        self.slots = {
            parameter: Slot(name, f"allreduce.{prefix}{name}", parameter, len(named) - at, passes)
            for at, (name, parameter) in enumerate(named)
        }
        self.groups = [[self.slots[p] for p in group if p in self.slots] for group in groups]
        for group in self.groups:
            for slot in group:
                slot.group = group
        # What contributions are multiplied by, and the result.
        self.scales = (1.0 / predivide, predivide) if op == Average else (1.0, 1.0)
        self.handles: list[tuple[_native.Handle, list[Slot]]] = []
        self.submitted: set[Slot] = set()
        self.hooks: list[Any] = []

    @property
    def in_flight(self) -> bool:
        """Whether anything was submitted and not waited for."""
        return bool(self.submitted)

    def watch(self) -> None:
        """Submits each gradient the moment that the backward pass has it."""
        for slot in self.slots.values():
            hook = slot.parameter.register_post_accumulate_grad_hook
            self.hooks.append(hook(partial(self._ready, slot)))

    def _ready(self, slot: Slot, parameter: torch.Tensor) -> None:
        # It runs in the midst of the backward pass, whose data has pushed everything else out of the caches: what
        # is not looked at here costs nothing.
        if slot.delay <= 0 or slot in self.submitted:
            raise AssertionError(MORE_PASSES.format(name=slot.name, passes=self.passes))
        gradient = parameter.grad
        if gradient is not None and gradient.requires_grad:
            raise AssertionError(
                f"the gradient of {slot.name} has a graph of its own (backward(create_graph=True)), "
                "which an exchange between ranks would cut"
            )
        slot.delay -= 1
        if slot.delay > 0:
            return
        if slot.group is not None:
            if all(member.delay == 0 for member in slot.group):
                self._submit(slot.group)
            return
        buffer = slot.settled(gradient) if gradient is not None and self.compression is NoneCompressor else None
        if buffer is not None:
            self._start([buffer], [slot], slot.priority)
        else:
            self._submit([slot])

    def _submit(self, slots: list[Slot]) -> None:
        first = slots[0]
        gradient = first.parameter.grad
        if gradient is None and first.sparse_dim:
            gradient = first.no_rows()
        sparse = len(slots) == 1 and gradient is not None and gradient.is_sparse
        if sparse and not self.sparse_as_dense:
            assert gradient is not None
            first.sparse_dim = gradient.sparse_dim()
            name = f"{self.prefix}{first.name}"
            first.sparse = sparse_allreduce_async(gradient, name, self.op, self.process_set)
            self.submitted.add(first)
            return
        with torch.no_grad():
            buffers = [slot.load(self.compression) for slot in slots]
        self._start(buffers, slots, max(slot.priority for slot in slots))

    def _start(self, buffers: list[_native.Buffer], slots: list[Slot], priority: int) -> None:
        handle = session().allreduce(
            buffers,
            self.op.name,
            name=slots[0].operation,
            priority=priority,
            prescale=self.scales[0],
            postscale=self.scales[1],
            process_set=native_set(self.process_set),
        )
        self.handles.append((handle, slots))
        self.submitted.update(slots)

    def _missing(self) -> Iterator[list[Slot]]:
        for group in self.groups:
            if any(slot not in self.submitted for slot in group):
                yield group
        for slot in self.slots.values():
            if slot.group is None and slot not in self.submitted:
                yield [slot]

    def finish(self) -> None:
        """Submits what the backward pass did not reach, and waits for everything.

        A parameter that this rank did not use gives zeros: other ranks may have used it.
        """
        for slots in list(self._missing()):
            self._submit(slots)
        try:
            for handle, slots in self.handles:
                handle.wait()
                for slot in slots:
                    if not slot.is_in_place or slot.travelling is not None:
                        with torch.no_grad():
                            slot.store(self.compression)
            for slot in self.submitted:
                if slot.sparse is not None:
                    slot.parameter.grad = slot.sparse.wait()
        finally:
            self.reset()

    def reset(self) -> None:
        """Begins anew, whatever was."""
        self.handles.clear()
        self.submitted.clear()
        for slot in self.slots.values():
            slot.delay, slot.sparse, slot.travelling = self.passes, None, None

    def clear(self) -> None:
        """Clears the gradients that are in shared memory, without losing their places."""
        places = [slot.place() for slot in self.slots.values() if slot.is_in_place]
        if places:
            torch._foreach_zero_(places)
