"""The futures of operations: their errors, and the names and threads of their callbacks.

Only PyTorch's C++ code creates futures that can hold an error, as objects of its own class, which
can't hold our data. So the methods of the class are replaced, and look up what they need here;
other futures are not affected.

A callback may block, so each one runs in a separate thread. PyTorch would run the callbacks of a
future one after another, and in the program's thread if the future happens to be complete. Only
after the program has waited for the future does a callback run immediately, in the thread that
requests it. On GPUs PyTorch runs the callbacks, because it knows their streams.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from gradwire import _native, _quiet, _uncaught
from gradwire.torch.distributed import _threads
from gradwire.torch.distributed._numbering import Line, Members, Place, here

_log = logging.getLogger("gradwire")
Callback = Callable[[Any], Any]


class Failed:
    """An error as the value of a future."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


# The last error that a future has raised: its text, and the failure.
_raised: tuple[str, _native.Failure] | None = None


def unwrap(future: torch.futures.Future[Any]) -> Any:
    """Returns the value of a future, or raises its error."""
    global _raised
    value = future.value()
    if isinstance(value, Failed):
        failure = getattr(value.error, "_failure", None)
        if failure is not None:
            _raised = (str(value.error), failure)
        raise value.error
    return value


def _cause(error: BaseException) -> _native.Failure | None:
    """Returns the failure behind an uncaught exception, for the other ranks (TELL).

    PyTorch's C++ code, such as DDP's, raises a ``RuntimeError`` with the text of a future's error.
    """
    if _raised is None or type(error) is not RuntimeError:
        return None
    text, failure = _raised
    return failure if text in str(error) else None


_uncaught.causes.append(_cause)


class _Known:
    """What is known of a future."""

    __slots__ = ("place", "seen", "threads")

    def __init__(self, place: Place, threads: bool) -> None:
        self.place, self.threads = place, threads
        # Whether the program has waited for it.
        self.seen = False


_known: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()
# The futures that threads wait for.
_awaited: dict[int, Any] = {}
_Future: Any = torch._C.Future
_then, _add_done_callback, _wait = _Future.then, _Future.add_done_callback, _Future.wait


def numbered(future: Any, path: str, members: Members, devices: Any = ()) -> Any:
    """Numbers the operations that callbacks of this future start.

    Args:
        future: The future.
        path: A name that is the same on all members.
        members: The ranks that share the operation; None for all.
        devices: The devices of the future's tensors, without the CPU.
    """
    if _Future.then is _then:
        _Future.then, _Future.add_done_callback = _numbered_then, _numbered_done
        _Future.wait = _noted_wait
    _known[future] = _Known(Place(path, members), not devices)
    return future


def seen(future: Any) -> None:
    """Notes that the program has waited for the result of a future."""
    known = _known.get(future)
    if known is not None:
        known.seen = True


def _waiting_ones(threads: frozenset[int]) -> frozenset[int]:
    """Returns which of these threads wait for a future that another thread will complete."""
    awaited = {thread: _awaited.get(thread) for thread in threads}
    return frozenset(
        thread
        for thread, future in awaited.items()
        if future is not None and future in _known and not future.done()
    )


_quiet.judges.append(_waiting_ones)


@functools.wraps(_wait)
def _noted_wait(self: Any) -> Any:
    thread = threading.get_ident()
    outer = _awaited.get(thread)  # set if a signal handler runs during a wait
    _awaited[thread] = self
    try:
        return _wait(self)
    finally:
        if outer is None:
            _awaited.pop(thread, None)
        else:
            _awaited[thread] = outer
        seen(self)


@functools.wraps(_then)
def _numbered_then(self: Any, callback: Callback) -> Any:
    known = _known.get(self)
    if known is None:
        return _then(self, callback)
    run, path = _in_line(known, callback)
    if _needs_thread(self, known):
        base: torch.futures.Future[Any] = torch.futures.Future()
        _add_done_callback(self, _in_thread(lambda future: base.set_result(_outcome(run, future))))
        derived = _then(base, unwrap)
    else:
        derived = _then(self, run)
    _known[derived] = _Known(Place(path, known.place.members), known.threads)
    return derived


@functools.wraps(_add_done_callback)
def _numbered_done(self: Any, callback: Callback) -> None:
    known = _known.get(self)
    if known is None:
        _add_done_callback(self, callback)
        return
    run, _ = _in_line(known, callback)
    _add_done_callback(self, _in_thread(_logged(run)) if _needs_thread(self, known) else run)


def _in_line(known: _Known, callback: Callback) -> tuple[Callback, str]:
    """Returns a callback that counts its operations in its own line, and its path."""
    path = known.place.next()
    line = here.line.of_callback(callback, path, known.place.members)
    return functools.partial(_run, line, callback), path


def _run(line: Line, callback: Callback, future: Any) -> Any:
    before, here.line = here.line, line
    try:
        return callback(future)
    finally:
        here.line = before


def _needs_thread(future: Any, known: _Known) -> bool:
    """Returns whether a callback must run in a thread of its own."""
    return known.threads and not (known.seen and future.done())


def _in_thread(run: Callback) -> Callback:
    return lambda future: _threads.start(functools.partial(run, future))


def _outcome(run: Callback, future: Any) -> Any:
    try:
        return run(future)
    except BaseException as error:
        return Failed(error)


def _logged(run: Callback) -> Callback:
    """Returns a function that logs an error, as PyTorch does: nobody waits for the callback."""

    def logged(future: Any) -> None:
        outcome = _outcome(run, future)
        if isinstance(outcome, Failed):
            _log.warning("a callback of a future failed: %r", outcome.error)

    return logged
