"""What depends on the backend of Keras: the exchange of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from gradwire import _world
from gradwire._errors import InvalidRequest
from gradwire._ops import reduce_op
from gradwire._process_sets import ProcessSet, global_process_set

# Reduces gradients; called with them and their variables.
Exchange = Callable[[Sequence[Any], Sequence[Any]], list[Any]]


def compressors() -> Any:
    """Returns the class ``Compression`` for the tensors of the backend.

    Raises:
        InvalidRequest: The backend is not supported.
    """
    backend = keras.backend.backend()
    if backend == "tensorflow":
        from gradwire.tensorflow._compression import Compression

        return Compression
    if backend == "torch":
        from gradwire.torch._compression import Compression as OfTorch

        return OfTorch
    raise InvalidRequest(
        f"gradwire.keras does not support Keras' backend {backend!r}: use tensorflow or torch",
        kind="invalid",
    )


def exchange(
    compression: Any = None,
    sparse_as_dense: bool = False,
    op: Any = None,
    gradient_predivide_factor: float = 1.0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
) -> Exchange:
    """Returns the function that reduces the gradients of a step.

    Raises:
        InvalidRequest: An argument is invalid, or the backend is not supported.
    """
    chosen = compressors().none if compression is None else compression
    if keras.backend.backend() == "tensorflow":
        from gradwire.tensorflow import _gradients

        return _gradients.Exchange(
            chosen, sparse_as_dense, op, gradient_predivide_factor, groups, process_set
        )
    if groups is not None or gradient_predivide_factor != 1.0:
        raise InvalidRequest(
            "groups and gradient_predivide_factor need Keras' backend 'tensorflow'", kind="invalid"
        )
    return _of_torch(chosen, reduce_op(op), process_set)


def _of_torch(compression: Any, op: Any, process_set: ProcessSet) -> Exchange:
    from gradwire.torch import allreduce_async

    def reduced(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        if not _world.is_elastic() and _world.members(process_set) == 1:
            return list(gradients)
        packed = [compression.compress(gradient) for gradient in gradients]
        handles = [
            allreduce_async(given, name=f"gradient.{variable.path}", op=op, process_set=process_set)
            for (given, _), variable in zip(packed, variables)
        ]
        found = [handle.wait() for handle in handles]
        _world.note_step()
        return [compression.decompress(each, context) for each, (_, context) in zip(found, packed)]

    return reduced


def divided(gradient: Any, by: int) -> Any:
    """Returns a gradient divided by a number, also if it is ``tf.IndexedSlices``."""
    if not hasattr(gradient, "indices") or not hasattr(gradient, "dense_shape"):
        return gradient / by
    return type(gradient)(gradient.values / by, gradient.indices, gradient.dense_shape)
