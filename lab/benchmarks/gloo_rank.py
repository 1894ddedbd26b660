"""One rank of PyTorch's Gloo: see `python_rank.py`."""

import datetime
import os
from collections.abc import Callable

import torch
import torch.distributed as dist

import python_rank

# The buckets of DistributedDataParallel: a first one of 1 MiB for an early start, then 25 MiB each.
FIRST_BUCKET = 1 << 20
BUCKET = 25 << 20


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


def start(data: torch.Tensor, _: int) -> Callable[[], object]:
    """Starts an allreduce; returns its wait."""
    work = dist.all_reduce(data, async_op=True)
    return work.wait


def largest(times: torch.Tensor) -> torch.Tensor:
    """Returns the times of the slowest rank."""
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times


def main() -> None:
    """Joins the job that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe, and measures."""
    parser = python_rank.options(__doc__)
    parser.add_argument("--mode", choices=["buckets", "single"], default="buckets")
    arguments = parser.parse_args()
    torch.set_num_threads(python_rank.cores(int(os.environ["LOCAL_WORLD_SIZE"])))
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    peer = python_rank.Peer(
        "gloo_rank",
        dist.get_rank(),
        dist.get_world_size(),
        dist.barrier,
        dist.all_reduce,
        start,
        largest,
    )
    if arguments.mode == "buckets":
        python_rank.run(peer, arguments, buckets)
    else:
        python_rank.run(peer, arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
