"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from gradwire._ops import Sum
from gradwire._process_sets import ProcessSet, global_process_set
from gradwire._world import is_initialized, members
from gradwire.tensorflow._derivatives import allreduce, gathering
from gradwire.tensorflow._running import run


class SyncBatchNormalization(keras.layers.BatchNormalization):
    """``keras.layers.BatchNormalization`` with the mean and variance of all ranks' batches.

    It needs Keras' TensorFlow backend. Batches may have different sizes. Without other ranks, and
    for inference, it works as in Keras. XLA can't compile it.

    Args:
        process_set: The participating ranks. The default is all ranks.
        **kwargs: The arguments of ``keras.layers.BatchNormalization``. Horovod's ``fused`` is
            ignored.

    Example:
        ```python
        model = keras.Sequential([keras.layers.Dense(64), hvd.SyncBatchNormalization()])
        ```
    """

    def __init__(self, process_set: ProcessSet = global_process_set, **kwargs: Any) -> None:
        kwargs.pop("fused", None)
        super().__init__(**kwargs)
        self._process_set = process_set
        self.supports_jit = False

    def _moments(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the mean and the variance of each channel.

        Combines the ranks' means and sums of squared deviations as in Chan et al. (1979). Sums of
        squares would lose precision for values far from zero.
        """
        if not is_initialized() or members(self._process_set) == 1:
            return super()._moments(inputs, mask)
        axes = list(self._reduction_axes)
        weights = tf.ones_like(inputs)
        if mask is not None:
            weights *= tf.expand_dims(tf.cast(mask, inputs.dtype), -1)
        count = tf.reduce_sum(weights, axes)
        mean = tf.reduce_sum(inputs * weights, axes) / tf.maximum(count, 1)
        wide = tf.reshape(mean, [size if at not in axes else 1 for at, size in _sizes(inputs)])
        spread = tf.reduce_sum(tf.square(inputs - wide) * weights, axes)
        counts, means, spreads = tf.unstack(
            self._gathered(tf.stack([count, mean, spread])), num=3, axis=1
        )
        total = tf.maximum(tf.reduce_sum(counts, 0), 1)
        mean = tf.reduce_sum(means * counts, 0) / total
        variance = tf.reduce_sum(spreads + counts * tf.square(means - mean), 0) / total
        return mean, variance

    def _gathered(self, own: tf.Tensor) -> tf.Tensor:
        """Returns the tensors of all ranks, stacked.

        The gradient is the sum of all ranks' gradients, because an input has an effect on the
        losses of all ranks.
        """
        process_set = self._process_set

        @tf.custom_gradient
        def gathered(mine: tf.Tensor) -> Any:
            start = gathering([mine[tf.newaxis]], None, process_set, "allgather")
            [[result, _, at]] = run([start])

            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                [total] = allreduce([upstream], None, Sum, 1.0, 1.0, process_set)
                return total[at]

            return result, gradient

        return gathered(own)


def _sizes(inputs: tf.Tensor) -> list[tuple[int, Any]]:
    """Returns the index and the size of each dimension; -1 for a size that is not known yet."""
    return [(at, -1 if size is None else size) for at, size in enumerate(inputs.shape)]
