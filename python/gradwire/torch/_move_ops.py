"""The data-moving collectives on tensors, with Horovod's signatures.

The blocking functions are differentiable, with Horovod's gradients: for allgather and broadcast,
the average of this rank's part; for alltoall, the reverse alltoall.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradwire._arguments import rows
from gradwire._errors import InvalidRequest
from gradwire._ops import Handle
from gradwire._process_sets import ProcessSet, global_process_set
from gradwire.torch import _autograd
from gradwire.torch._adapter import check_has_data, check_no_overlap, collectives


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[torch.Tensor]:
    """Starts an allgather and returns immediately. Not differentiable.

    Args:
        tensor: A dense tensor on any device. All ranks pass the same dtype, and the same dimensions
            except the first. A tensor without dimensions counts as one row.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        The operation in flight. Its ``wait`` returns what ``allgather`` returns.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
    """
    handle = collectives.allgather([tensor], name, process_set)
    return handle._map(lambda result: result[0][0])


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenates all ranks' tensors along the first dimension; every rank gets the result.

    Args:
        tensor: A dense tensor on any device. All ranks pass the same dtype, and the same dimensions
            except the first. A tensor without dimensions counts as one row.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        A new tensor with the rows of all ranks, in rank order. It is differentiable.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.

    Example:
        ```python
        predictions = hvd.allgather(model(batch))  # the batches may have different sizes
        ```
    """
    result: torch.Tensor = _autograd.Allgather.apply(name, process_set, tensor)[0]
    return result


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """Starts several allgathers in one request. Not differentiable.

    Args:
        tensors: Tensors as ``allgather`` takes them; at least one. All ranks pass the same number.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        The operation in flight. Its ``wait`` returns what ``grouped_allgather`` returns.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
    """
    handle = collectives.allgather(tensors, name, process_set)
    return handle._map(lambda result: [tensor for tensor, _ in result])


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Gathers several tensors, each as ``allgather`` does, in one request.

    Args:
        tensors: Tensors as ``allgather`` takes them; at least one. All ranks pass the same number.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        New tensors in the order of the arguments, each with the rows of all ranks. They are
        differentiable.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    return list(_autograd.Allgather.apply(name, process_set, *tensors))


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Starts a broadcast into a new tensor and returns immediately. Not differentiable.

    Args:
        tensor: A dense tensor on any device. All ranks pass the same dtype and shape.
        root_rank: The global rank whose tensor all ranks receive.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        The operation in flight. Its ``wait`` returns what ``broadcast`` returns.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
    """
    return collectives.broadcast(tensor, root_rank, name, process_set)


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Copies the root's tensor to every rank.

    Args:
        tensor: A dense tensor on any device. All ranks pass the same dtype and shape.
        root_rank: The global rank whose tensor all ranks receive.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        A new tensor with the root's elements. It is differentiable.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    result: torch.Tensor = _autograd.Broadcast.apply(tensor, root_rank, name, process_set)
    return result


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Starts a broadcast in place and returns immediately. Not differentiable.

    Args:
        tensor: A dense tensor on any device. All ranks pass the same dtype and shape. It receives
            the result.
        root_rank: The global rank whose tensor all ranks receive.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        The operation in flight. Its ``wait`` changes the tensor and returns it.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
    """
    # Also on the root, which only reads the tensor: programs pass the same kind of tensor on all
    # ranks, so the others would refuse it while the root waits for them.
    check_has_data(tensor)
    check_no_overlap(tensor)
    return collectives.broadcast(tensor, root_rank, name, process_set, in_place=True)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Copies the root's tensor to every rank, in place.

    The result is not differentiable.

    Args:
        tensor: A dense tensor on any device. All ranks pass the same dtype and shape. It receives
            the result.
        root_rank: The global rank whose tensor all ranks receive.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        The given tensor, which contains the root's elements.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
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
    """Starts an alltoall and returns immediately. Not differentiable.

    Args:
        tensor: A dense tensor on any device. All ranks pass the same dtype, and the same dimensions
            except the first. At least one dimension is required.
        splits: The number of rows for each rank, as for ``alltoall``.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        The operation in flight. Its ``wait`` returns what ``alltoall`` returns.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
    """
    handle = collectives.alltoall(tensor, _splits(splits), name, process_set)
    if splits is None:
        return handle._map(lambda result: result[0])

    def with_counts(result: tuple[torch.Tensor, list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        return result[0], torch.tensor(result[1], dtype=torch.int32, device="cpu")

    return handle._map(with_counts)


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Splits every rank's tensor along the first dimension and sends each rank its part.

    Args:
        tensor: A dense tensor on any device. All ranks pass the same dtype, and the same dimensions
            except the first. At least one dimension is required.
        splits: The number of rows for each rank, in rank order: a list, or a tensor of whole
            numbers in one dimension. Their sum is at most the number of rows of the tensor. By
            default, all ranks receive the same number, which must divide the number of rows.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        A new tensor with the rows from all ranks, in rank order. With ``splits``, a pair of that
        tensor and an int32 tensor of the number of rows from each rank. The rows are
        differentiable.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    result, received = _autograd.Alltoall.apply(tensor, _splits(splits), name, process_set)
    return result if splits is None else (result, received)
