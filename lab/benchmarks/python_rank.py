"""The common part of the Python peers' ranks, which are timed like `gradwire bench`.

The operation is an in-place sum of float32. Every iteration begins with fresh data, and its result
is checked; above 16 MiB, this applies to every tenth iteration. Both are untimed. The time of an
iteration is that of the slowest rank. If there is a barrier before an iteration, there is one after
it, too: untimed work of one rank must not keep another rank on the same core from noticing the end.
Rank 0 prints a line of JSON for each size, or for the model.

The programs run in the virtual environment of the benchmark, one process for each rank.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Peer:
    """A library, as one of its ranks uses it."""

    name: str
    rank: int
    ranks: int
    # Waits until all ranks have called it.
    barrier: Callable[[], None]
    # Sums a tensor in place.
    allreduce: Callable[[torch.Tensor], object]
    # Starts a sum; returns its wait. The number identifies the tensor.
    start: Callable[[torch.Tensor, int], Callable[[], object]]
    # Returns the element-wise maximum over all ranks.
    largest: Callable[[torch.Tensor], torch.Tensor]


def pattern(count: int, factor: int) -> torch.Tensor:
    """Small whole numbers: their sums are exact in float32, in any order."""
    return ((torch.arange(count) % 61 + 1) * factor).to(torch.float32)


class Tensor:
    """A tensor with its initial values and the right result."""

    def __init__(self, peer: Peer, count: int) -> None:
        """Allocates memory for `count` elements."""
        self.peer = peer
        self.data = torch.zeros(count)
        self.begin = pattern(count, peer.rank + 1)
        self.end = pattern(count, peer.ranks * (peer.ranks + 1) // 2)

    def fill(self) -> None:
        """Sets the initial values."""
        self.data.copy_(self.begin)

    def check(self) -> None:
        """Ends the program if the sum is wrong."""
        if not torch.equal(self.data, self.end):
            sys.exit(f"{self.peer.name}: rank {self.peer.rank}: wrong result")


def measure(
    peer: Peer,
    tensors: list[Tensor],
    warmup: int,
    iterations: int,
    barrier: bool,
    step: Callable[[], None],
) -> None:
    """Times `step` over all tensors, and prints it on rank 0."""
    size = sum(tensor.data.nbytes for tensor in tensors)
    times = []
    for i in range(-warmup, iterations):
        for tensor in tensors:
            tensor.fill()
        if barrier:
            peer.barrier()
        begin = time.perf_counter()
        step()
        end = time.perf_counter()
        if i >= 0:
            times.append(end - begin)
        if barrier:
            peer.barrier()
        if size <= 16 << 20 or i < 0 or i % 10 == 0:
            for tensor in tensors:
                tensor.check()
    slowest = peer.largest(torch.tensor(times, dtype=torch.float64))
    if peer.rank == 0:
        print(json.dumps({"bytes": size, "times_us": (slowest * 1e6).tolist()}), flush=True)


def one_size(peer: Peer, item: str) -> None:
    """Measures one item of a plan, `BYTES:WARMUP:ITERATIONS[:barrier]`."""
    size, warmup, iterations, *rest = item.split(":")
    tensor = Tensor(peer, int(size) // 4)

    def step() -> None:
        peer.allreduce(tensor.data)

    measure(peer, [tensor], int(warmup), int(iterations), rest == ["barrier"], step)


def model(peer: Peer, counts: list[int], warmup: int, iterations: int) -> None:
    """Measures a model's tensors, as operations that are all started before the first wait."""
    tensors = [Tensor(peer, count) for count in counts]

    def step() -> None:
        started = [peer.start(tensor.data, number) for number, tensor in enumerate(tensors)]
        for wait in started:
            wait()

    measure(peer, tensors, warmup, iterations, True, step)


def options(description: str | None) -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--sizes", help="BYTES:WARMUP:ITERATIONS[:barrier],...")
    parser.add_argument("--model", type=Path, help="a file with a number of elements per line")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=5)
    return parser


def cores(local_ranks: int) -> int:
    """Returns the number of cores that a rank may use to fill and to check."""
    return max(1, len(os.sched_getaffinity(0)) // local_ranks)


def run(
    peer: Peer,
    arguments: argparse.Namespace,
    cut: Callable[[list[int]], list[int]] = lambda counts: counts,
) -> None:
    """Measures according to the command line; `cut` makes buckets of a model's tensors."""
    if arguments.model:
        counts = [int(line) for line in arguments.model.read_text().split()]
        model(peer, cut(counts), arguments.warmup, arguments.iterations)
    else:
        for item in arguments.sizes.split(","):
            one_size(peer, item)
    peer.barrier()
