"""PyTorch tensors as the collectives see them."""

from __future__ import annotations

import torch

from gradwire import _native
from gradwire._errors import InvalidRequest
from gradwire._ops import Collectives

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
# These came with later releases of PyTorch.
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


def describe(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """Element type and dimensions, or an error if it can't be exchanged."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidRequest(f"a torch.Tensor is needed, not {type(tensor).__name__}", kind="invalid")
    if tensor.layout != torch.strided:
        raise InvalidRequest(
            f"a tensor of layout {tensor.layout} can't be exchanged as it is: use "
            "sparse_allreduce_async, or to_dense()",
            kind="invalid",
        )
    name = _NAMES.get(tensor.dtype)
    if name is None:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _NAMES)
        raise InvalidRequest(
            f"tensors of {tensor.dtype} can't be exchanged: the element types are {known}",
            kind="invalid",
        )
    return name, tuple(tensor.shape)


def as_tensor(buffer: _native.Buffer) -> torch.Tensor:
    """A tensor on the very same memory."""
    dtype, shape = _DTYPES[buffer.dtype], buffer.shape
    if buffer.nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    # As bytes, which every release of PyTorch takes; it learned of some types late.
    raw: torch.Tensor = torch.from_dlpack(buffer.view(0, "u8", [buffer.nbytes]))  # type: ignore[attr-defined]
    return raw.view(dtype).view(shape)


class TorchAdapter:
    """Tensors of any device: those of others than the processor are copied to and from it."""

    def describe(self, array: torch.Tensor) -> tuple[str, tuple[int, ...]]:
        return describe(array)

    def load(self, array: torch.Tensor, buffer: _native.Buffer) -> None:
        as_tensor(buffer).copy_(array.detach())

    def view(self, buffer: _native.Buffer, like: torch.Tensor) -> torch.Tensor:
        return as_tensor(buffer).to(like.device)

    def store(self, buffer: _native.Buffer, into: torch.Tensor) -> None:
        into.detach().copy_(as_tensor(buffer))


collectives: Collectives[torch.Tensor] = Collectives(TorchAdapter())
