"""Ranks of BytePS's asynchronous training don't wait for each other, and end with equal sums."""

from __future__ import annotations

import copy
import pickle
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import gradwire as gw  # noqa: E402
import gradwire.torch.byteps as bps  # noqa: E402


@pytest.fixture(autouse=True)
def enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BYTEPS_ENABLE_ASYNC", "1")


def optimizer_of(*parameters: Any, lr: float = 1.0) -> Any:
    named = [(f"p{at}", each) for at, each in enumerate(parameters)]
    return bps.DistributedOptimizer(torch.optim.SGD(parameters, lr), named)


def step(optimizer: Any, gradient: float) -> None:
    """Makes a step whose gradients have this value, and so does not depend on the parameters."""
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, gradient)
    optimizer.step()


def until(what: str, see: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not see():
        assert time.monotonic() < end, what
        time.sleep(0.002)


def test_all_ranks_end_with_the_sum_of_all_steps() -> None:
    """Whole numbers, so that every order of additions gives the same bits."""
    seed = gw.broadcast_object(random.randrange(1 << 32), 0, "seed")
    print("seed", seed)
    dice = random.Random(seed)
    for _ in range(6):
        shapes = [dice.sample(range(5), dice.randrange(3)) for _ in range(4)]
        dtypes = [torch.float32, torch.float64, torch.float32, torch.bfloat16]
        own = [
            torch.nn.Parameter(torch.full(shape, float(bps.rank()), dtype=dtype))
            for shape, dtype in zip(shapes, dtypes)
        ]
        optimizer = optimizer_of(*own)
        counts = [dice.randrange(8) for _ in range(bps.size())]
        pauses = random.Random(f"{seed} {bps.rank()}")
        for _ in range(counts[bps.rank()]):
            step(optimizer, float(bps.rank() + 1))
            time.sleep(pauses.random() * 0.02)
        optimizer.finish()
        expected = -sum(count * (rank + 1) for rank, count in enumerate(counts))
        for each in own:
            assert torch.equal(each.data, torch.full_like(each, expected)), (counts, each)


def test_a_rank_makes_steps_while_another_rests() -> None:
    weights = torch.nn.Parameter(torch.zeros(1000))
    optimizer = optimizer_of(weights)
    step(optimizer, 0.0)
    if bps.rank() > 0:
        for _ in range(40):
            step(optimizer, 1.0)
    # Rank 0 makes no step before all others have made theirs.
    gw.barrier()
    until("their steps arrive", lambda: bool(step(optimizer, 0.0)) or others_are_in(weights))
    optimizer.finish()
    assert torch.equal(weights.data, torch.full((1000,), 40.0 * (1 - bps.size())))


def others_are_in(weights: Any) -> bool:
    return bool(weights[0] == 40.0 * (1 - bps.size()))


@pytest.mark.parametrize("most", [1, 3])
def test_the_bound_holds_back_fast_ranks(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BYTEPS_ASYNC_MAX_STEPS_AHEAD", str(most))
    optimizer = optimizer_of(torch.nn.Parameter(torch.zeros(10)))
    made = torch.zeros(bps.size(), dtype=torch.int64)
    for count in range(1, 16):
        if bps.rank() == 0:
            time.sleep(0.01)
        step(optimizer, 1.0)
        exchange = optimizer._exchange
        assert count - exchange._slowest <= most
    made[bps.rank()] = 15
    # A rank that has finished is not waited for.
    if bps.rank() == 0:
        for _ in range(5):
            step(optimizer, 1.0)
    optimizer.finish()


def model() -> Any:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def loss_on(net: Any, examples: int, generator: Any) -> Any:
    inputs = torch.randn(examples, 6, generator=generator)
    return (net(inputs)[:, 0] - inputs @ torch.linspace(-1, 1, 6)).square().mean()


def train(net: Any, optimizer: Any, steps: int) -> None:
    generator = torch.Generator().manual_seed(bps.rank())
    for _ in range(steps):
        optimizer.zero_grad()
        loss_on(net, 16, generator).backward()
        optimizer.step()


def test_a_model_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ranks that never see each other's steps add the same progress several times, and so diverge.
    monkeypatch.setenv("BYTEPS_ASYNC_MAX_STEPS_AHEAD", "8")
    net = model()
    before = loss_on(net, 500, torch.Generator().manual_seed(99)).item()
    if bps.rank() > 0:
        with torch.no_grad():
            net[0].weight.zero_()  # the first step begins with the parameters of rank 0
    optimizer = torch.optim.Adam(net.parameters(), 0.02 / bps.size())
    optimizer = bps.DistributedOptimizer(optimizer, net.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.5)
    train(net, optimizer, 150 + 30 * bps.rank())
    scheduler.step()
    optimizer.finish()
    after = loss_on(net, 500, torch.Generator().manual_seed(99)).item()
    assert after < before / 3, (before, after)
    state = torch.cat([each.detach().flatten() for each in net.parameters()])
    assert torch.equal(bps.push_pull(state, average=False, name="sum"), state * bps.size())
    inside = pickle.loads(pickle.dumps(optimizer))
    assert type(inside) is torch.optim.Adam
    twin, copied = copy.deepcopy((net, optimizer))
    train(twin, copied, 3)
    copied.finish()


def test_other_changes_need_a_finish() -> None:
    weights = torch.nn.Parameter(torch.zeros(4))
    optimizer = optimizer_of(weights)
    step(optimizer, 1.0)
    kept = weights.detach().clone()
    with torch.no_grad():
        weights.fill_(7.0)
    with pytest.raises(ValueError, match=r"changed between two steps.*finish\(\) on all ranks"):
        step(optimizer, 1.0)
    with torch.no_grad():
        weights.copy_(kept)  # as after an evaluation with averaged weights
    step(optimizer, 1.0)
    optimizer.finish()
    assert torch.equal(weights.data, torch.full((4,), -2.0 * bps.size()))
    with torch.no_grad():
        weights.fill_(10.0)
    step(optimizer, 1.0)
    optimizer.finish()
    assert torch.equal(weights.data, torch.full((4,), 10.0 - bps.size()))


def test_two_optimizers_are_exchanged_apart() -> None:
    one, other = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    first, second = optimizer_of(one), optimizer_of(other, lr=2.0)
    order = [first, second] if bps.rank() == 0 else [second, first]
    for _ in range(3):
        step(first, 1.0)
        step(second, 1.0)
    for each in order:
        for _ in range(bps.rank()):
            step(each, 1.0)
    first.finish()
    second.finish()
    total = 3.0 * bps.size() + sum(range(bps.size()))
    assert torch.equal(one.data, torch.full((3,), -total)), one
    assert torch.equal(other.data, torch.full((3,), -2 * total)), other


def test_a_scaler_and_clipping_are_of_each_rank() -> None:
    weights = torch.nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.SGD([weights], 1.0, fused=True)
    optimizer = bps.DistributedOptimizer(optimizer, [("w", weights)])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for at in range(3):
        optimizer.zero_grad()
        factor = float("inf") if at == 1 and bps.rank() == 0 else 2.0
        scaler.scale((weights * factor).sum()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_value_([weights], 1.0)
        scaler.step(optimizer)
        scaler.update()
    optimizer.finish()
    assert torch.equal(weights.data, torch.full((8,), 1.0 - 3 * bps.size()))


def test_what_is_not_supported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(**options: Any) -> None:
        bps.DistributedOptimizer(torch.optim.SGD([torch.zeros(2)], 0.1), **options)

    for options, said in [
        ({"staleness": 1}, "BYTEPS_ENABLE_ASYNC: staleness=1"),
        ({"compression": bps.Compression.fp16}, "exchanged in full"),
    ]:
        with pytest.raises(ValueError, match=said):
            make(**options)
    with pytest.raises(ValueError, match="optimizer is a list"):
        bps.DistributedOptimizer([])  # type: ignore[arg-type]
    monkeypatch.setenv("BYTEPS_ASYNC_MAX_STEPS_AHEAD", "-1")
    with pytest.raises(ValueError, match="BYTEPS_ASYNC_MAX_STEPS_AHEAD=-1"):
        make()
    optimizer = torch.optim.SGD([torch.zeros(2)], 0.1)
    monkeypatch.setenv("BYTEPS_ASYNC_MAX_STEPS_AHEAD", "0")
    with pytest.raises(NotImplementedError, match="add parameters"):
        bps.DistributedOptimizer(optimizer).add_param_group({"params": [torch.zeros(1)]})
