"""One rank of Gradwire as used from PyTorch: see `python_rank.py`.

`gradwire run` starts it. Tensors are ordinary ones, which move into shared memory during warm-up.
"""

from collections.abc import Callable

import gradwire.torch as hvd
import torch
import torch.distributed as dist

import python_rank


def allreduce(data: torch.Tensor) -> None:
    """Sums the tensor in place."""
    hvd.allreduce_(data, op=hvd.Sum, name=f"size.{data.numel()}")


def start(data: torch.Tensor, number: int) -> Callable[[], object]:
    """Starts a sum, under a name that stays the same in all steps."""
    handle = hvd.allreduce_async_(data, op=hvd.Sum, name=f"gradient.{number}")
    return lambda: hvd.synchronize(handle)


def start_in_group(data: torch.Tensor, _: int) -> Callable[[], object]:
    """Starts an allreduce of the process group; returns its wait."""
    return dist.all_reduce(data, async_op=True).wait


def largest(times: torch.Tensor) -> torch.Tensor:
    """Returns the times of the slowest rank."""
    return hvd.allreduce(times, op=hvd.Max, name="times")


def main() -> None:
    """Joins the job, and measures."""
    parser = python_rank.options(__doc__)
    parser.add_argument("--interface", choices=["dist", "hvd"], required=True)
    arguments = parser.parse_args()
    if arguments.interface == "dist":
        dist.init_process_group("gradwire")
        calls = (dist.barrier, dist.all_reduce, start_in_group)
    else:
        hvd.init()
        calls = (hvd.barrier, allreduce, start)
    torch.set_num_threads(python_rank.cores(hvd.local_size()))
    peer = python_rank.Peer("gradwire_rank", hvd.rank(), hvd.size(), *calls, largest)
    python_rank.run(peer, arguments)
    if arguments.interface == "dist":
        dist.destroy_process_group()
    else:
        hvd.shutdown()


if __name__ == "__main__":
    main()
