"""Python objects between the ranks of a job.

They travel pickled, and unpickling runs what the sender wrote: the sender is a rank of the same job,
which proved so with the job's secret; nobody else's bytes are ever unpickled. Where
``cloudpickle`` is installed it does the pickling, so that functions and classes of ``__main__`` can travel, too.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from gradwire import _native
from gradwire._arguments import whole
from gradwire._errors import InvalidRequest
from gradwire._world import ProcessSet, global_process_set, native_set, session


def dumps(value: Any) -> bytes:
    """The object as bytes."""
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    data: bytes = cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return data


def _filled(data: bytes) -> _native.Buffer:
    buffer = session().buffer("u8", [len(data)])
    buffer.write(data)
    return buffer


def exchange(data: bytes, kind: str, name: str | None, process_set: ProcessSet) -> list[bytes]:
    """Every member's bytes, in rank order. Without a name they are counted by their kind."""
    name = None if name is None else f"{kind.replace('-', '_')}.{name}"
    handle = session().allgather([_filled(data)], name=name, object=kind, process_set=native_set(process_set))
    [(buffer, rows)] = handle.wait()
    everything = buffer.read()
    parts = []
    for length in rows:
        parts.append(everything[:length])
        everything = everything[length:]
    return parts


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's object on every rank; the others' arguments are not looked at."""
    members: Sequence[int] = process_set.ranks
    root_rank = whole("root_rank", root_rank)
    if root_rank not in members:
        raise InvalidRequest(f"the root, rank {root_rank}, is not a member of {process_set}", kind="invalid")
    at_root = session().rank == root_rank
    data = dumps(obj) if at_root else b""
    parts = exchange(data, "broadcast-object", name, process_set)
    # The members that have joined give no part; the root is not one of them.
    return obj if at_root else pickle.loads(max(parts, key=len))


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Every rank's object, in rank order."""
    parts = exchange(dumps(obj), "allgather-object", name, process_set)
    return [pickle.loads(part) for part in parts]
