"""After every step all ranks have the same parameters, or all get one error.

What one rank alone does to its gradients between the backward pass and the step must not divide the
ranks. Gradient tensors that the program keeps remain the gradients.
"""

from __future__ import annotations

import contextlib
import gc
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import gradwire.torch as hvd  # noqa: E402
from gradwire.torch import _checks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error")
needs_two = pytest.mark.usefixtures("several_ranks")


@pytest.fixture
def several_ranks() -> None:
    if hvd.size() == 1:
        pytest.skip("one rank exchanges nothing")


def mean() -> float:
    """Returns the average of all ranks' ``rank() + 1``."""
    return (hvd.size() + 1) / 2


def wrapped(
    *parameters: Any,
    names: str = "abcdefgh",
    op: Any = hvd.Average,
    groups: int | None = None,
    backward_passes_per_step: int = 1,
    **options: Any,
) -> Any:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=1.0, **options),
        list(zip(names, parameters)),
        op=op,
        groups=groups,
        backward_passes_per_step=backward_passes_per_step,
    )


def zeros(count: int = 3) -> Any:
    return torch.nn.Parameter(torch.zeros(count))


def backward(*parameters: Any) -> None:
    """Computes gradients of ``rank() + 1``."""
    (sum(parameter.sum() for parameter in parameters) * (hvd.rank() + 1.0)).backward()


def equal_everywhere(*parameters: Any) -> None:
    for at, parameter in enumerate(parameters):
        for theirs in hvd.allgather(parameter.detach()[None], name=f"equal.{at}"):
            assert torch.equal(theirs, parameter.detach())


