"""One rank of Horovod over Gloo: see `python_rank.py`. `horovodrun` starts it."""

from collections.abc import Callable

import horovod.torch as hvd
import torch

import python_rank


def allreduce(data: torch.Tensor) -> None:
    """Sums the tensor in place."""
    hvd.allreduce_(data, op=hvd.Sum, name=f"size.{data.numel()}")


def start(data: torch.Tensor, number: int) -> Callable[[], object]:
    """Starts a sum, under a name that stays the same in all steps, as in Horovod's optimizer."""
    handle = hvd.allreduce_async_(data, op=hvd.Sum, name=f"gradient.{number}")
    return lambda: hvd.synchronize(handle)


def barrier() -> None:
    """Waits for all ranks. Horovod's own barrier uses a slower path in some releases."""
    hvd.allreduce_(torch.zeros(1), op=hvd.Sum, name="barrier")


def largest(times: torch.Tensor) -> torch.Tensor:
    """Returns the times of the slowest rank."""
    return hvd.allgather(times.unsqueeze(0), name="times").max(0).values


def main() -> None:
    """Joins the job, and measures."""
    arguments = python_rank.options(__doc__).parse_args()
    hvd.init()
    torch.set_num_threads(python_rank.cores(hvd.local_size()))
    peer = python_rank.Peer(
        "horovod_rank", hvd.rank(), hvd.size(), barrier, allreduce, start, largest
    )
    python_rank.run(peer, arguments)
    hvd.shutdown()


if __name__ == "__main__":
    main()
