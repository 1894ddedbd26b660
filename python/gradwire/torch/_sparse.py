"""The allreduce of sparse tensors: an allgather of their entries, which are summed by index."""

from __future__ import annotations

from typing import Any

import torch

from gradwire._errors import Disagreement, InvalidRequest
from gradwire._ops import Average, Handle, ReduceOp, Sum, reduce_op
from gradwire._process_sets import ProcessSet, global_process_set
from gradwire.torch._adapter import check_is_tensor, collectives


def entries(indices: torch.Tensor, values: torch.Tensor, size: torch.Size) -> torch.Tensor:
    """Returns a sparse COO tensor with these entries, on their device.

    PyTorch requires that either both or neither are pinned memory. Shared memory is pinned if GPU
    tensors have used its mapping.
    """
    if indices.is_pinned() != values.is_pinned():
        indices, values = indices.clone(), values.clone()
    return torch.sparse_coo_tensor(
        indices, values, size, device=values.device, check_invariants=True
    )


def size_to_send(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the size of a tensor as a tensor, to be gathered with its entries."""
    return torch.tensor(list(tensor.size()), dtype=torch.int64, device="cpu")


def check_sizes(gathered: torch.Tensor, dims: list[int], own: torch.Size, name: str) -> None:
    """Raises Disagreement if the ranks' tensors have different sizes.

    ``dims`` is each rank's number of dimensions.
    """
    sizes = [part.tolist() for part in gathered.split(dims)]
    if any(size != list(own) for size in sizes):
        given = ", ".join(f"{size}" for size in sizes)
        raise Disagreement(
            f"tensor {name!r}: the ranks passed sparse tensors of different shapes: {given} in "
            "rank order; make the same call on every rank",
            kind="disagreement",
            tensor=name,
        )


class SparseHandle(Handle[torch.Tensor]):
    """The handle of a sparse allreduce.

    Horovod's handle is called to get the result. This one can be called or waited for.
    """

    __slots__ = ()

    def __call__(self) -> torch.Tensor:
        return self.wait()


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    process_set: ProcessSet = global_process_set,
) -> SparseHandle:
    """Starts an allreduce of a sparse COO tensor and returns immediately. Not differentiable.

    Entries with the same index are summed before sending.

    Args:
        tensor: A sparse COO tensor on any device. All ranks pass the same dtype, shape and number
            of sparse dimensions.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        op: ``Average``, which is the default, or ``Sum``. All ranks pass the same. An average of
            whole numbers is truncated.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        The operation in flight. Its ``wait`` returns a coalesced sparse COO tensor.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.

    Example:
        ```python
        handle = hvd.sparse_allreduce_async(embedding.weight.grad, name="embedding")
        embedding.weight.grad = handle.wait()
        ```
    """
    op = reduce_op(op)
    if op not in (Average, Sum):
        raise InvalidRequest(
            f"sparse tensors can't be reduced with {op!r}: use Average or Sum", kind="invalid"
        )
    check_is_tensor(tensor)
    if not tensor.is_sparse:
        raise InvalidRequest("sparse_allreduce_async needs a sparse COO tensor", kind="invalid")
    tensor = tensor.detach().coalesce()
    parts = [tensor.indices().t().contiguous(), tensor.values(), size_to_send(tensor)]
    # Named like an allreduce, so a rank with a dense tensor of that name fails immediately.
    gathered = collectives.allgather(parts, name, process_set, kind="allreduce", op=op)
    native, size = gathered._native, tensor.size()

    def finish(result: Any) -> torch.Tensor:
        (indices, rows), (values, _), (sizes, dims) = gathered._finish(result)
        check_sizes(sizes, dims, size, native.name)
        # The number of participating ranks: joined ranks contribute no rows.
        divisor = len(rows) if op == Average else 1
        is_whole = not (values.is_floating_point() or values.is_complex())
        if not is_whole and divisor > 1:
            values = values / divisor
        total = entries(indices.t(), values, size).coalesce()
        if is_whole and divisor > 1:
            values = total.values().div(divisor, rounding_mode="trunc")
            total = entries(total.indices(), values, size).coalesce()
        return total

    return SparseHandle(native, finish)
