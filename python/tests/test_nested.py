"""Processes that a rank starts: other jobs, and children that are no ranks."""

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
