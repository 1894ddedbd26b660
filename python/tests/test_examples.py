"""The examples do what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import LAUNCHER, LIMIT

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def run(words: list[str]) -> str:
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_digits_train_alike_on_one_and_on_three_ranks() -> None:
    pytest.importorskip("torch")
    words = [sys.executable, str(EXAMPLES / "digits_horovod.py"), "--epochs", "4", "--batch", "48"]
    said = [run(words), run([LAUNCHER, "run", "-np", "3", "-H", "127.0.0.1:2,127.0.0.2:1", "--", *words])]
    losses = [[float(text) for text in re.findall(r"loss ([0-9.]+)", text)] for text in said]
    accuracies = [float(re.findall(r"accuracy ([0-9.]+)", text)[0]) for text in said]
    assert len(losses[0]) == len(losses[1]) == 4, said
    # The shares of three ranks make the same batches, so it is the same training.
    assert losses[0] == pytest.approx(losses[1], abs=1e-5) and losses[0][3] < losses[0][0], said
    assert min(accuracies) > 0.8, said


def test_a_function_as_a_job() -> None:
    said = run([sys.executable, str(EXAMPLES / "function_as_job.py")])
    numbers = [float(text) for text in re.findall(r"3\.\d+", said)]
    assert len(numbers) == 4 and len(set(numbers)) == 1 and abs(numbers[0] - 3.14) < 0.02, said
