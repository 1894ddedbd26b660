"""`scripts/gpu_check.sh` runs all its parts without a GPU, with small sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import LIMIT, needs_torch

ROOT = Path(__file__).parent.parent.parent


def test_a_rehearsal_with_two_ranks(tmp_path: Path) -> None:
    needs_torch(2, 11, why="the GPU check refuses it")
    wheels = sorted((ROOT / "python" / "dist").glob("gradwire-*.whl"))
    if not wheels:
        pytest.skip("make wheel has not been run")
    words = [ROOT / "scripts" / "gpu_check.sh", wheels[-1], "--out", tmp_path]
    done = subprocess.run(
        [*words, "--device", "cpu", "--only", "2 ranks"],
        env={**os.environ, "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * LIMIT,
    )
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    parts = {part["name"].partition(",")[0]: part for part in found["parts"]}
    assert list(parts) == [
        "tests",
        "tests with the GPU as default device",
        "allreduce",
        "ResNet-50",
        "bench",
    ]
    assert parts["tests"]["figures"][0]["passed"] > 0
    ways = {"copies", "copies-both", "gloo", "backend", "allreduce_"}
    assert [row["bytes"] for row in parts["allreduce"]["figures"]] == [
        4096 << at for at in (0, 2, 4, 6, 8)
    ]
    assert all(set(row["times_us"]) == ways for row in parts["allreduce"]["figures"])
    [step] = parts["ResNet-50"]["figures"]
    assert {"gloo", "optimizer", "backend", "hook"} < set(step["times_us"])
    assert len(parts["bench"]["figures"]) == 10
    assert (tmp_path / "gpu_check.md").read_text() in done.stdout
    assert not (tmp_path / "failures.txt").exists()
