"""Trains with Ray Train: DDP on two workers, which Ray starts itself."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_TRAIN_V2_ENABLED"] = "1"

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

BACKEND, FOLDER = sys.argv[1], Path(sys.argv[2])
HERE = str(Path(__file__).parent)


def register() -> None:
    import gradwire.torch.distributed  # noqa: F401


def train(config: dict[str, Any]) -> None:
    sys.argv = ["", BACKEND, str(FOLDER)]
    import torch
    import torch.distributed as dist
    from trained import data, loss, model

    net = torch.nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)
    sampler: Any = torch.utils.data.DistributedSampler(data(), shuffle=False)
    losses = []
    for _ in range(3):
        for given, wanted in torch.utils.data.DataLoader(data(), batch_size=4, sampler=sampler):
            optimizer.zero_grad()
            error = loss(net(given), wanted)
            error.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            mean = error.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / dist.get_world_size())
    (FOLDER / f"{dist.get_rank()}.json").write_text(json.dumps([dist.get_backend(), losses]))


def main() -> None:
    FOLDER.mkdir(parents=True)
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": HERE}
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100_000_000,
        _node_ip_address="127.0.0.1",
        runtime_env={"worker_process_setup_hook": register, "env_vars": environment},
    )
    TorchTrainer(
        train,
        torch_config=TorchConfig(backend=BACKEND),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(FOLDER / "ray")),
    ).fit()
    for rank in range(2):
        backend, losses = json.loads((FOLDER / f"{rank}.json").read_text())
        print(f"BACKEND {backend} LOSSES {losses}", flush=True)


if __name__ == "__main__":
    main()
