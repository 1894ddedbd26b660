"""Process groups whose ranks the program chooses again and again.

PyTorch's interface for that is ``init_process_group(..., enable_reconfigure=True)``, and then for
each set of processes ``get_reconfigure_handle()`` and ``reconfigure()``. Programs exchange the
handles themselves, for example through a store.

    handles -- reconfigure --> leave the old job, form a new one --> collectives
                    ^                                                    │
                    └────────── a loss, or new processes ────────────────┘

Each set of processes is a job of its own, with new daemons: nothing of the old job can reach it,
and no process has to know which rank was lost. A handle has the address of a store in its process;
the ranks meet in the store of the first handle.

A process is a rank of one job, so it can have one such group, and no other one of this backend.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch._C._distributed_c10d as c10d_types
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from gradwire import _epochs, _roll, _start
from gradwire import _world as world
from gradwire._errors import GradwireError, InvalidRequest, NotInitialized, WaitTimeout
from gradwire._world import init, is_initialized
from gradwire.torch.distributed import _launch
from gradwire.torch.distributed._group import ProcessGroupGradwire
from gradwire.torch.distributed._work import Work, last_error
from gradwire.torch.distributed._world import Everybody

T = TypeVar("T")
_TO_DO = "call the process group's reconfigure() on all of its ranks first"


def check_can_form() -> None:
    """Raises InvalidRequest if this process belongs to the job of a launcher."""
    if _start.is_launched():
        raise InvalidRequest(
            "a process group with changing ranks forms jobs of its own, but this process is a rank "
            "of gradwire run: start the processes in another way, or let the launcher choose the "
            "ranks, with gradwire run --min-np N",
            kind="invalid",
        )


# The group that has formed the job of this process.
_owner: Callable[[], object] = lambda: None  # noqa: E731


def form(owner: object, store: Any, rank: int, size: int, timeout: timedelta) -> None:
    """Leaves the job of this process, and forms a new one with the ranks that call this.

    Args:
        owner: The process group of the new job.
        store: A part of a store that nothing else uses.
        rank: This process's rank in the new job.
        size: The number of ranks.
        timeout: The maximum time to wait for the other ranks.

    Raises:
        InvalidRequest: This process belongs to the job of a launcher, or of another such group.
        NotLaunched: Ranks are missing.
        PeerLost: A rank has ended meanwhile.
    """
    global _owner
    check_can_form()
    if is_initialized() and _owner() not in (None, owner):
        raise InvalidRequest(
            "another process group with changing ranks is in use, and a process is a rank of one "
            "job: shut that group down first",
            kind="invalid",
        )
    world.let_go()
    try:
        _launch.form(store, rank, size, timeout)
        init()
    except BaseException:
        world.let_go()
        _start.stop()
        raise
    _owner = weakref.ref(owner)
    _epochs.start_over()


class FormedGroup(ProcessGroupGradwire):
    """A process group with a job of its own.

    Args:
        store: A part of a store that nothing else uses.
        rank: This process's rank in the group.
        size: The number of ranks.
        name: The name of the group.
        timeout: The maximum time to wait for the other ranks, and for operations.

    Raises:
        InvalidRequest: This process belongs to the job of a launcher, or of another such group.
        NotLaunched: Ranks are missing.
        PeerLost: A rank has ended meanwhile.
    """

    def __init__(self, store: Any, rank: int, size: int, name: str, timeout: timedelta) -> None:
        form(self, store, rank, size, timeout)
        everybody: Any = Everybody()
        self._error_before = last_error()
        super().__init__(store, rank, everybody, range(size), name, timeout)

    def error(self) -> BaseException | None:
        """Returns the last error of an operation.

        Returns:
            The error; None if no operation has failed.
        """
        error = last_error()
        return None if error is self._error_before else error

    def shutdown(self) -> None:
        """Leaves the ranks, without waiting for them."""
        if not self._left.is_set() and _owner() is self:
            world.let_go()
        self._left.set()

    def abort(self) -> None:
        """Aborts the operations of all ranks."""
        if not self._left.is_set() and _owner() is self and is_initialized():
            with contextlib.suppress(GradwireError):
                super().abort()


class ReconfigurableGroup(FormedGroup):
    """A process group that has ranks only after ``reconfigure``."""

    def __init__(self, store: Any, name: str, timeout: timedelta) -> None:
        self._is_formed = False
        # The store of this process, in which the ranks meet if its handle is the first one.
        self._own_store: Any = None
        self._id = secrets.token_hex(8)
        unformed: Any = _Unformed()
        self._error_before = last_error()
        ProcessGroupGradwire.__init__(self, store, -1, unformed, [], name, timeout)
        world.how_to_begin = _TO_DO

    def getRank(self) -> int:
        """Returns this process's rank in the group.

        Returns:
            The rank, from 0; -1 before ``reconfigure``.
        """
        return self._rank

    rank = getRank

    def getSize(self) -> int:
        """Returns the number of ranks in the group.

        Returns:
            The number of ranks; -1 before ``reconfigure``.
        """
        return len(self._ranks) if self._is_formed else -1

    size = getSize

    @property
    def supports_reconfigure(self) -> bool:
        """Whether the ranks of the group can be chosen again: True."""
        return True

    def get_reconfigure_handle(self) -> str:
        """Returns what the other processes need to form a group with this one.

        Returns:
            A text for ``reconfigure``, the same for the life of this group.
        """
        if self._own_store is None:
            self._own_store = dist.TCPStore(  # type: ignore[attr-defined]
                "0.0.0.0", 0, None, True, self._timeout, wait_for_workers=False
            )
        name = socket.gethostname()
        with contextlib.suppress(OSError):
            name = socket.gethostbyname(name)
        return json.dumps(
            {
                "id": self._id,
                "machine": _launch.machine(),
                "host": name,
                "port": self._own_store.port,
            },
            sort_keys=True,
        )

    def reconfigure(self, opts: Any) -> Work:
        """Makes it a group of the processes with these handles, all of which call this.

        Operations of the previous ranks fail. This also works after a loss of any rank, and after
        ``abort``.

        Args:
            opts: PyTorch's ``ReconfigureOptions``. ``uuid`` is a number that was not used before,
                the same on all ranks. ``handles`` has one handle per process: a list in the order
                of the ranks, or a set. ``timeout`` is the maximum time to wait for the other
                processes. ``hints`` are ignored.

        Returns:
            A work that is complete.

        Raises:
            InvalidRequest: The handles are invalid, or lack this process.
            NotLaunched: Processes are missing, or the job can't be formed.
            PeerLost: A rank has ended meanwhile.
        """
        peers = _peers(opts.handles)
        own = [at for at, peer in enumerate(peers) if peer["id"] == self._id]
        if len(own) != 1 or len({peer["id"] for peer in peers}) != len(peers):
            raise InvalidRequest(
                f"reconfigure: {len(own)} of {len(peers)} handles are this process's: give one "
                "handle for each process",
                kind="invalid",
            )
        timeout = getattr(opts, "timeout", None) or self._timeout
        check_can_form()
        self._leave()
        try:
            store = self._meeting(peers[0], opts.uuid, timeout)
            form(self, store, own[0], len(peers), timeout)
        except RuntimeError as error:
            if isinstance(error, GradwireError):
                raise
            raise _roll.unreachable(peers[0]["host"], peers[0]["port"], error) from None
        self._is_formed, self._error_before = True, last_error()
        everybody: Any = Everybody()
        self._become(everybody, own[0], range(len(peers)))
        if self in c10d._world.pg_group_ranks:
            c10d._world.pg_group_ranks[self] = {each: each for each in self._ranks}
        return Work("reconfigure", [], None, [], timeout)

    def _meeting(self, first: dict[str, Any], number: int, timeout: timedelta) -> Any:
        """Returns the part of the first process's store for the group with this number."""
        if first["id"] == self._id:
            store = self._own_store
        else:
            here = first["machine"] == _launch.machine()
            host, port = "127.0.0.1" if here else first["host"], int(first["port"])
            _roll.wait_for_store(host, port, timeout)
            store = dist.TCPStore(  # type: ignore[attr-defined]
                host, port, None, False, timeout, wait_for_workers=False
            )
        store.set_timeout(timeout)
        store = c10d.PrefixStore(f"gradwire/{number}", store)
        if store.add(f"used/{self._id}", 1) > 1:
            raise InvalidRequest(
                f"reconfigure: the uuid {number} was used before: choose a new one each time",
                kind="invalid",
            )
        return store

    def _leave(self) -> None:
        self._is_formed, self._rank, self._ranks = False, -1, []
        super().shutdown()

    def _start(self, call: Callable[[str], T]) -> T:
        if not self._is_formed:
            raise NotInitialized(f"this process group has no ranks: {_TO_DO}", kind="closed")
        return super()._start(call)

    def shutdown(self) -> None:
        """Leaves the ranks, without waiting for them."""
        self._leave()
        self._own_store = None

    def get_error(self) -> Any:
        """Returns whether an operation has failed.

        Returns:
            PyTorch's ``ErrorType``.
        """
        kinds = c10d_types.ErrorType
        error = self.error()
        if error is None:
            return kinds.SUCCESS
        return kinds.TIMEOUT if isinstance(error, WaitTimeout) else kinds.COMM_ERROR


class _Unformed(Everybody):
    """The world of a group without ranks."""

    def process_set(self, key: Any, timeout: timedelta) -> Any:
        """Returns None, because a group without ranks needs no process set."""
        del key, timeout


def _peers(handles: Sequence[str] | set[str]) -> list[dict[str, Any]]:
    """Returns what the handles contain, in the order of the ranks."""
    ordered = list(handles) if isinstance(handles, (list, tuple)) else sorted(handles)
    try:
        peers = [json.loads(handle) for handle in ordered]
        for peer in peers:
            int(peer["port"]), peer["id"], peer["host"], peer["machine"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(
            f"reconfigure: a handle is not one of get_reconfigure_handle(): {error!r}",
            kind="invalid",
        ) from None
    return peers
