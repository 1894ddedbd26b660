"""The adapter for PyTorch tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from gradwire import _native
from gradwire._errors import InvalidRequest
from gradwire._ops import Collectives
from gradwire._uses import Use
from gradwire.torch import _adopt, _cuda

_NAMES: dict[torch.dtype, str] = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
# Later PyTorch releases added these.
for _name, _ours in {
    "uint16": "u16",
    "uint32": "u32",
    "uint64": "u64",
    "float8_e4m3fn": "f8e4m3",
    "float8_e5m2": "f8e5m2",
}.items():
    if hasattr(torch, _name):
        _NAMES[getattr(torch, _name)] = _ours
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
# PyTorch's code for a tensor with several elements at one address.
OVERLAPS = 1
# The dtypes that every PyTorch release accepts through DLPack.
_PLAIN = {"f32", "f64", "f16", "bf16", "i8", "u8", "i16", "i32", "i64"}


def check_is_tensor(tensor: Any) -> None:
    """Raises InvalidRequest if the value is not a tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidRequest(
            f"expected a torch.Tensor, not {type(tensor).__name__}", kind="invalid"
        )


def check_has_data(tensor: Any) -> None:
    """Raises InvalidRequest unless the value is a tensor with dense elements in its own memory."""
    check_is_tensor(tensor)
    if tensor.layout != torch.strided:
        raise InvalidRequest(
            f"a tensor of layout {tensor.layout} can't be exchanged: use sparse_allreduce_async "
            "or to_dense()",
            kind="invalid",
        )
    if tensor.is_meta:
        raise InvalidRequest("a tensor on the device 'meta' has no data", kind="invalid")
    check_own_memory(tensor)


def check_own_memory(tensor: torch.Tensor) -> None:
    """Raises InvalidRequest unless the tensor's elements, dense or sparse, are its own."""
    what = _unusual(tensor)
    if what:
        raise InvalidRequest(what, kind="invalid")


def _unusual(tensor: torch.Tensor) -> str:
    """Returns why a tensor has no dense elements of its own; an empty text if it has."""
    if tensor.is_nested:
        return "a nested tensor can't be exchanged: exchange those of its unbind()"
    if tensor.is_quantized:
        return "a quantized tensor can't be exchanged: use dequantize() or int_repr()"
    kind = type(tensor)
    if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        functorch = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        if functorch or torch._is_functional_tensor(tensor):
            return (
                "a tensor inside of a function that PyTorch transforms or traces can't be "
                "exchanged: make the call outside of it"
            )
        return ""
    try:
        if tensor.untyped_storage().data_ptr() != 0:
            return ""
    except Exception:  # a subclass may raise anything
        pass
    return (
        f"a tensor of the class {kind.__name__} can't be exchanged, because it has no memory of "
        "its own: use the tensor that it contains"
    )


def describe(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """Returns the element type and the dimensions of a tensor.

    Raises:
        InvalidRequest: It can't be exchanged.
    """
    check_has_data(tensor)
    name = _NAMES.get(tensor.dtype)
    if name is None:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _NAMES)
        raise InvalidRequest(
            f"tensors of {tensor.dtype} can't be exchanged: supported dtypes are {known}",
            kind="invalid",
        )
    return name, tuple(tensor.shape)


def address_of_small(tensor: torch.Tensor, element: str | None = None) -> int:
    """Returns the address of a small contiguous tensor.

    Small tensors are copied by address, because the overhead of PyTorch's copy exceeds the time of
    the copy itself. The address is valid until the next call that may change the tensor.

    Args:
        tensor: Any tensor.
        element: The required element type; None for any supported type.

    Returns:
        The address; 0 if the tensor is not small and contiguous.
    """
    if type(tensor) is not torch.Tensor or not tensor.is_cpu or tensor.layout != torch.strided:
        return 0
    name, width = _NAMES.get(tensor.dtype), tensor.element_size()
    nbytes = tensor.numel() * width
    if name is None or name != (element or name) or not 0 < nbytes < _adopt.MIN_BYTES:
        return 0
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return 0
    try:
        # The program may have shrunk the storage below the tensor's size.
        end = int(tensor.storage_offset()) * width + nbytes
        return tensor.data_ptr() if end <= tensor.untyped_storage().nbytes() else 0
    except RuntimeError:
        return 0  # a tensor without its own memory, such as a functorch tensor


def check_no_overlap(tensor: torch.Tensor) -> None:
    """Raises InvalidRequest if elements of a tensor share memory, as after expand."""
    # A contiguous tensor is not expanded.
    if not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) == OVERLAPS:
        raise InvalidRequest(
            f"a result can't be written to a tensor of shape {list(tensor.shape)} and strides "
            f"{list(tensor.stride())}, because its elements share memory: pass a clone() of it",
            kind="invalid",
        )


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides of the tensor's gradient.

    These are the tensor's own strides if its elements fill their memory, as with ``channels_last``;
    otherwise those of a contiguous tensor. Autograd and optimizers choose the strides of gradients
    and states in the same way, and fused kernels rely on equal layouts.
    """
    like = torch.empty_like(tensor, device="meta")
    return tensor.stride() if like.stride() == tensor.stride() else like.contiguous().stride()


def as_tensor(buffer: _native.Buffer) -> torch.Tensor:
    """Returns a tensor on the same memory."""
    name = buffer.dtype
    if buffer.nbytes == 0:
        return torch.empty(buffer.shape, dtype=_DTYPES[name], device="cpu")
    # Passes the capsule: from_dlpack(buffer) would negotiate versions and devices first.
    if name in _PLAIN:
        tensor: torch.Tensor = from_dlpack(buffer.__dlpack__())
        return tensor
    raw: torch.Tensor = from_dlpack(buffer.view(0, "u8", [buffer.nbytes]).__dlpack__())
    return raw.view(_DTYPES[name]).view(buffer.shape)


class TorchAdapter:
    """Adapter for tensors on any device: pinned memory for GPUs, blocking copies for others."""

    def describe(self, array: torch.Tensor) -> tuple[str, tuple[int, ...]]:
        return describe(array)

    def load(self, array: torch.Tensor, buffer: _native.Buffer) -> None:
        if array.is_cuda:
            _cuda.stage.load(buffer, as_tensor(buffer), array.detach())
        else:
            as_tensor(buffer).copy_(array.detach())

    def check_writable(self, array: torch.Tensor) -> None:
        check_no_overlap(array)

    def use(self, array: torch.Tensor) -> Use:
        element, shape = describe(array)
        self.check_writable(array)
        return _adopt.use(array, element, shape)

    def written(self, array: torch.Tensor) -> None:
        _adopt.written(array)

    def view(self, buffer: _native.Buffer, like: torch.Tensor) -> torch.Tensor:
        """Returns shared memory as a tensor on the device of ``like``."""
        result = as_tensor(buffer)
        if like.is_cuda:
            copy = like.new_empty(result.shape, dtype=result.dtype)
            _cuda.stage.store(buffer, result, copy)
            return copy
        return result.to(like.device)

    def store(self, buffer: _native.Buffer, into: torch.Tensor) -> None:
        if into.is_cuda:
            _cuda.stage.store(buffer, as_tensor(buffer), into.detach())
        else:
            into.detach().copy_(as_tensor(buffer))


collectives: Collectives[torch.Tensor] = Collectives(TorchAdapter())
