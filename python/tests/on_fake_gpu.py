"""Helpers for tests with tensors on a simulated GPU (``fake_cuda``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from fake_cuda import FakeCuda

import gradwire.torch as hvd
from gradwire import _staging
from gradwire.torch import _cuda


def simulated() -> Iterator[FakeCuda]:
    """The fixture ``gpu``: a simulated GPU while a test runs."""
    fake = FakeCuda()
    _cuda.use(fake)
    yield fake
    _staging.drain()
    _cuda.use(_cuda.Cuda())
    assert not fake.registered, "what was registered is given back"
    assert fake.freed == 0, "a copy's memory is kept until the copy is done"


def of_rank(rank: int, *shape: int) -> Any:
    return (
        torch.arange(24.0).view(4, 6) + 100 * rank if not shape else torch.full(shape, rank + 1.0)
    )


def total() -> Any:
    return sum(of_rank(rank) for rank in range(hvd.size()))
