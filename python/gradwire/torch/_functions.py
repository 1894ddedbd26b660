"""Broadcasts the root's model and optimizer.

A rank may have a tensor that can't be exchanged, such as one on the device ``meta``. The other
ranks would wait for it, so all ranks first tell each other (TELL).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from gradwire._arguments import whole_number
from gradwire._errors import InvalidRequest
from gradwire._objects import allgather_object, broadcast_object
from gradwire._process_sets import ProcessSet, global_process_set
from gradwire._world import rank
from gradwire.torch._adapter import check_no_overlap, dense_strides, describe
from gradwire.torch._handles import wait_for_all
from gradwire.torch._move_ops import broadcast_async_
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
        InvalidRequest: An argument is invalid on one of the ranks, or it has a tensor that can't be
            exchanged. Nothing was sent.
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
        problem = _problem(tensors, into=True)
    except (TypeError, ValueError) as error:
        problem = str(error)
    _tell(problem, "broadcast_parameters", process_set)
    _broadcast(tensors, root_rank, process_set)
    global _copies
    _copies += 1


def copies() -> int:
    """Returns how often parameters have been copied to all ranks."""
    return _copies


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
    return tensors


def _broadcast(
    tensors: Iterable[tuple[str, torch.Tensor]], root_rank: int, process_set: ProcessSet
) -> None:
    wait_for_all(
        [broadcast_async_(tensor, root_rank, name, process_set) for name, tensor in tensors]
    )


def _problem(tensors: Iterable[tuple[str, torch.Tensor]], into: bool) -> str | None:
    """Returns why one of the tensors can't be exchanged; None if all of them can."""
    for name, tensor in tensors:
        try:
            describe(tensor)
            if into:
                check_no_overlap(tensor)
        except InvalidRequest as error:
            return f"{name}: {error}"
    return None


def _tell(problem: str | None, call: str, process_set: ProcessSet) -> None:
    """Raises InvalidRequest on every rank if one of them has a problem."""
    problems = allgather_object((rank(), problem), call, process_set)
    for who, what in problems:
        if what is not None:
            raise InvalidRequest(
                f"{call}: nothing was sent, because rank {who} can't take part: {what}",
                kind="invalid",
            )


class _Tensor:
    """A placeholder for a tensor in a state that is sent as an object."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.strides = (
            tuple(tensor.shape),
            tensor.dtype,
            dense_strides(tensor),
        )


def _map(value: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    """Returns a copy of a nested value in which the objects of a kind are converted."""
    if isinstance(value, kind):
        return convert(value)
    if isinstance(value, dict):
        return {key: _map(inner, kind, convert) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map(inner, kind, convert) for inner in value)
    return value


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copies the root's optimizer state to every rank: learning rates, moments, step counts.

    It works with any PyTorch optimizer. It makes no step to create a state.

    Args:
        optimizer: The optimizer, with the same parameters on all ranks.
        root_rank: The global rank whose state all ranks receive.
        model: Ignored; exists for Horovod scripts.
        process_set: The participating ranks. The default is all ranks.

    Raises:
        InvalidRequest: An argument is invalid, or a rank has a tensor that can't be exchanged.
            Nothing was sent.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.

    Example:
        ```python
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        ```
    """
    del model
    tensors: list[torch.Tensor] = []
    if isinstance(optimizer, torch.optim.Optimizer):
        on_meta = [each for each in _parameters(optimizer) if each.is_meta]
        problem = _problem([("a parameter", each) for each in on_meta], False)
    else:
        problem = f"optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer"
    try:
        root_rank = whole_number("root_rank", root_rank)
    except InvalidRequest as error:
        problem = str(error)
    at_root = problem is None and rank() == root_rank

    def replace(tensor: torch.Tensor) -> _Tensor:
        tensors.append(tensor)
        return _Tensor(tensor)

    def allocate(like: _Tensor) -> torch.Tensor:
        tensors.append(
            torch.empty_strided(like.shape, like.strides, dtype=like.dtype, device="cpu")
        )
        return tensors[-1]

    plan = _map(optimizer.state_dict(), torch.Tensor, replace) if at_root else None
    problem = problem or _problem([("its state", each) for each in tensors], False)
    _tell(problem, "broadcast_optimizer_state", process_set)
    plan = broadcast_object(plan, root_rank, "optimizer_state", process_set)
    given = None if at_root else _map(plan, _Tensor, allocate)
    named = [(f"optimizer_state.{at}", tensor) for at, tensor in enumerate(tensors)]
    _broadcast(named, root_rank, process_set)
    if given is not None:
        load_optimizer_state(optimizer, given)


def load_optimizer_state(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> None:
    """Loads a state into an optimizer, which then owns its tensors, and keeps their dtypes."""
    # This moves each tensor to its parameter's device and converts it to the parameter's dtype.
    optimizer.load_state_dict(given)
    _keep_types(optimizer, given)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    groups = optimizer.param_groups
    return [each for group in groups for each in without_waiting(group["params"])]


def _keep_types(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> None:
    """Restores the dtypes of a state.

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
    return loaded
