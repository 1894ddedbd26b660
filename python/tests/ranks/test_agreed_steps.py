"""All ranks agree in each step whether gradients are exchanged, whatever was exchanged before."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

from launching import needs_torch  # noqa: E402
from promised import backward, equal_everywhere, mean, wrapped, zeros  # noqa: E402

import gradwire.torch as hvd  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error")
needs_two = pytest.mark.usefixtures("several_ranks")

OPS = pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])


def parts(op: Any) -> int:
    return hvd.size() if op == hvd.Sum else 1


def clear(how: str, optimizer: Any, *parameters: Any) -> None:
    """Clears gradients as programs do."""
    if how == "optimizer":
        optimizer.zero_grad()
        return
    for parameter in parameters:
        if how == "none":
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.zero_()


@OPS
@pytest.mark.parametrize("how", ["optimizer", "none", "zeros"])
def test_an_empty_batch_after_a_skipped_step(how: str, op: Any, sent: str) -> None:
    parameter, other = zeros(), zeros()
    optimizer = wrapped(parameter, other, op=op)
    for step in range(6):
        clear(how, optimizer, parameter, other)
        empty = hvd.rank() == 0 and step in (2, 5)
        if not empty:
            backward(parameter, other)
        if step in (1, 4):
            optimizer.synchronize()  # and no step, as after a NaN
        else:
            optimizer.step()
        equal_everywhere(parameter, other)
    expected = (2 * mean() + 2 * (mean() - 1 / hvd.size())) * parts(op)
    torch.testing.assert_close(parameter.detach(), torch.full((3,), -expected))


@OPS
@pytest.mark.parametrize("then", ["step", "synchronize"])
def test_gradients_set_after_a_skipped_step(then: str, op: Any, sent: str) -> None:
    parameter = zeros()
    optimizer = wrapped(parameter, op=op)
    for step in range(4):
        parameter.grad = None
        loss = (parameter * torch.ones(3)).sum() * (hvd.rank() + 1.0)
        [parameter.grad] = torch.autograd.grad(loss, [parameter])
        if step == 1:
            optimizer.synchronize()
            continue
        if then == "synchronize":
            optimizer.synchronize()
            parameter.grad.mul_(0.5)
        optimizer.step()
    scale = 0.5 if then == "synchronize" else 1.0
    assert parameter.tolist() == [-3 * mean() * parts(op) * scale] * 3


@OPS
@pytest.mark.parametrize("drops", [False, True])
def test_gradients_by_hand_equal_to_the_last(drops: bool, op: Any, sent: str) -> None:
    """They are this rank's own, even if they are equal to the last result."""
    parameter = zeros()
    optimizer = wrapped(parameter, op=op)
    for _ in range(2):
        parameter.grad = torch.full((3,), 0.0 if hvd.rank() else parts(op) * 1.0)
        optimizer.step()
        if drops:
            parameter.grad = None
        with torch.no_grad():
            parameter.zero_()
        parameter.grad = torch.full((3,), parts(op) / hvd.size())
        optimizer.step()
        assert parameter.tolist() == pytest.approx([-parts(op) * parts(op) / hvd.size()] * 3)


def test_a_kept_sum_with_nan_is_not_summed(sent: str) -> None:
    parameter = zeros(2)
    optimizer = wrapped(parameter, op=hvd.Sum)
    parameter.grad = torch.tensor([torch.nan, 1.0])
    for step in range(3):
        optimizer.step()
        assert parameter[1].item() == -(step + 1) * hvd.size()


@needs_two
@OPS
def test_one_rank_rounds_after_synchronize(op: Any, sent: str) -> None:
    parameter = zeros()
    optimizer = wrapped(parameter, op=op)
    for step in range(4):
        parameter.grad = None
        (parameter.sum() * (hvd.rank() + 1.001)).backward()
        optimizer.synchronize()
        if hvd.rank() == 0 and step % 2:
            parameter.grad = parameter.grad.bfloat16().float()
        elif hvd.rank() == 0:
            parameter.grad.data = parameter.grad.bfloat16().float()
        optimizer.step()
        equal_everywhere(parameter)


