"""A job with a straggler, for the tests of the status page and top."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from launching import LAUNCHER, LIMIT, running, until

# Rank 3 takes 50 ms longer for each step. Markup in names must be shown as text.
NAME = "<b id=markup>gradient</b>"
PROGRAM = f"""
    import os, time
    from pathlib import Path
    import gradwire as gw, numpy as np
    gw.init()
    print("rank", gw.rank(), "trains", flush=True)
    folder = Path(os.environ["TEST_FOLDER"])
    (folder / f"pid{{gw.rank()}}").write_text(str(os.getpid()))
    if gw.rank() == 0:
        (folder / "new").write_text(os.environ["GRADWIRE_COORDINATOR_METRICS"])
        (folder / "new").rename(folder / "coordinator")
    end = time.monotonic() + {LIMIT}
    while True:
        time.sleep(0.05 if gw.rank() == 3 else 0)
        gw.allreduce(np.ones(100_000, np.float32), name="{NAME}")
        gw.mark_step()
        ends = (folder / "end").exists() or time.monotonic() > end
        if gw.allreduce(np.array([float(ends)]), name="ends")[0] > 0:
            break
    gw.shutdown()
"""


@contextlib.contextmanager
def job(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A job of two nodes with two ranks each; yields its launcher and the port of its page."""
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM))
    start = [LAUNCHER, "run", "-H", "127.0.0.1:2,127.0.0.2:2", *words]
    # The loopback interface has no line rate.
    start += ["--set", "network.rate_mbit=1000"]
    start += ["--", sys.executable, str(folder / "program.py")]
    with running(start, folder / "job.log", TEST_FOLDER=str(folder)) as launcher:

        def address() -> str | None:
            assert launcher.poll() is None, (folder / "job.log").read_text()
            file = folder / "coordinator"
            return file.read_text() if file.exists() else None

        yield launcher, until("the job runs", address).rpartition(":")[2]
