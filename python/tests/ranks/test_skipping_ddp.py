"""After a loss, all ranks skip a step of a DDP model, or none."""

from __future__ import annotations

from typing import Any

import fake_epochs
import pytest

torch = pytest.importorskip("torch")

from epoch_training import backward, expected, last, same  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import gradwire.torch as hvd  # noqa: E402
from gradwire import elastic  # noqa: E402


def made(seed: int, norm: bool = False, state: Any = None, **options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(4, 6), torch.nn.Linear(6, 2)]
    if norm:
        layers.insert(1, torch.nn.BatchNorm1d(6))
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hook = hvd.DdpHookState(on_loss="skip", optimizer=optimizer, state=state)
    ddp = DistributedDataParallel(model, process_group=hook.process_group, **options)
    ddp.register_comm_hook(hook, hvd.ddp_hook)
    return ddp, optimizer, hook


def all_alike(model: Any) -> None:
    mine = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    assert all(each == mine for each in hvd.allgather_object(mine))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4},
        {"find_unused_parameters": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
    ],
)
@pytest.mark.parametrize("moment", ["backward", "vote"])
def test_all_ranks_skip_a_step_of_a_loss(options: Any, moment: str) -> None:
    with fake_epochs.elastic() as fake:
        model, optimizer, hook = made(5 + hvd.rank(), **options)
        for step in range(8):
            optimizer.zero_grad()
            if step in (2, 5) and moment == "backward":
                hook.skip.losses.note(fake_epochs.lost(), hook.skip.losses.joined)
            backward(model, step)
            if step in (2, 5) and moment == "vote":
                fake.fail_at = len(fake.votes) + 1
            optimizer.step()
        assert (optimizer.skipped_steps, fake.rejoins) == (2, 2)
        assert hvd.contributors() == hvd.size()
        same(model, expected(5, [0, 1, 3, 4, 6, 7]))
        all_alike(model)


def test_buffers_of_ddp_are_those_of_rank_0() -> None:
    with fake_epochs.elastic() as fake:
        model, optimizer, _ = made(5 + hvd.rank(), norm=True)
        for step in range(5):
            optimizer.zero_grad()
            backward(model, step)
            if step == 1:
                fake.fail_at = len(fake.votes) + 1
            optimizer.step()
        assert optimizer.skipped_steps == 1
        model.eval()
        model(torch.ones(1, 4))  # DDP copies the buffers
        all_alike(model)


def test_new_ranks_are_healed_before_a_step() -> None:
    with fake_epochs.elastic() as fake:
        state = elastic.ObjectState(step=0)
        model, optimizer, _ = made(5, state=state, bucket_cap_mb=1e-4)
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
                del model, optimizer, _
                state = elastic.ObjectState(step=0)
                model, optimizer, _ = made(9, state=state, bucket_cap_mb=1e-4)
                assert state.step == 4
        assert (optimizer.skipped_steps, fake.rejoins) == (0, 1)
        same(model, expected(5, list(range(7))))
        all_alike(model)


def test_ranks_agree_on_infinities_in_a_loss() -> None:
    """A rank with infinite gradients votes, too, and its scale stays that of the others."""
    with fake_epochs.elastic() as fake:
        model, optimizer, hook = made(5)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        for step in range(4):
            optimizer.zero_grad()
            if step == 2:  # so the gradients are not exchanged
                hook.skip.losses.note(fake_epochs.lost(), hook.skip.losses.joined)
            scaler.scale(model(torch.ones(3, 4)).square().mean()).backward()
            if step == 2 and hvd.rank() == 0:
                model.module[0].weight.grad[0, 0] = float("inf")
            if step == 3:
                model.module[0].weight.grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        assert (optimizer.skipped_steps, fake.rejoins) == (1, 1)
        assert scaler.get_scale() == 2.0  # after the infinity of all ranks
        all_alike(model)


def test_a_state_that_skips_refuses_the_rest() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="on_loss='ignore': it must be"):
        hvd.DdpHookState(on_loss="ignore")
    with pytest.raises(ValueError, match="require on_loss"):
        hvd.DdpHookState(optimizer=optimizer)
    with pytest.raises(ValueError, match="needs a PyTorch optimizer"):
        hvd.DdpHookState(on_loss="skip")
    hook = hvd.DdpHookState(on_loss="skip", optimizer=optimizer)
    other = hvd.DdpHookState(on_loss="skip", optimizer=optimizer)
    ddp = DistributedDataParallel(model, process_group=other.process_group)
    with pytest.raises(hvd.InvalidRequest, match=r"process_group=state\.process_group"):
        ddp.register_comm_hook(hook, hvd.ddp_hook)
    ddp.register_comm_hook(other, hvd.ddp_hook)
    with pytest.raises(hvd.InvalidRequest, match="closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(hvd.InvalidRequest, match="can only have one"):
        hvd.DdpHookState(on_loss="skip", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
