"""DistributedOptimizer: the same training as that of one process with the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import gradwire.torch as hvd  # noqa: E402

STEPS = 6
PER_RANK = 4


def model(seed: int = 3) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(100 + step)
    given = torch.randn(PER_RANK * hvd.size(), 6, generator=random)
    return given, given.square().sum(1, keepdim=True)


def part(whole: torch.Tensor) -> torch.Tensor:
    return whole[PER_RANK * hvd.rank() :][:PER_RANK]


def loss_of(net: torch.nn.Module, given: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(net(given), wanted)


def sgd(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


def adam(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.01)


def alone(make: Callable[[Any], Any], steps: int = STEPS) -> tuple[torch.nn.Module, list[float]]:
    """One process with the whole batch."""
    net = model()
    optimizer, losses = make(net), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(net, *batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return net, losses


def together(make: Callable[[Any], Any], **options: Any) -> tuple[torch.nn.Module, list[float], Any]:
    """All ranks with their parts of it; the ranks' models begin differently."""
    net = model(seed=3 if hvd.rank() == 0 else 50 + hvd.rank())
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(make(net), named_parameters=net.named_parameters(), **options)
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


@pytest.mark.parametrize("make", [sgd, adam])
def test_the_loss_is_that_of_one_process(make: Callable[[Any], Any]) -> None:
    expected, losses = alone(make)
    net, ours, optimizer = together(make)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(losses), atol=1e-5, rtol=1e-5)
    parameters_are_near(net, expected)
    bits_are_the_same_everywhere(net)
    assert isinstance(optimizer, type(make(model())))


@pytest.mark.parametrize(
    "options",
    [
        {"groups": 2},
        {"gradient_predivide_factor": 2.0},
        {"gradient_predivide_factor": 2.0, "groups": 3},
        {"op": hvd.Average, "sparse_as_dense": True},
    ],
)
def test_every_way_of_exchange(options: dict[str, Any]) -> None:
    expected, _ = alone(sgd)
    net, _, _ = together(sgd, **options)
    parameters_are_near(net, expected)
    bits_are_the_same_everywhere(net)


@pytest.mark.parametrize("small", ["fp16", "bf16"])
def test_compressed_gradients(small: str) -> None:
    expected, _ = alone(sgd)
    net, _, _ = together(sgd, compression=getattr(hvd.Compression, small))
    parameters_are_near(net, expected, within=0.05)
    bits_are_the_same_everywhere(net)


def test_gradients_stay_in_shared_memory() -> None:
    if hvd.size() == 1:
        pytest.skip("one rank exchanges nothing")
    net = model()
    optimizer = hvd.DistributedOptimizer(sgd(net), named_parameters=net.named_parameters())

    def step(clear: Callable[[], None]) -> None:
        clear()
        loss_of(net, *map(part, batch(0))).backward()
        optimizer.step()

    step(lambda: None)
    places = [parameter.grad for parameter in net.parameters()]
    copied = hvd.gradient_bytes_copied()
    step(optimizer.zero_grad)
    step(lambda: optimizer.zero_grad(set_to_none=False))
    step(lambda: net.zero_grad(set_to_none=False))
    assert all(p.grad is place for p, place in zip(net.parameters(), places))
    assert hvd.gradient_bytes_copied() == copied
    step(net.zero_grad)  # forgets them: they are copied back to their places
    assert all(p.grad is place for p, place in zip(net.parameters(), places))
    assert hvd.gradient_bytes_copied() == copied + sum(p.numel() * 4 for p in net.parameters())


def test_gradients_leave_in_the_order_of_the_backward_pass() -> None:
    if hvd.size() == 1:
        pytest.skip("one rank exchanges nothing")
    net = model()
    optimizer = hvd.DistributedOptimizer(sgd(net), named_parameters=net.named_parameters())
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(net, *map(part, batch(0))).backward()
        # All are on their way before anybody waits, the last layer first.
        started = [handle.name.rpartition("optimizer")[2].split(".")[1] for handle, _ in optimizer._exchange.handles]
        assert started == ["4", "4", "2", "2", "0", "0"]
        optimizer.step()
        assert not optimizer._exchange.in_flight


def test_passes_are_added_up() -> None:
    expected, _ = alone(sgd, steps=2)
    net = model()
    optimizer = hvd.DistributedOptimizer(sgd(net), named_parameters=net.named_parameters(), backward_passes_per_step=2)
    for step in range(2):
        optimizer.zero_grad()
        for half in range(2):
            given, wanted = (part(whole)[2 * half :][:2] for whole in batch(step))
            (loss_of(net, given, wanted) / 2).backward()
        optimizer.step()
    parameters_are_near(net, expected)
    if hvd.size() > 1:
        for _ in range(2):
            loss_of(net, *batch(0)).backward()
        with pytest.raises(AssertionError, match="backward_passes_per_step=2"):
            loss_of(net, *batch(0)).backward()
        with pytest.raises(AssertionError, match="on their way"):
            optimizer.zero_grad()
        optimizer.synchronize()
        optimizer.zero_grad()


