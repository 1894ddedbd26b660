"""Tensors for random calls, of any element type and layout, and results of reductions."""

from __future__ import annotations

import functools
import random
import zlib
from collections.abc import Callable, Sequence

import torch

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
NARROW = [getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)]
UNSIGNED = [getattr(torch, name) for name in ("uint16", "uint32", "uint64") if hasattr(torch, name)]
# Unknown dtypes are sent as bytes.
STRANGE = [
    getattr(torch, name) for name in ("float8_e4m3fnuz", "float8_e8m0fnu") if hasattr(torch, name)
]
REDUCED = [*FLOATS, *INTEGERS, *NARROW, *UNSIGNED, torch.bool, *COMPLEX]
MOVED = [*REDUCED, *STRANGE]

Shape = tuple[int, ...]


def values(key: str, dtype: torch.dtype, shape: Shape) -> torch.Tensor:
    """Small numbers that every element type can represent; their sums and products are exact."""
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    numbers = torch.randint(0, 3, shape, generator=generator)
    if dtype in COMPLEX:
        return torch.complex(
            numbers.double(), numbers.flip(0).double() if shape else numbers.double()
        ).to(dtype)
    if dtype in STRANGE:
        return torch.exp2(numbers.float()).to(dtype)
    return (numbers.float() if dtype in NARROW else numbers).to(dtype)


def shape_of(chance: random.Random) -> Shape:
    """A random shape, from no elements to a few thousand, rarely more."""
    if chance.random() < 0.03:
        return (chance.randint(10_000, 200_000),)
    return tuple(
        chance.choice([0, 1, 2, 3, 5, 8]) for _ in range(chance.choice([0, 1, 1, 2, 2, 3, 4]))
    )


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's elements."""
    return (
        tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    )


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors have the same bits."""
    return (
        got.dtype == expected.dtype
        and got.shape == expected.shape
        and torch.equal(raw(got), raw(expected))
    )


def _plain(shape: Shape) -> tuple[Shape, Callable[[torch.Tensor], torch.Tensor]]:
    return shape, lambda base: base


def _offset(shape: Shape) -> tuple[Shape, Callable[[torch.Tensor], torch.Tensor]]:
    number = functools.reduce(lambda a, b: a * b, shape, 1)
    return (number + 5,), lambda base: base[3 : 3 + number].view(shape)


def _transposed(shape: Shape) -> tuple[Shape, Callable[[torch.Tensor], torch.Tensor]]:
    return shape[::-1], lambda base: base.permute(tuple(reversed(range(len(shape)))))


def _gaps(shape: Shape) -> tuple[Shape, Callable[[torch.Tensor], torch.Tensor]]:
    return (*shape, 2), lambda base: base[..., 1]


LAYOUTS = {"plain": _plain, "offset": _offset, "transposed": _transposed, "gaps": _gaps}


class Place:
    """A tensor in memory whose complete content after a call is known."""

    def __init__(self, given: torch.Tensor, chance: random.Random) -> None:
        layout = chance.choice(list(LAYOUTS))
        shape, self._cut = LAYOUTS[layout](tuple(given.shape))
        mode = chance.choice(["", "", "", "leaf", "inference"])
        with torch.inference_mode(mode == "inference"):
            self._base = values(f"around {layout}", given.dtype, shape)
            self.tensor = self._cut(self._base)
            self.tensor.copy_(given)
        if mode == "leaf" and layout == "plain" and given.dtype in FLOATS:
            self.tensor = self._base.requires_grad_()
        self._before = self._base.detach().clone()
        self._version = None if mode == "inference" else self.tensor._version
        self.what = f"{given.dtype} {list(given.shape)} {layout} {mode}"

    def check(self, expected: torch.Tensor | None, close: bool = False) -> None:
        """Checks the memory; ``expected`` is None if nothing should have been written."""
        wanted = self._before.clone()
        if expected is not None:
            assert expected.shape == self.tensor.shape and expected.dtype == self.tensor.dtype, (
                self.what
            )
            if close:
                wide = torch.complex128 if expected.is_complex() else torch.float64
                torch.testing.assert_close(
                    self.tensor.detach().to(wide), expected.to(wide), rtol=0.1, atol=0.01
                )
                return
            self._cut(wanted).copy_(expected)
        assert same(self._base, wanted), f"{self.what}: {self.tensor} is not {expected}"
        if self._version is not None:
            assert self.tensor._version == self._version, f"{self.what}: autograd sees a change"

    def holds(self, expected: torch.Tensor) -> bool:
        """Whether the memory contains the result."""
        return same(self.tensor, expected)


OPERATIONS = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def operation_for(dtype: torch.dtype, chance: random.Random) -> str:
    """Draws a reduction that an element type supports."""
    if dtype == torch.bool:
        return chance.choice(["MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"])
    if dtype in COMPLEX:
        return chance.choice(["SUM", "AVG"])  # PyTorch refuses the others
    if dtype in INTEGERS or dtype in UNSIGNED:
        return chance.choice(["SUM", "AVG", *OPERATIONS])
    return chance.choice(["SUM", "AVG", "PRODUCT", "MIN", "MAX"])


def reduced(parts: Sequence[torch.Tensor], operation: str) -> torch.Tensor:
    """The expected reduction of all parts."""
    dtype = parts[0].dtype
    if dtype == torch.bool:
        wide = [part.clone() for part in parts]
        operation = {"PRODUCT": "BAND", "MIN": "BAND", "MAX": "BOR"}.get(operation, operation)
        return functools.reduce(OPERATIONS[operation], wide)
    whole = dtype in INTEGERS or dtype in UNSIGNED
    wide = [
        part.to(torch.int64 if whole else torch.complex128 if dtype in COMPLEX else torch.float64)
        for part in parts
    ]
    if operation == "AVG":
        total = functools.reduce(torch.add, wide)
        average = (
            torch.div(total, len(parts), rounding_mode="trunc") if whole else total / len(parts)
        )
        return average.to(dtype)
    return functools.reduce(OPERATIONS[operation], wide).to(dtype)
