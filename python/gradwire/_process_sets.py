"""Process sets, which are groups of ranks, and the list of those that are registered.

This module does not use the session: ``_world`` registers and removes process sets with all ranks,
and then calls this module.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator

from gradwire import _native
from gradwire._arguments import whole_number, whole_numbers
from gradwire._errors import InvalidRequest


class ProcessSet:
    """A group of ranks that run collectives among themselves.

    Register it with ``init(process_sets=[...])`` or ``add_process_set`` before using it in
    collectives.

    Args:
        ranks: The global ranks, in any order. Duplicates are ignored.

    Attributes:
        process_set_id: The id of the process set; None unless it is registered.

    Raises:
        InvalidRequest: ``ranks`` is empty or contains an invalid rank.

    Example:
        ```python
        even = gw.add_process_set(range(0, gw.size(), 2))
        if even.included():
            mean = gw.allreduce(array, process_set=even)
        ```
    """

    process_set_id: int | None = None

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks = sorted(set(whole_numbers("ranks", ranks)))
        if not self._ranks:
            raise InvalidRequest("a process set needs at least one rank", kind="invalid")
        self._native: _native.ProcessSet | None = None
        self._numbers: Iterator[int] = itertools.count(1)

    def _registered(self, native: _native.ProcessSet) -> None:
        self._native, self.process_set_id = native, native.id
        self._ranks = native.ranks
        # Numbers that are the same on all members; see `SyncBatchNorm`. Each registration restarts
        # them.
        self._numbers = itertools.count(1)

    def _removed(self) -> None:
        self._native, self.process_set_id = None, None

    @property
    def ranks(self) -> list[int]:
        """The global ranks of the members, in ascending order."""
        return list(self._ranks)

    @property
    def mpi_comm(self) -> None:
        """None: Gradwire does not use MPI. The attribute exists for Horovod scripts."""

    def size(self) -> int | None:
        """Returns the number of members.

        Returns:
            The number of members; None unless the process set is registered.
        """
        return None if self._native is None else len(self._ranks)

    def rank(self) -> int | None:
        """Returns the rank of this process within the process set.

        Returns:
            The rank, from 0; None if this process is not a member, or the process set is not
            registered.
        """
        return None if self._native is None else self._native.position

    def included(self) -> bool | None:
        """Returns whether this process is a member.

        Returns:
            True or False; None unless the process set is registered.
        """
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
        """Returns the same process set: copies of a model keep using it."""
        return self

    def __reduce__(self) -> str | tuple[object, ...]:
        """Pickles the ranks. The unpickled process set must be registered again."""
        return ProcessSet, (self._ranks,)


class _GlobalProcessSet(ProcessSet):
    """The process set of all ranks. It exists before the job: it is a default argument."""

    def __init__(self) -> None:
        self._ranks = []
        self._native = None
        self._numbers = itertools.count(1)

    def __reduce__(self) -> str:
        return "global_process_set"


global_process_set: ProcessSet = _GlobalProcessSet()

# The registered process sets, without ``global_process_set``, by their ids.
registered: dict[int, ProcessSet] = {}
# The number of joins in this session, by the ranks of the process set.
joins: collections.Counter[tuple[int, ...]] = collections.Counter()


def register(process_set: ProcessSet, native: _native.ProcessSet) -> None:
    """Notes that all ranks have registered a process set."""
    process_set._registered(native)
    registered[native.id] = process_set


def remove(process_set: ProcessSet) -> None:
    """Notes that all ranks have removed a process set."""
    registered.pop(process_set.process_set_id or 0, None)
    process_set._removed()


def renew(everybody: _native.ProcessSet) -> None:
    """Updates the ids and ranks of process sets after the ranks of the job have changed.

    ``everybody``: the process set of all ranks.
    """
    global_process_set._registered(everybody)
    known = [one for one in registered.values() if one._native is not None]
    registered.clear()
    for process_set in known:
        assert process_set._native is not None
        register(process_set, process_set._native)


def forget() -> None:
    """Notes that the session, and all process sets with it, has ended."""
    for process_set in registered.values():
        process_set._removed()
    registered.clear()
    joins.clear()
    global_process_set._removed()


def native_set(process_set: ProcessSet | int | None) -> _native.ProcessSet | None:
    """Returns the native process set; None for all ranks.

    Raises:
        InvalidRequest: The process set is not registered.
    """
    if process_set is None or process_set is global_process_set:
        return None
    if not isinstance(process_set, ProcessSet):
        number = whole_number("process_set", process_set)
        known = registered.get(number)
        if number == 0:
            return None
        if known is None or known._native is None:
            raise InvalidRequest(f"unknown process set {number}", kind="invalid")
        return known._native
    if process_set._native is None:
        raise InvalidRequest(
            f"{process_set} is not registered: pass it to add_process_set on all ranks, or "
            "to init(process_sets=…)",
            kind="invalid",
        )
    return process_set._native


def note_join(process_set: ProcessSet | int | None) -> None:
    """Counts a join in a registered process set."""
    if not isinstance(process_set, ProcessSet):
        process_set = registered.get(process_set or 0, global_process_set)
    joins[tuple(process_set.ranks)] += 1