def test_clipping() -> None:
    net, lone = model(), model()
    optimizer, ours = sgd(lone), hvd.DistributedOptimizer(sgd(net), net.named_parameters())
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


def test_what_is_exchanged_is_not_exchanged_again() -> None:
    net, lone = model(), model()
    ours = hvd.DistributedOptimizer(sgd(net), net.named_parameters(), op=hvd.Sum)
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


@pytest.mark.parametrize("by_hand", [False, True])
def test_scaled_gradients(by_hand: bool) -> None:
    try:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    except (AttributeError, TypeError):
        pytest.skip("this PyTorch has no scaler for the processor")
    net, (expected, _) = model(), alone(sgd)
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(net, *map(part, batch(step)))).backward()
        if by_hand:
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
    parameters_are_near(net, expected)


class Forked(torch.nn.Module):
    """Uses one of two layers, one layer twice, and one that does not learn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.shared, self.left, self.right = (torch.nn.Linear(6, 6) for _ in range(3))
        self.frozen = torch.nn.Linear(6, 1).requires_grad_(False)

    def forward(self, given: torch.Tensor, left: bool) -> torch.Tensor:
        first = (self.left if left else self.right)(self.shared(given))
        return self.frozen(self.shared(first))


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
    net = torch.nn.ModuleList([torch.nn.EmbeddingBag(10, 4, mode="sum", sparse=True) for _ in range(2)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.5), net.named_parameters())
    words = torch.tensor([[1, hvd.rank()]])
    for step in range(2):
        optimizer.zero_grad()
        both = step == 0 or hvd.rank() == 0  # then only rank 0 uses the second one
        sum(part(words).sum() for part in net[: 2 if both else 1]).backward()
        optimizer.step()
    bits_are_the_same_everywhere(net)
    # Which kind the first one is going to be is known to those that have it.
    net = torch.nn.EmbeddingBag(10, 4, mode="sum", sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.5), net.named_parameters())
    if hvd.rank() == 0:
        net(words).sum().backward()
    with pytest.raises(hvd.Disagreement, match="collective"):
        optimizer.synchronize()


def test_two_optimizers_with_the_same_names() -> None:
    one, two = model(1), model(2)
    first = hvd.DistributedOptimizer(sgd(one), one.named_parameters())
    second = hvd.DistributedOptimizer(sgd(two), two.named_parameters())
    for step in range(2):
        first.zero_grad(), second.zero_grad()
        given, wanted = map(part, batch(step))
        (loss_of(one, given, wanted) + loss_of(two, given, wanted)).backward()
        first.step(), second.step()
    bits_are_the_same_everywhere(one)
    bits_are_the_same_everywhere(two)


def test_closures() -> None:
    expected, _ = alone(sgd, steps=2)
    net = model()
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters())
    for step in range(2):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(net, *map(part, batch(step)))
            loss.backward()
            return loss

        optimizer.step(closure)
    parameters_are_near(net, expected)


def adasum_by_hand(make: Callable[[Any], Any], steps: int, scale: float = 1.0) -> torch.nn.Module:
    """Each rank's own step, and what it changes combined."""
    net = model()
    optimizer = make(net)
    for step in range(steps):
        optimizer.zero_grad()
        (loss_of(net, *map(part, batch(step))) * scale).backward()
        before = [parameter.detach().clone() for parameter in net.parameters()]
        optimizer.step()
        with torch.no_grad():
            for at, (parameter, old) in enumerate(zip(net.parameters(), before)):
                change = hvd.allreduce(parameter - old, op=hvd.Adasum, name=f"by hand {at}")
                parameter.copy_(old + change)
    return net


@pytest.mark.parametrize("make", [sgd, adam])
def test_adasum(make: Callable[[Any], Any]) -> None:
    expected = adasum_by_hand(make, STEPS)
    net = model()
    optimizer = hvd.DistributedOptimizer(make(net), net.named_parameters(), op=hvd.Adasum)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, *map(part, batch(step))).backward()
        optimizer.step()
    parameters_are_near(net, expected)
    bits_are_the_same_everywhere(net)
    with pytest.raises(AssertionError, match="Adasum"), optimizer.skip_synchronize():
        pass


def test_adasum_of_gradients_that_are_changed_first() -> None:
    expected = adasum_by_hand(sgd, STEPS, scale=0.5)
    net = model()
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters(), op=hvd.Adasum)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, *map(part, batch(step))).backward()
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)  # as clipping and loss scaling do
        optimizer.step()
    parameters_are_near(net, expected)
    bits_are_the_same_everywhere(net)


