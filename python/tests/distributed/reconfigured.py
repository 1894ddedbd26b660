"""A process of a group whose ranks are chosen again and again.

    python reconfigured.py FOLDER ME

The processes meet in files, which outlive any of them. Process 0 kills itself; process 3 is new.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch as hvd

TIMEOUT = timedelta(seconds=100)


def raises(kind: Any, text: str, call: Any) -> None:
    try:
        call()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no error with {text!r}")


class Process:
    def __init__(self, folder: str, me: int) -> None:
        self.me, self.meeting = me, dist.FileStore(f"{folder}/meeting", -1)
        self.meeting.set_timeout(TIMEOUT)
        dist.init_process_group(
            "gradwire",
            store=dist.FileStore(f"{folder}/own{me}", -1),
            rank=0,
            world_size=1,
            timeout=TIMEOUT,
            enable_reconfigure=True,
        )

    def joins(self, number: int, members: list[int], unordered: bool = False) -> bool:
        """Forms a group of these processes; returns whether this one is among them."""
        if self.me not in members:
            return False
        self.meeting.set(f"{number}/{self.me}", dist._get_reconfigure_handle())
        handles: Any = [self.meeting.get(f"{number}/{one}").decode() for one in members]
        handles = set(handles) if unordered else handles
        assert dist._reconfigure(uuid=number, handles=handles, timeout=TIMEOUT).wait()
        assert dist.get_world_size() == len(members)
        if not unordered:
            assert dist.get_rank() == members.index(self.me)
        self.works(members)
        return True

    def works(self, members: list[int]) -> None:
        """Compares collectives and a step of DDP with what they must be."""
        tensor = torch.full((1000,), float(self.me + 1))
        dist.all_reduce(tensor)
        assert tensor.eq(sum(one + 1 for one in members)).all(), tensor
        everyone: list[Any] = [None] * len(members)
        dist.all_gather_object(everyone, self.me)
        assert sorted(everyone) == sorted(members), everyone
        torch.manual_seed(self.me)
        model = torch.nn.Linear(3, 2)
        parallel = DistributedDataParallel(model)
        start = model.weight.detach().clone()
        parallel(torch.full((1, 3), float(self.me))).sum().backward()
        torch.testing.assert_close(
            model.weight.grad, torch.full((2, 3), sum(members) / len(members))
        )
        both = [torch.empty_like(start) for _ in members]
        dist.all_gather(both, start)
        assert all(torch.equal(one, both[0]) for one in both)


def main() -> None:
    me = int(sys.argv[2])
    process = Process(sys.argv[1], me)
    assert dist._supports_reconfigure()
    assert (dist.get_rank(), dist.get_world_size()) == (-1, -1)
    raises(hvd.NotInitialized, "reconfigure()", lambda: dist.all_reduce(torch.ones(1)))
    process.joins(1, [0, 1, 2])
    process.joins(2, [2, 0])
    process.joins(3, [1, 2, 0])
    if me == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if me < 3:
        raises(hvd.GradwireError, "", lambda: process.works([0, 1, 2]))
    process.joins(4, [2, 1])
    if me == 1:
        dist.distributed_c10d._get_default_group().abort()
    process.joins(5, [2, 3, 1], unordered=True)
    if me == 1:
        handle = dist._get_reconfigure_handle()
        raises(
            hvd.InvalidRequest,
            "used before",
            lambda: (
                dist._reconfigure(uuid=6, handles=[handle]),
                dist._reconfigure(uuid=6, handles=[handle]),
            ),
        )
        raises(hvd.InvalidRequest, "a handle", lambda: dist._reconfigure(uuid=7, handles=["x"]))
        raises(
            hvd.InvalidRequest,
            "give one handle for each process",
            lambda: dist._reconfigure(uuid=7, handles=[handle, handle]),
        )
        process.joins(8, [1])
    dist.destroy_process_group()
    print("GOOD", me, flush=True)


if __name__ == "__main__":
    main()