@needs_two
@OPS
@pytest.mark.parametrize("how", ["in place", "by replacing"])
def test_clipping_after_synchronize(how: str, op: Any, sent: str) -> None:
    """Also if one rank has no batch, and if clipping is repeated."""
    parameter, unused = zeros(), zeros()
    optimizer = wrapped(parameter, unused, op=op, weight_decay=0.5)
    right = 0.0
    for step in range(4):
        optimizer.zero_grad()
        if step != 2 or hvd.rank() > 0:
            backward(parameter)
        for _ in range(2):
            optimizer.synchronize()
            assert unused.grad is None
            if how == "in place":
                parameter.grad.mul_(0.5)
            else:
                parameter.grad = parameter.grad * 0.5
        if step == 3:
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        gradient = (mean() if step != 2 else mean() - 1 / hvd.size()) * 0.25
        right -= gradient * parts(op) + 0.5 * right
        torch.testing.assert_close(parameter.detach(), torch.full((3,), right))
        equal_everywhere(parameter)
    assert unused.tolist() == [0.0] * 3


@OPS
@pytest.mark.parametrize("call", ["synchronize", "read", "both"])
def test_only_one_rank_asks_for_gradients(call: str, op: Any, sent: str) -> None:
    """For example to log their norm. The others meet it in their step."""
    parameter = zeros()
    optimizer = wrapped(parameter, op=op)
    for step in range(4):
        optimizer.zero_grad()
        backward(parameter)
        if hvd.rank() == step % hvd.size():
            if call != "synchronize":
                assert list(optimizer.param_groups[0]["params"]) == [parameter]
            if call != "read":
                optimizer.synchronize()
            assert parameter.grad.tolist() == [mean() * parts(op)] * 3
        optimizer.step()
    assert parameter.tolist() == [-4 * mean() * parts(op)] * 3


@needs_two
def test_all_read_but_one_has_no_gradient(sent: str) -> None:
    parameter = zeros()
    optimizer = wrapped(parameter)
    for step in range(6):
        parameter.grad = None
        if hvd.rank() != step % hvd.size():
            backward(parameter)
        assert list(optimizer.param_groups[0]["params"]) == [parameter]
        optimizer.synchronize()
        parameter.grad.mul_(0.5)
        if step % 2:
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        equal_everywhere(parameter)


@needs_two
@OPS
@pytest.mark.parametrize("first", ["synchronize", "step"])
@pytest.mark.parametrize("names", ["ab", "aa"])
def test_ranks_read_several_optimizers(names: str, first: str, op: Any, sent: str) -> None:
    """One has no batch, so it waits in the first optimizer while the others read the second."""
    parameters = [zeros(), zeros()]
    optimizers = [wrapped(p, names=name, op=op) for p, name in zip(parameters, names)]
    for step in range(4):
        # Optimizers with equal names have numbers from their first step on.
        full = 2 if names == "ab" else 0
        absent = step % hvd.size() if step != full else None
        for parameter in parameters:
            parameter.grad = None
            if hvd.rank() != absent:
                backward(parameter)
        groups = [group for one in optimizers for group in one.param_groups]
        assert all(len([*group["params"]]) == 1 for group in groups)
        if first == "synchronize":
            for one in optimizers:
                one.synchronize()
        for one in optimizers:
            one.step()
        equal_everywhere(*parameters)
    missing = sum(step % hvd.size() + 1 for step in range(4) if step != full)
    expected = (4 * mean() - missing / hvd.size()) * parts(op)
    for parameter in parameters:
        torch.testing.assert_close(parameter.detach(), torch.full((3,), -expected))


