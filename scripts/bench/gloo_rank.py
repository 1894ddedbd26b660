"""One rank of PyTorch's Gloo, timed the way `gradwire bench` times Gradwire's.

Float32, sum, in place. Every iteration begins with fresh data and its result is checked, both outside of
the timed part; above 16 MiB every tenth result is. An iteration takes as long as it takes the slowest rank.
Rank 0 prints a line of JSON for each size, or for the model.

It runs in the virtual environment of the benchmark, one process for each rank.
"""

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

# DistributedDataParallel's: a first bucket of 1 MiB so that something can begin early, then 25 MiB each.
FIRST_BUCKET = 1 << 20
BUCKET = 25 << 20


def pattern(count: int, factor: int) -> torch.Tensor:
    """Small whole numbers: their sums are exact in float32, in any order."""
    return ((torch.arange(count) % 61 + 1) * factor).to(torch.float32)


class Tensor:
    """A tensor with what it begins as and what must come of it."""

    def __init__(self, count: int) -> None:
        """Takes memory for `count` elements."""
        ranks = dist.get_world_size()
        self.data = torch.zeros(count)
        self.begin = pattern(count, dist.get_rank() + 1)
        self.end = pattern(count, ranks * (ranks + 1) // 2)

    def fill(self) -> None:
        """Begins anew."""
        self.data.copy_(self.begin)

    def check(self) -> None:
        """Ends the program if the sum is wrong."""
        if not torch.equal(self.data, self.end):
            sys.exit(f"gloo_rank: rank {dist.get_rank()}: a result is wrong")


def measure(tensors: list[Tensor], warmup: int, iterations: int, barrier: bool, step: Callable[[], None]) -> None:
    """Times `step` over all tensors, and prints it on rank 0."""
    size = sum(tensor.data.nbytes for tensor in tensors)
    times = []
    for i in range(-warmup, iterations):
        for tensor in tensors:
            tensor.fill()
        if barrier:
            dist.barrier()
        begin = time.perf_counter()
        step()
        end = time.perf_counter()
        if i >= 0:
            times.append(end - begin)
        if size <= 16 << 20 or i < 0 or i % 10 == 0:
            for tensor in tensors:
                tensor.check()
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(json.dumps({"bytes": size, "times_us": (slowest * 1e6).tolist()}), flush=True)


def one_size(item: str) -> None:
    """Measures one item of a plan, `BYTES:WARMUP:ITERATIONS[:barrier]`."""
    size, warmup, iterations, *rest = item.split(":")
    tensor = Tensor(int(size) // 4)
    measure([tensor], int(warmup), int(iterations), rest == ["barrier"], lambda: dist.all_reduce(tensor.data))


def buckets(counts: list[int]) -> list[int]:
    """Cuts a model's tensors, in their order, into buckets the way DistributedDataParallel does."""
    full: list[int] = []
    now, limit = 0, FIRST_BUCKET
    for count in counts:
        now += count
        if now * 4 >= limit:
            full.append(now)
            now, limit = 0, BUCKET
    return [*full, now] if now else full


def model(counts: list[int], warmup: int, iterations: int) -> None:
    """Measures a model's tensors as operations that are all started before the first is waited for."""
    tensors = [Tensor(count) for count in counts]

    def step() -> None:
        started = [dist.all_reduce(tensor.data, async_op=True) for tensor in tensors]
        for work in started:
            work.wait()

    measure(tensors, warmup, iterations, True, step)


def main() -> None:
    """Joins the job that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT tell of, and measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", help="BYTES:WARMUP:ITERATIONS[:barrier],...")
    parser.add_argument("--model", type=Path, help="a file with a number of elements per line")
    parser.add_argument("--mode", choices=["buckets", "single"], default="buckets")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=5)
    arguments = parser.parse_args()

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"])))
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    if arguments.model:
        counts = [int(line) for line in arguments.model.read_text().split()]
        if arguments.mode == "buckets":
            counts = buckets(counts)
        model(counts, arguments.warmup, arguments.iterations)
    else:
        for item in arguments.sizes.split(","):
            one_size(item)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
