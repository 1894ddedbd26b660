"""`scripts/bench_node.sh` measures all systems, with small sizes."""

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
    needs_torch(2, 11, why="the benchmark refuses it")
    wheels = sorted((ROOT / "python" / "dist").glob("gradwire-*.whl"))
    if not wheels:
        pytest.skip("make wheel has not been run")
    done = subprocess.run(
        [ROOT / "scripts" / "bench_node.sh", wheels[-1], "--out", tmp_path, "--small"],
        env={**os.environ, "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * LIMIT,
    )
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "node.json").read_text())
    cells = {cell["system"]: cell for cell in found["cells"]}
    assert {"gradwire", "gloo"} <= set(cells) and found["machine"]["cores"]
    sizes = ["4", str(64 << 10), str(2 << 20)]
    for system, cell in cells.items():
        assert list(cell["us"]) == (sizes[1:] if system == "plain" else sizes), cell
        assert cell["ranks"] == 2 and all(us > 0 for us in cell["us"].values())
    text = (tmp_path / "node.md").read_text()
    assert text in done.stdout and text.count("| 2 | ") == 3
