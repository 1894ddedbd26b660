"""Tells what all threads of this process do, and shows reports about long waits.

``gradwire why`` and reports about long waits contain the Python stacks of a rank. The native module
asks for them (``python/src/stacks.rs``):

- A thread of this module writes them with ``faulthandler`` while it has the interpreter's lock.
- If C code holds the lock, the handler of a signal writes them without it. Only a thread of the
  native module ever gets this signal, and sends it to itself. It is an unused real-time signal, so
  the program's own handlers and its own ``faulthandler`` stay as they are.

Neither runs until the native module asks.
"""

from __future__ import annotations

import _thread
import faulthandler
import logging
import os
import signal
import sys
import threading

from gradwire import _agent, _native

_log = logging.getLogger("gradwire")
# The process in which the thread runs: a forked child has no such thread.
_process = 0


def start() -> None:
    """Starts the thread, once per process. If that fails, reports lack this process's stacks."""
    global _process
    if _process == os.getpid():
        return
    _process = os.getpid()
    try:
        requests, answers, file, forced = _native.open_stacks()
        signum = _unused_signal()
        if signum is not None:
            faulthandler.register(signum, file=forced, all_threads=True)
        # Not a thread of `threading`: programs count and join those.
        _thread.start_new_thread(_serve, (requests, answers, file))
    except (OSError, RuntimeError) as error:
        _log.debug("the stacks of this process can't be shown: %s", error)
        return
    main = threading.main_thread().ident or 0
    _native.offer_stacks(signum, main, os.path.dirname(os.path.abspath(__file__)))


def _unused_signal() -> int | None:
    """Returns a real-time signal that this process does not handle, ignore or block, if any."""
    used = 0
    with open("/proc/self/status", encoding="utf-8") as status:
        for line in status:
            if line.startswith(("SigCgt:", "SigIgn:", "SigBlk:")):
                used |= int(line.split()[1], 16)
    # Not the first or the last ones, which programs use first.
    numbers = range(signal.SIGRTMAX - 8, signal.SIGRTMIN + 8, -1)
    return next((number for number in numbers if not used >> (number - 1) & 1), None)


def _serve(requests: int, answers: int, file: int) -> None:
    while request := os.read(requests, 1):
        if request == b"s":
            os.ftruncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)
            faulthandler.dump_traceback(file, all_threads=True)
            os.write(answers, b".")
        elif (text := _native.take_report()) is not None:
            _show(text)


def _show(text: str) -> None:
    """Shows a report with the program's logging, or else on standard error."""
    if _log.hasHandlers():
        _log.warning("%s", text.rstrip())
    elif sys.__stderr__ is not None:
        with _agent.announced():
            print(f"gradwire: {text.rstrip()}", file=sys.__stderr__, flush=True)
