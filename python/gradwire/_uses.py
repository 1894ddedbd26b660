"""An operation in place that works on the memory of its array, without a copy."""

from __future__ import annotations

from gradwire import _native


class Use:
    """One array of an operation in place, until the result is in it.

    Args:
        buffer: The array itself, if it is shared memory. None: it has to be copied to shared
            memory, and the result back.
    """

    __slots__ = ("buffer",)

    def __init__(self, buffer: _native.Buffer | None = None) -> None:
        self.buffer = buffer

    def end(self) -> None:
        """Notes that the result is in the array."""


# An array that is copied, and that nobody needs to know about.
COPIED = Use()
