"""Broadcasts the root's model and optimizer.

A rank may have a tensor that can't be exchanged, such as one on the device ``meta``. The other
ranks would wait for this rank, so all ranks first tell each other about such problems (TELL).
"""

from __future__ import annotations

import hashlib
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from gradwire._arguments import whole_number
from gradwire._errors import InvalidRequest
from gradwire._objects import allgather_object, broadcast_object, dumps
from gradwire._process_sets import ProcessSet, global_process_set
from gradwire._world import rank
from gradwire.torch._adapter import check_no_overlap, describe
from gradwire.torch._handles import wait_for_all
from gradwire.torch._move_ops import broadcast_async_
from gradwire.torch._packing import pack, unpack
from gradwire.torch._pairing import Layout, check_kinds, in_order_of, layout_of, paired
from gradwire.torch._parameters import without_waiting

_copies = 0


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]] | Iterable[torch.Tensor],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copies the root's parameters to every rank, in place.

    Args:
        params: A ``state_dict()``, ``named_parameters()`` or ``parameters()``. All ranks pass
            parameters with the same names, dtypes and shapes; those of ``parameters()`` are matched
            by order. Parameters that are None are skipped.
        root_rank: The global rank whose parameters all ranks receive.
        process_set: The participating ranks. The default is all ranks.

    Raises:
        InvalidRequest: On one of the ranks, an argument is invalid or a tensor can't be exchanged;
            or the ranks have parameters with different names, dtypes or shapes. All ranks raise it.
            Nothing was sent.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.

    Example:
        ```python
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        ```
    """
    tensors: list[tuple[str, torch.Tensor]] = []
    try:
        tensors = _named(params)
        root_rank = whole_number("root_rank", root_rank)
        problem = _problem(tensors)
    except (TypeError, ValueError) as error:
        problem = str(error)
    call, kinds = "broadcast_parameters", dict[str, str]()
    if problem is None:
        kinds = {name: f"{each.dtype} {list(each.shape)}" for name, each in tensors}
    words = _tell(problem, call, process_set, (root_rank, _digest(kinds)))
    if len({*words.values()}) > 1:
        told = dict(allgather_object((rank(), kinds), f"{call}.kinds", process_set))
        with _nothing_sent(call):
            _check_roots({who: root for who, (root, _) in words.items()})
            check_kinds(told)
    _broadcast(tensors, root_rank, process_set)
    global _copies
    _copies += 1


def copies() -> int:
    """Returns how often parameters have been copied to all ranks."""
    return _copies


def _digest(kinds: Mapping[str, str]) -> bytes:
    return hashlib.blake2b(repr(sorted(kinds.items())).encode(), digest_size=16).digest()


def _named(params: Any) -> list[tuple[str, torch.Tensor]]:
    """Returns the names and tensors of ``broadcast_parameters``, or raises ``ValueError``."""
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise ValueError(
            f"params is a {type(params).__name__}, not a state_dict(), named_parameters() or "
            "parameters()"
        )
    pairs = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    tensors: list[tuple[str, torch.Tensor]] = []
    for place, pair in enumerate(pairs):
        if isinstance(pair, torch.Tensor):
            pair = (f"#{place}", pair)
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError("params must contain parameters, or pairs (name, parameter)")
        name, parameter = pair
        if parameter is None:
            continue
        if not isinstance(parameter, torch.Tensor):
            raise ValueError(
                f"{name} is a {type(parameter).__name__}, not a tensor: use broadcast_object"
            )
        tensors.append((f"parameter.{name}", parameter))
    counts = Counter(name for name, _ in tensors)
    twice = [name.removeprefix("parameter.") for name, count in counts.items() if count > 1]
    if twice:
        more = ", …" if len(twice) > 3 else ""
        raise ValueError(
            f"params has several parameters named {', '.join(twice[:3])}{more}: call it for each "
            "model"
        )
    return tensors


def _broadcast(
    tensors: Iterable[tuple[str, torch.Tensor]], root_rank: int, process_set: ProcessSet
) -> None:
    wait_for_all(
        [broadcast_async_(tensor, root_rank, name, process_set) for name, tensor in tensors]
    )


def _problem(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """Returns why one of the tensors can't be received; None if all of them can."""
    for name, tensor in tensors:
        try:
            describe(tensor)
            check_no_overlap(tensor)
        except InvalidRequest as error:
            return f"{name}: {error}"
    return None


