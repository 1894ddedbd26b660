"""Ranks that outlive a loss: how long the others wait for them, and that they have the state."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launching import LAUNCHER, LIMIT, Job

TRAINING = """
import os
import signal
import time

import numpy as np

import gradwire as gw
from gradwire import _world, elastic

WORKER = os.environ["GRADWIRE_WORKER"]
gw.init()
state = elastic.ObjectState(step=0)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


{setup}


@elastic.run
def train(state):
    while state.step < 20:
        {hook}
        gw.allreduce(np.ones(1))
        state.step += 1
        state.commit()


train(state)
print("END", WORKER, flush=True)
"""


def run(folder: Path, hook: str, *options: str, setup: str = "") -> tuple[int, str]:
    """Runs a training, and returns its exit code and its output."""
    program = folder / "program.py"
    program.write_text(TRAINING.format(hook=hook, setup=setup))
    done = subprocess.run(
        [LAUNCHER, "run", *options, "--", sys.executable, str(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    return done.returncode, done.stdout


def test_a_survivor_may_compute_for_longer(tmp_path: Path) -> None:
    hook = """
        if state.step == 5 and WORKER == "1":
            die()
        if state.step == 5 and WORKER == "0" and not hasattr(state, "busy"):
            state.busy = time.sleep(6)
    """.strip()
    options = ["-np", "3", "--min-np", "2", "--start-timeout", "3"]
    code, said = run(tmp_path, hook, *options, "--blacklist-cooldown-range", "90", "90")
    assert code == 0 and "END 0" in said and "END 2" in said, said
    assert "has not joined" not in said, said


def test_new_ranks_alone_end_the_job(tmp_path: Path) -> None:
    setup = """
def on_reset():
    if WORKER == "1" and gw.size() == 2:
        die()

state.register_reset_callbacks([on_reset])
"""
    hook = """
        if state.step == 5 and WORKER == "0":
            die()
        # Until the new rank is ready.
        state.step = min(state.step, 10)
    """.strip()
    code, said = run(tmp_path, hook, "-np", "2", "--min-np", "1", setup=setup)
    assert code != 0 and "END" not in said, said
    assert "every rank that had the state of the training was lost" in said, said


def test_new_ranks_need_the_state(job: Job) -> None:
    done = job(
        """
        import gradwire as gw
        from gradwire import _world, elastic

        gw.init()
        _world._is_newcomer = True
        try:
            elastic.ObjectState(step=0)._begin(skip_sync=False)
        except gw.PeerLost as error:
            print("TOLD", error, flush=True)
        """
    )
    told = [line for line in done.stdout.splitlines() if "TOLD" in line]
    assert told and all("before the new ranks had received it" in line for line in told), (
        done.stdout
    )


def test_new_ranks_continue_from_a_commit_on_disk(tmp_path: Path, job: Job) -> None:
    pytest.importorskip("torch")
    done = job(
        f"""
        import torch
        import gradwire.torch as hvd
        from gradwire import _world

        hvd.init()

        def made():
            model = torch.nn.Linear(2, 2)
            directory = {str(tmp_path)!r}
            return hvd.elastic.TorchState(model=model, step=0, directory=directory, every=1)

        state = made()
        state._begin(skip_sync=False)
        state.step = 7
        state.commit()
        state._end()
        _world._is_newcomer = True
        again = made()
        again._begin(skip_sync=False)
        print("STEP", again.step, flush=True)
        """,
        ranks=1,
    )
    assert done.returncode == 0 and "STEP 7" in done.stdout, done.stdout
