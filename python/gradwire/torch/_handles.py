"""Waits for many handles."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from gradwire._errors import GradwireError
from gradwire._ops import Handle


class Waiting:
    """Waits for many handles and keeps the first failure.

    After a failure, it waits a few more seconds for the other operations. If all ranks have started
    them, they complete, and the caller may retry under the same names. Otherwise, some may never
    complete.
    """

    AFTER_FAILURE = 5.0

    def __init__(self) -> None:
        self._failure: GradwireError | None = None
        self._end = 0.0

    def wait(self, handle: Any) -> bool:
        """Waits for a handle; returns whether no handle has failed so far."""
        try:
            if self._failure is None:
                handle.wait()
            else:
                handle.wait(max(0.0, self._end - time.monotonic()))
        except GradwireError as error:
            if self._failure is None:
                self._failure, self._end = error, time.monotonic() + self.AFTER_FAILURE
        return self._failure is None

    def check(self) -> None:
        """Raises the first failure."""
        if self._failure is not None:
            raise self._failure


def wait_for_all(handles: Iterable[Handle[Any]]) -> None:
    """Waits for all handles, then raises the first failure."""
    waiting = Waiting()
    for handle in handles:
        waiting.wait(handle)
    waiting.check()
