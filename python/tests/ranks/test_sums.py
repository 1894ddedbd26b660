"""Sums, which must not be summed again: what a program does between backward passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from promised import backward, equal_everywhere, mean, wrapped, zeros  # noqa: E402

import gradwire.torch as hvd  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error")
needs_two = pytest.mark.usefixtures("several_ranks")


def total() -> float:
    """Returns the sum of all ranks' ``rank() + 1``."""
    return mean() * hvd.size()


def only_differentiate(parameter: Any) -> None:
    torch.autograd.grad((parameter**2).sum(), [parameter])


def fail(parameter: Any) -> None:
    def hook(_: Any) -> None:
        raise ArithmeticError

    handle = parameter.register_hook(hook)
    with pytest.raises(ArithmeticError):
        parameter.sum().backward()
    handle.remove()


@needs_two
@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("first", ["synchronize", "step"])
@pytest.mark.parametrize("use", [only_differentiate, fail])
def test_a_backward_pass_that_adds_nothing(
    use: Callable[[Any], None], first: str, everywhere: bool, sent: str
) -> None:
    parameter = zeros()
    optimizer = wrapped(parameter, op=hvd.Sum)
    for step in range(3):
        optimizer.zero_grad()
        backward(parameter)
        getattr(optimizer, first)()
        if everywhere or hvd.rank() == 0:
            use(parameter)
            if use is only_differentiate:
                assert parameter.grad.tolist() == [total()] * 3
        optimizer.step()
        steps = (step + 1) * (1 if first == "synchronize" else 2)
        assert parameter.tolist() == [-total() * steps] * 3


@needs_two
def test_a_sparse_sum_is_differentiated(sent: str) -> None:
    layer = torch.nn.Embedding(4, 2, sparse=True)
    torch.nn.init.zeros_(layer.weight)
    optimizer = wrapped(layer.weight, op=hvd.Sum)
    layer(torch.tensor([1])).sum().backward()
    optimizer.synchronize()
    torch.autograd.grad(layer(torch.tensor([2])).sum(), [layer.weight])
    optimizer.step()
    assert layer.weight.tolist() == [[0.0] * 2, [-hvd.size()] * 2, [0.0] * 2, [0.0] * 2]


@needs_two
def test_a_replaced_sum_is_differentiated(sent: str) -> None:
    parameter = zeros()
    optimizer = wrapped(parameter, op=hvd.Sum)
    backward(parameter)
    optimizer.synchronize()
    parameter.grad = parameter.grad * 0.5
    only_differentiate(parameter)
    optimizer.step()
    assert parameter.tolist() == [-total() / 2] * 3


@needs_two
@pytest.mark.parametrize("how", ["drop", "zero", "replace"])
def test_a_gradient_cleared_between_passes(how: str, sent: str) -> None:
    parameter = zeros()
    optimizer = wrapped(parameter, op=hvd.Sum, backward_passes_per_step=2)
    for _ in range(2):
        backward(parameter)
    optimizer.step()
    backward(parameter)
    if how == "zero":
        parameter.grad.zero_()
    else:
        parameter.grad = None if how == "drop" else torch.ones(3)
    backward(parameter)
    optimizer.step()
    second = total() + (hvd.size() if how == "replace" else 0)
    assert parameter.tolist() == [-2 * total() - second] * 3


@needs_two
def test_one_rank_clears_between_passes(sent: str) -> None:
    parameter = zeros()
    optimizer = wrapped(parameter, op=hvd.Sum, backward_passes_per_step=2)
    for _ in range(2):
        backward(parameter)
    optimizer.step()
    backward(parameter)
    if hvd.rank() == 0:
        parameter.grad = None
    backward(parameter)
    with pytest.raises(AssertionError, match="only some ranks have cleared"):
        optimizer.step()
    equal_everywhere(parameter)


@pytest.mark.parametrize("first", [0, 2])
def test_parts_of_a_tensor_accumulate(first: int, sent: str) -> None:
    """The last sum of one is set aside while another one, with the same version, is in flight."""
    parameters = [zeros(), zeros(), zeros()]
    optimizer = wrapped(*parameters, op=hvd.Sum)
    for step in range(5):
        if step <= first:
            for parameter in parameters:
                parameter.grad = None
        (torch.cat(parameters) * (hvd.rank() + 1.0)).sum().backward()
        optimizer.step()
    steps = first + sum(range(1, 6 - first))
    assert [parameter.tolist() for parameter in parameters] == [[-steps * total()] * 3] * 3


def test_concatenated_parameters_of_another_type(sent: str) -> None:
    """Their gradients still share a version when each has memory of its own."""
    net = torch.nn.ParameterList([zeros(), zeros()])
    optimizer = wrapped(*net, op=hvd.Sum)
    for step in range(4):
        if step == 2:
            net.double()
        (torch.cat([*net]) * (hvd.rank() + 1.0)).sum().backward()
        optimizer.step()
    assert [parameter.tolist() for parameter in net] == [[-10 * total()] * 3] * 2


def test_two_optimizers_of_a_frozen_parameter(sent: str) -> None:
    parameter = zeros().requires_grad_(False)
    optimizers = [wrapped(parameter, op=hvd.Sum, names=[f"frozen {at}"]) for at in "ab"]
    for step in range(3):
        parameter.grad = torch.full((3,), hvd.rank() + 1.0)
        for optimizer in optimizers:
            optimizer.step()
        assert parameter.tolist() == [-2 * (step + 1) * total()] * 3
