"""One rank of `gpu_check.py`: an allreduce of tensors on a GPU in each way, and the copies that all
ways need.

The ways take turns in the same processes. Each call begins with fresh data when the GPU has
finished everything else, and ends when it has the result, which is checked. Its time is that of the
slowest rank. Rank 0 prints a line of JSON for each size.

A library that reduces GPU data on the processor needs a copy to the host and one back. `copies`
makes only these, with pinned memory, one after the other. `copies-both` makes them at the same time
on two streams: an exchange in pieces may come close to that.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable

import gradwire.torch as gw
import torch
import torch.distributed as dist

from device import finished, of_this_rank
from python_rank import pattern

WARMUP = 2
LEAST, MOST = 3, 50


class Copies:
    """The copies of a tensor between the device and pinned memory of the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Allocates memory on the host, and streams for both directions."""
        self.tensor = tensor
        pinned = tensor.is_cuda
        self.out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        self.back = torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        self.result = torch.empty_like(tensor)
        self.streams = [torch.cuda.Stream() if pinned else None for _ in range(2)]

    def in_turn(self) -> None:
        """Copies out, and then back."""
        self.out.copy_(self.tensor, non_blocking=True)
        self.result.copy_(self.out, non_blocking=True)

    def both(self) -> None:
        """Copies out, and at the same time other data back."""
        for stream, to, what in zip(
            self.streams, (self.out, self.result), (self.tensor, self.back), strict=True
        ):
            with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
                to.copy_(what, non_blocking=True)


class Size:
    """A tensor of one size on the device, and the ways to sum it over the ranks."""

    def __init__(self, size: int, device: torch.device, gloo: dist.ProcessGroup) -> None:
        """`size` is in bytes."""
        self.gloo, self.device, self.size = gloo, device, size
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.begin = pattern(size // 4, rank + 1).to(device)
        self.end = pattern(size // 4, ranks * (ranks + 1) // 2).to(device)
        tensor = self.tensor = torch.empty_like(self.begin)
        copies = Copies(tensor)
        self.copies = (copies.in_turn, copies.both)
        self.ways: dict[str, Callable[[], object]] = {
            "copies": copies.in_turn,
            "copies-both": copies.both,
            "gloo": lambda: dist.all_reduce(tensor, group=gloo),
            "backend": lambda: dist.all_reduce(tensor),
            "allreduce_": lambda: gw.allreduce_(tensor, name=f"sum.{size}", op=gw.Sum),
        }

    def once(self, way: str) -> float:
        """Runs one call; returns its seconds."""
        call = self.ways[way]
        self.tensor.copy_(self.begin)
        finished(self.device)
        dist.barrier(group=self.gloo)
        begin = time.perf_counter()
        call()
        finished(self.device)
        passed = time.perf_counter() - begin
        right = self.begin if call in self.copies else self.end
        if not torch.equal(self.tensor, right):
            sys.exit(f"gpu_rank: rank {dist.get_rank()}: {way}: {self.size} bytes: wrong result")
        return passed

    def slowest(self, times: list[float]) -> list[float]:
        """Returns each call's time on the rank where it took longest."""
        all_times = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(all_times, op=dist.ReduceOp.MAX, group=self.gloo)
        return all_times.tolist()

    def measure(self, seconds: float) -> dict[str, list[float]]:
        """Times each way for about `seconds`; returns the times in microseconds."""
        times: dict[str, list[float]] = {}
        counts = {}
        for way in self.ways:
            warm = [self.once(way) for _ in range(WARMUP)]
            # All ranks see the same time, so all of them make the same number of calls.
            counts[way] = min(max(round(seconds / self.slowest(warm)[-1]), LEAST), MOST)
            times[way] = []
        for turn in range(max(counts.values())):
            for way in self.ways:
                if turn < counts[way]:
                    times[way].append(self.once(way) * 1e6)
        return {way: self.slowest(own) for way, own in times.items()}


def main() -> None:
    """Joins the job that started it, and measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--sizes", required=True, help="in bytes, separated by commas")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each way and size")
    asked = parser.parse_args()
    device = of_this_rank(asked.device)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["WORLD_SIZE"])))
    dist.init_process_group("gradwire")
    gloo = dist.new_group(backend="gloo")
    for size in map(int, asked.sizes.split(",")):
        times = Size(size, device, gloo).measure(asked.seconds)
        if dist.get_rank() == 0:
            print(json.dumps({"bytes": size, "times_us": times}), flush=True)
    dist.barrier(group=gloo)
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
