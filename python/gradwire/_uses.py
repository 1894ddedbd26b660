"""In-place operations that use the memory of an array without a copy."""

from __future__ import annotations

from gradwire import _native


class Use:
    """One array of an in-place operation, until the array has the result.

    Args:
        buffer: The array itself, if it is shared memory. None if the array must be copied to shared
            memory and the result copied back.
    """

    __slots__ = ("buffer",)

    def __init__(self, buffer: _native.Buffer | None = None) -> None:
        self.buffer = buffer

    def end(self) -> None:
        """Records that the result is in the array."""


# For arrays that are copied, which need no tracking.
COPIED = Use()
