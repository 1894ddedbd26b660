"""The calls that reduce."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from gradwire import _native
from gradwire._staging import session
from gradwire.torch._adapter import as_tensor
from gradwire.torch.distributed import _memory
from gradwire.torch.distributed._base import Group, Options, Tensors, many
from gradwire.torch.distributed._reductions import Reduction
from gradwire.torch.distributed._work import Work, keep_for_a_while

# One number of any type.
_QUESTION = 16


class Reductions(Group):
    """allreduce, reduce, reduce_scatter, and their forms for one tensor and for several."""

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None) -> Work:
        return self._allreduce("allreduce", many(tensors), Options(opts, self._timeout, timeout, op))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        return self._allreduce("allreduce_coalesced", many(tensors), Options(opts, self._timeout))

    def _allreduce(self, what: str, tensors: list[torch.Tensor], given: Options) -> Work:
        reduction = Reduction(given.op)
        if any(tensor.is_sparse for tensor in tensors):
            return self._allreduce_sparse(tensors, reduction, given.timeout)
        buffers, places = [], []
        for tensor in tensors:
            buffer, memory = _memory.load_one(tensor)
            buffers.append(buffer)
            places.append(memory)
            self._prepare(memory, reduction)
        handle = self._begin(session().allreduce, buffers, reduction.name, into=tensors)

        def finish(_: list[Any]) -> None:
            # An allreduce is done in place.
            for memory, tensor in zip(places, tensors):
                _memory.store_one(memory, tensor)

        work = self._work(what, handle, finish, tensors, given.timeout, tensors)
        alone = len(tensors) == 1 and tensors[0].untyped_storage().nbytes() <= _QUESTION
        return keep_for_a_while(work) if alone else work

    def _allreduce_sparse(self, tensors: list[torch.Tensor], reduction: Reduction, timeout: timedelta) -> Work:
        if len(tensors) != 1 or reduction.name != "sum" or reduction.factor is not None:
            raise NotImplementedError("the gradwire backend reduces one sparse tensor at a time, and only by SUM")
        [tensor] = tensors
        mine = tensor.detach().coalesce()
        indices, values = mine.indices().t().contiguous(), mine.values().contiguous()
        places = [_memory.load([part]) for part in (indices, values)]
        handle = self._begin(session().allgather, places)

        def finish(results: list[Any]) -> None:
            [(all_indices, _), (all_values, _)] = results[0]
            gathered = as_tensor(all_indices), as_tensor(all_values)
            rows = [_rows(part, like) for part, like in zip(gathered, (indices, values))]
            # Rows without elements are seen in the other part only; without any in both there is nothing to add.
            number = next((row for row in rows if row is not None), 0)
            total = torch.sparse_coo_tensor(
                gathered[0].view(number, *indices.shape[1:]).t(),
                gathered[1].view(number, *values.shape[1:]),
                tensor.shape,
                check_invariants=True,
            )
            _memory.store_sparse(total.coalesce(), tensor)

        return self._work("allreduce", handle, finish, tensors, timeout, tensors)

    def reduce(
        self,
        tensors: Any,
        opts: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Work:
        given = Options(opts, self._timeout, timeout, op, root)
        tensors = many(tensors)
        reduction = Reduction(given.op)
        buffer = self._load(tensors, reduction)
        root = self._member(given.root)
        at_root = self._rank == given.root
        handle = self._begin(session().reduce, buffer, root, reduction.name, into=tensors if at_root else ())

        def finish(results: list[Any]) -> None:
            if at_root:
                _memory.store(results[0][0], tensors)

        return self._work("reduce", handle, finish, tensors, given.timeout, tensors)

    def reduce_scatter(
        self,
        outputs: Any,
        inputs: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> Work:
        given = Options(opts, self._timeout, timeout, op)
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        if len(outputs) != 1:
            raise NotImplementedError("reduce_scatter of the gradwire backend takes one output and a list of inputs")
        [output], [mine] = outputs, inputs
        self._one_each("reduce_scatter", mine)
        reduction = Reduction(given.op)
        if any(tensor.numel() != output.numel() for tensor in mine):
            return self._reduce_each(output, mine, reduction, given.timeout)
        buffer = self._load([mine[member] for member in self._order], reduction)
        return self._reduce_scattered("reduce_scatter", [buffer], [output], reduction, given.timeout)

    def _reduce_each(self, output: torch.Tensor, mine: Tensors, reduction: Reduction, timeout: timedelta) -> Work:
        """Parts of different sizes: one reduction to each rank, all at once."""
        _memory.check_writable([output])
        buffers = [self._load([tensor], reduction) for tensor in mine]
        handles = self._start(
            lambda name: [
                session().reduce(buffer, root, reduction.name, name=f"{name}.{member}", process_set=self._set)
                for member, (buffer, root) in enumerate(zip(buffers, self._ranks))
            ]
        )

        def finish(results: list[Any]) -> None:
            _memory.store(results[self._rank][0], [output])

        return self._work("reduce_scatter", handles, finish, [output], timeout, [output])

    def _reduce_scattered(
        self,
        what: str,
        buffers: list[_native.Buffer],
        outputs: list[torch.Tensor],
        reduction: Reduction,
        timeout: timedelta,
    ) -> Work:
        handle = self._begin(session().reducescatter, buffers, reduction.name, into=outputs)

        def finish(results: list[Any]) -> None:
            for buffer, output in zip(results[0], outputs):
                _memory.store(buffer, [output])

        return self._work(what, handle, finish, outputs, timeout, outputs)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        given = Options(opts, self._timeout)
        reduction = Reduction(given.op)
        buffers = []
        for output, tensor in zip(outputs, inputs):
            self._even("reduce_scatter_single", tensor, output)
            buffers.append(self._load(self._in_order(tensor), reduction))
        return self._reduce_scattered("reduce_scatter_single", buffers, list(outputs), reduction, given.timeout)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _in_order(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """One part for each member of the process set; as it is where the group has the set's order."""
        if self._order == list(range(self.size())):
            return [tensor]
        chunks = tensor.reshape(self.size(), -1)
        return [chunks[member] for member in self._order]


def _rows(part: torch.Tensor, like: torch.Tensor) -> int | None:
    """How many rows of this kind there are; None where rows have no elements."""
    width = like.shape[1:].numel()
    return part.numel() // width if width > 0 else None
