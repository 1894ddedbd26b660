"""The parts of elastic training that need no job: the sampler, and the handlers of states."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gradwire import elastic as plain  # noqa: E402
from gradwire.torch import elastic  # noqa: E402
from gradwire.torch.elastic import _disk as disks  # noqa: E402
from gradwire.torch.elastic import sampler as samplers  # noqa: E402
from gradwire.torch.elastic import state as states  # noqa: E402
from gradwire.torch.elastic._disk import write_tensors  # noqa: E402


class Ranks:
    """The numbers that samplers see."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank, self.size = 0, 1
        monkeypatch.setattr(samplers, "rank", lambda: self.rank)
        monkeypatch.setattr(samplers, "size", lambda: self.size)

    def samplers(self, size: int, *given: Any, **named: Any) -> list[Any]:
        """Returns the samplers of a job with this number of ranks."""
        self.size, made = size, []
        for self.rank in range(size):
            made.append(elastic.ElasticSampler(*given, **named))
        return made


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 12, 100])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_ranks_divide_all_samples(ranks: Ranks, count: int, size: int) -> None:
    parts = [list(each) for each in ranks.samplers(size, range(count), shuffle=False)]
    padded = -(-count // size) * size
    # The closed form: rank r has the samples r, r + size, …, repeated from the first one on.
    for rank, part in enumerate(parts):
        assert part == [at % count for at in range(rank, padded, size)]


def test_the_order_depends_on_seed_and_epoch(ranks: Ranks) -> None:
    sampler = ranks.samplers(1, range(50), seed=7)[0]
    first, again = list(sampler), list(sampler)
    expected = list(range(50))
    random.Random(7).shuffle(expected)
    assert first == again == expected
    sampler.set_epoch(1)
    assert list(sampler) != first and sorted(sampler) == sorted(first)
    assert len(sampler) == sampler.num_samples == sampler.total_size == 50


def test_each_sample_is_processed_once(ranks: Ranks) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    count = chance.randrange(1, 200)
    processed: set[int] = set()
    while len(processed) < count:
        group = ranks.samplers(chance.randrange(1, 5), range(count), seed=seed)
        for rank, sampler in enumerate(group):
            ranks.rank = rank
            sampler.load_state_dict({"epoch": 2, "processed_indices": processed})
        assert group[0].remaining_indices == [at for at in range(count) if at not in processed]
        new: list[int] = []
        for sampler in group:
            own = list(sampler)
            for at in range(chance.randrange(1, 6)):
                sampler.record_batch(at, 3)
                new += own[3 * at : 3 * at + 3]
            assert sampler.processed_indices >= processed | set(sampler.get_indices(0, 3))
        # Only what pads the last samples is repeated.
        assert len(new) - len(set(new)) < len(group)
        processed |= set(new)
        assert processed == set().union(*(sampler.processed_indices for sampler in group))


def test_a_sampler_continues_from_its_state(ranks: Ranks) -> None:
    sampler = ranks.samplers(2, range(10), shuffle=False)[1]
    list(sampler)
    sampler.record_batch(0, 2)
    sampler.record_indices([8])
    kept = sampler.state_dict()
    sampler.record_indices([0])
    assert kept == {"epoch": 0, "processed_indices": {1, 3, 8}}
    sampler.load_state_dict(kept)
    assert sampler.remaining_indices == [0, 2, 4, 5, 6, 7, 9]
    assert (sampler.num_replicas, sampler.rank, sampler.num_samples) == (2, 1, 4)
    sampler.set_epoch(3)
    assert (sampler.epoch, sampler.processed_indices, len(sampler)) == (3, set(), 5)


def test_objects_return_to_what_was_saved() -> None:
    state = elastic.ObjectState(step=1, seen=[1, 2])
    state.seen.append(3)
    state.step = 5
    state.restore()
    assert (state.step, state.seen) == (1, [1, 2])
    state.seen.append(4)
    state.save()
    state.seen.clear()
    state.restore()
    state.seen.append(9)
    state.restore()
    assert state.seen == [1, 2, 4]


def test_a_state_accepts_horovods_functions() -> None:
    state = plain.ObjectState(lambda value: {**value, "step": 8}, lambda: 0, step=1)
    state.sync()
    assert state.step == 8
    state.step = 2
    state.restore()
    assert state.step == 8


def trained(steps: int) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    step(model, optimizer, scheduler, range(steps))
    return model, optimizer, scheduler


def step(model: Any, optimizer: Any, scheduler: Any, steps: range) -> None:
    for at in steps:
        optimizer.zero_grad()
        given = torch.randn(6, 3, generator=torch.Generator().manual_seed(at))
        model(given).square().sum().backward()
        optimizer.step()
        scheduler.step()


def test_training_repeats_from_a_save() -> None:
    model, optimizer, scheduler = trained(3)
    state = elastic.TorchState(model, optimizer, scheduler=scheduler, at=3)
    for _ in range(3):  # a step must not change what is saved
        step(model, optimizer, scheduler, range(3, 8))
        state.at = 8
        state.restore()
        assert state.at == 3
        assert all(parameter.grad is None for parameter in model.parameters())
    step(model, optimizer, scheduler, range(3, 5))
    state.save()
    step(model, optimizer, scheduler, range(50, 52))
    state.restore()
    step(model, optimizer, scheduler, range(5, 7))
    expected, other, after = trained(7)
    for one, two in zip(model.state_dict().values(), expected.state_dict().values()):
        torch.testing.assert_close(one, two, rtol=0, atol=0)
    assert scheduler.get_last_lr() == after.get_last_lr()
    assert str(optimizer.state_dict()) == str(other.state_dict())


def test_saves_reuse_their_memory() -> None:
    model = torch.nn.Linear(3, 4)
    state = elastic.TorchState(model=model)
    saved = state._handlers["model"]._saved
    before = {name: tensor.data_ptr() for name, tensor in saved.items()}
    with torch.no_grad():
        model.weight.add_(1)
    state.save()
    saved = state._handlers["model"]._saved
    assert before == {name: tensor.data_ptr() for name, tensor in saved.items()}
    assert torch.equal(saved["weight"], model.weight)
    assert saved["weight"].data_ptr() != model.weight.data_ptr()
    assert saved._metadata == model.state_dict()._metadata


def test_a_new_value_is_saved() -> None:
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    kept = second.weight.detach().clone()
    state = elastic.TorchState(model=first)
    state.model = second
    with torch.no_grad():
        second.weight.zero_()
    state.restore()
    assert torch.equal(second.weight, kept) and state.model is second


class Loader:
    """Has a state like torchdata's StatefulDataLoader."""

    def __init__(self) -> None:
        self.at = {"yielded": 0}

    def state_dict(self) -> Any:
        return self.at

    def load_state_dict(self, state_dict: Any) -> None:
        self.at = state_dict


def test_anything_with_a_state_has_a_handler() -> None:
    scaler, loader = torch.amp.GradScaler("cpu", init_scale=4.0), Loader()
    state = elastic.TorchState(scaler=scaler, loader=loader, plain=[1])
    assert set(state._handlers) == {"scaler", "loader"}
    loader.at["yielded"] = 5
    scaler.scale(torch.zeros(1))  # creates its state
    scaler.update(16.0)
    state.restore()
    assert (loader.at, scaler.get_scale()) == ({"yielded": 0}, 4.0)


def test_programs_can_register_handlers() -> None:
    class Counted(elastic.StateHandler):
        def save(self) -> None:
            self.kept = self.value["n"]

        def restore(self) -> None:
            self.value["n"] = self.kept

    before = elastic.get_handler_registry()
    try:
        elastic.set_handler_registry([(dict, Counted), *before])
        value = {"n": 1}
        state = elastic.TorchState(counter=value, step=0)
        state.save()
        value["n"] = 2
        state.restore()
        assert value == {"n": 1} and state.counter is value
    finally:
        elastic.set_handler_registry(before)
    assert states.get_handler_registry() == before


def stored(folder: Path, **values: Any) -> Any:
    model, optimizer, scheduler = trained(3)
    return elastic.TorchState(
        model, optimizer, directory=folder, scheduler=scheduler, loader=Loader(), **values
    )


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "rank", lambda: 0)


