"""The collectives on tensors, with Horovod's signatures. Those that wait can be differentiated.

The gradient of an operation is what Horovod defines: of an allreduce the allreduce, of an allgather
and of a broadcast the average of this rank's part, of an alltoall the alltoall back, of a
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
    """Returns the reduction that ``op`` and Horovod's deprecated argument ``average`` ask for.

    Raises:
        ValueError: Both were given.
    """
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
    """Starts an allreduce into a new tensor and returns at once.

    The result can't be differentiated.

    Args:
        tensor: A dense tensor on any device. All ranks give the same dtype and shape.
        average: Deprecated: use ``op``. True is ``Average``, False is ``Sum``.
        name: Pairs the calls of different ranks: calls of one name belong together. Calls without a
            name are paired by their order.
        op: The reduction, such as ``Sum`` or ``Max``. The default is ``Average``. An average of
            integers is the sum, divided and truncated.
        prescale_factor: Each contribution is multiplied by this finite number before the reduction.
            Integers are multiplied as 64-bit floats and truncated.
        postscale_factor: The result is multiplied by this finite number.
        process_set: The ranks that take part. The default is all ranks.

    Returns:
        The operation in flight. Its ``wait`` returns a new tensor, on the device of ``tensor``.

    Raises:
        NotInitialized: ``init()`` has not been called.
        InvalidRequest: An argument is not usable. Nothing was started.
        ValueError: Both ``op`` and ``average`` were given.

    Example:
        ```python
        handle = hvd.allreduce_async(loss.detach(), name="loss")
        mean = hvd.synchronize(handle)
        ```
    """
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
    """Reduces one tensor over all ranks; every rank gets the result.

    Args:
        tensor: A dense tensor on any device. All ranks give the same dtype and shape.
        average: Deprecated: use ``op``. True is ``Average``, False is ``Sum``.
        name: Pairs the calls of different ranks: calls of one name belong together. Calls without a
            name are paired by their order.
        compression: The dtype that the tensor has in shared memory: one of ``Compression``, or
            another subclass of ``Compressor``.
        op: The reduction, such as ``Sum`` or ``Max``. The default is ``Average``. An average of
            integers is the sum, divided and truncated.
        prescale_factor: Each contribution is multiplied by this finite number before the reduction.
            Integers are multiplied as 64-bit floats and truncated.
        postscale_factor: The result is multiplied by this finite number.
        process_set: The ranks that take part. The default is all ranks.

    Returns:
        A new tensor of the same dtype and shape, on the same device. It can be differentiated if
        ``op`` is ``Average``, ``Sum``, ``Adasum``, ``Min`` or ``Max``.

    Raises:
        NotInitialized: ``init()`` has not been called.
        InvalidRequest: An argument is not usable. Nothing was started.
        Disagreement: The ranks asked for different things under one name.
        PeerLost: A rank or a node that takes part has ended or does not answer.
        GradwireError: The operation failed for another reason.
        ValueError: Both ``op`` and ``average`` were given.

    Example:
        ```python
        mean = hvd.allreduce(loss, name="loss")
        largest = hvd.allreduce(loss.detach(), op=hvd.Max)
        ```
    """
    op = handle_average(op, average)
    small, ctx = compression.compress(tensor)
    [result] = _autograd.GroupedAllreduce.apply(
        name, op, prescale_factor, postscale_factor, process_set, small
    )
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
    """Starts an allreduce in place and returns at once.

    The result can't be differentiated.

    Args:
        tensor: A dense tensor on any device. All ranks give the same dtype and shape. It receives
            the result.
        average: Deprecated: use ``op``. True is ``Average``, False is ``Sum``.
        name: Pairs the calls of different ranks: calls of one name belong together. Calls without a
            name are paired by their order.
        op: The reduction, such as ``Sum`` or ``Max``. The default is ``Average``. An average of
            integers is the sum, divided and truncated.
        prescale_factor: Each contribution is multiplied by this finite number before the reduction.
            Integers are multiplied as 64-bit floats and truncated.
        postscale_factor: The result is multiplied by this finite number.
        process_set: The ranks that take part. The default is all ranks.

    Returns:
        The operation in flight. The tensor changes in its ``wait``, which returns the tensor.

    Raises:
        NotInitialized: ``init()`` has not been called.
        InvalidRequest: An argument is not usable. Nothing was started.
        ValueError: Both ``op`` and ``average`` were given.
    """
    op = handle_average(op, average)
    return collectives.allreduce(
        tensor, name, op, prescale_factor, postscale_factor, process_set, in_place=True
    )


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduces one tensor over all ranks, in place.

    The result can't be differentiated.

    Args:
        tensor: A dense tensor on any device. All ranks give the same dtype and shape. It receives
            the result.
        average: Deprecated: use ``op``. True is ``Average``, False is ``Sum``.
        name: Pairs the calls of different ranks: calls of one name belong together. Calls without a
            name are paired by their order.
        op: The reduction, such as ``Sum`` or ``Max``. The default is ``Average``. An average of
            integers is the sum, divided and truncated.
        prescale_factor: Each contribution is multiplied by this finite number before the reduction.
            Integers are multiplied as 64-bit floats and truncated.
        postscale_factor: The result is multiplied by this finite number.
        process_set: The ranks that take part. The default is all ranks.

    Returns:
        The tensor that was given, with the result in it.

    Raises:
        NotInitialized: ``init()`` has not been called.
        InvalidRequest: An argument is not usable. Nothing was started.
        Disagreement: The ranks asked for different things under one name.
        PeerLost: A rank or a node that takes part has ended or does not answer.
        GradwireError: The operation failed for another reason.
        ValueError: Both ``op`` and ``average`` were given.
    """
    op = handle_average(op, average)
    return allreduce_async_(
        tensor, None, name, op, prescale_factor, postscale_factor, process_set
    ).wait()


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """Starts an allreduce of several tensors in one request.

    The result can't be differentiated.

    The request completes as a whole: either all tensors are reduced or none is.

    Args:
        tensors: Dense tensors on any device; at least one. All ranks give as many, with the same
            dtypes and shapes.
        average: Deprecated: use ``op``. True is ``Average``, False is ``Sum``.
        name: Pairs the calls of different ranks: calls of one name belong together. Calls without a
            name are paired by their order.
        op: The reduction, such as ``Sum`` or ``Max``. The default is ``Average``. An average of
            integers is the sum, divided and truncated.
        prescale_factor: Each contribution is multiplied by this finite number before the reduction.
            Integers are multiplied as 64-bit floats and truncated.
        postscale_factor: The result is multiplied by this finite number.
        process_set: The ranks that take part. The default is all ranks.

    Returns:
        The operation in flight. Its ``wait`` returns new tensors in the order of the arguments.

    Raises:
        NotInitialized: ``init()`` has not been called.
        InvalidRequest: An argument is not usable. Nothing was started.
        ValueError: Both ``op`` and ``average`` were given.
    """
    op = handle_average(op, average)
    return collectives.grouped_allreduce(
        tensors, name, op, prescale_factor, postscale_factor, process_set
    )


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
    """Reduces several tensors over all ranks in one request.

    The request completes as a whole: either all tensors are reduced or none is.

    Args:
        tensors: Dense tensors on any device; at least one. All ranks give as many, with the same
            dtypes and shapes.
        average: Deprecated: use ``op``. True is ``Average``, False is ``Sum``.
        name: Pairs the calls of different ranks: calls of one name belong together. Calls without a
            name are paired by their order.
        compression: The dtype that the tensor has in shared memory: one of ``Compression``, or
            another subclass of ``Compressor``.
        op: The reduction, such as ``Sum`` or ``Max``. The default is ``Average``. An average of
            integers is the sum, divided and truncated.
        prescale_factor: Each contribution is multiplied by this finite number before the reduction.
            Integers are multiplied as 64-bit floats and truncated.
        postscale_factor: The result is multiplied by this finite number.
        process_set: The ranks that take part. The default is all ranks.

    Returns:
        New tensors in the order of the arguments, each of the dtype, shape and device of its
        argument. They can be differentiated, as the result of ``allreduce`` can.

    Raises:
        NotInitialized: ``init()`` has not been called.
        InvalidRequest: An argument is not usable. Nothing was started.
        Disagreement: The ranks asked for different things under one name.
        PeerLost: A rank or a node that takes part has ended or does not answer.
        GradwireError: The operation failed for another reason.
        ValueError: Both ``op`` and ``average`` were given.
    """
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
    """Starts an allreduce of several tensors in place, in one request.

    The result can't be differentiated.

    Args:
        tensors: Dense tensors on any device; at least one. All ranks give as many, with the same
            dtypes and shapes. They receive the results.
        average: Deprecated: use ``op``. True is ``Average``, False is ``Sum``.
        name: Pairs the calls of different ranks: calls of one name belong together. Calls without a
            name are paired by their order.
        op: The reduction, such as ``Sum`` or ``Max``. The default is ``Average``. An average of
            integers is the sum, divided and truncated.
        prescale_factor: Each contribution is multiplied by this finite number before the reduction.
            Integers are multiplied as 64-bit floats and truncated.
        postscale_factor: The result is multiplied by this finite number.
        process_set: The ranks that take part. The default is all ranks.

    Returns:
        The operation in flight. The tensors change in its ``wait``, which returns them.

    Raises:
        NotInitialized: ``init()`` has not been called.
        InvalidRequest: An argument is not usable. Nothing was started.
        ValueError: Both ``op`` and ``average`` were given.
    """
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
    """Reduces several tensors over all ranks in place, in one request.

    The result can't be differentiated.

    Args:
        tensors: Dense tensors on any device; at least one. All ranks give as many, with the same
            dtypes and shapes. They receive the results.
        average: Deprecated: use ``op``. True is ``Average``, False is ``Sum``.
        name: Pairs the calls of different ranks: calls of one name belong together. Calls without a
            name are paired by their order.
        op: The reduction, such as ``Sum`` or ``Max``. The default is ``Average``. An average of
            integers is the sum, divided and truncated.
        prescale_factor: Each contribution is multiplied by this finite number before the reduction.
            Integers are multiplied as 64-bit floats and truncated.
        postscale_factor: The result is multiplied by this finite number.
        process_set: The ranks that take part. The default is all ranks.

    Returns:
        The tensors that were given, with the results in them.

    Raises:
        NotInitialized: ``init()`` has not been called.
        InvalidRequest: An argument is not usable. Nothing was started.
        Disagreement: The ranks asked for different things under one name.
        PeerLost: A rank or a node that takes part has ended or does not answer.
        GradwireError: The operation failed for another reason.
        ValueError: Both ``op`` and ``average`` were given.
    """
    op = handle_average(op, average)
    return grouped_allreduce_async_(
        tensors, None, name, op, prescale_factor, postscale_factor, process_set
    ).wait()


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[torch.Tensor]:
    """Starts an allgather and returns at once.

    The result can't be differentiated.

    Args:
        tensor: A dense tensor on any device. All ranks give the same dtype and the same dimensions
            but the first. A tensor without dimensions counts as one row.
        name: Pairs the calls of different ranks: calls of one name belong together. Calls without a
            name are paired by their order.
        process_set: The ranks that take part. The default is all ranks.

    Returns:
        The operation in flight. Its ``wait`` returns what ``allgather`` returns.

    Raises:
        NotInitialized: ``init()`` has not been called.
        InvalidRequest: An argument is not usable. Nothing was started.
    """
    return _first(collectives.allgather([tensor], name, process_set))


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenates all ranks' tensors along the first dimension; every rank gets the result.

    Args:
        tensor: A dense tensor on any device. All ranks give the same dtype and the same dimensions
            but the first. A tensor without dimensions counts as one row.
        name: Pairs the calls of different ranks: calls of one name belong together. Calls without a
            name are paired by their order.
        process_set: The ranks that take part. The default is all ranks.

    Returns:
        A new tensor with the rows of all ranks, in rank order. It can be differentiated.

    Raises:
        NotInitialized: ``init()`` has not been called.
        InvalidRequest: An argument is not usable. Nothing was started.
        Disagreement: The ranks asked for different things under one name.
        PeerLost: A rank or a node that takes part has ended or does not answer.
        GradwireError: The operation failed for another reason.

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
    """Starts several allgathers in one request.

    The result can't be differentiated.

    Args:
        tensors: Tensors as ``allgather`` takes them; at least one. All ranks give as many.
        name: Pairs the calls of different ranks: calls of one name belong together. Calls without a
            name are paired by their order.
        process_set: The ranks that take part. The default is all ranks.

    Returns:
        The operation in flight. Its ``wait`` returns what ``grouped_allgather`` returns.

    Raises:
        NotInitialized: ``init()`` has not been called.
        InvalidRequest: An argument is not usable. Nothing was started.
    """
    handle = collectives.allgather(tensors, name, process_set)
    return _then(handle, lambda result: [tensor for tensor, _ in result])


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Gathers several tensors, each as ``allgather`` does, in one request.

    Args:
        tensors: Tensors as ``allgather`` takes them; at least one. All ranks give as many.
        name: Pairs the calls of different ranks: calls of one name belong together. Calls without a
            name are paired by their order.
        process_set: The ranks that take part. The default is all ranks.

    Returns:
        New tensors in the order of the arguments, each with the rows of all ranks. They can be
        differentiated.

    Raises:
        NotInitialized: ``init()`` has not been called.
        InvalidRequest: An argument is not usable. Nothing was started.
        Disagreement: The ranks asked for different things under one name.
        PeerLost: A rank or a node that takes part has ended or does not answer.
        GradwireError: The operation failed for another reason.
    """
    return list(_autograd.Allgather.apply(name, process_set, *tensors))


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Starts a broadcast into a new tensor and returns at once.

    The result can't be differentiated.

    Args:
        tensor: A dense tensor on any device. All ranks give the same dtype and shape.
        root_rank: The rank in the job whose tensor all ranks get.
        name: Pairs the calls of different ranks: calls of one name belong together. Calls without a
            name are paired by their order.
        process_set: The ranks that take part. The default is all ranks.

    Returns:
        The operation in flight. Its ``wait`` returns what ``broadcast`` returns.

    Raises:
        NotInitialized: ``init()`` has not been called.
        InvalidRequest: An argument is not usable. Nothing was started.
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
        tensor: A dense tensor on any device. All ranks give the same dtype and shape.
        root_rank: The rank in the job whose tensor all ranks get.
        name: Pairs the calls of different ranks: calls of one name belong together. Calls without a
            name are paired by their order.
        process_set: The ranks that take part. The default is all ranks.

    Returns:
        A new tensor with the root's elements. It can be differentiated.

    Raises:
        NotInitialized: ``init()`` has not been called.
        InvalidRequest: An argument is not usable. Nothing was started.
        Disagreement: The ranks asked for different things under one name.
        PeerLost: A rank or a node that takes part has ended or does not answer.
        GradwireError: The operation failed for another reason.
    """
    result: torch.Tensor = _autograd.Broadcast.apply(tensor, root_rank, name, process_set)
    return result


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Starts a broadcast in place and returns at once.

    The result can't be differentiated.

    Args:
        tensor: A dense tensor on any device. All ranks give the same dtype and shape. It receives
            the result.
        root_rank: The rank in the job whose tensor all ranks get.
        name: Pairs the calls of different ranks: calls of one name belong together. Calls without a
            name are paired by their order.
        process_set: The ranks that take part. The default is all ranks.

    Returns:
        The operation in flight. The tensor changes in its ``wait``, which returns the tensor.

    Raises:
        NotInitialized: ``init()`` has not been called.
        InvalidRequest: An argument is not usable. Nothing was started.
    """
    return collectives.broadcast(tensor, root_rank, name, process_set, in_place=True)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Copies the root's tensor to every rank, in place.

    The result can't be differentiated.

    Args:
        tensor: A dense tensor on any device. All ranks give the same dtype and shape. It receives
            the result.
        root_rank: The rank in the job whose tensor all ranks get.
        name: Pairs the calls of different ranks: calls of one name belong together. Calls without a
            name are paired by their order.
        process_set: The ranks that take part. The default is all ranks.

    Returns:
        The tensor that was given, with the root's elements in it.

    Raises:
        NotInitialized: ``init()`` has not been called.
        InvalidRequest: An argument is not usable. Nothing was started.
        Disagreement: The ranks asked for different things under one name.
        PeerLost: A rank or a node that takes part has ended or does not answer.
        GradwireError: The operation failed for another reason.
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
    """Starts an alltoall and returns at once.

    The result can't be differentiated.

    Args:
        tensor: A dense tensor on any device. All ranks give the same dtype and the same dimensions
            but the first. A tensor without dimensions counts as one row.
        splits: The number of rows for each rank, as ``alltoall`` takes them.
        name: Pairs the calls of different ranks: calls of one name belong together. Calls without a
            name are paired by their order.
        process_set: The ranks that take part. The default is all ranks.

    Returns:
        The operation in flight. Its ``wait`` returns what ``alltoall`` returns.

    Raises:
        NotInitialized: ``init()`` has not been called.
        InvalidRequest: An argument is not usable. Nothing was started.
    """
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
    """Splits every rank's tensor along the first dimension and gives each rank its part of all.

    Args:
        tensor: A dense tensor on any device. All ranks give the same dtype and the same dimensions
            but the first. A tensor without dimensions counts as one row.
        splits: The number of rows for each rank, in rank order: a list, or a tensor of whole
            numbers in one dimension. They add up to at most the rows of the tensor. The default is
            the same number for each, which must divide the rows.
        name: Pairs the calls of different ranks: calls of one name belong together. Calls without a
            name are paired by their order.
        process_set: The ranks that take part. The default is all ranks.

    Returns:
        A new tensor with the rows from all ranks, in rank order. With ``splits`` a pair: that
        tensor, and an int32 tensor with the number of rows from each rank. The rows can be
        differentiated.

    Raises:
        NotInitialized: ``init()`` has not been called.
        InvalidRequest: An argument is not usable. Nothing was started.
        Disagreement: The ranks asked for different things under one name.
        PeerLost: A rank or a node that takes part has ended or does not answer.
        GradwireError: The operation failed for another reason.
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
    """Starts a reducescatter and returns at once.

    The result can't be differentiated.

    Args:
        tensor: A dense tensor on any device. All ranks give the same dtype and shape.
        name: Pairs the calls of different ranks: calls of one name belong together. Calls without a
            name are paired by their order.
        op: The reduction, such as ``Sum`` or ``Max``. The default is ``Average``. An average of
            integers is the sum, divided and truncated.
        process_set: The ranks that take part. The default is all ranks.
        prescale_factor: Each contribution is multiplied by this finite number before the reduction.
            Integers are multiplied as 64-bit floats and truncated.
        postscale_factor: The result is multiplied by this finite number.

    Returns:
        The operation in flight. Its ``wait`` returns what ``reducescatter`` returns.

    Raises:
        NotInitialized: ``init()`` has not been called.
        InvalidRequest: An argument is not usable. Nothing was started.
    """
    handle = collectives.reducescatter(
        [tensor], name, op, prescale_factor, postscale_factor, process_set
    )
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
    """Reduces one tensor over all ranks and splits the result along the first dimension.

    Args:
        tensor: A dense tensor on any device. All ranks give the same dtype and shape.
        name: Pairs the calls of different ranks: calls of one name belong together. Calls without a
            name are paired by their order.
        compression: The dtype that the tensor has in shared memory: one of ``Compression``, or
            another subclass of ``Compressor``.
        op: The reduction, such as ``Sum`` or ``Max``. The default is ``Average``. An average of
            integers is the sum, divided and truncated.
        process_set: The ranks that take part. The default is all ranks.
        prescale_factor: Each contribution is multiplied by this finite number before the reduction.
            Integers are multiplied as 64-bit floats and truncated.
        postscale_factor: The result is multiplied by this finite number.

    Returns:
        A new tensor with this rank's rows of the result. If the number of rows is not a multiple of
        the number of ranks, the first ranks get one row more. It can be differentiated if ``op`` is
        ``Average`` or ``Sum``.

    Raises:
        NotInitialized: ``init()`` has not been called.
        InvalidRequest: An argument is not usable. Nothing was started.
        Disagreement: The ranks asked for different things under one name.
        PeerLost: A rank or a node that takes part has ended or does not answer.
        GradwireError: The operation failed for another reason.
    """
    return grouped_reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    )[0]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[torch.Tensor]]:
    """Starts several reducescatters in one request.

    The result can't be differentiated.

    Args:
        tensors: Dense tensors on any device; at least one. All ranks give as many, with the same
            dtypes and shapes.
        name: Pairs the calls of different ranks: calls of one name belong together. Calls without a
            name are paired by their order.
        op: The reduction, such as ``Sum`` or ``Max``. The default is ``Average``. An average of
            integers is the sum, divided and truncated.
        process_set: The ranks that take part. The default is all ranks.
        prescale_factor: Each contribution is multiplied by this finite number before the reduction.
            Integers are multiplied as 64-bit floats and truncated.
        postscale_factor: The result is multiplied by this finite number.

    Returns:
        The operation in flight. Its ``wait`` returns what ``grouped_reducescatter`` returns.

    Raises:
        NotInitialized: ``init()`` has not been called.
        InvalidRequest: An argument is not usable. Nothing was started.
    """
    return collectives.reducescatter(
        tensors, name, op, prescale_factor, postscale_factor, process_set
    )


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduces and splits several tensors, each as ``reducescatter`` does, in one request.

    Args:
        tensors: Dense tensors on any device; at least one. All ranks give as many, with the same
            dtypes and shapes.
        name: Pairs the calls of different ranks: calls of one name belong together. Calls without a
            name are paired by their order.
        compression: The dtype that the tensor has in shared memory: one of ``Compression``, or
            another subclass of ``Compressor``.
        op: The reduction, such as ``Sum`` or ``Max``. The default is ``Average``. An average of
            integers is the sum, divided and truncated.
        process_set: The ranks that take part. The default is all ranks.
        prescale_factor: Each contribution is multiplied by this finite number before the reduction.
            Integers are multiplied as 64-bit floats and truncated.
        postscale_factor: The result is multiplied by this finite number.

    Returns:
        New tensors in the order of the arguments, each with this rank's rows.

    Raises:
        NotInitialized: ``init()`` has not been called.
        InvalidRequest: An argument is not usable. Nothing was started.
        Disagreement: The ranks asked for different things under one name.
        PeerLost: A rank or a node that takes part has ended or does not answer.
        GradwireError: The operation failed for another reason.
    """
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
    """A handle whose result is computed from the result of another handle."""

    __slots__ = ("_inner", "_map")

    def __init__(self, inner: Handle[Any], make: Any) -> None:
        self._inner, self._map = inner, make

    def poll(self) -> bool:
        """Returns whether ``wait`` would return, or raise, at once."""
        return self._inner.poll()

    def wait(self, timeout: float | None = None) -> Any:
        """Waits for the operation, and returns the computed result."""
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
    """The handle of a sparse allreduce.

    Horovod's handle is called to get the result. This one can be called, too, or waited for.
    """

    __slots__ = ("_gathered", "_op", "_size")

    def __init__(self, gathered: Handle[Any], size: torch.Size, op: ReduceOp) -> None:
        self._gathered, self._size, self._op = gathered, size, op

    def poll(self) -> bool:
        """Returns whether ``wait`` would return, or raise, at once.

        Returns:
            True if the operation has ended.
        """
        return self._gathered.poll()

    def wait(self, timeout: float | None = None) -> torch.Tensor:
        """Waits for the operation to end.

        Args:
            timeout: The longest time to wait, in seconds. None waits without a limit.

        Returns:
            A coalesced sparse COO tensor of the shape that was given.

        Raises:
            WaitTimeout: The operation has not ended within ``timeout``. It goes on.
            NotInitialized: ``init()`` has not been called.
            InvalidRequest: An argument is not usable. Nothing was started.
            Disagreement: The ranks asked for different things under one name.
            PeerLost: A rank or a node that takes part has ended or does not answer.
            GradwireError: The operation failed for another reason.
        """
        if not hasattr(self, "_result"):
            (indices, rows), (values, _) = self._gathered.wait(timeout)
            if self._op == Average:
                # The number of ranks that took part: ranks that have joined give no rows.
                values = values / len(rows)
            everything = torch.sparse_coo_tensor(
                indices.t(), values, self._size, check_invariants=True
            )
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
    """Starts an allreduce of a sparse COO tensor and returns at once.

    The result can't be differentiated.

    Entries of the same place are added up before they are sent, so each is sent once.

    Args:
        tensor: A sparse COO tensor on any device. All ranks give the same dtype, shape and number
            of sparse dimensions.
        name: Pairs the calls of different ranks: calls of one name belong together. Calls without a
            name are paired by their order.
        op: ``Average``, which is the default, or ``Sum``.
        process_set: The ranks that take part. The default is all ranks.

    Returns:
        The operation in flight. Its ``wait`` returns a coalesced sparse COO tensor.

    Raises:
        NotInitialized: ``init()`` has not been called.
        InvalidRequest: An argument is not usable. Nothing was started.

    Example:
        ```python
        handle = hvd.sparse_allreduce_async(embedding.weight.grad, name="embedding")
        embedding.weight.grad = handle.wait()
        ```
    """
    op = reduce_op(op)
    if op not in (Average, Sum):
        raise InvalidRequest(f"sparse tensors have no {op!r}: use Average or Sum", kind="invalid")
    if not tensor.is_sparse:
        raise InvalidRequest("sparse_allreduce_async needs a sparse COO tensor", kind="invalid")
    tensor = tensor.detach().coalesce()
    parts = [tensor.indices().t().contiguous(), tensor.values()]
    # Under an allreduce's name: a rank whose tensor of that name is dense gets an error at once.
    handle = collectives.allgather(parts, name, process_set, kind="allreduce")
    return SparseHandle(handle, tensor.size(), op)
