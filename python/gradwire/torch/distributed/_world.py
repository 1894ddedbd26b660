"""The job behind the process groups, and the process sets of its subgroups.

A process set is made by all ranks of the job, but PyTorch tells only the members of a new group that there is
one. So every rank has a servant, a thread that waits for the members' wish in the store that all ranks
share, and makes each set when its turn comes: wishes are numbered, so that all ranks make the same
ones in the same order. Groups of the same ranks share a set; it is removed, in the same way, when all its members
have destroyed the last of them, and what is left when the world of groups ends.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import threading
import time
from datetime import timedelta
from typing import Any

from gradwire import _native
from gradwire._errors import Cancelled, GradwireError, InvalidRequest, WaitTimeout
from gradwire._world import before_removal, init, is_initialized, session
from gradwire.torch.distributed import _launch

_FAREWELL = 5.0
_SLICE = 0.05
_FOREVER = timedelta(days=365)
Ranks = tuple[int, ...]


class World:
    """What the groups of one ``init_process_group`` share."""

    _generations = itertools.count()

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        if not is_initialized():
            _launch.prepare(store, rank, size, timeout)
            init()
        job = session()
        if (job.rank, job.size) != (rank, size):
            raise InvalidRequest(
                f"init_process_group was given rank {rank} of {size}, but this process is rank {job.rank} of "
                f"{job.size} of its gradwire job: leave rank and world_size to the launcher",
                kind="invalid",
            )
        self.generation = next(self._generations)
        self.rank, self.size = rank, size
        self._pid = os.getpid()
        self.serials: dict[Ranks, int] = {}
        self._store = store
        self._prefix = f"gradwire/sets/{self.generation}"
        self._asking = threading.Lock()
        self._ending = threading.Event()
        self._changed = threading.Condition()
        self._sets: dict[Ranks, _native.ProcessSet | BaseException] = {}
        # The groups, by their serial numbers, that use a set.
        self._users: dict[Ranks, set[int]] = {}
        self._closed: BaseException | None = None
        self._servant = threading.Thread(target=self._serve, name="gw-sets", daemon=True)
        self._servant.start()
        atexit.register(self.close)

    def serial(self, ranks: Ranks) -> int:
        """How many groups of these ranks there were before: the same on all of them."""
        number = self.serials.get(ranks, 0)
        self.serials[ranks] = number + 1
        return number

    def process_set(self, ranks: Ranks, serial: int, timeout: timedelta) -> _native.ProcessSet | None:
        """The process set of a group of these ranks, ascending; None for all ranks. All of them call it."""
        if len(ranks) == self.size:
            return None
        if self.rank == ranks[0]:
            self._ask({"ranks": ranks, "group": serial})
        limit = timeout.total_seconds()
        with self._changed:
            self._changed.wait_for(lambda: self._made(ranks, serial) or self._closed is not None, limit)
            made = self._sets[ranks] if self._made(ranks, serial) else self._closed
        if made is None:
            raise WaitTimeout(
                f"a process group of the ranks {list(ranks)} could not be made within {limit:g} s: "
                "every rank of the job has to be there, members or not",
                kind="timeout",
            )
        if isinstance(made, BaseException):
            raise made
        return made

    def _made(self, ranks: Ranks, serial: int) -> bool:
        return serial in self._users.get(ranks, ())

    def leave(self, ranks: Ranks, serial: int) -> None:
        """A member destroys a group; the last one to do so wishes that its set be removed."""
        if self._pid != os.getpid() or self._closed is not None:
            return
        # Where the store is gone the job is about to end, and its sets with it.
        with contextlib.suppress(Exception):
            if self._store.add(f"{self._prefix}/left/{serial}/{'.'.join(map(str, ranks))}", 1) == len(ranks):
                self._ask({"ranks": ranks, "left": serial})

    def _ask(self, wish: dict[str, Any]) -> None:
        with self._asking:
            number = self._store.add(f"{self._prefix}/asked", 1)
            self._store.set(f"{self._prefix}/{number}", json.dumps(wish))

    def _serve(self) -> None:
        try:
            # A store's client answers one call at a time, and this one waits: it takes a client of its own.
            store = self._store.clone() if hasattr(self._store, "clone") else None
            for number in itertools.count(1):
                wish = json.loads(self._next(store, number))
                if "closed" in wish:
                    raise Cancelled(wish["closed"], kind="cancelled")
                ranks = tuple(wish["ranks"])
                if "left" in wish:
                    self._leave(ranks, wish["left"])
                else:
                    self._make(ranks, wish["group"])
        except Exception as error:
            # Also when the store is gone, with the process that served it.
            told = error
            if not isinstance(error, GradwireError):
                told = Cancelled(f"no further process group can be made: {error}", kind="cancelled")
            with self._changed:
                self._closed = told
                self._changed.notify_all()

    def _next(self, store: Any, number: int) -> bytes:
        key = f"{self._prefix}/{number}"
        if store is not None:
            store.wait([key], _FOREVER)
            return bytes(store.get(key))
        # Older stores have no second client; to count nothing is to read, and does not wait.
        while True:
            # While this waits for what was counted nobody else here can set it: not between counting and setting.
            with self._asking:
                if self._store.add(f"{self._prefix}/asked", 0) >= number:
                    return bytes(self._store.get(key))
            time.sleep(_SLICE)

    def _make(self, ranks: Ranks, serial: int) -> None:
        made: _native.ProcessSet | BaseException | None = self._sets.get(ranks)
        if not isinstance(made, _native.ProcessSet):
            try:
                made = self._until_the_end(session().add_process_set(list(ranks)))
            except Exception as error:
                made = error
        with self._changed:
            self._sets[ranks] = made
            self._users.setdefault(ranks, set()).add(serial)
            self._changed.notify_all()

    def _leave(self, ranks: Ranks, serial: int) -> None:
        self._users[ranks].discard(serial)
        if self._users[ranks]:
            return
        made = self._sets[ranks]
        if isinstance(made, _native.ProcessSet):
            # If that is refused the set stays until the job ends.
            with contextlib.suppress(GradwireError):
                self._until_the_end(_removal(made))
        del self._sets[ranks]

    def _until_the_end(self, handle: _native.Handle) -> Any:
        while not handle.poll() and not self._ending.is_set():
            with contextlib.suppress(WaitTimeout):
                handle.wait(_SLICE)
        return handle.wait(0.0)

    def close(self) -> None:
        """Ends the servants of all ranks: without this one no further set can be made."""
        atexit.unregister(self.close)
        if self._pid != os.getpid():
            return
        with self._changed:
            closed = self._closed is not None
        if not closed:
            text = f"rank {self.rank} has left the process groups: no new one can be made without it"
            # Where the store is gone every servant sees so.
            with contextlib.suppress(Exception):
                self._ask({"closed": text})
        # All ranks grant the same wishes: those before the first that says so.
        self._servant.join(_FAREWELL)
        self._ending.set()
        self._servant.join(_FAREWELL)
        for made in self._sets.values():
            # It goes when all ranks have said so, which nobody waits for.
            with contextlib.suppress(GradwireError):
                if isinstance(made, _native.ProcessSet):
                    _removal(made)
        self._sets.clear()


def _removal(made: _native.ProcessSet) -> _native.Handle:
    for prepare in before_removal:
        prepare()
    return session().remove_process_set(made)


_world: World | None = None


def world() -> World:
    """The present one, or an error."""
    if _world is None:
        raise InvalidRequest("there is no process group of all ranks: call init_process_group first", kind="invalid")
    return _world


def open_world(store: Any, rank: int, size: int, timeout: timedelta) -> World:
    """For a new ``init_process_group``."""
    global _world
    if _world is not None:
        _world.close()
    _world = World(store, rank, size, timeout)
    return _world
