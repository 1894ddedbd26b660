"""The threads behind works: some wait for one operation each, one finishes dropped operations."""

from __future__ import annotations

import atexit
import collections
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from gradwire import _quiet

_GRACE_SECONDS = 5.0
# The pauses between two checks of dropped operations.
_MIN_PAUSE, _MAX_PAUSE = 0.002, 0.1

ending = threading.Event()
_waiters: list[threading.Thread] = []
_jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
_idle = 0
_pool = threading.Lock()


def start(job: Callable[[], None]) -> None:
    """Runs a job in a separate thread, if possible an idle one.

    Each wait has its own thread, because operations complete in any order, and one may start only
    after the result of another was seen.
    """
    global _idle
    with _pool:
        _waiters[:] = [thread for thread in _waiters if thread.is_alive()]
        if _idle > 0:
            _idle -= 1
        else:
            thread = threading.Thread(target=_wait_for_others, name="gw-futures", daemon=True)
            _waiters.append(thread)
            thread.start()
        _jobs.put(job)


def _wait_for_others() -> None:
    global _idle
    while (job := _jobs.get()) is not None:
        job()
        del job  # it holds tensors
        with _pool:
            _idle += 1


def idle_ones(threads: frozenset[int]) -> frozenset[int]:
    """Returns the idle threads among these; none if one of them may have a job."""
    with _pool:
        own = threads & {thread.ident for thread in _waiters}
        return own if len(own) <= _idle else frozenset()


class Dropped(Protocol):
    """An operation whose ``Work`` the program has dropped."""

    def settle(self) -> bool:
        """Finishes the operation if it has completed; returns whether nothing is left to do."""


# Reentrant, because finalizers put operations into it, and they may run anywhere in this thread.
_dropped: queue.SimpleQueue[Dropped | None] = queue.SimpleQueue()
# Operations that may have been dropped. They are checked occasionally, without a wake-up for each.
_maybe_dropped: collections.deque[Dropped] = collections.deque()
_looking = False
_finisher: threading.Thread | None = None


def finish_dropped() -> None:
    """Ensures that the thread for dropped operations runs, because finalizers can't start it."""
    global _finisher
    with _pool:
        if _finisher is None or not _finisher.is_alive():
            _finisher = threading.Thread(target=_finish, name="gw-dropped", daemon=True)
            _finisher.start()


def finish_later(operation: Dropped) -> None:
    """Passes an operation to the thread for dropped operations. Finalizers may call this."""
    _dropped.put(operation)


def finish_perhaps(operation: Dropped) -> None:
    """Like ``finish_later``, for an operation that will probably be waited for."""
    global _looking
    _maybe_dropped.append(operation)
    if not _looking:
        _looking = True
        _dropped.put(_LOOK)


class _Look:
    """Wakes the thread to check the operations that may have been dropped."""

    def settle(self) -> bool:
        return True


_LOOK = _Look()


def _finish() -> None:
    global _looking
    pending: list[Dropped] = []
    pause: float | None = None
    while not ending.is_set():
        taken = _take(pause)
        if None in taken:
            return
        soon = any(operation is not _LOOK for operation in taken)
        _looking = False  # before the check, so that later callers request another one
        pending += taken  # type: ignore[arg-type]
        pending += [_maybe_dropped.popleft() for _ in range(len(_maybe_dropped))]
        left = [operation for operation in pending if not operation.settle()]
        if left:
            _looking = True
            pause = _MIN_PAUSE if soon else min(2 * (pause or _MAX_PAUSE), _MAX_PAUSE)
        else:
            pause = None
        pending, taken = left, []  # they hold tensors


def _take(within: float | None) -> list[Dropped | None]:
    """Returns the dropped operations; waits at most this long for the first one."""
    taken: list[Dropped | None] = []
    try:
        taken.append(_dropped.get(timeout=within))
        while True:
            taken.append(_dropped.get_nowait())
    except queue.Empty:
        return taken


def _stop() -> None:
    """Stops all threads: using futures while the interpreter exits would abort the process."""
    ending.set()
    for _ in _waiters:
        _jobs.put(None)
    _dropped.put(None)
    until = time.monotonic() + _GRACE_SECONDS
    for thread in [*_waiters, *([_finisher] if _finisher is not None else [])]:
        thread.join(max(0.0, until - time.monotonic()))


def _forked() -> None:
    """Resets the module: a forked child has no threads."""
    global _jobs, _idle, _pool, _dropped, _looking, _finisher
    _jobs, _idle, _pool = queue.SimpleQueue(), 0, threading.Lock()
    _dropped, _looking, _finisher = queue.SimpleQueue(), False, None
    _maybe_dropped.clear()
    _waiters.clear()


_quiet.judges.append(idle_ones)
atexit.register(_stop)
os.register_at_fork(after_in_child=_forked)
