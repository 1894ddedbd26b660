"""Jobs that are suspended as a whole, as by Ctrl-Z, for longer than a sign of life may take."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import LAUNCHER, LIMIT, until

# Makes steps for three seconds after it has said that it does; with ``left``, without a job.
PROGRAM = """
import os, sys, time
import gradwire as gw
gw.init()
if sys.argv[1] == "second":
    gw.shutdown()
    gw.init()
gw.barrier()
first = gw.rank() == 0
if sys.argv[1] == "left":
    gw.shutdown()
if first:
    os.close(os.open(os.environ["GWTEST_SEEN"], os.O_CREAT))
for _ in range(300):
    time.sleep(0.01)
    if sys.argv[1] != "left":
        gw.barrier()
print("DONE", flush=True)
"""
HEARTBEAT = "1000"
SUSPENDED_SECONDS = 3.0


@pytest.mark.parametrize("ranks", [None, 2])
@pytest.mark.parametrize("way", ["first", "second", "left"])
def test_a_suspended_job_goes_on(ranks: int | None, way: str, tmp_path: Path) -> None:
    if way == "second":
        pytest.importorskip("torch")  # its store connects the ranks
    program, seen = tmp_path / "program.py", tmp_path / "seen"
    program.write_text(PROGRAM)
    words = [sys.executable, str(program), way]
    if ranks is not None:
        words = [LAUNCHER, "run", "-np", str(ranks), "--", *words]
    job = subprocess.Popen(
        words,
        process_group=0,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            **os.environ,
            "GWTEST_SEEN": str(seen),
            "GRADWIRE_HEARTBEAT__TIMEOUT_MS": HEARTBEAT,
            "GRADWIRE_HEARTBEAT__INTERVAL_MS": "100",
        },
    )
    try:
        until("it trains", seen.exists)
        os.killpg(job.pid, signal.SIGTSTP)
        time.sleep(SUSPENDED_SECONDS)
        os.killpg(job.pid, signal.SIGCONT)
        said, _ = job.communicate(timeout=LIMIT)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGCONT)
            job.terminate()
            job.wait()
    assert job.returncode == 0 and said.count("DONE") == (ranks or 1), said
