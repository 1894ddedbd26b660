"""After every step all ranks have the same parameters, or all get one error.

What one rank alone does to its gradients between the backward pass and the step must not divide
the ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from promised import (  # noqa: E402
    Interrupted,
    alarm,
    backward,
    equal_everywhere,
    mean,
    wrapped,
    zeros,
)

import gradwire.torch as hvd  # noqa: E402
from gradwire.torch import _checks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error")
needs_two = pytest.mark.usefixtures("several_ranks")


# What all ranks do before the step


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_decay_of_an_unused_layer_by_hand(set_to_none: bool, op: Any, sent: str) -> None:
    """The program adds to the gradients of all layers after ``synchronize``."""
    parameter, unused = zeros(), zeros()
    optimizer = wrapped(parameter, unused, op=op)
    for step in range(4):
        optimizer.zero_grad(set_to_none=set_to_none)
        backward(*([parameter] if step else [parameter, unused]))
        optimizer.synchronize()
        for one in (parameter, unused):
            one.grad = torch.zeros_like(one) if one.grad is None else one.grad
            one.grad.add_(2.0)
        optimizer.step()
    parts = hvd.size() if op == hvd.Sum else 1
    assert parameter.tolist() == [-4 * mean() * parts - 8.0] * 3
    assert unused.tolist() == [-mean() * parts - 8.0] * 3


# What one rank alone does before the step


def drop(parameter: Any) -> None:
    parameter.grad = None


def replace(parameter: Any) -> None:
    parameter.grad = parameter.grad * 0.5


def zero(parameter: Any) -> None:
    parameter.grad.zero_()


def write_data(parameter: Any) -> None:
    parameter.grad.data.mul_(0.5)


def write_array(parameter: Any) -> None:
    parameter.grad.numpy()[:] = 0.5


@needs_two
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("change", [drop, replace, zero, write_data, write_array])
def test_changes_in_flight_are_one_error(change: Callable[[Any], None], op: Any, sent: str) -> None:
    if sent == "early" and change in (write_data, write_array):
        pytest.skip("unseen")
    parameter, other = zeros(), zeros()
    optimizer = wrapped(parameter, other, op=op)
    right, parts = 0.0, hvd.size() if op == hvd.Sum else 1
    for step in range(4):
        optimizer.zero_grad()
        backward(parameter, other)
        if step in (1, 2):
            if hvd.rank() == 0:
                change(parameter)
            with pytest.raises(AssertionError, match=r"the gradient of a was (changed|dropped)"):
                optimizer.step()
        else:
            optimizer.step()
            right -= mean() * parts
    assert parameter.tolist() == other.tolist() == [right] * 3


def transpose(parameter: Any) -> None:
    parameter.grad = parameter.grad.t()


def transpose_data(parameter: Any) -> None:
    parameter.grad.data = parameter.grad.data.t()


def conjugate(parameter: Any) -> None:
    parameter.grad = parameter.grad.conj()


@needs_two
@pytest.mark.parametrize("groups", [None, 1])
@pytest.mark.parametrize("change", [transpose, transpose_data, conjugate])
def test_other_elements_at_the_same_address(
    change: Callable[[Any], None], groups: int | None, sent: str
) -> None:
    dtype = torch.complex64 if change is conjugate else torch.float32
    parameter, other = (torch.nn.Parameter(torch.zeros(2, 2, dtype=dtype)) for _ in range(2))
    optimizer = wrapped(parameter, other, groups=groups)
    factors = torch.tensor([[1, 2], [3, 4]]) * (1j if change is conjugate else 1)
    for late in (False, True, False):
        optimizer.zero_grad()
        ((parameter + other) * factors * (hvd.rank() + 1.0)).sum().real.backward()
        if late:
            optimizer.synchronize()
        if hvd.rank() == 0:
            change(parameter)
        if late:
            optimizer.step()
        else:
            with pytest.raises(AssertionError, match="the gradient of a was changed"):
                optimizer.step()
        equal_everywhere(*(p.detach().abs() for p in (parameter, other)))


@needs_two
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("change", [drop, replace, zero])
def test_a_step_after_a_caught_error(change: Callable[[Any], None], op: Any, sent: str) -> None:
    """The next step, without new gradients, is the same on all ranks."""
    parameter = zeros()
    optimizer = wrapped(parameter, op=op, momentum=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        backward(parameter)
        optimizer.step()
    backward(parameter)
    if hvd.rank() == 0:
        change(parameter)
    with contextlib.suppress(AssertionError):
        optimizer.step()
    optimizer.step()
    equal_everywhere(parameter)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_gradients_that_all_ranks_drop_in_flight(op: Any, sent: str) -> None:
    parameter, unused = zeros(), zeros()
    optimizer = wrapped(parameter, unused, op=op, weight_decay=0.5)
    for step in range(4):
        backward(*([parameter] if hvd.rank() or step == 0 else [unused]))
        parameter.grad = unused.grad = None
        optimizer.step()
        assert parameter.grad is None and unused.grad is None
        optimizer.zero_grad()
    assert parameter.tolist() == unused.tolist() == [0.0] * 3


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_zeros_on_one_rank_and_none_on_others(op: Any, sent: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = wrapped(parameter, op=op, momentum=0.9, weight_decay=0.5)
    for step in range(4):
        optimizer.zero_grad(set_to_none=hvd.rank() != step % hvd.size())
        if step % 2 == 0:
            backward(parameter)
        optimizer.step()
        equal_everywhere(parameter)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("again", [False, True])
def test_one_rank_drops_the_last_result(again: bool, op: Any, sent: str) -> None:
    parameter = zeros()
    optimizer = wrapped(parameter, op=op, momentum=0.9)
    for _ in range(3):
        backward(parameter)
        optimizer.step()
        if hvd.rank() == 0:
            parameter.grad = None
        if again:
            backward(parameter)
        with contextlib.suppress(AssertionError):
            optimizer.step()
        equal_everywhere(parameter)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_one_rank_clears_with_another_call(op: Any, sent: str) -> None:
    parameter = zeros()
    optimizer = wrapped(parameter, op=op)
    for step in range(4):
        if hvd.rank() == step % hvd.size():
            parameter.grad = None
        else:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        backward(parameter)
        optimizer.step()
    assert parameter.tolist() == [-4 * mean() * (hvd.size() if op == hvd.Sum else 1)] * 3


@needs_two
def test_different_steps_are_found_by_comparing(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = zeros()
    optimizer = wrapped(parameter)
    monkeypatch.setattr(_checks, "compares", lambda _: True)
    backward(parameter)
    optimizer.synchronize()
    if hvd.rank() == 0:
        parameter.grad.data.mul_(0.5)
    with pytest.raises(AssertionError, match="different gradients of a"):
        optimizer.step()
    optimizer.zero_grad()
    backward(parameter)
    optimizer.step()
    assert parameter.tolist() == [-mean()] * 3


@needs_two
@pytest.mark.parametrize("first", ["any", "of the names", "of the number"])
def test_an_interrupted_step_goes_on(first: str, sent: str) -> None:
    """In the first steps of an optimizer, the ranks also agree on what it is called."""
    parameter, before = zeros(100_000), zeros()
    names = f"{sent} {first}"
    if first == "of the number":
        introduced = wrapped(before, names=[names])
        introduced.step()
    optimizer = wrapped(parameter, names=[names])
    for step in range(3):
        optimizer.zero_grad()
        backward(parameter)
        interrupted = step > 0 if first == "any" else step == 0
        if interrupted and hvd.rank() == 0:
            with pytest.raises(Interrupted), alarm(0.5):
                optimizer.step()
            with pytest.raises(AssertionError, match="still being exchanged"):
                optimizer.zero_grad()
        if interrupted:
            hvd.barrier()  # the others begin their step only now
        optimizer.step()
    assert set(parameter.tolist()) == {-3 * mean()}


@needs_two
@pytest.mark.parametrize("calls", ["synchronize step", "step synchronize", "step step"])
def test_another_call_after_an_interruption(calls: str, sent: str) -> None:
    parameter = zeros()
    optimizer = wrapped(parameter)
    interrupted, then = calls.split()
    for step in range(3):
        optimizer.zero_grad()
        backward(parameter)
        if step == 1 and hvd.rank() == 0:
            with pytest.raises(Interrupted), alarm(0.5):
                getattr(optimizer, interrupted)()
        if step == 1:
            hvd.barrier()
            if hvd.rank() > 0 and interrupted == "synchronize":
                optimizer.synchronize()
            if hvd.rank() == 0 and then == "synchronize":
                optimizer.synchronize()
        optimizer.step()
        equal_everywhere(parameter)
    assert parameter.tolist() == [-3 * mean()] * 3


@needs_two
def test_a_gradient_that_one_rank_resizes(sent: str) -> None:
    parameter = zeros()
    optimizer = wrapped(parameter)
    for step in range(4):
        optimizer.zero_grad()
        backward(parameter)
        if step == 2:
            if hvd.rank() == 0:
                parameter.grad.resize_(2)
            with pytest.raises(RuntimeError if hvd.rank() else AssertionError) as caught:
                optimizer.step()
            text = "a has the shape [2], but the parameter [3]"
            assert text in str(caught.value)
            continue
        optimizer.step()
    assert parameter.tolist() == [-3 * mean()] * 3


@needs_two
def test_a_step_interrupted_before_it_begins(sent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on: other ranks have not been told anything."""
    parameter = zeros()
    optimizer = wrapped(parameter)
    kind = type(optimizer._exchange)
    inner, interrupts = kind._word_of_options, [False]

    def word_of_options(*arguments: Any) -> int:
        if interrupts[0]:
            interrupts[0] = False
            raise Interrupted
        return inner(*arguments)

    monkeypatch.setattr(kind, "_word_of_options", word_of_options)
    for step in range(3):
        optimizer.zero_grad()
        backward(parameter)
        if step == 1 and hvd.rank() == 0:
            interrupts[0] = True
            with pytest.raises(Interrupted):
                optimizer.step()
        optimizer.step()
    assert parameter.tolist() == [-3 * mean()] * 3


