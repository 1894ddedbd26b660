"""The job behind the process groups, and the groups' process sets.

Each group has its own process set, even if another group has the same ranks. When all members have
destroyed the group, the set is removed, together with operations that only some of them have
started (TELL).

Creating a process set is a collective of all ranks of the job, but PyTorch informs only the members
of a new group. So every rank has a thread that reads requests from the shared store and creates the
sets. Requests are numbered, so all ranks create the same sets in the same order. Sets are removed
in the same way; the remaining ones are removed with the last group.

A rank may leave before the members of a new group have created it. So a rank that calls
``new_group`` without being a member notes the group, and before it leaves, it requests the sets of
the groups that don't exist yet. The threads of the members then create the sets, whatever their
programs do.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

from gradwire import _native, _quiet, _start
from gradwire._errors import Cancelled, GradwireError, InvalidRequest, WaitTimeout
from gradwire._world import before_removal, init, is_initialized, removals, session
from gradwire.torch.distributed import _launch, _replayed

_GRACE_SECONDS = 5.0
_SLICE = 0.05
_FOREVER = timedelta(days=365)
Ranks = tuple[int, ...]
# A group's ranks, ascending, and the number of earlier groups with these ranks.
Key = tuple[Ranks, int]


class World:
    """The shared state of the groups of one ``init_process_group``."""

    # The number of worlds opened in this process; the same in all processes.
    _opened = 0

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, beside: Any = None
    ) -> None:
        """Joins or forms the job. ``beside`` is another backend's group of all ranks."""
        # Another backend's group does not guarantee that all ranks create a group of this one.
        self._within = timedelta.max if beside is None else timedelta(seconds=_start._timeout())
        timeout = min(timeout, self._within)
        if not is_initialized():
            if beside is not None:
                _wait_for_ranks(store, rank, size, World._opened, timeout)
            _launch.prepare(store, rank, size, timeout)
            init()
        job = session()
        if (job.rank, job.size) != (rank, size):
            raise InvalidRequest(
                f"init_process_group was given rank {rank} of {size}, but this process is rank "
                f"{job.rank} of {job.size} in its gradwire job: don't pass rank and world_size",
                kind="invalid",
            )
        self.generation = World._opened
        World._opened += 1
        self.rank, self.size = rank, size
        # The group whose end closes this world.
        self.first: Key | None = (tuple(range(size)), 0) if beside is None else None
        self._beside = weakref.ref(beside) if beside is not None else None
        self._pid = os.getpid()
        self._serials: dict[Ranks, int] = {}
        # The group of all ranks keeps its store alive, which may host the server for the others.
        # The store of another backend's group must end with that group.
        self._find_store = weakref.ref(store) if beside is not None else lambda: store
        self._prefix = f"gradwire/sets/{self.generation}"
        self._requesting = threading.Lock()
        # The number of the last request of this rank, and of the request that its thread awaits.
        self._asked, self._awaits = 0, 0
        self._leaving, self._ending = threading.Event(), threading.Event()
        self._changed = threading.Condition()
        self._sets: dict[Key, _native.ProcessSet | BaseException] = {}
        # All sets so far, also removed ones.
        self._known: set[Key] = set()
        # The groups that this rank is not a member of.
        self._others: list[Key] = []
        self._closed: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="gw-sets", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def _store(self) -> Any:
        store = self._find_store()
        if store is None:
            raise Cancelled("the store of the default process group is gone", kind="cancelled")
        return store

    def serves(self, everybody: Any) -> bool:
        """Returns whether this world is for groups beside this group of all ranks."""
        return self._beside is not None and self._beside() is everybody

    def key(self, ranks: Ranks) -> Key:
        """Returns the key of a new group of these ranks, the same on all of them."""
        number = self._serials.get(ranks, 0)
        self._serials[ranks] = number + 1
        return ranks, number

    def process_set(self, key: Key, timeout: timedelta) -> _native.ProcessSet:
        """Returns the process set of a new group; all of its ranks call this.

        Raises:
            WaitTimeout: A rank did not call this in time.
            GradwireError: The process set can't be created.
        """
        ranks, serial = key
        if self.rank == ranks[0] and key not in self._known:
            self._request({"ranks": ranks, "group": serial})
        limit = min(timeout, self._within).total_seconds()
        with self._changed:
            self._changed.wait_for(lambda: key in self._sets or self._closed is not None, limit)
            made = self._sets.get(key, self._closed)
        if made is None:
            raise _timed_out(f"a process group of ranks {list(ranks)}", limit)
        if isinstance(made, BaseException):
            raise made
        return made

    def note(self, ranks: Ranks) -> None:
        """Notes a new group that this rank is not a member of."""
        self._others.append(self.key(ranks))

    def leave(self, key: Key) -> None:
        """Records that a member has destroyed a group. The last one requests the set's removal."""
        # Beside another backend, sets stay until the world is closed: its store may end before all
        # ranks have read a request, but they must remove the same sets in the same order.
        if self._pid != os.getpid() or self._closed is not None or self._beside is not None:
            return
        ranks, serial = key
        # If the store is gone, the job is about to end, and with it its sets.
        with contextlib.suppress(Exception):
            if self._store.add(
                f"{self._prefix}/left/{serial}/{'.'.join(map(str, ranks))}", 1
            ) == len(ranks):
                self._request({"ranks": ranks, "left": serial})

    def _request(self, request: dict[str, Any]) -> None:
        with self._requesting:
            self._asked = number = self._store.add(f"{self._prefix}/asked", 1)
            self._store.set(f"{self._prefix}/{number}", json.dumps(request))

    def _serve(self) -> None:
        try:
            # A store client handles one call at a time, and this thread blocks in calls, so it uses
            # a clone. Not beside another backend: PyTorch prints a message if a server ends while a
            # client waits.
            waits = self._beside is None and hasattr(self._store, "clone") and not _replayed.is_on()
            store = self._store.clone() if waits else None
            for number in itertools.count(1):
                self._awaits = number
                request = json.loads(self._next_request(store, number))
                if "closed" in request:
                    raise Cancelled(request["closed"], kind="cancelled")
                ranks = tuple(request["ranks"])
                if "left" in request:
                    self._remove_set((ranks, request["left"]))
                else:
                    self._add_set((ranks, request["group"]))
        except Exception as error:
            # This also happens when the store is gone with the process that served it.
            ended = error
            if not isinstance(error, GradwireError):
                text = f"no further process group can be created: {error}"
                ended = Cancelled(text, kind="cancelled")
            with self._changed:
                self._closed = ended
                self._changed.notify_all()

    def _next_request(self, store: Any, number: int) -> bytes:
        key = f"{self._prefix}/{number}"
        if _replayed.is_on():
            return _replayed.recall(key, self._leaving)
        request = self._stored_request(store, number, key)
        _replayed.note(key, request)
        return request

    def _stored_request(self, store: Any, number: int, key: str) -> bytes:
        if store is not None:
            store.wait([key], _FOREVER)
            return bytes(store.get(key))
        # Adding 0 reads the counter without waiting.
        while True:
            # Without the lock, this rank's other thread could have counted a request but not yet
            # set it, and ``get`` would wait.
            with self._requesting:
                if self._store.add(f"{self._prefix}/asked", 0) >= number:
                    return bytes(self._store.get(key))
            time.sleep(_SLICE)

    def _add_set(self, key: Key) -> None:
        if key in self._known:  # requested by a member and by a rank that has left
            return
        self._known.add(key)
        made: _native.ProcessSet | BaseException
        try:
            made = self._until_the_end(session().add_process_set(list(key[0])))
        except Exception as error:
            made = error
        with self._changed:
            self._sets[key] = made
            self._changed.notify_all()

    def _remove_set(self, key: Key) -> None:
        made = self._sets[key]
        if isinstance(made, _native.ProcessSet):
            # If the removal is rejected, the set stays until the job ends.
            with contextlib.suppress(GradwireError):
                self._until_the_end(_removal(made))
        del self._sets[key]

    def _until_the_end(self, handle: _native.Handle) -> Any:
        while not handle.poll() and not self._ending.is_set():
            with contextlib.suppress(WaitTimeout):
                handle.wait(_SLICE)
        return handle.wait(0.0)

    def quiet_ones(self, threads: frozenset[int]) -> frozenset[int]:
        """Returns the thread for requests, if it does nothing before a rank makes another request.

        A request of another rank may be on its way. But that rank is not quiet until all ranks have
        served the request.
        """
        ident = self._thread.ident
        return threads & {ident} if self._awaits > self._asked else frozenset()

    def close(self) -> None:
        """Stops the threads of all ranks: without this rank, no further set can be created."""
        atexit.unregister(self.close)
        if self._pid != os.getpid():
            return
        with self._changed:
            closed = self._closed is not None
        if not closed:
            text = f"rank {self.rank} has left the process groups, so no new one can be created"
            # If the store is gone, every rank's thread sees that.
            with contextlib.suppress(Exception):
                for ranks, serial in self._others:
                    if (ranks, serial) not in self._known:
                        self._request({"ranks": ranks, "group": serial})
                self._request({"closed": text})
        self._leaving.set()
        # All ranks serve the same requests, up to the first one that closes the world.
        self._thread.join(_GRACE_SECONDS)
        self._ending.set()
        self._thread.join(_GRACE_SECONDS)
        for made in self._sets.values():
            # A set is removed once all ranks have requested that, for which ``shutdown`` waits.
            with contextlib.suppress(GradwireError):
                if isinstance(made, _native.ProcessSet):
                    removals.append(_removal(made))
        self._sets.clear()


