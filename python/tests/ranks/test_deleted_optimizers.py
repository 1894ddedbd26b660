"""Optimizers that are deleted, or whose session ends, while a gradient is a result or in flight."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from promised import backward, equal_everywhere, mean, wrapped, zeros  # noqa: E402

import gradwire.torch as hvd  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error")
needs_two = pytest.mark.usefixtures("several_ranks")

OPS = pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
WHERE = pytest.mark.parametrize("where", ["on all", "on one"])


def parts(op: Any) -> int:
    return hvd.size() if op == hvd.Sum else 1


def trained(*parameters: Any, op: Any) -> Any:
    optimizer = wrapped(*parameters, op=op)
    backward(*parameters)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def clear(how: str, optimizer: Any, *parameters: Any) -> None:
    if how == "none":
        for parameter in parameters:
            parameter.grad = None
    else:
        optimizer.zero_grad(set_to_none=how == "optimizer")


CLEAR = pytest.mark.parametrize("how", ["none", "optimizer", "zeros"])


@needs_two
@CLEAR
@WHERE
@OPS
def test_deleted_in_flight(where: str, how: str, op: Any, sent: str) -> None:
    """The ranks get the right step, or one error until the gradients are cleared."""
    parameters = [zeros(), zeros(40_000)]
    optimizer = trained(*parameters, op=op)
    backward(*parameters)
    if where == "on all" or hvd.rank() == 0:
        del optimizer
        gc.collect()
        optimizer = wrapped(*parameters, op=op)
    right = 2
    if sent == "early":  # that of a rank which has deleted nothing waits for the others
        with pytest.raises(AssertionError, match=r"part of a result|has deleted its optimizer"):
            optimizer.step()
        right = 1
    else:
        optimizer.step()
    for step in range(3):
        clear(how, optimizer, *parameters)
        backward(*parameters)
        optimizer.step()
        for parameter in parameters:
            assert set(parameter.tolist()) == {-(right + step + 1) * mean() * parts(op)}


@needs_two
@OPS
def test_deleted_in_flight_and_cleared(op: Any, sent: str) -> None:
    """The others can't know that the rank's gradients were dropped."""
    parameters = [zeros(), zeros()]
    optimizer = trained(*parameters, op=op)
    # Only the others have computed the second gradient when the optimizer is deleted.
    backward(*parameters[: 1 if hvd.rank() == 0 else 2])
    if hvd.rank() == 0:
        del optimizer
        for parameter in parameters:
            parameter.grad = None
        optimizer = wrapped(*parameters, op=op)
        backward(*parameters)
    if sent == "early":
        with pytest.raises(AssertionError, match="rank 0 has deleted its optimizer"):
            optimizer.step()
    else:
        optimizer.step()
    optimizer.zero_grad()
    backward(*parameters)
    optimizer.step()
    right = (2 if sent == "early" else 3) * mean() * parts(op)
    assert [parameter.tolist() for parameter in parameters] == [[-right] * 3] * 2


@needs_two
@OPS
def test_a_new_model_after_one_in_flight(op: Any, sent: str) -> None:
    """As a function that an exception has ended, and that is called again."""
    for _ in range(3):
        parameters = [zeros(), zeros()]
        optimizer = trained(*parameters, op=op)
        backward(*parameters)
        del optimizer
    assert [parameter.tolist() for parameter in parameters] == [[-mean() * parts(op)] * 3] * 2


@needs_two
@OPS
@pytest.mark.parametrize("kind", ["views", "fp16", "sparse"])
def test_deleted_but_the_gradient_was_copied(kind: str, op: Any, sent: str) -> None:
    """Then it is still this rank's own."""
    parameter = torch.nn.Parameter(torch.zeros(4, 2))
    compression = hvd.Compression.fp16 if kind == "fp16" else hvd.Compression.none

    def made() -> Any:
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        return hvd.DistributedOptimizer(
            optimizer, [("a", parameter)], op=op, compression=compression
        )

    def compute() -> Any:
        rows = torch.nn.functional.embedding(torch.arange(4), parameter, sparse=kind == "sparse")
        (rows.sum() * (hvd.rank() + 1.0)).backward()
        return parameter.grad.numpy() if kind == "views" else None

    optimizer = made()
    compute()
    optimizer.step()
    parameter.grad = None
    kept = compute()
    hvd.barrier()
    del optimizer
    optimizer = made()
    try:
        optimizer.step()
    except AssertionError as error:  # the copy of a new gradient became its memory
        assert kind != "sparse" and sent == "early" and "part of a result" in str(error)
        parameter.grad = None
        compute()
        optimizer.step()
    assert set(parameter.flatten().tolist()) == {-2 * mean() * parts(op)}
    assert kept is None or set(kept.flatten()) <= {hvd.rank() + 1.0, mean() * parts(op)}


