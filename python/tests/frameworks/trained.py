"""The model and the data of the trainers' programs."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch

# The programs' arguments: the backend, the folder for checkpoints, and the rank to be killed.
BACKEND, FOLDER = sys.argv[1], sys.argv[2]
KILLED = int(sys.argv[3]) if len(sys.argv) > 3 else None


def model() -> torch.nn.Module:
    """A model whose layers have the same values on all ranks."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def data() -> torch.utils.data.TensorDataset:
    """32 examples for each rank."""
    examples = 32 * int(os.environ.get("WORLD_SIZE", "2"))
    given = torch.randn(examples, 6, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(given, given.sum(1, keepdim=True))


def loss(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The mean squared error."""
    return torch.nn.functional.mse_loss(found.float(), wanted)


def step_of(step: int) -> None:
    """Kills the rank to be killed at its third step."""
    if step == 3 and int(os.environ.get("RANK", "0")) == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)


def report(losses: list[float], backend: Any) -> None:
    """Prints the losses of all steps of this rank."""
    print(f"BACKEND {backend} LOSSES {[round(each, 7) for each in losses]}\n", end="", flush=True)
    # Gloo's threads can abort a process that ends normally, with or without its group.
    if backend == "gloo":
        sys.stdout.flush()
        os._exit(0)
