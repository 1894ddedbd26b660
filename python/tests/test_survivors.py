"""Ranks that outlive a loss: how long the others wait for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from launching import LAUNCHER, LIMIT

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
