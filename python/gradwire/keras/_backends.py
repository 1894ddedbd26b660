"""The exchange of gradients, which depends on the backend of Keras."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from gradwire import _world
from gradwire._errors import GradwireError, InvalidRequest
from gradwire._ops import reduce_op
from gradwire._process_sets import ProcessSet, global_process_set

if tuple(map(int, keras.__version__.split(".")[:2])) < (3, 10):
    # This module is imported first: others need parts that Keras 2 lacks.
    # Keras 3.4 and older clip gradients before accumulating them; up to 3.9, this package can't
    # detect loss scaling.
    raise ImportError(
        f"gradwire.keras needs Keras 3.10 or newer, and this is {keras.__version__}: "
        "pip install --upgrade keras"
    )

# Keras otherwise replaces an exception that a layer raises by one without its attributes.
GradwireError._keras_call_info_injected = True  # type: ignore[attr-defined]

# Reduces gradients; called with the gradients and their variables.
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
    if backend == "jax":
        return _OfJax
    raise InvalidRequest(
        f"gradwire.keras does not support Keras' backend {backend!r}: use tensorflow, torch or jax",
        kind="invalid",
    )


class _OfJax:
    """The compressors of ``gradwire.jax``, by their names."""

    none = None
    fp16 = "fp16"
    bf16 = "bf16"


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
    if keras.backend.backend() == "jax":
        return _of_jax(chosen, reduce_op(op), process_set)
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


def _of_jax(compression: Any, op: Any, process_set: ProcessSet) -> Exchange:
    from gradwire.jax._calls import step_gradients

    def reduced(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        if _world.members(process_set) == 1:
            return list(gradients)
        # Keras may use a name twice, but the names within a call must differ.
        names = [f"{at}.{variable.path}" for at, variable in enumerate(variables)]
        tree = dict(zip(names, gradients))
        found = step_gradients(tree, "gradients", op, process_set, compression)
        return [found[name] for name in names]

    return reduced


def in_update(
    optimizer: Any, exchange: Exchange, gradients: Sequence[Any], variables: Sequence[Any]
) -> list[Any]:
    """Reduces the gradients of an update.

    With JAX, Keras also computes an update in steps that only accumulate, and then drops it.
    """
    steps = optimizer.gradient_accumulation_steps
    if steps is None or keras.backend.backend() != "jax":
        return exchange(gradients, variables)
    import jax

    is_update = (optimizer._iterations + 1) % steps == 0
    found: list[Any] = jax.lax.cond(
        is_update, lambda given: exchange(given, variables), list, list(gradients)
    )
    return found


def last_error() -> GradwireError | None:
    """Returns the exception behind the last ``JaxRuntimeError`` of a training with JAX.

    With the other backends of Keras, methods such as ``fit`` raise the exception itself.

    Returns:
        The exception, with its kind, rank, host and tensor; None if none has failed, or with
        another backend.

    Example:
        ```python
        try:
            model.fit(images, digits)
        except jax.errors.JaxRuntimeError:
            print(hvd.last_error().rank)
            raise
        ```
    """
    if keras.backend.backend() != "jax":
        return None
    from gradwire import jax

    return jax.last_error()


def is_variable(value: object) -> bool:
    """Returns whether something is a variable of Keras, or of the backend in such a one."""
    if isinstance(value, keras.Variable):
        return True
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return isinstance(value, tf.Variable)
    if keras.backend.backend() == "torch":
        import torch

        return isinstance(value, torch.nn.Parameter)
    return False


def divided(gradient: Any, by: int) -> Any:
    """Returns a gradient divided by a number, also if it is ``tf.IndexedSlices``."""
    if not hasattr(gradient, "indices") or not hasattr(gradient, "dense_shape"):
        return gradient / by
    return type(gradient)(gradient.values / by, gradient.indices, gradient.dense_shape)
