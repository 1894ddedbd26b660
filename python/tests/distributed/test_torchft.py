"""torchft's managers train over Gradwire, and go on when a replica is killed."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import LIMIT, needs_torch

torch = pytest.importorskip("torch")
pytest.importorskip("torchft", reason="torchft is not installed: pip install gradwire[torchft]")

import torchft_training  # noqa: E402
from torchft import process_group  # noqa: E402
from torchft.coordination import LighthouseServer  # noqa: E402

PROGRAM = Path(torchft_training.__file__)


@pytest.mark.parametrize("way", ["ddp", "native", "local_sgd", "diloco"])
def test_replicas_outlive_a_killed_one(way: str) -> None:
    if way == "native":
        needs_torch(2, 15, why="older releases have no enable_reconfigure")
        if not hasattr(process_group, "ReconfigureOptions"):
            pytest.skip("torchft 0.2 does not use PyTorch's groups")
    lighthouse = LighthouseServer(
        bind="localhost:0", min_replicas=2, join_timeout_ms=10_000, heartbeat_timeout_ms=3000
    )
    words = [sys.executable, str(PROGRAM), way]
    processes = [
        subprocess.Popen(
            [*words, str(replica), lighthouse.address()],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for replica in range(3)
    ]
    try:
        said = [process.communicate(timeout=LIMIT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
        lighthouse.shutdown()
    assert [process.returncode for process in processes] == [0, 0, -signal.SIGKILL], said
    ends = [re.findall(r"^END (\d+) (\w+)", text, re.M) for text in said[:2]]
    assert len(ends[0]) == 1 and ends[0] == ends[1], said
    if way in ("ddp", "native"):
        steps = {
            (int(a), int(b)) for text in said for a, b in re.findall(r"STEP (\d+) (\d+)", text)
        }
        assert len(steps) == torchft_training.STEPS, said
        assert {size for _, size in steps} <= {2, 3}, said
        total = float(re.findall(r"SUM (\S+)", said[0])[0])
        model = torchft_training.replay(sorted(steps))
        assert total == pytest.approx(sum(float(one.sum()) for one in model.parameters())), said
