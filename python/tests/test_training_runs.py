"""Random trainings on N ranks, compared with one process (``training_runs.py``)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import AT_NIGHT, LAUNCHER, LIMIT, Job, jobs_of, needs_torch

# Many trainings in one job: starting a job takes time.
JOBS = [job for job in jobs_of("127.0.0.1:2", "127.0.0.1:1,127.0.0.2:2") if job != "127.0.0.1:1"]
RUNS = 500 if AT_NIGHT else 40
FIRST = int(os.environ.get("GWTEST_SEED", "0"))


@pytest.mark.parametrize("hosts", JOBS)
def test_trainings_on_the_ranks_of(hosts: str) -> None:
    needs_torch(2, 2, why="nothing to train without")
    count = -(-RUNS // len(JOBS))
    first = FIRST + JOBS.index(hosts) * count
    ranks = sum(int(host.partition(":")[2]) for host in hosts.split(","))
    program = [
        sys.executable,
        str(Path(__file__).parent / "training_runs.py"),
        str(first),
        str(count),
    ]
    done = subprocess.run(
        [LAUNCHER, "run", "-np", str(ranks), "-H", hosts, "--", *program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=4 * LIMIT,
    )
    assert done.returncode == 0 and done.stdout.count(f"RUNS {count} DIFFER []\n") == ranks, (
        done.stdout[-20_000:]
    )


def test_a_set_registered_in_each_session(job: Job) -> None:
    needs_torch(2, 2, why="nothing to train without")
    done = job("""
        import torch
        import gradwire.torch as hvd

        both = hvd.ProcessSet([0, 1])
        hvd.init(process_sets=[both])
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([parameter], lr=1.0), [("parameter", parameter)], process_set=both
        )

        def step():
            optimizer.zero_grad()
            (parameter.sum() * (hvd.rank() + 1.0)).backward()
            optimizer.step()

        step()
        hvd.shutdown()
        hvd.init()
        try:
            step()
        except hvd.InvalidRequest as error:
            assert "is not registered" in str(error)
            print("REFUSED", flush=True)
        hvd.add_process_set(both)
        step()
        print("PARAMETER", parameter.item(), flush=True)
    """)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("REFUSED\n") == done.stdout.count("PARAMETER -3.0\n") == 2, done.stdout
