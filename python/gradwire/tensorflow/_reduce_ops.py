"""The reducing collectives on tensors, with Horovod's signatures.

They work eagerly and in a ``tf.function``, and are differentiable with Horovod's gradients: for
allreduce, the allreduce of the gradients; for reducescatter, the allgather.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gradwire._arguments import compressor
from gradwire._errors import InvalidRequest
from gradwire._ops import ReduceOp, handle_average, reduce_op
from gradwire._process_sets import ProcessSet, global_process_set
from gradwire.tensorflow import _derivatives, _together
from gradwire.tensorflow._compression import Compression, Compressor
from gradwire.tensorflow._derivatives import as_tensor, as_tensors
from gradwire.tensorflow._running import as_python


@as_python
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduces one tensor over all ranks; every rank gets the result.

    Args:
        tensor: A tensor, variable or array. All ranks pass the same dtype and shape. For
            ``tf.IndexedSlices``, the rows of all ranks are gathered.
        average: Deprecated: use ``op``. True is ``Average``, False is ``Sum``.
        device_dense: Ignored; exists for Horovod scripts.
        device_sparse: Ignored; exists for Horovod scripts.
        compression: One of ``Compression``, or another subclass of ``Compressor``.
        op: The reduction; ``Average`` by default. Averages of integers are truncated.
        prescale_factor: A finite factor for each contribution. Integer products are truncated.
        postscale_factor: A finite factor for the result.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        A tensor of the same dtype and shape, or ``tf.IndexedSlices``. It is differentiable if
        ``op`` is ``Average``, ``Sum``, ``Adasum``, ``Min`` or ``Max``.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
        ValueError: Both ``op`` and ``average`` were given.

    Example:
        ```python
        mean = hvd.allreduce(loss, name="loss")
        total = hvd.allreduce(tf.range(4), op=hvd.Sum)
        ```
    """
    del device_dense, device_sparse
    op = handle_average(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        if prescale_factor != 1.0 or postscale_factor != 1.0:
            raise InvalidRequest("tf.IndexedSlices take no scale factors", kind="invalid")
        packed, context = compressor(compression).compress(tensor.values)
        sent = tf.IndexedSlices(packed, tensor.indices, tensor.dense_shape)
        part = _together.slices_part(sent, name, op, process_set)
        [results] = _together.differentiable_reduce([part])
        found = _together.reduced_slices(results, sent)
        values = compression.decompress(found.values, context)
        return tf.IndexedSlices(values, found.indices, found.dense_shape)
    packed, context = compressor(compression).compress(as_tensor(tensor))
    scales = prescale_factor, postscale_factor
    [result] = _derivatives.allreduce([packed], name, op, *scales, process_set)
    return compression.decompress(result, context)


@as_python
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Reduces several tensors over all ranks in one request.

    Either all tensors are reduced or none is.

    Args:
        tensors: Dense tensors; at least one. All ranks pass the same number, with the same dtypes
            and shapes.
        average: Deprecated: use ``op``. True is ``Average``, False is ``Sum``.
        device_dense: Ignored; exists for Horovod scripts.
        device_sparse: Ignored; exists for Horovod scripts.
        compression: One of ``Compression``, or another subclass of ``Compressor``.
        op: The reduction; ``Average`` by default. Averages of integers are truncated.
        prescale_factor: A finite factor for each contribution. Integer products are truncated.
        postscale_factor: A finite factor for the result.
        process_set: The participating ranks. The default is all ranks.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.

    Returns:
        Tensors in the order of the arguments, each with the dtype and shape of its argument.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
        ValueError: Both ``op`` and ``average`` were given.
    """
    del device_dense, device_sparse
    op = handle_average(op, average)
    compress = compressor(compression).compress
    packed = [compress(tensor) for tensor in as_tensors(tensors)]
    scales = prescale_factor, postscale_factor
    given = [tensor for tensor, _ in packed]
    results = _derivatives.allreduce(given, name, op, *scales, process_set)
    return [compression.decompress(each, context) for each, (_, context) in zip(results, packed)]


@as_python
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | int | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduces one tensor over all ranks and splits the result along the first dimension.

    Args:
        tensor: A tensor, variable or array. All ranks pass the same dtype and shape.
        device_dense: Ignored; exists for Horovod scripts.
        compression: One of ``Compression``, or another subclass of ``Compressor``.
        op: The reduction; ``Average`` by default. Averages of integers are truncated.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        process_set: The participating ranks. The default is all ranks.
        prescale_factor: A finite factor for each contribution. Integer products are truncated.
        postscale_factor: A finite factor for the result.

    Returns:
        A tensor with this rank's rows of the result. If the number of rows is not a multiple of the
        number of ranks, the first ranks receive one more row. It is differentiable if ``op`` is
        ``Average`` or ``Sum``.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    [result] = grouped_reducescatter(
        [tensor],
        device_dense,
        compression,
        op,
        process_set,
        prescale_factor,
        postscale_factor,
        name,
    )
    return result


@as_python
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | int | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Reduces and splits several tensors, each as ``reducescatter`` does, in one request.

    Args:
        tensors: Dense tensors; at least one. All ranks pass the same number, with the same dtypes
            and shapes.
        device_dense: Ignored; exists for Horovod scripts.
        compression: One of ``Compression``, or another subclass of ``Compressor``.
        op: The reduction; ``Average`` by default. Averages of integers are truncated.
        process_set: The participating ranks. The default is all ranks.
        prescale_factor: A finite factor for each contribution. Integer products are truncated.
        postscale_factor: A finite factor for the result.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.

    Returns:
        Tensors in the order of the arguments, each with this rank's rows.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    del device_dense
    compress = compressor(compression).compress
    packed = [compress(tensor) for tensor in as_tensors(tensors)]
    scales = prescale_factor, postscale_factor
    given = [tensor for tensor, _ in packed]
    results = _derivatives.reducescatter(given, name, reduce_op(op), *scales, process_set)
    return [compression.decompress(each, context) for each, (_, context) in zip(results, packed)]
