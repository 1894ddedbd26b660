"""Operations whose tensors are still being copied to shared memory.

A copy from a GPU takes time, and the calling thread should not wait for it. So an operation that
needs such a copy is called immediately, behind a gate: its arguments are checked, and it has a name
and a handle. A thread waits for the copies, in call order, and opens the gates.

Until the first such copy, ``session()`` returns the native session, and no thread is started.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from gradwire import _native, _world

# The methods of a session that start operations. All others are called as they are.
_STARTS = {
    *("allreduce", "adasum", "reduce", "reducescatter"),
    *("broadcast", "allgather", "gather", "scatter", "alltoall"),
    *("send", "receive", "barrier", "join"),
}
# Operations that run after all earlier ones: a joined rank contributes no more data.
_LAST = {"join"}
# The maximum number of operations waiting for copies; MAX_HELD in worker-lib/src/naming.rs.
_MAX_HELD = 1024
_GRACE_SECONDS = 5.0
Wait = Callable[[], None]


class Gates:
    """The closed gates, and the thread that opens them in call order.

    The thread lives as long as the session.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed: deque[tuple[list[Wait], _native.Gate]] = deque()
        self._thread: threading.Thread | None = None
        self._closing = False

    @property
    def are_closed(self) -> bool:
        """Whether any gate is closed."""
        return bool(self._closed)

    def wait_for_room(self) -> None:
        """Waits while too many gates are closed (BOUND)."""
        if len(self._closed) >= _MAX_HELD and threading.current_thread() is not self._thread:
            with self._changed:
                self._changed.wait_for(lambda: len(self._closed) < _MAX_HELD)

    def add(self, waits: list[Wait], gate: _native.Gate) -> None:
        """Adds a gate that opens after these waits."""
        with self._changed:
            # Before the thread is started: if that fails now, the next call tries again.
            self._closed.append((waits, gate))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._serve, name="gw-staging", daemon=True)
                self._closing = False
                self._thread.start()
            self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._closing)
                if not self._closed:
                    return
                waits, gate = self._closed[0]
            try:
                for wait in waits:
                    wait()
            except BaseException as error:
                gate.fail(f"its tensors could not be copied to shared memory: {error}")
            else:
                gate.open()
            with self._changed:
                self._closed.popleft()
                self._changed.notify_all()
            del waits, gate  # they hold tensors

    def drain(self, within: float | None = None) -> bool:
        """Waits until all gates are open; returns whether they are."""
        if threading.current_thread() is self._thread:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self._closed, within)

    def close(self) -> None:
        """Waits for the gates to open, then ends the thread."""
        self.drain(_GRACE_SECONDS)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_GRACE_SECONDS)


class _Copies(threading.local):
    """The copies this thread has started for its next operation."""

    def __init__(self) -> None:
        self.waits: list[Wait] = []


class _Behind:
    """The session while copies are in progress: operations that need them wait behind gates."""

    def __init__(self, native: _native.Session) -> None:
        self._native = native

    def __getattr__(self, name: str) -> Any:
        if name not in _STARTS:
            return getattr(self._native, name)
        return lambda *given, **named: _start(self._native, name, given, named)


def _start(native: _native.Session, what: str, given: Any, named: dict[str, Any]) -> Any:
    if what in _LAST:
        _start_batches()
    elif not _copies.waits:
        return getattr(native, what)(*given, **named)
    _gates.wait_for_room()
    # Only after the wait for room: if Ctrl-C interrupts it, the copies stay registered.
    waits, _copies.waits = _copies.waits, []
    gate = _native.Gate()
    try:
        return getattr(native.behind(gate), what)(*given, **named)
    finally:
        # Even if the call was rejected: the copies need their memory until they complete.
        _gates.add(waits, gate)


class Batch(Protocol):
    """Operations that wait for copies, which have not started."""

    def start(self) -> None:
        """Starts the copies."""


_copies = _Copies()
_gates = Gates()
# Batches whose copies have not started.
_batches: weakref.WeakSet[Batch] = weakref.WeakSet()
_used = False
# Callbacks that release the memory of copies; each is called once.
_releases: list[Callable[[], None]] = []


def _use() -> None:
    """Registers this module's hooks, once."""
    global _used
    if not _used:
        _used = True
        _world.before_removal.append(drain)
        _world.before_shutdown.append(end_epoch)


def copy_started(arrived: Wait) -> None:
    """Registers a copy to shared memory. This thread's next operation waits for it."""
    _use()
    _copies.waits.append(arrived)


def open_after(waits: list[Wait], gate: _native.Gate) -> None:
    """Opens a gate after these waits, and after the gates that are currently closed."""
    _use()
    _gates.add(waits, gate)


def batch_made(batch: Batch) -> None:
    """Registers a batch. It starts at the latest before an operation that must follow it."""
    _use()
    _batches.add(batch)


def batch_begun(batch: Batch) -> None:
    """Removes a batch whose copies have started or were dropped."""
    _batches.discard(batch)


def _start_batches() -> None:
    for batch in list(_batches):
        batch.start()


def at_close(release: Callable[[], None]) -> None:
    """Calls ``release`` once before the session ends, after all gates are open."""
    _use()
    _releases.append(release)


def wait_for_copies() -> None:
    """Waits for the copies of this thread."""
    waits, _copies.waits = _copies.waits, []
    for wait in waits:
        wait()


def drain() -> None:
    """Waits until all gates are open, including those of batches."""
    _start_batches()
    _gates.drain()


def session() -> _native.Session:
    """Returns the session; while copies are in progress, a wrapper whose operations wait for them.

    The caller starts its copies before this call.
    """
    native = _world.session()
    if not _used or not (_copies.waits or _gates.are_closed or _batches):
        return native
    behind: Any = _Behind(native)
    return behind


def end_epoch() -> None:
    """Waits for the gates before the session or its epoch ends, and releases the copies' memory."""
    global _gates
    _start_batches()
    _gates.close()
    _gates = Gates()
    while _releases:
        _releases.pop()()


def _forked() -> None:
    """Forgets the gates: a forked child has no threads and no session."""
    global _gates, _copies
    _gates, _copies = Gates(), _Copies()
    _batches.clear()
    _releases.clear()


os.register_at_fork(after_in_child=_forked)
