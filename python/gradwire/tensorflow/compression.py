"""The classes of ``horovod.tensorflow.compression``."""

from __future__ import annotations

from gradwire.tensorflow._compression import (
    BF16Compressor,
    Compression,
    Compressor,
    FP16Compressor,
    NoneCompressor,
)

__all__ = [
    "BF16Compressor",
    "Compression",
    "Compressor",
    "FP16Compressor",
    "NoneCompressor",
]
