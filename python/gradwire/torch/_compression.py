"""Compression: the dtype of gradients in shared memory.

Between nodes, sums of both 16-bit types are sent as f32, so that partial sums are not rounded and
do not overflow. The setting ``data.compression=bf16`` halves these bytes.
"""

from __future__ import annotations

from typing import Any

import torch

from gradwire._arguments import compressor_name
from gradwire._errors import InvalidRequest


class Compressor:
    """Compresses and decompresses tensors. Programs can define subclasses.

    Example:
        ```python
        class Half(hvd.Compressor):
            @staticmethod
            def compress(tensor):
                return tensor.half(), tensor.dtype

            @staticmethod
            def decompress(tensor, ctx):
                return tensor.to(ctx)
        ```
    """

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Compresses a tensor.

        Args:
            tensor: A dense tensor.

        Returns:
            The compressed tensor, and a context for ``decompress``.
        """
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Decompresses a tensor.

        Args:
            tensor: A tensor with the dtype and shape of the compressed tensor.
            ctx: The context returned by ``compress``.

        Returns:
            A tensor of the original dtype and shape.
        """
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
    # The following operation rejects values that are not tensors.
    if not isinstance(tensor, torch.Tensor):
        return tensor, None
    wider = tensor.dtype.is_floating_point and tensor.dtype.itemsize > dtype.itemsize
    return (tensor.to(dtype), tensor.dtype) if wider else (tensor, None)


class FP16Compressor(Compressor):
    """Converts wider floats to float16. Sums are computed in f32."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return _cast(tensor, torch.float16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class BF16Compressor(FP16Compressor):
    """Converts wider floats to bfloat16, which has the range of f32. Sums are computed in f32."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return _cast(tensor, torch.bfloat16)


_OWN = NoneCompressor, FP16Compressor, BF16Compressor


def is_own(compression: Any) -> bool:
    """Returns whether a compressor is one of these, which keep tensors that need no conversion."""
    return (compression if isinstance(compression, type) else type(compression)) in _OWN


def decompressed(
    compression: type[Compressor], small: torch.Tensor, ctx: Any, like: torch.Tensor
) -> torch.Tensor:
    """Returns a decompressed gradient.

    Raises:
        InvalidRequest: The compressor of the program returns another shape.
    """
    found = compression.decompress(small, ctx)
    if getattr(found, "shape", None) != like.shape:
        returned = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise InvalidRequest(
            f"compression={compressor_name(compression)}: decompress() returned {returned} for a "
            f"tensor of shape {list(like.shape)}",
            kind="invalid",
        )
    return found


class Compression:
    """The compressors that come with Gradwire.

    Attributes:
        none: Leaves tensors unchanged.
        fp16: Converts wider floats to float16.
        bf16: Converts wider floats to bfloat16.

    Example:
        ```python
        mean = hvd.allreduce(tensor, compression=hvd.Compression.bf16)
        ```
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