@OPS
def test_one_rank_reads_before_it_goes_on(op: Any, sent: str) -> None:
    """The others have computed the second optimizer's gradients already."""
    parameters = [zeros(), zeros()]
    optimizers = [wrapped(parameters[0], op=op), wrapped(parameters[1], op=op)]
    for step in range(4):
        for one in optimizers:
            one.zero_grad()
        backward(parameters[0])
        if hvd.rank() == step % hvd.size():
            assert [*optimizers[0].param_groups[0]["params"]] == parameters[:1]
        backward(parameters[1])
        for one in optimizers:
            one.step()
    for parameter in parameters:
        assert parameter.tolist() == [-4 * mean() * parts(op)] * 3


@needs_two
@OPS
@pytest.mark.parametrize("change", ["clip", "replace", "drop"])
@pytest.mark.parametrize("how", ["batch", "call"])
def test_one_rank_alone_clips(how: str, change: str, op: Any, sent: str) -> None:
    """Either it alone has a batch, or it alone reads the parameters."""
    parameter = zeros()
    optimizer = wrapped(parameter, op=op)
    for step in range(4):
        optimizer.zero_grad()
        alone = hvd.rank() == 0
        if alone or how == "call" or step != 2:
            backward(parameter)
        found = [parameter]
        if alone or how == "batch":
            found = list(optimizer.param_groups[0]["params"])
        if step == 2 and alone:
            if change == "clip":
                found[0].grad.mul_(0.5)
            else:
                found[0].grad = found[0].grad * 0.5 if change == "replace" else None
        if step == 2:
            with pytest.raises(AssertionError, match=r"call optimizer.synchronize\(\) before"):
                optimizer.step()
        else:
            optimizer.step()
        equal_everywhere(parameter)
    assert parameter.tolist() == [-3 * mean() * parts(op)] * 3


@needs_two
@OPS
def test_one_rank_alone_skips_the_agreement(op: Any, sent: str) -> None:
    parameter = zeros()
    optimizer = wrapped(parameter, op=op)
    backward(parameter)
    if hvd.rank() == 0:
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        backward(parameter)
    with pytest.raises(hvd.InvalidRequest, match="different calls of the optimizer"):
        optimizer.step()


class Failing:
    """A hook of steps that raises on some ranks."""

    ranks: tuple[int, ...] = ()

    def __call__(self, *_: Any) -> None:
        if hvd.rank() in self.ranks:
            raise ArithmeticError


@needs_two
@pytest.mark.parametrize("again", [False, True])
def test_one_rank_does_not_make_a_step(again: bool, sent: str) -> None:
    parameter, hook = zeros(), Failing()
    optimizer = wrapped(parameter)
    optimizer.register_step_pre_hook(hook)
    backward(parameter)
    optimizer.step()
    hook.ranks = (0,)
    optimizer.zero_grad()
    backward(parameter)
    if hvd.rank() == 0:
        with pytest.raises(ArithmeticError):
            optimizer.step()
    else:
        optimizer.step()
    hook.ranks = ()
    if hvd.rank() > 0 or not again:
        optimizer.zero_grad()
        backward(parameter)
    with pytest.raises(AssertionError, match="rank 0 has not completed the last step"):
        optimizer.step()
    hvd.broadcast_parameters([parameter], hvd.size() - 1)
    optimizer.zero_grad()
    backward(parameter)
    optimizer.step()
    assert parameter.tolist() == [-3 * mean()] * 3


@needs_two
def test_steps_that_ranks_need_not_make(sent: str) -> None:
    """All ranks fail or skip it, or one has joined, or has made its optimizer again."""
    parameter, hook = zeros(), Failing()
    optimizer = wrapped(parameter)
    optimizer.register_step_pre_hook(hook)
    for step in range(10):
        hook.ranks = tuple(range(hvd.size())) if step == 2 else ()
        if step == 7 and hvd.rank() == 0:
            optimizer = wrapped(parameter)
        if step != 5 or hvd.rank() > 0:
            optimizer.zero_grad()
            backward(parameter)
            if step == 2:
                with pytest.raises(ArithmeticError):
                    optimizer.step()
            elif step == 4:
                optimizer.synchronize()
            else:
                optimizer.step()
        if step == 5:
            hvd.join()
            hvd.broadcast_parameters([parameter], hvd.size() - 1)
    equal_everywhere(parameter)


