"""Collectives on Python objects.

Objects are sent pickled, and unpickling runs code chosen by the sender. The sender is a rank that
has authenticated with the job's secret; no other bytes are ever unpickled. If ``cloudpickle`` is
installed, it is used for pickling, so functions and classes of ``__main__`` can be sent, too.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any

from gradwire import _native
from gradwire._arguments import whole_number
from gradwire._errors import InvalidRequest
from gradwire._process_sets import ProcessSet, global_process_set, native_set
from gradwire._world import session

# The beginning of each part of a broadcast: the sender's rank, and its root_rank.
_ROOT = struct.Struct("<II")
# The first byte of an error text, sent instead of a pickled object: no pickle begins with it.
_PROBLEM = b"!"


def dumps(value: Any) -> bytes:
    """Returns the pickled object."""
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    data: bytes = cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return data


def _packed(obj: Any) -> tuple[bytes, Exception | None]:
    """Returns the pickled object, or a text for the other ranks and the error.

    TELL: the other ranks wait for this one.
    """
    try:
        data = dumps(obj)
        limit = session().max_object_bytes
        if len(data) > limit:  # BOUND
            raise ValueError(
                f"it has {len(data)} bytes, but worker.max_object_bytes allows {limit}: raise the "
                "limit, or send large data as a tensor"
            )
        return data, None
    except Exception as error:  # the object's own functions may raise anything
        text = f"rank {session().rank}: {type(error).__name__}: {error}"
        return _PROBLEM + text.encode(errors="replace"), error


def _unpacked(part: bytes) -> Any:
    if part[:1] == _PROBLEM:
        text = part[1:].decode(errors="replace")
        raise InvalidRequest(f"an object can't be pickled on {text}", kind="invalid")
    return pickle.loads(part)


def _filled(data: bytes) -> _native.Buffer:
    buffer = session().buffer("u8", [len(data)])
    buffer.write(data)
    return buffer


def _start(
    data: bytes, kind: str, name: str | None, process_set: ProcessSet
) -> Callable[[], list[bytes]]:
    """Starts ``exchange``; returns the function that waits for it."""
    name = None if name is None else f"{kind.replace('-', '_')}.{name}"
    handle = session().allgather(
        [_filled(data)], name=name, object=kind, process_set=native_set(process_set)
    )

    def wait() -> list[bytes]:
        [(buffer, rows)] = handle.wait()
        everything = buffer.read()
        parts = []
        for length in rows:
            parts.append(everything[:length])
            everything = everything[length:]
        return parts

    return wait


def exchange(data: bytes, kind: str, name: str | None, process_set: ProcessSet) -> list[bytes]:
    """Returns every member's bytes, in rank order. Unnamed calls are matched per ``kind``."""
    return _start(data, kind, name, process_set)()


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Copies the root's object to every rank.

    The object is sent pickled. Unpickling runs code chosen by the sender, a rank of the same job.

    Args:
        obj: On the root, any object that can be pickled. Ignored on the other ranks.
        root_rank: The global rank whose object all ranks receive.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        On the root, ``obj`` itself; on the other ranks, a copy of it.

    Raises:
        InvalidRequest: An argument is invalid, and nothing was started; or the ranks name different
            roots, the root has joined, or its object can't be pickled: then all ranks raise it.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.

    Example:
        ```python
        settings = gw.broadcast_object(settings if gw.rank() == 0 else None)
        ```
    """
    root_rank = whole_number("root_rank", root_rank)
    at_root = session().rank == root_rank  # first, because it raises before init()
    members: Sequence[int] = process_set.ranks
    if root_rank not in members:
        raise InvalidRequest(
            f"the root, rank {root_rank}, is not a member of {process_set}", kind="invalid"
        )
    # Every member sends its root_rank. Members that have joined send nothing.
    own = _ROOT.pack(session().rank, root_rank)
    packed, problem = _packed(obj) if at_root else (b"", None)
    sent = None
    for part in exchange(own + packed, "broadcast-object", name, process_set):
        rank, root = _ROOT.unpack_from(part)
        if root != root_rank:
            raise InvalidRequest(
                f"the ranks disagree about the root of this broadcast: rank {session().rank} has "
                f"root_rank={root_rank}, but rank {rank} has root_rank={root}",
                kind="invalid",
            )
        if rank == root:
            sent = part[_ROOT.size :]
    if sent is None:
        raise InvalidRequest(
            f"the root {root_rank} of this broadcast has joined; use a root that has not joined",
            kind="invalid",
        )
    if at_root and problem is None:
        return obj
    try:
        return _unpacked(sent)
    except InvalidRequest as error:
        raise error from problem


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Gathers one object from every rank; every rank receives all of them.

    The objects are sent pickled. Unpickling runs code chosen by the sender, a rank of the same job.

    Args:
        obj: Any object that can be pickled.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        The objects of all ranks, in rank order. A rank that has joined contributes none.

    Raises:
        InvalidRequest: An argument is invalid, and nothing was started; or an object can't be
            pickled: then all ranks raise it.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    return start_allgather(obj, name, process_set)()


def start_allgather(obj: Any, name: str | None, process_set: ProcessSet) -> Callable[[], list[Any]]:
    """Starts ``allgather_object``; returns the function that waits for it."""
    packed, problem = _packed(obj)
    wait = _start(packed, "allgather-object", name, process_set)

    def finish() -> list[Any]:
        try:
            # Joined members contribute nothing.
            return [_unpacked(part) for part in wait()]
        except InvalidRequest as error:
            raise error from problem

    return finish
