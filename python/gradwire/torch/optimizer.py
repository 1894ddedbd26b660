"""The optimizer of ``horovod.torch.optimizer``."""

from __future__ import annotations

from gradwire.torch._optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
