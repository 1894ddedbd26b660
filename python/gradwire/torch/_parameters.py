"""The parameters in a group of a distributed optimizer.

A program that goes through an optimizer's parameters is about to read or change their gradients, as
clipping does, so it has to wait for those that are on their way. A program that reads a learning
rate, writes one, or saves a state is not. So the wait is not in the groups, which stay the dicts
that they were, but in their lists of parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any


class Parameters(list[Any]):
    """A list of parameters that waits for their gradients before it gives one of them away.

    Copied or pickled it is an ordinary list.

    Args:
        parameters: The parameters.
        optimizer: Their distributed optimizer, which is not kept alive.
    """

    __slots__ = ("_optimizer",)

    def __init__(self, parameters: Iterable[Any], optimizer: Any) -> None:
        super().__init__(without_waiting(parameters))
        self._optimizer = weakref.ref(optimizer)

    def _wait(self) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer._before_parameters_are_read()

    def __iter__(self) -> Iterator[Any]:
        self._wait()
        return super().__iter__()

    def __reversed__(self) -> Iterator[Any]:
        self._wait()
        return super().__reversed__()

    def __getitem__(self, at: Any) -> Any:
        self._wait()
        return super().__getitem__(at)

    def __add__(self, other: Any) -> Any:
        self._wait()
        return super().__add__(other)

    def __radd__(self, other: Any) -> Any:
        self._wait()
        return other + list(without_waiting(self))

    def copy(self) -> list[Any]:
        """Returns an ordinary list of the parameters."""
        self._wait()
        return super().copy()

    def pop(self, at: Any = -1) -> Any:
        """Removes a parameter and returns it."""
        self._wait()
        return super().pop(at)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (list(without_waiting(self)),)


def without_waiting(parameters: Iterable[Any]) -> Iterator[Any]:
    """Returns an iterator over a group's parameters, for what does not look at gradients."""
    return list.__iter__(parameters) if isinstance(parameters, list) else iter(parameters)
