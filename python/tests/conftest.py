"""Starts real jobs for the tests, with the programs of the installed wheel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
from launching import LAUNCHER, LIMIT, Job

# The tests in ranks/ run on the ranks of jobs that test_jobs.py starts.
collect_ignore = [] if "GWTEST_RANK" in os.environ else ["ranks"]

# The process that runs the tests may ignore Ctrl-C (nohup, a background job). Programs would
# inherit that, but some tests need Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Several ranks share the CPUs, and PyTorch's threads spin while waiting for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Runs a program text on the ranks of a job, or alone, and returns its result."""

    def run(
        text: str,
        ranks: int | None = 2,
        hosts: str | None = None,
        before: Sequence[str] = (),
        options: Sequence[str] = (),
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        program = tmp_path / "program.py"
        program.write_text(textwrap.dedent(text))
        words = [sys.executable, str(program)]
        if ranks is not None:
            places = ["-np", str(ranks)] if hosts is None else ["-H", hosts]
            words = [LAUNCHER, "run", *places, *options, "--", *words]
        return subprocess.run(
            [*before, *words],
            env={**os.environ, "TEST_FOLDER": str(tmp_path), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )

    return run
