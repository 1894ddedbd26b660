"""Numbers for the names of operations that have none of their own.

They come again: coordinator and daemons remember what was agreed under a name, so that names that never
repeat would only fill them (BOUND).
"""

from __future__ import annotations

#: One more than a rank can have in flight, as the worker library has it for its own names.
NAMES = 4096 + 1


def again(count: int) -> int:
    """The number of the ``count``-th operation, the first of which is 1: from 1 to :data:`NAMES`, again and again."""
    return (count - 1) % NAMES + 1
