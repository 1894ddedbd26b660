"""This process as a rank: ``init()``, its rank and size, ``shutdown()``, and calls of all ranks."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from gradwire import _native, _process_sets, _stacks, _start, _uncaught, _variables
from gradwire._arguments import whole_numbers
from gradwire._errors import (
    Forked,
    GradwireError,
    InvalidRequest,
    NotInitialized,
    NotLaunched,
    PeerLost,
)
from gradwire._process_sets import ProcessSet, global_process_set

# How long ``shutdown`` waits for the other ranks to request the removals of process sets. A rank
# that still waits for this one in another operation learns only afterwards that it has left, so
# this is shorter than ``negotiation.stall_warning_ms``.
_REMOVAL_SECONDS = 2.0
_lock = threading.Lock()
_session: _native.Session | None = None
_process = 0
# The advice for a program without a session.
how_to_begin = "call init() first"
# Whether this process has left an elastic job.
_left = False
# The id of the process that has registered its end with ``multiprocessing``.
_registered = 0
# Whether the launcher has started this process after the first epoch of the job.
_is_newcomer = False
# Callbacks of other modules: after the session starts, before a process set is removed, and before
# the session ends.
after_init: list[Callable[[], None]] = []
# Called in a new process of an elastic job before it joins: afterwards, the others wait for it.
before_joining: list[Callable[[], None]] = []
before_removal: list[Callable[[], None]] = []
before_shutdown: list[Callable[[], None]] = []
# Removals of process sets that other ranks may not have requested yet.
removals: list[_native.Handle] = []


def session() -> _native.Session:
    """Returns the session of this process.

    Raises:
        NotInitialized: There is no session.
        Forked: It belongs to the parent of this process.
    """
    if _session is None:
        raise NotInitialized(f"gradwire has not been initialized: {how_to_begin}", kind="closed")
    if _process != os.getpid():
        raise Forked(
            f"this process was forked from a rank (process {_process}) and is not a rank itself: "
            "run collectives in the parent, or start this process without fork",
            kind="forked",
        )
    return _session


def members(process_set: ProcessSet) -> int:
    """Returns the number of members of a registered process set."""
    return len(process_set._ranks) if process_set._native is not None else _attached().size


def init(
    comm: Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
) -> None:
    """Makes this process a rank of a job, and returns once all ranks have called it.

    Under ``gradwire run`` and torchrun, it joins their job. Without a launcher, this process
    becomes the only rank of a new job. A second call does nothing.

    Args:
        comm: All ranks of the job, or None. Horovod also accepts a subset; use process sets for
            that.
        process_sets: Process sets to register. Horovod's ``"dynamic"`` is accepted and ignored:
            process sets can be added at any time.

    Raises:
        NotLaunched: The job can't be found or started.
        InvalidRequest: A setting or an argument is invalid.
        PeerLost: A rank or a node has exited or can't be reached.
        Forked: This process was forked from a rank.

    Example:
        ```python
        import gradwire as gw

        gw.init()
        print(gw.rank(), "of", gw.size())
        ```
    """
    global _session, _process, _is_newcomer
    ranks = None if comm is None else whole_numbers("comm", comm)
    _uncaught.watch()
    with _lock:
        if _session is not None and _process == os.getpid():
            return
        if _session is not None:
            raise Forked(
                f"this process was forked from a rank (process {_process}): it can't become one",
                kind="forked",
            )
        if _left:
            raise NotLaunched(
                "this process has left its elastic job with shutdown(), and can't come back: "
                "gradwire.elastic.run joins the next epoch of the job without that",
                kind="not-launched",
            )
        if "GRADWIRE_ELASTIC" in os.environ and "GRADWIRE_RANK" not in os.environ:
            for prepare in before_joining:
                prepare()
        try:
            _start.prepare()
            made = _native.Session.attach()
            _stacks.start()
        except BaseException as error:
            better = _start.explain_lost_daemon(error) if isinstance(error, PeerLost) else None
            _start.clear_variables(left=False, attached=False)
            if better is not None:
                raise better from error
            raise
        if ranks is not None and sorted(ranks) != list(range(made.size)):
            made.abort(f"init(comm={ranks}): comm must contain all ranks of the job")
            raise InvalidRequest(
                f"init(comm={ranks}): comm must contain all {made.size} ranks of the job; use "
                "process sets for a subset",
                kind="invalid",
            )
        try:
            # An elastic job has compared its ranks already, and in a later epoch only newcomers
            # call this.
            if not made.elastic:
                made.barrier(name="init").wait()
        except BaseException as error:
            why = f"in init(), {_uncaught.described(error)}"
            if not isinstance(error, GradwireError) or error._failure is None:
                made.abort(why)
            elif error.rank not in (None, made.rank):
                # The job ends with this failure, and the launcher names the rank at fault.
                made.abort(why, error._failure)
            else:
                # All ranks see this error themselves: this rank must not look like the cause.
                with contextlib.suppress(GradwireError):
                    made.shutdown()
            _start.clear_variables(left=False)
            raise
        _session, _process = made, os.getpid()
        # The launcher gives numbers only to ranks of the first epoch.
        _is_newcomer = made.elastic and "GRADWIRE_RANK" not in os.environ
        _variables.set_for(made)
        _leave_with_multiprocessing()
        global_process_set._registered(made.global_process_set())
    for begin in after_init:
        begin()
    if process_sets is not None and not isinstance(process_sets, str):
        for process_set in process_sets:
            add_process_set(process_set)


def shutdown() -> None:
    """Leaves the job cleanly.

    Operations that are still in flight fail on the other ranks. This is called automatically when
    the process exits; a second call does nothing.

    Raises:
        PeerLost: The job has failed. Under torchrun, the first rank of a host waits for the others,
            and also raises this if the job fails meanwhile.
    """
    with _lock:
        ended = _detach()
        if ended is None:
            return
        until = time.monotonic() + _REMOVAL_SECONDS
        while removals:
            with contextlib.suppress(GradwireError):
                removals.pop().wait(max(0.0, until - time.monotonic()))
        try:
            ended.shutdown()
        except BaseException:
            _start.clear_variables(left=False)
            raise
        if how := _start.clear_variables(left=True):
            raise PeerLost(f"the job failed after this rank had left it: {how}", kind="rank-left")


def let_go() -> None:
    """Leaves the job, which may have failed, so that this process can join another one at once.

    Unlike ``shutdown``, it does not wait for the other ranks.
    """
    with _lock:
        ended = _detach()
        removals.clear()
        if ended is not None:
            with contextlib.suppress(GradwireError):
                ended.shutdown()
        _start.let_go()


def _detach() -> _native.Session | None:
    """Removes and returns the session; None if there is none."""
    global _session, _left
    if _session is None or _process != os.getpid():
        return None
    _left = _session.elastic
    for prepare in before_shutdown:
        prepare()
    ended, _session = _session, None
    _variables.restore()
    _process_sets.forget()
    return ended


def renew() -> None:
    """Updates variables and process sets after the ranks of the job have changed."""
    native = session()
    _variables.restore()
    _variables.set_for(native)
    _process_sets.renew(native.global_process_set())


def is_initialized() -> bool:
    """Returns whether this process is a rank, or was forked from one.

    Returns:
        True between ``init()`` and ``shutdown()``.
    """
    return _session is not None


def is_rank() -> bool:
    """Returns whether this process itself is a rank and can run collectives."""
    return _session is not None and _process == os.getpid()


def is_elastic() -> bool:
    """Returns whether this process is a rank of a job that may change its ranks."""
    return _session is not None and is_rank() and _session.elastic


def is_newcomer() -> bool:
    """Returns whether this process was started after the first epoch of an elastic job."""
    return _is_newcomer


def mark_step() -> None:
    """Records a training step in the daemon's metrics.

    ``DistributedOptimizer.step`` calls it automatically, and so does ``ddp_hook`` with its last
    bucket. It makes no system call. The metrics show each rank's number of steps, and the time
    since the last one.

    Raises:
        NotInitialized: ``init()`` has not been called.

    Example:
        ```python
        for batch in data:
            train(batch)
            gw.mark_step()
        ```
    """
    session().mark_step()


def paused(what: str = "evaluation") -> contextlib.AbstractContextManager[None]:
    """Says that the program makes no training steps for a while.

    Until the end of the ``with`` block, a standstill is not reported, and no wait ends the job
    (``watchdog.*``, ``negotiation.stall_shutdown_ms``). One rank that is paused is enough.
    Reports and ``gradwire why`` show the pause.

    Args:
        what: What the program does meanwhile, in a word or two.

    Returns:
        A context in which the program is paused.

    Raises:
        NotInitialized: ``init()`` has not been called.

    Example:
        ```python
        with gw.paused("evaluation"):
            evaluate(model)
        ```
    """
    session()  # raises an error here, and not in the block
    return _pause(what)


@contextlib.contextmanager
def _pause(what: str) -> Iterator[None]:
    pause = session().paused(what)
    try:
        yield
    finally:
        pause.end()


def note_step() -> None:
    """Calls ``mark_step`` if this process is a rank."""
    if is_rank() and _session is not None:
        _session.mark_step()


def abort(reason: str) -> None:
    """Aborts the job: operations on all other ranks fail with this reason.

    Args:
        reason: The message that the other ranks receive.

    Raises:
        NotInitialized: ``init()`` has not been called.
    """
    session().abort(reason)


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """Leaves the job at the end of this process, and then ends the services that it has started."""
    try:
        with contextlib.suppress(RuntimeError):  # the failed calls have already reported it
            yield
    finally:
        _start.stop()


def _leave_with_multiprocessing() -> None:
    """Registers ``_at_end_of_target`` if ``multiprocessing`` has started this process.

    Processes that ``multiprocessing`` has forked end without the handlers of ``atexit``.
    """
    global _registered
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is None or multiprocessing.parent_process() is None:
        return
    if _registered != os.getpid():
        from multiprocessing import util

        _registered = os.getpid()
        # Below 0: after the daemonic children of this process have been ended.
        util.Finalize(None, _at_end_of_target, exitpriority=-1)


def _at_end_of_target() -> None:
    """Leaves the job when the target of a process of ``multiprocessing`` has ended (TELL).

    It runs while an exception of the target propagates.
    """
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        why = f"sys.exit({error.code!r})" if error.code not in (None, 0) else None
    else:
        why = None if error is None else _uncaught.described(error)
    with _ending():
        if why is not None and is_rank() and _session is not None:
            _session.abort(why, getattr(error, "_failure", None))
        else:
            shutdown()


def _has_exit_code() -> bool:
    """Returns whether this process will pass an exit code to the C library's exit handlers.

    ``multiprocessing`` ends its processes in another way.
    """
    multiprocessing = sys.modules.get("multiprocessing.process")
    return multiprocessing is None or multiprocessing.parent_process() is None


def _tell() -> None:
    """Tells all ranks why this process is ending, after an uncaught error (TELL)."""
    with contextlib.suppress(RuntimeError):  # the failed calls have already reported it
        if _uncaught.text is not None and is_rank() and _session is not None:
            _session.abort(_uncaught.text, _uncaught.cause)


_uncaught.tell = _tell


@atexit.register
def _at_exit() -> None:
    """Leaves the job when the interpreter exits, or tells all ranks why it failed (TELL)."""
    if _process and _process != os.getpid():
        return  # a forked child has nothing to end
    try:
        with _ending():
            _leave_or_tell()
    finally:
        _native.hold_threads()


def _leave_or_tell() -> None:
    if _session is not None and _uncaught.text is not None:
        _tell()
    elif _has_exit_code():
        # A ``SystemExit`` is not visible here. The exit code, not known yet, decides.
        ended = _detach()
        if ended is not None:
            ended.leave_at_exit(_start.hand_over(), removals)
    else:
        shutdown()


def _attached() -> _native.Session:
    """Returns the session, to read the rank's numbers.

    Forked children may use it, too: ``DataLoader`` workers shard their data by rank.
    """
    return session() if _session is None else _session


def rank() -> int:
    """Returns this rank's number in the job.

    Returns:
        A number from 0 to ``size() - 1``.

    Raises:
        NotInitialized: ``init()`` has not been called.
    """
    return _attached().rank


def size() -> int:
    """Returns the number of ranks of the job.

    Returns:
        The number of ranks, at least 1.

    Raises:
        NotInitialized: ``init()`` has not been called.
    """
    return _attached().size


def local_rank() -> int:
    """Returns this rank's number on its node.

    Returns:
        A number from 0 to ``local_size() - 1``.

    Raises:
        NotInitialized: ``init()`` has not been called.

    Example:
        ```python
        torch.cuda.set_device(gw.local_rank())
        ```
    """
    return _attached().local_rank


def local_size() -> int:
    """Returns the number of ranks on this node.

    Returns:
        The number of ranks, at least 1.

    Raises:
        NotInitialized: ``init()`` has not been called.
    """
    return _attached().local_size


def cross_rank() -> int:
    """Returns this node's number among the nodes that have a rank with this ``local_rank()``.

    Returns:
        A number from 0 to ``cross_size() - 1``.

    Raises:
        NotInitialized: ``init()`` has not been called.
    """
    return _attached().cross_rank


def cross_size() -> int:
    """Returns the number of nodes that have a rank with this ``local_rank()``.

    Returns:
        The number of nodes, at least 1.

    Raises:
        NotInitialized: ``init()`` has not been called.
    """
    return _attached().cross_size


def is_homogeneous() -> bool:
    """Returns whether all nodes have the same number of ranks.

    Returns:
        True if they do.

    Raises:
        NotInitialized: ``init()`` has not been called.
    """
    return len({slots for _, _, slots in _attached().nodes}) == 1


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Registers a process set. All ranks of the job call it, with the same ranks.

    Args:
        process_set: The process set, or its ranks.

    Returns:
        The process set, which now has an id.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.

    Example:
        ```python
        first_two = gw.add_process_set([0, 1])
        ```
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if process_set._native is not None:
        raise InvalidRequest(f"{process_set} is already registered", kind="invalid")
    made: _native.ProcessSet = session().add_process_set(process_set.ranks).wait()
    _process_sets.register(process_set, made)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set. All ranks of the job call it.

    Args:
        process_set: A registered process set.

    Returns:
        True if it was removed; False if it was not registered, or is ``global_process_set``.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    if not isinstance(process_set, ProcessSet):
        raise InvalidRequest(
            f"process_set={process_set!r}: it must be a ProcessSet", kind="invalid"
        )
    if process_set is global_process_set or process_set._native is None:
        return False
    for prepare in before_removal:
        prepare()
    session().remove_process_set(process_set._native).wait()
    _process_sets.remove(process_set)
    return True


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Returns the registered process sets.

    Returns:
        The ranks of each process set, by its id. The process set of all ranks has id 0.

    Raises:
        NotInitialized: ``init()`` has not been called.
    """
    ids = {0: list(range(size()))}
    ids.update(
        {number: process_set.ranks for number, process_set in _process_sets.registered.items()}
    )
    return ids


def stats() -> dict[str, int]:
    """Returns counters of this rank's operations.

    Returns:
        ``operations``: submitted operations; ``bytes``: the size of their tensors;
        ``copied_bytes``: the part of it that was copied from ordinary memory; ``adopted_bytes``:
        memory of ordinary tensors that is now shared and no longer copied; ``in_flight``:
        operations that have not completed.

    Raises:
        NotInitialized: ``init()`` has not been called.
    """
    return session().stats()
