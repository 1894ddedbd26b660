"""DistributedOptimizer's gradients: their memory, the order of sending, and all kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from small_training import (  # noqa: E402
    Forked,
    alone,
    batch,
    bits_are_the_same_everywhere,
    distributed,
    halves,
    loss_of,
    model,
    parameters_are_near,
    part,
    sgd,
)

import gradwire.torch as hvd  # noqa: E402
from gradwire.torch import _checks  # noqa: E402


def test_gradients_stay_in_shared_memory() -> None:
    if hvd.size() == 1:
        pytest.skip("one rank exchanges nothing")
    net = model()
    optimizer = distributed(net)

    def step(clear: Callable[[], None]) -> None:
        clear()
        loss_of(net, *map(part, batch(0))).backward()
        optimizer.step()

    step(lambda: None)
    # Addresses, because gradients that the program keeps don't move.
    places = [parameter.grad.data_ptr() for parameter in net.parameters()]
    copied = hvd.gradient_bytes_copied()
    step(optimizer.zero_grad)
    step(lambda: optimizer.zero_grad(set_to_none=False))
    step(lambda: net.zero_grad(set_to_none=False))
    assert [p.grad.data_ptr() for p in net.parameters()] == places
    assert hvd.gradient_bytes_copied() == copied
    step(net.zero_grad)  # drops them, so they are copied back to their places
    assert [p.grad.data_ptr() for p in net.parameters()] == places
    assert hvd.gradient_bytes_copied() == copied + sum(p.numel() * 4 for p in net.parameters())


def test_gradients_are_sent_in_backward_order(monkeypatch: pytest.MonkeyPatch) -> None:
    if hvd.size() == 1:
        pytest.skip("one rank exchanges nothing")
    # Gradients that are compared by value are sent later.
    monkeypatch.setattr(_checks, "is_due", lambda *_: False)
    net = model()
    optimizer = distributed(net)
    optimizer.step()
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(net, *map(part, batch(0))).backward()
        # All are submitted before the first wait, the last layer first.
        started = [
            handle.name.rpartition("optimizer")[2].split(".")[1]
            for handle, _ in optimizer._exchange.handles
        ]
        assert started == ["4", "4", "2", "2", "0", "0"]
        optimizer.step()
        assert not optimizer._exchange.in_flight


def test_passes_are_accumulated() -> None:
    expected, _ = alone(sgd, steps=2)
    net = model()
    optimizer = distributed(net, backward_passes_per_step=2)
    for step in range(2):
        optimizer.zero_grad()
        for given, wanted in halves(step):
            (loss_of(net, given, wanted) / 2).backward()
        optimizer.step()
    parameters_are_near(net, expected)
    if hvd.size() > 1:
        for _ in range(2):
            loss_of(net, *batch(0)).backward()
        with pytest.raises(AssertionError, match="backward_passes_per_step=2"):
            loss_of(net, *batch(0)).backward()
        with pytest.raises(AssertionError, match="still being exchanged"):
            optimizer.zero_grad()
        # The third pass has added to a gradient in flight.
        with pytest.raises(AssertionError, match="was changed while"):
            optimizer.synchronize()
        optimizer.zero_grad()


def test_clipping() -> None:
    net, lone = model(), model()
    optimizer, ours = sgd(lone), distributed(net)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(lone, *batch(step)).backward()
        expected = torch.nn.utils.clip_grad_norm_(lone.parameters(), 0.1)
        optimizer.step()
        ours.zero_grad()
        loss_of(net, *map(part, batch(step))).backward()
        ours.synchronize()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        with ours.skip_synchronize():
            ours.step()
        torch.testing.assert_close(norm, expected)
    parameters_are_near(net, lone)


def test_exchanged_gradients_are_not_sent_again() -> None:
    net, lone = model(), model()
    ours = distributed(net, op=hvd.Sum)
    plain = sgd(lone)
    ours.zero_grad()
    loss_of(net, *map(part, batch(0))).backward()
    ours.synchronize()
    ours.step()
    (loss_of(lone, *batch(0)) * hvd.size()).backward()
    plain.step()
    parameters_are_near(net, lone)
    with pytest.raises(NotImplementedError, match="not be exchanged"):
        ours.add_param_group({"params": [torch.zeros(1)]})


@pytest.mark.parametrize(("count", "shape"), [(1025, (1,)), (1000, (1, 1, 1, 1))])
def test_groups_larger_than_a_request(
    count: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_checks, "is_due", lambda *_: False)
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for _ in range(count)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), groups=1)
    optimizer.step()
    for _ in range(2):
        optimizer.zero_grad()
        (torch.cat(parameters).sum() * (hvd.rank() + 1.0)).backward()
        if hvd.size() > 1:
            assert len(optimizer._exchange.handles) == 2
        optimizer.step()
    assert {parameter.item() for parameter in parameters} == {-(hvd.size() + 1.0)}


def test_unused_shared_and_frozen_layers() -> None:
    net = Forked()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1),
        [(n, p) for n, p in net.named_parameters() if p.requires_grad],
    )
    for step in range(3):
        optimizer.zero_grad()
        net(part(batch(step)[0]), left=hvd.rank() == 0).sum().backward()
        optimizer.step()
    bits_are_the_same_everywhere(net)
    assert net.frozen.weight.grad is None
    if hvd.size() > 1:
        assert net.right.weight.grad is not None and net.right.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("dense", [False, True])
def test_sparse_gradients(dense: bool) -> None:
    def net() -> torch.nn.Module:
        torch.manual_seed(2)
        return torch.nn.EmbeddingBag(10, 4, mode="sum", sparse=True)

    words = (torch.arange(3 * hvd.size()) * 7 % 10).view(-1, 3)
    lone, ours = net(), net()
    plain = torch.optim.SGD(lone.parameters(), lr=0.5)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(ours.parameters(), lr=0.5), ours.named_parameters(), sparse_as_dense=dense
    )
    for _ in range(2):
        plain.zero_grad()
        (lone(words).square().sum() / hvd.size()).backward()
        plain.step()
        optimizer.zero_grad()
        ours(words[hvd.rank() : hvd.rank() + 1]).square().sum().backward()
        optimizer.step()
    parameters_are_near(ours, lone)


def test_sparse_gradients_that_one_rank_lacks() -> None:
    if hvd.size() == 1:
        pytest.skip("one rank exchanges nothing")
    torch.manual_seed(2)
    net = torch.nn.ModuleList(
        [torch.nn.EmbeddingBag(10, 4, mode="sum", sparse=True) for _ in range(2)]
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.5), net.named_parameters()
    )
    words = torch.tensor([[1, hvd.rank()]])
    for step in range(2):
        optimizer.zero_grad()
        both = step == 0 or hvd.rank() == 0  # later, only rank 0 uses the second one
        sum(part(words).sum() for part in net[: 2 if both else 1]).backward()
        optimizer.step()
    bits_are_the_same_everywhere(net)
    # The ranks that have the first gradient know its kind and report it to the others.
    net = torch.nn.EmbeddingBag(10, 4, mode="sum", sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.5), net.named_parameters()
    )
    if hvd.rank() == 0:
        net(words).sum().backward()
    optimizer.synchronize()
    assert net.weight.grad.is_sparse and net.weight.grad.to_dense()[1].tolist() == pytest.approx(
        [1 / hvd.size()] * 4
    )


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("groups", [None, 1])
def test_frozen_between_forward_and_backward(groups: int | None, op: Any, sent: str) -> None:
    """PyTorch calls the hooks of the parameter, although it computes no gradient."""
    one, two = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    plain = torch.optim.SGD([one, two], lr=0.5, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(plain, [("a", one), ("b", two)], op=op, groups=groups)
    parts = 1 if op == hvd.Average else hvd.size()
    for step in range(6):
        optimizer.zero_grad()
        loss = (one + two).sum() / parts
        one.requires_grad_(step % 2 == 0)
        loss.backward()
        one.requires_grad_(True)
        optimizer.step()

    def expected(used: int) -> float:
        value, velocity = 1.0, 0.0
        for step in range(6):
            if step % used == 0:
                velocity = 0.5 * velocity + 1.0
                value -= 0.5 * velocity
        return value

    torch.testing.assert_close(one.detach(), torch.full((2,), expected(2)))
    torch.testing.assert_close(two.detach(), torch.full((2,), expected(1)))
