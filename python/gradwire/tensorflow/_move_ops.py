"""The collectives that move tensors, with Horovod's signatures.

They work eagerly and in a ``tf.function``, and are differentiable with Horovod's gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gradwire import _ops
from gradwire._arguments import whole_number
from gradwire._process_sets import ProcessSet, global_process_set
from gradwire.tensorflow import _derivatives
from gradwire.tensorflow._derivatives import as_tensor, as_tensors, copying
from gradwire.tensorflow._running import as_python, compute, run


@as_python
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenates all ranks' tensors along the first dimension; every rank gets the result.

    Args:
        tensor: A tensor, variable or array. All ranks pass the same dtype, and the same dimensions
            except the first. A tensor without dimensions counts as one row.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        ignore_name_scope: Ignored; exists for Horovod scripts.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        A differentiable tensor with the rows of all ranks, in rank order.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.

    Example:
        ```python
        everybody = hvd.allgather(tf.range(hvd.rank() + 1))  # the number of rows may differ
        ```
    """
    del ignore_name_scope
    return _derivatives.allgather([as_tensor(tensor)], name, process_set)[0]


@as_python
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Gathers several tensors, each as ``allgather`` does, in one request.

    Args:
        tensors: Tensors as ``allgather`` takes them; at least one. All ranks pass the same number.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        ignore_name_scope: Ignored; exists for Horovod scripts.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        Tensors in the order of the arguments, each with the rows of all ranks.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    del ignore_name_scope
    return _derivatives.allgather(as_tensors(tensors), name, process_set)


@as_python
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Copies the root's tensor to every rank.

    Args:
        tensor: A tensor, variable or array. All ranks pass the same dtype and shape.
        root_rank: The global rank whose tensor all ranks receive.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        ignore_name_scope: Ignored; exists for Horovod scripts.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        A differentiable tensor with the root's elements.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    del ignore_name_scope
    return _derivatives.broadcast(as_tensor(tensor), root_rank, name, process_set)


@as_python
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Copies the root's variables to every rank, in place.

    Args:
        variables: Variables of TensorFlow or Keras. All ranks pass the same number, with the same
            dtypes and shapes.
        root_rank: The global rank whose variables all ranks receive.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        The variables.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    root_rank = whole_number("root_rank", root_rank)
    given = list(variables)
    if not given:
        return given
    starts = [
        copying(as_tensor(each), root_rank, None if name is None else f"{name}.{at}", process_set)
        for at, each in enumerate(given)
    ]
    for variable, [value] in zip(given, run(starts)):
        variable.assign(value)
    return given


@as_python
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Splits every rank's tensor along the first dimension and sends each rank its part.

    Args:
        tensor: A tensor, variable or array. All ranks pass the same dtype, and the same dimensions
            except the first. At least one dimension is required.
        splits: The number of rows for each rank, in rank order: a list or an integer vector. Their
            sum is at most the number of rows of the tensor. By default, all ranks receive the same
            number, which must divide the number of rows.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        ignore_name_scope: Ignored; exists for Horovod scripts.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        A differentiable tensor with the rows from all ranks, in rank order. With ``splits``, a pair
        of that tensor and an int32 vector with the number of rows from each rank.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    del ignore_name_scope
    given = None if splits is None else tf.cast(as_tensor(splits), tf.int64)
    result, received = _derivatives.alltoall(as_tensor(tensor), given, name, process_set)
    return result if splits is None else (result, received)


@as_python
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until every rank of the process set has called it.

    Args:
        process_set: The participating ranks. The default is all ranks.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """

    def wait() -> int:
        _ops.barrier(process_set)
        return 0

    compute(wait, tf.int32)


@as_python
def join(device: int = -1, process_set: ProcessSet = global_process_set) -> tf.Tensor:
    """Declares that this rank has no more data, and waits until all ranks have done so.

    Until then, this rank contributes nothing to the collectives of the others. Averages are over
    the ranks that still contribute.

    Args:
        device: Ignored; exists for Horovod scripts.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        The last rank that called ``join``: an int32 tensor without dimensions.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    return compute(lambda: _ops.join(device, process_set), tf.int32)
