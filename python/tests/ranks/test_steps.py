"""Training steps in the daemon's metrics."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from rank_metrics import ADDRESS, steps  # noqa: E402
from small_training import sgd, together  # noqa: E402

import gradwire.torch as hvd  # noqa: E402

pytestmark = pytest.mark.skipif(not ADDRESS, reason="no launcher")


def test_optimizers_and_programs_mark_steps() -> None:
    before = steps()
    for _ in range(3):
        hvd.mark_step()
    assert steps() == before + 3
    _, losses, optimizer = together(sgd)
    assert steps() == before + 3 + len(losses)
    optimizer.zero_grad()
    optimizer.step()
    assert steps() == before + 4 + len(losses)


def test_a_failed_step_is_not_counted() -> None:
    _, _, optimizer = together(sgd)
    before = steps()

    def closure() -> torch.Tensor:
        raise ValueError("no loss")

    with pytest.raises(ValueError, match="no loss"):
        optimizer.step(closure)
    assert steps() == before
