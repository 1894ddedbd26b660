"""Silent divergence: do all ranks have the same model and optimizer?

Ranks that diverge train on without an error: a layer that one rank initialised differently, a
learning rate that one rank changed, a write that only one rank made. ``check_consistency`` compares
digests. Only if they differ do the ranks exchange one digest for each value, and name it.
"""

from __future__ import annotations

import collections
import hashlib
import pickle
import time
import weakref
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from gradwire import _epochs
from gradwire._arguments import whole_number
from gradwire._errors import Disagreement, InvalidRequest
from gradwire._objects import dumps, exchange
from gradwire._process_sets import ProcessSet, global_process_set
from gradwire._roll import listed
from gradwire._world import rank
from gradwire.torch._adapter import check_own_memory
from gradwire.torch._checks import value_digest
from gradwire.torch._parameters import without_waiting

# A report names at most this many values for each group of ranks.
_NAMED = 5

# The calls for each model, so that every n-th one compares.
_calls: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()


def _start_over() -> None:
    """Starts to count again: a newcomer's first call must be the first call of all ranks."""
    _calls.clear()


_epochs.on_change(_start_over)


class _Part(NamedTuple):
    """What a rank tells the others."""

    rank: int
    # Why it can't take part; None if it can.
    problem: str | None
    # The digest of all its values.
    summary: bytes


def check_consistency(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    every: int = 1,
    buffers: bool = True,
    process_set: ProcessSet = global_process_set,
) -> float:
    """Raises an error on all ranks unless they have the same model and optimizer, bit for bit.

    It compares parameters, buffers, the state of the optimizer and its options, such as learning
    rates. Values are paired by the names of the model's parameters, so the order does not matter.
    All ranks of the process set call it alike. If all is well, it reads each value once and
    exchanges a few bytes.

    Args:
        model: The model. It may not be sharded: the shards of FSDP differ on purpose.
        optimizer: An optimizer of its parameters; None compares only the model.
        every: Compares in the first call and then in every n-th one, counted for each model. The
            other calls return at once.
        buffers: Whether buffers are compared. The running averages of ``BatchNorm`` differ between
            ranks unless it is a ``SyncBatchNorm``.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        The seconds that the comparison took; 0 if this call did not compare.

    Raises:
        Disagreement: Ranks differ. The text names the ranks and the first values; ``rank`` and
            ``tensor`` are the first of them.
        InvalidRequest: An argument is invalid, or a rank has a tensor that can't be compared.
        GradwireError: The exchange failed; the subclass and ``kind`` tell why.

    Example:
        ```python
        for step, batch in enumerate(batches):
            train(batch)
            hvd.check_consistency(model, optimizer, every=100)
        ```
    """
    every = whole_number("every", every, least=1)
    if not isinstance(model, torch.nn.Module):
        raise InvalidRequest(
            f"model is a {type(model).__name__}, not a torch.nn.Module", kind="invalid"
        )
    calls = _calls.get(model, 0)
    _calls[model] = calls + 1
    if calls % every:
        return 0.0
    start = time.perf_counter()
    digests: dict[str, int] = {}
    problem = None
    try:
        digests = dict(_digests(model, optimizer, buffers))
    except InvalidRequest as error:
        problem = str(error)
    summary = hashlib.blake2b(repr(sorted(digests.items())).encode(), digest_size=16).digest()
    told = _gather(_Part(rank(), problem, summary), process_set)
    for other in told:
        if other.problem is not None:
            raise InvalidRequest(
                f"check_consistency: rank {other.rank} can't compare its values: {other.problem}",
                kind="invalid",
            )
    if len({other.summary for other in told}) > 1:
        _report(dict(_gather((rank(), digests), process_set)))
    return time.perf_counter() - start


def _gather(value: Any, process_set: ProcessSet) -> list[Any]:
    """Gathers a value of each member that has not joined."""
    parts = exchange(dumps(value), "allgather-object", "check_consistency", process_set)
    return [pickle.loads(part) for part in parts if part]


