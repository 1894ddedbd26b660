"""The threads behind works: some wait for one operation each, one ends dropped operations."""

from __future__ import annotations

import atexit
import collections
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

_GRACE_SECONDS = 5.0
# How long the thread of dropped operations sleeps between two checks.
_MIN_PAUSE, _MAX_PAUSE = 0.002, 0.1

ending = threading.Event()
_waiters: list[threading.Thread] = []
_jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
_idle = 0
_pool = threading.Lock()


def start(job: Callable[[], None]) -> None:
    """Runs a job in its own thread, an idle one if there is one.

    Each wait has its own thread. Which operation ends first depends on all ranks, and a wait for
    one operation could be a wait for one that starts only after the result of another was seen.
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


class Dropped(Protocol):
    """An operation whose work the program has dropped."""

    def settle(self) -> bool:
        """Ends the operation if that is possible now; returns whether nothing is left to do."""


# Finalizers put to it, which may run anywhere in this thread: it must be reentrant.
_dropped: queue.SimpleQueue[Dropped | None] = queue.SimpleQueue()
# Operations that may be dropped or not. They are checked now and then, without a wake-up for each.
_maybe_dropped: collections.deque[Dropped] = collections.deque()
_looking = False
_finisher: threading.Thread | None = None


def finish_dropped() -> None:
    """Makes sure that the thread for dropped operations runs. Finalizers can't start a thread."""
    global _finisher
    with _pool:
        if _finisher is None or not _finisher.is_alive():
            _finisher = threading.Thread(target=_finish, name="gw-dropped", daemon=True)
            _finisher.start()


def finish_later(operation: Dropped) -> None:
    """Passes an operation to the thread for dropped operations. Finalizers may call it."""
    _dropped.put(operation)


def finish_perhaps(operation: Dropped) -> None:
    """Passes an operation that somebody most likely waits for, as ``finish_later`` does."""
    global _looking
    _maybe_dropped.append(operation)
    if not _looking:
        _looking = True
        _dropped.put(_LOOK)


class _Look:
    """Makes the thread check the operations that were perhaps dropped."""

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
        _looking = False  # before the check: a later caller asks for another one
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
    """Returns the operations that were dropped; waits for the first one for at most this long."""
    taken: list[Dropped | None] = []
    try:
        taken.append(_dropped.get(timeout=within))
        while True:
            taken.append(_dropped.get_nowait())
    except queue.Empty:
        return taken


def _stop() -> None:
    """Ends all threads: one that uses futures while the interpreter ends aborts the process."""
    ending.set()
    for _ in _waiters:
        _jobs.put(None)
    _dropped.put(None)
    until = time.monotonic() + _GRACE_SECONDS
    for thread in [*_waiters, *([_finisher] if _finisher is not None else [])]:
        thread.join(max(0.0, until - time.monotonic()))


def _forked() -> None:
    """Resets the module: a forked child has none of the threads."""
    global _jobs, _idle, _pool, _dropped, _looking, _finisher
    _jobs, _idle, _pool = queue.SimpleQueue(), 0, threading.Lock()
    _dropped, _looking, _finisher = queue.SimpleQueue(), False, None
    _maybe_dropped.clear()
    _waiters.clear()


atexit.register(_stop)
os.register_at_fork(after_in_child=_forked)
