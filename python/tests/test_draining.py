"""Signals that ask ranks to end: one rank leaves an elastic job, or all ranks stop together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import functions
import pytest
from launching import LAUNCHER, LIMIT

import gradwire as gw

# Trains until three ranks have been in the third epoch. One asks itself to end in the first.
LEAVING = """
import os
import signal
import time

import gradwire as gw
from gradwire import _world, elastic

gw.init()


@elastic.run
def train(state):
    while state.whole < 3:
        time.sleep(0.02)
        state.step += 1
        if state.step == 5 and os.environ["GRADWIRE_WORKER"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        session = _world.session()
        state.whole = max(state.whole, session.epoch if session.size == 3 else 0)
        state.commit()


train(elastic.ObjectState(step=0, whole=0))
print("END", gw.rank(), gw.size(), flush=True)
"""


def run(
    folder: Path, text: str, options: Sequence[str], **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program as a job."""
    program = folder / "program.py"
    program.write_text(text)
    return subprocess.run(
        [LAUNCHER, "run", *options, "--", sys.executable, str(program)],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )


ELASTIC = ("-np", "3", "--min-np", "2", "--blacklist-cooldown-range", "0.5", "0.5")


def test_a_rank_that_is_asked_to_end_leaves(tmp_path: Path) -> None:
    done = run(tmp_path, LEAVING, ELASTIC)
    assert done.returncode == 0, done.stdout
    assert "rank 1 on host localhost was asked to end (SIGTERM), and leaves" in done.stdout
    assert "after ranks left" in done.stdout and "was lost" not in done.stdout, done.stdout
    assert done.stdout.count("END") == 3, done.stdout


def test_sigterm_is_a_fault_if_ranks_do_not_drain(tmp_path: Path) -> None:
    done = run(tmp_path, LEAVING, [*ELASTIC, "--set", "elastic.drain_on_term=false"])
    assert done.returncode == 0, done.stdout
    assert "after rank 1 on host localhost was killed by SIGTERM" in done.stdout, done.stdout
    assert "1 rank was lost" in done.stdout, done.stdout


def test_a_job_that_is_interrupted_ends_its_ranks(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    text = """
        import time

        import gradwire as gw

        gw.init()
        print("READY", flush=True)
        time.sleep(600)
    """
    program.write_text("\n".join(line[8:] for line in text.splitlines()))
    words = [LAUNCHER, "run", "-np", "2", "--min-np", "1", "--set", "launch.grace_ms=30000"]
    with subprocess.Popen(
        [*words, "--", sys.executable, str(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        assert job.stdout is not None
        ready = 0
        while ready < 2:
            ready += "READY" in job.stdout.readline()
        begun = time.monotonic()
        job.send_signal(signal.SIGTERM)
        said, _ = job.communicate(timeout=LIMIT)
    assert job.returncode == 143, said
    assert "leaves at the next commit" not in said, said
    # The ranks do not wait for the end of the grace period, in which they would be killed.
    assert time.monotonic() - begun < 25, said


SAVING = """
import time

import gradwire as gw

gw.init()
print("READY", gw.should_stop(), flush=True)
while not gw.should_stop():
    time.sleep(1)
gw.barrier()
print("SAVED", flush=True)
"""


@pytest.mark.parametrize("options", [[], ["--min-np", "1"]], ids=["fixed", "elastic"])
def test_interrupted_ranks_write_a_checkpoint(tmp_path: Path, options: list[str]) -> None:
    program = tmp_path / "program.py"
    program.write_text(SAVING)
    hosts = ["-H", "127.0.0.1:1,127.0.0.2:1", *options, "--set", "launch.grace_ms=60000"]
    with subprocess.Popen(
        [LAUNCHER, "run", *hosts, "--", sys.executable, str(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        assert job.stdout is not None
        ready = 0
        while ready < 2:
            ready += "READY" in job.stdout.readline()
        job.send_signal(signal.SIGTERM)
        said, _ = job.communicate(timeout=LIMIT)
    assert job.returncode == 143 and said.count("SAVED") == 2, said
    assert said.endswith("gradwire: interrupted by SIGTERM; everything was stopped\n"), said


STOPPING = """
import os
import signal
import time

import gradwire as gw

gw.init()
time.sleep(0.2)
if gw.rank() == 1:
    # Before the first call, and twice.
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGUSR1)
step = 0
while not gw.should_stop():
    step += 1
    time.sleep(0.01)
assert len(set(gw.allgather_object(step))) == 1
print("STOPPED", flush=True)
"""


@pytest.mark.parametrize("name", ["SIGUSR1", "usr1"])
def test_all_ranks_stop_at_the_chosen_signal(tmp_path: Path, name: str) -> None:
    done = run(tmp_path, STOPPING, ["-np", "2", "--stop-signal", name])
    assert done.returncode == 0 and done.stdout.count("STOPPED") == 2, done.stdout


def test_a_wrong_stop_signal_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, STOPPING, ["-np", "2", "--stop-signal", "SIGKILL"])
    assert done.returncode == 2, done.stdout
    assert "SIGKILL" in done.stdout and "SIGTERM, SIGUSR1, SIGUSR2" in done.stdout, done.stdout


def test_a_function_as_a_job_has_a_stop_signal() -> None:
    assert gw.run(functions.signal_of_job, np=1, stop_signal=signal.SIGUSR2) == ["SIGUSR2"]
    with pytest.raises(gw.Cancelled, match="code 2"):
        gw.run(functions.signal_of_job, np=1, stop_signal=signal.SIGSEGV)


MEETING = """
import os
import signal

import torch
import torch.distributed as dist

import gradwire as gw
from gradwire import _world, elastic

gw.init()


@elastic.run
def train(state):
    while True:
        dist.init_process_group("gloo")
        own = [gw.rank(), gw.size(), gw.local_rank(), gw.local_size()]
        names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
        assert [int(os.environ[name]) for name in names] == own
        assert os.environ["GRADWIRE_RANK"] == os.environ["HOROVOD_RANK"] == str(gw.rank())
        one = torch.ones(1)
        dist.all_reduce(one)
        assert one.item() == gw.size(), one
        epoch = _world.session().epoch
        print("MET", epoch, gw.size(), flush=True)
        dist.destroy_process_group()
        state.commit()
        if epoch == 1 and os.environ["GRADWIRE_WORKER"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        if epoch > 1 and gw.size() == 3:
            return
        gw.barrier()
        state.commit()


train(elastic.ObjectState(step=0))
"""


def test_other_libraries_meet_again_in_each_epoch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = run(tmp_path, MEETING, ELASTIC)
    assert done.returncode == 0, done.stdout
    assert "MET 1 3" in done.stdout and "MET 2 " in done.stdout, done.stdout