def test_commits_are_read_from_disk(alone: None, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    values = {"at": 3, "seen": [(1, 2.5), {"x": None}], "ids": {4, 5}, "odd": {1: True, "$a": "b"}}
    state = stored(folder, every=2, **values)
    assert state._stored() == 0
    for at in range(7):
        state.at = at
        step(state.model, state.optimizer, state.scheduler, range(at, at + 1))
        state.commit()
        state._disk.finish()
    assert [each.name for each in sorted(folder.iterdir())] == [
        "commit-0000000004",
        "commit-0000000006",
    ]
    after = stored(folder, **{name: None for name in values})
    assert after._stored() == 6
    after._load_stored()
    assert {name: getattr(after, name) for name in values} == {**values, "at": 5}
    # The sixth commit is one step behind.
    state.restore()
    step(after.model, after.optimizer, after.scheduler, range(6, 7))
    for one, two in zip(state.model.state_dict().values(), after.model.state_dict().values()):
        assert torch.equal(one, two)
    assert str(state.optimizer.state_dict()) == str(after.optimizer.state_dict())


def test_tensors_with_similar_names_stay_apart(alone: None, tmp_path: Path) -> None:
    one, two, three, four = (torch.full((2,), float(at)) for at in range(1, 5))
    values: dict[str, Any] = {"a": {"b": one, 0: three, "0": four}, "a.b": two}
    state = stored(tmp_path, **values)
    state.commit()
    state._disk.finish()
    after = stored(tmp_path, **dict.fromkeys(values))
    after._load_stored()
    assert str(after.a) == str(values["a"])
    assert torch.equal(getattr(after, "a.b"), two)


def test_an_incomplete_commit_is_not_read(alone: None, tmp_path: Path) -> None:
    state = stored(tmp_path, at=1)
    state.commit()
    state._disk.finish()
    (tmp_path / ".commit-0000000003.77").mkdir()
    (tmp_path / "commit-0000000002").mkdir()
    (tmp_path / "commit-0000000002" / "state.json").write_text("{")
    after = stored(tmp_path, at=0)
    after._load_stored()
    assert after.at == 1


def test_damaged_commits_are_passed_over(
    alone: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = stored(tmp_path, at=1)
    state.commit()
    state._disk.finish()
    good = tmp_path / "commit-0000000001"
    tensors = (good / "tensors.safetensors").read_bytes()
    damaged = {"[]": tensors, "{": tensors, '{"a": {"$tensor": "b"}}': tensors, "{}": b"\xff" * 9}
    for number, (text, rest) in enumerate(damaged.items(), 2):
        folder = tmp_path / f"commit-{number:010}"
        folder.mkdir()
        (folder / "state.json").write_text(text)
        (folder / "tensors.safetensors").write_bytes(rest)
    (tmp_path / "commit-0000000008").write_text("a file")
    after = stored(tmp_path, at=0)
    after._load_stored()
    assert after.at == 1 and len(caplog.messages) == len(damaged) + 1


def test_new_commits_come_after_damaged_ones(alone: None, tmp_path: Path) -> None:
    state = stored(tmp_path, at=1)
    state.commit()
    state._disk.finish()
    for number in (5, 7):
        (tmp_path / f"commit-{number:010}").mkdir()

    def numbers() -> list[int]:
        return [int(each.name[-10:]) for each in sorted(tmp_path.iterdir())]

    after = stored(tmp_path, at=0)
    after._load_stored()
    kept = []
    for after.at in (2, 3, 4):
        after.commit()
        after._disk.finish()
        kept.append(numbers())
    # The readable one stays until there are two newer ones.
    assert kept == [[1, 5, 7, 8], [8, 9], [9, 10]]
    (tmp_path / "commit-0000000020").mkdir()  # of another job
    after.commit()
    after._disk.finish()
    assert numbers() == [10, 11, 20]


def test_nothing_readable_begins_after_it(alone: None, tmp_path: Path) -> None:
    (tmp_path / "commit-0000000006").mkdir()
    state = stored(tmp_path, at=1)
    state._load_stored()
    state.commit()
    state._disk.finish()
    assert state._disk.numbers() == [7, 6] and state.at == 1


class Slow:
    """A disk that waits before it writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_go_on, self.write = threading.Event(), threading.Event(), write_tensors
        monkeypatch.setattr(disks, "write_tensors", self)

    def __call__(self, *given: Any) -> None:
        self.begun.set()
        assert self.may_go_on.wait(60)
        self.write(*given)


def test_the_last_commit_is_never_left_out(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    state = stored(tmp_path, at=0)
    for state.at in range(1, 5):
        with torch.no_grad():
            state.model[0].weight.fill_(state.at)
        state.commit()
        assert slow.begun.wait(60)  # the first one is not replaced
    slow.may_go_on.set()
    state._end()
    assert state._disk.numbers() == [4, 1]
    for at in (4, 1):
        after = stored(tmp_path, at=0)
        after._load_stored()
        assert after.at == at and bool((after.model[0].weight == at).all())
        shutil.rmtree(tmp_path / f"commit-{at:010}")


def test_a_disk_that_hangs_is_one_warning(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = Slow(monkeypatch)
    state = stored(tmp_path, at=0)
    state.commit()
    state._disk.finish(0.2)
    assert ["is still not in" in text for text in caplog.messages] == [True]
    slow.may_go_on.set()
    state._disk.finish()
    assert state._disk.numbers() == [1]


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise OSError", "fork", "spawn"])
def test_the_end_waits_for_the_last_commit(tmp_path: Path, end: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import multiprocessing, os, sys, threading, time, torch\n"
        "from gradwire.torch.elastic import _disk\n"
        "began, may_write = threading.Event(), threading.Event()\n"
        "write = _disk.write_tensors\n"
        # The thread waits here during the fork, because no other place is safe for that.
        "def slow(*given):\n"
        "    began.set(), may_write.wait(), time.sleep(0.3), write(*given)\n"
        "_disk.write_tensors = slow\n"
        "def work():\n"
        f"    disk = _disk.Disk({str(tmp_path / 'commits')!r}, 1)\n"
        "    for at in range(1, 4):\n"
        "        disk.write(at, {'at': torch.full((1,), at)})\n"
        "        began.wait()\n"
        "def work_alone():\n"
        "    work(), may_write.set()\n"
        "if __name__ == '__main__':\n"
        f"    method = {end if end in ('fork', 'spawn') else None!r}\n"
        "    if method is None:\n"
        "        work()\n"
        "        if os.fork() == 0:  # the child does not wait for a thread that it lacks\n"
        "            sys.exit()\n"
        "        os.wait(), may_write.set()\n"
        "    else:\n"
        "        one = multiprocessing.get_context(method).Process(target=work_alone)\n"
        "        one.start()\n"
        "        one.join()\n" + (f"    {end}\n" if "(" in end or " " in end else "")
    )
    subprocess.run([sys.executable, str(program)], timeout=60, capture_output=True)
    assert [each.name[-2:] for each in sorted((tmp_path / "commits").iterdir())] == ["01", "03"]


def test_what_killed_ranks_left_is_removed(alone: None, tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    here = socket.gethostname()
    hours = {
        f".commit-0000000003.{here}.{ended.pid}": 0,
        f".commit-0000000004.{here}.{os.getppid()}": 2,
        ".commit-0000000005.elsewhere.1": 0,
        ".commit-0000000006.else.where.1": 2,
        ".commit-0000000007.77": 2,
        ".other": 2,
    }
    now = time.time()
    for name, age in hours.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "tensors.safetensors").write_text("")
        for path in (tmp_path / name / "tensors.safetensors", tmp_path / name):
            os.utime(path, (now - age * 3600,) * 2)
    # It is still being written, although its folder is old.
    os.utime(tmp_path / ".commit-0000000007.77" / "tensors.safetensors")
    state = stored(tmp_path, at=1)
    state.commit()
    state._disk.finish()
    left = {each.name for each in tmp_path.iterdir()}
    gone = {f".commit-0000000003.{here}.{ended.pid}", ".commit-0000000006.else.where.1"}
    assert left == {"commit-0000000001", *hours} - gone


def test_a_commit_without_an_attribute_is_named(alone: None, tmp_path: Path) -> None:
    state = stored(tmp_path, at=1, old=2)
    state.commit()
    state._disk.finish()
    for values in ({"at": 1, "new": 2}, {"at": 1, "more": Loader()}):
        with pytest.raises(ValueError, match=r"commit-0000000001 lacks the attribute (new|more) "):
            stored(tmp_path, **values)._load_stored()
    fewer = stored(tmp_path, at=0)
    fewer._load_stored()
    fewer.save()
    assert fewer.at == 1 and not hasattr(fewer, "old")


def test_commits_need_a_directory(alone: None, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below"):
        with pytest.raises(ValueError, match=f"{place}' can't contain commits: Not a directory"):
            stored(tmp_path / place)


def test_a_full_disk_is_one_warning(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    state = stored(tmp_path, at=1)
    for _ in range(3):
        state.commit()
        state._disk.finish()
    assert list(tmp_path.iterdir()) == []
    [warning] = caplog.messages
    assert "commit 1 can't be written" in warning and "No space left" in warning


def test_disk_takes_no_objects(alone: None, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"others\.thing can't be written to disk"):
        stored(tmp_path, thing=object())
    for every in (0, -1, 1.5, None):
        with pytest.raises(ValueError, match=f"every={every}: it must be "):
            stored(tmp_path, every=every)


def test_what_is_being_written_does_not_change(alone: None, tmp_path: Path) -> None:
    state = stored(tmp_path, at=1)
    written = state._all_saved()["handled"]["model"]["0.weight"]
    before = written.clone()
    with torch.no_grad():
        state.model[0].weight.add_(1)
    state.save()
    assert torch.equal(written, before)


def test_errors_that_are_pickled_stay_recoverable() -> None:
    import pickle

    import gradwire as gw

    error = gw.PeerLost("lost", kind="worker-lost", rank=2, recoverable=True)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.rank, again.recoverable) == (
        gw.PeerLost,
        "lost",
        2,
        True,
    )
    assert not gw.GradwireError("other").recoverable
