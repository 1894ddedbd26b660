"""Processes that a rank starts: other jobs, and children that are not ranks."""

from __future__ import annotations

from launching import LAUNCHER, Job

INNER = """
import gradwire as gw
gw.init()
print("INNER", gw.rank(), gw.size(), flush=True)
"""


def test_a_rank_may_start_another_job(job: Job) -> None:
    for elastic in ["", "--min-np=1"]:
        done = job(
            f"""
            import subprocess, sys
            import gradwire as gw
            gw.init()
            if gw.rank() == 0:
                words = [{LAUNCHER!r}, "run", "-np", "2", *{elastic.split()}]
                inner = [*words, "--", sys.executable, "-c", {INNER!r}]
                print("CODE", subprocess.run(inner).returncode, flush=True)
                print("FUNCTION", gw.run(max, (1, 2), np=1), flush=True)
            gw.barrier()
            """,
            ranks=2,
            options=["--min-np", "2"],
        )
        assert done.returncode == 0 and "CODE 0" in done.stdout, done.stdout
        assert "FUNCTION [2]" in done.stdout, done.stdout
        assert "INNER 0 2" in done.stdout and "INNER 1 2" in done.stdout, done.stdout


def test_a_child_of_a_rank_is_no_rank(job: Job) -> None:
    done = job(
        f"""
        import subprocess, sys
        import gradwire as gw
        gw.init()
        subprocess.run([sys.executable, "-c", {INNER!r}])
        gw.barrier()
        """,
    )
    assert done.returncode == 0 and "INNER" not in done.stdout, done.stdout
    assert "that process has started this one, which is not a rank" in done.stdout, done.stdout


CHILD = """
import os, signal
import gradwire as gw
gw.init()
gw.barrier()
if gw.rank() == 1:
    print("CHILD", os.getpid(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
gw.barrier()
"""


def test_a_child_that_is_the_rank_is_named(job: Job) -> None:
    done = job(
        f"""
        import subprocess, sys
        subprocess.run([sys.executable, "-c", {CHILD!r}])
        """,
    )
    pid = done.stdout.partition("CHILD ")[2].split()[0]
    assert f"its process (pid {pid}) ended without leaving the job: it exited" in done.stdout
    assert ", which was started as this rank, " in done.stdout, done.stdout


def test_a_rank_that_runs_exec_is_named(job: Job) -> None:
    done = job(
        """
        import os
        import gradwire as gw
        gw.init()
        gw.barrier()
        if gw.rank() == 1:
            os.execv("/bin/sleep", ["sleep", "10"])
        gw.barrier()
        """,
    )
    assert done.returncode != 0, done.stdout
    assert "has closed its connection without leaving the job, and still runs" in done.stdout
