"""The common part of process groups: properties, and starting operations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from gradwire import _native, _staging
from gradwire._errors import InvalidRequest
from gradwire._staging import session
from gradwire.torch._adapter import as_tensor
from gradwire.torch.distributed import _compiler, _memory, _threads
from gradwire.torch.distributed._messages import Channel
from gradwire.torch.distributed._numbering import Members, Numbers, here
from gradwire.torch.distributed._reductions import Reduction
from gradwire.torch.distributed._work import Operation, Work
from gradwire.torch.distributed._world import Ranks, World

NAME = "gradwire"
DEVICES = ["cpu", "cuda"]
T = TypeVar("T")
Tensors = Sequence[torch.Tensor]


_NOW = timedelta(0)
_REDUCTIONS = (dist.ReduceOp, dist.ReduceOp.RedOpType)


class Options:
    """The options of a call.

    PyTorch passes an object with options. Some call variants pass the root, the reduction or the
    timeout directly.
    """

    def __init__(
        self,
        given: Any,
        default: timedelta,
        timeout: timedelta | None = None,
        op: Any = None,
        root: int | None = None,
    ) -> None:
        if timeout is None:
            timeout = given if isinstance(given, timedelta) else getattr(given, "timeout", None)
        if root is None:
            root = given if isinstance(given, int) else getattr(given, "rootRank", 0)
        if op is None:
            op = (
                given
                if isinstance(given, _REDUCTIONS)
                else getattr(given, "reduceOp", dist.ReduceOp.SUM)
            )
        self.timeout = timeout if timeout is not None and timeout > _NOW else default
        self.root, self.op = root, op


def as_list(tensors: Any) -> list[torch.Tensor]:
    """Returns a list of tensors; one tensor becomes a list of one."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def devices(tensors: Tensors) -> list[torch.device]:
    """Returns the devices of the tensors that are not on the CPU."""
    return [tensor.device for tensor in tensors if not tensor.is_cpu]


# Any, because type checkers misread its methods with several signatures as overloads.
_ProcessGroup: Any = dist.ProcessGroup


