"""``check_consistent``: whether all ranks have the same model and optimizer state, bit by bit.

Data-parallel training assumes that, and nothing fails if it is not so: the ranks average gradients
of different models. Each rank hashes its tensors, and the ranks compare one hash. Only if it
differs do they exchange the hashes of all tensors, to name what differs where.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from gradwire import _epochs
from gradwire._errors import Disagreement, InvalidRequest
from gradwire._objects import allgather_object
from gradwire._world import ProcessSet, global_process_set
from gradwire.torch._parameters import without_waiting

# The most tensors and the most groups of ranks that an error names.
_SHOWN = 5

# What a tensor is and the hash of its bytes; for other values nothing and their text.
_Hash = tuple[str, str]

# The number of calls for each model, for `every`.
_calls: weakref.WeakKeyDictionary[torch.nn.Module, Iterator[int]] = weakref.WeakKeyDictionary()


def _start_over() -> None:
    # New ranks of an elastic job count from the beginning.
    _calls.clear()


_epochs.on_change(_start_over)


def check_consistent(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    every: int = 1,
    process_set: ProcessSet = global_process_set,
) -> float | None:
    """Checks that all ranks have the same parameters, buffers and optimizer state, bit by bit.

    All ranks call it at the same place, such as after ``optimizer.step()``. A tensor is compared
    with its dtype and shape; numbers in the optimizer's state, such as learning rates, are compared
    as well. A DTensor is compared only if each rank has all of it.

    It reads every tensor once. Tensors on a GPU are copied to the host for that, so choose
    ``every`` by the time that it returns.

    Args:
        model: The model.
        optimizer: The optimizer whose state is compared as well, distributed or not.
        every: Compare at the first call for this model and at every ``every``-th call after it.
        process_set: The ranks that should have the same. The default is all ranks.

    Returns:
        The seconds that the check has taken; None if this call has not checked anything.

    Raises:
        InvalidRequest: ``every`` is not a positive whole number. Nothing was started.
        Disagreement: The ranks differ. It names each tensor and the ranks that differ from most
            others, on every rank alike.
        GradwireError: The comparison failed; the subclass and ``kind`` tell why.

    Example:
        ```python
        for batch in batches:
            loss(model, batch).backward()
            optimizer.step()
            hvd.check_consistent(model, optimizer, every=1000)
        ```
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise InvalidRequest(f"every={every!r}: it must be a positive whole number", kind="invalid")
    if next(_calls.setdefault(model, itertools.count())) % every:
        return None
    began = time.monotonic()
    hashes = {name: _hash(value) for name, value in _values(model, optimizer)}
    whole = _digest(repr(sorted(hashes.items())).encode())
    ranks = process_set.ranks
    if len(set(allgather_object(whole, process_set=process_set))) > 1:
        all_hashes = allgather_object(hashes, process_set=process_set)
        raise Disagreement(_differences(dict(zip(ranks, all_hashes))), kind="disagreement")
    return time.monotonic() - began


def _values(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, Any]]:
    """The values to compare, with the names that users know them by."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        names[id(parameter)] = name
        yield f"parameter '{name}'", parameter
    for name, buffer in model.named_buffers():
        yield f"buffer '{name}'", buffer
    if optimizer is None:
        return
    for at, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params" and _is_plain(value):
                yield f"'{key}' of parameter group {at}", value
        for number, parameter in enumerate(without_waiting(group["params"])):
            name = names.get(id(parameter), f"{number} of group {at}")
            for key, value in optimizer.state.get(parameter, {}).items():
                if _is_plain(value):
                    yield f"'{key}' of the optimizer for parameter '{name}'", value


def _is_plain(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, bool, int, float, str, tuple, type(None)))


def _hash(value: Any) -> _Hash:
    if not isinstance(value, torch.Tensor):
        return "", repr(value)
    tensor = value.detach()
    placements = getattr(tensor, "placements", None)
    if placements is not None:
        if not all(placement.is_replicate() for placement in placements):
            # Ranks have different parts of it.
            return "a part of a tensor", ""
        tensor = tensor.to_local()  # type: ignore[attr-defined]
    about = f"{tensor.dtype} {tuple(tensor.shape)}"
    if tensor.is_meta or tensor.layout is not torch.strided:
        return f"{about} without ordinary memory", ""
    data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return about, _digest(data.data)


def _digest(data: bytes | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _differences(hashes: dict[int, dict[str, _Hash]]) -> str:
    """What differs, and on which ranks."""
    lines: list[str] = []
    names = dict.fromkeys(name for each in hashes.values() for name in each)
    for name in names:
        by_value: dict[_Hash | None, list[int]] = collections.defaultdict(list)
        for rank, each in hashes.items():
            by_value[each.get(name)].append(rank)
        if len(by_value) < 2:
            continue
        # The value of most ranks is the norm; of two alike, that of the lowest rank.
        norm = max(by_value, key=lambda value: (len(by_value[value]), -by_value[value][0]))
        others = [(value, ranks) for value, ranks in by_value.items() if value != norm]
        parts = [
            f"{_named(ranks)} {'lacks it' if value is None else _how(norm, value)}"
            for value, ranks in others[:_SHOWN]
        ]
        more = f", and {len(others) - _SHOWN} other values" if len(others) > _SHOWN else ""
        lines.append(f"{name}: {', '.join(parts)}{more}")
    shown = "\n  ".join(lines[:_SHOWN])
    more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return (
        f"the ranks have different states; compared with most of them:\n  {shown}{more}\n"
        "hint: broadcast the model and the optimizer after creating or loading them, and change "
        "them on all ranks alike; seed random numbers alike"
    )


def _how(norm: _Hash | None, value: _Hash) -> str:
    """How a value differs from that of most ranks."""
    if norm is None:
        return "has it, the others lack it"
    if value[0] != norm[0]:
        return f"has {value[0] or value[1]}, not {norm[0] or norm[1]}"
    return "differs" if value[0] else f"has {value[1]}, not {norm[1]}"


def _named(ranks: list[int]) -> str:
    noun = "rank" if len(ranks) == 1 else "ranks"
    shown = ", ".join(map(str, ranks[:16]))
    return f"{noun} {shown}{', …' if len(ranks) > 16 else ''}"