@pytest.fixture(params=["early", "late"])
def sent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether gradients are sent in the backward pass, or later and compared by value."""
    monkeypatch.setattr(_checks, "is_due", lambda *_: request.param == "late")
    return request.param


# The program's gradient tensors


@pytest.mark.parametrize("first", ["program", "backward"])
def test_a_list_of_gradients_stays_valid(sent: str, first: str) -> None:
    parameters = [zeros(), zeros(40_000)]
    optimizer = wrapped(*parameters)
    if first == "program":
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
    else:
        backward(*parameters)
    kept = [parameter.grad for parameter in parameters]
    if first == "backward":
        optimizer.step()
        torch._foreach_zero_([parameter.detach() for parameter in parameters])
    for _ in range(3):
        torch._foreach_zero_(kept)
        backward(*parameters)
        optimizer.synchronize()
        torch._foreach_mul_(kept, 2.0)
        with optimizer.skip_synchronize():
            optimizer.step()
    assert all(parameter.grad is one for parameter, one in zip(parameters, kept))
    for parameter in parameters:
        assert set(parameter.tolist()) == {-6 * mean()}


def test_gradients_in_a_flat_buffer(sent: str) -> None:
    parameters = [zeros(3), zeros(2), zeros(4)]
    flat = torch.zeros(9)
    for parameter, part in zip(parameters, flat.split([3, 2, 4])):
        parameter.grad = part
    optimizer = wrapped(*parameters)
    for step in range(3):
        flat.zero_()
        backward(*parameters[: 3 if step < 2 else 2])
        optimizer.step()
        assert flat.tolist() == [mean()] * 5 + [mean() if step < 2 else 0.0] * 4
    assert [parameter[0].item() for parameter in parameters] == [-3 * mean()] * 2 + [-2 * mean()]


def test_views_of_a_gradient_follow_it(sent: str) -> None:
    parameter = zeros(4)
    optimizer = wrapped(parameter)
    backward(parameter)
    view, array = parameter.grad[:2], parameter.grad.numpy()
    for step in range(3):
        if step:
            view.zero_(), array.fill(0.0)
            backward(parameter)
        optimizer.step()
        assert view.tolist() == [mean()] * 2 and array.tolist() == [mean()] * 4
    assert parameter.tolist() == [-3 * mean()] * 4


@pytest.mark.parametrize("kind", ["conj", "neg", "expanded", "strided", "inference"])
def test_unusual_gradients_of_one_rank(kind: str, sent: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    optimizer = wrapped(parameter)
    backward(parameter.real)
    optimizer.step()
    value = (hvd.rank() + 1) * (1 + 2j)
    gradient = torch.full((3,), value, dtype=torch.complex64)
    if hvd.rank() == 0:
        if kind == "conj":
            gradient = gradient.conj().resolve_conj().conj()
        elif kind == "neg":
            gradient = torch._neg_view(-gradient)
        elif kind == "expanded":
            gradient = gradient[:1].expand(3)
        elif kind == "strided":
            gradient = torch.stack([gradient, gradient], 1)[:, 0]
        else:
            with torch.inference_mode():
                gradient = gradient.clone()
    before, parameter.grad = parameter.detach().clone(), gradient
    optimizer.step()
    torch.testing.assert_close(before - parameter.detach(), torch.full((3,), mean() * (1 + 2j)))


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_a_sparse_gradient_at_an_old_id(op: Any, sent: str) -> None:
    """CPython may give a new tensor the id of a gradient that was dropped."""
    net = torch.nn.Embedding(4, 2, sparse=True)
    torch.nn.init.zeros_(net.weight)
    optimizer = wrapped(net.weight, op=op)
    right, parts = 0.0, hvd.size() if op == hvd.Sum else 1
    for _ in range(30):
        output, own = net(torch.tensor([2])), torch.full((1, 2), hvd.rank() + 1.0)
        dropped, net.weight.grad = id(net.weight.grad), None
        new: list[Any] = []
        while len(new) < 100 and dropped not in map(id, new):
            new.append(torch.zeros(1))
        new.pop()
        output.backward(own)
        optimizer.step()
        right -= mean() * parts
        assert net.weight[2].tolist() == [right] * 2


# Names


@pytest.mark.parametrize("shapes", [(3, 3), (3, 4)])
@pytest.mark.parametrize("groups", [None, 1])
def test_parameters_in_another_order(shapes: tuple[int, int], groups: int | None) -> None:
    a, b = (torch.nn.Parameter(torch.ones(count)) for count in shapes)
    order = [a, b] if hvd.rank() % 2 == 0 else [b, a]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(order, lr=1.0, weight_decay=0.5), [("a", a), ("b", b)], groups=groups
    )
    for step in range(3):
        optimizer.zero_grad()
        backward(*([a, b] if step else [a]))
        optimizer.step()
        assert step or b.tolist() == [1.0] * shapes[1]
    equal_everywhere(a, b)


def test_an_optimizer_that_one_rank_never_uses() -> None:
    if hvd.rank() == 0:
        unused = [wrapped(zeros()), wrapped(zeros(), names="z")]
    parameter = zeros()
    optimizer = wrapped(parameter)
    for _ in range(2):
        optimizer.zero_grad()
        backward(parameter)
        optimizer.step()
    assert parameter.tolist() == [-2 * mean()] * 3
    assert hvd.rank() or len(unused) == 2


@pytest.mark.parametrize("model", ["same", "new"])
def test_an_optimizer_that_one_rank_makes_again(model: str) -> None:
    parameter = zeros()
    optimizer = wrapped(parameter)
    for step in range(4):
        if step == 2 and hvd.rank() == 0:
            first = optimizer  # a notebook may keep it
            if model == "new":
                parameter = torch.nn.Parameter(parameter.detach().clone())
            optimizer = wrapped(parameter)
        optimizer.zero_grad()
        backward(parameter)
        optimizer.step()
    assert parameter.tolist() == [-4 * mean()] * 3
    assert hvd.rank() or first is not optimizer


def test_two_optimizers_with_equal_names() -> None:
    """Their gradients are in flight together, and only one rank uses one of the parameters."""
    one, two, first, second = zeros(), zeros(), zeros(), zeros()
    both = [wrapped(one, two), wrapped(first, second)]
    for _ in range(3):
        for optimizer in both:
            optimizer.zero_grad()
        backward(*([one] if hvd.rank() == 0 else []), two, first, second)
        for optimizer in both:
            optimizer.step()
    expected = 3 * (mean() - 1 / hvd.size())
    torch.testing.assert_close(one.detach(), torch.full((3,), -3 / hvd.size()))
    assert expected >= 0 and two.tolist() == first.tolist() == second.tolist() == [-3 * mean()] * 3


@needs_two
def test_names_that_differ_are_one_error() -> None:
    parameter = zeros()
    optimizer = wrapped(parameter, names="x" if hvd.rank() == 0 else "y")
    backward(parameter)
    with pytest.raises(hvd.InvalidRequest, match=r"different names.* 0: x; 1: y"):
        optimizer.step()
    assert parameter.tolist() == [0.0] * 3


# The parameter's layout


@pytest.mark.parametrize("clear", ["optimizer", "model", None])
@pytest.mark.parametrize("change", ["double", "channels_last"])
def test_a_new_layout_unused_on_one_rank(change: str, clear: str | None, sent: str) -> None:
    layers = torch.nn.ModuleList(torch.nn.Conv2d(2, 2, 2, bias=False) for _ in range(2))
    one, two = (layer.weight for layer in layers)
    with torch.no_grad():
        one.zero_(), two.zero_()
    optimizer = wrapped(one, two)
    for step in range(4):
        if step == 2:
            if change == "double":
                layers.double()
            else:
                layers.to(memory_format=torch.channels_last)
        backward(*([one, two] if step < 2 or hvd.rank() == 0 else [one]))
        optimizer.step()
        if clear == "optimizer":
            optimizer.zero_grad()
        elif clear == "model":
            layers.zero_grad()
    equal_everywhere(one, two)
    if clear:
        torch.testing.assert_close(one, torch.full_like(one, -4 * mean()))
        expected = -2 * mean() - 2 / hvd.size()
        torch.testing.assert_close(two, torch.full_like(two, expected))


# Groups


@pytest.mark.parametrize("used", ["by all", "by one"])
@pytest.mark.parametrize("first", [0, 2])
def test_a_frozen_gradient_of_a_group(first: int, used: str, sent: str) -> None:
    """The others of its group may be in flight already, on all ranks or only on some."""
    parameters = [zeros(), zeros(), zeros()]
    optimizer = wrapped(*parameters, groups=1)
    for _ in range(first):
        optimizer.zero_grad()
        backward(*parameters)
        optimizer.step()
    frozen = parameters[2].requires_grad_(False)
    frozen.grad = torch.full((3,), hvd.rank() + 1.0)
    for parameter in parameters[:2]:
        parameter.grad = None
    backward(*parameters[: 2 if used == "by all" or hvd.rank() == 0 else 1])
    optimizer.step()
    assert frozen.tolist() == [-(first + 1) * mean()] * 3
    equal_everywhere(*parameters)


def test_a_group_member_frozen_between_passes(sent: str) -> None:
    parameters = [zeros(), zeros(), zeros()]
    optimizer = wrapped(*parameters, groups=1, backward_passes_per_step=2)
    for _ in range(3):
        optimizer.zero_grad()
        backward(*parameters)
        parameters[2].requires_grad_(False)
        backward(*parameters[:2])
        optimizer.step()
        parameters[2].requires_grad_(True)
    assert [parameter[0].item() for parameter in parameters] == [x * mean() for x in (-6, -6, -3)]


@pytest.mark.parametrize("used", ["by all", "by one"])
def test_a_group_member_frozen_in_flight(used: str, sent: str) -> None:
    parameters = [zeros(), zeros(), zeros()]
    optimizer = wrapped(*parameters, groups=1)
    backward(*parameters[: 3 if used == "by all" or hvd.rank() == 0 else 1])
    parameters[2].requires_grad_(False)
    optimizer.step()
    equal_everywhere(*parameters)
    assert parameters[2].any()


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


class Interrupted(Exception):
    pass


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    def interrupt(*_: Any) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@needs_two
def test_an_interrupted_step_goes_on(sent: str) -> None:
    parameter = zeros(100_000)
    optimizer = wrapped(parameter)
    for step in range(3):
        optimizer.zero_grad()
        backward(parameter)
        if step and hvd.rank() == 0:
            with pytest.raises(Interrupted), alarm(0.5):
                optimizer.step()
            with pytest.raises(AssertionError, match="still being exchanged"):
                optimizer.zero_grad()
        if step:
            hvd.barrier()  # the others begin their step only now
        optimizer.step()
    assert set(parameter.tolist()) == {-3 * mean()}


# Modes and hooks


@pytest.mark.parametrize("mode", ["inference", "no_grad"])
def test_steps_in_a_mode_without_gradients(mode: str, sent: str) -> None:
    first, second = zeros(), zeros()
    optimizer = wrapped(first, second)
    for step in range(3):
        optimizer.zero_grad(set_to_none=step != 1)
        backward(*([first, second] if hvd.rank() == 0 else [first]))
        with torch.inference_mode() if mode == "inference" else torch.no_grad():
            optimizer.step()
    assert first.tolist() == [-3 * mean()] * 3
    torch.testing.assert_close(second.detach(), torch.full((3,), -3 / hvd.size()))


@pytest.mark.parametrize("hooked", ["before", "after"])
@pytest.mark.parametrize("clear", [True, False])
def test_steps_in_the_backward_pass(hooked: str, clear: bool, sent: str) -> None:
    parameters = [zeros(), zeros()]
    optimizers: list[Any] = []

    def hook(parameter: Any) -> None:
        optimizer = optimizers[0 if parameter is parameters[0] else 1]
        optimizer.step()
        if clear:
            optimizer.zero_grad()
        else:
            parameter.grad = None

    def register() -> None:
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(hook)

    if hooked == "before":
        register()
    optimizers += [wrapped(one, names=name) for one, name in zip(parameters, "xy")]
    if hooked == "after":
        register()
    for _ in range(3):
        backward(*parameters)
    assert [parameter.tolist() for parameter in parameters] == [[-3 * mean()] * 3] * 2


@pytest.mark.parametrize("whole", [False, True])
def test_compiled_steps(whole: bool) -> None:
    import torch._dynamo

    if not torch._dynamo.is_dynamo_supported():
        pytest.skip("this PyTorch does not compile for this Python")
    parameter = zeros()
    optimizer = wrapped(parameter)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    compiled = torch.compile(step if whole else optimizer.step, backend="eager")
    for at in range(3):
        backward(parameter)
        compiled()
        assert parameter.tolist() == [-(at + 1) * mean()] * 3
        optimizer.zero_grad()


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("clear", [False, True])
def test_parameters_that_are_swapped(clear: bool, op: Any, sent: str) -> None:
    if not hasattr(torch.__future__, "set_swap_module_params_on_conversion"):
        pytest.skip("this PyTorch does not swap parameters")
    net = torch.nn.Linear(3, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters(), op=op
    )
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        torch.nn.init.zeros_(net.weight)
        for step in range(3):
            backward(net.weight)
            if step == 1 and op == hvd.Sum and not clear and hvd.size() > 1:
                with pytest.raises(AssertionError, match="call zero_grad"):
                    optimizer.step()
                return
            optimizer.step()
            if step == 0:
                gc.collect()
                net.double()
                if clear:
                    optimizer.zero_grad()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    # Gradients accumulate.
    steps = 1 + 1 + 2 if clear else 1 + 2 + 3
    parts = hvd.size() if op == hvd.Sum else 1
    assert net.weight.tolist() == [[-steps * mean() * parts] * 3]
