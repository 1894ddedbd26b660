"""An operation in flight for ``torch.distributed``: ``Work`` and its future.

PyTorch has four ways to report an error; three of them end in a segmentation fault or report wrong
data as a success (TELL). This module uses the fourth: a Python subclass of ``Work`` whose ``wait``
raises, and a future that is *derived* from another one by a callback that raises. It never puts an
exception into a future, and never derives a work from a future.

A program may drop a work and still rely on its tensor. So the operation is a separate object, which
completes without its work, too.
"""

from __future__ import annotations

import collections
import logging
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
from gradwire.torch.distributed import _threads
from gradwire.torch.distributed._futures import Failed, numbered, seen, unwrap
from gradwire.torch.distributed._numbering import Members, note

_log = logging.getLogger("gradwire")
_SLICE = 1.0
# A program that waits for at least this long does not expect to go on after the timeout.
_PATIENT_SECONDS = 60.0
# Errors of one operation; all others end the job, or are expected while a group is destroyed.
_OF_ONE_OPERATION = ("disagreement", "invalid", "resource", "internal")
_last_error: BaseException | None = None


def last_error() -> BaseException | None:
    """Returns the last error of an operation in this process, before PyTorch wrapped it.

    DDP raises a ``RuntimeError`` whose message contains that of the error.

    Returns:
        The error; None if no operation has failed.

    Example:
        ```python
        try:
            loss.backward()
        except RuntimeError:
            print(gradwire.torch.distributed.last_error())
            raise
        ```
    """
    return _last_error


# Before 2.7, PyTorch's C++ code drops the Python half of a work, and then waits forever for the
# other half. So works are kept here until they are waited for.
_KEEPS = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 7)
_MAX_KEPT = 1 << 14
_kept: dict[int, Work] = {}
# In a join, DDP sums one number to count the remaining ranks. Newer PyTorch releases also drop that
# work, and use its future after the wait.
_join_counts: collections.deque[Work] = collections.deque(maxlen=32)


def keep_for_a_while(work: Work) -> Work:
    """Keeps a work with tiny tensors alive for a while; returns it."""
    _join_counts.append(work)
    _threads.finish_perhaps(work.operation)
    return work


def _release() -> None:
    for work in _join_counts:
        work.operation.report()
    _join_counts.clear()


before_shutdown.append(_release)


class _NotYet(Exception):
    """The operation has not completed."""


def _outcome(handle: _native.Handle, within: float, patient: bool) -> Any:
    try:
        return handle.wait(within, patient=patient)
    except WaitTimeout:
        if not handle.poll():
            raise _NotYet from None
    # It has completed meanwhile, possibly with its own timeout.
    return handle.wait(0.0)


