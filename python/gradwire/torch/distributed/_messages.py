"""Any number of concurrent messages between ranks.

Gradwire limits the number of messages in flight for one sender, receiver and tag. Further messages
are queued here, without blocking the caller: both ends may start all their sends first and then all
their receives.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from gradwire import _native, _staging
from gradwire._errors import WaitTimeout
from gradwire.torch.distributed import _threads
from gradwire.torch.distributed._work import Operation, Work

# MESSAGES in worker-lib/src/naming.rs.
_AT_A_TIME = 64
_PAUSE = 0.002
Begin = Callable[[], _native.Handle]


class QueuedHandle:
    """The handle of a queued message, with the methods of a native handle."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._started = threading.Event()
        self._handle: _native.Handle | None = None
        self._error: BaseException | None = None

    def start(self, begin: Begin) -> None:
        """Starts the message. An error is stored for ``wait``."""
        try:
            self._handle = begin()
            self.name = self._handle.name
        except BaseException as error:
            self._error = error
        self._started.set()

    def poll(self) -> bool:
        """Returns whether ``wait`` would return or raise immediately."""
        return self._started.is_set() and (self._handle is None or self._handle.poll())

    def wait(self, timeout: float, *, patient: bool = False) -> Any:
        """Waits until the message has been started and has completed."""
        until = time.monotonic() + timeout
        if not self._started.wait(timeout):
            raise WaitTimeout("queued behind earlier messages", kind="timeout", tensor=self.name)
        if self._handle is None:
            assert self._error is not None
            raise self._error
        return self._handle.wait(max(0.0, until - time.monotonic()), patient=patient)


class Channel:
    """One direction's messages, in flight or queued, at this end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._count = 0
        # Both in call order. The queued messages are also the last ones of ``_messages``.
        self._messages: deque[Operation] = deque()
        self._waiting: deque[tuple[Begin, QueuedHandle]] = deque()

    def start(self, begin: Begin, work: Callable[[Any], Work]) -> Work:
        """Starts or queues a message. Rejected messages are not counted."""
        with self._lock:
            self._sweep()
            if not self._waiting and len(self._messages) < _AT_A_TIME:
                made = work(begin())
            else:
                _staging.wait_for_copies()  # because the message starts in another thread
                later = QueuedHandle(self._name)
                self._waiting.append((begin, later))
                made = work(later)
                if len(self._waiting) == 1:
                    _threads.start(self._serve)
            self._count += 1
            made.operation.name = f"{self._name}.{self._count}"
            self._messages.append(made.operation)
        return made

    def _sweep(self) -> None:
        while self._messages and self._messages[0].poll():
            self._messages.popleft()

    def _serve(self) -> None:
        """Starts the queued messages, each when there is room."""
        while not _threads.ending.wait(_PAUSE):
            with self._lock:
                self._sweep()
                while self._waiting and len(self._messages) - len(self._waiting) < _AT_A_TIME:
                    begin, later = self._waiting.popleft()
                    later.start(begin)
                if not self._waiting:
                    return
