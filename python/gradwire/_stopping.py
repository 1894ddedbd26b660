"""``should_stop``: all ranks learn at the same call that one of them was asked to stop.

Schedulers ask with a signal, some time before they kill a job, and not all ranks receive it at the
same step. So the ranks agree at each call.

The signal of ``--stop-signal`` is noted from ``init()`` on: it may come before the first call.
"""

from __future__ import annotations

import operator
import signal
import threading
from types import FrameType
from typing import Any

from gradwire import _world
from gradwire._errors import InvalidRequest
from gradwire._world import session

# The handlers that were replaced, by signal.
_before: dict[int, Any] = {}
_asked = False


def should_stop(*signals: int) -> bool:
    """Returns whether any rank was asked to stop. All ranks call it, at the same point.

    The first call makes this process note SIGTERM instead of ending. A second SIGTERM ends it. Call
    this function in the main thread.

    Args:
        *signals: Further signals to note, such as the one of Slurm's ``--signal``. The option
            ``--stop-signal`` of ``gradwire run`` adds one, too.

    Returns:
        True on all ranks in the same call, and in all later ones, once any rank has noted a signal.

    Raises:
        InvalidRequest: The first call is not in the main thread, or a signal can't be noted.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.

    Example:
        ```python
        while step < 1000 and not gw.should_stop(signal.SIGUSR1):
            step = train(step)
        if gw.rank() == 0:
            save(step)
        ```
    """
    global _asked
    native = session()
    for number in (signal.SIGTERM, _of_job(), *signals):
        _note(number)
    buffer = native.buffer("u8", [1])
    buffer.write(bytes([_asked]))
    native.allreduce([buffer], "max", name="should-stop").wait()
    stops = buffer.read() != b"\0"
    if stops:  # a signal may have arrived meanwhile, for the next call
        _asked = True
    return stops


def _of_job() -> signal.Signals:
    """Returns the signal of ``--stop-signal``."""
    return signal.Signals[session().stop_signal]


def _begin() -> None:
    """Notes the signal of ``--stop-signal``, unless it is SIGTERM, which ends a process."""
    number = _of_job()
    is_main = threading.current_thread() is threading.main_thread()
    if number != signal.SIGTERM and number not in _before and is_main:
        _note(number)


def _note(number: int) -> None:
    """Makes this process note a signal, if it does not yet."""
    try:
        known = operator.index(number)
        if known in _before:
            return
        if threading.current_thread() is threading.main_thread():
            _before[known] = signal.signal(known, _noted)
            return
    except (OSError, OverflowError, TypeError, ValueError) as error:
        raise InvalidRequest(
            f"should_stop({number!r}): this signal can't be noted: {error}", kind="invalid"
        ) from error
    raise InvalidRequest(
        "should_stop() must be called in the main thread first: only there can Python handle a "
        "signal",
        kind="invalid",
    )


def _noted(number: int, _: FrameType | None) -> None:
    global _asked
    _asked = True
    # Other signals keep this handler. They may come twice: from the launcher, and from a scheduler
    # that signals every process.
    if number in (signal.SIGTERM, signal.SIGINT):
        # None: a handler that was not set by Python can't be restored.
        before = _before[number]
        signal.signal(number, signal.SIG_DFL if before is None else before)


_world.after_init.append(_begin)
