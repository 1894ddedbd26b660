"""Handles whose results are computed from the results of other handles."""

from __future__ import annotations

from typing import Any

from gradwire._ops import Handle


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
