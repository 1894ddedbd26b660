"""DDP's buckets in shared memory: where the hook moves them, and that whatever is done to gradients stays right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch as gradwire

Change = Callable[[nn.Module, int], None]


class Network(nn.Module):
    """Layers that are used in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.layers = nn.ModuleList([nn.Linear(20, 20) for _ in range(6)])

    def forward(self, x: torch.Tensor, used: int) -> torch.Tensor:
        for layer in list(self.layers)[:used]:
            x = torch.tanh(layer(x))
        return x


def rows(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 20, generator=torch.Generator().manual_seed(100 * step + rank))


def distributed(**options: bool) -> DistributedDataParallel:
    model = DistributedDataParallel(Network(), gradient_as_bucket_view=True, bucket_cap_mb=0.004, **options)
    model.register_comm_hook(gradwire.DdpHookState(), gradwire.ddp_hook)
    return model


def expected(step: int, used: int, before: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The average over the ranks of what was there before and what the step adds."""
    total: list[torch.Tensor | None] = [None if b is None else b.clone() for b in before]
    for rank in range(dist.get_world_size()):
        model = Network()
        model(rows(step, rank), used).sum().backward()
        for at, parameter in enumerate(model.parameters()):
            if parameter.grad is not None:
                mean, so_far = parameter.grad / dist.get_world_size(), total[at]
                total[at] = mean if so_far is None else so_far + mean
    return total


def grads(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def compare(model: nn.Module, wanted: list[torch.Tensor | None]) -> None:
    for parameter, want in zip(model.parameters(), wanted):
        if want is not None:
            torch.testing.assert_close(parameter.grad, want, atol=1e-6, rtol=1e-5)


def forget(model: nn.Module, step: int) -> None:
    model.zero_grad(set_to_none=True)


def clear(model: nn.Module, step: int) -> None:
    model.zero_grad(set_to_none=False)


def in_turn(model: nn.Module, step: int) -> None:
    model.zero_grad(set_to_none=step % 2 == 0)


def elsewhere(model: nn.Module, step: int) -> None:
    """Gradients that are other tensors, in other memory."""
    model.zero_grad(set_to_none=False)
    for at, parameter in enumerate(model.parameters()):
        if parameter.grad is not None and at % 3 == step % 3:
            parameter.grad = torch.zeros_like(parameter)


def aliases(model: nn.Module, step: int) -> None:
    """Gradients that are other tensors in the same memory, which DDP does not tell from its own."""
    model.zero_grad(set_to_none=False)
    for at, parameter in enumerate(model.parameters()):
        if parameter.grad is not None and at % 3 == step % 3:
            parameter.grad = parameter.grad.view_as(parameter)


def detached(model: nn.Module, step: int) -> None:
    """As aliases, but such as can't be moved."""
    model.zero_grad(set_to_none=False)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.detach()


@pytest.mark.parametrize("change", [forget, clear, in_turn, elsewhere, aliases, detached])
def test_gradients_are_right_however_they_are_cleared(change: Change) -> None:
    model = distributed()
    for step in range(6):
        change(model, step)
        model(rows(step, dist.get_rank()), 6).sum().backward()
        compare(model, expected(step, 6, [None] * 12))


def test_nothing_is_copied_once_the_buckets_have_moved() -> None:
    model = distributed()
    for step in range(3):  # DDP makes its buckets anew after the first
        model.zero_grad()
        model(rows(step, dist.get_rank()), 6).sum().backward()
    copied = gradwire.gradient_bytes_copied()
    addresses = [parameter.grad.data_ptr() for parameter in model.parameters() if parameter.grad is not None]
    for clearing in (forget, clear):
        clearing(model, 0)
        model(rows(7, dist.get_rank()), 6).sum().backward()
        compare(model, expected(7, 6, [None] * 12))
    assert gradwire.gradient_bytes_copied() == copied
    assert [parameter.grad.data_ptr() for parameter in model.parameters() if parameter.grad is not None] == addresses


@pytest.mark.parametrize("set_to_none", [True, False])
def test_parameters_that_a_step_does_not_use(set_to_none: bool) -> None:
    model = distributed(find_unused_parameters=True)
    for step, used in enumerate([6, 6, 3, 6, 2, 5, 6]):
        model.zero_grad(set_to_none=set_to_none)
        model(rows(step, dist.get_rank()), used).sum().backward()
        compare(model, expected(step, used, [None] * 12))


def test_ranks_that_use_different_parameters() -> None:
    model = distributed(find_unused_parameters=True)
    for step in range(5):
        model.zero_grad()
        uses = [6 if step < 2 else 3 + (rank + step) % 3 for rank in range(dist.get_world_size())]
        model(rows(step, dist.get_rank()), uses[dist.get_rank()]).sum().backward()
        total = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for rank, used in enumerate(uses):
            alone = Network()
            alone(rows(step, rank), used).sum().backward()
            for mean, parameter in zip(total, alone.parameters()):
                if parameter.grad is not None:
                    mean += parameter.grad / dist.get_world_size()
        for parameter, mean in zip(model.parameters(), total):
            if mean.any():
                torch.testing.assert_close(parameter.grad, mean, atol=1e-6, rtol=1e-5)


def test_passes_that_are_added_up() -> None:
    model = distributed()
    for step in range(4):
        model.zero_grad(set_to_none=step % 2 == 0)
        with model.no_sync():
            model(rows(step, dist.get_rank()), 6).sum().backward()
        model(rows(step + 50, dist.get_rank()), 6).sum().backward()
        compare(model, expected(step + 50, 6, expected(step, 6, [None] * 12)))


def test_models_that_share_a_state() -> None:
    state = gradwire.DdpHookState()
    models = [DistributedDataParallel(Network(), gradient_as_bucket_view=view) for view in (True, False, True)]
    for model in models:
        model.register_comm_hook(state, gradwire.ddp_hook)
    for step in range(4):
        for model in models:
            model.zero_grad()
            model(rows(step, dist.get_rank()), 6).sum().backward()
            compare(model, expected(step, 6, [None] * 12))


def test_a_model_that_goes_gives_its_memory_back() -> None:
    def in_use() -> int:
        model = distributed()
        for step in range(3):
            model.zero_grad()
            model(rows(step, dist.get_rank()), 6).sum().backward()
        return min(p.grad.data_ptr() for p in model.parameters() if p.grad is not None)

    # Memory that is given back is given out again: without that, each model would have a place of its own.
    assert len({in_use() for _ in range(6)}) < 6
