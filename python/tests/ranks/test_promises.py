"""After every step all ranks have the same parameters, or all get one error.

Gradient tensors that the program keeps remain the gradients, and names pair them.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from promised import backward, equal_everywhere, mean, wrapped, zeros  # noqa: E402

import gradwire.torch as hvd  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error")
needs_two = pytest.mark.usefixtures("several_ranks")


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


@pytest.mark.parametrize("when", ["before", "after synchronize"])
def test_zeros_that_the_program_sets(when: str, sent: str) -> None:
    """They are a gradient, which weight decay sees."""
    used, unused = zeros(), torch.nn.Parameter(torch.ones(3))
    optimizer = wrapped(used, unused, weight_decay=0.5)
    for step in range(4):
        optimizer.zero_grad()
        backward(used)
        if when == "after synchronize":
            optimizer.synchronize()
        unused.grad = torch.zeros(3)
        optimizer.step()
        assert unused.tolist() == [0.5 ** (step + 1)] * 3


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("then", ["backward", "write"])
def test_a_flat_buffer_with_a_foreign_part(then: str, first: int, sent: str) -> None:
    """Other optimizers, or none, may use the other parts during the exchange."""
    parameters = [zeros(), zeros(), zeros()]
    flat = torch.zeros(9)
    for parameter, part in zip(parameters, flat.split(3)):
        parameter.grad = part
    foreign = parameters.pop()
    optimizer = wrapped(*parameters)
    refused = 0
    for step in range(5):
        flat.zero_()
        backward(*parameters)
        if step >= first and then == "write":
            flat[6:].add_(1.0)
        elif step >= first:
            backward(foreign)
        try:
            optimizer.step()
        except AssertionError:  # the first time, a write to the others can't be excluded
            refused += 1
    assert refused <= (sent == "early" and first > 0)
    for parameter in parameters:
        assert parameter.tolist() == [-(5 - refused) * mean()] * 3


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


def halve(parameter: Any) -> None:
    parameter.grad.mul_(0.5)


@needs_two
@pytest.mark.parametrize("hooked", [0, 1])
def test_a_hook_writes_a_part_in_flight(hooked: int, sent: str) -> None:
    """A write to one part of a buffer changes the versions of all."""
    parameters = [zeros(), zeros()]
    optimizer = wrapped(*parameters)
    for step in range(4):
        flat = torch.zeros(6)
        parameters[0].grad, parameters[1].grad = flat[:3], flat[3:]
        if step == 2:
            hook = parameters[hooked].register_post_accumulate_grad_hook(halve)
        backward(*parameters)
        if step == 2:
            hook.remove()
            with pytest.raises(AssertionError, match="was changed while"):
                optimizer.step()
        else:
            optimizer.step()
    assert [parameter.tolist() for parameter in parameters] == [[-3 * mean()] * 3] * 2


def test_hooks_that_write_before_the_exchange(sent: str) -> None:
    parameters = [zeros(), zeros(), zeros()]
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(halve)
    optimizer = wrapped(*parameters)
    flat = torch.zeros(9)
    for parameter, part in zip(parameters, flat.split(3)):
        parameter.grad = part
    refused = 0
    for _ in range(4):
        flat.zero_()
        backward(*parameters)
        try:
            optimizer.step()
        except AssertionError:  # the first time, a write to another part can't be excluded
            refused += 1
    assert refused <= (sent == "early")
    for parameter in parameters:
        assert parameter.tolist() == [-0.5 * (4 - refused) * mean()] * 3


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


@needs_two
@pytest.mark.parametrize("used", ["by all", "by one", "sparse on one"])
def test_other_layouts_in_the_first_step(used: str, sent: str) -> None:
    columns = torch.arange(6.0).reshape(3, 2)
    parameter = torch.nn.Parameter(torch.zeros(3, 2) if hvd.rank() else torch.zeros(2, 3).t())
    optimizer = wrapped(parameter)
    for _ in range(2):
        if used == "by all" or hvd.rank() == 1:
            (parameter * columns).sum().backward()
        elif used == "sparse on one":
            parameter.grad = columns.to_sparse(1)
        with pytest.raises(hvd.InvalidRequest, match="the same memory format on all"):
            optimizer.step()
        parameter.grad = None
    with torch.no_grad():
        parameter.set_(parameter.contiguous())
    (parameter * columns).sum().backward()
    optimizer.step()
    assert torch.equal(parameter.detach(), -columns)


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
