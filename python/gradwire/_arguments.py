"""Numbers as callers give them: checked before anything is started, and made Python's.

A NumPy number or a tensor of one element is a number, too; 1.5 rows or rank -1 are an InvalidRequest that
names the argument. The native half takes what fits its types, and its own conversions would say less.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

from gradwire._errors import InvalidRequest

_RANKS = 2**32 - 1
_ROWS = 2**63 - 1


def whole(name: str, value: Any, most: int = _RANKS) -> int:
    """A whole number from 0 to ``most``: a rank, a tag, the number of a process set."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number <= most:
        raise InvalidRequest(f"{name}={value!r}: it must be a whole number from 0 to {most}", kind="invalid")
    return number


def wholes(name: str, values: Iterable[Any], most: int = _RANKS) -> list[int]:
    """Whole numbers from 0 to ``most``, such as ranks."""
    try:
        given = list(values)
    except TypeError:
        raise InvalidRequest(f"{name}={values!r}: it must be a list of whole numbers", kind="invalid") from None
    return [whole(f"{name}[{at}]", value, most) for at, value in enumerate(given)]


def rows(name: str, values: Iterable[Any] | None) -> list[int] | None:
    """How many rows each member gets; None where nothing is said."""
    return None if values is None else wholes(name, values, _ROWS)


def factor(name: str, value: Any) -> float:
    """A number that something is multiplied by."""
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidRequest(f"{name}={value!r}: it must be a finite number", kind="invalid")
    return number
