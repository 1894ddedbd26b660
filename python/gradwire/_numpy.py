"""The adapter for NumPy arrays and other objects that support DLPack."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from gradwire import _native, _world
from gradwire._errors import InvalidRequest
from gradwire._ops import Collectives
from gradwire._uses import COPIED, Use

if TYPE_CHECKING:
    import numpy as np

_NAMES = {
    "float32": "f32",
    "float64": "f64",
    "float16": "f16",
    "int8": "i8",
    "uint8": "u8",
    "int16": "i16",
    "uint16": "u16",
    "int32": "i32",
    "uint32": "u32",
    "int64": "i64",
    "uint64": "u64",
    "bool": "bool",
    "complex64": "c64",
    "complex128": "c128",
    # These come from the package ml_dtypes.
    "bfloat16": "bf16",
    "float8_e4m3fn": "f8e4m3",
    "float8_e5m2": "f8e5m2",
}
_BARE = {"bf16": "u16", "f8e4m3": "u8", "f8e5m2": "u8"}


def _module() -> Any:
    """Returns NumPy. Programs that only use gradwire.torch may not have it installed."""
    import numpy

    return numpy


def as_numpy(array: Any) -> np.ndarray:
    """Returns a NumPy array on the same memory, or a new one with the values of a list."""
    np = _module()
    if isinstance(array, np.ma.MaskedArray):
        raise InvalidRequest(
            "masked arrays can't be exchanged, because the mask would be lost: call filled() first",
            kind="invalid",
        )
    if isinstance(array, np.ndarray):
        return array
    if hasattr(array, "__dlpack__"):
        try:
            return np.from_dlpack(array)
        except (BufferError, RuntimeError, TypeError) as error:
            kind = f"{type(array).__module__}.{type(array).__qualname__}"
            raise InvalidRequest(
                f"this {kind} can't be read through DLPack: {error}; for PyTorch tensors whose "
                "dtype NumPy does not support, use gradwire.torch",
                kind="invalid",
            ) from error
    return np.asarray(array)


def _element(dtype: np.dtype) -> str:
    name = _NAMES.get(dtype.name)
    if name is None or not dtype.isnative:
        raise InvalidRequest(
            f"arrays of {dtype} can't be exchanged: supported dtypes are {', '.join(_NAMES)}",
            kind="invalid",
        )
    return name


class NumpyAdapter:
    """Adapter whose results are NumPy arrays, or have the argument's type if it supports DLPack."""

    def describe(self, array: Any) -> tuple[str, tuple[int, ...]]:
        array = as_numpy(array)
        return _element(array.dtype), array.shape

    def _memory(self, buffer: _native.Buffer, dtype: np.dtype) -> np.ndarray:
        bare = _BARE.get(buffer.dtype)
        if bare is None:
            return _module().asarray(buffer)
        return _module().asarray(buffer.view(0, bare, list(buffer.shape))).view(dtype)

    def load(self, array: Any, buffer: _native.Buffer) -> None:
        array = as_numpy(array)
        _module().copyto(self._memory(buffer, array.dtype), array, casting="no")

    def check_writable(self, array: Any) -> None:
        own = as_numpy(array)
        if own is not array and not hasattr(array, "__dlpack__"):
            raise InvalidRequest(
                f"{type(array).__name__} objects can't be changed in place: use a NumPy array",
                kind="invalid",
            )
        if not own.flags.writeable:
            raise InvalidRequest("this array is read-only", kind="invalid")

    def use(self, array: Any) -> Use:
        """Begins an in-place operation. The use has a buffer if the array was made by ``empty``."""
        self.check_writable(array)
        buffer = _shared(array) if isinstance(array, _module().ndarray) else None
        return COPIED if buffer is None else Use(buffer)

    def written(self, array: Any) -> None:
        """Does nothing: the array shares the memory."""

    def view(self, buffer: _native.Buffer, like: Any) -> Any:
        if isinstance(like, _module().ndarray) or not hasattr(like, "__dlpack__"):
            return self._memory(buffer, as_numpy(like).dtype)
        # PyTorch tensors have no namespace method, but their module has ``from_dlpack``.
        named = hasattr(like, "__array_namespace__")
        module = (
            like.__array_namespace__()
            if named
            else sys.modules[type(like).__module__.partition(".")[0]]
        )
        if module is _module():
            # Before NumPy 2, ``from_dlpack`` returns read-only arrays.
            return self._memory(buffer, as_numpy(like).dtype)
        return module.from_dlpack(buffer)

    def store(self, buffer: _native.Buffer, into: Any) -> None:
        array = as_numpy(into)
        _module().copyto(array, self._memory(buffer, array.dtype), casting="no")


def _shared(array: np.ndarray) -> _native.Buffer | None:
    """Returns the memory of an array of ``empty``, or of a part of it; None for other arrays."""
    owner: Any = array
    while isinstance(owner, _module().ndarray):
        owner = owner.base
    if not isinstance(owner, _native.Buffer) or array.nbytes == 0 or not array.dtype.isnative:
        return None
    name = _NAMES.get(array.dtype.name)
    flags = array.flags
    if name is None or not (flags.c_contiguous and flags.writeable and flags.aligned):
        return None
    if not _world.session().owns(owner):
        return None  # from an earlier session
    first = array.ctypes.data - owner.address
    whole = owner.view(0, "u8", [owner.nbytes]).view(first, "u8", [array.nbytes])
    return whole.view(0, name, list(array.shape))


def empty(shape: int | tuple[int, ...], dtype: Any = "float32") -> np.ndarray:
    """Creates an uninitialized array in shared memory.

    ``allreduce_`` and the other in-place reductions use it, or contiguous parts of it, without a
    copy. The array stays usable after ``shutdown()``, but later sessions copy it.

    Args:
        shape: The dimensions, outermost first, or a number for a single dimension.
        dtype: Any dtype that NumPy accepts. The default is ``float32``.

    Returns:
        The array.

    Raises:
        NotInitialized: ``init()`` has not been called.
        InvalidRequest: The element type is unknown, or the shape is too large.
        OutOfResources: Not enough shared memory is available.

    Example:
        ```python
        gradient = gw.empty((1024, 1024))
        compute(out=gradient)
        gw.allreduce_(gradient)
        ```
    """
    np = _module()
    dtype = np.dtype(dtype)
    name = _element(dtype)
    dims = [shape] if isinstance(shape, int) else [int(dim) for dim in shape]
    buffer = _world.session().buffer(name, dims)
    return collectives.adapter._memory(buffer, dtype)  # type: ignore[attr-defined]


collectives: Collectives[Any] = Collectives(NumpyAdapter())
