"""The collectives on tensors, with Horovod's signatures; what returns a tensor can be differentiated.

An operation's gradient is what Horovod defines: of an allreduce the allreduce, of an allgather and a
broadcast the average of what belongs to this rank, of an alltoall the alltoall back, of a
reducescatter the allgather.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from gradwire._arguments import rows
from gradwire._errors import InvalidRequest
from gradwire._ops import Average, Handle, ReduceOp, Sum, reduce_op
from gradwire._world import ProcessSet, global_process_set
from gradwire.torch import _autograd
from gradwire.torch._adapter import collectives
from gradwire.torch._compression import Compression, Compressor

Op = ReduceOp | int | None


def handle_average(op: Op, average: bool | None) -> ReduceOp:
    """Horovod's old argument ``average``, as an operation."""
    if average is None:
        return reduce_op(op)
    if op is not None:
        raise ValueError("give op or average, not both: op has replaced average")
    warnings.warn("average is deprecated: use op", DeprecationWarning, stacklevel=3)
    return Average if average else Sum


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Starts an allreduce whose result is a new tensor; it can't be differentiated."""
    op = handle_average(op, average)
    return collectives.allreduce(tensor, name, op, prescale_factor, postscale_factor, process_set)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The reduction of all ranks' tensors: the average, or what ``op`` says."""
    op = handle_average(op, average)
    small, ctx = compression.compress(tensor)
    [result] = _autograd.GroupedAllreduce.apply(name, op, prescale_factor, postscale_factor, process_set, small)
    return compression.decompress(result, ctx)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Starts an allreduce in place; the tensor changes when it is waited for."""
    op = handle_average(op, average)
    return collectives.allreduce(tensor, name, op, prescale_factor, postscale_factor, process_set, in_place=True)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """As ``allreduce``, in place; it can't be differentiated."""
    op = handle_average(op, average)
    return allreduce_async_(tensor, None, name, op, prescale_factor, postscale_factor, process_set).wait()


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """Starts an allreduce of several tensors in one request: all of it is done or nothing."""
    op = handle_average(op, average)
    return collectives.grouped_allreduce(tensors, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """As ``allreduce``, of several tensors in one request."""
    op = handle_average(op, average)
    small = [compression.compress(tensor) for tensor in tensors]
    results = _autograd.GroupedAllreduce.apply(
        name, op, prescale_factor, postscale_factor, process_set, *[tensor for tensor, _ in small]
    )
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, small)]


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """As ``grouped_allreduce_async``, in place."""
    op = handle_average(op, average)
    return collectives.grouped_allreduce(
        tensors, name, op, prescale_factor, postscale_factor, process_set, in_place=True
    )


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """As ``grouped_allreduce``, in place; it can't be differentiated."""
    op = handle_average(op, average)
    return grouped_allreduce_async_(tensors, None, name, op, prescale_factor, postscale_factor, process_set).wait()


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[torch.Tensor]:
    """Starts an allgather; it can't be differentiated."""
    return _first(collectives.allgather([tensor], name, process_set))


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """All ranks' tensors, one after the other along the first dimension, which may differ."""
    result: torch.Tensor = _autograd.Allgather.apply(name, process_set, tensor)[0]
    return result


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """Starts several allgathers in one request."""
    handle = collectives.allgather(tensors, name, process_set)
    return _then(handle, lambda result: [tensor for tensor, _ in result])


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """As ``allgather``, of several tensors in one request."""
    return list(_autograd.Allgather.apply(name, process_set, *tensors))


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Starts a broadcast whose result is a new tensor; it can't be differentiated."""
    return collectives.broadcast(tensor, root_rank, name, process_set)


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The root's tensor; the root is a rank of the whole job."""
    result: torch.Tensor = _autograd.Broadcast.apply(tensor, root_rank, name, process_set)
    return result


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Starts a broadcast in place; the tensor changes when it is waited for."""
    return collectives.broadcast(tensor, root_rank, name, process_set, in_place=True)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """As ``broadcast``, in place; it can't be differentiated."""
    return broadcast_async_(tensor, root_rank, name, process_set).wait()


