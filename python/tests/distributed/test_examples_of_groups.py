"""The examples for torch.distributed work, and all of them train alike."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import LAUNCHER, LIMIT, needs_torch

pytest.importorskip("torch")
EXAMPLES = Path(__file__).parent.parent.parent.parent / "examples"


def test_digits_train_alike_in_every_style() -> None:
    needs_torch(2, 15, why="older releases do not find the backend by themselves")
    losses = {}
    for example in ("digits_torch_distributed", "digits_ddp", "digits_ddp --hook", "digits_fsdp2"):
        name, *options = example.split()
        words = [
            sys.executable,
            str(EXAMPLES / f"{name}.py"),
            "--epochs",
            "4",
            "--batch",
            "48",
            *options,
        ]
        words = [LAUNCHER, "run", "-np", "3", "-H", "127.0.0.1:2,127.0.0.2:1", "--", *words]
        done = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT
        )
        assert done.returncode == 0, done.stdout
        losses[example] = [float(text) for text in re.findall(r"loss ([0-9.]+)", done.stdout)]
        accuracy = float(re.findall(r"accuracy ([0-9.]+)", done.stdout)[0])
        assert len(losses[example]) == 4 and accuracy > 0.8, done.stdout
    for example, got in losses.items():
        assert got == pytest.approx(losses["digits_ddp"], abs=1e-4), example
