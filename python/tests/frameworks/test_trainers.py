"""PyTorch's trainers over Gradwire: the same losses as over Gloo, under every launcher.

``python/make_frameworks.py`` names the tested versions. A trainer that is not installed is skipped.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import AT_NIGHT, LAUNCHER, LIMIT, at_night

HERE = Path(__file__).parent
TRAINERS = ["accelerate", "transformers", "lightning", "deepspeed"]
PYTHON = sys.executable
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
DEEPSPEED = [PYTHON, "-m", "deepspeed.launcher.runner", "--no_local_rank"]
DEEPSPEED += ["--num_accelerators", "2"]
# Transformers has no launcher. Without mpirun, Accelerate's launcher starts one process on CPUs.
OWN = {"accelerate": TORCHRUN, "transformers": TORCHRUN, "lightning": [PYTHON]}
OWN["deepspeed"] = DEEPSPEED
ONE = [LAUNCHER, "run", "-np", "2", "--", PYTHON]
TWO = [LAUNCHER, "run", "-np", "4", "-H", "127.0.0.1:2,127.0.0.2:2", "--", PYTHON]
LAUNCHERS = ["one node", "two nodes", "torchrun", "its own"]
# By day, each trainer runs under one launcher, and each launcher starts one trainer.
USUAL = {
    "accelerate": "two nodes",
    "transformers": "torchrun",
    "lightning": "one node",
    "deepspeed": "its own",
}
RUNS = [
    (trainer, launcher)
    for trainer in TRAINERS
    for launcher in LAUNCHERS
    if USUAL[trainer] == launcher or AT_NIGHT
]


def train(
    launcher: list[str], trainer: str, backend: str, folder: Path, *more: str
) -> subprocess.CompletedProcess[str]:
    """Runs a trainer's program."""
    pytest.importorskip(trainer)
    program = str(HERE / f"{trainer}_program.py")
    return subprocess.run(
        [*launcher, program, backend, str(folder), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * LIMIT,
    )


def losses(
    launcher: list[str], trainer: str, backend: str, folder: Path, ranks: int
) -> list[list[float]]:
    """Returns the losses of all ranks."""
    done = train(launcher, trainer, backend, folder / backend)
    assert done.returncode == 0, done.stdout[-8000:]
    found = re.findall(r"BACKEND (\w+) LOSSES (\[.*\])", done.stdout)
    assert [name for name, _ in found] == [backend] * ranks, done.stdout[-8000:]
    return [ast.literal_eval(text) for _, text in found]


@pytest.mark.parametrize(("trainer", "launcher"), RUNS)
def test_losses_are_those_of_gloo(trainer: str, launcher: str, tmp_path: Path) -> None:
    if launcher == "its own" and OWN[trainer] is TORCHRUN:
        pytest.skip("it has no launcher of its own for CPUs")
    words = {"one node": ONE, "two nodes": TWO, "torchrun": TORCHRUN, "its own": OWN[trainer]}
    ranks = 4 if launcher == "two nodes" else 2
    ours = losses(words[launcher], trainer, "gradwire", tmp_path, ranks)
    # Gloo's losses don't depend on the launcher.
    theirs = losses(words[launcher], trainer, "gloo", tmp_path, ranks)
    assert len(ours[0]) > 8
    for mine in ours:
        assert mine == pytest.approx(theirs[0], rel=1e-5, abs=1e-5)


@at_night
def test_ray_train(tmp_path: Path) -> None:
    """Ray starts its workers itself."""
    ours = losses([PYTHON], "ray", "gradwire", tmp_path, 2)
    theirs = losses([PYTHON], "ray", "gloo", tmp_path, 2)
    assert ours[0] == ours[1] == pytest.approx(theirs[0], rel=1e-5) and len(ours[0]) == 24


@pytest.mark.parametrize("trainer", TRAINERS if AT_NIGHT else ["lightning"])
def test_a_killed_rank_is_named(trainer: str, tmp_path: Path) -> None:
    done = train(ONE, trainer, "gradwire", tmp_path, "1")
    assert done.returncode == 137, done.stdout[-8000:]
    assert re.search(r"\[0\].*rank 1 on host .* was killed by SIGKILL", done.stdout)


def test_accelerate_still_has_a_list_of_backends() -> None:
    """Otherwise ``Accelerator(backend="gradwire")`` may do, and ``prepare`` is not needed."""
    state = pytest.importorskip("accelerate.state")
    version = importlib.metadata.version("accelerate")
    source = Path(state.__file__).read_text()
    assert "Your assigned backend" in source, f"Accelerate {version} accepts any backend: use it"
