"""Compression: the dtype that gradients have in shared memory.

Between nodes the sums of both 16-bit types are sent as f32, so that nothing is rounded or overflows
on the way. The setting ``data.compression=bf16`` halves that.
"""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """Makes a tensor smaller, and restores it. Subclasses can be used like those of Gradwire.

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
        """Makes a tensor smaller.

        Args:
            tensor: A dense tensor.

        Returns:
            The smaller tensor, and a context for ``decompress``.
        """
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Restores a tensor.

        Args:
            tensor: A tensor of the dtype and shape that ``compress`` has returned.
            ctx: The context that ``compress`` has returned.

        Returns:
            A tensor of the original dtype and shape.
        """
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns the tensor itself.

        Args:
            tensor: A dense tensor.

        Returns:
            The tensor, and None.
        """
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Returns the tensor itself.

        Args:
            tensor: A dense tensor.
            ctx: Not used.

        Returns:
            The tensor.
        """
        return tensor


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.dtype | None]:
    # What is no tensor is refused by the operation that follows.
    if not isinstance(tensor, torch.Tensor):
        return tensor, None
    wider = tensor.dtype.is_floating_point and tensor.dtype.itemsize > dtype.itemsize
    return (tensor.to(dtype), tensor.dtype) if wider else (tensor, None)


class FP16Compressor(Compressor):
    """Converts wider floats to half precision. Their sums are computed in f32."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Converts a tensor of wider floats to float16.

        Args:
            tensor: A dense tensor.

        Returns:
            The converted tensor and its original dtype; other tensors as they are, and None.
        """
        return _cast(tensor, torch.float16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Converts a tensor back to its original dtype.

        Args:
            tensor: A dense tensor.
            ctx: The original dtype, or None.

        Returns:
            The tensor in its original dtype.
        """
        return tensor if ctx is None else tensor.to(ctx)


class BF16Compressor(FP16Compressor):
    """Converts wider floats to bfloat16, which has their range. Their sums are computed in f32."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Converts a tensor of wider floats to bfloat16.

        Args:
            tensor: A dense tensor.

        Returns:
            The converted tensor and its original dtype; other tensors as they are, and None.
        """
        return _cast(tensor, torch.bfloat16)


class Compression:
    """The compressors that come with Gradwire.

    Attributes:
        none: Leaves tensors as they are.
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
