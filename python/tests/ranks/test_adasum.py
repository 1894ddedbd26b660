"""DistributedOptimizer with Adasum: ranks make their own steps, and the changes are combined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from promised import Interrupted, alarm, backward, equal_everywhere, wrapped, zeros  # noqa: E402
from small_training import (  # noqa: E402
    STEPS,
    Forked,
    adam,
    batch,
    bits_are_the_same_everywhere,
    distributed,
    halves,
    loss_of,
    model,
    parameters_are_near,
    part,
    sgd,
    train,
    train_by_closures,
)

import gradwire.torch as hvd  # noqa: E402


def adasum_by_hand(make: Callable[[Any], Any], steps: int, scale: float = 1.0) -> torch.nn.Module:
    """Combines the changes of each rank's own step."""
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
    optimizer = distributed(net, make, op=hvd.Adasum)
    train(net, optimizer)
    parameters_are_near(net, expected)
    bits_are_the_same_everywhere(net)
    with pytest.raises(AssertionError, match="Adasum"), optimizer.skip_synchronize():
        pass


def test_adasum_refuses_parameters_added_later() -> None:
    net, later = model(), torch.nn.Parameter(torch.zeros(3))
    optimizer = distributed(net, op=hvd.Adasum)
    with pytest.raises(NotImplementedError, match="before passing it"):
        optimizer.add_param_group({"params": [later]})
    optimizer.param_groups[0]["params"].append(later)
    with pytest.raises(NotImplementedError, match="before passing it"):
        optimizer.step()


def test_adasum_of_changed_gradients() -> None:
    expected = adasum_by_hand(sgd, STEPS, scale=0.5)
    net = model()
    optimizer = distributed(net, op=hvd.Adasum)
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
    optimizer = distributed(net, op=hvd.Adasum)
    scaler = (
        torch.amp.GradScaler("cpu")
        if hasattr(torch.amp, "GradScaler")
        else pytest.skip("no scaler for CPUs")
    )
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
    optimizer = distributed(net, op=hvd.Adasum, backward_passes_per_step=2)
    for step in range(3):
        optimizer.zero_grad()
        for given, wanted in halves(step):
            (loss_of(net, given, wanted) / 2).backward()
        optimizer.step()
    parameters_are_near(net, expected)
    closures, plain = model(), adasum_by_hand(sgd, 2)
    optimizer = distributed(closures, op=hvd.Adasum)
    train_by_closures(closures, optimizer, steps=2)
    parameters_are_near(closures, plain)
    # Layers that only some ranks use
    forked = Forked()
    learning = [(n, p) for n, p in forked.named_parameters() if p.requires_grad]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p for _, p in learning], lr=0.01),
        learning,
        op=hvd.Adasum,
        compression=hvd.Compression.fp16,
    )
    for step in range(4):
        optimizer.zero_grad()
        forked(part(batch(step)[0]), left=hvd.rank() == 0).sum().backward()
        optimizer.step()
    bits_are_the_same_everywhere(forked)
    if hvd.size() > 1:
        mine = hvd.add_process_set([0])
        net = model()
        optimizer = distributed(net, op=hvd.Adasum, process_set=mine)
        loss_of(net, *map(part, batch(0))).backward()
        optimizer.step()  # a non-member steps alone
        hvd.barrier()
        assert hvd.remove_process_set(mine)


@pytest.mark.parametrize("how", ["hook", "closure"])
def test_adasum_clears_gradients_in_its_step(how: str) -> None:
    parameter = zeros()
    base = torch.optim.SGD([parameter], lr=1.0)
    if how == "hook":
        base.register_step_post_hook(lambda *_: base.zero_grad())
    optimizer = hvd.DistributedOptimizer(base, [("a", parameter)], op=hvd.Adasum)

    def compute() -> None:
        # Without a gradient, the step of this optimizer changes nothing.
        backward(parameter)
        with torch.no_grad():
            parameter.sub_(parameter.grad)
        parameter.grad = None

    for step in range(1, 4):
        if how == "hook":
            backward(parameter)
            optimizer.step()
        else:
            optimizer.step(compute)
        equal_everywhere(parameter)
        # Adasum averages parallel changes.
        right = [-step * (hvd.size() + 1) / 2] * 3
        assert hvd.size() > 2 or parameter.tolist() == right


@pytest.mark.usefixtures("several_ranks")
@pytest.mark.parametrize("raised", [ZeroDivisionError, KeyboardInterrupt])
def test_adasum_with_an_error_of_one_rank(raised: type[BaseException]) -> None:
    parameter = zeros()
    optimizer = wrapped(parameter, op=hvd.Adasum)

    def closure() -> None:
        optimizer.zero_grad()
        backward(parameter)
        if step == 1 and hvd.rank() == 0:
            raise raised

    for step in range(3):
        before = parameter.detach().clone()
        if step == 1:
            error = raised if hvd.rank() == 0 else hvd.InvalidRequest
            with pytest.raises(error):
                optimizer.step(closure)
            assert torch.equal(parameter, before)
        else:
            optimizer.step(closure)
            assert not torch.equal(parameter, before)
        equal_everywhere(parameter)


@pytest.mark.usefixtures("several_ranks")
def test_adasum_of_changes_without_a_gradient() -> None:
    class Decaying(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            super().step()
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.5)

    parameter = torch.nn.Parameter(torch.ones(3))
    base = Decaying([parameter], lr=1.0)
    optimizer = hvd.DistributedOptimizer(base, [("a", parameter)], op=hvd.Adasum)
    for _ in range(2):
        optimizer.zero_grad()
        if hvd.rank() > 0:
            backward(parameter)
        optimizer.step()
        equal_everywhere(parameter)


@pytest.mark.usefixtures("several_ranks")
def test_an_interrupted_adasum_goes_on() -> None:
    parameter, steps = zeros(), 3
    optimizer = wrapped(parameter, op=hvd.Adasum)
    for _ in range(steps):
        optimizer.zero_grad()
        backward(parameter)
        if hvd.rank() == 0:
            with pytest.raises(Interrupted), alarm(0.2):
                optimizer.step()
        hvd.barrier()  # the others come only after the interruption
        optimizer.step()
        equal_everywhere(parameter)
    assert hvd.size() > 2 or parameter.tolist() == [-1.5 * steps] * 3
