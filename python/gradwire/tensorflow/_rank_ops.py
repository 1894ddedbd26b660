"""The ranks and sizes as operations: in a graph, they have the values at the time it runs.

A Python number such as ``hvd.size()`` in a ``tf.function`` is a constant, also after an elastic job
has changed its size.
"""

from __future__ import annotations

import tensorflow as tf

from gradwire import _world
from gradwire._errors import InvalidRequest
from gradwire._process_sets import ProcessSet, global_process_set, registered
from gradwire.tensorflow._running import as_python, compute


def _process_set(number: int) -> ProcessSet:
    found = global_process_set if number == 0 else registered.get(number)
    if found is None:
        raise InvalidRequest(f"unknown process set {number}", kind="invalid")
    return found


@as_python
def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns the number of ranks of a process set.

    Args:
        process_set_id: The id of the process set; 0 for all ranks.
        name: Ignored; exists for Horovod scripts.

    Returns:
        An int32 tensor without dimensions.

    Raises:
        InvalidRequest: The process set is unknown.
        NotInitialized: ``init()`` has not been called.
    """
    del name
    return compute(lambda: _world.members(_process_set(process_set_id)), tf.int32)


@as_python
def local_size_op(name: str | None = None) -> tf.Tensor:
    """Returns the number of ranks on this node.

    Args:
        name: Ignored; exists for Horovod scripts.

    Returns:
        An int32 tensor without dimensions.

    Raises:
        NotInitialized: ``init()`` has not been called.
    """
    del name
    return compute(_world.local_size, tf.int32)


@as_python
def rank_op(name: str | None = None) -> tf.Tensor:
    """Returns the number of this rank in the job.

    Args:
        name: Ignored; exists for Horovod scripts.

    Returns:
        An int32 tensor without dimensions.

    Raises:
        NotInitialized: ``init()`` has not been called.
    """
    del name
    return compute(_world.rank, tf.int32)


@as_python
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Returns the number of this rank on its node.

    Args:
        name: Ignored; exists for Horovod scripts.

    Returns:
        An int32 tensor without dimensions.

    Raises:
        NotInitialized: ``init()`` has not been called.
    """
    del name
    return compute(_world.local_rank, tf.int32)


@as_python
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns whether this rank is a member of a process set.

    Args:
        process_set_id: The id of the process set; 0 for all ranks.
        name: Ignored; exists for Horovod scripts.

    Returns:
        An int32 tensor without dimensions: 1 for a member, otherwise 0.

    Raises:
        InvalidRequest: The process set is unknown.
        NotInitialized: ``init()`` has not been called.
    """
    del name

    def included() -> int:
        _world.session()
        return int(bool(_process_set(process_set_id).included()))

    return compute(included, tf.int32)
