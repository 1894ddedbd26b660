"""The start of a BytePS program, and the variables that BytePS reads."""

from __future__ import annotations

import os
import sys

import gradwire
from gradwire._errors import InvalidRequest, NotLaunched

# Variables that the settings read (settings/keys/src/horovod.rs).
_READ = ("BYTEPS_PARTITION_BYTES", "BYTEPS_LOG_LEVEL")
# Variables that the optimizers read.
ASYNC, ASYNC_BOUND = "BYTEPS_ENABLE_ASYNC", "BYTEPS_ASYNC_MAX_STEPS_AHEAD"
# Variables that `gradwire join` reads (launcher/src/join/byteps.rs). It sets the last two.
_JOINED = (
    "DMLC_ROLE",
    "DMLC_NUM_WORKER",
    "DMLC_NUM_SERVER",
    "DMLC_WORKER_ID",
    "DMLC_PS_ROOT_URI",
    "DMLC_PS_ROOT_PORT",
    "BYTEPS_FORCE_DISTRIBUTED",
    "BYTEPS_LOCAL_SIZE",
    "BYTEPS_LOCAL_RANK",
)
_ELASTIC = (
    "does not exist here: an elastic job forms its next epoch by itself. Start it with "
    "`gradwire run --min-np N`, and see docs/elastic.md"
)


def init(lazy: bool = True) -> None:
    """Joins this process to its job, like ``gradwire.init``.

    Variables ``BYTEPS_...`` and ``DMLC_...`` without effect are named once, on standard error of
    the first rank.

    Args:
        lazy: Accepted for compatibility; it has no effect.

    Raises:
        NotLaunched: The variables say that there are several workers, but no launcher has started
            this job. Start it with ``gradwire run``.
        GradwireError: The job can't be joined, as for ``gradwire.init``.
    """
    gradwire.init()
    workers = os.environ.get("DMLC_NUM_WORKER", "1")
    if gradwire.size() == 1 and workers not in ("", "1"):
        gradwire.shutdown()
        raise NotLaunched(
            f"DMLC_NUM_WORKER={workers} says that there are several workers, but this process was "
            "started alone: on each host, start `gradwire join -- python train.py` instead of "
            "`bpslaunch`; or start all with `gradwire run -H host1:slots,host2:slots -- python "
            "train.py`, which needs no DMLC variables",
            kind="not-launched",
        )
    given = (name for name in os.environ if name.startswith(("BYTEPS_", "DMLC_")))
    read = _READ + (ASYNC, ASYNC_BOUND) + (_JOINED if "BYTEPS_LOCAL_RANK" in os.environ else ())
    unused = sorted(name for name in given if name not in read)
    if unused and gradwire.rank() == 0:
        print(f"gradwire: these variables have no effect: {', '.join(unused)}", file=sys.stderr)


def is_asynchronous() -> bool:
    """Returns whether the environment asks for asynchronous training."""
    return os.environ.get(ASYNC, "0") not in ("", "0")


def suspend() -> None:
    """Raises an error: an elastic job needs no call.

    Raises:
        InvalidRequest: Always; it names the alternative.
    """
    raise InvalidRequest(f"suspend() {_ELASTIC}", kind="invalid")


def resume(num_workers: int, num_servers: int, global_rank: int = -1) -> None:
    """Raises an error: an elastic job needs no call.

    Args:
        num_workers: Ignored.
        num_servers: Ignored.
        global_rank: Ignored.

    Raises:
        InvalidRequest: Always; it names the alternative.
    """
    raise InvalidRequest(f"resume() {_ELASTIC}", kind="invalid")
