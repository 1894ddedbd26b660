"""The adapter for eager TensorFlow tensors.

A tensor on the CPU is read as a NumPy array on the same memory, and copied to shared memory once.
A result is a tensor on shared memory, without a copy: DLPack hands it to TensorFlow, which aborts
the process if the memory is not aligned. So results that are not aligned are copied, and so are
the dtypes that TensorFlow's DLPack lacks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from gradwire import _native
from gradwire._errors import InvalidRequest
from gradwire._numpy import NumpyAdapter
from gradwire._ops import Collectives

# The alignment that TensorFlow's kernels require, in bytes.
_ALIGNMENT = 64
_NOT_IN_DLPACK = {"f8e4m3", "f8e5m2"}


def as_array(tensor: tf.Tensor) -> np.ndarray:
    """Returns a NumPy array on the memory of a tensor; for a GPU tensor, on a copy.

    Raises:
        InvalidRequest: The elements are strings, quantized numbers or handles.
    """
    kind = tensor.dtype
    if kind.is_quantized or not (kind.is_bool or kind.is_numpy_compatible):
        raise InvalidRequest(f"tensors of {kind.name} can't be exchanged", kind="invalid")
    if not tensor.shape.rank:
        # For short floats, TensorFlow returns a number, which NumPy does not take for an array.
        return np.asarray(tensor.numpy(), kind.as_numpy_dtype)
    return np.asarray(tensor)


class TensorFlowAdapter(NumpyAdapter):
    """Adapter for eager tensors."""

    def describe(self, array: tf.Tensor) -> tuple[str, tuple[int, ...]]:
        return super().describe(as_array(array))

    def load(self, array: tf.Tensor, buffer: _native.Buffer) -> None:
        super().load(as_array(array), buffer)

    def view(self, buffer: _native.Buffer, like: tf.Tensor) -> tf.Tensor:
        aligned = buffer.nbytes > 0 and buffer.address % _ALIGNMENT == 0
        if aligned and buffer.dtype not in _NOT_IN_DLPACK:
            return tf.experimental.dlpack.from_dlpack(buffer.__dlpack__())
        return tf.constant(self._memory(buffer, np.dtype(like.dtype.as_numpy_dtype)))


collectives: Collectives[Any] = Collectives(TensorFlowAdapter())
