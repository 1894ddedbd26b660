"""Names pair the gradients of the ranks, whatever optimizers each rank makes."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from promised import backward, equal_everywhere, mean, wrapped, zeros  # noqa: E402

import gradwire.torch as hvd  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error")
needs_two = pytest.mark.usefixtures("several_ranks")


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


OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("options: op=sum.* on rank 0; op=average.* on rank 1", {"op": hvd.Sum}),
    ("options: .*FP16.* on rank 0; .*None.* on rank 1", {"compression": hvd.Compression.fp16}),
    (r"groups of parameters: \(a\) on rank 0; others on rank 1", {"groups": 1}),
]


@needs_two
@pytest.mark.parametrize(("why", "option"), OTHERS)
@pytest.mark.parametrize("earlier", ["none", "kept", "dropped"])
def test_options_that_differ_are_one_error(
    why: str, option: dict[str, Any], earlier: str, sent: str
) -> None:
    parameter = zeros()
    first = wrapped(parameter)
    if earlier != "none":
        for _ in range(2):
            first.zero_grad()
            backward(parameter)
            first.step()
    if earlier != "kept" or hvd.rank() == 0:
        del first
    plain = torch.optim.SGD([parameter], lr=1.0)
    option = option if hvd.rank() == 0 else {}
    optimizer = hvd.DistributedOptimizer(plain, [("a", parameter)], **option)
    optimizer.zero_grad()
    with pytest.raises(hvd.InvalidRequest, match=f"the optimizers .* have different {why}"):
        backward(parameter)
        optimizer.step()
    assert hvd.allreduce(torch.ones(1)).item() == 1.0


@needs_two
def test_names_that_differ_are_one_error() -> None:
    parameter = zeros()
    # No other test uses these names, which would be known then.
    optimizer = wrapped(parameter, names=["here" if hvd.rank() == 0 else "there"])
    backward(parameter)
    with pytest.raises(
        hvd.InvalidRequest, match=r"different names: here on rank 0; there on rank 1"
    ):
        optimizer.step()
    assert parameter.tolist() == [0.0] * 3


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("clear", [True, False])
def test_optimizers_that_share_a_parameter(clear: bool, op: Any, sent: str) -> None:
    """A result of one is not summed again by the other."""
    shared, first, second = zeros(), zeros(), zeros()
    optimizers = [wrapped(shared, first, op=op), wrapped(shared, second, names="ac", op=op)]
    for step in range(3):
        if clear or step == 0:
            optimizers[1].zero_grad()
            optimizers[0].zero_grad()
        backward(shared, first, second)
        # The optimizer cleared or used last has sent the shared gradient.
        for optimizer in optimizers if clear or step % 2 == 0 else optimizers[::-1]:
            optimizer.step()
        equal_everywhere(shared)
    # Without clearing, gradients add up.
    steps, parts = 3 if clear else 1 + 2 + 3, hvd.size() if op == hvd.Sum else 1
    assert shared.tolist() == [-2 * steps * mean() * parts] * 3
    assert first.tolist() == second.tolist() == [-steps * mean() * parts] * 3


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("change", ["none", "clip"])
def test_an_optimizer_made_again_keeps_results(change: str, op: Any, sent: str) -> None:
    parameter, unused = zeros(), zeros()
    optimizer = wrapped(parameter, unused, op=op)
    backward(parameter, unused)
    optimizer.synchronize()
    if change == "clip":
        unused.grad.mul_(0.5)
    optimizer = wrapped(parameter, unused, op=op)
    parameter.grad = None
    backward(parameter)
    optimizer.step()
    parts, scale = hvd.size() if op == hvd.Sum else 1, 0.5 if change == "clip" else 1.0
    assert parameter.tolist() == [-mean() * parts] * 3
    assert unused.tolist() == [-mean() * parts * scale] * 3


@needs_two
def test_a_cell_of_a_notebook_is_run_again(sent: str) -> None:
    """What its errors advise works."""
    parameter = zeros()
    optimizer = wrapped(parameter)
    for _ in range(3):
        backward(parameter)  # then an exception ended the cell
        with pytest.raises(AssertionError, match=r"first call synchronize\(\)"):
            wrapped(parameter)
        with pytest.raises(AssertionError, match="call one of these first"):
            optimizer.zero_grad()
        optimizer.synchronize()
        optimizer = wrapped(parameter)
        optimizer.zero_grad()
        backward(parameter)
        optimizer.step()
        optimizer.zero_grad()
    assert parameter.tolist() == [-3 * mean()] * 3


@needs_two
def test_names_of_dead_optimizers_are_reused() -> None:
    """Daemons keep what they know about a name (BOUND)."""
    numbers = set()
    for _ in range(20):
        parameter = zeros()
        optimizer = wrapped(parameter, names=["reused"])
        backward(parameter)
        optimizer.step()
        numbers.add(optimizer._exchange.identity.number)
        assert parameter.tolist() == [-mean()] * 3
    assert len(numbers) <= 3


def test_names_that_the_optimizer_was_made_with() -> None:
    parameters = [("a", zeros()), ("b", zeros())]
    order = parameters if hvd.rank() % 2 == 0 else parameters[::-1]
    try:
        optimizer = torch.optim.SGD(order, lr=1.0)
    except TypeError:
        pytest.skip("optimizers of this PyTorch take no names")
    optimizer = hvd.DistributedOptimizer(optimizer)
    (a, b) = (parameter for _, parameter in parameters)
    for _ in range(3):
        optimizer.zero_grad()
        backward(a, b, b)
        optimizer.step()
    assert (a.tolist(), b.tolist()) == ([-3 * mean()] * 3, [-6 * mean()] * 3)


def test_names_that_two_groups_have() -> None:
    """They pair nothing; the order does, as without names."""
    try:
        groups = [{"params": [("a", zeros())]} for _ in range(2)]
        optimizer = torch.optim.SGD(groups, lr=1.0)
    except (TypeError, ValueError):
        pytest.skip("optimizers of this PyTorch take no such names")
    optimizer = hvd.DistributedOptimizer(optimizer)
    assert [*optimizer._parameter_names.values()] == ["noname.0", "noname.1"]