@needs_two
@pytest.mark.parametrize("clear_with", ["optimizer", "none"])
def test_a_scaler_skips_a_step(clear_with: str, sent: str) -> None:
    needs_torch(2, 3, why="no scaler for CPUs")
    parameter = zeros()
    optimizer = wrapped(parameter)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step in range(6):
        clear(clear_with, optimizer, parameter)
        [gradient] = torch.autograd.grad(
            scaler.scale(parameter.sum() * (hvd.rank() + 1.0)), [parameter]
        )
        infinite = step in (1, 4) and hvd.rank() == 0
        if hvd.rank() == 0 and step in (2, 5):
            gradient = None  # an empty batch
        parameter.grad = gradient * float("inf") if infinite else gradient
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        equal_everywhere(parameter)
    expected = 2 * mean() + 2 * (mean() - 1 / hvd.size())
    torch.testing.assert_close(parameter.detach(), torch.full((3,), -expected))


@needs_two
def test_a_parameter_that_one_rank_adds(sent: str) -> None:
    parameter, added = zeros(), zeros()
    optimizer = wrapped(parameter)
    for step in range(3):
        optimizer.zero_grad()
        backward(parameter)
        if step == 1 and hvd.rank() == 0:
            optimizer.param_groups[0]["params"].append(added)
        if step == 1:
            error = NotImplementedError if hvd.rank() == 0 else hvd.InvalidRequest
            with pytest.raises(error):
                optimizer.step()
            if hvd.rank() == 0:
                optimizer.param_groups[0]["params"].pop()
        else:
            optimizer.step()
    assert parameter.tolist() == [-2 * mean()] * 3


@needs_two
@pytest.mark.parametrize("groups", [None, 1])
def test_a_parameter_that_one_rank_removes(groups: int | None, sent: str) -> None:
    parameter, removed = zeros(), zeros()
    optimizer = wrapped(parameter, removed, groups=groups)
    listed = optimizer.param_groups[0]["params"]
    for step in range(5):
        if step == (1 if hvd.rank() == 0 else 3):
            assert listed.pop() is removed
        optimizer.zero_grad()
        removed.grad = None
        backward(parameter, removed)
        if step in (1, 2):
            with pytest.raises(hvd.InvalidRequest, match="b requires a gradient only"):
                optimizer.step()
        else:
            optimizer.step()
        equal_everywhere(parameter, removed)
    assert parameter.tolist() == [-3 * mean()] * 3
    assert removed.tolist() == [-mean()] * 3


@needs_two
@pytest.mark.parametrize("alone", ["its loss", "its closure"])
def test_only_one_rank_has(alone: str, sent: str) -> None:
    parameter = zeros()
    optimizer = wrapped(parameter)

    def closure() -> Any:
        optimizer.zero_grad()
        if hvd.rank() == 0 or alone == "its loss":
            backward(parameter)
        return parameter.sum() if hvd.rank() == 0 or not differ else None

    for step in range(3):
        differ = step == 1
        if differ:
            optimizer.zero_grad()
            backward(parameter)
            optimizer.synchronize()
            given = closure if hvd.rank() == 0 or alone == "its loss" else None
            with pytest.raises(hvd.InvalidRequest, match="some ranks"):
                optimizer.step(given)
        else:
            optimizer.step(closure)
        equal_everywhere(parameter)


# What `float` accepts, and so what LBFGS decides by.
NUMBERS: list[Callable[[float], Any]] = [
    torch.tensor,
    lambda value: torch.tensor([[value]], dtype=torch.float64),
    lambda value: torch.tensor(int(value)),
    float,
    int,
    np.float32,
    np.array,
]


