"""Forms a job from processes started by neither ``gradwire run`` nor torchrun.

The processes find each other through the process group's store. Consecutive ranks on one machine
form a node.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

from gradwire import _answers, _roll, _start


def machine() -> str:
    """Returns this machine's name, with an id that distinguishes machines of the same name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def nodes(machines: list[str]) -> list[tuple[int, int]]:
    """Returns each node's first rank and number of ranks.

    >>> nodes(["a", "a", "b", "a"])
    [(0, 2), (2, 1), (3, 1)]
    """
    found: list[tuple[int, int]] = []
    for rank, name in enumerate(machines):
        if rank > 0 and machines[rank - 1] == name:
            first, slots = found.pop()
            found.append((first, slots + 1))
        else:
            found.append((rank, 1))
    return found


def _address(machines: list[str]) -> str:
    if len(set(machines)) == 1:
        return "127.0.0.1"
    master = os.environ.get("MASTER_ADDR")
    if master is not None:
        return _start._own_address(master, int(os.environ.get("MASTER_PORT", "1")))
    return socket.gethostbyname(socket.gethostname())


def prepare(store: Any, rank: int, size: int, timeout: timedelta) -> None:
    """Forms a job, unless a launcher did."""
    if any(name in os.environ for name in ("GRADWIRE_JOB", "GRADWIRE_SOCKET")):
        return
    form(_start.job_store(store), rank, size, timeout)


def form(store: Any, rank: int, size: int, timeout: timedelta) -> None:
    """Forms a job through a store in which nothing else uses these keys."""
    store = _answers.Store(store, _answers.Answers("the process group's store", timeout))
    with _roll.Named(store, rank, size, timeout):
        _roll.come(store, rank)
        store.set(f"machine/{rank}", machine())
        store.wait([f"machine/{each}" for each in range(size)], timeout)
        machines = [store.get(f"machine/{each}").decode() for each in range(size)]
        all_nodes = nodes(machines)
        first, slots = max((first, slots) for first, slots in all_nodes if first <= rank)
        counts = [slots for _, slots in all_nodes]
        address = _address(machines)
        _start.form_job("torch", store, rank, first, counts, slots, address, timeout)
