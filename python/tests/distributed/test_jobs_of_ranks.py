"""Runs the tests in ranks/ on one to four ranks, on one and two nodes and under torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launching import jobs_of

pytest.importorskip("torch")
HERE = Path(__file__).parent
PROGRAMS = Path(sys.executable).parent
# These files run only if named explicitly.
FILES = (
    "collectives.py",
    "works.py",
    "callbacks.py",
    "tensor_kinds.py",
    "training.py",
    "buckets.py",
    "staging.py",
    "adopted.py",
)
RANKS = [str(HERE / "ranks" / name) for name in FILES]
PYTEST = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-W", "ignore", *RANKS]
# A limit against hangs; tests never check how long something takes.
LIMIT = 900
# Two ranks of one node are those of torchrun.
JOBS = jobs_of("127.0.0.1:2,127.0.0.2:1")


def _run(words: list[str]) -> None:
    done = subprocess.run(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
        cwd=HERE,  # not in the folder of the package's source, which would be imported
    )
    assert done.returncode == 0, done.stdout[-20_000:]
    assert " passed" in done.stdout or "[100%]" in done.stdout, done.stdout[-20_000:]


@pytest.mark.parametrize("hosts", JOBS)
def test_under_gradwire_run(hosts: str) -> None:
    ranks = sum(int(host.partition(":")[2]) for host in hosts.split(","))
    launch = [str(PROGRAMS / "gradwire"), "run", "-np", str(ranks), "-H", hosts, "--"]
    _run([*launch, sys.executable, *PYTEST])


def test_under_torchrun() -> None:
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    _run([*launch, *PYTEST])
