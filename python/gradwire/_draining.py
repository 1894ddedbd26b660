"""SIGTERM makes a rank of an elastic job leave it, which is not a fault.

A handler tells the launcher, which lets the rank leave at the next commit or step of all ranks. The
launcher then ends the process with a second SIGTERM. The handler is installed from ``init()`` to
``shutdown()``, unless ``elastic.drain_on_term`` is off or the program has its own handler.

SIGTERM also ends a process whose job is being stopped. The handler can't distinguish the two cases
at once, so a thread checks for a moment whether the job ends.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

from gradwire import _native, _world

# How long after the signal, and how often, the thread checks for the end of the job, in seconds.
_LOOKS_FOR = 2.0
_LOOKS_EVERY = 0.05


def _begin() -> None:
    """Lets SIGTERM make this rank leave, if its job is elastic."""
    session = _world.session()
    if (
        session.elastic
        and session.drains_on_term
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGTERM, _asked)


def _end() -> None:
    """Removes the handler."""
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is _asked
    ):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _asked(number: int, _: FrameType | None) -> None:
    # A second signal ends the process.
    signal.signal(number, signal.SIG_DFL)
    # A forked child, such as one of a DataLoader, is not a rank.
    if not _world.is_rank():
        os.kill(os.getpid(), number)
        return
    session = _world.session()
    if not session.ask_to_leave():
        os.kill(os.getpid(), number)
        return
    threading.Thread(target=_unless_over, args=(session, number), daemon=True).start()


def _unless_over(session: _native.Session, number: int) -> None:
    """Ends this process if the job ends soon after the signal."""
    until = time.monotonic() + _LOOKS_FOR
    while time.monotonic() < until:
        time.sleep(_LOOKS_EVERY)
        if not session.ask_to_leave():
            os.kill(os.getpid(), number)
            return


_world.after_init.append(_begin)
_world.before_shutdown.append(_end)
