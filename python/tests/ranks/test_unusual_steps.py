"""Optimizers of a program's own, whose steps use closures and arguments in their own ways."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from promised import backward, equal_everywhere, mean, wrapped, zeros  # noqa: E402

import gradwire.torch as hvd  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error")


class Own(torch.optim.Optimizer):  # type: ignore[misc]
    """Keeps the list of its parameters, so that no access to the groups waits."""

    def __init__(self, *parameters: Any, when: str = "never") -> None:
        super().__init__(parameters, {"rate": 1.0})
        self.own, self.when = list(parameters), when

    @torch.no_grad()
    def step(self, closure: Any = None, scale: float = 1.0) -> Any:
        loss = closure() if self.when == "first" else None
        for parameter in self.own:
            parameter -= scale * parameter.grad
        return closure() if self.when == "last" else loss


@pytest.mark.parametrize("when", ["first", "last", "never"])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_a_closure_without_a_backward_pass(when: str, op: Any, sent: str) -> None:
    """The gradients were computed before the step, which may use them before the closure."""
    one, two = zeros(), zeros()
    optimizer = hvd.DistributedOptimizer(
        Own(one, two, when=when), [("one", one), ("two", two)], op=op
    )
    for _ in range(3):
        optimizer.zero_grad()
        backward(one, two)
        loss = optimizer.step(lambda: hvd.rank() + 1.0)
    total = mean() * (hvd.size() if op == hvd.Sum else 1)
    assert one.tolist() == two.tolist() == [-3 * total] * 3
    assert loss == (None if when == "never" else total)


def test_a_step_that_takes_a_number() -> None:
    class Scaled(Own):
        def step(self, scale: float) -> Any:
            return super().step(None, scale)

    parameter = zeros()
    optimizer = hvd.DistributedOptimizer(Scaled(parameter), [("p", parameter)])
    ways: list[Callable[[], Any]] = [
        lambda: optimizer.step(2.0),
        lambda: optimizer.step(scale=2.0),
    ]
    for step in ways:
        optimizer.zero_grad()
        backward(parameter)
        step()
    assert parameter.tolist() == [-4 * mean()] * 3


def test_compiled_autograd(sent: str) -> None:
    """The compiler does not look into the hooks of the gradients."""
    import torch._dynamo

    if not torch._dynamo.is_dynamo_supported() or not hasattr(
        torch._dynamo.config, "compiled_autograd"
    ):
        pytest.skip("this PyTorch does not compile backward passes for this Python")
    parameter = zeros()
    optimizer = wrapped(parameter)
    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(backward, backend="eager")
        for _ in range(2):
            optimizer.zero_grad()
            with warnings.catch_warnings():
                # The compiler looks at `grad` of every tensor that it meets.
                warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
                compiled(parameter)
            optimizer.step()
    assert parameter.tolist() == [-2 * mean()] * 3
    equal_everywhere(parameter)