@needs_two
@pytest.mark.parametrize("completed", [True, False])
def test_an_interrupted_step_is_dropped(completed: bool, sent: str) -> None:
    """The rank goes on with the next batch: then all ranks get the same error, and none waits."""
    parameter = zeros()
    optimizer = wrapped(parameter)
    for step in range(3):
        parameter.grad = None  # as ``model.zero_grad()``; that of the optimizer would refuse
        if step == 2 and hvd.rank() == 0 and not completed and sent == "early":
            with pytest.raises(AssertionError, match=r"has interrupted step\(\), and the program"):
                backward(parameter)
            parameter.grad = None
        backward(parameter)
        if step == 1 and hvd.rank() == 0:
            with pytest.raises(Interrupted), alarm(0.5):
                optimizer.step()
        if step == 1:
            hvd.barrier()
        if step == 1 and hvd.rank() == 0:
            if completed:
                optimizer.synchronize()
            parameter.grad = None
            continue
        if step < 2:
            optimizer.step()
            continue
        with pytest.raises(AssertionError, match="rank 0 has not completed the last step"):
            optimizer.step()
    hvd.broadcast_parameters([parameter], hvd.size() - 1)
    optimizer.zero_grad()
    backward(parameter)
    optimizer.step()
    assert parameter.tolist() == [-3 * mean()] * 3


