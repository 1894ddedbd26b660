"""What gradients become for the way into shared memory.

Between nodes sums of both 16-bit types travel as f32, so that nothing is rounded or overflows on the way; the setting
``data.compression=bf16`` halves that.
"""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """Makes a tensor smaller, and back again. Subclasses are as welcome as these here."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The smaller tensor, and what ``decompress`` has to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor as it was before."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.dtype | None]:
    wider = tensor.dtype.is_floating_point and tensor.dtype.itemsize > dtype.itemsize
    return (tensor.to(dtype), tensor.dtype) if wider else (tensor, None)


class FP16Compressor(Compressor):
    """Wider floats become half precision. Their sums are computed in f32."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return _cast(tensor, torch.float16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class BF16Compressor(FP16Compressor):
    """Wider floats become bfloat16, which has their range. Their sums are computed in f32."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return _cast(tensor, torch.bfloat16)


class Compression:
    """The compressors there are."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
