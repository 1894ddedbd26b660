"""This process as a rank: ``init()``, who and where it is, process sets, ``shutdown()``."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType

from gradwire import _native, _start, _variables
from gradwire._arguments import whole, wholes
from gradwire._errors import Forked, GradwireError, InvalidRequest, NotInitialized, PeerLost


class ProcessSet:
    """A group of ranks that do collectives among themselves.

    Made by the user with the ranks, and registered with ``init(process_sets=[…])`` or
    ``add_process_set``; until then it has no number.
    """

    process_set_id: int | None = None

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks = sorted(set(wholes("ranks", ranks)))
        if not self._ranks:
            raise InvalidRequest("a process set needs at least one rank", kind="invalid")
        self._native: _native.ProcessSet | None = None
        self._numbers: Iterator[int] = itertools.count(1)

    def _registered(self, native: _native.ProcessSet) -> None:
        self._native, self.process_set_id = native, native.id
        self._ranks = native.ranks
        # For what all members count alike; see `SyncBatchNorm`. Each registration counts anew.
        self._numbers = itertools.count(1)

    def _removed(self) -> None:
        self._native, self.process_set_id = None, None

    @property
    def ranks(self) -> list[int]:
        """Its members, ascending."""
        return list(self._ranks)

    @property
    def mpi_comm(self) -> None:
        """There is no MPI here."""

    def size(self) -> int | None:
        """How many members it has; None before it is registered."""
        return None if self._native is None else len(self._ranks)

    def rank(self) -> int | None:
        """This process's place among the members; None if it is not one, and before it is registered."""
        return None if self._native is None else self._native.position

    def included(self) -> bool | None:
        """Whether this process is a member; None before it is registered."""
        return None if self._native is None else self._native.position is not None

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self._ranks})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProcessSet):
            return NotImplemented
        return (self.process_set_id, self._ranks) == (other.process_set_id, other._ranks)

    def __hash__(self) -> int:
        return hash((self.process_set_id, tuple(self._ranks)))

    def __deepcopy__(self, memo: dict[int, object]) -> ProcessSet:
        """A copy of a model, whose layers may know one, works with the same process set."""
        return self

    def __reduce__(self) -> str | tuple[object, ...]:
        """Pickled it is its ranks: where they are read it has to be registered."""
        return ProcessSet, (self._ranks,)


class _GlobalProcessSet(ProcessSet):
    """All ranks. It exists before the job does, so that it can be a default."""

    def __init__(self) -> None:
        self._ranks = []
        self._native = None
        self._numbers = itertools.count(1)

    def __reduce__(self) -> str:
        return "global_process_set"


global_process_set: ProcessSet = _GlobalProcessSet()

_lock = threading.Lock()
_session: _native.Session | None = None
_process = 0
_uncaught: str | None = None
_watching = False
_sets: dict[int, ProcessSet] = {}
# What other parts of the package have to do before a process set goes, and before the session does.
before_removal: list[Callable[[], None]] = []
before_shutdown: list[Callable[[], None]] = []


def session() -> _native.Session:
    """The session of this process, or an error that says how to get one."""
    if _session is None:
        raise NotInitialized("gradwire has not been initialized: call init() first", kind="closed")
    if _process != os.getpid():
        raise Forked(
            f"this process was forked from a rank (process {_process}) and is none itself: do "
            "collectives in the rank, or start this process without fork",
            kind="forked",
        )
    return _session


def native_set(process_set: ProcessSet | int | None) -> _native.ProcessSet | None:
    """What the native half calls a process set; None for all ranks."""
    if process_set is None or process_set is global_process_set:
        return None
    if not isinstance(process_set, ProcessSet):
        number = whole("process_set", process_set)
        known = _sets.get(number)
        if number == 0:
            return None
        if known is None or known._native is None:
            raise InvalidRequest(f"there is no process set {number}", kind="invalid")
        return known._native
    if process_set._native is None:
        raise InvalidRequest(
            f"{process_set} is not registered: call add_process_set with it on all ranks, or give "
            "it to init(process_sets=…)",
            kind="invalid",
        )
    return process_set._native


def members(process_set: ProcessSet) -> int:
    """How many members a registered process set has."""
    return len(process_set._ranks) if process_set._native is not None else _place().size


