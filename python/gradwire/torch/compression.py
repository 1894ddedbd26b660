"""The compressors of ``horovod.torch.compression``."""

from __future__ import annotations

from gradwire.torch._compression import (
    BF16Compressor,
    Compression,
    Compressor,
    FP16Compressor,
    NoneCompressor,
)

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