def _digests(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, buffers: bool
) -> Iterator[tuple[str, int]]:
    """Iterates over the names and digests of all values; raises InvalidRequest."""
    names: dict[Any, str] = {}
    for name, parameter in model.named_parameters():
        names[parameter] = name
        yield f"parameter {name}", _digest(name, parameter)
    for name, buffer in model.named_buffers() if buffers else ():
        yield f"buffer {name}", _digest(name, buffer)
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        what = type(optimizer).__name__
        raise InvalidRequest(f"optimizer is a {what}, not a torch.optim.Optimizer", kind="invalid")
    for number, group in enumerate(optimizer.param_groups):
        named = {
            names.get(parameter, f"parameter {place} of group {number}"): parameter
            for place, parameter in enumerate(without_waiting(group["params"]))
        }
        # The order of the groups may differ between ranks, so each is named after a parameter.
        which = min(named, default=f"group {number}")
        for name, parameter in named.items():
            yield f"group of {name}", _digest(name, which)
            for key, value in optimizer.state.get(parameter, {}).items():
                yield f"{key} of {name}", _digest(f"{key} of {name}", value)
        for key, value in group.items():
            if key not in ("params", "param_names"):
                yield f"{key} of the group of {which}", _digest(key, value)


def _digest(name: str, value: Any) -> int:
    """Returns a digest of a tensor, or of a plain value; other objects count by their class."""
    if isinstance(value, torch.Tensor):
        if value.is_meta or torch.nn.parameter.is_lazy(value):
            raise InvalidRequest(f"{name} has no data", kind="invalid")
        try:
            check_own_memory(value)
        except InvalidRequest as error:
            raise InvalidRequest(f"{name}: {error}", kind="invalid") from None
        kind = f"{value.dtype} {tuple(value.shape)}"
        return zlib.crc32(kind.encode(), value_digest(value))
    if isinstance(value, (list, tuple)):
        return zlib.crc32(repr([_digest(name, each) for each in value]).encode())
    if isinstance(value, dict):
        pairs = sorted((repr(key), _digest(name, each)) for key, each in value.items())
        return zlib.crc32(repr(pairs).encode())
    is_plain = value is None or isinstance(value, (bool, int, float, complex, str))
    return zlib.crc32((repr(value) if is_plain else type(value).__name__).encode())


def _report(known: dict[int, dict[str, int]]) -> None:
    """Raises the error for ranks that differ: which ranks, and in which values."""
    names = list(dict.fromkeys(name for digests in known.values() for name in digests))
    # The most frequent digest counts as right; among equally frequent ones, that of the first
    # rank.
    usual = {
        name: collections.Counter(digests.get(name) for digests in known.values()).most_common(1)
        for name in names
    }
    wrong: dict[tuple[str, ...], list[int]] = {}
    for who, digests in sorted(known.items()):
        its = tuple(name for name in names if digests.get(name) != usual[name][0][0])
        if its:
            wrong.setdefault(its, []).append(who)
    lines = []
    for its, ranks in wrong.items():
        they = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listed(ranks)}"
        rest = f" and {len(its) - _NAMED} more" if len(its) > _NAMED else ""
        lacking = sum(name not in known[ranks[0]] for name in its)
        has_not = f" ({lacking} of them are missing there)" if lacking else ""
        lines.append(
            f"{they}: {len(its)} of {len(names)} values{has_not}: {', '.join(its[:_NAMED])}{rest}"
        )
    first = next(iter(wrong))
    hint = "broadcast_parameters and broadcast_optimizer_state make them equal"
    if all(name.startswith("buffer ") for its in wrong for name in its):
        hint += "; buffers=False leaves buffers out"
    raise Disagreement(
        "check_consistency: ranks differ from the others\n  " + "\n  ".join(lines) + f"\n{hint}",
        kind="disagreement",
        rank=wrong[first][0],
        tensor=first[0].removeprefix("parameter ").removeprefix("buffer "),
    )
