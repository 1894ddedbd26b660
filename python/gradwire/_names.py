"""Numbers for the names of operations that have no name of their own.

The numbers repeat: coordinator and daemons remember what was agreed under a name, and names that
never repeat would fill their memory (BOUND).
"""

from __future__ import annotations

# One more than a rank can have in flight and behind gates; as in the worker library.
NAMES = 4096 + 1024 + 1


def repeating_number(count: int) -> int:
    """Returns the number of the ``count``-th operation.

    The first operation has the count 1. The numbers go from 1 to ``NAMES`` and then start again.
    """
    return (count - 1) % NAMES + 1
