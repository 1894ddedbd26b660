"""After a loss, all ranks skip a step, or none."""

from __future__ import annotations

import copy
from typing import Any

import fake_epochs
import pytest

torch = pytest.importorskip("torch")

from epoch_training import all_alike, backward, expected, last, made, same  # noqa: E402

import gradwire.torch as hvd  # noqa: E402
from gradwire import elastic  # noqa: E402


def skipping(seed: int, state: Any = None) -> tuple[Any, Any]:
    return made(seed, on_loss="skip", state=state)


def test_all_ranks_skip_a_step_of_a_loss() -> None:
    with fake_epochs.elastic() as fake:
        model, optimizer = skipping(5 + hvd.rank())
        for step in range(6):
            optimizer.zero_grad()
            backward(model, step)
            if step == 2:
                fake.fail_at = len(fake.votes) + 1
            optimizer.step()
        assert (optimizer.skipped_steps, fake.rejoins) == (1, 1)
        assert hvd.contributors() == hvd.size()
        same(model, expected(5, [0, 1, 3, 4, 5]))
        all_alike(model)


def test_a_step_that_was_voted_for_is_made() -> None:
    with fake_epochs.elastic() as fake:
        model, optimizer = skipping(5)
        for step in range(4):
            optimizer.zero_grad()
            backward(model, step)
            if step == 2:
                fake.fail_at, fake.outcome = len(fake.votes) + 1, True
            optimizer.step()
        assert (optimizer.skipped_steps, fake.rejoins) == (0, 1)
        same(model, expected(5, [0, 1, 2, 3]))


def test_losses_in_the_backward_pass_are_noted() -> None:
    with fake_epochs.elastic() as fake:
        model, optimizer = skipping(5)
        for step in range(4):
            optimizer.zero_grad()
            if step == 2:
                with optimizer._exchange.patience():
                    raise fake_epochs.lost()
            backward(model, step)
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            with optimizer.skip_synchronize():
                optimizer.step()
        assert (optimizer.skipped_steps, fake.rejoins) == (1, 1)
        same(model, expected(5, [0, 1, 3]))


def test_new_ranks_are_healed_at_the_next_step() -> None:
    with fake_epochs.elastic() as fake:
        state = elastic.ObjectState(step=0)
        model, optimizer = skipping(5, state)
        fresh = hvd.size() > 1 and last()
        while state.step < 7:
            optimizer.zero_grad()
            backward(model, state.step)
            if state.step == 3 and hvd.rank() == 0:
                fake.change = (True, False)
            optimizer.step()
            state.step += 1
            if fresh and fake.rejoins == 1:
                # This rank starts again.
                fresh = False
                del model, optimizer
                state = elastic.ObjectState(step=0)
                model, optimizer = skipping(9, state)
                assert state.step == 4
        assert (optimizer.skipped_steps, fake.rejoins) == (0, 1)
        same(model, expected(5, list(range(7))))
        all_alike(model)


def test_skipping_needs_what_it_can_undo() -> None:
    with pytest.raises(ValueError, match="on_loss='ignore': it must be"):
        made(1, on_loss="ignore")
    with pytest.raises(ValueError, match="state requires"):
        made(1, state=elastic.ObjectState())
    with pytest.raises(hvd.InvalidRequest, match="Adasum"):
        made(1, on_loss="skip", op=hvd.Adasum)
    _, optimizer = skipping(1)
    with pytest.raises(hvd.InvalidRequest, match="can only have one"):
        skipping(1)
    with pytest.raises(hvd.InvalidRequest, match="closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(hvd.InvalidRequest, match="can't be copied"):
        copy.deepcopy(optimizer)
