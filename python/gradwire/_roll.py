"""Which ranks have come to form a job through torch's store.

Each rank leaves a mark in the store. If the job can't be formed, the error names the ranks without
a mark, instead of keys and sockets of the store.

Rank 0 may host the store, which then ends with it. So if rank 0 fails, it writes its error to the
key of the job, for which the others wait, and stays for a moment until they have read the error.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from datetime import timedelta
from typing import Any

from gradwire._errors import GradwireError, NotLaunched

# The most characters of a list of ranks.
_LISTED = 100
_POLL_SECONDS = 0.2
# How long rank 0 waits for the others to read its error, in seconds.
_TELLING_SECONDS = 3.0
# The key of rank 0's report about the job.
_JOB = "job"


def _more_time() -> str:
    own = "GRADWIRE_LAUNCH__START_TIMEOUT_MS"  # takes precedence
    name = f"{own}=MILLISECONDS" if os.environ.get(own) else "HOROVOD_START_TIMEOUT=SECONDS"
    return f"For more time, set {name}"


def come(store: Any, rank: int) -> None:
    """Leaves the mark of this rank."""
    store.set(f"came/{rank}", "")


class Named:
    """A context in which an error of the store names the ranks that are missing, on all ranks."""

    def __init__(self, store: Any, rank: int, size: int, within: timedelta) -> None:
        self._store, self._rank, self._size, self._within = store, rank, size, within

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, GradwireError):
            better = self._told() or _explained(self._store, self._size, self._within, error)
            self._tell(better)
            raise better from None
        if isinstance(error, GradwireError):
            self._tell(error)

    def _told(self) -> NotLaunched | None:
        """Returns the error of rank 0, if it has left one."""
        try:
            if self._rank > 0 and self._store.check([_JOB]):
                read(self._store, self._rank, self._within)
        except NotLaunched as error:
            return error
        except RuntimeError:  # the store is gone
            pass
        return None

    def _tell(self, error: GradwireError) -> None:
        if self._rank == 0:
            with contextlib.suppress(RuntimeError):
                _leave_error(self._store, self._size, error)


def publish(store: Any, report: dict[str, Any]) -> None:
    """Leaves what the other ranks need to know about the job, on rank 0."""
    store.set(_JOB, json.dumps(report))


def read(store: Any, rank: int, within: timedelta) -> dict[str, Any]:
    """Waits for rank 0's report about the job, and returns it.

    Raises:
        NotLaunched: Rank 0 could not form the job.
    """
    store.wait([_JOB], within)
    report: dict[str, Any] = json.loads(store.get(_JOB))
    if "error" in report:
        store.set(f"told/{rank}", "")
        raise NotLaunched(report["error"], kind="not-launched", rank=report["rank"])
    return report


def _leave_error(store: Any, size: int, error: GradwireError) -> None:
    publish(store, {"error": str(error), "rank": error.rank})
    end = time.monotonic() + _TELLING_SECONDS
    others = [rank for rank in range(1, size) if store.check([f"came/{rank}"])]
    for rank in others:
        while not store.check([f"told/{rank}"]) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS / 4)


def wait_for_address(host: str, port: int, within: timedelta) -> None:
    """Waits until the name of the store's host has an address, also on the rank that serves it.

    Raises:
        NotLaunched: The name has no address in time.
    """
    deadline = time.monotonic() + within.total_seconds()
    while True:
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise NotLaunched(
                    f"no address for host {host}, which MASTER_ADDR names ({error}; tried for "
                    f"{_seconds(within)}): set MASTER_ADDR to an address of the host of rank 0",
                    kind="not-launched",
                    rank=0,
                ) from None
            time.sleep(_POLL_SECONDS)


def wait_for_store(host: str, port: int, within: timedelta) -> None:
    """Waits until the store answers. Torch would log a page for each failed attempt.

    Raises:
        NotLaunched: It does not answer in time.
    """
    deadline = time.monotonic() + within.total_seconds()
    while True:
        try:
            with socket.create_connection((host, port), max(0.1, deadline - time.monotonic())):
                return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise NotLaunched(
                    f"the ranks' store at {host}:{port} did not answer within {_seconds(within)} "
                    f"({error}): is rank 0, or torchrun, running there, and can this host reach "
                    f"that port? {_more_time()}",
                    kind="not-launched",
                    rank=0,
                ) from None
            time.sleep(_POLL_SECONDS)


def unreachable(host: str, port: int, error: RuntimeError) -> NotLaunched:
    """Returns the error of a store that has ended while ranks met in it."""
    return NotLaunched(
        f"the ranks' store at {host}:{port} has failed ({_first_line(error)}): has its process, "
        "rank 0, ended?",
        kind="not-launched",
        rank=0,
    )


def taken(host: str, port: int, error: RuntimeError, hosts: bool) -> NotLaunched:
    """Returns the error of a rank that can't use the store, or can't serve it (``hosts``)."""
    what = "rank 0 can't serve" if hosts else "this rank can't use"
    return NotLaunched(
        f"{what} the ranks' store at {host}:{port} ({_first_line(error)}): if another program uses "
        "that port, set another MASTER_PORT on all ranks",
        kind="not-launched",
        rank=0,
    )


def _explained(store: Any, size: int, within: timedelta, error: RuntimeError) -> NotLaunched:
    try:
        missing = [rank for rank in range(size) if not store.check([f"came/{rank}"])]
    except RuntimeError:
        text = (
            "the store through which the ranks form the job is gone: rank 0, which may host it, "
            f"has ended; see its output ({_first_line(error)})"
        )
        return NotLaunched(text, kind="not-launched", rank=0)
    if not missing:
        text = (
            f"all {size} ranks have come, but the job was not formed within {_seconds(within)}: "
            f"see the output of the first rank of each host ({_first_line(error)})"
        )
        return NotLaunched(text, kind="not-launched")
    who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {listed(missing)}"
    text = (
        f"{who} of {size} did not call init() within {_seconds(within)}: were all WORLD_SIZE ranks "
        f"started, and what does their output say? {_more_time()}"
    )
    return NotLaunched(text, kind="not-launched", rank=missing[0])


def listed(ranks: list[int]) -> str:
    """Returns ascending ranks as a text, shortened if long.

    >>> listed([0, 1, 2, 5])
    '0-2, 5'
    """
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], rank]
        else:
            parts.append([rank])
    text = ", ".join("-".join(map(str, part)) for part in parts)
    return text if len(text) <= _LISTED else f"{text[:_LISTED]}…"


def _seconds(within: timedelta) -> str:
    return f"{within.total_seconds():g} s"


def _first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:_LISTED]
