"""Random tensors and arrays of every element type and layout, and reductions of Python numbers.

The ranks' tensors are also kept as arrays of Python numbers: integers of any size, 64-bit floats,
complex numbers. Expected results are computed from these, as defined in docs/collectives.md.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch

import gradwire as gw

Numbers = Any  # an array of Python numbers

# Bits and signedness of integers; unit roundoff and smallest positive number of floats.
INTEGERS = {"int8": (8, True), "uint8": (8, False), "int16": (16, True), "uint16": (16, False)}
INTEGERS |= {"int32": (32, True), "uint32": (32, False), "int64": (64, True), "uint64": (64, False)}
FLOATS = {"float64": (2**-53, 0.0), "float32": (2**-24, 2**-149), "float16": (2**-11, 2**-24)}
FLOATS |= {
    "bfloat16": (2**-8, 2**-133),
    "float8_e4m3fn": (2**-4, 2**-9),
    "float8_e5m2": (2**-3, 2**-16),
}
COMPLEX = {"complex64": "float32", "complex128": "float64"}
OF_TORCH = [name for name in (*INTEGERS, *FLOATS, *COMPLEX, "bool") if hasattr(torch, name)]
OF_NUMPY = [*INTEGERS, "float64", "float32", "float16", *COMPLEX, "bool"]
BITS = {"bit-and": int.__and__, "bit-or": int.__or__, "bit-xor": int.__xor__}


def numbers(dice: random.Random, kind: str, shape: Sequence[int], product: bool) -> Numbers:
    """Random numbers in a type's range; factors of a product are near 1."""

    def one() -> Any:
        if kind in INTEGERS:
            bits, signed = INTEGERS[kind]
            number = dice.getrandbits(bits) >> dice.choice([0, 0, bits // 2, bits - 3])
            return wrapped(kind, -number if signed and dice.random() < 0.3 else number)
        if kind == "bool":
            return dice.random() < 0.5
        float_ = (
            dice.uniform(0.75, 1.25)
            if product
            else dice.choice([dice.uniform(-2, 2), float(dice.randint(-2, 2))])
        )
        return complex(float_, dice.uniform(-2, 2)) if kind in COMPLEX else float_

    made = np.empty(math.prod(shape), object)
    made[:] = [one() for _ in range(made.size)]
    return made.reshape(shape)


def wrapped(kind: str, number: int) -> int:
    """An integer, wrapped around to the range of a type."""
    bits, signed = INTEGERS[kind]
    number &= (1 << bits) - 1
    return number - (1 << bits) if signed and number >> (bits - 1) else number


def tensor_of(kind: str, given: Numbers) -> torch.Tensor:
    flat = given.ravel().tolist()
    if kind in INTEGERS:
        signed = torch.tensor([wrapped("int64", number) for number in flat], dtype=torch.int64)
        made = signed.view(torch.uint64) if kind == "uint64" else signed.to(getattr(torch, kind))
    else:
        wide = (
            torch.bool if kind == "bool" else torch.complex128 if kind in COMPLEX else torch.float64
        )
        made = torch.tensor(flat, dtype=wide).to(getattr(torch, kind))
    return made.reshape(given.shape)


def array_of(kind: str, given: Numbers) -> np.ndarray:
    return np.array(given.ravel().tolist(), kind).reshape(given.shape)


def numbers_of(given: Any) -> Numbers:
    """The elements of a tensor or an array as Python numbers."""
    if isinstance(given, torch.Tensor):
        given = given.detach()
        kind, shape = str(given.dtype).removeprefix("torch."), given.shape
        if kind == "uint64":
            flat = [
                number & (2**64 - 1)
                for number in given.contiguous().view(torch.int64).flatten().tolist()
            ]
        elif kind in INTEGERS:
            flat = given.to(torch.int64).flatten().tolist()
        elif kind in FLOATS and kind != "float64":
            flat = given.to(torch.float32).double().flatten().tolist()
        else:
            flat = given.flatten().tolist()
    else:
        flat, shape = given.ravel().tolist(), given.shape
    made = np.empty(len(flat), object)
    made[:] = flat
    return made.reshape(tuple(shape))


def laid_out(dice: random.Random, given: Any) -> Any:
    """The same elements in another layout: transposed, with gaps, reversed, or expanded."""
    is_tensor = isinstance(given, torch.Tensor)
    shape = tuple(given.shape)
    form = dice.choice(["plain", "plain", "transposed", "gaps", "reversed"])
    axes = list(range(len(shape)))
    if form == "transposed" and len(shape) > 1:
        dice.shuffle(axes)
        back = [axes.index(axis) for axis in range(len(shape))]
        if is_tensor:
            return given.permute(axes).contiguous().permute(back)
        return given.transpose(axes).copy().transpose(back)
    if form == "gaps" and shape:
        wide = (*shape[:-1], 2 * shape[-1] + 1)
        # PyTorch 2.2 can't create float8 zeros.
        made = torch.zeros(wide).to(given.dtype) if is_tensor else np.zeros(wide, given.dtype)
        part = made[..., 1::2]
        if is_tensor:
            part.copy_(given)
        else:
            part[...] = given
        return part
    if form == "reversed" and shape and not is_tensor:
        return given[::-1].copy()[::-1]
    return given


def scaled(kind: str, number: Any, factor: float, divisor: int = 1) -> Any:
    """A contribution or a result, multiplied by a factor and divided."""
    if kind not in INTEGERS:
        return number * factor / divisor
    if factor == 1.0:
        return number
    bits, signed = INTEGERS[kind]
    least, most = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    product = float(number) * factor / divisor
    return (
        min(max(math.trunc(product), least), most)
        if math.isfinite(product)
        else (most if product > 0 else least)
    )


def _combined(kind: str, op: str) -> Callable[[Any, Any], Any]:
    if op in BITS:
        return BITS[op] if kind in INTEGERS else lambda a, b: bool(BITS[op](int(a), int(b)))
    if kind == "bool":
        return (lambda a, b: a or b) if op in ("sum", "max") else (lambda a, b: a and b)
    if op in ("min", "max"):
        return min if op == "min" else max
    times = op == "product"
    if kind in INTEGERS:
        return lambda a, b: wrapped(kind, a * b if times else a + b)
    return lambda a, b: a * b if times else a + b


def reduced(
    kind: str, op: gw.ReduceOp, given: Sequence[Numbers], before: float, after: float
) -> tuple[Numbers, Any]:
    """The result of a reduction, and the maximum allowed error; zero if nothing is rounded."""
    combine, count = _combined(kind, op.name), len(given)
    divisor = count if op == gw.Average else 1
    result, bound = np.empty(given[0].shape, object), np.zeros(given[0].shape)
    for at in np.ndindex(*given[0].shape):
        terms = [scaled(kind, one[at], before) for one in given]
        whole = reduce(combine, terms)
        if kind in INTEGERS and after == 1.0:
            # The division truncates.
            result[at] = abs(whole) // divisor * (1 if whole >= 0 else -1)
        elif kind in INTEGERS:
            result[at] = scaled(kind, whole, after, divisor)
        elif kind == "bool":
            result[at] = bool(whole)
        else:
            result[at] = scaled(kind, whole, after, divisor)
            if op.name in ("min", "max") and before == after == 1.0:
                continue
            unit, smallest = FLOATS[COMPLEX.get(kind, kind)]
            sizes = [abs(term) for term in terms]
            size = math.prod(sizes) if op.name == "product" else sum(sizes) / divisor
            steps = 2 * count + 4
            bound[at] = steps * (unit * 1.1 * size * abs(after) + smallest * max(1.0, abs(after)))
    return result, bound


def compare(result: Any, kind: str, expected: Numbers, bound: Any = None) -> None:
    """Fails if a result has a wrong type, shape or value."""
    assert str(result.dtype).removeprefix("torch.") == kind, (result.dtype, kind)
    assert tuple(result.shape) == expected.shape, (tuple(result.shape), expected.shape)
    found = numbers_of(result)
    for at in np.ndindex(*expected.shape):
        within = 0 if bound is None else bound[at]
        off = (
            abs(found[at] - expected[at]) if kind != "bool" else int(found[at] is not expected[at])
        )
        assert off <= within, f"element {at} is {found[at]!r}, not {expected[at]!r} within {within}"
