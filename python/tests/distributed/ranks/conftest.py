"""One process group for all tests of a rank. PyTorch finds the backend without an import."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15):
    import gradwire.torch  # noqa: F401  - older releases read no entry points


@pytest.fixture(scope="session", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group(
        "gradwire", timeout=timedelta(seconds=int(os.environ.get("TEST_TIMEOUT", "120")))
    )
    yield
    dist.barrier()
    dist.destroy_process_group()
