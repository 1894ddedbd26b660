"""Ranks that leave the job of ``gradwire run`` and form another one: ``shutdown()``, ``init()``."""

from __future__ import annotations

import pytest
from launching import Job


@pytest.mark.parametrize("seconds", [0, 2])
def test_an_exception_in_the_second_job_is_named(job: Job, seconds: int) -> None:
    """Also if the rank that raised it takes longer to end than the other one."""
    pytest.importorskip("torch")  # its store connects the ranks
    done = job(
        f"""
        import atexit, time
        import gradwire as gw
        gw.init()
        gw.shutdown()
        gw.init()
        gw.barrier()
        if gw.rank() == 0:
            atexit.register(time.sleep, {seconds})
            raise ValueError("a hole")
        gw.barrier()
        """
    )
    assert done.returncode == 1, done.stdout
    reports = [line for line in done.stdout.splitlines() if line.startswith("gradwire: ")]
    assert reports[0].startswith("gradwire: rank 0 on host"), done.stdout


def test_a_rank_ends_between_two_jobs(job: Job) -> None:
    pytest.importorskip("torch")  # its store connects the ranks
    done = job(
        """
        import gradwire as gw
        gw.init()
        rank = gw.rank()
        gw.shutdown()
        if rank != 1:
            gw.init()
        """,
        hosts="127.0.0.1:1,127.0.0.2:2",
    )
    assert done.returncode == 1, done.stdout
    [report] = [line for line in done.stdout.splitlines() if line.startswith("gradwire: rank")]
    assert report.startswith("gradwire: rank 1 on host 127.0.0.2 has ended, but "), done.stdout


@pytest.mark.parametrize("way", ["os.kill(os.getpid(), signal.SIGSTOP)", "os._exit(0)"])
def test_a_lost_rank_of_the_second_job_is_named(job: Job, way: str) -> None:
    """The rank that notices it ends first."""
    pytest.importorskip("torch")  # its store connects the ranks
    done = job(
        f"""
        import os, signal
        import gradwire as gw
        gw.init()
        gw.shutdown()
        gw.init()
        gw.barrier()
        if gw.rank() == 0:
            {way}
        gw.barrier()
        """,
        hosts="127.0.0.1:1,127.0.0.2:1",
    )
    assert done.returncode == 1, done.stdout
    [report] = [line for line in done.stdout.splitlines() if line.startswith("gradwire: ")]
    assert report.startswith("gradwire: the job failed: rank 0 on host"), done.stdout
