"""Numbers for the generated names of unnamed operations.

The numbers repeat because coordinator and daemons remember what was agreed under each name.
Unlimited names would fill their memory (BOUND).
"""

from __future__ import annotations

# One more than a rank can have in flight and behind gates; same value as in the worker library.
NAMES = 4096 + 1024 + 1


def repeating_number(count: int) -> int:
    """Returns the number of the ``count``-th operation.

    Counts start at 1. The numbers run from 1 to ``NAMES`` and then start over.
    """
    return (count - 1) % NAMES + 1
