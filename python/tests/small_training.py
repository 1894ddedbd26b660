"""A small training, in one process and on all ranks, for the tests of the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import gradwire.torch as hvd

STEPS = 6
PER_RANK = 4


def model(seed: int = 3) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16),
        torch.nn.Tanh(),
        torch.nn.Linear(16, 8),
        torch.nn.ReLU(),
        torch.nn.Linear(8, 1),
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(100 + step)
    given = torch.randn(PER_RANK * hvd.size(), 6, generator=random)
    return given, given.square().sum(1, keepdim=True)


def part(whole: torch.Tensor) -> torch.Tensor:
    return whole[PER_RANK * hvd.rank() :][:PER_RANK]


def halves(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns this rank's part of a batch, as two halves."""
    given, wanted = map(part, batch(step))
    return list(zip(given.split(PER_RANK // 2), wanted.split(PER_RANK // 2)))


def loss_of(net: torch.nn.Module, given: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(net(given), wanted)


def sgd(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


def adam(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.01)


def alone(make: Callable[[Any], Any], steps: int = STEPS) -> tuple[torch.nn.Module, list[float]]:
    """Trains in one process with the whole batch."""
    net = model()
    optimizer, losses = make(net), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(net, *batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return net, losses


def distributed(net: torch.nn.Module, make: Callable[[Any], Any] = sgd, **options: Any) -> Any:
    return hvd.DistributedOptimizer(make(net), net.named_parameters(), **options)


def train(net: torch.nn.Module, optimizer: Any, steps: int = STEPS) -> None:
    """Trains with this rank's part of a batch in each step."""
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(net, *map(part, batch(step))).backward()
        optimizer.step()


def train_by_closures(net: torch.nn.Module, optimizer: Any, steps: int) -> None:
    """Trains with closures that run each step's backward pass."""
    for step in range(steps):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(net, *map(part, batch(step)))
            loss.backward()
            return loss

        optimizer.step(closure)


def together(
    make: Callable[[Any], Any], **options: Any
) -> tuple[torch.nn.Module, list[float], Any]:
    """Trains on all ranks with their parts of the batch; their initial models differ."""
    net = model(seed=3 if hvd.rank() == 0 else 50 + hvd.rank())
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    optimizer = distributed(net, make, **options)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        given, wanted = batch(step)
        loss = loss_of(net, part(given), part(wanted))
        loss.backward()
        optimizer.step()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
    return net, losses, optimizer


def bits_are_the_same_everywhere(net: torch.nn.Module) -> None:
    mine = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    for theirs in hvd.allgather(mine.unsqueeze(0)):
        assert torch.equal(theirs.view(torch.int32), mine.view(torch.int32))


def parameters_are_near(net: torch.nn.Module, other: torch.nn.Module, within: float = 1e-5) -> None:
    for given, expected in zip(net.parameters(), other.parameters()):
        torch.testing.assert_close(given, expected, atol=within, rtol=within)


class Forked(torch.nn.Module):
    """A model with one of two layers in use, one layer used twice, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.shared, self.left, self.right = (torch.nn.Linear(6, 6) for _ in range(3))
        self.frozen = torch.nn.Linear(6, 1).requires_grad_(False)

    def forward(self, given: torch.Tensor, left: bool) -> torch.Tensor:
        first = (self.left if left else self.right)(self.shared(given))
        return self.frozen(self.shared(first))
