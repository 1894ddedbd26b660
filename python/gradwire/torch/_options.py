"""An optimizer's class and the options of its groups, such as the learning rate.

They are the same on all ranks. Ranks compare them by parameter, because the order of the groups may
differ between ranks. Only the optimizer's own options count: a program may keep anything else in
its groups.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import torch

from gradwire.torch import _checks
from gradwire.torch._parameters import without_waiting

# By group: the names of its parameters, and its options.
Options = list[tuple[list[str], dict[str, str]]]

# The class, among the options: a name that no option has.
_CLASS = "(class)"


def options_of(optimizer: Any, names: Mapping[int, str]) -> Options:
    """Returns an optimizer's options.

    Args:
        optimizer: The optimizer.
        names: By the id of a parameter, its name.
    """
    known, kind = getattr(optimizer, "defaults", {}), type(optimizer).__name__
    return [
        (
            [names[id(parameter)] for parameter in without_waiting(group["params"])],
            {
                _CLASS: kind,
                **{name: _shown(group[name]) for name in sorted(known) if name in group},
            },
        )
        for group in optimizer.param_groups
    ]


def _shown(value: Any) -> str:
    """Returns the text of a value; that of its type if it has none that ranks could compare."""
    if isinstance(value, torch.Tensor):
        return str(value.tolist()) if value.numel() < 100 else "tensor"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_shown, value))})"
    if isinstance(value, Number) and hasattr(value, "item"):
        value = value.item()  # one of NumPy
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return repr(value)
    return type(value).__name__


def word(options: Options) -> int:
    """Returns a word of the options, whatever the order of groups and parameters."""
    digest = 0
    for names, values in options:
        common = zlib.crc32(repr(values).encode())
        digest += sum(zlib.crc32(name.encode(), common) for name in names)
    return _checks.word_of_digest(digest)


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
            what = "class" if option == _CLASS else f"option {option}"
            return (
                f"the {what} of the optimizer for {name} differs between the ranks: "
                f"{each}. Set it to the same value on all ranks before the step"
            )
    return None
