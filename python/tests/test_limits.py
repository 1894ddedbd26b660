"""Starts and ends that would wait forever: each has a limit, and an error that names the rank."""

from __future__ import annotations

import pytest
from launching import Job

START = """
import os, signal, time
import gradwire as gw

late = os.environ["GRADWIRE_RANK"] == "1"
if late:
    {before}
try:
    gw.init()
except gw.WaitTimeout as error:
    print("TOLD", error.rank, error, flush=True)
    raise SystemExit(3) from None
"""


@pytest.mark.parametrize("hosts", ["127.0.0.1:3", "127.0.0.1:1,127.0.0.2:2"])
@pytest.mark.parametrize(
    ("before", "state"),
    [
        ("time.sleep(100)", ""),
        ("os.kill(os.getpid(), signal.SIGSTOP)", "; the process is stopped (SIGSTOP"),
    ],
    ids=["busy", "stopped"],
)
def test_a_rank_that_does_not_start(job: Job, before: str, state: str, hosts: str) -> None:
    program = START.format(before=before)
    done = job(program, hosts=hosts, HOROVOD_START_TIMEOUT="3")
    told = [line for line in done.stdout.splitlines() if "TOLD" in line]
    assert len(told) == 2, done.stdout
    for line in told:
        assert "TOLD 1 rank 1 on host 127.0.0." in line and "(pid " in line, line
        text = f"has not joined the job within 3.0 s after the first rank did{state}"
        assert text in line and "every rank must call init()" in line, line
    assert done.returncode != 0


def test_a_slow_start_of_all_ranks_has_no_limit(job: Job) -> None:
    program = "import time; time.sleep(4)\n" + START.format(before="time.sleep(0.5)")
    done = job(program, GRADWIRE_LAUNCH__START_TIMEOUT_MS="3000")
    assert done.returncode == 0, done.stdout


def test_a_rank_that_is_stopped_after_it_has_left(job: Job) -> None:
    done = job(
        """
        import os, signal
        import gradwire as gw
        gw.init()
        rank = gw.rank()
        gw.shutdown()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        """
    )
    assert "rank 1" in done.stdout and "did not respond and was killed" in done.stdout, done.stdout
    assert "has been stopped (SIGSTOP) since it left the launcher" in done.stdout, done.stdout
    assert done.returncode == 1


def test_a_rank_stopped_while_others_leave(job: Job) -> None:
    done = job(
        """
        import os, signal
        import gradwire as gw
        gw.init()
        if gw.rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        gw.shutdown()
        """
    )
    text = "the process is stopped (SIGSTOP or a debugger)"
    assert "rank 1" in done.stdout and text in done.stdout, done.stdout
    assert done.returncode != 0
