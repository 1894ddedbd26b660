"""Pairs the parameters and groups of the ranks' optimizers.

PyTorch numbers the parameters of an optimizer in its order. Ranks may list groups and parameters in
different orders, so a state is paired by the names of the parameters. If a rank has no names, all
ranks pair by position. Each rank compares the same layouts, so all ranks raise the same error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from gradwire._errors import InvalidRequest
from gradwire.torch._adapter import check_has_data
from gradwire.torch._parameters import names_in, without_waiting

_HINT = "Make the optimizer in the same way on all ranks"


class Layout(NamedTuple):
    """What a rank tells the others about its optimizer and its parameters."""

    # The class, before it was made distributed.
    optimizer: str
    # By group, the names of its parameters; None if some have none.
    names: list[list[str]] | None
    # By group, the dtypes and shapes of its parameters.
    kinds: list[list[str]]
    # Whether the state belongs to all parameters together, in their order.
    is_flat: bool

    @property
    def digest(self) -> bytes:
        """A digest that is equal for equal layouts."""
        return hashlib.blake2b(repr(self).encode(), digest_size=16).digest()

    def with_positions(self) -> Layout:
        """Returns this layout with positions instead of names."""
        names = [
            [f"parameter {place} of group {at}" for place in range(len(group))]
            for at, group in enumerate(self.kinds)
        ]
        return self._replace(names=names)


def layout_of(optimizer: torch.optim.Optimizer) -> Layout:
    """Returns the layout of an optimizer.

    Raises:
        InvalidRequest: It is not an optimizer, or a parameter has no data.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidRequest(
            f"optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer",
            kind="invalid",
        )
    groups = [list(without_waiting(group["params"])) for group in optimizer.param_groups]
    kinds = [[_kind(parameter) for parameter in group] for group in groups]
    is_flat = isinstance(optimizer, torch.optim.LBFGS)
    name = getattr(optimizer, "_original", type(optimizer)).__name__
    return Layout(name, _names(optimizer, groups), kinds, is_flat)


def _kind(parameter: torch.Tensor) -> str:
    if torch.nn.parameter.is_lazy(parameter):
        return "uninitialized"
    if parameter.is_meta:
        check_has_data(parameter)
    return f"{parameter.dtype} {list(parameter.shape)}"


def _names(optimizer: Any, groups: list[list[torch.Tensor]]) -> list[list[str]] | None:
    own = [parameter for group in groups for parameter in group]
    known: Mapping[Any, str] | None = getattr(optimizer, "_parameter_names", None)
    if known is None:
        known = dict(zip(own, names_in(optimizer.param_groups) or ()))
    if len({known.get(parameter) for parameter in own} - {None}) < len(own):
        return None
    return [[known[parameter] for parameter in group] for group in groups]


def paired(told: Mapping[int, Layout]) -> dict[int, Layout]:
    """Returns the layouts of the ranks with equal names for parameters that belong together.

    Args:
        told: By rank, the layout.

    Raises:
        InvalidRequest: The ranks have different parameters or groups.
    """
    if any(layout.names is None for layout in told.values()):
        told = {rank: layout.with_positions() for rank, layout in told.items()}
    first, *others = sorted(told)
    for other in others:
        problem = _difference(first, told[first], other, told[other])
        if problem is not None:
            raise InvalidRequest(f"{problem}. {_HINT}", kind="invalid")
    return dict(told)


def _difference(one: int, ones: Layout, other: int, others: Layout) -> str | None:
    """Returns why the optimizers of two ranks can't be paired."""
    if ones.optimizer != others.optimizer:
        return f"rank {one} has an optimizer {ones.optimizer}, but rank {other} {others.optimizer}"
    problem = _difference_of_kinds(one, _kinds_by_name(ones), other, _kinds_by_name(others))
    if problem is not None:
        return problem
    if sorted(_keys(ones)) != sorted(_keys(others)):
        return f"ranks {one} and {other} have different groups of parameters"
    if ones.is_flat and ones.names != others.names:
        return (
            f"ranks {one} and {other} have the parameters in different orders, but LBFGS "
            "keeps one state for all parameters in their order"
        )
    return None


def _difference_of_kinds(
    one: int, kinds: Mapping[str, str], other: int, its: Mapping[str, str]
) -> str | None:
    """Returns how the parameters of two ranks differ."""
    for rank, lacks, has in ((other, its, kinds), (one, kinds, its)):
        only = [name for name in has if name not in lacks]
        if only:
            rest = f" and {len(only) - 3} more" if len(only) > 3 else ""
            return (
                f"rank {rank} lacks parameters that another rank has: {', '.join(only[:3])}{rest}"
            )
    for name, kind in kinds.items():
        if its[name] != kind:
            return f"{name} is {kind} on rank {one}, but {its[name]} on rank {other}"
    return None


def check_kinds(told: Mapping[int, Mapping[str, str]]) -> None:
    """Compares the parameters of the ranks.

    Args:
        told: By rank, the names of its parameters, each with dtype and shape.

    Raises:
        InvalidRequest: They differ.
    """
    first, *others = sorted(told)
    for other in others:
        problem = _difference_of_kinds(first, told[first], other, told[other])
        if problem is not None:
            raise InvalidRequest(
                f"{problem}. Pass the same parameters on all ranks", kind="invalid"
            )


def _kinds_by_name(layout: Layout) -> dict[str, str]:
    assert layout.names is not None, "names or positions"
    return {
        name: kind
        for names, kinds in zip(layout.names, layout.kinds)
        for name, kind in zip(names, kinds)
    }


def _keys(layout: Layout) -> list[tuple[str, ...]]:
    """Returns what identifies each group: the names of its parameters."""
    return [tuple(sorted(names)) for names in layout.names or ()]


def in_order_of(own: Layout, root: Layout, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the groups of the root's ``state_dict()`` in the order of this rank.

    Args:
        own: The layout of this rank, as ``paired`` has returned it.
        root: The layout of the root.
        groups: The groups of the root's state. Their parameters are numbers.
    """
    assert own.names is not None and root.names is not None, "names or positions"
    keys: list[tuple[str, ...] | None] = [*_keys(root)]
    result = []
    for names, key in zip(own.names, _keys(own)):
        at = keys.index(key)
        keys[at] = None  # groups without parameters have equal keys, and are paired by their order
        places = {name: place for place, name in enumerate(root.names[at])}
        group = dict(groups[at])
        for listed in ("params", "param_names"):
            if listed in group:
                group[listed] = [group[listed][places[name]] for name in names]
        result.append(group)
    return result
