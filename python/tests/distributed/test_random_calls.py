"""Random calls of torch.distributed (``ranks/random_calls.py``), with a new seed each time.

``GWTEST_SEED=…`` repeats a printed seed.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from launching import AT_NIGHT, LAUNCHER, jobs_of

pytest.importorskip("torch")
HERE = Path(__file__).parent
CALLS = 3000 if AT_NIGHT else 300
# A limit against hangs; tests never check how long something takes.
LIMIT = 3600 if AT_NIGHT else 900


@pytest.mark.parametrize("hosts", jobs_of("127.0.0.1:2", "127.0.0.1:2,127.0.0.2:1"))
def test_random_calls(hosts: str) -> None:
    seed = os.environ.get("GWTEST_SEED") or str(secrets.randbelow(1 << 32))
    calls = os.environ.get("GWTEST_CALLS") or str(CALLS)
    print(f"GWTEST_SEED={seed} GWTEST_CALLS={calls} on {hosts}")
    ranks = sum(int(host.partition(":")[2]) for host in hosts.split(","))
    words = [
        LAUNCHER,
        "run",
        "-np",
        str(ranks),
        "-H",
        hosts,
        "--",
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
    ]
    # PyTorch logs each failing call, and many of these are expected to fail.
    words += ["-p", "no:cacheprovider", "-p", "no:logging", "-W", "ignore"]
    words += [str(HERE / "ranks" / "random_calls.py")]
    done = subprocess.run(
        words,
        env={**os.environ, "GWTEST_SEED": seed, "GWTEST_CALLS": calls},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
        cwd=HERE,  # not in the folder of the package's source, which would be imported
    )
    assert done.returncode == 0, done.stdout[-20_000:]