def test_adasum_with_a_scaler() -> None:
    expected = adasum_by_hand(sgd, STEPS)
    net = model()
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters(), op=hvd.Adasum)
    scaler = torch.amp.GradScaler("cpu") if hasattr(torch.amp, "GradScaler") else pytest.skip("no scaler for CPUs")
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(net, *map(part, batch(step)))).backward()
        scaler.step(optimizer)
        scaler.update()
    parameters_are_near(net, expected)
    bits_are_the_same_everywhere(net)


def test_adasum_with_all_that_goes_with_it() -> None:
    expected = adasum_by_hand(sgd, 3)
    net = model()
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters(), op=hvd.Adasum, backward_passes_per_step=2)
    for step in range(3):
        optimizer.zero_grad()
        for half in range(2):
            given, wanted = (part(whole)[2 * half :][:2] for whole in batch(step))
            (loss_of(net, given, wanted) / 2).backward()
        optimizer.step()
    parameters_are_near(net, expected)
    # A closure makes the backward pass itself.
    closures, plain = model(), adasum_by_hand(sgd, 2)
    optimizer = hvd.DistributedOptimizer(sgd(closures), closures.named_parameters(), op=hvd.Adasum)
    for step in range(2):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(closures, *map(part, batch(step)))
            loss.backward()
            return loss

        optimizer.step(closure)
    parameters_are_near(closures, plain)
    # Layers that only some ranks use.
    forked = Forked()
    learning = [(n, p) for n, p in forked.named_parameters() if p.requires_grad]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p for _, p in learning], lr=0.01), learning, op=hvd.Adasum, compression=hvd.Compression.fp16
    )
    for step in range(4):
        optimizer.zero_grad()
        forked(part(batch(step)[0]), left=hvd.rank() == 0).sum().backward()
        optimizer.step()
    bits_are_the_same_everywhere(forked)
    if hvd.size() > 1:
        mine = hvd.add_process_set([0])
        net = model()
        optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters(), op=hvd.Adasum, process_set=mine)
        loss_of(net, *map(part, batch(0))).backward()
        optimizer.step()  # a rank that is not a member steps alone
        hvd.barrier()
        assert hvd.remove_process_set(mine)


def test_compiled_models() -> None:
    expected, _ = alone(sgd, steps=2)
    net = model()
    compiled = torch.compile(net, backend="aot_eager")
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters())
    for step in range(2):
        optimizer.zero_grad()
        loss_of(compiled, *map(part, batch(step))).backward()
        optimizer.step()
    parameters_are_near(net, expected)


def test_state_of_any_optimizer() -> None:
    for make in [
        lambda net: torch.optim.AdamW(net.parameters(), lr=0.1 + hvd.rank(), amsgrad=True),
        lambda net: torch.optim.LBFGS(net.parameters(), lr=0.1 + hvd.rank()),
        lambda net: torch.optim.Adagrad(net.parameters(), lr=0.1 + hvd.rank()),
    ]:
        net = model(hvd.rank())
        optimizer = make(net)

        def closure(net: Any = net, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(net, *batch(0))
            loss.backward()
            return loss

        if hvd.rank() == 0:  # the others have no state yet
            optimizer.step(closure)
        hvd.broadcast_parameters(net.named_parameters(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert optimizer.param_groups[0]["lr"] == 0.1
        optimizer.step(closure)
        bits_are_the_same_everywhere(net)


def test_what_an_optimizer_refuses() -> None:
    net = model()
    names = list(net.named_parameters())
    cases: list[tuple[dict[str, Any], str]] = [
        ({"named_parameters": names[:-1]}, "lacks parameters"),
        ({"named_parameters": [*names, (names[0][0], names[1][1])]}, "more than once"),
        ({"named_parameters": net.parameters()}, "pairs"),
        ({"backward_passes_per_step": 0}, "at least 1"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "op=Average"),
        ({"groups": [[names[0][1]], [names[0][1]]]}, "more than one group"),
        ({"groups": -1}, "groups=-1"),
    ]
    for options, text in cases:
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(sgd(net), **options)
    made = hvd.DistributedOptimizer(sgd(net))
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(made)


def test_batches_from_forked_processes() -> None:
    given, wanted = batch(0)
    data = torch.utils.data.TensorDataset(part(given), part(wanted))
    expected, _ = alone(sgd, steps=0)
    net = model()
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters())
    loader = torch.utils.data.DataLoader(data, batch_size=PER_RANK, num_workers=1, multiprocessing_context="fork")
    for _ in range(2):
        for some in loader:
            optimizer.zero_grad()
            loss_of(net, *some).backward()
            optimizer.step()
    plain = sgd(expected)
    for _ in range(2):
        plain.zero_grad()
        loss_of(expected, given, wanted).backward()
        plain.step()
    parameters_are_near(net, expected)
