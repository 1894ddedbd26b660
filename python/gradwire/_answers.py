"""Torch's store with a limit for each call (WAIT).

Torch's own time-out applies only to missing keys. If the process that serves the store is stopped,
or its host disappears silently, a call waits for ever, and Ctrl-C does not end it. So each call is
made by a thread of its own.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from gradwire._errors import NotLaunched

# How much later than torch's own time-out a call is given up: torch's error says more.
_LATER = timedelta(seconds=5)

T = TypeVar("T")


class Answers:
    """Calls a store with a time limit. After the first call without an answer, it tries no other.

    Args:
        name: The store, for errors.
        within: The time-out of the store for keys that are missing.
    """

    def __init__(self, name: str, within: timedelta) -> None:
        self._name, self._limit = name, (within + _LATER).total_seconds()
        self._error: NotLaunched | None = None

    def to(self, call: Callable[..., T], *given: object) -> T:
        """Returns the result of a call.

        Raises:
            NotLaunched: The store does not answer.
        """
        if self._error is not None:
            raise self._error
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                answer.set_result(call(*given))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=run, name="gw-store", daemon=True).start()
        if concurrent.futures.wait([answer], self._limit).not_done:
            self._error = NotLaunched(
                f"{self._name} has not answered for {self._limit:g} s: is its process, torchrun or "
                "rank 0, stopped, does another program use that port, or is the network to its "
                "host down?",
                kind="not-launched",
                rank=0,
            )
            raise self._error
        return answer.result()


class Store:
    """The calls of a store that form a job."""

    def __init__(self, store: Any, answers: Answers) -> None:
        self._store, self._answers = store, answers

    def set(self, key: str, value: str) -> None:
        """Sets the value of a key."""
        self._answers.to(self._store.set, key, value)

    def get(self, key: str) -> bytes:
        """Returns the value of a key, for which it waits."""
        value: bytes = self._answers.to(self._store.get, key)
        return value

    def check(self, keys: list[str]) -> bool:
        """Returns whether all keys have values."""
        return bool(self._answers.to(self._store.check, keys))

    def wait(self, keys: list[str], within: timedelta) -> None:
        """Waits until all keys have values."""
        self._answers.to(self._store.wait, keys, within)
