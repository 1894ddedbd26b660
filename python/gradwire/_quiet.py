"""Which threads of the program never start operations.

A job is in a deadlock only if no thread of any rank could start an operation. A thread that runs
Python code could, unless it is known to do something else.

Modules that have threads of their own add a function to ``judges``.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType

# Threads that do only one thing, given by the end of a file name and a function in that file. The
# worker library itself knows about operations behind a gate of `_staging`.
_HELPERS = (
    ("gradwire/_stacks.py", "_serve"),
    ("gradwire/_staging.py", "_serve"),
    ("gradwire/torch/distributed/_threads.py", "_finish"),
    ("tqdm/_monitor.py", "run"),
    ("torch/utils/data/_utils/pin_memory.py", "_pin_memory_loop"),
    ("multiprocessing/queues.py", "_feed"),
    ("multiprocessing/resource_sharer.py", "_serve"),
    ("tensorboard/summary/writer/event_file_writer.py", "run"),
)

# Each function returns which of the given threads start nothing before an operation ends or another
# thread does something.
judges: list[Callable[[frozenset[int]], frozenset[int]]] = []


def others_are_quiet(waiting: frozenset[int]) -> bool:
    """Returns whether no thread could start an operation, except those in ``waiting``.

    Args:
        waiting: The identifiers of threads that wait for operations without a limit.

    Returns:
        True if that is certain. It is not certain with an idle worker of a pool, which may just
        have got work, or with a running timer, whose handler may raise.
    """
    # XLA's threads start operations without Python.
    if "gradwire.jax" in sys.modules or signal.getitimer(signal.ITIMER_REAL)[0] > 0:
        return False
    frames = sys._current_frames()
    try:
        left = frozenset(
            ident
            for ident, frame in frames.items()
            if ident not in waiting and not _is_quiet(frame)
        )
    finally:
        # They contain this frame: a cycle that would keep the tensors of all callers alive.
        frames.clear()
    # The judges come after the frames: the threads in `waiting` have done nothing in between.
    for judge in judges:
        if left:
            left -= judge(left)
    return not left


def _is_quiet(frame: FrameType) -> bool:
    outer: FrameType | None = frame
    while outer is not None:
        if _is_in(outer, _HELPERS):
            return True
        outer = outer.f_back
    return False


def _is_in(frame: FrameType, places: tuple[tuple[str, str], ...]) -> bool:
    code = frame.f_code
    file = code.co_filename.replace("\\", "/")
    return any(file.endswith(end) and code.co_name == name for end, name in places)
