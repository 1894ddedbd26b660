"""Trains with the Trainer of Transformers: accumulation, clipping, checkpoints, resumed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from trained import BACKEND, FOLDER, data, loss, model, report, step_of
from transformers import Trainer, TrainerCallback, TrainingArguments

if BACKEND == "gradwire":
    import gradwire.torch.distributed

    gradwire.torch.distributed.prepare()


class Net(torch.nn.Module):
    """A model with the interface that the Trainer wants."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model()

    def forward(self, given: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.layers(given)
        return {"loss": loss(found, labels), "logits": found}


class Steps(TrainerCallback):
    """Counts the steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step_of(state.global_step)


def trainer(epochs: int) -> Trainer:
    options = TrainingArguments(
        output_dir=FOLDER,
        use_cpu=True,
        per_device_train_batch_size=4,
        num_train_epochs=epochs,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="epoch",
        report_to=[],
        seed=3,
        disable_tqdm=True,
    )
    examples = [{"given": given, "labels": wanted} for given, wanted in data()]
    return Trainer(Net(), options, train_dataset=examples, callbacks=[Steps()])


def losses(trained: Trainer) -> list[float]:
    return [line["loss"] for line in trained.state.log_history if "loss" in line]


first = trainer(1)
first.train()
resumed = trainer(2)
resumed.train(resume_from_checkpoint=True)
report(losses(first) + losses(resumed), dist.get_backend())
