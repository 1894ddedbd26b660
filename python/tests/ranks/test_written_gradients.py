"""DistributedOptimizer with gradients that the program itself writes, changes or keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.dlpack import from_dlpack, to_dlpack  # noqa: E402

import gradwire.torch as hvd  # noqa: E402
from gradwire.torch import _places  # noqa: E402


def total(op: Any) -> float:
    """Returns the reduction of all ranks' ``rank() + 1``."""
    added = sum(range(1, hvd.size() + 1))
    return added if op == hvd.Sum else added / hvd.size()


def trained(op: Any = hvd.Average, count: int = 3) -> tuple[Any, Any]:
    parameter = torch.nn.Parameter(torch.zeros(count))
    plain = torch.optim.SGD([parameter], lr=1.0)
    return parameter, hvd.DistributedOptimizer(plain, [("parameter", parameter)], op=op)


def fill_array(gradient: torch.Tensor, value: float) -> None:
    pytest.importorskip("numpy")
    gradient.numpy()[...] = value


# Only the last one changes the gradient's version.
WRITES: dict[str, Callable[[torch.Tensor, float], Any]] = {
    "data": lambda gradient, value: gradient.data.fill_(value),
    "numpy": fill_array,
    "dlpack": lambda gradient, value: from_dlpack(to_dlpack(gradient)).fill_(value),
    "itself": lambda gradient, value: gradient.fill_(value),
}


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("clear", ["never", "optimizer", "zeros"])
@pytest.mark.parametrize("how", [*WRITES])
def test_gradients_that_the_program_writes(how: str, clear: str, op: Any) -> None:
    parameter, optimizer = trained(op)
    for step in range(3):
        if clear != "never":
            optimizer.zero_grad(set_to_none=clear == "optimizer")
        if parameter.grad is None:
            parameter.grad = torch.zeros(3)
        WRITES[how](parameter.grad, hvd.rank() + 1.0)
        optimizer.step()
        assert parameter.tolist() == [-(step + 1) * total(op)] * 3


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("clear", [False, True])
def test_gradients_that_one_rank_writes(clear: bool, op: Any) -> None:
    """The others write what they have. Uncleared, the root's sum is what it writes again."""
    parameter, optimizer = trained(op)
    parts = hvd.size() if op == hvd.Average else 1
    for step in range(3):
        if clear:
            optimizer.zero_grad()
        if parameter.grad is None:
            parameter.grad = torch.zeros(3)
        parameter.grad.data.fill_(4.0 * parts if hvd.rank() == 0 else 0.0)
        optimizer.step()
        assert parameter.tolist() == [-4.0 * (step + 1)] * 3
    # No rank writes, and zeros still represent no gradient.
    optimizer.zero_grad()
    optimizer.step()
    assert parameter.tolist() == [-12.0] * 3


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_writes_between_backward_passes(op: Any) -> None:
    parameter, optimizer = trained(op)
    expected = 0.0
    for step in range(3):
        optimizer.zero_grad()
        (parameter.sum() * (hvd.rank() + 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        parameter.grad = torch.zeros(3) if parameter.grad is None else parameter.grad
        parameter.grad.data.fill_(2.0 * (hvd.rank() + 1.0))
        if step == 1:
            (parameter.sum() * (hvd.rank() + 1.0)).backward()
        optimizer.step()
        expected -= (4 if step == 1 else 3) * total(op)
        assert parameter.tolist() == [expected] * 3


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_an_unwritten_result_is_reused(op: Any) -> None:
    parameter, optimizer = trained(op)
    (parameter.sum() * (hvd.rank() + 1.0)).backward()
    for step in range(3):
        optimizer.step()
        assert parameter.tolist() == [-(step + 1) * total(op)] * 3


@pytest.mark.parametrize("change", ["convert", "share"])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_sum_that_is_moved(sparse: bool, replace: bool, change: str, sent: str) -> None:
    """It is not summed again, also if the program has replaced it before the step."""
    net = torch.nn.Embedding(2, 1, sparse=sparse).double()
    torch.nn.init.zeros_(net.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters(), op=hvd.Sum
    )
    (net(torch.tensor([1])) * (hvd.rank() + 1) / 3).sum().backward()
    optimizer.synchronize()
    if replace:
        net.weight.grad = net.weight.grad * 0.5
    optimizer.step()
    once = net.weight.detach()[1].item()
    if change == "convert":
        net.float(), net.double()
    elif not sparse:
        net.share_memory()
    optimizer.step()
    assert net.weight[1].item() == pytest.approx(2 * once)
    total = hvd.size() * (hvd.size() + 1) / 6
    assert once == pytest.approx(-total * (0.5 if replace else 1.0))


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("how", [*WRITES])
def test_writes_after_a_computed_step(how: str, op: Any) -> None:
    parameter, optimizer = trained(op)
    for step in range(4):
        if step % 2 == 0:
            optimizer.zero_grad()
            (parameter.sum() * (hvd.rank() + 1.0)).backward()
        else:
            WRITES[how](parameter.grad, hvd.rank() + 1.0)
        optimizer.step()
        assert parameter.tolist() == [-(step + 1) * total(op)] * 3


def in_a_graph(gradient: torch.Tensor) -> Callable[[], list[float]]:
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * gradient).sum()

    def read() -> list[float]:
        loss.backward()
        assert weight.grad is not None
        return weight.grad.tolist()

    return read


def in_a_storage(gradient: torch.Tensor) -> Callable[[], list[float]]:
    storage, at = gradient.untyped_storage(), gradient.storage_offset()

    def read() -> list[float]:
        view: Any = torch.empty(0)
        values: list[float] = view.set_(storage, at, (2,), (1,)).tolist()
        return values

    return read


KEPT: dict[str, Callable[[Any], Callable[[], list[float]]]] = {
    "itself": lambda gradient: gradient.tolist,
    "view": lambda gradient: gradient[:].tolist,
    "detached": lambda gradient: gradient.detach().tolist,
    "array": lambda gradient: gradient.numpy().tolist,
    "graph": in_a_graph,
    "storage": in_a_storage,
    "dlpack": lambda gradient: from_dlpack(to_dlpack(gradient)).tolist,
}


@pytest.mark.parametrize("clear", ["optimizer", "model", "another"])
@pytest.mark.parametrize("how", [*KEPT])
def test_gradients_that_the_program_keeps(how: str, clear: str) -> None:
    if how == "array":
        pytest.importorskip("numpy")
    parameter, optimizer = trained(count=2)

    def gradient(weight: float) -> Any:
        if clear == "optimizer":
            optimizer.zero_grad()
        else:
            parameter.grad = None
        if clear != "another" or hvd.rank() < hvd.size() - 1:
            (parameter.sum() * weight).backward()
        optimizer.step()
        return parameter.grad

    # Alternatively, the last rank does not use the parameter.
    used = 1.0 if clear != "another" else (hvd.size() - 1) / hvd.size()
    if used == 0.0:
        pytest.skip("no rank uses the parameter")
    kept = [KEPT[how](gradient(weight)) for weight in (1.0, 5.0, 7.0)]
    last = gradient(9.0)
    assert last.tolist() == pytest.approx([9.0 * used] * 2)
    for read, weight in zip(kept, (1.0, 5.0, 7.0)):
        assert read() == pytest.approx([weight * used] * 2)


@pytest.mark.parametrize("how", ["storage", "dlpack"])
def test_what_uses_a_gradients_memory_keeps_it(how: str) -> None:
    """Also if it does not count as a tensor on the storage."""
    parameter, optimizer = trained(count=2)
    for step in range(3):
        parameter.grad = torch.zeros(2)
        read = KEPT[how](parameter.grad)
        (parameter.sum() * (step + 1.0)).backward()
        optimizer.step()
        assert read() == parameter.grad.tolist() == [step + 1.0] * 2


@pytest.mark.parametrize("how", ["storage", "dlpack"])
def test_parts_that_a_hook_lends(how: str, sent: str) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    read: list[Callable[[], list[float]]] = []
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda p: read.append(KEPT[how](p.grad)))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=1.0), list(zip("ab", parameters))
    )
    for step in range(3):
        read.clear()
        for parameter in parameters:
            parameter.grad = None
        (torch.cat(parameters) * (step + hvd.rank() + 1.0)).sum().backward()
        optimizer.step()
        for parameter, its in zip(parameters, read):
            assert its() == parameter.grad.tolist() == [step + total(hvd.Average)] * 2


