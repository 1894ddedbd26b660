"""The layer of ``horovod.torch.sync_batch_norm``."""

from __future__ import annotations

from gradwire.torch._sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
