"""Functions that run as jobs: the ranks import them from here."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from pathlib import Path

import gradwire
from gradwire import _world


def shares(first: float, *, last: float) -> tuple[int, float]:
    import numpy as np

    gradwire.init()
    mine = np.array([last if gradwire.rank() == gradwire.size() - 1 else first])
    print("rank", gradwire.rank(), "says hello")
    return gradwire.rank(), float(gradwire.allreduce(mine, op=gradwire.Sum)[0])


def raises() -> None:
    gradwire.init()
    if gradwire.rank() == 1:
        raise LookupError("nothing there")
    gradwire.barrier()


def dies() -> None:
    gradwire.init()
    if gradwire.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    gradwire.barrier()


def exits(how: str) -> None:
    """Ends the process of rank 1, by ``sys.exit(0)`` or ``os._exit(0)``."""
    gradwire.init()
    if gradwire.rank() == 1:
        gradwire.shutdown()
        sys.exit(0) if how == "sys" else os._exit(0)


def ends_badly() -> int:
    """Returns a result, after which the process of rank 1 ends with exit code 9."""
    gradwire.init()
    if gradwire.rank() == 1:
        atexit.register(os._exit, 9)
    return gradwire.rank()


def sleeps(folder: str) -> None:
    """Says in a file that it runs, and goes on for long without any output."""
    gradwire.init()
    (Path(folder) / f"runs.{gradwire.rank()}").touch()
    time.sleep(600)


def horovods_variables() -> dict[str, str]:
    """Returns Horovod's environment variables of a rank."""
    prefix = "HOROVOD_"
    return {
        name.removeprefix(prefix): value
        for name, value in os.environ.items()
        if name.startswith(prefix)
    }


def signal_of_job() -> str:
    """Returns the name of the signal of ``--stop-signal``."""
    gradwire.init()
    return str(_world.session().stop_signal)
