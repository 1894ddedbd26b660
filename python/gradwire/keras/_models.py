"""Loads models with a distributed optimizer, and copies models to all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from gradwire._array_move_ops import broadcast_async
from gradwire._process_sets import ProcessSet, global_process_set
from gradwire.keras._optimizer import DistributedOptimizer, is_distributed


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Copies the root's variables to every rank, with any backend of Keras.

    Args:
        variables: Variables of Keras, such as ``model.variables``. All ranks pass the same number,
            with the same dtypes and shapes.
        root_rank: The global rank whose variables all ranks receive.
        process_set: The participating ranks. The default is all ranks.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    handles = [
        broadcast_async(np.asarray(keras.ops.convert_to_numpy(each)), root_rank, None, process_set)
        for each in variables
    ]
    for variable, handle in zip(variables, handles):
        variable.assign(handle.wait())


def state_of(model: keras.Model, optimizer: Any) -> list[Any]:
    """Returns the variables that a training changes: without metrics and states of random seeds.

    Args:
        model: The model.
        optimizer: The optimizer of the model, built here if necessary; None if there is none.
    """
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    own = [] if optimizer is None else optimizer.variables
    return list({id(each): each for each in [*model.weights, *own] if _is_number(each)}.values())


def broadcast_model(model: keras.Model, root_rank: int) -> None:
    """Copies the root's model, with the state of its optimizer and metrics, to every rank."""
    optimizer = model.optimizer
    state = [] if optimizer is None else list(optimizer.variables)
    known = {id(variable) for variable in model.variables}
    own = [variable for variable in state if id(variable) not in known]
    broadcast_variables([each for each in [*model.variables, *own] if _is_number(each)], root_rank)


def _is_number(variable: Any) -> bool:
    """Returns whether a variable contains numbers, such as the state of a seed generator."""
    return str(keras.backend.standardize_dtype(variable.dtype)) != "string"


def load_model(
    filepath: str | Path,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = None,
    **options: Any,
) -> keras.Model:
    """Loads a model, and makes its optimizer apply the gradients of all ranks.

    The model may have been saved with or without a ``DistributedOptimizer``.

    Args:
        filepath: The file of the model.
        custom_optimizers: Classes of optimizers that the model may use, besides those of Keras.
        custom_objects: Other classes and functions that the model uses, by their names.
        compression: One of ``Compression``; None compresses nothing.
        **options: Further options of ``keras.models.load_model``.

    Returns:
        The model. Its optimizer has the saved state.

    Raises:
        InvalidRequest: The optimizer is a ``LossScaleOptimizer``, or the backend of Keras is not
            supported.
    """
    objects = {kind.__name__: kind for kind in custom_optimizers or ()}
    objects.update(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects, **options)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not is_distributed(optimizer):
        DistributedOptimizer(optimizer, compression=compression)
        model.jit_compile = False
        model.train_function = None
    return model