class Group(_ProcessGroup):  # type: ignore[misc]
    """A group of ranks. ``torch.distributed`` creates it and calls its methods."""

    def __init__(
        self,
        store: Any,
        rank: int,
        world: World,
        ranks: Sequence[int],
        name: str,
        timeout: timedelta,
    ):
        super().__init__(rank, len(ranks))
        self._store, self._timeout = store, timeout
        self._group_name, self._group_desc = name, "undefined"
        self._become(world, rank, ranks)

    def _become(self, world: World, rank: int, ranks: Sequence[int]) -> None:
        """Makes it a group of these ranks, in which this process has the given rank."""
        self.world = world
        self._rank, self._ranks = rank, list(ranks)
        ascending: Ranks = tuple(sorted(ranks))
        self._key = world.key(ascending)
        self._set = world.process_set(self._key, self._timeout)
        self._left = threading.Event()
        # The members' ranks in the group, in process set order.
        self._order = [self._ranks.index(member) for member in ascending]
        self._numbers = Numbers(f"{NAME}{world.generation}.{self._group_name}", frozenset(ranks))
        self._channels: dict[tuple[int, int, int], Channel] = {}
        self._monitored = 0
        # The collectives that have not ended.
        self._unfinished: dict[Operation, None] = {}
        _threads.finish_dropped()

    # Properties

    def getRank(self) -> int:
        """Returns this process's rank in the group.

        Returns:
            The rank, from 0.
        """
        return self._rank

    rank = getRank

    def getSize(self) -> int:
        """Returns the number of ranks in the group.

        Returns:
            The number of ranks.
        """
        return len(self._ranks)

    size = getSize

    def getBackendName(self) -> str:
        """Returns the name of the backend.

        Returns:
            ``gradwire``.
        """
        return NAME

    name = _get_backend_name = getBackendName

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices that the group supports; none while it is being created.

        PyTorch attaches its flight recorder to groups with devices, which fails for groups without
        one of PyTorch's own backends.
        """
        return [torch.device(kind) for kind in DEVICES] if self in c10d._world.pg_map else []

    def __repr__(self) -> str:
        return f"ProcessGroupGradwire({self._group_name!r}, ranks={self._ranks})"

    def getGroupName(self) -> str:
        """Returns the name of the group.

        Returns:
            The name assigned by PyTorch.
        """
        return self._group_name

    def setGroupName(self, name: str) -> None:
        """Sets the name of the group.

        Args:
            name: The name.
        """
        self._group_name = name

    _set_group_name = setGroupName

    def getGroupDesc(self) -> str:
        """Returns the description of the group.

        Returns:
            The description; ``undefined`` if there is none.
        """
        return self._group_desc

    def setGroupDesc(self, desc: str) -> None:
        """Sets the description of the group.

        Args:
            desc: The description.
        """
        self._group_desc = desc

    _set_group_desc = setGroupDesc

    @property
    def group_name(self) -> Any:
        """The group's name, assigned by PyTorch."""
        return self._group_name

    pg_name = group_name

    @property
    def group_desc(self) -> str:
        """The description of the group; ``undefined`` if there is none."""
        return self._group_desc

    def get_group_store(self) -> Any:
        """Returns the store of the group.

        Returns:
            The store that PyTorch passed to the group.
        """
        return self._store

    def _get_backend(self, device: torch.device) -> Any:
        """Returns the group itself, which is the backend for every device.

        Args:
            device: The device; not used.

        Returns:
            The group.
        """
        del device
        return self

    get_backend = _get_backend

    @property
    def supports_coalescing(self) -> bool:
        """Whether PyTorch may coalesce calls: False."""
        return False

    @property
    def supports_splitting(self) -> bool:
        """Whether PyTorch may split the group: False."""
        return False

    @property
    def supports_reconfigure(self) -> bool:
        """Whether the ranks of the group can be chosen again: False."""
        return False

    def get_reconfigure_handle(self) -> str:
        """Returns a text with which ``reconfigure`` identifies this process.

        Returns:
            A text for ``reconfigure``.

        Raises:
            NotImplementedError: The group was created without ``enable_reconfigure``.
        """
        raise NotImplementedError(
            "the ranks of this process group can't be chosen again: create it with "
            "init_process_group(..., enable_reconfigure=True)"
        )

    def reconfigure(self, opts: Any) -> Any:
        """Gives the group other ranks.

        Args:
            opts: PyTorch's ``ReconfigureOptions``.

        Returns:
            A work that is complete.

        Raises:
            NotImplementedError: The group was created without ``enable_reconfigure``.
        """
        del opts
        self.get_reconfigure_handle()

    def supports_tensor_alloc(self, device: torch.device | str) -> bool:
        """Returns whether ``allocate_tensor`` supports a device.

        Args:
            device: The device.

        Returns:
            True for the CPU.
        """
        return torch.device(device).type == "cpu"

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> torch.Tensor:
        """Creates an uninitialized tensor in shared memory.

        ``reduce_scatter_tensor`` and ``all_reduce`` use it without a copy. FSDP2 allocates its
        buffers like this after ``set_allocate_memory_from_process_group_for_comm(True)``.

        Args:
            size: The number of elements.
            dtype: The dtype.
            device: The device, which must be the CPU.

        Returns:
            A tensor with one dimension.

        Raises:
            InvalidRequest: The device or the dtype is not supported.
            OutOfResources: Not enough shared memory is available.
        """
        if not self.supports_tensor_alloc(device):
            raise InvalidRequest(
                f"the gradwire backend allocates tensors on the CPU, not on {device}",
                kind="invalid",
            )
        return _memory.make(size, dtype)

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of later operations.

        Args:
            timeout: The maximum time to wait for a result.
        """
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: all members start at 0."""

    def _get_sequence_number_for_group(self) -> int:
        """Returns the number of started operations."""
        return self._numbers.count

    def shutdown(self) -> None:
        """Removes the group's process set; the first group of all ranks removes all process sets.

        Operations that all members have started complete. Once all members have called this, the
        other operations fail on the ranks that wait for them.
        """
        if self._left.is_set():
            return
        self._left.set()
        if self._key == self.world.first:
            self.world.close()
        else:
            self.world.leave(self._key)
            self._store = None  # it may host a server whose port a later group needs

    def abort(self) -> None:
        """Aborts the job: operations on all ranks fail."""
        session().abort(f"rank {session().rank} aborted the process group {self._group_name!r}")

    # Starting operations

    def _start(self, call: Callable[[str], T]) -> T:
        """Starts operations of this group with a call that receives the next name."""
        if not _compiler.kept_out:
            _compiler.keep_out()
        return here.line.numbers(self._numbers).start(call)

    def _begin(
        self, call: Callable[..., _native.Handle], *given: Any, into: Tensors = (), **options: Any
    ) -> _native.Handle:
        """Starts an operation of this group that writes its result to the tensors ``into``."""
        _memory.check_writable(into)
        return self._start(lambda name: call(*given, name=name, process_set=self._set, **options))

    def _work(
        self,
        what: str,
        handles: _native.Handle | list[_native.Handle],
        finish: Callable[[list[Any]], None] | None,
        result: Any,
        timeout: timedelta,
        tensors: Tensors = (),
        source: int = -1,
        members: Members = None,
        earlier: Sequence[Operation] = (),
    ) -> Work:
        if not isinstance(handles, list):
            handles = [handles]
        names = handles[0].name if handles else ""
        what = f"{what} {names!r} of the group {self._group_name!r}"
        unfinished = self._unfinished if members is None else None
        members = self._numbers.members if members is None else members
        others = devices(tensors)
        return Work(
            what,
            handles,
            finish,
            result,
            timeout,
            others,
            source,
            self._left,
            members,
            unfinished,
            earlier,
        )

    def _load(self, tensors: Tensors, reduction: Reduction) -> _native.Buffer:
        buffer = _memory.load(tensors)
        if reduction.factor is not None:
            self._prepare(as_tensor(buffer), reduction)
        return buffer

    def _prepare(self, memory: torch.Tensor, reduction: Reduction) -> None:
        if reduction.factor is not None:
            _staging.wait_for_copies()
            reduction.prepare(memory)

    def _even(self, what: str, larger: torch.Tensor, smaller: torch.Tensor) -> None:
        size = self.size()
        if larger.dtype != smaller.dtype or larger.numel() != size * smaller.numel():
            raise InvalidRequest(
                f"{what}: the larger tensor must have the same dtype and {size} times the elements "
                f"of the smaller one; they are {larger.dtype} {list(larger.shape)} and "
                f"{smaller.dtype} {list(smaller.shape)}",
                kind="invalid",
            )

    def _member(self, rank: int) -> int:
        """Converts a rank in the group to a global rank."""
        if not 0 <= rank < self.size():
            raise InvalidRequest(
                f"rank {rank} is not in this group of {self.size()} ranks", kind="invalid"
            )
        return self._ranks[rank]

    def _one_each(self, what: str, tensors: Sequence[Any]) -> None:
        if len(tensors) != self.size():
            raise InvalidRequest(
                f"{what}: expected one item for each of the {self.size()} ranks of the group, "
                f"not {len(tensors)}",
                kind="invalid",
            )

    def _cut(self, gathered: tuple[_native.Buffer, list[int]], outputs: Tensors, what: str) -> None:
        """Copies the members' parts, in process set order, to their output tensors."""
        buffer, rows = gathered
        ordered = [outputs[member] for member in self._order]
        for member, number, output in zip(self._order, rows, ordered):
            expected = _memory.element(output, moved=True)[1]
            if number != expected:
                raise InvalidRequest(
                    f"{what}: rank {self._ranks[member]} sent {number} elements, but its output "
                    f"tensor has {expected}",
                    kind="invalid",
                )
        _memory.store(buffer, ordered)