@OPS
@pytest.mark.parametrize("frozen", [False, True])
def test_a_result_of_a_deleted_optimizer(frozen: bool, op: Any, sent: str) -> None:
    """Another optimizer does not sum it again, and a copy of the gradient is not the result."""
    shared = zeros()
    if frozen:
        shared.requires_grad_(False)
    first, second = (wrapped(shared, names=[f"left {at}"], op=op) for at in "ab")
    second.zero_grad()
    if frozen:
        shared.grad = torch.full((3,), hvd.rank() + 1.0)
    else:
        backward(shared)
    second.step()
    del second
    gc.collect()
    copy.deepcopy(shared.grad)
    file = io.BytesIO()
    torch.save(shared.grad, file)
    file.seek(0)
    assert torch.load(file).tolist() == [mean() * parts(op)] * 3
    if frozen:
        first = wrapped(shared, names=["left c"], op=op)
    first.step()
    assert shared.tolist() == [-2 * mean() * parts(op)] * 3
    shared.grad = torch.full((3,), hvd.rank() + 1.0)
    first.step()
    assert shared.tolist() == [-3 * mean() * parts(op)] * 3


@OPS
def test_made_again_between_two_passes(op: Any, sent: str) -> None:
    """A pass has been added to an earlier result."""
    parameter = zeros()
    optimizer = wrapped(parameter, op=op, backward_passes_per_step=2)
    backward(parameter)
    optimizer.step()
    for step in range(2):
        backward(parameter)
        if step:
            del optimizer
        optimizer = wrapped(parameter, op=op, backward_passes_per_step=2)
        backward(parameter)
        optimizer.step()
        equal_everywhere(parameter)
    assert parameter.tolist() == [-(1 + 3 + 5) * mean() * parts(op)] * 3


@needs_two
@CLEAR
@OPS
@pytest.mark.parametrize("again", [False, True])
def test_a_session_ends_in_flight(again: bool, how: str, op: Any, sent: str) -> None:
    parameters = [zeros(), zeros()]
    optimizer = trained(*parameters, op=op)
    backward(*parameters)
    hvd.barrier()
    optimizer._exchange._session = None  # as shutdown() and init()
    if again:
        del optimizer
        optimizer = wrapped(*parameters, op=op)
    if sent == "early":
        with pytest.raises(AssertionError, match="part of a result"):
            optimizer.step()
    else:
        optimizer.step()
    clear(how, optimizer, *parameters)
    backward(*parameters)
    optimizer.step()
    right = (2 if sent == "early" else 3) * mean() * parts(op)
    assert [parameter.tolist() for parameter in parameters] == [[-right] * 3] * 2


def test_deleted_optimizers_leave_no_hooks() -> None:
    parameter = zeros()
    for _ in range(5):
        optimizer = wrapped(parameter, op=hvd.Sum)
        backward(parameter)
        optimizer.step()
        del optimizer
        gc.collect()
    hooks: Any = parameter
    assert not hooks._post_accumulate_grad_hooks and not hooks._backward_hooks
