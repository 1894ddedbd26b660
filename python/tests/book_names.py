"""Runs the programs of the book on the ranks of a job: python book_names.py FRAMEWORK FOLDER

A page shows a few lines, and takes for granted what every reader has: a model, data and so on. Here
are these names, small enough that each program takes a moment.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import gradwire


def of_torch() -> dict[str, Any]:
    """What the pages about PyTorch take for granted."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    import gradwire.torch as hvd

    model = torch.nn.Linear(8, 1)
    images = torch.ones(64, 8)

    def train_step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        model(batch[0]).sum().backward()
        optimizer.step()

    return {
        "torch": torch,
        "dist": dist,
        "DistributedDataParallel": DistributedDataParallel,
        "DataLoader": DataLoader,
        "gradwire": gradwire,
        "hvd": hvd,
        "signal": signal,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "dataset": TensorDataset(images),
        "tensor": torch.ones(4),
        "weights": torch.ones(4),
        "gradients": {"a": torch.ones(4), "b": torch.ones(2)},
        "loss_of": lambda model, batch: model(batch).sum(),
        "batch_of": lambda step, rank, size: images[:4],
        "evaluate": lambda model: None,
        "step": 990,
        "train": lambda step: step + 1,
        "train_step": train_step,
        "train_until_a_change": lambda state: None,
    }


def of_keras() -> dict[str, Any]:
    import keras
    import numpy as np

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(10, activation="softmax")])
    return {"model": model, "images": np.ones((64, 8)), "digits": np.zeros(64, int)}


def of_jax() -> dict[str, Any]:
    import jax.numpy as jnp

    return {
        "params": {"w": jnp.ones(3)},
        "loss_of": lambda params, batch: (params["w"] * batch).sum(),
    }


NAMES = {"torch": of_torch, "keras": of_keras, "jax": of_jax}
# The start of some programs is on another page.
ALSO = {
    "docs/jax.md": "state = step(params, state, jax.numpy.ones(3))[1]",
}
BEFORE = {
    "docs/elastic.md": "hvd.init()",
    "docs/performance.md": "hvd.init()",
    "docs/collectives.md": "hvd.init()",
    "docs/horovod.md": "hvd.init()",
    "docs/hangs.md": "hvd.init()",
    "python/README.md": "hvd.init()",
}


def main() -> None:
    framework, folder = sys.argv[1], Path(sys.argv[2])
    for path in sorted(folder.iterdir()):
        text = path.read_text()
        place = text.splitlines()[0].removeprefix("# ")
        page = place.partition(":")[0]
        names = {"__name__": "__main__", **NAMES.get(framework, dict)()}
        print("begins", place, flush=True)
        exec(BEFORE.get(page, ""), names)
        exec(compile(text, place, "exec"), names)
        exec(ALSO.get(page, ""), names)
        if "dist" in names and names["dist"].is_initialized():
            names["dist"].destroy_process_group()
        if gradwire.is_initialized():
            gradwire.shutdown()
        print(place, "works", flush=True)


if __name__ == "__main__":
    main()
