"""Broadcasts the root's model and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from gradwire._arguments import whole_number
from gradwire._errors import InvalidRequest
from gradwire._objects import broadcast_object
from gradwire._world import ProcessSet, global_process_set, rank
from gradwire.torch._adapter import dense_strides
from gradwire.torch._handles import wait_for_all
from gradwire.torch._move_ops import broadcast_async_
from gradwire.torch._parameters import without_waiting


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
        ValueError: ``params`` is none of these.
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.

    Example:
        ```python
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        ```
    """
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise ValueError(
            "broadcast_parameters takes a state_dict(), named_parameters() or parameters(), "
            f"not a {type(params).__name__}"
        )
    pairs = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    handles = []
    for place, pair in enumerate(pairs):
        if isinstance(pair, torch.Tensor):
            pair = (f"#{place}", pair)
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError("broadcast_parameters takes parameters, or pairs (name, parameter)")
        name, parameter = pair
        if parameter is None:
            continue
        if not isinstance(parameter, torch.Tensor):
            raise ValueError(
                f"{name} is a {type(parameter).__name__}, not a tensor: use broadcast_object"
            )
        handles.append(broadcast_async_(parameter, root_rank, f"parameter.{name}", process_set))
    wait_for_all(handles)


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
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.

    Example:
        ```python
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        ```
    """
    del model
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidRequest(
            f"expected a torch.optim.Optimizer, not {type(optimizer).__name__}", kind="invalid"
        )
    root_rank = whole_number("root_rank", root_rank)
    at_root = rank() == root_rank
    tensors: list[torch.Tensor] = []

    def replace(tensor: torch.Tensor) -> _Tensor:
        tensors.append(tensor)
        return _Tensor(tensor)

    def allocate(like: _Tensor) -> torch.Tensor:
        tensors.append(
            torch.empty_strided(like.shape, like.strides, dtype=like.dtype, device="cpu")
        )
        return tensors[-1]

    plan = _map(optimizer.state_dict(), torch.Tensor, replace) if at_root else None
    plan = broadcast_object(plan, root_rank, "optimizer_state", process_set)
    given = None if at_root else _map(plan, _Tensor, allocate)
    handles = [
        broadcast_async_(tensor, root_rank, f"optimizer_state.{at}", process_set)
        for at, tensor in enumerate(tensors)
    ]
    wait_for_all(handles)
    if given is not None:
        # This moves each tensor to its parameter's device and converts it to the parameter's dtype.
        optimizer.load_state_dict(given)
        _keep_types(optimizer, given)


def _keep_types(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> None:
    """Restores the dtypes of the root's state.

    NAdam and ASGD keep wider states than bf16 parameters. Without this, the ranks would diverge.
    """
    numbers = [number for group in given["param_groups"] for number in group["params"]]
    parameters = [
        parameter
        for group in optimizer.param_groups
        for parameter in without_waiting(group["params"])
    ]
    for number, parameter in zip(numbers, parameters):
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
