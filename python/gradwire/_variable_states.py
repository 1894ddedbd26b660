"""The state of a training whose model is a list of variables, for TensorFlow and Keras."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradwire._array_move_ops import broadcast_async
from gradwire._errors import InvalidRequest
from gradwire._objects import allgather_object
from gradwire.elastic import ObjectState


class VariablesState(ObjectState):
    """Saves, restores and synchronizes variables, besides plain attributes.

    Args:
        variables: Returns the variables, which have ``assign``, ``shape`` and ``dtype``.
        value: Returns the array of a variable.
        **kwargs: The attributes and their first values, which can be copied and pickled.
    """

    def __init__(
        self,
        variables: Callable[[], Sequence[Any]],
        value: Callable[[Any], Any],
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._variables, self._value = variables, value
        self._saved_variables: list[tuple[Any, np.ndarray[Any, Any]]] = []
        self.save()

    def save(self) -> None:
        """Saves copies of the variables and of the attributes."""
        before = {id(variable): copy for variable, copy in self._saved_variables}
        saved = []
        for variable in self._variables():
            array, copy = np.asarray(self._value(variable)), before.get(id(variable))
            if copy is None or copy.shape != array.shape or copy.dtype != array.dtype:
                copy = np.empty_like(array)
            np.copyto(copy, array)
            saved.append((variable, copy))
        self._saved_variables = saved
        super().save()

    def restore(self) -> None:
        """Returns to the saved variables and attributes."""
        for variable, copy in self._saved_variables:
            # A backend may keep using the array that it is given.
            variable.assign(copy.copy())
        super().restore()

    def sync(self) -> None:
        """Copies variables and attributes of one rank to all ranks, and saves them.

        Raises:
            InvalidRequest: The ranks have different variables.
        """
        variables = self._variables()
        own = [(tuple(each.shape), str(each.dtype)) for each in variables]
        for rank, theirs in enumerate(allgather_object(own, "elastic.variables")):
            if theirs != own:
                raise InvalidRequest(
                    f"the states differ: this rank has {_described(own, theirs)} of rank {rank}: "
                    "make the same model and optimizer on all ranks",
                    kind="invalid",
                )
        handles = [
            broadcast_async(np.asarray(self._value(each)), self._root, f"elastic.variable.{at}")
            for at, each in enumerate(variables)
        ]
        for variable, handle in zip(variables, handles):
            variable.assign(handle.wait())
        super().sync()


def _described(own: list[Any], theirs: list[Any]) -> str:
    if len(own) != len(theirs):
        return f"{len(own)} variables, instead of the {len(theirs)}"
    at = next(at for at, (mine, other) in enumerate(zip(own, theirs)) if mine != other)
    (shape, dtype), (other, other_dtype) = own[at], theirs[at]
    return (
        f"variable {at} with shape {list(shape)} and dtype {dtype}, instead of {list(other)} and "
        f"{other_dtype}"
    )