@needs_two
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("everywhere", [True, False])
def test_one_gradient_of_several_parameters(everywhere: bool, op: Any, sent: str) -> None:
    parameters = zeros(), zeros(), zeros()
    optimizer = wrapped(*parameters, op=op)
    for step in range(4):
        gradient = torch.full((3,), hvd.rank() + 1.0)
        for at, parameter in enumerate(parameters):
            shared = everywhere or hvd.rank() == 0
            if step < 2:
                parameter.grad = gradient if shared else gradient * (at + 1.0)
            elif shared:
                parameters[0].grad.copy_(gradient)  # it may be in shared memory
                parameter.grad = parameters[0].grad
            else:
                parameter.grad.copy_(gradient * (at + 1.0))
        optimizer.step()
        equal_everywhere(*parameters)
    parts = hvd.size() if op == hvd.Sum else 1
    for at, parameter in enumerate(parameters):
        others = mean() * (1 if everywhere else at + 1) - (0 if everywhere else at / hvd.size())
        torch.testing.assert_close(parameter.detach(), torch.full((3,), -4 * others * parts))


@needs_two
@pytest.mark.parametrize("part", [slice(0, 3), slice(2, 5)])
def test_gradients_of_a_group_in_one_memory(part: slice, sent: str) -> None:
    """One rank has the gradients of a group in one tensor, into which both are accumulated."""
    first, second = zeros(), zeros()
    optimizer = wrapped(first, second, groups=1)
    expected = torch.zeros(5), torch.zeros(5)
    for _ in range(4):
        optimizer.zero_grad(set_to_none=False)
        if hvd.rank() == 0:
            flat = torch.zeros(5)
            first.grad, second.grad = flat[:3], flat[part]
        (first.sum() + 2 * second.sum()).backward()
        optimizer.step()
        equal_everywhere(first, second)
        shared = torch.zeros(5)
        shared[:3] += 1.0
        shared[part] += 2.0
        for total, own in zip(expected, (1.0, 2.0)):
            total -= (shared + own * (hvd.size() - 1)) / hvd.size()
    torch.testing.assert_close(first.detach(), expected[0][:3])
    torch.testing.assert_close(second.detach(), expected[1][part])


