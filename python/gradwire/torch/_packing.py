"""States of optimizers as objects that can be pickled, and tensors that are sent beside them.

The tensors in a state are replaced by placeholders. The receiver makes tensors for them, which are
then filled by broadcasts. A sparse COO tensor is sent as its entries, in their order, so all ranks
go on with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradwire._errors import InvalidRequest
from gradwire.torch._adapter import check_no_overlap, check_own_memory, dense_strides, describe


class _Dense:
    """A placeholder for a dense tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.strides = dense_strides(tensor)

    def allocate(self) -> torch.Tensor:
        """Returns an uninitialized tensor like the original one."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="cpu")


class _Sparse:
    """A placeholder for a sparse COO tensor: its parts, which are dense."""

    def __init__(self, tensor: torch.Tensor, indices: Any, values: Any) -> None:
        self.shape, self.is_coalesced = tuple(tensor.shape), tensor.is_coalesced()
        self.indices, self.values = indices, values

    def build(self) -> torch.Tensor:
        """Returns the tensor, when its parts have arrived."""
        return torch.sparse_coo_tensor(
            self.indices,
            self.values,
            self.shape,
            device=self.values.device,
            is_coalesced=self.is_coalesced,
            check_invariants=True,
        )


def pack(state: Any) -> tuple[Any, list[torch.Tensor]]:
    """Returns a copy of a state with placeholders, and the tensors to send.

    Raises:
        InvalidRequest: A tensor can't be exchanged.
    """
    tensors: list[torch.Tensor] = []

    def dense(tensor: torch.Tensor) -> _Dense:
        describe(tensor)
        try:
            check_no_overlap(tensor)
        except InvalidRequest:
            tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
        tensors.append(tensor)
        return _Dense(tensor)

    def replace(tensor: torch.Tensor) -> Any:
        if tensor.layout != torch.sparse_coo:
            return dense(tensor)
        check_own_memory(tensor)
        tensor = tensor.detach()
        return _Sparse(tensor, dense(tensor._indices()), dense(tensor._values()))

    try:
        return _map(state, torch.Tensor, replace), tensors
    except InvalidRequest as error:
        raise InvalidRequest(f"its state: {error}", kind="invalid") from None


def unpack(plan: Any) -> tuple[list[torch.Tensor], Callable[[], Any]]:
    """Returns the tensors to receive, and a function that then returns the state."""
    tensors: list[torch.Tensor] = []

    def allocate(like: _Dense) -> torch.Tensor:
        tensors.append(like.allocate())
        return tensors[-1]

    def allocate_all(like: _Dense | _Sparse) -> Any:
        if isinstance(like, _Sparse):
            like.indices, like.values = allocate(like.indices), allocate(like.values)
            return like
        return allocate(like)

    allocated = _map(plan, (_Dense, _Sparse), allocate_all)
    return tensors, lambda: _map(allocated, _Sparse, _Sparse.build)


def _map(value: Any, kind: type | tuple[type, ...], convert: Callable[[Any], Any]) -> Any:
    """Returns a copy of a nested value in which the objects of a kind are converted."""
    if isinstance(value, kind):
        return convert(value)
    if isinstance(value, dict):
        return {key: _map(inner, kind, convert) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map(inner, kind, convert) for inner in value)
    return value