def init(
    comm: Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
) -> None:
    """Makes this process a rank, and returns once all ranks have come.

    Under ``gradwire run`` and torchrun it joins their job; otherwise it is the one rank of a job of its own.
    What it has to start for that ends with the thread that called it: call it from the main one.
    ``process_sets`` are registered at once; ``"dynamic"`` is accepted as Horovod's, and says
    nothing: process sets can always be added later. Calling it again does nothing.
    """
    global _session, _process
    among = None if comm is None else wholes("comm", comm)
    with _lock:
        if _session is not None and _process == os.getpid():
            return
        if _session is not None:
            raise Forked(
                f"this process was forked from a rank (process {_process}): it can't become one",
                kind="forked",
            )
        try:
            _start.prepare()
            made = _native.Session.attach()
        except BaseException as error:
            better = _start.host_is_gone(error) if isinstance(error, PeerLost) else None
            _start.forget(left=False, attached=False)
            if better is not None:
                raise better from error
            raise
        if among is not None and sorted(among) != list(range(made.size)):
            made.abort(f"init(comm={among}): a job is all of its ranks")
            raise InvalidRequest(
                f"init(comm={among}): a job is all of its {made.size} ranks; use process sets for less",
                kind="invalid",
            )
        try:
            made.barrier(name="init").wait()
        except BaseException as error:
            if isinstance(error, GradwireError):
                # Everybody is told it by itself: this rank must not look like the cause.
                with contextlib.suppress(GradwireError):
                    made.shutdown()
            else:
                made.abort(f"in init(), {_described(error)}")
            _start.forget(left=False)
            raise
        _session, _process = made, os.getpid()
        _variables.set_for(made)
        global_process_set._registered(made.global_process_set())
        _watch_exceptions()
    if process_sets is not None and not isinstance(process_sets, str):
        for process_set in process_sets:
            add_process_set(process_set)


def shutdown() -> None:
    """Leaves the job in good order. What is in flight fails on the other ranks."""
    with _lock:
        ended = _put_away()
        if ended is None:
            return
        try:
            ended.shutdown()
        except BaseException:
            _start.forget(left=False)
            raise
        _start.forget(left=True)


def _put_away() -> _native.Session | None:
    """Takes the session from everybody, to end it; None if there is none."""
    global _session
    if _session is None or _process != os.getpid():
        return None
    for prepare in before_shutdown:
        prepare()
    ended, _session = _session, None
    _variables.take_back()
    for process_set in _sets.values():
        process_set._removed()
    _sets.clear()
    global_process_set._removed()
    return ended


def is_initialized() -> bool:
    """Whether this process is a rank, or was forked from one: it knows who and where that is."""
    return _session is not None


def is_rank() -> bool:
    """Whether this process itself is a rank, and can do collectives."""
    return _session is not None and _process == os.getpid()


def abort(reason: str) -> None:
    """Gives up: all other ranks end with this reason."""
    session().abort(reason)


def _watch_exceptions() -> None:
    """Keeps the text of an exception that ends the program: the other ranks are told it."""
    global _watching
    if _watching:
        return
    _watching = True
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _uncaught
        _uncaught = f"it ended with {_described(error)}"
        before(kind, error, trace)

    sys.excepthook = hook


def _described(error: BaseException) -> str:
    text, name = " ".join(str(error).split()), type(error).__name__
    return f"{name}: {text}" if text else name


def _code_decides() -> bool:
    """Whether the exit code of this process is still to come; one of multiprocessing's ends here."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    return multiprocessing is None or multiprocessing.parent_process() is None


@atexit.register
def _at_exit() -> None:
    """The interpreter ends: in good order, or telling all ranks why not (TELL)."""
    if _process and _process != os.getpid():
        return  # a forked child has nothing to end
    try:
        if _session is not None and _uncaught is not None:
            _session.abort(_uncaught)
        elif _code_decides():
            # SystemExit looks like a good end from here: whether it is one the exit code will say.
            ended = _put_away()
            if ended is not None:
                ended.leave_at_exit(_start.hand_over())
        else:
            shutdown()
    except RuntimeError:
        pass  # the job has failed, and whoever had to know was told by the calls that failed
    finally:
        _start.stop()


def _place() -> _native.Session:
    """The session as far as it says who and where the rank is.

    A process that was forked from the rank may ask, too: a ``DataLoader``'s worker shards its data by it.
    """
    return session() if _session is None else _session


def rank() -> int:
    """This process's number in the job, from 0."""
    return _place().rank


def size() -> int:
    """How many ranks the job has."""
    return _place().size


def local_rank() -> int:
    """This process's number on its node, from 0."""
    return _place().local_rank


def local_size() -> int:
    """How many ranks this node has."""
    return _place().local_size


def cross_rank() -> int:
    """This node's number among the nodes that have this local rank."""
    return _place().cross_rank


def cross_size() -> int:
    """How many nodes have this local rank."""
    return _place().cross_size


def is_homogeneous() -> bool:
    """Whether every node has the same number of ranks."""
    return len({slots for _, _, slots in _place().nodes}) == 1


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Registers a process set. All ranks of the job call it, with the same ranks."""
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if process_set._native is not None:
        raise InvalidRequest(f"{process_set} is registered already", kind="invalid")
    made: _native.ProcessSet = session().add_process_set(process_set.ranks).wait()
    process_set._registered(made)
    _sets[made.id] = process_set
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set; all ranks of the job call it. False if it is not registered, or all ranks'."""
    if process_set is global_process_set or process_set._native is None:
        return False
    for prepare in before_removal:
        prepare()
    session().remove_process_set(process_set._native).wait()
    _sets.pop(process_set._native.id, None)
    process_set._removed()
    return True


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """The registered process sets: their ranks, by number."""
    ids = {0: list(range(size()))}
    ids.update({number: process_set.ranks for number, process_set in _sets.items()})
    return ids


def stats() -> dict[str, int]:
    """What this rank has done: operations, bytes, and how many operations are in flight."""
    return session().stats()
