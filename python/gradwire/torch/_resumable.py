"""Work of several waits that goes on after an interruption.

A wait may be interrupted by an exception of the program, such as Ctrl-C. The other ranks don't know
that, so the work must go on where it is. It is a generator that yields its waits: an interrupted
wait leaves the generator suspended, and the next ``run`` waits again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from gradwire._errors import GradwireError

Result = TypeVar("Result")
Waits = Generator[Callable[[], Any], Any, Result]


class Resumable(Generic[Result]):
    """Runs a generator that yields waits, and sends it their results and failures."""

    def __init__(self, work: Waits[Result]) -> None:
        self._work = work
        self._wait: Callable[[], Any] | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether a wait was interrupted, so that ``run`` goes on."""
        return self._wait is not None

    def run(self) -> Result:
        """Runs the work to its end; returns its result."""
        try:
            if self._wait is None:
                self._wait = next(self._work)
            while True:
                try:
                    result = self._wait()
                except GradwireError as error:
                    self._wait = None
                    self._wait = self._work.throw(error)
                else:
                    self._wait = None
                    self._wait = self._work.send(result)
        except StopIteration as end:
            final: Result = end.value
            return final
