"""The reducing collectives."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from gradwire import _native
from gradwire._errors import InvalidRequest
from gradwire._staging import session
from gradwire._uses import COPIED
from gradwire.torch._adapter import as_tensor
from gradwire.torch._sparse import check_sizes, entries, size_to_send
from gradwire.torch.distributed import _memory
from gradwire.torch.distributed._base import Group, Options, Tensors, as_list
from gradwire.torch.distributed._reductions import Reduction
from gradwire.torch.distributed._work import Work, keep_for_a_while

# The size of one element of any dtype.
_SMALL = 16


def _is_one_number(tensors: list[torch.Tensor]) -> bool:
    return len(tensors) == 1 and tensors[0].untyped_storage().nbytes() <= _SMALL


class Reductions(Group):
    """allreduce, reduce and reduce_scatter, with their variants for one or several tensors."""

    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> Work:
        """Reduces tensors over all ranks, in place.

        Args:
            tensors: One tensor, or a list of tensors. All ranks pass the same dtypes and shapes. A
                sparse COO tensor can only be summed.
            opts: PyTorch's options for the call, or None.
            timeout: The maximum time to wait for the result. The default is the group's timeout.
            op: The reduction, as ``torch.distributed.ReduceOp``.

        Returns:
            The operation in flight. Its ``wait`` copies the result to the output tensors.

        Raises:
            NotImplementedError: Several sparse tensors, or another reduction of a sparse tensor.
        """
        return self._allreduce(
            "allreduce", as_list(tensors), Options(opts, self._timeout, timeout, op)
        )

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        """Reduces several tensors over all ranks, in place, in one request.

        Args:
            tensors: The tensors. All ranks pass the same dtypes and shapes.
            opts: PyTorch's options for the call, or None.

        Returns:
            The operation in flight. Its ``wait`` copies the result to the output tensors.
        """
        return self._allreduce(
            "allreduce_coalesced", as_list(tensors), Options(opts, self._timeout)
        )

    def _allreduce(self, what: str, tensors: list[torch.Tensor], given: Options) -> Work:
        reduction = Reduction(given.op)
        if any(tensor.is_sparse for tensor in tensors):
            return self._allreduce_sparse(tensors, reduction, given.timeout)
        if len(tensors) == 1 and reduction.factor is None:
            small = _memory.load_small(tensors[0])
            if small is not None:
                return self._allreduce_small(small, what, tensors, reduction, given.timeout)
        buffers, places, uses = [], [], []
        for tensor in tensors:
            # Factors are applied in a copy.
            use = COPIED if reduction.factor is not None else _memory.use(tensor)
            buffer, memory = use.buffer, None
            if buffer is None:
                buffer, memory = _memory.load_one(tensor)
                self._prepare(memory, reduction)
            buffers.append(buffer)
            places.append(memory)
            uses.append(use)
        handle = self._begin(session().allreduce, buffers, reduction.name, into=tensors)

        def finish(_: list[Any]) -> None:
            # An allreduce works in place, so the buffers have the results.
            for buffer, memory, tensor, use in zip(buffers, places, tensors, uses):
                if memory is not None:
                    _memory.store_one(buffer, memory, tensor)
                use.end()

        work = self._work(what, handle, finish, tensors, given.timeout, tensors)
        return keep_for_a_while(work) if _is_one_number(tensors) else work

    def _allreduce_small(
        self,
        buffer: _native.Buffer,
        what: str,
        tensors: list[torch.Tensor],
        reduction: Reduction,
        timeout: timedelta,
    ) -> Work:
        """Reduces one tensor, which was copied to ``buffer``.

        This function affects the latency of small tensors.
        """
        [tensor] = tensors
        handle = self._begin(session().allreduce, [buffer], reduction.name)

        def finish(_: list[Any]) -> None:
            _memory.store_small(buffer, tensor)

        work = self._work(what, handle, finish, tensors, timeout)
        return keep_for_a_while(work) if _is_one_number(tensors) else work

    def _allreduce_sparse(
        self, tensors: list[torch.Tensor], reduction: Reduction, timeout: timedelta
    ) -> Work:
        if len(tensors) != 1 or reduction.name != "sum" or reduction.factor is not None:
            raise NotImplementedError(
                "the gradwire backend reduces one sparse tensor at a time, and only by SUM"
            )
        [tensor] = tensors
        mine = tensor.detach().coalesce()
        indices, values = mine.indices().t().contiguous(), mine.values().contiguous()
        places = [_memory.load([part]) for part in (indices, values, size_to_send(tensor))]
        handle = self._begin(session().allgather, places)

        def finish(results: list[Any]) -> None:
            [(all_indices, _), (all_values, _), (sizes, dims)] = results[0]
            check_sizes(as_tensor(sizes), dims, tensor.size(), handle.name)
            gathered = as_tensor(all_indices), as_tensor(all_values)
            rows = [_rows(part, like) for part, like in zip(gathered, (indices, values))]
            # The number of rows follows from a part whose rows have elements. Without such a part,
            # the sum is empty.
            number = next((row for row in rows if row is not None), 0)
            total = entries(
                gathered[0].view(number, *indices.shape[1:]).t(),
                gathered[1].view(number, *values.shape[1:]),
                tensor.shape,
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
        """Reduces tensors over all ranks, in place; only the root gets the result.

        Args:
            tensors: One tensor, or a list of tensors of one dtype. All ranks pass the same shapes.
            opts: PyTorch's options for the call, or None.
            op: The reduction, as ``torch.distributed.ReduceOp``.
            timeout: The maximum time to wait for the result. The default is the group's timeout.
            root: The rank in the group that receives the result.

        Returns:
            The operation in flight. Its ``wait`` copies the result to the output tensors.
        """
        given = Options(opts, self._timeout, timeout, op, root)
        tensors = as_list(tensors)
        reduction = Reduction(given.op)
        buffer = self._load(tensors, reduction)
        root = self._member(given.root)
        at_root = self._rank == given.root
        # All ranks check ``into``: a program passes the same kind of tensor on all of them.
        handle = self._begin(session().reduce, buffer, root, reduction.name, into=tensors)

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
        """Reduces one tensor per rank and sends each rank its own.

        Args:
            outputs: The tensor for the result, or a list with it.
            inputs: One tensor per rank, in a list or a nested list.
            opts: PyTorch's options for the call, or None.
            timeout: The maximum time to wait for the result. The default is the group's timeout.
            op: The reduction, as ``torch.distributed.ReduceOp``.

        Returns:
            The operation in flight. Its ``wait`` copies the result to the output tensors.

        Raises:
            NotImplementedError: There is more than one output.
        """
        given = Options(opts, self._timeout, timeout, op)
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        if len(outputs) != 1:
            raise NotImplementedError(
                "reduce_scatter of the gradwire backend takes one output and a list of inputs"
            )
        [output], [mine] = outputs, inputs
        self._one_each("reduce_scatter", mine)
        own = mine[self._rank]
        if own.numel() != output.numel():
            raise InvalidRequest(
                f"reduce_scatter: the input for this rank has {own.numel()} elements, but the "
                f"output has {output.numel()}",
                kind="invalid",
            )
        reduction = Reduction(given.op)
        if any(tensor.numel() != output.numel() for tensor in mine):
            return self._reduce_each(output, mine, reduction, given.timeout)
        buffer = self._load([mine[member] for member in self._order], reduction)
        return self._reduce_scattered(
            "reduce_scatter", [buffer], [output], reduction, given.timeout
        )

    def _reduce_each(
        self, output: torch.Tensor, mine: Tensors, reduction: Reduction, timeout: timedelta
    ) -> Work:
        """Reduces parts of different sizes: one reduction to each rank, all concurrently.

        The first one has the name that a call with equal parts would have. So ranks with different
        sizes use the same name, and all get a table of the sizes. The other reductions of ranks
        that fail there are abandoned with the group.
        """
        _memory.check_writable([output])
        buffers = [self._load([tensor], reduction) for tensor in mine]
        handles = self._start(
            lambda name: [
                session().reduce(
                    buffer,
                    root,
                    reduction.name,
                    name=f"{name}.{member}" if member > 0 else name,
                    process_set=self._set,
                )
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

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Work:
        """Reduces a tensor over all ranks and splits it into one part per rank.

        Args:
            output: The tensor for this rank's part.
            input: A tensor with the elements of all parts, in group order.
            opts: PyTorch's options for the call, or None.

        Returns:
            The operation in flight. Its ``wait`` copies the result to the output tensors.
        """
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Starts several ``reduce_scatter_single`` in one request.

        Args:
            outputs: The output tensors.
            inputs: The input tensors, one per output.
            opts: PyTorch's options for the call, or None.

        Returns:
            The operation in flight. Its ``wait`` copies the result to the output tensors.
        """
        given = Options(opts, self._timeout)
        reduction = Reduction(given.op)
        buffers = []
        for output, tensor in zip(outputs, inputs):
            self._even("reduce_scatter_single", tensor, output)
            parts = self._in_order(tensor)
            if len(parts) == 1 and reduction.factor is None:
                buffers.append(_memory.load_for_reading(tensor))
            else:
                buffers.append(self._load(parts, reduction))
        return self._reduce_scattered(
            "reduce_scatter_single", buffers, list(outputs), reduction, given.timeout
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _in_order(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Returns one part per member, in process set order.

        If that equals group order, returns the tensor itself.
        """
        if self._order == list(range(self.size())):
            return [tensor]
        chunks = tensor.reshape(self.size(), -1)
        return [chunks[member] for member in self._order]


def _rows(part: torch.Tensor, like: torch.Tensor) -> int | None:
    """Returns the number of rows; None if rows have no elements."""
    width = like.shape[1:].numel()
    return part.numel() // width if width > 0 else None
