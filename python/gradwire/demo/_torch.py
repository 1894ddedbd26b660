"""The demo with PyTorch: a convolutional network, and the optimizer of a Horovod script."""

from __future__ import annotations

from time import perf_counter

import torch
from torch import nn
from torch.nn import functional

import gradwire.torch as hvd

from . import _data


def _network() -> nn.Module:
    torch.manual_seed(42)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.GELU(),
        nn.Linear(64, 10),
    )


def train(killed: int | None) -> None:
    """Trains the network. Rank ``killed`` dies in the middle, if it is given."""
    torch.set_num_threads(1)
    arrays = _data.load()
    images, digits = torch.from_numpy(arrays[0]).view(-1, 1, 8, 8), torch.from_numpy(arrays[1])
    rest = slice(_data.TEST_IMAGES, None)
    model = _network()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    start = perf_counter()
    for epoch in range(1, _data.EPOCHS + 1):
        losses = []
        for batch in _data.batches(epoch, len(digits[rest])):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images[rest][batch]), digits[rest][batch])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            _data.die(epoch, killed)
        mean = hvd.allreduce(torch.stack(losses).mean(), name="loss")
        _data.say(f"epoch {epoch}: loss {mean:.6f}")
    mine = slice(hvd.rank(), _data.TEST_IMAGES, hvd.size())
    with torch.no_grad():
        right = (model(images[mine]).argmax(1) == digits[mine]).sum()
    flat = b"".join(it.detach().numpy().tobytes() for it in model.parameters())
    _data.finish(int(right), flat, perf_counter() - start)
