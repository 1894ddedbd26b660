"""This rank's position among the ranks that contribute to a collective."""

from __future__ import annotations

from collections.abc import Callable

from gradwire._process_sets import ProcessSet, global_process_set
from gradwire._world import members, rank


def position(contributors: int, process_set: ProcessSet, gather: Callable[[], list[int]]) -> int:
    """Returns this rank's position among the contributing ranks.

    Args:
        contributors: Their number.
        process_set: The process set of the collective.
        gather: Returns the global ranks of all contributors. If some ranks have joined, all other
            ranks call it.
    """
    if contributors == members(process_set):
        at = rank() if process_set is global_process_set else process_set.rank()
        assert at is not None, "the call rejects ranks that are not members"
        return at
    return gather().index(rank())
