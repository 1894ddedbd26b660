"""Trains with Lightning: accumulation, clipping, autocast, a checkpoint and a resumed training."""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from trained import BACKEND, FOLDER, data, loss, model, report, step_of

if BACKEND == "gradwire":
    import gradwire.torch  # noqa: F401, it registers the backend with older releases of PyTorch

losses: list[float] = []
backends: set[str] = set()


class Net(lightning.LightningModule):
    """The model and its step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model()

    def training_step(self, batch: Any, at: int) -> torch.Tensor:
        given, wanted = batch
        error = loss(self.layers(given), wanted)
        mean = error.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item())
        backends.add(dist.get_backend())
        step_of(len(losses))
        return error

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)


def train(epochs: int, resumed: str | None = None) -> None:
    on_host = int(os.environ.get("LOCAL_WORLD_SIZE", "2"))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=on_host,
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy=DDPStrategy(process_group_backend=BACKEND),
        precision="bf16-mixed",
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(FOLDER, save_last=True)],
    )
    batches = torch.utils.data.DataLoader(data(), batch_size=4)
    trainer.fit(Net(), batches, ckpt_path=resumed)


train(1)
train(2, f"{FOLDER}/last.ckpt")
report(losses, *backends)
