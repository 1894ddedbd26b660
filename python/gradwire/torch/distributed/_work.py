"""An operation in flight as ``torch.distributed`` sees it: ``Work``, and its future.

How an error comes to PyTorch decides what happens to the ranks that survive it (TELL). Of the four
ways that there are, three end them with a segmentation fault or give wrong data as a success. What is
done here is the one that does neither: a Python subclass of ``Work`` whose ``wait`` raises,
and a future that is *made of* another one by a callback that raises. So no exception is ever
put into a future, and no work is ever made of one.
"""

from __future__ import annotations

import atexit
import collections
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradwire import _native
from gradwire._errors import Cancelled, GradwireError, WaitTimeout
from gradwire._world import before_shutdown
from gradwire.torch import _cuda

_SLICE = 0.2
_FAREWELL = 5.0
_last_error: BaseException | None = None


def last_error() -> BaseException | None:
    """The last error of an operation in this process, as it was before PyTorch wrapped it; None if all went well.

    DDP turns what a future raises into a ``RuntimeError`` with the text of the error in its own.
    """
    return _last_error


class Failed:
    """Stands for an error where a future's value is looked for."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


def unwrap(future: torch.futures.Future[Any]) -> Any:
    """What was waited for, or its error, raised."""
    value = future.value()
    if isinstance(value, Failed):
        raise value.error
    return value


# Before 2.7 PyTorch's C++ lets go of the Python half of a work that it was given, and then waits for ever
# on the other half: until they are waited for, works are kept here.
_KEEPS = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 7)
_MOST_KEPT = 1 << 14
_kept: dict[int, Work] = {}
# DDP, in a join, asks by the sum of one number how many ranks are left. Of that work newer releases of PyTorch let go,
# too, and ask it for its future after they have waited for it.
_questions: collections.deque[Work] = collections.deque(maxlen=32)


def keep_for_a_while(work: Work) -> Work:
    """For works of tensors so small that it costs nothing."""
    _questions.append(work)
    return work


before_shutdown.append(_questions.clear)


class _NotYet(Exception):
    """The operation goes on."""


def _outcome(handle: _native.Handle, within: float) -> Any:
    try:
        return handle.wait(within)
    except WaitTimeout:
        if not handle.poll():
            raise _NotYet from None
    # It has ended meanwhile, and be it with a timeout of its own.
    return handle.wait(0.0)


_Work: Any = dist._Work  # type: ignore[attr-defined]  # PyTorch exports it without a type


class Work(_Work):  # type: ignore[misc]
    """One operation, or several that were started as one.

    The result is copied where it belongs by whoever sees the end first: ``wait``, ``is_completed`` or the
    future.
    """

    def __init__(
        self,
        what: str,
        handles: Sequence[_native.Handle],
        finish: Callable[[list[Any]], None],
        result: Any,
        timeout: timedelta,
        devices: Sequence[torch.device] = (),
        source: int = -1,
        destroyed: threading.Event | None = None,
    ) -> None:
        super().__init__()
        self.what, self._handles, self._finish = what, list(handles), finish
        self.value, self._source = result, source
        # Whether there still is the group that it belongs to.
        self._destroyed = destroyed
        self._limit = timeout.total_seconds()
        self._deadline = time.monotonic() + self._limit
        self._devices: list[Any] = sorted({d for d in devices if d.type != "cpu"}, key=str) if devices else []
        self._lock = threading.Lock()
        self._ended = False
        self._error: BaseException | None = None
        # On the GPU's streams of whoever saw the end first: those of who waits come after.
        self._marks: list[_cuda.Mark] = []
        self._future: torch.futures.Future[Any] | None = None
        if _KEEPS:
            _kept[id(self)] = self
            if len(_kept) > _MOST_KEPT:
                _kept.pop(next(iter(_kept)), None)

    def _end(self, until: float) -> None:
        """Waits and copies the result to its place; raises what went wrong, or ``_NotYet``."""
        global _last_error
        results = []
        try:
            for handle in self._handles:
                results.append(_outcome(handle, max(0.0, until - time.monotonic())))
        except GradwireError as error:
            told = self._given_up(error)
            with self._lock:
                self._ended, self._error = True, told
            _last_error = told
            raise told from (None if told is error else error)
        with self._lock:
            if not self._ended:
                try:
                    self._finish(results)
                    if self._devices:
                        self._marks = _cuda.stage.marks(self._devices)
                except BaseException as error:
                    self._error = _last_error = error
                self._ended = True
                self._finish = lambda _: None  # what it held is free
        if self._error is not None:
            raise self._error

    def _given_up(self, error: GradwireError) -> GradwireError:
        """The error in the words of process groups, where what it says is that the process set is no more."""
        gone = self._destroyed is not None and self._destroyed.is_set()
        # What ends the job is about no tensor.
        if not gone or error.kind not in ("invalid", "cancelled") or not error.tensor:
            return error
        return Cancelled(
            f"{self.what} was given up: its process group was destroyed, and not all of its ranks had made this call "
            f"({error})",
            kind="cancelled",
            tensor=error.tensor,
        )

    def _late(self, limit: float) -> WaitTimeout:
        global _last_error
        error = WaitTimeout(
            f"{self.what} did not complete within {limit:g} s, the timeout of the call, of new_group or of "
            "init_process_group: a rank is late or has not made this call",
            kind="timeout",
        )
        _last_error = error
        return error

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits until the result is in its place. Every rank that waits is told the same cause of a failure."""
        limit = timeout.total_seconds()
        until = time.monotonic() + limit if limit > 0 else self._deadline
        try:
            self._end(until)
        except _NotYet:
            raise self._late(limit if limit > 0 else self._limit) from None
        finally:
            _kept.pop(id(self), None)
        _cuda.stage.follow(self._marks)
        return True

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""
        if not self._ended and all(handle.poll() for handle in self._handles):
            try:
                self._end(time.monotonic())
            except BaseException:
                return self._ended
        return self._ended

    def is_success(self) -> bool:
        """Whether it has completed, and not failed."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """What it failed of."""
        return self._error if self.is_completed() else None

    def result(self) -> list[torch.Tensor]:
        """The tensors with the result, after waiting for it."""
        self.wait()
        return self.value if isinstance(self.value, list) else [self.value]

    def source_rank(self) -> int:
        """From which rank of the group it came."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """The result as a future: completed by a thread that waits for it, or at once where it is there already."""
        with self._lock:
            if self._future is not None:
                return self._future
            base: torch.futures.Future[Any] = torch.futures.Future(devices=list(self._devices) or None)
            future = self._future = base.then(unwrap)
        if self.is_completed():
            self._complete(base)
        else:
            start(lambda: self._complete(base))
        return future

    def _complete(self, base: torch.futures.Future[Any]) -> None:
        """Completes the future, with a token where there is an error; not once the interpreter ends."""
        while True:
            try:
                self._end(min(self._deadline, time.monotonic() + _SLICE))
            except _NotYet:
                if time.monotonic() >= self._deadline:
                    base.set_result(Failed(self._late(self._limit)))
                elif _ending.is_set():
                    return
                else:
                    continue
            except BaseException as error:
                base.set_result(Failed(error))
            else:
                _cuda.stage.follow(self._marks)
                base.set_result(self.value)
            _kept.pop(id(self), None)
            return


_ending = threading.Event()
_waiters: list[threading.Thread] = []
_jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
_idle = 0
_pool = threading.Lock()


def start(job: Callable[[], None]) -> None:
    """Runs it on a thread of its own, an idle one if there is one.

    One for each wait: which operation ends first is up to all ranks, and waiting in turn could wait for one
    that comes only after another's result was seen.
    """
    global _idle
    with _pool:
        _waiters[:] = [thread for thread in _waiters if thread.is_alive()]
        if _idle > 0:
            _idle -= 1
        else:
            thread = threading.Thread(target=_wait_for_others, name="gw-futures", daemon=True)
            _waiters.append(thread)
            thread.start()
        _jobs.put(job)


def _wait_for_others() -> None:
    global _idle
    while (job := _jobs.get()) is not None:
        job()
        del job  # it holds tensors
        with _pool:
            _idle += 1


def _stop() -> None:
    """A thread that touches futures while the interpreter goes away would abort the process: none is left."""
    _ending.set()
    for _ in _waiters:
        _jobs.put(None)
    until = time.monotonic() + _FAREWELL
    for thread in _waiters:
        thread.join(max(0.0, until - time.monotonic()))


def _forked() -> None:
    """A forked child has none of the threads."""
    global _jobs, _idle, _pool
    _jobs, _idle, _pool = queue.SimpleQueue(), 0, threading.Lock()
    _waiters.clear()


atexit.register(_stop)
os.register_at_fork(after_in_child=_forked)
