"""A pytest plugin that makes a GPU the default device of the tests of ranks.

    gradwire run -np 2 -- python -m pytest -p gpu_by_default python/tests/ranks/test_tensors.py

``GWTEST_DEVICE`` selects another device than ``cuda``. Ranks share GPUs if there are fewer.
"""

from __future__ import annotations

import os
from typing import Any

import torch


def this_ranks_device() -> torch.device:
    """Returns the GPU of this rank."""
    kind = os.environ.get("GWTEST_DEVICE", "cuda")
    if kind != "cuda":
        return torch.device(kind)
    number = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    torch.cuda.set_device(number)
    return torch.device(kind, number)


def use(device: torch.device) -> None:
    """Makes a device the default for all functions that create tensors, and for generators."""
    torch.set_default_device(device)
    plain = torch.Generator

    class Generator(plain):  # type: ignore[misc, valid-type]
        def __new__(cls, of: Any = None) -> Any:
            # Each thread has its own default device.
            return plain.__new__(cls, torch.get_default_device() if of is None else of)

    torch.Generator = Generator  # type: ignore[misc]


use(this_ranks_device())
