"""A small training for the tests of epochs, and the same one in one process."""

from __future__ import annotations

from typing import Any

import torch

import gradwire.torch as hvd


def last() -> bool:
    return hvd.rank() == hvd.size() - 1


def made(seed: int, norm: bool = False, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(4, 6), torch.nn.Linear(6, 2)]
    if norm:
        layers.insert(1, hvd.SyncBatchNorm(6))
    model = torch.nn.Sequential(*layers)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    named = model.named_parameters()
    return model, hvd.DistributedOptimizer(inner, named_parameters=named, **options)


def batch_of(step: int, rank: int) -> Any:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def backward(model: Any, step: int) -> None:
    model(batch_of(step, hvd.rank())).square().mean().backward()


def expected(seed: int, steps: list[int]) -> Any:
    """The parameters after these steps with the batches of all ranks, in one process."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in steps:
        optimizer.zero_grad()
        for rank in range(hvd.size()):
            (model(batch_of(step, rank)).square().mean() / hvd.size()).backward()
        optimizer.step()
    return model


def same(model: Any, other: Any) -> None:
    for one, two in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(one, two)


def all_alike(model: Any) -> None:
    mine = [parameter.tolist() for parameter in model.parameters()]
    assert all(each == mine for each in hvd.allgather_object(mine))
