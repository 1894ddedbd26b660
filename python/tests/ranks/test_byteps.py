"""BytePS's interface gives the averages of all ranks, or says what it does not have."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import gradwire.torch.byteps as bps  # noqa: E402


def own(rank: int | None = None) -> Any:
    return torch.arange(6.0) * ((bps.rank() if rank is None else rank) + 1)


def total() -> Any:
    return sum(own(rank) for rank in range(bps.size()))


@pytest.mark.parametrize("average", [True, False])
def test_push_pull(average: bool) -> None:
    expected = total() / bps.size() if average else total()
    tensor = own()
    for priority in (0, -7, 9):
        handle = bps.push_pull_async(tensor, average, "a", priority=priority)
        torch.testing.assert_close(bps.synchronize(handle), expected)
    assert torch.equal(tensor, own()), "it is not modified"
    torch.testing.assert_close(bps.push_pull(tensor, average, "b", 3, -1), expected)
    half = bps.push_pull(tensor, average, "c", compression=bps.Compression.fp16)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, expected, rtol=1e-2, atol=1e-2)
    bps.declare("d")
    assert bps.push_pull_inplace(tensor, average, "d") is tensor
    torch.testing.assert_close(tensor, expected)


def test_a_result_has_a_gradient() -> None:
    tensor = own().requires_grad_()
    (bps.push_pull(tensor, name="loss") * (bps.rank() + 1)).sum().backward()
    torch.testing.assert_close(tensor.grad, torch.full((6,), (bps.size() + 1) / 2))


def test_the_speed_is_told() -> None:
    bps.get_pushpull_speed()
    bps.push_pull(torch.ones(1 << 18), name="large")
    _, speed = bps.get_pushpull_speed()
    assert speed > 0


def test_what_does_not_exist_is_refused() -> None:
    for call, said in [
        (lambda: bps.push_pull(own()), "push_pull needs a name"),
        (lambda: bps.push_pull_inplace(own(), name="x", staleness=1), "staleness=1"),
        (lambda: bps.push_pull_async(own(), name="x", priority=1 << 31), "priority=2147483648"),
        (lambda: bps.push_pull_async(own(), name="x", priority=0.5), "priority=0.5"),
        (lambda: bps.declare("x", byteps_compressor_type="topk"), "byteps_compressor_type"),
        (bps.suspend, "gradwire run --min-np"),
        (lambda: bps.resume(2, 1), "gradwire run --min-np"),
    ]:
        with pytest.raises(ValueError, match=said):
            call()
    for options, said in [
        ({"staleness": 2}, "staleness=2: it must be 0 or 1"),
        ({"staleness": 1, "pipesgd_warmup_iter": -1}, "pipesgd_warmup_iter=-1"),
        ({"compression_params": {"compressor": "topk", "ef": ""}}, "compressor='topk'"),
        ({"compression_params": {"fp61": True}}, "unknown keys in compression_params: 'fp61'"),
    ]:
        net = torch.nn.Linear(2, 1)
        with pytest.raises(ValueError, match=said):
            bps.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), **options)


def model() -> Any:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))


def batch(step: int, rank: int) -> Any:
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def trained_alone(steps: int) -> Any:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        losses = [net(batch(step, rank)).square().mean() for rank in range(bps.size())]
        (sum(losses) / bps.size()).backward()
        optimizer.step()
    return net


@pytest.mark.parametrize("params", [None, {"compressor": "", "k": 1, "fp16": False}])
def test_training_equals_one_process(params: Any) -> None:
    net = model()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(bps.rank())
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), 0.1, momentum=0.9),
        named_parameters=net.named_parameters(),
        compression_params=params,
    )
    bps.broadcast_parameters(net.state_dict(), root_rank=0)
    bps.broadcast_optimizer_state(optimizer, root_rank=0)
    for step in range(4):
        optimizer.zero_grad()
        net(batch(step, bps.rank())).square().mean().backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
    alone = trained_alone(4)
    for mine, expected in zip(net.parameters(), alone.parameters()):
        torch.testing.assert_close(mine.data, expected.data)


def test_ddp_equals_one_process() -> None:
    net = model()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(bps.rank())
    ddp = bps.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        if step == 2:
            with ddp.no_sync():
                (0 * ddp(batch(step, bps.rank())).sum()).backward()
        ddp(batch(step, bps.rank())).square().mean().backward()
        optimizer.step()
    alone = trained_alone(4)
    for mine, expected in zip(net.parameters(), alone.parameters()):
        torch.testing.assert_close(mine.data, expected.data)
