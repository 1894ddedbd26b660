"""The collectives that move arrays. ``_array_reduce_ops`` lists the supported arrays and dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradwire._numpy import collectives
from gradwire._ops import Handle
from gradwire._process_sets import ProcessSet, global_process_set


def broadcast_async(
    array: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """Starts a ``broadcast`` and returns immediately.

    Args:
        array: A NumPy array, or an object that supports DLPack, of any supported dtype and shape.
            All ranks pass the same dtype and shape. It is copied before the call returns.
        root_rank: The global rank whose array all ranks receive.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        The operation in flight. Its ``wait`` returns what ``broadcast`` returns.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
    """
    return collectives.broadcast(array, root_rank, name, process_set)


def broadcast(
    array: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Copies the root's array to every rank.

    Args:
        array: A NumPy array, or an object that supports DLPack, of any supported dtype and shape.
            All ranks pass the same dtype and shape. It is copied before the call returns.
        root_rank: The global rank whose array all ranks receive.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        A new array with the root's elements.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    return broadcast_async(array, root_rank, name, process_set).wait()


def broadcast_(
    array: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Copies the root's array to every rank, in place.

    Args:
        array: A writable NumPy array, or a writable object that supports DLPack. All ranks pass the
            same dtype and shape. It receives the result.
        root_rank: The global rank whose array all ranks receive.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        The given array, which contains the root's elements.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    return collectives.broadcast(array, root_rank, name, process_set, True).wait()


def allgather(
    array: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenates all ranks' arrays along the first dimension; every rank gets the result.

    Args:
        array: A NumPy array, or an object that supports DLPack. All ranks pass the same dtype, and
            the same dimensions except the first. An array without dimensions counts as one row.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        A new array with the rows of all ranks, in rank order.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.

    Example:
        ```python
        everybody = gw.allgather(np.arange(gw.rank() + 1)) # the number of rows may differ
        ```
    """
    return collectives.allgather([array], name, process_set).wait()[0][0]


def grouped_allgather(
    arrays: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Gathers several arrays, each as ``allgather`` does, in one request.

    Args:
        arrays: Arrays as ``allgather`` takes them; at least one. All ranks pass the same number.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        New arrays in the order of the arguments, each with the rows of all ranks.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    return [result for result, _ in collectives.allgather(arrays, name, process_set).wait()]


def gather(
    array: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Concatenates all ranks' arrays along the first dimension; only the root gets the result.

    Args:
        array: A NumPy array, or an object that supports DLPack. All ranks pass the same dtype, and
            the same dimensions except the first. An array without dimensions counts as one row.
        root_rank: The global rank that receives the result.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        On the root, a new array with the rows of all ranks; None on the other ranks.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    result = collectives.gather(array, root_rank, name, process_set).wait()
    return None if result is None else result[0]


def scatter(
    array: Any,
    root_rank: int = 0,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Splits the root's array along the first dimension and gives each rank its part.

    Args:
        array: On the root, the array to split. On the other ranks, an array of the same type and
            dtype; its contents are ignored.
        root_rank: The global rank whose array is split.
        splits: On the root, the number of rows for each rank, in rank order. Their sum is at most
            the number of rows of the array. By default, all ranks receive the same number, which
            must divide the number of rows. Ignored on the other ranks.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        A new array with this rank's rows.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    return collectives.scatter(array, root_rank, splits, name, process_set).wait()


def alltoall(
    array: Any,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Splits every rank's array along the first dimension and sends each rank its part.

    Args:
        array: A NumPy array, or an object that supports DLPack. All ranks pass the same dtype, and
            the same dimensions except the first. At least one dimension is required.
        splits: The number of rows for each rank, in rank order. Their sum is at most the number of
            rows of the array. By default, all ranks receive the same number, which must divide the
            number of rows.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        A new array with the rows from all ranks, in rank order. With ``splits``, a pair of that
        array and a list of the number of rows from each rank.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    result, received = collectives.alltoall(array, splits, name, process_set).wait()
    return result if splits is None else (result, received)


def send(
    array: Any, to_rank: int, tag: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Sends an array to another rank and waits until it has been received.

    Args:
        array: A NumPy array, or an object that supports DLPack, of any supported dtype and shape.
        to_rank: The global rank of the receiver.
        tag: A number from 0 to 2**32 - 1. The receiver passes the same tag.
        process_set: A process set that contains both ranks. The default is all ranks.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    collectives.send(array, to_rank, tag, process_set).wait()


def receive(
    like: Any, from_rank: int, tag: int = 0, process_set: ProcessSet = global_process_set
) -> Any:
    """Receives an array from another rank.

    Args:
        like: An array of the dtype and type of the result. The shapes may differ; equal shapes save
            a round trip.
        from_rank: The global rank of the sender.
        tag: A number from 0 to 2**32 - 1. The sender passes the same tag.
        process_set: A process set that contains both ranks. The default is all ranks.

    Returns:
        A new array of the shape that was sent.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.

    Example:
        ```python
        if gw.rank() == 0:
            gw.send(np.arange(5), to_rank=1)
        else:
            row = gw.receive(np.empty(5, np.int64), from_rank=0)
        ```
    """
    return collectives.receive(like, from_rank, tag, process_set).wait()
