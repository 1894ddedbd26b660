"""The parameter lists in the groups of a distributed optimizer.

A program that iterates over an optimizer's parameters usually reads or changes their gradients
next, as clipping does, so it must wait for their exchange. A program that accesses a learning rate
or saves a state need not wait. So the lists of parameters wait, and the groups remain ordinary
dicts.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any


class Parameters(list[Any]):
    """A list of parameters that waits for their gradients before it returns any of them.

    Copying or pickling it gives an ordinary list.

    Args:
        parameters: The parameters.
        optimizer: Their distributed optimizer, held by a weak reference.
    """

    __slots__ = ("_optimizer",)

    def __init__(self, parameters: Iterable[Any], optimizer: Any) -> None:
        super().__init__(without_waiting(parameters))
        self._optimizer = weakref.ref(optimizer)

    def waits_for(self, optimizer: Any) -> bool:
        """Returns whether it waits for this optimizer; a shallow copy of one shares its lists."""
        return self._optimizer() is optimizer

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
    """Iterates over a group's parameters without waiting for their gradients."""
    return list.__iter__(parameters) if isinstance(parameters, list) else iter(parameters)


def names_in(groups: Sequence[dict[str, Any]]) -> list[str] | None:
    """Returns the names that an optimizer was made with, in the order of its parameters.

    Returns:
        None if it was made without names, or they are not unique.
    """
    names = [name for group in groups for name in group.get("param_names", ())]
    count = sum(1 for group in groups for _ in without_waiting(group["params"]))
    return names if len(names) == len({*names}) == count else None