def concatenated(keep: list[torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns a function whose backward pass keeps the tensor of which it returns parts."""

    class Concatenated(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
            return torch.cat([one, two])

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            keep[:] = [gradient.clone()]
            return keep[0][:2], keep[0][2:]

    apply: Callable[..., torch.Tensor] = Concatenated.apply
    return apply


@pytest.mark.parametrize("first", [0, 2])
def test_a_backward_pass_that_keeps_its_result(first: int, sent: str) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=1.0), list(zip("ab", parameters))
    )
    kept: list[torch.Tensor] = []
    for step in range(4):
        for parameter in parameters:
            parameter.grad = None
        join = concatenated(kept) if step >= first else lambda *both: torch.cat(both)
        (join(*parameters) * (hvd.rank() + 1.0)).sum().backward()
        optimizer.synchronize()
        if step >= first:
            kept[0].mul_(0.5)
        optimizer.step()
    for parameter in parameters:
        assert parameter.tolist() == [-(first + (4 - first) / 2) * total(hvd.Average)] * 2


def test_parts_that_are_cleared_in_place(sent: str) -> None:
    """They share a version, although no other tensor has their memory."""
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=1.0), list(zip("ab", parameters))
    )
    (torch.cat(parameters) * (hvd.rank() + 1.0)).sum().backward()
    optimizer.step()
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        for parameter in parameters:
            (parameter.sum() * (hvd.rank() + 1.0)).backward()
        optimizer.step()
    assert [parameter.tolist() for parameter in parameters] == [[-4 * total(hvd.Average)] * 2] * 2


def test_kept_gradients_without_user_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then each gradient has its own place."""
    monkeypatch.setattr(_places, "_users", None)
    parameter, optimizer = trained(count=2)
    kept = []
    for weight in (1.0, 5.0, 7.0):
        optimizer.zero_grad()
        (parameter.sum() * weight).backward()
        optimizer.step()
        kept.append(parameter.grad)
    assert [gradient.tolist() for gradient in kept] == [[1.0] * 2, [5.0] * 2, [7.0] * 2]


def test_zeros_are_written_to_kept_gradients() -> None:
    """As in PyTorch, if the program asks for zeros."""
    parameter, optimizer = trained()
    parameter.sum().backward()
    optimizer.step()
    kept = parameter.grad
    optimizer.zero_grad(set_to_none=False)
    assert parameter.grad is kept and kept.tolist() == [0.0] * 3


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_gradients_in_a_buffer_that_is_reused(op: Any, skips: bool, sent: str) -> None:
    """As those of CUDA graphs: each has the address and the version of the last one."""
    buffer = torch.zeros(3)

    class InTheBuffer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, parameter: Any, weight: float) -> Any:
            ctx.weight = weight
            return parameter.sum()

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            WRITES["data"](buffer, ctx.weight)
            return buffer.detach(), None

    parameter, optimizer = trained(op)
    for step in range(4):
        parameter.grad = None
        InTheBuffer.apply(parameter, hvd.rank() + 1.0).backward()
        optimizer.synchronize()
        if not skips or step == 3:
            optimizer.step()
    assert parameter.tolist() == [-(1 if skips else 4) * total(op)] * 3


def replace(weight: Any) -> None:
    weight.grad = weight.grad * 0.5


def replace_after_dropping(weight: Any) -> None:
    parts = weight.grad._indices().clone(), weight.grad._values() * 0.5, weight.grad.shape
    weight.grad = None
    weight.grad = torch.sparse_coo_tensor(*parts, check_invariants=True)


def multiply(weight: Any) -> None:
    weight.grad.mul_(0.5)


def multiply_values(weight: Any) -> None:
    weight.grad._values().mul_(0.5)


@pytest.mark.parametrize("change", [replace, replace_after_dropping, multiply, multiply_values])
def test_sparse_gradients_changed_in_flight(change: Callable[[Any], None]) -> None:
    if hvd.size() == 1:
        pytest.skip("one rank exchanges nothing")
    torch.manual_seed(2)
    net = torch.nn.Embedding(6, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters()
    )
    before = net.weight.detach().clone()
    for step in range(4):
        optimizer.zero_grad()
        net(torch.tensor([1, 1])).sum().backward()
        if step in (0, 2):
            # In the first step, the ranks don't know yet that it is sparse.
            change(net.weight)
        if step == 2:
            with pytest.raises(AssertionError, match=r"weight was changed while .*synchronize"):
                optimizer.step()
        else:
            optimizer.step()
    torch.testing.assert_close(before - net.weight.detach(), expected_of(before))


def expected_of(like: torch.Tensor) -> torch.Tensor:
    """Steps of 1, 2 and 2; the third of four steps was rejected."""
    result = torch.zeros_like(like)
    result[1] = 5.0
    return result
