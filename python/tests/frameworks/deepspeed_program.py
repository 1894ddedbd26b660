"""Trains with DeepSpeed: ZeRO stages, accumulation, clipping, and a resumed training."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
# DeepSpeed compiles an extension for CPUs when it is used for the first time.
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "extensions"))

import deepspeed
import torch
import torch.distributed as dist
from trained import BACKEND, FOLDER, data, loss, model, report, step_of

if BACKEND == "gradwire":
    import gradwire.torch.distributed  # noqa: F401

deepspeed.init_distributed(dist_backend=BACKEND)
losses: list[float] = []


def engine_of(stage: int) -> Any:
    """Returns the engine of a ZeRO stage."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    net = model()
    return deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)[0]


def train(engine: Any) -> None:
    sampler: Any = torch.utils.data.DistributedSampler(data(), shuffle=False)
    for given, wanted in torch.utils.data.DataLoader(data(), batch_size=4, sampler=sampler):
        error = loss(engine(given), wanted)
        engine.backward(error)
        engine.step()
        mean = error.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        step_of(len(losses))


for stage in (0, 2, 3):
    engine = engine_of(stage)
    train(engine)
    engine.save_checkpoint(f"{FOLDER}/{stage}")
    train(engine)
    engine.load_checkpoint(f"{FOLDER}/{stage}")
    train(engine)
dist.barrier()
report(losses, dist.get_backend())
