"""DDP's buckets in shared memory: when the hook moves them, and correct gradients."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch as gradwire

Change = Callable[[nn.Module, int], None]


class Network(nn.Module):
    """A network with layers that only some steps use."""

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


def without_hook(view: bool = True, **options: bool) -> DistributedDataParallel:
    return DistributedDataParallel(
        Network(), gradient_as_bucket_view=view, bucket_cap_mb=0.004, **options
    )


def distributed(view: bool = True, **options: bool) -> DistributedDataParallel:
    model = without_hook(view, **options)
    model.register_comm_hook(gradwire.DdpHookState(), gradwire.ddp_hook)
    return model


def expected(step: int, used: int, before: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Returns the average over the ranks of the earlier gradients and those of the step."""
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
    """Sets gradients to other tensors in other memory."""
    model.zero_grad(set_to_none=False)
    for at, parameter in enumerate(model.parameters()):
        if parameter.grad is not None and at % 3 == step % 3:
            parameter.grad = torch.zeros_like(parameter)


def aliases(model: nn.Module, step: int) -> None:
    """Sets gradients to other tensors in the same memory, which DDP takes as its own."""
    model.zero_grad(set_to_none=False)
    for at, parameter in enumerate(model.parameters()):
        if parameter.grad is not None and at % 3 == step % 3:
            parameter.grad = parameter.grad.view_as(parameter)


def detached(model: nn.Module, step: int) -> None:
    """Sets gradients like ``aliases``, but ones that can't be moved."""
    model.zero_grad(set_to_none=False)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.detach()


def slices(model: nn.Module, step: int) -> None:
    """Sets gradients to parts of a larger tensor with its own memory."""
    model.zero_grad(set_to_none=False)
    for at, parameter in enumerate(model.parameters()):
        if parameter.grad is not None and at % 2 == step % 2:
            parameter.grad = torch.zeros(parameter.numel() + 8)[8:].view_as(parameter)


CHANGES = [forget, clear, in_turn, elsewhere, aliases, detached, slices]
OPTIONS = [{}, {"find_unused_parameters": True}, {"static_graph": True}]


@pytest.mark.parametrize("change", CHANGES)
def test_gradients_are_right_after_any_clearing(change: Change) -> None:
    model = distributed()
    for step in range(6):
        change(model, step)
        model(rows(step, dist.get_rank()), 6).sum().backward()
        compare(model, expected(step, 6, [None] * 12))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("view", [True, False])
def test_a_hook_that_comes_late(view: bool, change: Change, options: dict[str, bool]) -> None:
    """DDP has trained before: changed gradients keep their values when the buckets move."""
    model = without_hook(view, **options)
    for step in range(9):
        if step == 3:
            model.register_comm_hook(gradwire.DdpHookState(), gradwire.ddp_hook)
        if step != 1:
            change(model, step)
        elif change is not forget:
            clear(model, step)
        else:
            model.zero_grad()
        model(rows(step, dist.get_rank()), 6).sum().backward()
        compare(model, expected(step, 6, [None] * 12))


