"""DistributedOptimizer trains like one process with the whole batch."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from small_training import (  # noqa: E402
    PER_RANK,
    STEPS,
    adam,
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
    together,
    train,
    train_by_closures,
)

import gradwire.torch as hvd  # noqa: E402


@pytest.mark.parametrize("make", [sgd, adam])
def test_the_loss_is_that_of_one_process(make: Callable[[Any], Any]) -> None:
    expected, losses = alone(make)
    net, ours, optimizer = together(make)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(losses), atol=1e-5, rtol=1e-5)
    parameters_are_near(net, expected)
    bits_are_the_same_everywhere(net)
    assert isinstance(optimizer, type(make(model())))


@pytest.mark.parametrize("way", ["foreach", "fused", "capturable"])
def test_implementations_of_optimizers(way: str) -> None:
    """What PyTorch refuses is refused in the same way, on all ranks."""
    names = ["SGD", "Adam", "AdamW", "Adagrad", "NAdam", "RAdam", "ASGD", "RMSprop", "Rprop"]
    for name in names:

        def make(net: Any, name: str = name) -> Any:
            return getattr(torch.optim, name)(net.parameters(), lr=0.01, **{way: True})

        net = model()
        try:
            expected, _ = alone(make, steps=3)
        except TypeError:  # it has no such implementation
            continue
        except (AssertionError, RuntimeError) as refusal:
            optimizer = distributed(net, make)
            for _ in range(2):
                with pytest.raises(type(refusal), match=re.escape(str(refusal)[:30])):
                    train(net, optimizer, steps=1)
            continue
        train(net, distributed(net, make), steps=3)
        parameters_are_near(net, expected)
        bits_are_the_same_everywhere(net)


@pytest.mark.parametrize(
    "options",
    [
        {"groups": 2},
        {"gradient_predivide_factor": 2.0},
        {"gradient_predivide_factor": 2.0, "groups": 3},
        {"op": hvd.Average, "sparse_as_dense": True},
    ],
)
def test_every_kind_of_exchange(options: dict[str, Any]) -> None:
    expected, _ = alone(sgd)
    net, _, _ = together(sgd, **options)
    parameters_are_near(net, expected)
    bits_are_the_same_everywhere(net)


def test_custom_groups_and_num_groups() -> None:
    expected, _ = alone(sgd)
    with pytest.warns(DeprecationWarning, match="use groups"):
        net, _, optimizer = together(sgd, num_groups=2)
    parameters_are_near(net, expected)
    net = model()
    parameters = list(net.parameters())
    optimizer = distributed(net, groups=[parameters[:2], parameters[3:5]])
    optimizer.set_backward_passes_per_step(2)
    for step in range(STEPS):
        optimizer.zero_grad()
        for given, wanted in halves(step):
            (loss_of(net, given, wanted) / 2).backward()
        optimizer.step()
    assert optimizer.backward_passes_per_step == 2
    parameters_are_near(net, expected)
    bits_are_the_same_everywhere(net)


def test_a_part_of_the_ranks() -> None:
    expected, _ = alone(sgd)
    everybody, first = hvd.add_process_set(range(hvd.size())), hvd.add_process_set([0])
    net, _, _ = together(sgd, process_set=everybody)
    parameters_are_near(net, expected)
    # A non-member or a single member steps with its own gradients.
    net, plain = model(), model()
    ours, theirs = (
        distributed(net, process_set=first),
        sgd(plain),
    )
    for step in range(2):
        for one, optimizer in ((net, ours), (plain, theirs)):
            optimizer.zero_grad()
            loss_of(one, *map(part, batch(step))).backward()
            optimizer.step()
    parameters_are_near(net, plain, within=0.0)
    hvd.barrier()
    assert hvd.remove_process_set(everybody) and hvd.remove_process_set(first)


def test_a_process_set_that_is_registered_later() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    everybody = hvd.ProcessSet(range(hvd.size()))
    mean = (hvd.size() + 1) / 2

    def made(**options: Any) -> Any:
        plain = torch.optim.SGD([parameter], lr=1.0)
        return hvd.DistributedOptimizer(plain, [("p", parameter)], process_set=everybody, **options)

    def step(optimizer: Any) -> float:
        before = parameter.item()
        parameter.grad = None
        (parameter * (hvd.rank() + 1.0)).sum().backward()
        optimizer.step()
        return before - parameter.item()

    optimizer, adasum = made(), made(op=hvd.Adasum)
    for _ in range(2):
        for one in (optimizer, adasum):
            before = parameter.item()
            with pytest.raises(hvd.InvalidRequest, match="is not registered"):
                step(one)
            assert parameter.item() == before
        hvd.add_process_set(everybody)
        assert step(optimizer) == mean
        assert step(optimizer) == mean
        assert hvd.size() == 1 or optimizer._exchange.slots[parameter].hooks
        hvd.barrier()
        assert hvd.remove_process_set(everybody)


@pytest.mark.parametrize("small", ["fp16", "bf16"])
def test_compressed_gradients(small: str) -> None:
    expected, _ = alone(sgd)
    net, _, _ = together(sgd, compression=getattr(hvd.Compression, small))
    parameters_are_near(net, expected, within=0.05)
    bits_are_the_same_everywhere(net)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_compressors_of_programs(op: Any) -> None:
    class Wrong(hvd.Compressor):
        @staticmethod
        def compress(tensor: torch.Tensor) -> Any:
            return tensor, None

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
            return tensor.sum()

    net, (expected, _) = model(), alone(sgd)
    if op == hvd.Average:
        made, _, _ = together(sgd, compression=hvd.Compression.bf16())
        parameters_are_near(made, expected, within=0.05)
    optimizer = distributed(net, compression=Wrong(), op=op)
    if hvd.size() == 1:
        return  # nothing is exchanged
    loss_of(net, *map(part, batch(0))).backward()
    with pytest.raises(hvd.InvalidRequest, match=r"Wrong: decompress\(\) returned \[\] for a"):
        optimizer.step()


@pytest.mark.parametrize("by_hand", [False, True])
def test_scaled_gradients(by_hand: bool) -> None:
    try:
        scaler = torch.amp.GradScaler(torch.empty(0).device.type, init_scale=1024.0)
    except (AttributeError, TypeError):
        pytest.skip("this PyTorch has no scaler for CPUs")
    net, (expected, _) = model(), alone(sgd)
    optimizer = distributed(net)
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


def test_two_optimizers_with_the_same_names() -> None:
    one, two = model(1), model(2)
    first = distributed(one)
    second = distributed(two)
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
    train_by_closures(net, distributed(net), steps=2)
    parameters_are_near(net, expected)


def test_compiled_models() -> None:
    expected, _ = alone(sgd, steps=2)
    net = model()
    compiled = torch.compile(net, backend="aot_eager")
    optimizer = distributed(net)
    train(compiled, optimizer, 2)
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

        if hvd.rank() == 0:  # the other ranks have no state yet
            optimizer.step(closure)
        hvd.broadcast_parameters(net.named_parameters(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert optimizer.param_groups[0]["lr"] == 0.1
        optimizer.step(closure)
        bits_are_the_same_everywhere(net)


def test_invalid_optimizer_arguments() -> None:
    net = model()
    names = list(net.named_parameters())
    cases: list[tuple[dict[str, Any], str]] = [
        ({"named_parameters": names[:-1]}, "lacks some"),
        ({"named_parameters": [*names, (names[0][0], names[1][1])]}, "duplicate names"),
        ({"named_parameters": net.parameters()}, "pairs"),
        ({"named_parameters": enumerate(net.parameters())}, "pairs"),
        ({"backward_passes_per_step": 0}, "at least 1"),
        ({"backward_passes_per_step": -1}, "at least 1"),
        ({"op": hvd.Max}, "op=max: gradients are reduced by"),
        ({"groups": True}, "groups must be"),
        ({"sparse_as_dense": "no"}, "sparse_as_dense='no'"),
        ({"named_parameters": [("n" * 961, names[0][1]), *names[1:]]}, "longer than 960 bytes"),
        ({"groups": [[torch.zeros(3)]]}, "not a parameter"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "op=Average"),
        ({"groups": [[names[0][1]], [names[0][1]]]}, "more than one group"),
        ({"groups": -1}, "groups=-1"),
        ({"groups": 1.5}, "groups=1.5"),
        ({"groups": [names[0][1]]}, "groups must be"),
        ({"backward_passes_per_step": "x"}, "backward_passes_per_step='x'"),
        ({"gradient_predivide_factor": float("nan")}, "gradient_predivide_factor=nan"),
        ({"gradient_predivide_factor": 10**400}, "gradient_predivide_factor=10"),
    ]
    for options, text in cases:
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(sgd(net), **options)
    made = hvd.DistributedOptimizer(sgd(net))
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(made)


def test_a_forked_child_has_gradients_of_its_own() -> None:
    expected, _ = alone(sgd, steps=1)
    net = model()
    optimizer = distributed(net)
    optimizer.zero_grad()
    loss_of(net, *map(part, batch(0))).backward()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with contextlib.suppress(hvd.Forked):  # a job of one rank has nothing to exchange
                loss_of(net, *map(part, batch(1))).backward()
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(2.0)
            optimizer.zero_grad()
            code = sum(each.grad is not None for each in net.parameters())
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    optimizer.step()
    parameters_are_near(net, expected)


def is_of_rank(rank: int, size: int, worker: int) -> None:
    assert hvd.is_initialized() and (hvd.rank(), hvd.size()) == (rank, size)


def test_batches_from_forked_processes() -> None:
    given, wanted = batch(0)
    data = torch.utils.data.TensorDataset(part(given), part(wanted))
    expected, _ = alone(sgd, steps=0)
    net = model()
    optimizer = distributed(net)
    loader = torch.utils.data.DataLoader(
        data,
        batch_size=PER_RANK,
        num_workers=1,
        multiprocessing_context="fork",
        # Like a worker that selects its rank's part of the data.
        worker_init_fn=partial(is_of_rank, hvd.rank(), hvd.size()),
    )
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
