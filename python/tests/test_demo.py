"""`gradwire demo` trains on four ranks, with PyTorch or without it, and reports a lost rank."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import LAUNCHER, LIMIT

RANKS = 4


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, capture_output=True, text=True, timeout=LIMIT, cwd=folder, check=False
    )


def learned(text: str, framework: str, ranks: int) -> None:
    """Checks what a whole demo prints."""
    assert f"{ranks} ranks train a small network with {framework}" in text, text
    accuracy = re.search(r"accuracy (0\.\d+) of 360 images", text)
    assert accuracy and float(accuracy[1]) > 0.85, text
    assert f"the same bits on {ranks} of {ranks} ranks" in text, text


def test_the_demo_trains_with_pytorch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = run(tmp_path, LAUNCHER, "demo")
    assert done.returncode == 0, done
    learned(done.stdout, "PyTorch", RANKS)


def test_the_demo_trains_without_pytorch(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import runpy, sys\n"
        "sys.modules['torch'] = None  # as if it were not installed\n"
        "runpy.run_module('gradwire.demo', run_name='__main__', alter_sys=True)\n"
    )
    losses = []
    for ranks in (1, 2):
        done = run(tmp_path, LAUNCHER, "run", "-np", str(ranks), "--", sys.executable, str(program))
        assert done.returncode == 0, done
        learned(done.stdout, "NumPy", ranks)
        losses.append([float(it) for it in re.findall(r"loss (\S+)", done.stdout)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2), "the number of ranks does not matter"


def test_a_killed_rank_is_reported(tmp_path: Path) -> None:
    done = run(tmp_path, LAUNCHER, "demo", "--kill", "-n", "3")
    assert done.returncode == 137, done
    assert re.search(r"rank 2 on host localhost \(pid \d+\) was killed by SIGKILL", done.stderr)


def test_a_demo_without_its_rank_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, LAUNCHER, "demo", "--kill", "-n", "2")
    assert done.returncode == 2 and "three ranks or more" in done.stderr, done
