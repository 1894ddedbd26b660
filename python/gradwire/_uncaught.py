"""Uncaught exceptions: the other ranks receive the message, and the user sees a short traceback.

Gradwire's errors pass through frames of this package, and often of PyTorch, which do not help to
find the failed call. So the printed traceback of an uncaught error ends in the user's frame.
``python -X dev`` prints all frames, and a debugger sees all of them.

``init`` and the first error install the hooks. Successful calls have no overhead.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType

from gradwire import _agent, _error_file, _native

# Why this process is ending, for the other ranks; None while it runs.
text: str | None = None
# The failure because of which it is ending, if there is one: another rank may be at fault.
cause: _native.Failure | None = None
# Each returns the failure behind an exception of a framework, if there is one.
causes: list[Callable[[BaseException], _native.Failure | None]] = []
# Tells the other ranks why this process is ending.
tell: Callable[[], None] | None = None

# The longest message that other ranks get: about a screen.
_MAX_LINES, _MAX_CHARACTERS = 20, 1600
_PACKAGES = ("gradwire", "torch")
_watching = False


def described(error: BaseException) -> str:
    """Returns the class and the message of an exception.

    The lines of a table keep their columns. A long message is cut, with its length: the other ranks
    print it, and the job's messages have a maximum size (BOUND).
    """
    name = type(error).__name__
    try:
        message = str(error).encode(errors="replace").decode()
    except Exception:  # the program's class may fail
        return name
    lines = [line.rstrip() for line in message.splitlines() if line.strip()]
    if not lines:
        return name
    kept = "\n".join(lines[:_MAX_LINES])[:_MAX_CHARACTERS].lstrip()
    if len(lines) > _MAX_LINES or len(kept) == _MAX_CHARACTERS:
        kept += f" … (cut: {len(message)} characters, {len(lines)} lines)"
    return f"{name}: {kept}"


def watch() -> None:
    """Installs the hooks, once."""
    global _watching
    if _watching:
        return
    _watching = True
    in_main, in_thread = sys.excepthook, threading.excepthook

    def main(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # The interpreter sets this before it ends. If the program calls the hook, it goes on.
        is_end = getattr(sys, "last_value", None) is error
        if is_end:
            _note(error)
            if cause is not None and _is_beyond(cause):
                _agent.is_consequence(cause.fields())
            _tell_before_waiting()
        with _agent.announced(), shortened(error) as ours:
            if is_end:
                _error_file.write(error, described(error), is_own=cause is None)
            in_main(kind, error, error.__traceback__ if ours else trace)

    def thread(args: threading.ExceptHookArgs) -> None:
        error = args.exc_value
        with _agent.announced(), shortened(error) as ours:
            if ours and error is not None:
                given = (args.exc_type, error, error.__traceback__, args.thread)
                args = threading.ExceptHookArgs(given)
            in_thread(args)

    sys.excepthook, threading.excepthook = main, thread


def _note(error: BaseException) -> None:
    """Notes that this process is ending because of this error."""
    global text, cause
    text = f"it ended with {described(error)}"
    failures = (_failure_of(each) for each in _chain(error))
    cause = next((failure for failure in failures if failure is not None), None)


def _is_beyond(failure: _native.Failure) -> bool:
    """Returns whether another rank is at fault."""
    return failure.rank is not None and str(failure.rank) != os.environ.get("GRADWIRE_RANK")


def _failure_of(error: BaseException) -> _native.Failure | None:
    if _is_ours(error):
        return getattr(error, "_failure", None)
    found = (find(error) for find in causes)
    return next((failure for failure in found if failure is not None), None)


def _tell_before_waiting() -> None:
    """Tells the other ranks as soon as the main thread has ended, if that is because of an error.

    The interpreter then waits for all other threads that are not daemons, and only afterwards calls
    the exit handlers. The other ranks must not wait for such threads (WAIT).
    """
    register = getattr(threading, "_register_atexit", None)
    if register is not None and tell is not None:
        # The last one registered is called first, before thread pools wait for their tasks.
        with contextlib.suppress(RuntimeError):  # the threads have ended
            register(tell)


@contextlib.contextmanager
def shortened(error: BaseException | None) -> Iterator[bool]:
    """Returns a context in which the traceback of a Gradwire error ends in the user's frame.

    Its value is whether the traceback was changed.
    """
    full = [] if error is None or sys.flags.dev_mode or not _is_ours(error) else _chain(error)
    traces = [(each, each.__traceback__) for each in full]
    for each, trace in traces:
        # A cause raised within this package has no user frame.
        each.__traceback__ = _until_user(trace) or (trace if each is error else None)
    try:
        yield bool(traces)
    finally:
        for each, trace in traces:
            each.__traceback__ = trace


def _is_ours(error: BaseException) -> bool:
    base = ("gradwire", "GradwireError")
    return any((kind.__module__, kind.__name__) == base for kind in type(error).__mro__)


def _chain(error: BaseException) -> list[BaseException]:
    """Returns the error and all errors that are printed with it."""
    found: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is not None and each not in found:
            found.append(each)
            pending += [each.__cause__, each.__context__]
    return found


def _until_user(trace: TracebackType | None) -> TracebackType | None:
    """Returns a copy of a traceback that ends in the last frame outside of our packages."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    while frames and _is_inside(frames[-1]):
        frames.pop()
    short: TracebackType | None = None
    for each in reversed(frames):
        short = TracebackType(short, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return short


def _is_inside(trace: TracebackType) -> bool:
    module = str(trace.tb_frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] in _PACKAGES
