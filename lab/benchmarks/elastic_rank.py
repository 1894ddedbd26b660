"""A rank of `elastic.py`: trains until a number of steps, and writes down when each step ended.

    elastic_rank.py DIRECTORY STEPS SECONDS

A step sums a gradient of a few layers; all ranks must have the same parameters after it. Every
process writes its lines to a file of its own in DIRECTORY: the system's monotonic time in seconds,
the epoch, the rank, the number of ranks and the step that it has committed.
"""

import os
import sys
import time
from pathlib import Path

import gradwire.torch as hvd
import torch
from gradwire.torch.elastic import TorchState, run

LAYER = 256


def main(directory: Path, steps: int, seconds: float) -> None:
    """Trains, whatever is lost meanwhile."""
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(LAYER, LAYER) for _ in range(4)))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        named_parameters=model.named_parameters(),
    )
    log = (directory / f"{os.getpid()}.txt").open("w", buffering=1)

    @run
    def train(state: TorchState) -> None:
        while state.step < steps:
            data = torch.Generator().manual_seed(state.step * 1000 + hvd.rank())
            optimizer.zero_grad()
            model(torch.randn(8, LAYER, generator=data)).square().mean().backward()
            time.sleep(seconds)
            optimizer.step()
            state.step += 1
            state.commit()
            epoch = hvd.epoch() if hasattr(hvd, "epoch") else 0
            log.write(f"{time.monotonic():.6f} {epoch} {hvd.rank()} {hvd.size()} {state.step}\n")

    train(TorchState(model=model, optimizer=optimizer, step=0))
    hash_of = torch.cat([p.detach().flatten() for p in model.parameters()]).double().sum().item()
    print(f"done {hash_of!r}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
