"""The process sets of ``horovod.common.process_sets``."""

from __future__ import annotations

from gradwire._process_sets import ProcessSet, global_process_set
from gradwire._world import add_process_set, get_process_set_ids_and_ranks, remove_process_set

__all__ = [
    "ProcessSet",
    "add_process_set",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "remove_process_set",
]
