"""The collectives on NumPy arrays and on whatever speaks DLPack, blocking and in flight.

Where nothing else is said: ``name`` says which calls of different ranks belong together (by
default their order does), ``process_set`` who takes part, and factors multiply before and after a reduction
(integers are multiplied as floats of 64 bits and truncated).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradwire._numpy import NumpyAdapter
from gradwire._ops import Collectives, Handle, ReduceOp
from gradwire._world import ProcessSet, global_process_set

_all: Collectives[Any] = Collectives(NumpyAdapter())


def allreduce_async(
    array: Any,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """As ``allreduce``, without waiting."""
    return _all.allreduce(array, name, op, prescale_factor, postscale_factor, process_set)


def allreduce(
    array: Any,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The reduction of all ranks' arrays: the average, or what ``op`` says."""
    return allreduce_async(array, name, op, prescale_factor, postscale_factor, process_set).wait()


def allreduce_async_(
    array: Any,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """As ``allreduce_``, without waiting; the array changes in the wait."""
    return _all.allreduce(array, name, op, prescale_factor, postscale_factor, process_set, True)


def allreduce_(
    array: Any,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """As ``allreduce``, in place."""
    return allreduce_async_(array, name, op, prescale_factor, postscale_factor, process_set).wait()


def grouped_allreduce_async(
    arrays: Sequence[Any],
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[Any]]:
    """As ``grouped_allreduce``, without waiting."""
    return _all.grouped_allreduce(arrays, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce(
    arrays: Sequence[Any],
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Several arrays in one request: all of it is done or nothing."""
    return grouped_allreduce_async(arrays, name, op, prescale_factor, postscale_factor, process_set).wait()


def reduce(
    array: Any,
    root_rank: int = 0,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The reduction, at the root; None elsewhere."""
    return _all.reduce(array, root_rank, name, op, prescale_factor, postscale_factor, process_set).wait()


def broadcast_async(
    array: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """As ``broadcast``, without waiting."""
    return _all.broadcast(array, root_rank, name, process_set)


def broadcast(
    array: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's array; the root is a rank of the whole job."""
    return broadcast_async(array, root_rank, name, process_set).wait()


def broadcast_(
    array: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """As ``broadcast``, in place."""
    return _all.broadcast(array, root_rank, name, process_set, True).wait()


def allgather(array: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """All ranks' arrays, one after the other along the first dimension, which may differ."""
    return _all.allgather([array], name, process_set).wait()[0][0]


def grouped_allgather(
    arrays: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Several allgathers in one request."""
    return [result for result, _ in _all.allgather(arrays, name, process_set).wait()]


def gather(
    array: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """As ``allgather``, for the root alone; None elsewhere."""
    result = _all.gather(array, root_rank, name, process_set).wait()
    return None if result is None else result[0]


def scatter(
    array: Any,
    root_rank: int = 0,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """This rank's rows of the root's array: ``splits`` says how many each gets, at the root.

    Elsewhere the argument says of which kind the result is.
    """
    return _all.scatter(array, root_rank, splits, name, process_set).wait()


def reducescatter(
    array: Any,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """This rank's rows of the reduction; the first ranks take what can't be split evenly."""
    return _all.reducescatter([array], name, op, prescale_factor, postscale_factor, process_set).wait()[0]


def grouped_reducescatter(
    arrays: Sequence[Any],
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Several reducescatters in one request."""
    return _all.reducescatter(arrays, name, op, prescale_factor, postscale_factor, process_set).wait()


def alltoall(
    array: Any,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Gives each rank its rows: as many as ``splits`` says, or the same number each.

    With ``splits`` the result comes with the number of rows from each rank.
    """
    result, received = _all.alltoall(array, splits, name, process_set).wait()
    return result if splits is None else (result, received)


def send(array: Any, to_rank: int, tag: int = 0, process_set: ProcessSet = global_process_set) -> None:
    """Gives a rank an array; it receives with the same tag."""
    _all.send(array, to_rank, tag, process_set).wait()


def receive(like: Any, from_rank: int, tag: int = 0, process_set: ProcessSet = global_process_set) -> Any:
    """An array from a rank, of ``like``'s kind and element type, and of whatever size is sent."""
    return _all.receive(like, from_rank, tag, process_set).wait()
