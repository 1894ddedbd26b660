"""A rank that has just started and one that has not pair their operations in each epoch."""

from __future__ import annotations

from typing import Any

import fake_epochs
import pytest

torch = pytest.importorskip("torch")

from epoch_training import all_alike, backward, expected, last, made, same  # noqa: E402

import gradwire.torch as hvd  # noqa: E402
from gradwire import _epochs, elastic  # noqa: E402


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum, hvd.Adasum])
@pytest.mark.parametrize("norm", [False, True])
def test_new_ranks_pair_with_old_ones(op: Any, norm: bool) -> None:
    if op == hvd.Adasum and hvd.size() == 3:
        return  # Adasum needs a power of two; checked in test_adasum.py
    with fake_epochs.elastic():
        model, optimizer = made(1, norm, op=op)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
        _epochs.rejoin()
        if last():
            model, optimizer = made(2, norm, op=op)
        hvd.broadcast_parameters(model.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        for step in range(3, 6):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
        all_alike(model)


@pytest.mark.parametrize("clear", [False, True])
def test_gradients_in_flight_are_dropped(clear: bool, sent: str) -> None:
    if hvd.size() == 1 and not clear:
        return  # one rank exchanges nothing, so its gradients are its own
    with fake_epochs.elastic():
        model, optimizer = made(1)
        for step in range(2):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
        optimizer.zero_grad()
        backward(model, 7)  # submitted by all ranks, so it completes
        hvd.barrier()
        _epochs.rejoin()
        if clear:
            optimizer.zero_grad()
        backward(model, 2)
        optimizer.step()
        same(model, expected(1, [0, 1, 2]))
        all_alike(model)


def train(state: Any, optimizer: Any, until: int, hook: Any = None) -> None:
    while state.step < until:
        optimizer.zero_grad()
        backward(state.model, state.step)
        if hook is not None:
            hook(state)
        optimizer.step()
        state.step += 1
        if state.step % 2 == 0:
            state.commit()


def test_a_loss_returns_to_the_last_commit() -> None:
    with fake_epochs.elastic() as fake:
        model, optimizer = made(3)
        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
        failed: list[int] = []

        def fails(state: Any) -> None:
            if state.step == 5 and not failed:
                failed.append(5)
                raise fake_epochs.lost()

        hvd.elastic.run(train)(state, optimizer, 8, fails)
        assert (state.step, fake.rejoins) == (8, 1)
        same(model, expected(3, list(range(8))))
        all_alike(model)


def test_a_rank_without_state_receives_it() -> None:
    with fake_epochs.elastic() as fake:
        model, optimizer = made(3 + hvd.rank())
        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=hvd.rank())
        state.on_hosts_updated(1, 2)  # hosts were added

        def grows(state: Any) -> None:
            pass

        hvd.elastic.run(train)(state, optimizer, 6, grows)
        assert fake.rejoins == 1
        assert state._last_updated_timestamp == 1
        same(model, expected(3, list(range(6))))
        all_alike(model)


class Breaks(hvd.elastic.StateHandler):
    """A handler of a list, in the second ``sync`` of which the ranks lose another one."""

    def save(self) -> None:
        pass

    def restore(self) -> None:
        pass

    def sync(self) -> None:
        self.value.append("sync")
        if len(self.value) == 2:
            raise fake_epochs.lost()


def test_a_loss_during_sync_leaves_no_mixture() -> None:
    before = hvd.elastic.get_handler_registry()
    with fake_epochs.elastic() as fake:
        model, optimizer = made(3)
        hvd.elastic.set_handler_registry([(list, Breaks), *before])
        try:
            state = hvd.elastic.TorchState(model=model, optimizer=optimizer, breaks=[], step=0)
        finally:
            hvd.elastic.set_handler_registry(before)
        seen: list[int] = []

        @elastic.run
        def job(state: Any) -> None:
            same(model, expected(3, list(range(state.step))))
            seen.append(state.step)
            train(state, optimizer, 3 if fake.rejoins == 0 else 4)
            if fake.rejoins == 0:  # a step after the commit
                state.on_hosts_updated(1, 2)
                state.check_host_updates()

        job(state)
        assert seen == [0, 2]
        same(model, expected(3, list(range(4))))


def test_one_rank_that_knows_a_change_suffices() -> None:
    with fake_epochs.elastic() as fake:
        state = elastic.ObjectState(step=0)
        if last():
            fake.change = (False, True)
        with pytest.raises(hvd.elastic.HostsUpdatedInterrupt) as caught:
            state.check_host_updates()
        assert caught.value.skip_sync
        fake.change = None
        state.check_host_updates()
        if hvd.rank() == 0:
            fake.change = (True, True)
        with pytest.raises(hvd.elastic.HostsUpdatedInterrupt) as caught:
            state.commit()
        assert not caught.value.skip_sync


@pytest.mark.parametrize("outcome", [False, True])
def test_a_commit_holds_on_all_ranks_or_none(outcome: bool) -> None:
    with fake_epochs.elastic() as fake:
        state = elastic.ObjectState(step=0)
        steps: list[int] = []
        fake.outcome = outcome

        @elastic.run
        def job(state: Any) -> None:
            while state.step < 3:
                state.step += 1
                steps.append(state.step)
                if state.step == 2 and fake.rejoins == 0:
                    fake.fail_at = len(fake.votes) + 1
                state.commit()

        job(state)
        assert steps == ([1, 2, 3] if outcome else [1, 2, 2, 3])
        assert state.step == 3


def test_a_removal_needs_no_sync() -> None:
    with fake_epochs.elastic() as fake:
        state = elastic.ObjectState(step=0, own=hvd.rank())
        calls: list[int] = []
        resets: list[int] = []
        state.register_reset_callbacks([lambda: resets.append(1)])

        @elastic.run
        def job(state: Any) -> None:
            calls.append(state.step)
            state.own = hvd.rank()
            while state.step < 2:
                state.step += 1
                fake.change = (False, True) if state.step == 1 else None
                state.commit()

        job(state)
        assert calls == [0, 1]
        assert resets == [1]
        assert state.own == hvd.rank()


def test_other_errors_pass_through_run() -> None:
    with fake_epochs.elastic() as fake:

        @elastic.run
        def job(state: Any) -> None:
            raise hvd.InvalidRequest("wrong", kind="invalid")

        with pytest.raises(hvd.InvalidRequest, match="wrong"):
            job(elastic.ObjectState(step=0))
        assert fake.rejoins == 0


def test_run_in_a_fixed_job_calls_once() -> None:
    state = elastic.ObjectState(value=hvd.rank())

    @elastic.run
    def job(state: Any, more: int) -> int:
        state.commit()
        state.check_host_updates()
        return state.value + more

    assert job(state, 5) == 5


def test_records_of_lost_ranks_are_in_a_commit() -> None:
    with fake_epochs.elastic():
        sampler = hvd.elastic.ElasticSampler(range(100), shuffle=True, seed=4)
        state = hvd.elastic.TorchState(sampler=sampler)
        state._begin(False)
        first = list(sampler)[:6]
        for at in range(3):
            sampler.record_batch(at, 2)
        state.commit()
        told = {at for part in hvd.allgather_object(first) for at in part}
        assert sampler.processed_indices == told
        sampler.record_batch(3, 2)
        state.restore()
        assert sampler.processed_indices == told
        assert sorted(sampler.remaining_indices) == sorted(set(range(100)) - told)