@needs_two
def test_a_gradient_in_flight_of_two_parameters(sent: str) -> None:
    first, second = zeros(), zeros()
    optimizer = wrapped(first, second)
    for step in range(4):
        optimizer.zero_grad()
        backward(first)
        if step == 2 and hvd.rank() == 0:
            second.grad = first.grad
            with pytest.raises(AssertionError, match="b was set to that of a"):
                optimizer.step()
            second.grad = None
        elif step == 2:
            with pytest.raises(hvd.InvalidRequest, match="rank 0 can't take part in the step: "):
                optimizer.step()
        else:
            optimizer.step()
        equal_everywhere(first, second)
    assert first.tolist() == [-3 * mean()] * 3 and second.tolist() == [0.0] * 3


@needs_two
def test_a_hook_of_one_rank_is_seen(monkeypatch: pytest.MonkeyPatch, sent: str) -> None:
    monkeypatch.setattr(_checks, "compares", lambda _: True)
    parameter = zeros()
    optimizer = wrapped(parameter)

    def double(*_: Any) -> None:
        parameter.grad.mul_(2.0)

    if hvd.rank() == 1:
        optimizer.register_step_pre_hook(double)
    backward(parameter)
    with pytest.raises(AssertionError, match=r"make a step with different gradients of a"):
        optimizer.step()
    equal_everywhere(parameter)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_a_part_of_another_gradient_is_copied(op: Any, sent: str) -> None:
    whole, part, columns = zeros(4), zeros(3), zeros(2)
    optimizer = wrapped(whole, part, columns, op=op)
    total = mean() * (hvd.size() if op == hvd.Sum else 1)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        gradient = torch.full((4,), hvd.rank() + 1.0)
        whole.grad, part.grad, columns.grad = gradient, gradient[1:], gradient[::2]
        optimizer.step()
    for parameter in (whole, part):
        assert parameter.unique().tolist() == [-3 * total], parameter


@needs_two
def test_a_part_of_a_sent_gradient_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checks, "is_due", lambda *_: False)
    whole, part = zeros(4), zeros(3)
    optimizer = wrapped(whole, part)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        backward(whole)
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    backward(whole)
    part.grad = whole.grad[1:]
    with pytest.raises(AssertionError, match=r"b was set to that of a or to a part of it"):
        optimizer.step()
    equal_everywhere(whole, part)


def test_only_optimizers_of_pytorch_are_taken() -> None:
    class Around:
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner, self.param_groups = inner, inner.param_groups

    with pytest.raises(ValueError, match=r"not a torch\.optim\.Optimizer; .* give that one"):
        hvd.DistributedOptimizer(Around(torch.optim.SGD([zeros()], lr=1.0)))
