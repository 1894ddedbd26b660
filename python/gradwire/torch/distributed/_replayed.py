"""Process groups of a recorded rank (``gradwire run --record``, ``gradwire replay``).

The record of a rank has what it received from collectives. Process groups also depend on the store,
through which other ranks request process sets. So a recorded rank notes each request that it reads,
in the file ``groups`` beside its record, with the number of operations that it had started. In a
replay there are no other ranks and no store: PyTorch gets an empty one, and the requests come from
the file, each as soon as the rank has started as many operations.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import _rendezvous_handlers

from gradwire._errors import InvalidRequest
from gradwire._world import session

_SLICE = 0.02
_CLOSED = json.dumps({"closed": "the recorded rank read no further request for a process group"})


def is_on() -> bool:
    """Returns whether this process is a rank that is replayed."""
    return "GRADWIRE_REPLAY" in os.environ


def note(key: str, request: bytes) -> None:
    """Notes a request that was read, if this rank is recorded."""
    folder = os.environ.get("GRADWIRE_RECORD")
    if folder:
        line = {"key": key, "after": session().stats()["operations"], "request": request.decode()}
        with (Path(folder) / "groups").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


@functools.cache
def _notes(folder: str) -> dict[str, tuple[int, str]]:
    """Reads the requests of a record. The last line may be cut off.

    Raises:
        InvalidRequest: The file is damaged.
    """
    path = Path(folder) / "groups"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    found: dict[str, tuple[int, str]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            found[str(entry["key"])] = int(entry["after"]), str(entry["request"])
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(
                f"the record {path} is damaged in line {number}: record the job again",
                kind="invalid",
            ) from error
    return found


def recall(key: str, leaving: threading.Event) -> bytes:
    """Returns a request of the record, after as many operations as the recorded rank had started.

    A rank that leaves its groups does not wait.
    """
    after, request = _notes(os.environ["GRADWIRE_REPLAY"]).get(key, (None, _CLOSED))
    while not leaving.is_set() and (after is None or session().stats()["operations"] < after):
        time.sleep(_SLICE)
    return request.encode()


def _meet(
    url: str, rank: int = -1, world_size: int = -1, **options: Any
) -> Iterator[tuple[Any, int, int]]:
    """Replaces PyTorch's rendezvous: a replay has no other ranks."""
    del url, options
    own = int(os.environ.get("RANK", "0")) if rank < 0 else rank
    size = int(os.environ.get("WORLD_SIZE", "1")) if world_size < 0 else world_size
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=30))
    yield store, own, size
    raise RuntimeError("a replayed rank can't meet other ranks again")


def register() -> None:
    """Lets a replayed rank create process groups without other ranks."""
    if is_on():
        for scheme in ("env", "tcp", "file"):
            _rendezvous_handlers[scheme] = _meet
