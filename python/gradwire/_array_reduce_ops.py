"""The reducing collectives on NumPy arrays and on objects that support DLPack.

Supported dtypes are float16, float32, float64, bfloat16, float8_e4m3fn, float8_e5m2, int8 to int64,
uint8 to uint64, bool, complex64 and complex128. In NumPy, bfloat16 and the 8-bit floats need the
package ``ml_dtypes``.

The result has the argument's type: a NumPy array for a NumPy array, a PyTorch tensor for a PyTorch
tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradwire._numpy import collectives
from gradwire._ops import Handle, ReduceOp
from gradwire._process_sets import ProcessSet, global_process_set


def allreduce_async(
    array: Any,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """Starts an ``allreduce`` and returns immediately.

    Args:
        array: A NumPy array, or an object that supports DLPack, of any supported dtype and shape.
            All ranks pass the same dtype and shape. It is copied before the call returns.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        op: The reduction; ``Average`` by default. Averages of integers are truncated.
        prescale_factor: A finite factor for each contribution. Integer products are truncated.
        postscale_factor: A finite factor for the result.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        The operation in flight. Its ``wait`` returns what ``allreduce`` returns.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.

    Example:
        ```python
        handle = gw.allreduce_async(gradient, name="layer1")
        ...  # compute something else
        mean = handle.wait()
        ```
    """
    return collectives.allreduce(array, name, op, prescale_factor, postscale_factor, process_set)


def allreduce(
    array: Any,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduces one array over all ranks; every rank gets the result.

    Args:
        array: A NumPy array, or an object that supports DLPack, of any supported dtype and shape.
            All ranks pass the same dtype and shape. It is copied before the call returns.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        op: The reduction; ``Average`` by default. Averages of integers are truncated.
        prescale_factor: A finite factor for each contribution. Integer products are truncated.
        postscale_factor: A finite factor for the result.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        A new array of the same type, dtype and shape.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.

    Example:
        ```python
        mean = gw.allreduce(np.full(3, gw.rank(), np.float32), name="first")
        total = gw.allreduce(np.arange(4), op=gw.Sum)
        ```
    """
    return allreduce_async(array, name, op, prescale_factor, postscale_factor, process_set).wait()


def allreduce_async_(
    array: Any,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """Starts an ``allreduce_`` and returns immediately.

    Args:
        array: A writable NumPy array, or a writable object that supports DLPack. All ranks pass the
            same dtype and shape. It receives the result.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        op: The reduction; ``Average`` by default. Averages of integers are truncated.
        prescale_factor: A finite factor for each contribution. Integer products are truncated.
        postscale_factor: A finite factor for the result.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        The operation in flight. Its ``wait`` changes the array and returns it.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
    """
    return collectives.allreduce(
        array, name, op, prescale_factor, postscale_factor, process_set, True
    )


def allreduce_(
    array: Any,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduces one array over all ranks, in place.

    Args:
        array: A writable NumPy array, or a writable object that supports DLPack. All ranks pass the
            same dtype and shape. It receives the result.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        op: The reduction; ``Average`` by default. Averages of integers are truncated.
        prescale_factor: A finite factor for each contribution. Integer products are truncated.
        postscale_factor: A finite factor for the result.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        The given array, which contains the result.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    return allreduce_async_(array, name, op, prescale_factor, postscale_factor, process_set).wait()


def grouped_allreduce_async(
    arrays: Sequence[Any],
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[Any]]:
    """Starts a ``grouped_allreduce`` and returns immediately.

    Args:
        arrays: NumPy arrays, or objects that support DLPack; at least one. All ranks pass the same
            number, with the same dtypes and shapes.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        op: The reduction; ``Average`` by default. Averages of integers are truncated.
        prescale_factor: A finite factor for each contribution. Integer products are truncated.
        postscale_factor: A finite factor for the result.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        The operation in flight. Its ``wait`` returns what ``grouped_allreduce`` returns.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
    """
    return collectives.grouped_allreduce(
        arrays, name, op, prescale_factor, postscale_factor, process_set
    )


def grouped_allreduce(
    arrays: Sequence[Any],
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Reduces several arrays over all ranks in one request.

    Either all arrays are reduced or none is.

    Args:
        arrays: NumPy arrays, or objects that support DLPack; at least one. All ranks pass the same
            number, with the same dtypes and shapes.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        op: The reduction; ``Average`` by default. Averages of integers are truncated.
        prescale_factor: A finite factor for each contribution. Integer products are truncated.
        postscale_factor: A finite factor for the result.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        New arrays in the order of the arguments, each with the dtype and shape of its argument.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    return grouped_allreduce_async(
        arrays, name, op, prescale_factor, postscale_factor, process_set
    ).wait()


def reduce(
    array: Any,
    root_rank: int = 0,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduces one array over all ranks; only the root gets the result.

    Args:
        array: A NumPy array, or an object that supports DLPack, of any supported dtype and shape.
            All ranks pass the same dtype and shape. It is copied before the call returns.
        root_rank: The global rank that receives the result.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        op: The reduction; ``Average`` by default. Averages of integers are truncated.
        prescale_factor: A finite factor for each contribution. Integer products are truncated.
        postscale_factor: A finite factor for the result.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        On the root, a new array of the same dtype and shape; None on the other ranks.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    return collectives.reduce(
        array, root_rank, name, op, prescale_factor, postscale_factor, process_set
    ).wait()


def reducescatter(
    array: Any,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduces one array over all ranks and splits the result along the first dimension.

    Args:
        array: A NumPy array, or an object that supports DLPack, of any supported dtype and shape.
            All ranks pass the same dtype and shape. It is copied before the call returns.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        op: The reduction; ``Average`` by default. Averages of integers are truncated.
        prescale_factor: A finite factor for each contribution. Integer products are truncated.
        postscale_factor: A finite factor for the result.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        A new array with this rank's rows of the result. If the number of rows is not a multiple of
        the number of ranks, the first ranks receive one more row.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    return collectives.reducescatter(
        [array], name, op, prescale_factor, postscale_factor, process_set
    ).wait()[0]


def grouped_reducescatter(
    arrays: Sequence[Any],
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Reduces and splits several arrays, each as ``reducescatter`` does, in one request.

    Args:
        arrays: NumPy arrays, or objects that support DLPack; at least one. All ranks pass the same
            number, with the same dtypes and shapes.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        op: The reduction; ``Average`` by default. Averages of integers are truncated.
        prescale_factor: A finite factor for each contribution. Integer products are truncated.
        postscale_factor: A finite factor for the result.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        New arrays in the order of the arguments, each with this rank's rows.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    return collectives.reducescatter(
        arrays, name, op, prescale_factor, postscale_factor, process_set
    ).wait()
