"""Broadcasts of variables, and collectives on Python objects, with Horovod's signatures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gradwire import _objects
from gradwire._errors import InvalidRequest
from gradwire._process_sets import ProcessSet, global_process_set
from gradwire.tensorflow._move_ops import broadcast_
from gradwire.tensorflow._running import as_python


@as_python
def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """Copies the root's variables to every rank.

    Args:
        variables: Variables of TensorFlow or Keras, such as ``model.variables`` or
            ``optimizer.variables``. All ranks pass the same number, with the same dtypes and
            shapes.
        root_rank: The global rank whose variables all ranks receive.
        process_set: The participating ranks. The default is all ranks.
        inplace: Ignored; exists for Horovod scripts.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.

    Example:
        ```python
        if step == 0:  # the first step has created the variables of the optimizer
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
        ```
    """
    del inplace
    broadcast_(variables, root_rank, None, process_set)


@as_python
def broadcast_global_variables(root_rank: int) -> None:
    """Raises an error: TensorFlow 2 has no list of all variables.

    Args:
        root_rank: Ignored.

    Raises:
        InvalidRequest: Always; it names the alternative.
    """
    del root_rank
    raise InvalidRequest(
        "broadcast_global_variables() needs the sessions of TensorFlow 1: use "
        "broadcast_variables(model.variables, root_rank=0), and the same for the optimizer",
        kind="invalid",
    )


@as_python
def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Copies the root's object to every rank.

    Args:
        obj: On the root, any object that can be pickled. Ignored on the other ranks.
        root_rank: The global rank whose object all ranks receive.
        session: Ignored; exists for Horovod scripts.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        The root's object.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    del session
    return _objects.broadcast_object(obj, root_rank, name, process_set)


@as_python
def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Returns a function that copies the root's object to every rank.

    Args:
        root_rank: The global rank whose object all ranks receive.
        session: Ignored; exists for Horovod scripts.
        name: Identifies the calls across ranks. Unnamed calls are matched by their order.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        A function that takes an object and returns that of the root.
    """
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


@as_python
def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Gathers one object from every rank; every rank receives all of them.

    Args:
        obj: Any object that can be pickled.
        session: Ignored; exists for Horovod scripts.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        The objects of all ranks, in rank order.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    del session
    return _objects.allgather_object(obj, name, process_set)