class Operation:
    """One operation, or several that were started as one.

    The first thread that sees its completion copies the result to the output tensors.
    """

    def __init__(
        self,
        what: str,
        handles: Sequence[_native.Handle],
        finish: Callable[[list[Any]], None] | None,
        devices: list[Any],
        destroyed: threading.Event | None,
        unfinished: dict[Operation, None] | None = None,
        earlier: Sequence[Operation] = (),
    ) -> None:
        self.what = what
        self.name = handles[0].name if handles else what
        self._handles, self._finish, self._devices = list(handles), finish, devices
        # Set when its group is destroyed.
        self._destroyed = destroyed
        self._lock = threading.Lock()
        self.ended = False
        self.error: BaseException | None = None
        # Whether its result is no longer needed, or its error has been reported.
        self.given_up = False
        # Whether its work was dropped.
        self._is_dropped = False
        # The operations of its group that have not ended, this one included.
        self._unfinished = unfinished
        if unfinished is not None:
            unfinished[self] = None
        # Operations that end before this one. Their own works report their errors.
        self._earlier = earlier
        # Stream events of the thread that started it: the result is copied after them, by any
        # thread.
        self._before = _cuda.stage.marks(devices) if devices else []
        # Stream events of the thread that copied the result: later waits follow them.
        self.after: list[_cuda.Mark] = []

    def end(self, until: float, patient: bool = False) -> None:
        """Waits, and copies the result to the output tensors; raises its error, or ``_NotYet``.

        A patient wait counts as one without a limit.
        """
        global _last_error
        results = []
        for operation in self._earlier:
            operation.end_silently(until, patient)
        try:
            for handle in self._handles:
                left = max(0.0, until - time.monotonic())
                results.append(_outcome(handle, left, patient))
        except GradwireError as error:
            shown = self._in_group_terms(error)
            with self._lock:
                self._set_ended(shown)
            _last_error = shown
            raise shown from (None if shown is error else error)
        with self._lock:
            if not self.ended:
                try:
                    if self._finish is not None:
                        _cuda.stage.follow(self._before)
                        self._finish(results)
                    if self._devices:
                        self.after = _cuda.stage.marks(self._devices)
                    for operation in self._earlier:
                        self.after += operation.after
                except BaseException as error:
                    _last_error = error
                    self._set_ended(error)
                else:
                    self._set_ended(None)
        if self.error is not None:
            raise self.error

    def _set_ended(self, error: BaseException | None) -> None:
        """Records the outcome, and releases what the operation holds."""
        if not self.ended:
            self.error, self.ended = error, True
            self._finish, self._handles, self._earlier = None, [], ()
            self._leave()

    def give_up(self) -> None:
        """Notes that its result is no longer needed, or that its error has been reported."""
        self.given_up = True
        self._leave()

    def _leave(self) -> None:
        if self._unfinished is not None:
            self._unfinished.pop(self, None)

    def end_silently(self, until: float, patient: bool) -> None:
        """Waits for its end, also if that is an error; raises ``_NotYet``."""
        if self.ended or self.given_up:
            return
        try:
            self.end(until, patient)
        except _NotYet:
            raise
        except BaseException:
            if not self.ended:
                raise

    def _in_group_terms(self, error: GradwireError) -> GradwireError:
        """Rewords the error for process groups if the process set has been removed."""
        gone = self._destroyed is not None and self._destroyed.is_set()
        # Errors that end the job name no tensor.
        if not gone or error.kind not in ("invalid", "cancelled") or not error.tensor:
            return error
        return Cancelled(
            f"{self.what} was abandoned: its process group was destroyed before all of its ranks "
            f"had made this call ({error})",
            kind="cancelled",
            tensor=error.tensor,
        )

    def poll(self) -> bool:
        """Returns whether ``end`` would not wait."""
        return self.ended or (
            all(handle.poll() for handle in self._handles)
            and all(operation.given_up or operation.poll() for operation in self._earlier)
        )

    def try_to_end(self) -> bool:
        """Ends the operation if it has completed; returns whether it has ended or failed."""
        if not self.ended and self.poll():
            try:
                self.end(time.monotonic())
            except _NotYet:
                return False
            except BaseException:
                return self.ended
        return self.ended

    def settle(self) -> bool:
        """Ends the operation if it has completed; returns whether nothing is left to do."""
        if not self.given_up and self.try_to_end() and self._is_dropped:
            self.report()
        return self.given_up or self.ended

    def report(self) -> None:
        """Logs the error if it has failed, because nothing waits for it."""
        if self.error is None or self.given_up:
            return
        self.give_up()
        if getattr(self.error, "kind", "invalid") in _OF_ONE_OPERATION:
            _log.warning("%s, whose work was dropped, failed: %s", self.what, self.error)

    def dropped(self) -> None:
        """Called when nothing will wait for it."""
        self._is_dropped = True
        if not self.given_up and (not self.ended or self.error is not None):
            _threads.finish_later(self)


_Work: Any = dist._Work  # type: ignore[attr-defined]  # PyTorch exports it without a type