@pytest.mark.parametrize("number", range(len(NUMBERS)))
def test_ranks_return_different_kinds_of_numbers(number: int) -> None:
    parameter = zeros()
    optimizer = wrapped(parameter)
    number_of = NUMBERS[(number + hvd.rank()) % len(NUMBERS)]

    def closure() -> Any:
        optimizer.zero_grad()
        backward(parameter)
        return number_of(2.0 * hvd.rank())

    for _ in range(2):
        loss = optimizer.step(closure)
        assert float(loss) == hvd.size() - 1
        if isinstance(own := number_of(0.0), torch.Tensor):
            # One rank alone exchanges nothing, and gets what it has returned.
            assert loss.shape == own.shape
            assert loss.is_floating_point() or hvd.size() == 1
    equal_everywhere(parameter)


@needs_two
def test_one_rank_removes_another_parameter(sent: str) -> None:
    parameters = one, other = zeros(), zeros()
    optimizer = wrapped(*parameters)
    listed = optimizer.param_groups[0]["params"]
    for step in range(2):
        listed[:] = [other if step == 1 and hvd.rank() == 0 else one]
        for parameter in parameters:
            parameter.grad = None
        backward(*parameters)
        if step == 1:
            with pytest.raises(hvd.InvalidRequest, match="requires a gradient only"):
                optimizer.step()
        else:
            optimizer.step()
    assert one.tolist() == [-mean()] * 3 and other.tolist() == [0.0] * 3


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_a_copy_after_a_parameter_was_removed(op: Any) -> None:
    parameter, removed = zeros(), zeros()
    optimizer = wrapped(parameter, removed, op=op)
    assert optimizer.param_groups[0]["params"].pop() is removed
    copied = copy.deepcopy(optimizer)
    [twin] = copied.param_groups[0]["params"]
    for _ in range(2):
        copied.zero_grad()
        backward(twin)
        copied.step()
        equal_everywhere(twin)
    assert parameter.tolist() == [0.0] * 3 and twin.tolist() != [0.0] * 3


@needs_two
def test_lists_of_a_shallow_copy_wait(sent: str) -> None:
    parameter = zeros()
    first = wrapped(parameter)
    second = hvd.DistributedOptimizer(copy.copy(first), [("a", parameter)])
    del first
    for _ in range(3):
        second.zero_grad()
        backward(parameter)
        for found in second.param_groups[0]["params"]:
            assert found.grad.tolist() == [mean()] * 3
        second.step()
    assert parameter.tolist() == [-3 * mean()] * 3


@needs_two
def test_backward_passes_in_several_threads(sent: str) -> None:
    """Their hooks compete for the last gradient of each group."""
    parameters = [zeros() for _ in range(80)]
    optimizer = wrapped(*parameters, names=[f"p{at}" for at in range(80)], groups=2)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            optimizer.zero_grad()
            with ThreadPoolExecutor(4) as threads:
                list(threads.map(lambda at: backward(*parameters[at::4]), range(4)))
            optimizer.step()
    finally:
        sys.setswitchinterval(before)
    for parameter in parameters:
        assert parameter.tolist() == [-20 * mean()] * 3


@needs_two
def test_adding_to_a_replaced_sum_is_an_error(sent: str) -> None:
    parameter = zeros()
    optimizer = wrapped(parameter, op=hvd.Sum)
    for step in range(3):
        optimizer.zero_grad()
        backward(parameter)
        if step == 1:
            optimizer.synchronize()
            parameter.grad = parameter.grad * 0.5
            if hvd.rank() == 0:
                backward(parameter)
            with pytest.raises(AssertionError, match="was replaced after"):
                optimizer.step()
        else:
            optimizer.step()
    assert parameter.tolist() == [-2 * mean() * hvd.size()] * 3
