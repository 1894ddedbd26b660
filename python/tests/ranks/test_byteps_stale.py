"""With ``staleness=1``, each step applies the average gradients of the step before."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import gradwire.torch.byteps as bps  # noqa: E402


def model() -> Any:
    torch.manual_seed(5)
    net = torch.nn.ModuleDict(
        {name: torch.nn.Linear(5, 3) for name in ("always", "sometimes", "never")}
    )
    net["narrow"] = torch.nn.Linear(5, 3).bfloat16()
    return net


def loss_of(net: Any, step: int, rank: int) -> Any:
    """The loss of one rank; the last rank leaves a layer out in every second step."""
    inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(100 * step + rank))
    loss = net["always"](inputs).square().mean()
    loss = loss + net["narrow"](inputs.bfloat16()).float().square().mean()
    if rank != bps.size() - 1 or step % 2 == 0:
        loss = loss + net["sometimes"](inputs).square().mean()
    return loss


def optimizer_of(net: Any) -> Any:
    return torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=0.1)


def trained_alone(steps: int, warmup: int) -> Any:
    net = model()
    optimizer = optimizer_of(net)
    before: list[Any] | None = None
    for step in range(steps):
        sums: dict[str, Any] = {}
        for rank in range(bps.size()):
            net.zero_grad()
            loss_of(net, step, rank).backward()
            for name, each in net.named_parameters():
                if each.grad is not None:
                    sums[name] = sums.get(name, 0) + each.grad.float()
        averages = [
            (sums[name] / bps.size()).to(each.dtype) if name in sums else None
            for name, each in net.named_parameters()
        ]
        ready = averages
        if step >= warmup:
            ready, before = before, averages
        if ready is not None:
            for each, average in zip(net.parameters(), ready):
                each.grad = average
            optimizer.step()
    return net


@pytest.mark.parametrize("warmup", [0, 2])
def test_training_equals_one_process(warmup: int) -> None:
    net = model()
    optimizer = bps.DistributedOptimizer(
        optimizer_of(net), net.named_parameters(), staleness=1, pipesgd_warmup_iter=warmup
    )
    for step in range(7):
        optimizer.zero_grad()
        loss_of(net, step, bps.rank()).backward()
        own = [each.grad for each in net.parameters()]
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            assert optimizer.step() is None
        assert all(each.grad is grad for each, grad in zip(net.parameters(), own))
    alone = trained_alone(7, warmup)
    for (name, mine), expected in zip(net.named_parameters(), alone.parameters()):
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if mine.dtype == torch.bfloat16 else {}
        torch.testing.assert_close(mine.data, expected.data, msg=name, **tolerance)
    assert torch.equal(net["never"].weight, model()["never"].weight), "it has no gradient"


def test_closures_copies_and_compression() -> None:
    weights = torch.nn.Parameter(torch.zeros(300))
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD([weights], 1.0), staleness=1, compression=bps.Compression.fp16
    )

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (weights * (bps.rank() + 1)).sum()
        loss.backward()
        return loss

    average = (bps.size() + 1) / 2
    for step in range(3):
        assert optimizer.step(closure).item() == pytest.approx(
            -300 * max(step - 1, 0) * average * (bps.rank() + 1)
        )
    assert torch.equal(weights.data, torch.full((300,), -2 * average))
    twin, copied = copy.deepcopy((weights, optimizer))
    for _ in range(2):
        copied.zero_grad()
        (twin * (bps.rank() + 1)).sum().backward()
        copied.step()
    assert torch.equal(twin.data, torch.full((300,), -3 * average))
    assert torch.equal(weights.data, torch.full((300,), -2 * average))


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_decides_for_all_ranks(fused: bool) -> None:
    weights = torch.nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.SGD([weights], 1.0, fused=fused)
    optimizer = bps.DistributedOptimizer(optimizer, staleness=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    for step in range(6):
        optimizer.zero_grad()
        # One rank has an infinity in the third step, which no rank makes.
        factor = float("inf") if step == 2 and bps.rank() == bps.size() - 1 else bps.rank() + 1.0
        scaler.scale((weights * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    average = (bps.size() + 1) / 2
    assert torch.equal(weights.data, torch.full((8,), -4 * average))
    assert scaler.get_scale() == 2.0
