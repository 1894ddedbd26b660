"""Gradients in shared memory, and their exchange while the backward pass is still under way.

Each parameter has a place in shared memory. Its gradient is a view of that place from the first
backward pass on: autograd adds into it, ``zero_grad`` clears it, and the exchange copies nothing.
A gradient that turns up elsewhere (the first one; after ``model.zero_grad()``, which forgets gradients; on
another device) is copied there, and the bytes are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from gradwire import _native
from gradwire._ops import Average, ReduceOp
from gradwire._world import ProcessSet, session
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


def _copied(tensor: torch.Tensor) -> None:
    global _copied_bytes
    _copied_bytes += tensor.numel() * tensor.element_size()


class Slot:
    """One parameter's gradient and its exchange."""

    def __init__(self, name: str, parameter: torch.Tensor, priority: int, passes: int) -> None:
        self.name, self.parameter, self.priority = name, parameter, priority
        self.delay = passes
        # Made when they are needed: a sparse gradient has no place of its size.
        self.buffer: _native.Buffer | None = None
        self.memory: torch.Tensor | None = None
        self.travelling: tuple[torch.Tensor, Any] | None = None
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
        indices = torch.empty((self.sparse_dim, 0), dtype=torch.int64)
        values = self.parameter.new_empty((0, *shape[self.sparse_dim :]))
        return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)

    @property
    def is_in_place(self) -> bool:
        """Whether the parameter's gradient is the view of its place."""
        return self.memory is not None and self.parameter.grad is self.memory

    def gather_in(self) -> _native.Buffer:
        """Sees to it that the gradient is in its place; a parameter without one gives zeros."""
        place = self.place()
        gradient = self.parameter.grad
        if gradient is None:
            place.zero_()
        elif gradient is not place:
            if gradient.layout != torch.strided:
                gradient = gradient.to_dense()
            place.copy_(gradient)
            _copied(place)
        if self.parameter.device.type == "cpu":
            self.parameter.grad = place
        elif gradient is None or gradient.layout != torch.strided:
            self.parameter.grad = torch.empty_like(self.parameter)
        assert self.buffer is not None
        return self.buffer

    def load(self, compression: type[Compressor]) -> _native.Buffer:
        """What travels: the gradient's place itself, or what the compressor makes of it."""
        buffer = self.gather_in()
        if compression is NoneCompressor:
            return buffer
        small, ctx = compression.compress(self.place())
        if small is self.place():
            return buffer
        travelling = collectives.place(small)
        self.travelling = (as_tensor(travelling), ctx)
        return travelling

    def store(self, compression: type[Compressor]) -> None:
        """The exchanged gradient becomes the parameter's."""
        place, gradient = self.place(), self.parameter.grad
        if self.travelling is not None:
            small, ctx = self.travelling
            self.travelling = None
            place.copy_(compression.decompress(small, ctx))
        if gradient is not None and gradient is not place:
            gradient.copy_(place)


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
        self.op, self.predivide = op, predivide
        self.sparse_as_dense, self.process_set = sparse_as_dense, process_set
        named = list(named)
        # What is used first in the next forward pass goes first; the backward pass ends with it.
        self.slots = {
            parameter: Slot(name, parameter, len(named) - at, passes) for at, (name, parameter) in enumerate(named)
        }
        self.groups = [[self.slots[p] for p in group if p in self.slots] for group in groups]
        self.group_of = {slot.parameter: group for group in self.groups for slot in group}
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
            self.hooks.append(hook(self._ready))

    def _ready(self, parameter: torch.Tensor) -> None:
        slot = self.slots[parameter]
        if slot.delay <= 0 or slot in self.submitted:
            raise AssertionError(MORE_PASSES.format(name=slot.name, passes=self.passes))
        if parameter.grad is not None and parameter.grad.requires_grad:
            raise AssertionError(
                f"the gradient of {slot.name} has a graph of its own (backward(create_graph=True)), "
                "which an exchange between ranks would cut"
            )
        slot.delay -= 1
        if slot.delay > 0:
            return
        group = self.group_of.get(parameter)
        if group is None:
            self._submit([slot])
        elif all(member.delay == 0 for member in group):
            self._submit(group)

    def _submit(self, slots: list[Slot]) -> None:
        first = slots[0]
        gradient = first.parameter.grad
        name = f"{self.prefix}{first.name}"
        if gradient is None and first.sparse_dim:
            gradient = first.no_rows()
        sparse = len(slots) == 1 and gradient is not None and gradient.is_sparse
        if sparse and not self.sparse_as_dense:
            assert gradient is not None
            first.sparse_dim = gradient.sparse_dim()
            first.sparse = sparse_allreduce_async(gradient, name, self.op, self.process_set)
            self.submitted.add(first)
            return
        with torch.no_grad():
            buffers = [slot.load(self.compression) for slot in slots]
        divided = self.op == Average
        handle = collectives.reduced(
            buffers,
            name,
            self.op,
            1.0 / self.predivide if divided else 1.0,
            self.predivide if divided else 1.0,
            self.process_set,
            priority=max(slot.priority for slot in slots),
        )
        self.handles.append((handle, slots))
        self.submitted.update(slots)

    def _missing(self) -> Iterator[list[Slot]]:
        for group in self.groups:
            if any(slot not in self.submitted for slot in group):
                yield group
        for slot in self.slots.values():
            if slot.parameter not in self.group_of and slot not in self.submitted:
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
                with torch.no_grad():
                    for slot in slots:
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
