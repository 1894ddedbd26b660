"""DistributedOptimizer while gradients, parameters and optimizers change between steps."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from launching import needs_torch  # noqa: E402
from small_training import (  # noqa: E402
    Forked,
    adam,
    alone,
    batch,
    bits_are_the_same_everywhere,
    distributed,
    loss_of,
    model,
    parameters_are_near,
    part,
    sgd,
    train,
)

import gradwire.torch as hvd  # noqa: E402

Optimizer = Any


def images(step: int) -> torch.Tensor:
    return torch.randn(4 * hvd.size(), 3, 4, 4, generator=torch.Generator().manual_seed(step))


def channels_last() -> torch.nn.Module:
    torch.manual_seed(3)
    layers = [
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.Tanh(),
        torch.nn.Conv2d(8, 4, 2),
        torch.nn.Flatten(),
    ]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(4, 2)).to(memory_format=torch.channels_last)
    net[4].weight = torch.nn.Parameter(torch.randn(4, 2).t())  # as in a transposed layer
    return net


def trained(
    net: torch.nn.Module, optimizer: Optimizer, steps: int, given: Callable[[torch.Tensor], Any]
) -> Any:
    for step in range(steps):
        optimizer.zero_grad()
        net(given(images(step))).square().mean().backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
def test_fused_optimizers_with_other_strides(kind: str) -> None:
    needs_torch(2, 4, why="fused optimizers of the processor came with PyTorch 2.4")

    def make(net: torch.nn.Module) -> Optimizer:
        return getattr(torch.optim, kind)(net.parameters(), lr=0.05, fused=True)

    expected, net = channels_last(), channels_last()
    trained(expected, make(expected), 3, lambda whole: whole)
    trained(net, distributed(net, make), 3, part)
    parameters_are_near(net, expected)
    assert all(p.grad.stride() == p.stride() for p in net.parameters())


def test_states_have_the_roots_strides() -> None:
    net = channels_last()
    needs_torch(2, 4, why="fused optimizers of the processor came with PyTorch 2.4")
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05, fused=True)
    if hvd.rank() == 0:
        trained(net, optimizer, 1, part)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for parameter in net.parameters():
        assert optimizer.state[parameter]["exp_avg"].stride() == parameter.stride()
    trained(net, optimizer, 1, lambda whole: whole)
    bits_are_the_same_everywhere(net)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_a_scheduler_that_was_made_before(op: Any) -> None:
    def run(
        net: torch.nn.Module, wrap: Callable[[Any], Any], given: Callable[[Any], Any]
    ) -> list[float]:
        plain = sgd(net)
        scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
        optimizer, rates = wrap(plain), []
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(net, *map(given, batch(step))).backward()
            optimizer.step()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    expected, net = model(), model()
    rates = run(expected, lambda plain: plain, lambda whole: whole)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = run(
            net, lambda plain: hvd.DistributedOptimizer(plain, net.named_parameters(), op=op), part
        )
    assert ours == rates and rates[0] == 0.005
    bits_are_the_same_everywhere(net)
    if op == hvd.Average:
        parameters_are_near(net, expected)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("swap", ["data", "type", "share"])
def test_gradients_whose_storage_is_swapped(swap: str, op: Any) -> None:
    expected, net = model(), model()
    plain, ours = sgd(expected), distributed(net, op=op)
    parts = hvd.size() if op == hvd.Sum else 1

    def swapped(given: torch.nn.Module) -> None:
        for parameter in given.parameters():
            if swap == "data":
                parameter.grad.data = parameter.grad.data.clone()
        if swap == "type":
            given.double().float()
        elif swap == "share":
            given.share_memory()

    for step in range(4):
        plain.zero_grad(), ours.zero_grad()
        loss_of(expected, *batch(step)).backward()
        (loss_of(net, *map(part, batch(step))) / parts).backward()
        if step == 2:  # in the middle of an accumulation
            ours.synchronize()
            swapped(expected), swapped(net)
            loss_of(expected, *batch(step + 9)).backward()
            (loss_of(net, *map(part, batch(step + 9))) / parts).backward()
        ours.step(), plain.step()
        swapped(expected), swapped(net)
    parameters_are_near(net, expected)
    bits_are_the_same_everywhere(net)


def test_small_gradients_set_by_the_program() -> None:
    """They are close to the last result, but different."""
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    ours = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=1.0), [("parameter", parameter)], op=hvd.Sum
    )
    (parameter.sum() * 1e-9).backward()
    ours.step()
    assert parameter.grad is not None
    parameter.grad.data = torch.full_like(parameter, 1e-9 * (hvd.rank() + 10))
    (parameter.sum() * 1e-9).backward()
    ours.step()
    expected = -1e-9 * (hvd.size() + sum(range(11, hvd.size() + 11)))
    torch.testing.assert_close(
        parameter.detach(), torch.full_like(parameter, expected), rtol=1e-12, atol=0.0
    )


@pytest.mark.parametrize("options", [{"groups": 2}, {"backward_passes_per_step": 2}, {}])
@pytest.mark.parametrize("broadcast", [False, True])
def test_a_synchronize_without_a_step(options: dict[str, Any], broadcast: bool) -> None:
    expected, net = Forked(), Forked()
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    ours = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), **options
    )
    given, _ = batch(0)
    net(part(given), left=True).mean().backward()
    ours.synchronize()
    if broadcast:
        hvd.broadcast_optimizer_state(ours, root_rank=0)
    net.zero_grad()
    expected(given, left=True).mean().backward()
    net(part(given), left=True).mean().backward()
    ours.step(), plain.step()
    parameters_are_near(net, expected)
    bits_are_the_same_everywhere(net)


def test_sums_are_not_summed_again() -> None:
    first, second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, second], lr=1.0), op=hvd.Sum)
    size = hvd.size()
    # Reads the gradient between two passes.
    first.sum().backward()
    assert optimizer.param_groups[0]["params"][0] is first
    second.sum().backward()
    optimizer.step()
    assert first.tolist() == second.tolist() == [-size] * 2
    # Accumulates after an exchange and after a step.
    optimizer.zero_grad()
    first.sum().backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_value_([first], 0.5 * size)
    (2 * first).sum().backward()
    optimizer.step()
    assert first.tolist() == [-size - 2.5 * size] * 2
    assert second.tolist() == [-size] * 2  # unused on all ranks
    first.sum().backward()
    optimizer.step()
    assert first.tolist() == [-size - 2.5 * size - 3.5 * size] * 2
    optimizer.step()  # the same gradient again
    assert first.tolist() == [-size - 2.5 * size - 7 * size] * 2


def test_parameters_that_are_unfrozen_and_frozen() -> None:
    expected, net = model(), model()

    def make(net: torch.nn.Module) -> Optimizer:
        return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5, weight_decay=0.5)

    for one in (expected, net):
        one[0].requires_grad_(False)
    plain, ours = make(expected), distributed(net, make)
    for step in range(6):
        for one in (expected, net):
            one[0].requires_grad_(step in (2, 3))
            one[4].requires_grad_(step != 4)
        plain.zero_grad(), ours.zero_grad()
        loss_of(expected, *batch(step)).backward()
        loss_of(net, *map(part, batch(step))).backward()
        plain.step(), ours.step()
        parameters_are_near(net, expected)
    bits_are_the_same_everywhere(net)


@pytest.mark.parametrize("groups", [None, 1, 2])
@pytest.mark.parametrize("kind", ["frozen", "unfrozen"])
@pytest.mark.parametrize("at", [0, 2])
def test_a_parameter_that_is_frozen_on_one_rank(
    groups: int | None, kind: str, at: int, sent: str
) -> None:
    if hvd.size() == 1:
        pytest.skip("one rank exchanges nothing")
    net = model()
    optimizer = distributed(net, groups=groups)
    usual = kind == "frozen"
    for step in range(4):
        net[2].requires_grad_(not usual if step == at and hvd.rank() == 0 else usual)
        optimizer.zero_grad()
        loss_of(net, *map(part, batch(step))).backward()
        if step == at:
            with pytest.raises(
                hvd.InvalidRequest, match=r"2\.weight requires a gradient only on some ranks"
            ):
                optimizer.step()
        else:
            optimizer.step()
    bits_are_the_same_everywhere(net)


def test_layers_that_no_rank_uses_are_left_alone() -> None:
    expected, net = Forked(), Forked()

    def make(net: torch.nn.Module) -> Optimizer:
        return torch.optim.Adam(net.parameters(), lr=0.05, weight_decay=0.1)

    plain, ours = make(expected), distributed(net, make)
    for step in range(5):
        given, _ = batch(step)
        zeros = step == 4  # zero gradients, if asked for
        plain.zero_grad(set_to_none=not zeros), ours.zero_grad(set_to_none=not zeros)
        expected(given, left=step == 1).mean().backward()
        net(part(given), left=step == 1).mean().backward()
        if step == 3:
            ours.synchronize()
            for one in (expected, net):
                torch.nn.utils.clip_grad_norm_(one.parameters(), 0.01)
        plain.step(), ours.step()
        parameters_are_near(net, expected)
    bits_are_the_same_everywhere(net)


def test_hooks_run_once() -> None:
    net, calls = model(), []
    optimizer = distributed(net)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.load_state_dict(optimizer.state_dict())
    loss_of(net, *map(part, batch(0))).backward()
    optimizer.step()
    assert calls == ["before", "after"]


def scaler_of(**options: Any) -> Any:
    if not hasattr(torch.amp, "GradScaler"):
        pytest.skip("this PyTorch has no scaler for CPUs")
    return torch.amp.GradScaler(torch.empty(0).device.type, **options)


@pytest.mark.parametrize(
    "options",
    [{"groups": 1}, {"backward_passes_per_step": 2}, {}, {"op": hvd.Adasum}],
    ids=lambda o: str([*o]),
)
@pytest.mark.parametrize("unscaled", [False, True])
def test_a_scaler_with_an_infinity_on_one_rank(options: dict[str, Any], unscaled: bool) -> None:
    net = Forked()  # no rank uses one of its layers
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), **options
    )
    scaler = scaler_of(init_scale=4.0)
    for step in range(3):
        optimizer.zero_grad()
        loss = net(part(batch(step)[0]), left=True).mean()
        before = copy.deepcopy(net.state_dict())
        scaler.scale(
            loss * (float("inf") if step == 1 and hvd.rank() == hvd.size() - 1 else 1.0)
        ).backward()
        if unscaled:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before["left.weight"], net.left.weight) == (step == 1)
        bits_are_the_same_everywhere(net)
    assert scaler.get_scale() == 2.0


@pytest.mark.usefixtures("several_ranks")
@pytest.mark.parametrize("fused", [False, True])
def test_scalers_that_differ(fused: bool) -> None:
    net = model()
    made = torch.optim.SGD(net.parameters(), lr=0.1, fused=fused)
    optimizer = hvd.DistributedOptimizer(made, net.named_parameters())
    scalers = [scaler_of(init_scale=4.0), scaler_of(init_scale=8.0 if hvd.rank() == 1 else 4.0)]
    for step, scaler in enumerate([scalers[0], scalers[1], scalers[0]]):
        optimizer.zero_grad()
        scaler.scale(loss_of(net, *map(part, batch(step)))).backward()
        if step == 1:
            before = copy.deepcopy(net.state_dict())
            with pytest.raises(
                hvd.InvalidRequest, match=r"scale of the GradScaler .* 8\.0 on rank 1"
            ):
                scaler.step(optimizer)
            assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
        else:
            scaler.step(optimizer)
        scaler.update()
    bits_are_the_same_everywhere(net)


def test_clipping_after_a_disabled_scaler() -> None:
    expected, net = model(), model()
    plain, ours = sgd(expected), distributed(net)
    scaler = scaler_of(enabled=False)
    for step in range(3):
        plain.zero_grad(), ours.zero_grad()
        loss_of(expected, *batch(step)).backward()
        scaler.scale(loss_of(net, *map(part, batch(step)))).backward()
        scaler.unscale_(ours)
        for one in (expected, net):
            torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        plain.step()
        scaler.step(ours)
        scaler.update()
    parameters_are_near(net, expected)


def test_gradients_changed_in_flight() -> None:
    if hvd.size() == 1:
        pytest.skip("one rank exchanges nothing")
    net = model()
    optimizer = distributed(net)
    for _ in range(2):
        loss_of(net, *map(part, batch(0))).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        with pytest.raises(AssertionError, match=r"call optimizer\.synchronize\(\)"):
            optimizer.step()
        optimizer.zero_grad()


def test_a_state_is_not_restored_in_flight(several_ranks: None) -> None:
    net = model()
    optimizer = distributed(net)
    state = hvd.elastic.TorchState(model=net, optimizer=optimizer, step=1)
    train(net, optimizer, 1)
    loss_of(net, *map(part, batch(1))).backward()
    state.step = 2
    before = [each.clone() for each in net.parameters()]
    with pytest.raises(AssertionError, match="call one of these first"):
        state.restore()
    assert state.step == 2
    assert all(torch.equal(*each) for each in zip(before, net.parameters(), strict=True))
    optimizer.step()
    state.restore()
    assert state.step == 1
    parameters_are_near(net, model())


@pytest.mark.parametrize("dense", [False, True])
def test_an_optimizer_of_sparse_gradients_only(dense: bool) -> None:
    def net() -> torch.nn.Module:
        torch.manual_seed(2)
        return torch.nn.ModuleList(
            [torch.nn.EmbeddingBag(10, 4, mode="sum", sparse=True) for _ in range(2)]
        )

    expected, ours = net(), net()

    def make(net: torch.nn.Module) -> Optimizer:
        return torch.optim.SparseAdam(net.parameters(), lr=0.1)

    plain = make(expected)
    optimizer = distributed(ours, make, sparse_as_dense=dense, groups=1)
    words = (torch.arange(3 * hvd.size()) * 7 % 10).view(-1, 3)
    for step in range(4):
        # Only the last rank uses the second one, but not in the first step.
        used = [[0] if step == 0 or rank < hvd.size() - 1 else [0, 1] for rank in range(hvd.size())]
        plain.zero_grad(), optimizer.zero_grad()
        losses = [
            expected[at](words[rank : rank + 1]).square().sum()
            for rank in range(hvd.size())
            for at in used[rank]
        ]
        (sum(losses) / hvd.size()).backward()
        own = words[hvd.rank() : hvd.rank() + 1]
        sum(ours[at](own).square().sum() for at in used[hvd.rank()]).backward()
        plain.step(), optimizer.step()
        parameters_are_near(ours, expected)
    bits_are_the_same_everywhere(ours)


def test_gradients_with_another_dtype() -> None:
    net = model().to(torch.bfloat16)
    if not hasattr(net[0].weight, "grad_dtype"):
        pytest.skip("in this PyTorch gradients have their parameters' type")
    for parameter in net.parameters():
        parameter.grad_dtype = torch.float32
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.0), net.named_parameters()
    )
    for step in range(2):
        optimizer.zero_grad()
        loss_of(net, *(part(whole).to(torch.bfloat16) for whole in batch(step))).backward()
        optimizer.synchronize()
        assert all(p.grad.dtype == torch.float32 for p in net.parameters())
        if hvd.size() > 1:
            # An average that bfloat16 can't represent.
            assert any(not torch.equal(p.grad, p.grad.bfloat16().float()) for p in net.parameters())


def test_another_optimizer_of_the_same_parameters() -> None:
    expected, net = model(), model()
    plain = sgd(expected)
    ours = [distributed(net, op=hvd.Sum) for _ in range(2)]
    for step in range(4):
        if step == 2:
            plain = sgd(expected)  # the first one has its own momentum
        plain.zero_grad(), ours[step // 2].zero_grad()
        loss_of(expected, *batch(step)).backward()
        (loss_of(net, *map(part, batch(step))) / hvd.size()).backward()
        plain.step(), ours[step // 2].step()
        parameters_are_near(net, expected)
    bits_are_the_same_everywhere(net)


class Own(torch.optim.SGD):
    """An old-style optimizer."""

    def zero_grad(self) -> None:
        super().zero_grad()

    def step(self) -> None:
        super().step()


def test_an_optimizer_with_custom_methods() -> None:
    expected, _ = alone(lambda net: torch.optim.SGD(net.parameters(), lr=0.1), steps=2)
    net = model()
    optimizer = hvd.DistributedOptimizer(Own(net.parameters(), lr=0.1), net.named_parameters())
    train(net, optimizer, 2)
    parameters_are_near(net, expected)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_copies(op: Any) -> None:
    net = model()
    optimizer = distributed(net, adam, op=op)

    def step(net: torch.nn.Module, optimizer: Any, at: int) -> None:
        optimizer.zero_grad()
        loss_of(net, *map(part, batch(at))).backward()
        optimizer.step()

    step(net, optimizer, 0)
    twin, copied = copy.deepcopy((net, optimizer))
    assert type(copied).__mro__[1:] == type(optimizer).__mro__[1:] and copied is not optimizer
    for at in range(1, 3):
        step(net, optimizer, at), step(twin, copied, at)
    parameters_are_near(net, twin, within=0.0)
    bits_are_the_same_everywhere(twin)


def test_a_loss_that_steers_an_optimizer() -> None:
    def train(net: torch.nn.Module, optimizer: Any, given: Callable[[Any], Any]) -> None:
        for step in range(2):

            def closure(step: int = step) -> Any:
                optimizer.zero_grad()
                loss = loss_of(net, *map(given, batch(step)))
                loss.backward()
                return loss

            optimizer.step(closure)

    def make(net: torch.nn.Module) -> torch.optim.LBFGS:
        search = "strong_wolfe"
        return torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=5, line_search_fn=search)

    expected, net = model().double(), model().double()
    train(expected, make(expected), torch.Tensor.double)
    train(
        net,
        distributed(net, make),
        lambda whole: part(whole).double(),
    )
    parameters_are_near(net, expected)
    bits_are_the_same_everywhere(net)


def test_attributes_of_horovods_optimizer() -> None:
    net = model()
    optimizer = distributed(net, backward_passes_per_step=2)
    parameters = dict(net.named_parameters())
    assert optimizer._parameter_names == {parameter: name for name, parameter in parameters.items()}
    assert optimizer._requires_update == set(parameters.values())
    assert optimizer._compression is hvd.Compression.none and optimizer.op == hvd.Average
    assert (
        optimizer.process_set is hvd.global_process_set
        and optimizer.gradient_predivide_factor == 1.0
    )
    assert set(optimizer._allreduce_delay.values()) == {2} and optimizer._handles == {}
    assert (
        not optimizer._synchronized
        and optimizer._should_synchronize
        and not optimizer.sparse_as_dense
    )
    for _ in range(2):
        loss_of(net, *map(part, batch(0))).backward()
    if hvd.size() > 1:
        assert set(optimizer._handles) == set(parameters.values())
    optimizer.synchronize()
    assert optimizer._synchronized or hvd.size() == 1
