"""Copies tensors to and from shared memory, as one-dimensional buffers.

Tensors that are only moved may have any dtype. Dtypes that Gradwire does not support are sent as
bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gradwire import _native
from gradwire._errors import InvalidRequest
from gradwire._uses import COPIED, Use
from gradwire._world import session
from gradwire.torch import _adopt, _cuda
from gradwire.torch._adapter import (
    address_of_small,
    as_tensor,
    check_has_data,
    check_no_overlap,
    describe,
)

_BYTES = "u8"
_AS_IT_IS = contextlib.nullcontext()


def element(tensor: torch.Tensor, moved: bool = False) -> tuple[str, int]:
    """Returns the element type and the number of elements to send.

    Raises:
        InvalidRequest: The tensor can't be exchanged.
    """
    try:
        return describe(tensor)[0], tensor.numel()
    except InvalidRequest:
        if not moved:
            raise
        check_has_data(tensor)  # so it has another dtype
        return _BYTES, tensor.numel() * tensor.element_size()


def check_writable(tensors: Sequence[torch.Tensor]) -> None:
    """Rejects tensors that can't hold a result, before anything is started.

    Raises:
        InvalidRequest: Elements of a tensor share memory.
    """
    for tensor in tensors:
        element(tensor, moved=True)
        check_no_overlap(tensor)


def allocate(tensors: Sequence[torch.Tensor], moved: bool = False) -> _native.Buffer:
    """Allocates memory for all of these tensors, one after the other; they must have one dtype."""
    kinds = {tensor.dtype for tensor in tensors}
    if len(kinds) != 1:
        raise InvalidRequest(
            "all tensors of a call must have the same dtype; these have "
            f"{', '.join(sorted(map(str, kinds))) or 'none'}",
            kind="invalid",
        )
    sizes = [element(tensor, moved) for tensor in tensors]
    return session().buffer(sizes[0][0], [sum(number for _, number in sizes)])


def parts(memory: torch.Tensor, like: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    """Splits the memory into tensors with the shapes of ``like``."""
    at = 0
    for tensor in like:
        size = tensor.numel()
        if memory.dtype != tensor.dtype:
            size *= tensor.element_size()  # the memory contains bytes
        yield memory[at : at + size].view(tensor.dtype).view(tensor.shape)
        at += size


def load(tensors: Sequence[torch.Tensor], moved: bool = False) -> _native.Buffer:
    """Copies tensors, with any strides and on any device, to shared memory, one after the other."""
    buffer = allocate(tensors, moved)
    for part, tensor in zip(parts(as_tensor(buffer), tensors), tensors):
        _copy_in(buffer, part, tensor)
    return buffer


def use(tensor: torch.Tensor) -> Use:
    """Begins an in-place operation on a one-dimensional buffer; see ``gradwire.torch._adopt.use``.

    Avoids the overhead of adopting for small tensors, whose latency matters.
    """
    if tensor.numel() * tensor.element_size() < _adopt.MIN_BYTES:
        return COPIED
    dtype, number = element(tensor)
    return _adopt.use(tensor, dtype, [number])


def load_for_reading(tensor: torch.Tensor) -> _native.Buffer:
    """Returns a tensor's memory if it is shared, otherwise a copy; as a one-dimensional buffer."""
    dtype, number = element(tensor)
    if number * tensor.element_size() < _adopt.MIN_BYTES:
        return load([tensor])
    shared = _adopt.find(tensor, dtype)
    return load([tensor]) if shared is None else shared.part(0, dtype, [number], shared)


def make(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Creates a one-dimensional tensor in shared memory."""
    like = torch.empty(0, dtype=dtype, device="cpu")
    buffer = session().buffer(element(like)[0], [elements])
    tensor = as_tensor(buffer)
    if elements > 0:
        _adopt.made(tensor, buffer)
    return tensor


def load_one(tensor: torch.Tensor) -> tuple[_native.Buffer, torch.Tensor]:
    """Copies a tensor to shared memory; returns the buffer, and a tensor of the same shape on it.

    This function affects the latency of small tensors, so it avoids repeated work.
    """
    dtype, number = element(tensor)
    buffer = session().buffer(dtype, [number])
    memory = as_tensor(buffer).view(tensor.shape)
    _copy_in(buffer, memory, tensor)
    return buffer, memory


def load_small(tensor: torch.Tensor) -> _native.Buffer | None:
    """Copies a tensor to a one-dimensional buffer, if the copy needs only its address."""
    address = address_of_small(tensor)
    if address == 0:
        return None
    buffer = session().buffer(describe(tensor)[0], [tensor.numel()])
    buffer.copy_from(address)
    return buffer


def store_small(buffer: _native.Buffer, tensor: torch.Tensor) -> None:
    """Copies the buffer of ``load_small`` back, as ``store_one`` does.

    The program may have replaced the tensor's memory meanwhile.
    """
    address = address_of_small(tensor, buffer.dtype)
    if address and buffer.nbytes == tensor.nbytes:
        buffer.copy_to(address)
    else:
        store_one(buffer, as_tensor(buffer).view(tensor.shape), tensor)


def _copy_in(buffer: _native.Buffer, part: torch.Tensor, tensor: torch.Tensor) -> None:
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_cuda:
        _cuda.stage.load(buffer, part, tensor)
    else:
        part.copy_(tensor)
    buffer.mark_copied()


def store(buffer: _native.Buffer, tensors: Sequence[torch.Tensor]) -> None:
    """Copies shared memory to tensors, one after the other."""
    memory = as_tensor(buffer)
    expected = sum(element(tensor, moved=True)[1] for tensor in tensors)
    if memory.numel() != expected:
        raise InvalidRequest(
            f"received {memory.numel()} elements, but the output tensors have {expected}",
            kind="invalid",
        )
    for part, tensor in zip(parts(memory, tensors), tensors):
        store_one(buffer, part, tensor)


def store_one(buffer: _native.Buffer, memory: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copies a buffer's memory, or a part of it, to a tensor of the same shape.

    As with other backends, the tensor's version does not change, so autograd does not notice
    changes of saved tensors. This writes to the tensor's data, which has a separate version.
    """
    with _writing(tensor):
        _copy_out(buffer, memory, tensor.data)


def overwrite(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copies values to a tensor on the same device, as ``store_one`` does."""
    with _writing(tensor):
        tensor.data.copy_(values)


def store_sparse(total: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copies a sparse tensor, as ``store_one`` does, replacing the tensors with its data."""
    with _writing(tensor), torch.no_grad():
        tensor.copy_(total)


def _copy_out(buffer: _native.Buffer, memory: torch.Tensor, tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        _cuda.stage.store(buffer, memory, tensor)
    else:
        tensor.copy_(memory)


def _writing(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which the tensor is writable.

    Inference tensors are writable only in inference mode, which is set per thread.
    """
    return torch.inference_mode() if tensor.is_inference() else _AS_IT_IS
