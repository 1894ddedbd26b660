"""Operations whose tensors are still being copied to shared memory.

A copy from a GPU takes time, and the thread that asks for it should not wait. An operation that
needs such a copy is put in a queue, and one thread starts the operations of the queue when their
copies have arrived. While the queue is not empty all operations go through it: a rank starts its
operations in the order of its calls, because operations without a name are paired by their order.

Before the first such copy nothing of this exists, and ``session()`` is the native session.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from gradwire import _native, _world
from gradwire._errors import InvalidRequest, WaitTimeout

# The methods of a session that start operations. All others are called at once.
_STARTS = {
    *("allreduce", "adasum", "reduce", "reducescatter"),
    *("broadcast", "allgather", "gather", "scatter", "alltoall"),
    *("send", "receive", "barrier", "join"),
}
_GRACE_SECONDS = 5.0
Wait = Callable[[], None]


class QueuedHandle:
    """The handle of an operation that waits in the queue. It has the methods of a native handle."""

    def __init__(self, what: str, name: str | None) -> None:
        self.name = name if name is not None else f"an unnamed {what}"
        self._started = threading.Event()
        self._handle: _native.Handle | None = None
        self._error: BaseException | None = None

    def start(self, operation: Callable[[], _native.Handle]) -> None:
        """Starts the operation. An error is kept for ``wait``."""
        try:
            self._handle = operation()
            self.name = self._handle.name
        except BaseException as error:
            self._error = error
        self._started.set()

    def poll(self) -> bool:
        """Returns whether ``wait`` would return, or raise, at once."""
        return self._started.is_set() and (self._handle is None or self._handle.poll())

    def wait(self, timeout: float | None = None) -> Any:
        """Waits until the operation has been started, and for its result."""
        if timeout is not None and not timeout >= 0:
            raise InvalidRequest(
                f"timeout={timeout}: it must be a number of seconds, or None", kind="invalid"
            )
        until = None if timeout is None else time.monotonic() + timeout
        if not self._started.wait(timeout):
            raise WaitTimeout(
                f"{self.name!r} has not begun within {timeout:g} s: its tensors are still being "
                "computed or copied",
                kind="timeout",
                tensor=self.name,
            )
        if self._handle is None:
            assert self._error is not None
            raise self._error
        return self._handle.wait(None if until is None else max(0.0, until - time.monotonic()))


class StartQueue:
    """The queue. Its thread lives as long as the session."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[tuple[list[Wait], Callable[[], _native.Handle], QueuedHandle]] = (
            deque()
        )
        self._thread: threading.Thread | None = None
        self._closing = False

    @property
    def busy(self) -> bool:
        """Whether the queue is not empty."""
        return bool(self._waiting)

    def add(
        self, waits: list[Wait], start: Callable[[], _native.Handle], queued: QueuedHandle
    ) -> None:
        """Adds an operation at the end."""
        with self._changed:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._serve, name="gw-staging", daemon=True)
                self._closing = False
                self._thread.start()
            self._waiting.append((waits, start, queued))
            self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                waits, start, queued = self._waiting[0]
            try:
                for wait in waits:
                    wait()
            except BaseException as error:
                queued.start(_raiser(error))
            else:
                queued.start(start)
            # Not before the start: a caller that comes meanwhile must see that the queue is not
            # empty.
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()
            del waits, start, queued  # they hold tensors

    def drain(self, within: float | None = None) -> bool:
        """Waits until the queue is empty; returns whether it is."""
        if threading.current_thread() is self._thread:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, within)

    def close(self) -> None:
        """Starts what is in the queue, and ends the thread."""
        self.drain(_GRACE_SECONDS)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_GRACE_SECONDS)


def _raiser(error: BaseException) -> Callable[[], _native.Handle]:
    def start() -> _native.Handle:
        raise error

    return start


class _Copies(threading.local):
    """The copies that this thread has started for its next operation."""

    def __init__(self) -> None:
        self.waits: list[Wait] = []


class _Queueing:
    """The session while operations have to go through the queue."""

    def __init__(self, native: _native.Session) -> None:
        self._native = native

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._native, name)
        return (
            method
            if name not in _STARTS
            else lambda *given, **named: _start(name, method, given, named)
        )


def _start(
    what: str, method: Callable[..., _native.Handle], given: Any, named: dict[str, Any]
) -> Any:
    waits, _copies.waits = _copies.waits, []
    queued = QueuedHandle(what, named.get("name"))
    _queue.add(waits, lambda: method(*given, **named), queued)
    return queued


_copies = _Copies()
_queue = StartQueue()
_used = False
# What releases the memory of the copies, once each.
_releases: list[Callable[[], None]] = []


def _use() -> None:
    """Empties the queue before a process set is removed and before the session ends."""
    global _used
    if not _used:
        _used = True
        _world.before_removal.append(drain)
        _world.before_shutdown.append(_close)


def copy_started(arrived: Wait) -> None:
    """Registers a copy to shared memory.

    The next operation that this thread starts waits for it.
    """
    _use()
    _copies.waits.append(arrived)


def at_close(release: Callable[[], None]) -> None:
    """Calls ``release`` once before the session ends, after the queue has been emptied."""
    _use()
    _releases.append(release)


def wait_for_copies() -> None:
    """Waits now for the copies of this thread, because their data is needed."""
    waits, _copies.waits = _copies.waits, []
    for wait in waits:
        wait()


def drain() -> None:
    """Waits until all operations in the queue have been started."""
    _queue.drain()


def session() -> _native.Session:
    """Returns the session; while copies are under way, one that puts operations in the queue.

    The caller asks for it after it has started its copies.
    """
    native = _world.session()
    if not _used or not (_copies.waits or _queue.busy):
        return native
    queueing: Any = _Queueing(native)
    return queueing


def _close() -> None:
    """Empties the queue before the session ends. Then the memory of its copies is released."""
    global _queue
    _queue.close()
    _queue = StartQueue()
    while _releases:
        _releases.pop()()


def _forked() -> None:
    """Forgets the queue: a forked child has none of the threads and no session."""
    global _queue, _copies
    _queue, _copies = StartQueue(), _Copies()
    _releases.clear()


os.register_at_fork(after_in_child=_forked)