def test_buckets_with_other_views_stay_in_place() -> None:
    """If a program has its own tensors on a bucket's memory, the bucket does not move."""
    model = without_hook()
    for step in range(3):
        clear(model, step)
        model(rows(step, dist.get_rank()), 6).sum().backward()
    model.register_comm_hook(gradwire.DdpHookState(), gradwire.ddp_hook)
    flat = [
        parameter.grad.view(-1) for parameter in model.parameters() if parameter.grad is not None
    ]
    for step in range(3, 6):
        clear(model, step)
        model(rows(step, dist.get_rank()), 6).sum().backward()
        wanted = expected(step, 6, [None] * 12)
        compare(model, wanted)
        for seen, want in zip(flat, wanted):
            assert want is not None
            torch.testing.assert_close(seen, want.view(-1), atol=1e-6, rtol=1e-5)
    del flat, seen
    for step in range(6, 8):
        clear(model, step)
        copied = gradwire.gradient_bytes_copied()
        model(rows(step, dist.get_rank()), 6).sum().backward()
        compare(model, expected(step, 6, [None] * 12))
    assert gradwire.gradient_bytes_copied() == copied, (
        "nobody looks any more, and the buckets have moved"
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("view", [True, False])
def test_parameters_that_are_replaced_in_between(view: bool, options: dict[str, bool]) -> None:
    model = distributed(view, **options)
    for step in range(6):
        if step == 2:
            model.to("cpu").float()
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
            model.load_state_dict(
                {name: value.clone() for name, value in model.state_dict().items()}
            )
        in_turn(model, step)
        model(rows(step, dist.get_rank()), 6).sum().backward()
        compare(model, expected(step, 6, [None] * 12))


@pytest.mark.parametrize("view", [True, False])
def test_a_network_in_two_models_in_turn(view: bool) -> None:
    first = distributed(view)
    second = DistributedDataParallel(
        first.module, gradient_as_bucket_view=view, bucket_cap_mb=0.003
    )
    second.register_comm_hook(gradwire.DdpHookState(), gradwire.ddp_hook)
    for step in range(8):
        model = (first, second)[step % 2]
        model.zero_grad(set_to_none=step % 3 == 0)
        model(rows(step, dist.get_rank()), 6).sum().backward()
        compare(model, expected(step, 6, [None] * 12))


@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
@pytest.mark.parametrize("view", [True, False])
def test_several_passes(view: bool, options: dict[str, bool]) -> None:
    """Makes two passes within no_sync and two exchanged ones, without clearing in between."""
    model = distributed(view, **options)
    for step in range(4):
        in_turn(model, step)
        with model.no_sync():
            model(rows(step, dist.get_rank()), 6).sum().backward()
            model(rows(step + 20, dist.get_rank()), 6).sum().backward()
        wanted: list[torch.Tensor | None] = [None] * 12
        for pass_ in (step, step + 20, step + 40):
            wanted = expected(pass_, 6, wanted)
        model(rows(step + 40, dist.get_rank()), 6).sum().backward()
        compare(model, wanted)
        model(rows(step + 60, dist.get_rank()), 6).sum().backward()
        compare(model, expected(step + 60, 6, wanted))


@pytest.mark.parametrize("hook", [True, False])
@pytest.mark.parametrize("view", [True, False])
def test_ranks_that_run_out_of_data(view: bool, hook: bool) -> None:
    """PyTorch's join: a rank without data contributes zeros, and averages are over all ranks."""
    model = distributed(view) if hook else without_hook(view)
    for _ in range(2):
        with model.join():
            for step in range(3 + 2 * dist.get_rank()):
                model.zero_grad()
                model(rows(step, dist.get_rank()), 6).sum().backward()
                compare(model, left(step, dist.get_world_size()))


@pytest.mark.parametrize("view", [True, False])
def test_averages_over_the_ranks_that_are_left(view: bool) -> None:
    """DDP counts them with an allreduce, and waits for its work in C++."""
    model = without_hook(view)
    with model.join(divide_by_initial_world_size=False):
        for step in range(3 + 2 * dist.get_rank()):
            model.zero_grad()
            model(rows(step, dist.get_rank()), 6).sum().backward()
            compare(
                model, left(step, sum(step < 3 + 2 * rank for rank in range(dist.get_world_size())))
            )
    # The hook determines the averages, but must not wait forever.
    model = distributed(view)
    with model.join(divide_by_initial_world_size=False):
        for step in range(1 + dist.get_rank()):
            model.zero_grad()
            model(rows(step, dist.get_rank()), 6).sum().backward()


def left(step: int, divisor: int) -> list[torch.Tensor | None]:
    """Returns the inputs of the ranks with data in this step."""
    total = [torch.zeros_like(parameter) for parameter in Network().parameters()]
    for rank in range(dist.get_world_size()):
        if step < 3 + 2 * rank:
            alone = Network()
            alone(rows(step, rank), 6).sum().backward()
            for mean, parameter in zip(total, alone.parameters()):
                assert parameter.grad is not None
                mean += parameter.grad / divisor
    return list(total)


def test_moved_buckets_are_not_copied() -> None:
    model = distributed()
    for step in range(3):  # DDP rebuilds its buckets after the first
        model.zero_grad()
        model(rows(step, dist.get_rank()), 6).sum().backward()
    copied = gradwire.gradient_bytes_copied()
    addresses = [
        parameter.grad.data_ptr() for parameter in model.parameters() if parameter.grad is not None
    ]
    for clearing in (forget, clear):
        clearing(model, 0)
        model(rows(7, dist.get_rank()), 6).sum().backward()
        compare(model, expected(7, 6, [None] * 12))
    assert gradwire.gradient_bytes_copied() == copied
    assert [
        parameter.grad.data_ptr() for parameter in model.parameters() if parameter.grad is not None
    ] == addresses


@pytest.mark.parametrize("set_to_none", [True, False])
def test_unused_parameters(set_to_none: bool) -> None:
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


def test_accumulated_passes() -> None:
    model = distributed()
    for step in range(4):
        model.zero_grad(set_to_none=step % 2 == 0)
        with model.no_sync():
            model(rows(step, dist.get_rank()), 6).sum().backward()
        model(rows(step + 50, dist.get_rank()), 6).sum().backward()
        compare(model, expected(step + 50, 6, expected(step, 6, [None] * 12)))


def test_models_that_share_a_state() -> None:
    state = gradwire.DdpHookState()
    models = [
        DistributedDataParallel(Network(), gradient_as_bucket_view=view)
        for view in (True, False, True)
    ]
    for model in models:
        model.register_comm_hook(state, gradwire.ddp_hook)
    for step in range(4):
        for model in models:
            model.zero_grad()
            model(rows(step, dist.get_rank()), 6).sum().backward()
            compare(model, expected(step, 6, [None] * 12))


def of_one_shape() -> list[nn.Module]:
    torch.manual_seed(5)
    return [nn.Linear(8, 8), nn.Linear(8, 8)]


def with_the_default_state(networks: list[nn.Module], view: bool) -> list[DistributedDataParallel]:
    models = [
        DistributedDataParallel(copy.deepcopy(network), gradient_as_bucket_view=view)
        for network in networks
    ]
    for model in models:
        model.register_comm_hook(None, gradwire.ddp_hook)
    return models


def in_one_pass(models: list[nn.Module], step: int, rank: int) -> torch.Tensor:
    """Returns a loss in which one model's output is the other's input."""
    first, second = models
    return second(first(rows(step, rank)[:, :8])).square().sum()


def beside_each_other(models: list[nn.Module], step: int, rank: int) -> torch.Tensor:
    """Returns a loss of both models, whose order in the backward pass differs between ranks."""
    order = [0, 1] if rank % 2 == 0 else [1, 0]
    x = rows(step, rank)[:, :8]
    return torch.stack([models[at](x).square().sum() for at in order]).sum()


def compare_with_all(
    models: list[DistributedDataParallel],
    networks: list[nn.Module],
    loss: Callable[[list[nn.Module], int, int], torch.Tensor],
    step: int,
) -> None:
    ranks = dist.get_world_size()
    for rank in range(ranks):
        (loss(networks, step, rank) / ranks).backward()
    for model, network in zip(models, networks):
        compare(model, grads(network))
        network.zero_grad()


@pytest.mark.parametrize("view", [True, False])
def test_models_that_share_a_state_in_one_pass(view: bool) -> None:
    """The other ranks have started both models' buckets before the late rank."""
    networks = of_one_shape()
    models = with_the_default_state(networks, view)
    for step in range(4):
        for model in models:
            model.zero_grad()
        loss = in_one_pass(list(models), step, dist.get_rank())
        if dist.get_rank() == step % dist.get_world_size():
            time.sleep(0.5)
        loss.backward()
        compare_with_all(models, networks, in_one_pass, step)


@pytest.mark.parametrize("view", [True, False])
def test_models_sharing_a_state_are_kept_apart(view: bool) -> None:
    """Models of the same shape that share a state are not confused."""
    for step in range(3):
        # New models each time: in its second pass, DDP itself makes calls that must be ordered.
        networks = of_one_shape()
        models = with_the_default_state(networks, view)
        beside_each_other(list(models), step, dist.get_rank()).backward()
        compare_with_all(models, networks, beside_each_other, step)


def test_a_second_hook_is_refused_and_not_counted() -> None:
    models = with_the_default_state(of_one_shape(), True)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="once"):
            models[0].register_comm_hook(None, gradwire.ddp_hook)
    other = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="takes a DdpHookState or None"):
        other.register_comm_hook(dist.group.WORLD, gradwire.ddp_hook)
    networks = of_one_shape()
    models = with_the_default_state(networks, True)
    in_one_pass(list(models), 1, dist.get_rank()).backward()
    compare_with_all(models, networks, in_one_pass, 1)


@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_sparse_gradients(compression: str) -> None:
    """Buckets of sparse gradients are exchanged by their rows."""
    torch.manual_seed(3)
    alone = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1))
    state = gradwire.DdpHookState(compression=getattr(gradwire.Compression, compression))
    model = DistributedDataParallel(copy.deepcopy(alone))
    model.register_comm_hook(state, gradwire.ddp_hook)
    size = dist.get_world_size()
    given = torch.arange(3 * size).remainder(9).view(size, 3)
    alone(given).mean().backward()
    for _ in range(2):
        model.zero_grad()
        model(given[dist.get_rank()]).mean().backward()
        own = model.module[0].weight.grad
        assert own.is_sparse
        torch.testing.assert_close(
            own.to_dense(), alone[0].weight.grad.to_dense(), rtol=0.02, atol=1e-3
        )


def test_a_deleted_model_frees_its_memory() -> None:
    def in_use() -> int:
        model = distributed()
        for step in range(3):
            model.zero_grad()
            model(rows(step, dist.get_rank()), 6).sum().backward()
        return min(p.grad.data_ptr() for p in model.parameters() if p.grad is not None)

    # Freed memory is reused; otherwise, each model would use new memory.
    assert len({in_use() for _ in range(6)}) < 6
