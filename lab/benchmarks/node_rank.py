"""A rank of `bench_node`: times all_reduce of f32 from Python, in place.

    node_rank.py SYSTEM DEVICE SECONDS BYTES,BYTES,...

Each call begins with fresh data, untimed. The time of a size is the median of the slowest rank.
Rank 0 prints one line of JSON with the microseconds of each size.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from statistics import median

import torch

# Before anything is timed. A large tensor of Gradwire has moved into shared memory by then.
WARM_UP = 10
MOST_CALLS = 300


class Group:
    """All ranks of a job, joined by one system."""

    def __init__(self, system: str, device: str) -> None:
        """Joins the job."""
        self._mpi = system == "mpi"
        if self._mpi:
            from mpi4py import MPI

            self._world, self._in_place, self._max = MPI.COMM_WORLD, MPI.IN_PLACE, MPI.MAX
            self.rank, self.size = self._world.rank, self._world.size
            return
        import torch.distributed as dist

        if system == "gradwire":
            import gradwire.torch  # noqa: F401 - registers the backend
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        dist.init_process_group(system)
        self._dist = dist
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def sum_of(self, tensor: torch.Tensor) -> Callable[[], object]:
        """Returns a call that sums a tensor over all ranks, in place."""
        if not self._mpi:
            return lambda: self._dist.all_reduce(tensor)
        array = tensor.numpy()
        return lambda: self._world.Allreduce(self._in_place, array)

    def slowest(self, seconds: float) -> float:
        """Returns the most seconds of a rank."""
        if self._mpi:
            return float(self._world.allreduce(seconds, op=self._max))
        most = torch.tensor([seconds], dtype=torch.float64)
        self._dist.all_reduce(most, op=self._dist.ReduceOp.MAX)
        return float(most)

    def close(self) -> None:
        """Leaves the job."""
        if not self._mpi:
            self._dist.destroy_process_group()


def timed(group: Group, device: str, nbytes: int, seconds: float) -> float:
    """Returns the time of an all_reduce of this size, in microseconds."""
    tensor = torch.ones(nbytes // 4, device=device)
    call, settle = group.sum_of(tensor), torch.cuda.synchronize if device == "cuda" else int

    def once() -> float:
        tensor.fill_(1.0)
        settle()
        begin = time.perf_counter()
        call()
        settle()
        return time.perf_counter() - begin

    for _ in range(WARM_UP):
        once()
    each = group.slowest(once())
    calls = max(5, min(MOST_CALLS, int(seconds / each)))
    middle = median(once() for _ in range(calls))
    if not bool((tensor == group.size).all()):
        raise SystemExit(f"the sum of {nbytes} bytes is wrong: {tensor[:3].tolist()}")
    return group.slowest(middle) * 1e6


def main() -> None:
    """Times all sizes."""
    system, device, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    torch.set_num_threads(1)
    group = Group(system, device)
    sizes = map(int, sys.argv[4].split(","))
    found = [timed(group, device, nbytes, seconds) for nbytes in sizes]
    if group.rank == 0:
        print(json.dumps([round(us, 2) for us in found]), flush=True)
    group.close()


if __name__ == "__main__":
    main()