def _splits(splits: torch.Tensor | Sequence[int] | None) -> list[int] | None:
    if splits is None:
        return None
    if isinstance(splits, torch.Tensor):
        if splits.dim() != 1 or splits.dtype.is_floating_point or splits.dtype.is_complex:
            raise InvalidRequest(
                "splits must be a tensor of whole numbers in one dimension, not "
                f"{splits.dtype} of shape {list(splits.shape)}",
                kind="invalid",
            )
        splits = splits.tolist()
    return rows("splits", splits)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """As ``alltoall``, without waiting; it can't be differentiated."""
    handle = collectives.alltoall(tensor, _splits(splits), name, process_set)
    if splits is None:
        return _then(handle, lambda result: result[0])
    return _then(handle, lambda result: (result[0], torch.tensor(result[1], dtype=torch.int32)))


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Gives each rank its rows: as many as ``splits`` says, or the same number each.

    With ``splits`` the result is a pair: the rows, and how many came from each rank.
    """
    result, received = _autograd.Alltoall.apply(tensor, _splits(splits), name, process_set)
    return result if splits is None else (result, received)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[torch.Tensor]:
    """Starts a reducescatter; it can't be differentiated."""
    handle = collectives.reducescatter([tensor], name, op, prescale_factor, postscale_factor, process_set)
    return _then(handle, lambda result: result[0])


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's rows of the reduction; the first ranks take what can't be split evenly."""
    return grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)[0]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[torch.Tensor]]:
    """Starts several reducescatters in one request."""
    return collectives.reducescatter(tensors, name, op, prescale_factor, postscale_factor, process_set)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """As ``reducescatter``, of several tensors in one request."""
    small = [compression.compress(tensor) for tensor in tensors]
    results = _autograd.ReduceScatter.apply(
        name,
        reduce_op(op),
        prescale_factor,
        postscale_factor,
        process_set,
        *[tensor for tensor, _ in small],
    )
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, small)]


class _Then(Handle[Any]):
    """A handle whose result is made of another one's."""

    __slots__ = ("_inner", "_map")

    def __init__(self, inner: Handle[Any], make: Any) -> None:
        self._inner, self._map = inner, make

    def poll(self) -> bool:
        return self._inner.poll()

    def wait(self, timeout: float | None = None) -> Any:
        if not hasattr(self, "_result"):
            self._result = self._map(self._inner.wait(timeout))
        return self._result

    def __repr__(self) -> str:
        return repr(self._inner)


def _then(handle: Handle[Any], make: Any) -> Handle[Any]:
    return _Then(handle, make)


def _first(handle: Handle[list[tuple[torch.Tensor, list[int]]]]) -> Handle[torch.Tensor]:
    return _then(handle, lambda result: result[0][0])


class SparseHandle(Handle[torch.Tensor]):
    """Horovod's sparse handles are called to be waited for; ``wait`` and ``synchronize`` do it, too."""

    __slots__ = ("_gathered", "_op", "_size")

    def __init__(self, gathered: Handle[Any], size: torch.Size, op: ReduceOp) -> None:
        self._gathered, self._size, self._op = gathered, size, op

    def poll(self) -> bool:
        return self._gathered.poll()

    def wait(self, timeout: float | None = None) -> torch.Tensor:
        if not hasattr(self, "_result"):
            (indices, rows), (values, _) = self._gathered.wait(timeout)
            if self._op == Average:
                # As many as took part: ranks that have joined give no rows (features 2.5).
                values = values / len(rows)
            everything = torch.sparse_coo_tensor(indices.t(), values, self._size, check_invariants=True)
            self._result = everything.coalesce()
        return self._result

    def __call__(self) -> torch.Tensor:
        return self.wait()

    def __repr__(self) -> str:
        return repr(self._gathered)


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op = None,
    process_set: ProcessSet = global_process_set,
) -> SparseHandle:
    """Starts an allreduce of a sparse COO tensor: its average, or its sum.

    Entries of the same place are added up here first, so that each travels once.
    """
    op = reduce_op(op)
    if op not in (Average, Sum):
        raise InvalidRequest(f"sparse tensors have no {op!r}: use Average or Sum", kind="invalid")
    if not tensor.is_sparse:
        raise InvalidRequest("sparse_allreduce_async needs a sparse COO tensor", kind="invalid")
    tensor = tensor.detach().coalesce()
    parts = [tensor.indices().t().contiguous(), tensor.values()]
    # Under an allreduce's name: a rank whose tensor of that name is dense is found out at once.
    handle = collectives.allgather(parts, name, process_set, kind="allreduce")
    return SparseHandle(handle, tensor.size(), op)
