"""BytePS's functions for TensorFlow, with its arguments.

BytePS names a tensor by a ``scope`` and by the name of TensorFlow's operation, which eager tensors
do not have. Here a call has a ``name``, or is matched by its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from gradwire._byteps import ASYNC, is_asynchronous
from gradwire._errors import InvalidRequest
from gradwire._ops import ReduceOp
from gradwire.tensorflow import _functions, _move_ops, _optimizer, _reduce_ops, _tape
from gradwire.tensorflow._compression import Compression, Compressor
from gradwire.tensorflow._running import as_python


@as_python
def push_pull(
    tensor: Any,
    scope: str = "",
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | int | None = None,
    enable_async: bool = False,
    name: str | None = None,
) -> Any:
    """Reduces a tensor over all ranks; every rank gets the result. Differentiable.

    Args:
        tensor: A tensor, variable or array. All ranks pass the same dtype and shape. For
            ``tf.IndexedSlices``, the rows of all ranks are gathered.
        scope: A prefix of ``name``.
        average: Deprecated: use ``op``. True is ``Average``, False is ``Sum``.
        device_dense: Ignored; exists for BytePS scripts.
        device_sparse: Ignored; exists for BytePS scripts.
        compression: One of ``Compression``, or another subclass of ``Compressor``.
        op: The reduction; ``Average`` by default.
        enable_async: Must be False: only synchronous training is supported.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.

    Returns:
        A tensor of the same dtype and shape, or ``tf.IndexedSlices``.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
        ValueError: Both ``op`` and ``average`` were given.

    Example:
        ```python
        mean = bps.push_pull(loss, name="loss")
        ```
    """
    _only_synchronous(enable_async)
    return _reduce_ops.allreduce(
        tensor,
        average,
        device_dense,
        device_sparse,
        compression,
        op,
        name=None if name is None else f"push_pull.{scope}{name}",
    )


@as_python
def broadcast(
    tensor: Any, root_rank: int, scope: str = "", name: str | None = None, is_variable: bool = True
) -> tf.Tensor:
    """Copies the root's tensor to every rank.

    Args:
        tensor: A tensor, variable or array. All ranks pass the same dtype and shape.
        root_rank: The global rank whose tensor all ranks receive.
        scope: A prefix of ``name``.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        is_variable: Ignored; exists for BytePS scripts.

    Returns:
        A new tensor with the root's elements. A variable is not changed.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    del is_variable
    return _move_ops.broadcast(tensor, root_rank, None if name is None else f"{scope}{name}")


@as_python
def broadcast_variables(variables: Sequence[Any], root_rank: int, scope: str = "") -> None:
    """Copies the root's variables to every rank.

    Args:
        variables: Variables of TensorFlow or Keras, such as ``model.variables`` or
            ``optimizer.variables``. All ranks pass the same number, with the same dtypes and
            shapes.
        root_rank: The global rank whose variables all ranks receive.
        scope: Ignored; exists for BytePS scripts.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    del scope
    _functions.broadcast_variables(variables, root_rank)


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp | int | None = None,
    enable_async: bool = False,
) -> keras.optimizers.Optimizer:
    """Makes an optimizer of Keras apply the gradients of all ranks.

    Args:
        optimizer: An optimizer of Keras 3. Those of TensorFlow 1 are not supported.
        name: Ignored; exists for BytePS scripts. The optimizer keeps its name.
        use_locking: Ignored; exists for BytePS scripts.
        device_dense: Ignored; exists for BytePS scripts.
        device_sparse: Ignored; exists for BytePS scripts.
        compression: One of ``Compression``, or another subclass of ``Compressor``.
        sparse_as_dense: Whether gradients that are ``tf.IndexedSlices`` become dense tensors first.
        backward_passes_per_step: How many gradients are accumulated before an exchange.
        op: The reduction; ``Average`` by default.
        enable_async: Must be False: only synchronous training is supported.

    Returns:
        The given optimizer.

    Raises:
        InvalidRequest: An argument is invalid.
    """
    _only_synchronous(enable_async)
    return _optimizer.DistributedOptimizer(
        optimizer,
        name,
        use_locking,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        backward_passes_per_step,
        op,
    )


@as_python
def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp | int | None = None,
) -> tf.GradientTape:
    """Returns a tape whose gradients are reduced over all ranks.

    Args:
        gradtape: A ``tf.GradientTape``, before or after it has recorded.
        device_dense: Ignored; exists for BytePS scripts.
        device_sparse: Ignored; exists for BytePS scripts.
        compression: One of ``Compression``, or another subclass of ``Compressor``.
        sparse_as_dense: Whether gradients that are ``tf.IndexedSlices`` become dense tensors first.
        op: The reduction; ``Average`` by default.

    Returns:
        The tape. ``register_local_source`` excludes a variable from the exchange.

    Raises:
        InvalidRequest: An argument is invalid.
    """
    return _tape.DistributedGradientTape(
        gradtape, device_dense, device_sparse, compression, sparse_as_dense, op
    )


def _only_synchronous(enable_async: bool) -> None:
    if enable_async or is_asynchronous():
        raise InvalidRequest(
            f"asynchronous training ({ASYNC}, enable_async) is not supported for TensorFlow: unset "
            "it to train synchronously",
            kind="invalid",
        )