class Everybody:
    """The world of a single group of all ranks, whose ranks may change. It needs no store."""

    generation = ""
    # No group's end closes it.
    first: Key | None = None

    def key(self, ranks: Ranks) -> Key:
        """Returns the key of a group."""
        return ranks, 0

    def process_set(self, key: Key, timeout: timedelta) -> _native.ProcessSet:
        """Returns the process set of all ranks.

        Raises:
            InvalidRequest: The group has other ranks.
        """
        del timeout
        if len(key[0]) != session().size:
            raise InvalidRequest(
                "a process group whose ranks may change can't have subgroups",
                kind="invalid",
            )
        return session().global_process_set()

    def note(self, ranks: Ranks) -> None:
        """Does nothing about a group of a part of the ranks."""

    def leave(self, key: Key) -> None:
        """Does nothing: the process set of all ranks is never removed."""

    def quiet_ones(self, threads: frozenset[int]) -> frozenset[int]:
        """Returns no threads: it has none."""
        del threads
        return frozenset()


def _removal(made: _native.ProcessSet) -> _native.Handle:
    for prepare in before_removal:
        prepare()
    return session().remove_process_set(made, give_up=True)


def _wait_for_ranks(store: Any, rank: int, size: int, opened: int, timeout: timedelta) -> None:
    """Waits for all ranks to create a group. ``init`` also waits, but without a deadline (WAIT)."""
    there = [f"gradwire/there/{opened}/{each}" for each in range(size)]
    store.set(there[rank], "")
    try:
        store.wait(there, timeout)
    except RuntimeError as error:
        raise _timed_out(
            "the first process group of this backend", timeout.total_seconds()
        ) from error


def _timed_out(what: str, seconds: float) -> WaitTimeout:
    return WaitTimeout(
        f"{what} could not be created within {seconds:g} s: every rank of the job, member or not, "
        "must be running and must have created a group with this backend",
        kind="timeout",
    )


_world: World | None = None


def _quiet_ones(threads: frozenset[int]) -> frozenset[int]:
    return frozenset() if _world is None else _world.quiet_ones(threads)


_quiet.judges.append(_quiet_ones)


def open_world(store: Any, rank: int, size: int, timeout: timedelta, beside: Any = None) -> World:
    """Creates the world of a new ``init_process_group``, of this or another backend."""
    global _world
    if _world is not None:
        _world.close()
    _world = World(store, rank, size, timeout, beside)
    return _world


def world_beside(everybody: Any, store: Any, timeout: timedelta) -> World:
    """Returns the world for groups beside another backend's group of all ranks.

    All ranks of the job must create such a group.
    """
    if _world is not None and _world.serves(everybody):
        return _world
    return open_world(store, everybody.rank(), everybody.size(), timeout, everybody)
