"""The functions of ``horovod.torch.functions``."""

from __future__ import annotations

from gradwire import allgather_object, broadcast_object
from gradwire.torch._functions import broadcast_optimizer_state, broadcast_parameters

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]
