"""The flight recorder: PyTorch's own analyser reads a report; ranks save what no agent does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import LAUNCHER, LIMIT, needs_torch, torchrun

PROGRAM = str(Path(__file__).with_name("hanging.py"))
ANALYSER = "torch.distributed.flight_recorder.fr_trace"
Done = subprocess.CompletedProcess[str]


def ran(words: list[str], **variables: str) -> Done:
    return subprocess.run(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=LIMIT,
        env={**os.environ, **variables},
    )


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("sleep", ["Not all ranks joining collective", "missing ranks: {2}"]),
        ("other_shape", ["Culprit rank", "SIZE_OR_SYNTAX_MISMATCH"]),
    ],
)
def test_pytorchs_analyser_reads_a_report(way: str, says: list[str], tmp_path: Path) -> None:
    needs_torch(2, 9, why="the analyser is not a module of earlier releases")
    recordings, dumps = tmp_path / "recordings", tmp_path / "dumps"
    settings = [f"recorder.directory={recordings}", "negotiation.stall_shutdown_ms=2000"]
    words = [LAUNCHER, "run", "-np", "3", "-H", "127.0.0.1:1,127.0.0.2:2"]
    words += [word for setting in settings for word in ("--set", setting)]
    job = ran([*words, "--", sys.executable, PROGRAM, way])
    assert job.returncode != 0 and len(list(recordings.iterdir())) == 2, job.stdout
    report = ran([LAUNCHER, "report", str(recordings), "--torch", str(dumps)])
    assert report.returncode == 0 and "'allreduce.step.2'" in report.stdout, report.stdout
    done = ran([sys.executable, "-m", ANALYSER, str(dumps)])
    assert done.returncode == 0, done.stdout
    assert all(part in done.stdout for part in says), done.stdout
    # Only the last operation is at fault, and its line is known.
    assert done.stdout.count("internal record id") == 1, done.stdout
    assert "collective: c10d:all_reduce" in done.stdout, done.stdout
    assert re.search(rf" at \S*{Path(PROGRAM).name}:\d+", done.stdout), done.stdout


def test_ranks_of_torchrun_save_a_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torchrun has no agent that could save the recording of a killed daemon."""
    recordings = tmp_path / "recordings"
    monkeypatch.setenv("GRADWIRE_RECORDER__DIRECTORY", str(recordings))
    program = """
import os, signal, sys
from pathlib import Path
import gradwire as gw
import numpy as np
gw.init()
gw.allreduce(np.ones(3, np.float32), name="loss")
job = os.environ["GRADWIRE_JOB"].encode()
if gw.rank() == 1:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            name = (process / "comm").read_text().strip()
            if name == "gradwired" and job in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:  # it has ended
            pass
gw.barrier()
"""
    done = torchrun(program, tmp_path, 2)
    assert done.returncode != 0 and len(list(recordings.iterdir())) == 1, done.stdout
    report = ran([LAUNCHER, "report", str(recordings)])
    assert report.returncode == 0 and "'allreduce.loss'" in report.stdout, report.stdout
