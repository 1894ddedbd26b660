"""Checks numeric arguments before an operation starts.

NumPy scalars and one-element tensors are accepted. An invalid value, such as rank -1, raises an
InvalidRequest that names the argument; the native module's conversions would not name it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

from gradwire._errors import InvalidRequest

_RANKS = 2**32 - 1
_ROWS = 2**63 - 1


def whole_number(name: str, value: Any, most: int = _RANKS, *, least: int = 0) -> int:
    """Returns a whole number, such as a rank, a tag or a process set id.

    Raises:
        InvalidRequest: The value is not a whole number in this range.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number > most:
        text = f"a whole number from {least} to {most}"
    elif number < least:
        text = f"a whole number, at least {least}"
    else:
        return number
    raise InvalidRequest(f"{name}={value!r}: it must be {text}", kind="invalid")


def whole_numbers(name: str, values: Iterable[Any], most: int = _RANKS) -> list[int]:
    """Returns a list of whole numbers from 0 to ``most``, such as ranks.

    Raises:
        InvalidRequest: The value is not such a list.
    """
    try:
        given = list(values)
    except TypeError:
        raise InvalidRequest(
            f"{name}={values!r}: it must be a list of whole numbers", kind="invalid"
        ) from None
    return [whole_number(f"{name}[{at}]", value, most) for at, value in enumerate(given)]


def rows(name: str, values: Iterable[Any] | None) -> list[int] | None:
    """Returns the number of rows for each member, or None if ``values`` is None.

    Raises:
        InvalidRequest: They are not whole numbers.
    """
    return None if values is None else whole_numbers(name, values, _ROWS)


def seconds(name: str, value: Any) -> float:
    """Returns a number of seconds. The native module checks its range.

    Raises:
        InvalidRequest: It is not a number.
    """
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise InvalidRequest(
            f"{name}={value!r}: it must be a number of seconds", kind="invalid"
        ) from None


def compressor(value: Any) -> Any:
    """Returns the given compressor if it has ``compress`` and ``decompress``.

    Raises:
        InvalidRequest: It lacks one of them.
    """
    if not (hasattr(value, "compress") and hasattr(value, "decompress")):
        text = f"compression={value!r}: it must be one of hvd.Compression, such as Compression.fp16"
        raise InvalidRequest(text, kind="invalid")
    return value


def compressor_name(value: Any) -> str:
    """Returns the name of a compressor, which may be a class or an object."""
    return str(getattr(value, "__name__", type(value).__name__))


def factor(name: str, value: Any) -> float:
    """Returns a finite scale factor.

    Raises:
        InvalidRequest: It is not a finite number.
    """
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidRequest(f"{name}={value!r}: it must be a finite number", kind="invalid")
    return number
