"""Sums of fresh tensors, for the tests of tensors that move into shared memory."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import gradwire.torch as hvd  # noqa: E402
from gradwire.torch._adopt import is_shared as adopted  # noqa: E402

N = 50_000  # float32: 200 kB
_numbers = iter(range(1 << 30))


def fresh(elements: int = N, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(elements) % 61 + 1).to(dtype) * (hvd.rank() + 1)


def total(elements: int = N, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    ranks = hvd.size() * (hvd.size() + 1) // 2
    return (torch.arange(elements) % 61 + 1).to(dtype) * ranks


def exchange(tensor: torch.Tensor) -> torch.Tensor:
    """Sums a tensor in place, and checks the sum of the fresh data."""
    tensor.copy_(fresh(tensor.numel(), tensor.dtype).view(tensor.shape))
    name = f"adopted.{next(_numbers)}"
    hvd.allreduce_(tensor, name=name, op=hvd.Sum)
    assert torch.equal(tensor, total(tensor.numel(), tensor.dtype).view(tensor.shape))
    return tensor


def moved(elements: int = N, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    tensor = torch.zeros(elements, dtype=dtype)
    exchange(exchange(tensor))
    assert adopted(tensor)
    return tensor


def moves_later(tensor: torch.Tensor, calls: int = 8) -> None:
    """Exchanges a tensor that moves meanwhile, on each rank at another time."""
    for _ in range(calls):
        exchange(tensor)
    assert adopted(tensor)
