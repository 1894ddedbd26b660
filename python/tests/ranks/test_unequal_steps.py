"""What only some ranks change after the gradients are exchanged, or in the optimizer's options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from promised import backward, equal_everywhere, mean, wrapped, zeros  # noqa: E402

import gradwire.torch as hvd  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error")
needs_two = pytest.mark.usefixtures("several_ranks")


# Options


def rate(groups: list[dict[str, Any]]) -> None:
    groups[1]["lr"] = 0.5


def rate_tensor(groups: list[dict[str, Any]]) -> None:
    groups[1]["lr"] = torch.tensor(0.5)


def rate_of_numpy(groups: list[dict[str, Any]]) -> None:
    groups[1]["lr"] = pytest.importorskip("numpy").float32(0.5)


def decay(groups: list[dict[str, Any]]) -> None:
    groups[1]["weight_decay"] = 0.5


def switch(groups: list[dict[str, Any]]) -> None:
    groups[1]["nesterov"] = True


@needs_two
@pytest.mark.parametrize(
    ("change", "option", "here", "there"),
    [
        (rate, "lr", "0.5", "1.0"),
        (rate_tensor, "lr", "0.5", "1.0"),
        (rate_of_numpy, "lr", "0.5", "1.0"),
        (decay, "weight_decay", "0.5", "0"),
        (switch, "nesterov", "True", "False"),
    ],
)
@pytest.mark.parametrize("closure", [False, True])
def test_an_option_of_one_rank(
    change: Callable[[Any], None], option: str, here: str, there: str, closure: bool
) -> None:
    one, two = zeros(), zeros()
    groups = [{"params": [one]}, {"params": [two]}]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(groups, lr=1.0, momentum=0.5), [("a", one), ("b", two)]
    )

    def compute() -> Any:
        optimizer.zero_grad()
        backward(one, two)
        return 1.0

    def step() -> None:
        if closure:
            optimizer.step(compute)
        else:
            compute()
            optimizer.step()

    step()
    if hvd.rank() == 0:
        change(optimizer.param_groups)
    others = ", ".join(map(str, range(1, hvd.size())))
    text = f"option {option} of .* for b differs .*: {here} on rank 0; {there} on rank {others}"
    with pytest.raises(hvd.InvalidRequest, match=text):
        step()
    assert one.tolist() == two.tolist() == [-mean()] * 3
    if hvd.rank() > 0:
        change(optimizer.param_groups)
    step()
    equal_everywhere(one, two)


@needs_two
@pytest.mark.parametrize("before", [2, 15])
@pytest.mark.parametrize("skip", [False, True])
def test_a_rate_of_one_rank_is_seen_in_each_step(before: int, skip: bool) -> None:
    """With ``skip_synchronize``, in the next exchange."""
    parameter = zeros()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("a", parameter)])

    def step() -> None:
        optimizer.zero_grad()
        backward(parameter)
        optimizer.synchronize()
        if not skip:
            optimizer.step()
            return
        with optimizer.skip_synchronize():
            optimizer.step()

    for _ in range(before):
        step()
    if hvd.rank() == 0:
        optimizer.param_groups[0]["lr"] = 0.5
    if skip:
        step()
    kind, text = (
        (AssertionError, "in the last step, the option lr .*, so the parameters")
        if skip
        else (hvd.InvalidRequest, r"option lr .*\. Set it to the same value")
    )
    for _ in range(2):  # each step is refused until that has changed
        with pytest.raises(kind, match=text):
            step()
        if skip:
            step()
    optimizer.param_groups[0]["lr"] = 0.5
    hvd.broadcast_parameters({"a": parameter.data}, 0)
    if skip:
        with pytest.raises(kind, match=text):
            step()
    step()
    step()
    equal_everywhere(parameter)


@needs_two
def test_another_optimizer_on_one_rank() -> None:
    parameter = zeros()
    kind = torch.optim.Adam if hvd.rank() == 0 else torch.optim.SGD
    optimizer = hvd.DistributedOptimizer(kind([parameter], lr=1.0), [("a", parameter)])
    backward(parameter)
    optimizer.step()
    optimizer.zero_grad()
    backward(parameter)
    with pytest.raises(
        hvd.InvalidRequest, match=r"class of .* for a differs .*: Adam on rank 0; SGD"
    ):
        optimizer.step()


def test_options_that_may_differ() -> None:
    """The order and number of groups, and what the optimizer does not use."""
    parameters = [zeros(), zeros(), zeros()]
    if hvd.rank() % 2 == 0:
        groups = [{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:]}]
    else:
        groups = [{"params": [one]} for one in parameters[:0:-1]]
        groups.append({"params": parameters[:1], "lr": 0.5, "mine": hvd.rank()})
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(groups, lr=1.0), list(zip("abc", parameters))
    )
    for step in range(3):
        optimizer.zero_grad()
        backward(*parameters)
        if hvd.rank() == 0:
            optimizer.param_groups[0]["lr"] = 1.0
        optimizer.synchronize()
        if hvd.rank() == 0:
            optimizer.param_groups[0]["lr"] = 0.5
        optimizer.step()
        assert parameters[0].tolist() == [-(step + 1) * mean() / 2] * 3
        assert parameters[2].tolist() == [-(step + 1) * mean()] * 3


def test_schedulers_that_change_options() -> None:
    parameter = zeros()
    optimizer = wrapped(parameter)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        backward(parameter)
        optimizer.step()
        scheduler.step()
    assert parameter.tolist() == [-1.75 * mean()] * 3


# Gradients that a step sees on some ranks only


def drop(parameter: Any) -> None:
    parameter.grad = None


def add(parameter: Any) -> None:
    parameter.grad = torch.ones_like(parameter)


def replace(parameter: Any) -> None:
    parameter.grad = parameter.grad * 0.5


@needs_two
@pytest.mark.parametrize("change", [drop, add, replace])
@pytest.mark.parametrize("when", ["before skip_synchronize", "in a hook", "in a later hook"])
def test_a_step_with_other_gradients(change: Callable[[Any], None], when: str, sent: str) -> None:
    """The next exchange is one error."""
    one, two = zeros(), zeros()
    optimizer = wrapped(one, two)
    for step in range(3):
        optimizer.zero_grad()
        backward(*([one] if change is add else [one, two]))
        hooks = []
        if step == 1 and when == "before skip_synchronize":
            optimizer.synchronize()
            if hvd.rank() == 0:
                change(two)
            with optimizer.skip_synchronize():
                optimizer.step()
            continue
        if step == 1 and hvd.rank() == 0:
            if when == "in a later hook":
                hooks.append(optimizer.register_step_pre_hook(lambda *_: None))
            hooks.append(optimizer.register_step_pre_hook(lambda *_: change(two)))
        if step == 2:
            what = "have set the" if change is replace else "had a"
            with pytest.raises(AssertionError, match=f"only some ranks {what} gradient of b "):
                optimizer.step()
        else:
            optimizer.step()
        for hook in hooks:
            hook.remove()
    # The advice works.
    hvd.broadcast_parameters([("a", one), ("b", two)], 0)
    optimizer.zero_grad()
    backward(one, two)
    optimizer.step()
    equal_everywhere(one, two)


def test_an_equal_copy_instead_of_a_result(sent: str) -> None:
    """On one rank, or of other values on all."""
    one, two = zeros(), zeros()
    optimizer = wrapped(one, two)
    for _ in range(3):
        optimizer.zero_grad()
        backward(one, two)
        optimizer.synchronize()
        if hvd.rank() == 0:
            one.grad = one.grad.clone()
        replace(two)
        with optimizer.skip_synchronize():
            optimizer.step()
    assert one.tolist() == [-3 * mean()] * 3 and two.tolist() == [-1.5 * mean()] * 3


@needs_two
@pytest.mark.parametrize("clear", ["optimizer", "by hand"])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_a_step_that_one_rank_leaves_out(op: Any, clear: str, sent: str) -> None:
    """It goes on with its next batch. The others must not make their step with that."""
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = wrapped(weight, op=op)
    parts = hvd.size() if op == hvd.Sum else 1

    def compute() -> None:
        if clear == "optimizer":
            optimizer.zero_grad()
        else:
            weight.grad = None
        (torch.ones(1, 2) @ weight * (hvd.rank() + 1.0)).sum().backward()

    for step in range(4):
        compute()
        optimizer.synchronize()
        if step == 2:
            with pytest.raises(hvd.InvalidRequest, match=r"^rank 1 has cleared the results of "):
                if hvd.rank() == 1:
                    compute()
                    optimizer.synchronize()
                else:
                    optimizer.step()
        else:
            optimizer.step()
        equal_everywhere(weight)
    assert weight.flatten().tolist() == [-3 * mean() * parts] * 4


@pytest.mark.parametrize("values", ["equal", "different"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("exchanged", ["nothing", "one", "both"])
def test_gradients_that_follow_a_dropped_exchange(
    exchanged: str, when: str, values: str, sent: str
) -> None:
    """What the program has set is summed, whatever its values are."""
    one, two = zeros(), zeros()
    optimizer = wrapped(one, two, op=hvd.Sum)
    value = 0.25 if values == "equal" else 0.25 * (hvd.rank() + 1)
    right = 0.25 * hvd.size() * (1 if values == "equal" else mean())
    for step in range(3):
        if exchanged != "nothing":
            backward(*([one, two] if exchanged == "both" else [one]))
        optimizer.synchronize()  # and no step, as after a batch that is not usable
        one.grad = two.grad = None
        if when == "before":
            two.grad = torch.full((3,), value)
        backward(one)
        if when == "after":
            two.grad = torch.full((3,), value)
        optimizer.step()
        one.grad = two.grad = None
        assert one.tolist() == [-(step + 1) * hvd.size() * mean()] * 3
        assert two.tolist() == [-(step + 1) * right] * 3


def test_hooks_that_drop_on_all_ranks(sent: str) -> None:
    one, two = zeros(), zeros()
    optimizer = wrapped(one, two)
    optimizer.register_step_pre_hook(lambda *_: drop(two))
    optimizer.register_step_post_hook(lambda *_: drop(one) if hvd.rank() == 0 else None)
    for _ in range(3):
        backward(one, two)
        optimizer.step()
        drop(one)
    assert one.tolist() == [-3 * mean()] * 3 and two.tolist() == [0.0] * 3


# Several optimizers


@needs_two
@pytest.mark.parametrize("when", ["step", "read"])
def test_optimizers_in_different_orders(when: str) -> None:
    """Their names are new, so this is an error of their introduction."""
    names = [f"{when} x", f"{when} y"]
    parameters = [zeros(), zeros()]
    optimizers = [wrapped(one, names=[name]) for one, name in zip(parameters, names)]
    backward(*parameters)
    swap = hvd.rank() == 0
    others = ", ".join(map(str, range(1, hvd.size())))
    which = f"that of {names[1]} on rank 0; that of {names[0]} on rank {others}"
    with pytest.raises(hvd.InvalidRequest, match=f"in different orders: {which}. Use them in"):
        if swap and when == "read":
            assert len(list(optimizers[1].param_groups[0]["params"])) == 1
        optimizers[swap].step()


# Steps without the agreement


@needs_two
@pytest.mark.parametrize("where", ["on all", "on one"])
@pytest.mark.parametrize("how", ["backward", "twice", "by hand", "closure"])
def test_skip_synchronize_without_synchronize(how: str, where: str, sent: str) -> None:
    """Then the gradients are exchanged nevertheless."""
    parameter = zeros()
    optimizer = wrapped(parameter)

    def compute() -> float:
        backward(parameter)
        return 1.0

    for step in range(3):
        optimizer.zero_grad()
        if how == "by hand":
            parameter.grad = torch.full((3,), hvd.rank() + 1.0)
        elif how != "closure":
            compute()
        if how == "twice":
            optimizer.synchronize()
            compute()
        given = compute if how == "closure" else None
        if where == "on all" or hvd.rank() == 0:
            with optimizer.skip_synchronize():
                optimizer.step(given)
        else:
            optimizer.step(given)
        assert parameter.tolist() == [-(step + 1) * (1 + (how == "twice")) * mean()] * 3


def test_each_rank_makes_a_part_of_the_step(sent: str) -> None:
    """And copies its parameters to the others, so that each has the state of a part only."""
    parameters = [zeros() for _ in range(5)]
    optimizer = wrapped(*parameters, momentum=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        backward(*parameters)
        optimizer.synchronize()
        for at, parameter in enumerate(parameters):
            if at % hvd.size() != hvd.rank():
                parameter.grad = None
        with optimizer.skip_synchronize():
            optimizer.step()
        for at, parameter in enumerate(parameters):
            hvd.broadcast_parameters([(f"part.{at}", parameter)], at % hvd.size())
    right = -(1 + 1.5 + 1.75) * mean()
    assert [parameter.tolist() for parameter in parameters] == [[right] * 3] * 5
