"""Small trainings for the tests of what DistributedOptimizer promises."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import gradwire.torch as hvd  # noqa: E402


def mean() -> float:
    """Returns the average of all ranks' ``rank() + 1``."""
    return (hvd.size() + 1) / 2


def wrapped(
    *parameters: Any,
    names: Sequence[str] = "abcdefgh",
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


class Interrupted(Exception):
    """An exception that the program raises during a wait."""


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Interrupts what takes longer."""

    def interrupt(*_: Any) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