def _tell(
    problem: str | None, call: str, process_set: ProcessSet, word: Any = None
) -> dict[int, Any]:
    """Raises InvalidRequest on every rank if one of them has a problem; returns all words."""
    told = allgather_object((rank(), problem, word), call, process_set)
    for who, what, _ in told:
        if what is not None:
            raise InvalidRequest(
                f"{call}: nothing was sent, because rank {who} can't take part: {what}",
                kind="invalid",
            )
    return {who: word for who, _, word in told}


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copies the root's optimizer state to every rank: learning rates, moments, step counts.

    It works with any PyTorch optimizer. It makes no step to create a state. State, options and
    groups are paired by the names of the parameters: those given to ``DistributedOptimizer``, or
    those that the optimizer was made with. The order may then differ between ranks. Parameters
    without names are paired by their position.

    Args:
        optimizer: The optimizer, with the same parameters in the same groups on all ranks.
        root_rank: The global rank whose state all ranks receive. It may have sparse COO tensors.
        model: Ignored; exists for Horovod scripts.
        process_set: The participating ranks. The default is all ranks.

    Raises:
        InvalidRequest: An argument is invalid, the root has a tensor that can't be exchanged, or
            the ranks' optimizers are of different classes, or have different groups or parameters
            with different names, dtypes or shapes. All ranks raise it. No state was sent, and
            nothing has changed.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.

    Example:
        ```python
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        ```
    """
    del model
    problem, layout, packed = None, None, b""
    tensors: list[torch.Tensor] = []
    try:
        root_rank = whole_number("root_rank", root_rank)
        layout = layout_of(optimizer)
        if rank() == root_rank:
            plan, tensors = pack(optimizer.state_dict())
            packed = dumps(plan)
    except InvalidRequest as error:
        problem = str(error)
    except Exception as error:  # hooks of the optimizer may raise anything
        problem = f"{type(error).__name__}: {error}"
    call = "broadcast_optimizer_state"
    words = _tell(problem, call, process_set, (root_rank, layout and layout.digest))
    layouts: dict[int, Layout] = {}
    if len({*words.values()}) > 1:
        told = dict(allgather_object((rank(), layout), f"{call}.layouts", process_set))
        with _nothing_sent(call):
            _check_roots({who: root for who, (root, _) in words.items()})
            layouts = paired(told)
    packed = broadcast_object(packed, root_rank, "optimizer_state", process_set)
    at_root = rank() == root_rank
    if not at_root:
        tensors, build = unpack(pickle.loads(packed))
    named = [(f"optimizer_state.{at}", tensor) for at, tensor in enumerate(tensors)]
    _broadcast(named, root_rank, process_set)
    if not at_root:
        given = build()
        if layouts:
            groups = given["param_groups"]
            given["param_groups"] = in_order_of(layouts[rank()], layouts[root_rank], groups)
        load_optimizer_state(optimizer, given)


@contextmanager
def _nothing_sent(call: str) -> Iterator[None]:
    """Returns a context whose errors say that the call has sent nothing."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"{call}: nothing was sent, because {error}", kind="invalid") from None


def _check_roots(roots: Mapping[int, int]) -> None:
    first, root = next(iter(roots.items()))
    for who, other in roots.items():
        if other != root:
            raise InvalidRequest(
                f"rank {first} passed root_rank={root}, but rank {who} {other}", kind="invalid"
            )


def load_optimizer_state(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> None:
    """Loads a state into an optimizer, which then owns its tensors, and keeps their dtypes."""
    # This moves each tensor to its parameter's device and converts it to the parameter's dtype.
    optimizer.load_state_dict(given)
    _keep_types(optimizer, given)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    groups = optimizer.param_groups
    return [each for group in groups for each in without_waiting(group["params"])]


def _keep_types(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> None:
    """Restores the dtypes of a state, and its texts.

    NAdam and ASGD keep wider states than bf16 parameters. Without this, the ranks would diverge.
    """
    numbers = [number for group in given["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, _parameters(optimizer)):
        if parameter in optimizer.state and number in given["state"]:
            optimizer.state[parameter] = _of_type(
                optimizer.state[parameter], given["state"][number]
            )


def _of_type(loaded: Any, given: Any) -> Any:
    if isinstance(loaded, torch.Tensor) and isinstance(given, torch.Tensor):
        return loaded if loaded.dtype == given.dtype else given.to(loaded.device)
    if isinstance(loaded, dict) and isinstance(given, dict):
        return {key: _of_type(value, given.get(key)) for key, value in loaded.items()}
    if type(loaded) is type(given) and type(loaded) in (list, tuple):
        return type(loaded)(_of_type(*pair) for pair in zip(loaded, given))
    # PyTorch treats a text like a container.
    return given if isinstance(given, (str, bytes)) else loaded
