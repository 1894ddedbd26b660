"""Which threads of the program never start operations.

A job is in a deadlock only if no thread of any rank could start an operation. A thread that runs
Python code could, unless it is known to do something else.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

# Threads that do one thing only, by the end of a file name and a function in it. What waits behind
# a gate of `_staging` is known otherwise.
_HELPERS = (
    ("gradwire/_staging.py", "_serve"),
    ("tqdm/_monitor.py", "run"),
    ("torch/utils/data/_utils/pin_memory.py", "_pin_memory_loop"),
    ("multiprocessing/queues.py", "_feed"),
    ("multiprocessing/resource_sharer.py", "_serve"),
    ("tensorboard/summary/writer/event_file_writer.py", "run"),
)


def others_are_quiet(waiting: frozenset[int]) -> bool:
    """Returns whether no thread could start an operation, except those in ``waiting``.

    Args:
        waiting: The identifiers of threads that wait for operations without a limit.

    Returns:
        True if that is certain. An idle worker of a pool may just have got work, and the handler of
        a running timer may raise, so neither is.
    """
    if signal.getitimer(signal.ITIMER_REAL)[0] > 0:
        return False
    frames = sys._current_frames()
    try:
        return all(ident in waiting or _is_quiet(frame) for ident, frame in frames.items())
    finally:
        # It contains this frame, and so a cycle that would keep the tensors of all callers alive.
        frames.clear()


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