class Work(_Work):  # type: ignore[misc]
    """An operation in flight. PyTorch may wait for it, use its future, or drop it.

    The collectives of ``torch.distributed`` create it.

    Args:
        what: A description for messages.
        handles: The native handles.
        finish: Copies the results of the handles to the output tensors.
        result: The tensors with the result.
        timeout: The maximum time to wait for the result.
        devices: The devices of the tensors.
        source: The rank in the group that sent a message.
        destroyed: Set when the group is destroyed.
        members: The ranks that share the operation; None for all.
        unfinished: The operations of the group that have not ended.
        earlier: Operations that end before this one.
    """

    operation: Operation

    def __init__(
        self,
        what: str,
        handles: Sequence[_native.Handle],
        finish: Callable[[list[Any]], None] | None,
        result: Any,
        timeout: timedelta,
        devices: Sequence[torch.device] = (),
        source: int = -1,
        destroyed: threading.Event | None = None,
        members: Members = None,
        unfinished: dict[Operation, None] | None = None,
        earlier: Sequence[Operation] = (),
    ) -> None:
        super().__init__()
        others: list[Any] = (
            sorted({d for d in devices if d.type != "cpu"}, key=str) if devices else []
        )
        self.operation = Operation(what, handles, finish, others, destroyed, unfinished, earlier)
        self.value, self._source, self._devices = result, source, others
        self.members = members
        self._limit = timeout.total_seconds()
        self._deadline = time.monotonic() + self._limit
        self._lock = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None
        self._waited = False
        if _KEEPS:
            _kept[id(self)] = self
            if len(_kept) > _MAX_KEPT:
                _kept.pop(next(iter(_kept)), None)
            _threads.finish_perhaps(self.operation)

    def __del__(self) -> None:
        operation = getattr(self, "operation", None)  # none if it was never started
        if operation is not None:
            operation.dropped()

    def _is_patient(self) -> bool:
        return self._limit >= _PATIENT_SECONDS

    def _timed_out(self, limit: float) -> WaitTimeout:
        global _last_error
        error = WaitTimeout(
            f"{self.operation.what} did not complete within {limit:g} s (the timeout of the call, "
            f"new_group or init_process_group): a rank is late or has not made this call"
            + note(self.operation.name),
            kind="timeout",
        )
        _last_error = error
        return error

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits until the result is in the output tensors.

        If the operation fails, all waiting ranks receive the same cause.

        Args:
            timeout: The maximum time to wait; 0 uses the timeout of the call or of the group.

        Returns:
            True.

        Raises:
            WaitTimeout: The operation did not complete in time.
            GradwireError: The operation failed; the subclass and ``kind`` tell why.
        """
        limit = timeout.total_seconds()
        until = time.monotonic() + limit if limit > 0 else self._deadline
        try:
            self.operation.end(until, self._is_patient() and limit <= 0)
        except BaseException as error:
            # After an error, no result may appear in the tensor later.
            self.operation.give_up()
            if isinstance(error, _NotYet):
                raise self._timed_out(limit if limit > 0 else self._limit) from None
            raise
        finally:
            _kept.pop(id(self), None)
            self._waited = True
            if self._future is not None:
                seen(self._future)
        _cuda.stage.follow(self.operation.after)
        return True

    def synchronize(self) -> None:
        """Waits until the result is in the output tensors, as ``wait`` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Returns whether ``wait`` would return or raise immediately.

        Returns:
            True if the operation has completed.
        """
        return self.operation.try_to_end()

    def is_success(self) -> bool:
        """Returns whether the operation has completed without an error.

        Returns:
            True if it has.
        """
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Returns the error of the operation.

        Returns:
            The error; None if it has not failed or not completed.
        """
        error = self.operation.error if self.is_completed() else None
        if error is not None:
            self.operation.give_up()
        return error

    def result(self) -> list[torch.Tensor]:
        """Waits for the result.

        Returns:
            The tensors with the result.
        """
        self.wait()
        return self.value if isinstance(self.value, list) else [self.value]

    def source_rank(self) -> int:
        """Returns the rank in the group that sent a message.

        Returns:
            The rank; -1 if it is not a message.
        """
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns the result as a future.

        A thread completes the future when the operation completes.

        Returns:
            A future of the tensors with the result. It raises what ``wait`` raises.
        """
        with self._lock:
            if self._future is not None:
                return self._future
            base: torch.futures.Future[Any] = torch.futures.Future(
                devices=list(self._devices) or None
            )
            future = self._future = numbered(
                base.then(unwrap), self.operation.name, self.members, self._devices
            )
            if self._waited:
                seen(future)
        if self.is_completed():
            self._complete(base)
        else:
            _threads.start(lambda: self._complete(base))
        return future

    def _failed(self, error: BaseException) -> Any:
        """Returns the value of the future after an error."""
        return Failed(error)

    def _complete(self, base: torch.futures.Future[Any]) -> None:
        """Completes the future, with a ``Failed`` for an error; not while the interpreter exits."""
        while True:
            try:
                until = min(self._deadline, time.monotonic() + _SLICE)
                self.operation.end(until, self._is_patient())
            except _NotYet:
                if time.monotonic() >= self._deadline:
                    self.operation.give_up()
                    base.set_result(self._failed(self._timed_out(self._limit)))
                elif _threads.ending.is_set():
                    return
                else:
                    continue
            except BaseException as error:
                self.operation.give_up()
                base.set_result(self._failed(error))
            else:
                _cuda.stage.follow(self.operation.after)
                base.set_result(self.value)
            _kept.pop(id(self), None)
            return
