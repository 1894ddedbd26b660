"""Trainings that lose ranks and get new ones, beside the same training in one process."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import AT_NIGHT, LAUNCHER, LIMIT

torch = pytest.importorskip("torch")

import elastic_training  # noqa: E402

PROGRAM = elastic_training.__file__
MOMENTS = ["forward", "hook", "backward", "step"]
STEPS = 20
MODES = ["rollback", "skip", "ddp"]
# By day, each mode loses one of the ranks, and each rank is lost once.
LOSSES = [
    (mode, rank)
    for at, mode in enumerate(MODES)
    for rank in range(3)
    if AT_NIGHT or rank == (at + 1) % 3
]


def train(folder: Path, mode: str, *options: str, kills: list[Any], grows: int = 0) -> str:
    """Runs a job of three ranks, and returns its output."""
    words = [LAUNCHER, "run", "-np", "3", *options, "--", sys.executable, PROGRAM, mode]
    done = subprocess.run(
        [*words, str(folder), str(STEPS)],
        env={
            **os.environ,
            "KILLS": json.dumps(kills),
            "GROWS": str(grows),
            "DDP": json.dumps({"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4}),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def lines_of(folder: Path, workers: str) -> list[dict[str, Any]]:
    """The steps that count, by number: a step that is made again is one of a later epoch."""
    found: dict[int, dict[str, Any]] = {}
    for file in folder.glob(f"worker{workers}.jsonl"):
        for line in map(json.loads, file.read_text().splitlines()):
            if line["epoch"] >= found.get(line["step"], line)["epoch"]:
                found[line["step"]] = line
    return [found[step] for step in sorted(found)]


def check(folder: Path, said: str, ranks: int) -> list[dict[str, Any]]:
    """Compares the ranks that are left with each other and with one process; returns the steps."""
    workers = re.findall(r"END worker (\d+) rank", said)
    assert len(workers) == ranks, said
    models = [torch.load(folder / f"worker{worker}.pt") for worker in workers]
    for model in models[1:]:  # SAME
        assert all(torch.equal(model[name], models[0][name]) for name in model), said
    whole = lines_of(folder, "*")
    assert [line["step"] for line in whole] == list(range(len(whole)))
    for own in (lines_of(folder, worker) for worker in workers):
        others = whole[len(whole) - len(own) :]
        assert [line["digest"] for line in own] == [line["digest"] for line in others]
    expected = elastic_training.replay(whole).state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(models[0][name], tensor, rtol=1e-5, atol=1e-6)
    return whole


@pytest.mark.parametrize(("mode", "rank"), LOSSES)
def test_training_outlives_a_killed_rank(tmp_path: Path, mode: str, rank: int) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    # After a kill at the end of a step, the next one may be skipped: the last one shows the rest.
    kill = [1, rank, chance.randrange(STEPS - 2), chance.choice(MOMENTS)]
    print("kill", kill)
    options = ["--min-np", "2", "--max-np", "3", "--blacklist-cooldown-range", "600", "600"]
    said = train(tmp_path, mode, *options, kills=[kill])
    whole = check(tmp_path, said, ranks=2)
    assert {line["size"] for line in whole if not line["skipped"]} <= {2, 3}
    assert whole[-1]["epoch"] == 2 and whole[-1]["size"] == 2
    skipped = [line["step"] for line in whole if line["skipped"]]
    assert len(skipped) <= 1 if mode != "rollback" else not skipped


@pytest.mark.parametrize("mode", MODES if AT_NIGHT else MODES[1:2])
def test_a_killed_rank_is_replaced(tmp_path: Path, mode: str) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    kill = [1, 2, random.Random(seed).randrange(8), "backward"]
    options = ["--min-np", "2", "--blacklist-cooldown-range", "1", "1"]
    said = train(tmp_path, mode, *options, kills=[kill], grows=3)
    whole = check(tmp_path, said, ranks=3)
    assert {line["size"] for line in whole if not line["skipped"]} == {2, 3}


BEFORE = """
import hashlib, os, signal
import torch
from torch.nn.parallel import DistributedDataParallel
import gradwire.torch as hvd

hvd.init()
model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def batch_of(step, rank, size):
    if (step, rank, size) == (40, 1, 3):
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model, batch):
    return model(batch).square().mean()

"""
AFTER = """
parameters = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
print("END", optimizer.skipped_steps, state.step, hashlib.sha256(parameters).hexdigest())
"""


@pytest.mark.parametrize("section", ["## Skip", "### With DDP"])
def test_loops_of_the_guide_skip_a_step(tmp_path: Path, section: str) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "elastic.md").read_text()
    loop = guide.split(f"\n{section}\n")[1].split("```python\n")[1].split("```")[0]
    program = tmp_path / "program.py"
    program.write_text(BEFORE + loop.replace("1000", "60") + AFTER)
    words = [LAUNCHER, "run", "-np", "3", "--min-np", "2", "--max-np", "3"]
    words += ["--blacklist-cooldown-range", "600", "600", "--", sys.executable, str(program)]
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stdout
    ends = re.findall(r"END 1 60 (\w+)", done.stdout)
    assert len(ends) == 2 and len(set(ends)) == 1, done.stdout


NEVER_COMES = """
import os, pathlib, signal, sys, time
import torch
import gradwire.torch as hvd

mode, folder = sys.argv[1], pathlib.Path(sys.argv[2])
is_new = "RANK" not in os.environ
hvd.init()
if is_new:
    try:
        (folder / "first").touch(exist_ok=False)  # the next new rank trains
        time.sleep(600)
    except FileExistsError:
        pass
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = hvd.elastic.TorchState(model=model, step=0)
options = {"on_loss": "skip", "state": state} if mode == "skip" else {}
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def train(state):
    ranks = 0
    while state.step < 8 or ranks < 3:
        if state.step == 5 and hvd.rank() == 2 and not is_new:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        state.step += 1
        if mode == "skip":
            ranks = hvd.contributors()
        else:
            state.commit()
            ranks = hvd.size()


(train if mode == "skip" else hvd.elastic.run(train))(state)
print("END", hvd.size())
"""


@pytest.mark.parametrize("mode", ["rollback", "skip"])
def test_a_new_rank_that_never_comes_is_replaced(tmp_path: Path, mode: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(NEVER_COMES)
    # On a loaded machine, a new rank needs several seconds to import PyTorch.
    words = [LAUNCHER, "run", "-np", "3", "--min-np", "2", "--elastic-timeout", "30"]
    words += ["--blacklist-cooldown-range", "0.2", "0.2", "--", sys.executable, str(program)]
    done = subprocess.run(
        [*words, mode, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0 and done.stdout.count("END 3") == 3, done.stdout
    assert re.search(r"rank \d .*: it has not called the function of .* within 30", done.stdout)


def test_an_error_of_the_program_ends_the_job(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        """
import numpy as np
import gradwire as gw
from gradwire import elastic

gw.init()


@elastic.run
def train(state):
    state.commit()
    gw.allreduce(np.ones(2 + gw.rank()), name="different")


train(elastic.ObjectState(step=0))
"""
    )
    words = [LAUNCHER, "run", "-np", "3", "--min-np", "1", "--", sys.executable, str(program)]
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT
    )
    assert done.returncode != 0, done.stdout
    assert "Disagreement" in done.stdout and "epoch 2" not in done.stdout, done.stdout
