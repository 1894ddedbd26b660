"""Runs the tests in ranks/ on jobs of one to four ranks, on one and two nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import LAUNCHER, LIMIT, jobs_of

HERE = Path(__file__).parent
# The first job is a single process without a launcher. The second has all that a job can have:
# ranks on one node, ranks on several nodes, nodes of different sizes.
JOBS = jobs_of("", "127.0.0.1:2,127.0.0.2:1")


# Shares of the files, which run at the same time where there are enough processors.
FILES = sorted(map(str, (HERE / "ranks").glob("test_*.py")))
SHARES = {"first half": FILES[::2], "second half": FILES[1::2]}


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("hosts", JOBS)
def test_on_the_ranks_of(hosts: str, share: str) -> None:
    words = [str(Path(sys.executable).parent / "pytest"), "-x", "-q", "-p", "no:cacheprovider"]
    words += ["-W", "ignore::DeprecationWarning", *SHARES[share]]
    if hosts:
        ranks = sum(int(host.partition(":")[2]) for host in hosts.split(","))
        words = [LAUNCHER, "run", "-np", str(ranks), "-H", hosts, "--", *words]
    # Without hosts, it is a single process without a launcher.
    variables = {**os.environ, "GWTEST_RANK": "1"}
    done = subprocess.run(
        words,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * LIMIT,
    )
    assert done.returncode == 0, done.stdout[-20_000:]
    assert "passed" in done.stdout or "[100%]" in done.stdout
