"""Helpers that Horovod's tests import, but that its source package lacks."""

from __future__ import annotations

import contextlib
import inspect
import os
import tempfile
from collections.abc import Iterator

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
