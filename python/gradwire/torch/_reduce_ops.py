"""The reducing collectives on tensors, with Horovod's signatures.

The blocking functions are differentiable, with Horovod's gradients: for allreduce, the allreduce of
the gradients; for reducescatter, the allgather.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire._arguments import compressor
from gradwire._ops import Average, Handle, ReduceOp, handle_average, reduce_op
from gradwire._process_sets import ProcessSet, global_process_set
from gradwire.torch import _autograd
from gradwire.torch._adapter import collectives
from gradwire.torch._compression import Compression, Compressor

Op = ReduceOp | int | None


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Starts an allreduce into a new tensor and returns immediately. Not differentiable.

    Args:
        tensor: A dense tensor on any device. All ranks pass the same dtype and shape.
        average: Deprecated: use ``op``. True is ``Average``, False is ``Sum``.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        op: The reduction; ``Average`` by default. Averages of integers are truncated.
        prescale_factor: A finite factor for each contribution. Integer products are truncated.
        postscale_factor: A finite factor for the result.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        The operation in flight. Its ``wait`` returns a new tensor, on the device of ``tensor``.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
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
        tensor: A dense tensor on any device. All ranks pass the same dtype and shape.
        average: Deprecated: use ``op``. True is ``Average``, False is ``Sum``.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        compression: One of ``Compression``, or another subclass of ``Compressor``.
        op: The reduction; ``Average`` by default. Averages of integers are truncated.
        prescale_factor: A finite factor for each contribution. Integer products are truncated.
        postscale_factor: A finite factor for the result.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        A new tensor of the same dtype and shape, on the same device. It is differentiable if ``op``
        is ``Average``, ``Sum``, ``Adasum``, ``Min`` or ``Max``.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
        ValueError: Both ``op`` and ``average`` were given.

    Example:
        ```python
        mean = hvd.allreduce(loss, name="loss")
        largest = hvd.allreduce(loss.detach(), op=hvd.Max)
        ```
    """
    op = handle_average(op, average)
    small, ctx = compressor(compression).compress(tensor)
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
    """Starts an allreduce in place and returns immediately. Not differentiable.

    Args:
        tensor: A dense tensor on any device. All ranks pass the same dtype and shape. It receives
            the result.
        average: Deprecated: use ``op``. True is ``Average``, False is ``Sum``.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        op: The reduction; ``Average`` by default. Averages of integers are truncated.
        prescale_factor: A finite factor for each contribution. Integer products are truncated.
        postscale_factor: A finite factor for the result.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        The operation in flight. Its ``wait`` changes the tensor and returns it.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
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

    The result is not differentiable.

    Args:
        tensor: A dense tensor on any device. All ranks pass the same dtype and shape. It receives
            the result.
        average: Deprecated: use ``op``. True is ``Average``, False is ``Sum``.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        op: The reduction; ``Average`` by default. Averages of integers are truncated.
        prescale_factor: A finite factor for each contribution. Integer products are truncated.
        postscale_factor: A finite factor for the result.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        The given tensor, which contains the result.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
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
    """Starts an allreduce of several tensors in one request. Not differentiable.

    Either all tensors are reduced or none is.

    Args:
        tensors: Dense tensors on any device; at least one. All ranks pass the same number, with the
            same dtypes and shapes.
        average: Deprecated: use ``op``. True is ``Average``, False is ``Sum``.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        op: The reduction; ``Average`` by default. Averages of integers are truncated.
        prescale_factor: A finite factor for each contribution. Integer products are truncated.
        postscale_factor: A finite factor for the result.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        The operation in flight. Its ``wait`` returns new tensors in the order of the arguments.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
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

    Either all tensors are reduced or none is.

    Args:
        tensors: Dense tensors on any device; at least one. All ranks pass the same number, with the
            same dtypes and shapes.
        average: Deprecated: use ``op``. True is ``Average``, False is ``Sum``.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        compression: One of ``Compression``, or another subclass of ``Compressor``.
        op: The reduction; ``Average`` by default. Averages of integers are truncated.
        prescale_factor: A finite factor for each contribution. Integer products are truncated.
        postscale_factor: A finite factor for the result.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        New tensors in the order of the arguments, each of the dtype, shape and device of its
        argument. They are differentiable like the result of ``allreduce``.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
        ValueError: Both ``op`` and ``average`` were given.
    """
    op = handle_average(op, average)
    compress = compressor(compression).compress
    small = [compress(tensor) for tensor in tensors]
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
    """Starts an allreduce of several tensors in place, in one request. Not differentiable.

    Args:
        tensors: Dense tensors on any device; at least one. All ranks pass the same number, with the
            same dtypes and shapes. They receive the results.
        average: Deprecated: use ``op``. True is ``Average``, False is ``Sum``.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        op: The reduction; ``Average`` by default. Averages of integers are truncated.
        prescale_factor: A finite factor for each contribution. Integer products are truncated.
        postscale_factor: A finite factor for the result.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        The operation in flight. Its ``wait`` changes the tensors and returns them.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
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

    The result is not differentiable.

    Args:
        tensors: Dense tensors on any device; at least one. All ranks pass the same number, with the
            same dtypes and shapes. They receive the results.
        average: Deprecated: use ``op``. True is ``Average``, False is ``Sum``.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        op: The reduction; ``Average`` by default. Averages of integers are truncated.
        prescale_factor: A finite factor for each contribution. Integer products are truncated.
        postscale_factor: A finite factor for the result.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        The given tensors, which contain the results.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
        ValueError: Both ``op`` and ``average`` were given.
    """
    op = handle_average(op, average)
    return grouped_allreduce_async_(
        tensors, None, name, op, prescale_factor, postscale_factor, process_set
    ).wait()


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[torch.Tensor]:
    """Starts a reducescatter and returns immediately. Not differentiable.

    Args:
        tensor: A dense tensor on any device. All ranks pass the same dtype and shape.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        op: The reduction; ``Average`` by default. Averages of integers are truncated.
        process_set: The participating ranks. The default is all ranks.
        prescale_factor: A finite factor for each contribution. Integer products are truncated.
        postscale_factor: A finite factor for the result.

    Returns:
        The operation in flight. Its ``wait`` returns what ``reducescatter`` returns.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
    """
    handle = collectives.reducescatter(
        [tensor], name, op, prescale_factor, postscale_factor, process_set
    )
    return handle._map(lambda result: result[0])


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
        tensor: A dense tensor on any device. All ranks pass the same dtype and shape.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        compression: One of ``Compression``, or another subclass of ``Compressor``.
        op: The reduction; ``Average`` by default. Averages of integers are truncated.
        process_set: The participating ranks. The default is all ranks.
        prescale_factor: A finite factor for each contribution. Integer products are truncated.
        postscale_factor: A finite factor for the result.

    Returns:
        A new tensor with this rank's rows of the result. If the number of rows is not a multiple of
        the number of ranks, the first ranks receive one more row. It is differentiable if ``op`` is
        ``Average`` or ``Sum``.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
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
    """Starts several reducescatters in one request. Not differentiable.

    Args:
        tensors: Dense tensors on any device; at least one. All ranks pass the same number, with the
            same dtypes and shapes.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        op: The reduction; ``Average`` by default. Averages of integers are truncated.
        process_set: The participating ranks. The default is all ranks.
        prescale_factor: A finite factor for each contribution. Integer products are truncated.
        postscale_factor: A finite factor for the result.

    Returns:
        The operation in flight. Its ``wait`` returns what ``grouped_reducescatter`` returns.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
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
        tensors: Dense tensors on any device; at least one. All ranks pass the same number, with the
            same dtypes and shapes.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        compression: One of ``Compression``, or another subclass of ``Compressor``.
        op: The reduction; ``Average`` by default. Averages of integers are truncated.
        process_set: The participating ranks. The default is all ranks.
        prescale_factor: A finite factor for each contribution. Integer products are truncated.
        postscale_factor: A finite factor for the result.

    Returns:
        New tensors in the order of the arguments, each with this rank's rows.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    compress = compressor(compression).compress
    small = [compress(tensor) for tensor in tensors]
    results = _autograd.ReduceScatter.apply(
        name,
        reduce_op(op),
        prescale_factor,
        postscale_factor,
        process_set,
        *[tensor for tensor, _ in small],
    )
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, small)]
