"""Handles whose results are computed from those of other handles, and waits for many handles."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gradwire._errors import GradwireError
from gradwire._ops import Handle


def wait_for_all(handles: Iterable[Handle[Any]]) -> None:
    """Waits for all handles, and raises the first failure afterwards.

    So no name stays in flight, and the caller may try again.
    """
    failure: GradwireError | None = None
    for handle in handles:
        try:
            handle.wait()
        except GradwireError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def derived(handle: Handle[Any], make: Any) -> Handle[Any]:
    return Derived(handle, make)


class Derived(Handle[Any]):
    """A handle whose result is computed from the result of another handle."""

    __slots__ = ("_inner", "_map")

    def __init__(self, inner: Handle[Any], make: Any) -> None:
        self._inner, self._map = inner, make

    def poll(self) -> bool:
        """Returns whether ``wait`` would return, or raise, at once."""
        return self._inner.poll()

    def wait(self, timeout: float | None = None) -> Any:
        """Waits for the operation, and returns the computed result."""
        if not hasattr(self, "_result"):
            self._result = self._map(self._inner.wait(timeout))
        return self._result

    def __repr__(self) -> str:
        return repr(self._inner)
