"""Trains with Accelerate: accumulation, clipping, autocast, a checkpoint and a resumed training."""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import Accelerator
from trained import BACKEND, FOLDER, data, loss, model, report, step_of

if BACKEND == "gradwire":
    import gradwire.torch.distributed

    gradwire.torch.distributed.prepare()

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
net = model()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)
batches = torch.utils.data.DataLoader(data(), batch_size=4)
net, optimizer, batches = accelerator.prepare(net, optimizer, batches)
losses: list[float] = []


def train() -> None:
    for given, wanted in batches:
        with accelerator.accumulate(net):
            error = loss(net(given), wanted)
            accelerator.backward(error)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(error.detach()[None]).mean().item())
        step_of(len(losses))


train()
accelerator.save_state(FOLDER)
train()
accelerator.load_state(FOLDER)
train()
accelerator.wait_for_everyone()
report(losses, dist.get_backend())
accelerator.end_training()
