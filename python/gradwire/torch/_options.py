"""An optimizer's class, the options of its groups, such as the learning rate, and the loss scale.

They are the same on all ranks. Ranks compare them by parameter, because the order of the groups may
differ between ranks. Only the optimizer's own options count: a program may keep anything else in
its groups.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any

import torch

from gradwire.torch import _checks
from gradwire.torch._parameters import without_waiting

# By group: the names of its parameters, and its options.
Options = list[tuple[list[str], dict[str, str]]]

# Without NumPy's types, whose values are shown as Python's.
_PLAIN = {type(None), bool, int, float, complex, str}
# What else is compared, under names that no option has: the class, and the scale of a GradScaler.
_CLASS, _SCALE = "(class)", "(scale)"
_CALLED = {_CLASS: "class", _SCALE: "scale of the GradScaler"}


class OptionsOf:
    """The options of a distributed optimizer.

    Args:
        optimizer: Returns the optimizer.
        names: By the id of a parameter, its name.
    """

    def __init__(self, optimizer: Callable[[], Any], names: Mapping[int, str]) -> None:
        self._optimizer, self._names = optimizer, names
        # A checksum of the names in each group, kept because it takes longer to compute than one of
        # the options.
        self._sums: list[int] = []
        # The groups at that time.
        self._listed: list[int] | None = None
        self._sizes: list[int] = []

    def values(self) -> list[dict[str, str]]:
        """Returns the present options of each group."""
        optimizer = self._optimizer()
        known = sorted(getattr(optimizer, "defaults", {}))
        kind = {_CLASS: type(optimizer).__name__, _SCALE: repr(optimizer._loss_scale)}
        return [
            kind | {name: _shown(group[name]) for name in known if name in group}
            for group in optimizer.param_groups
        ]

    def with_names(self, values: Sequence[dict[str, str]]) -> Options:
        """Returns options with the names of the parameters that are in the groups now."""
        groups = self._optimizer().param_groups
        return [(self._names_of(group), own) for group, own in zip(groups, values)]

    def word(self, values: Sequence[dict[str, str]]) -> int:
        """Returns a word of the options, whatever the order of groups and parameters."""
        optimizer = self._optimizer()
        groups = optimizer.param_groups
        sizes = [len(group["params"]) for group in groups]
        if optimizer._listed is not self._listed or sizes != self._sizes:
            self._listed, self._sizes = optimizer._listed, sizes
            self._sums = [
                sum(zlib.crc32(name.encode()) for name in self._names_of(group)) for group in groups
            ]
        digest = 0
        for names, own in zip(self._sums, values):
            digest += names * (zlib.crc32(repr(own).encode()) | 1)
        return _checks.word_of_digest(digest ^ digest >> 31)

    def _names_of(self, group: dict[str, Any]) -> list[str]:
        return [self._names[id(parameter)] for parameter in without_waiting(group["params"])]


def _shown(value: Any) -> str:
    """Returns the text of a value, or the name of its type if ranks can't compare its text."""
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, torch.Tensor):
        return str(value.tolist()) if value.numel() < 100 else "tensor"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_shown, value))})"
    if isinstance(value, Number) and hasattr(value, "item"):
        value = value.item()  # a number of NumPy
    if isinstance(value, (bool, int, float, complex, str)):
        return repr(value)
    return type(value).__name__


def difference(told: Sequence[tuple[int, Options]]) -> str | None:
    """Returns the text of the error that ranks have different options.

    Args:
        told: Each rank and its options.

    Returns:
        None if only some ranks have some of the parameters in their groups; see ``FROZEN`` of
        ``_agreement``.
    """
    given: dict[tuple[str, str], dict[str, list[str]]] = {}
    for rank, options in told:
        for names, values in options:
            for name in names:
                for option, value in values.items():
                    ranks = given.setdefault((name, option), {}).setdefault(value, [])
                    ranks.append(str(rank))
    for (name, option), ranks_by_value in given.items():
        if len(ranks_by_value) > 1:
            each = "; ".join(
                f"{value} on rank {', '.join(on)}" for value, on in ranks_by_value.items()
            )
            what = _CALLED.get(option, f"option {option}")
            return f"the {what} of the optimizer for {name} differs between the ranks: {each}"
    return None
