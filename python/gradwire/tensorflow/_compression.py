"""Compression: the dtype of tensors in shared memory."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Compressor:
    """Compresses and decompresses tensors. Programs can define subclasses.

    Example:
        ```python
        class Half(hvd.Compressor):
            @staticmethod
            def compress(tensor):
                return tf.cast(tensor, tf.float16), tensor.dtype

            @staticmethod
            def decompress(tensor, ctx):
                return tf.cast(tensor, ctx)
        ```
    """

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Compresses a tensor.

        Args:
            tensor: A dense tensor.

        Returns:
            The compressed tensor, and a context for ``decompress``.
        """
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
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
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tensor


def _cast(tensor: tf.Tensor, dtype: tf.DType) -> tuple[tf.Tensor, tf.DType | None]:
    wider = tensor.dtype.is_floating and tensor.dtype.size > dtype.size
    return (tf.cast(tensor, dtype), tensor.dtype) if wider else (tensor, None)


class FP16Compressor(Compressor):
    """Converts wider floats to float16. Sums are computed in f32."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return _cast(tensor, tf.float16)

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tensor if ctx is None else tf.cast(tensor, ctx)


class BF16Compressor(FP16Compressor):
    """Converts wider floats to bfloat16, which has the range of f32. Sums are computed in f32."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return _cast(tensor, tf.bfloat16)


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
