"""Jobs that train asynchronously, as with BytePS, end with equal ranks, or with the cause."""

from __future__ import annotations

import pytest
from launching import Job

pytest.importorskip("torch")

TRAINS = """
    import os, signal, sys
    import torch
    import gradwire.torch.byteps as bps
    from gradwire import GradwireError
    bps.init()
    weights = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weights], lr=1.0)
    optimizer = bps.DistributedOptimizer(optimizer, [("weights", weights)])
    steps = 5 + 20 * bps.rank()
    try:
        for step in range(steps if "{how}" == "ends" else 10_000_000):
            weights.grad = torch.ones(2)
            optimizer.step()
            if "{how}" == "dies" and bps.rank() == 1 and step == 9:
                os.kill(os.getpid(), signal.SIGKILL)
            if "{how}" == "raises" and bps.rank() == 1 and step == 9:
                raise ValueError("it has enough")
    except GradwireError as error:
        print(f"TOLD {{error.rank}} {{error}}")
        sys.exit(8)
    bps.shutdown()
    print(f"HAS {{weights.tolist()}}\\n", end="")
"""


def test_shutdown_makes_ranks_equal(job: Job) -> None:
    done = job(TRAINS.format(how="ends"), BYTEPS_ENABLE_ASYNC="1")
    assert done.returncode == 0 and done.stdout.count("HAS [-30.0, -30.0]") == 2, done.stdout


@pytest.mark.parametrize(
    ("how", "code", "says"), [("dies", 137, "killed by SIGKILL"), ("raises", 1, "it has enough")]
)
def test_a_step_raises_when_a_rank_is_lost(job: Job, how: str, code: int, says: str) -> None:
    done = job(TRAINS.format(how=how), BYTEPS_ENABLE_ASYNC="1")
    assert done.returncode == code, done.stdout
    told = next(line for line in done.stdout.splitlines() if "TOLD 1" in line)
    assert says in told, done.stdout


def test_a_second_job_begins_another_exchange(job: Job) -> None:
    done = job(
        """
        import torch
        import gradwire
        import gradwire.torch.byteps as bps
        bps.init()
        weights = torch.nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([weights], lr=1.0)
        optimizer = bps.DistributedOptimizer(optimizer, [("weights", weights)])
        def step():
            weights.grad = torch.ones(2)
            optimizer.step()
        step()
        step()
        bps.shutdown()
        try:
            step()
        except gradwire.NotInitialized:
            print("NOT INITIALIZED\\n", end="")
        bps.init()
        for _ in range(1 + bps.rank()):
            step()
        optimizer.finish()
        optimizer.finish()
        print(f"HAS {weights.tolist()}\\n", end="")
        """,
        BYTEPS_ENABLE_ASYNC="1",
    )
    assert done.returncode == 0 and done.stdout.count("NOT INITIALIZED") == 2, done.stdout
    assert done.stdout.count("HAS [-7.0, -7.0]") == 2, done.stdout
