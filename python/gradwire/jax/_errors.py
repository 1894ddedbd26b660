"""The errors of calls in compiled functions.

XLA passes only texts. So JAX raises a ``JaxRuntimeError`` with Gradwire's text, and Gradwire keeps
the exception itself.
"""

from __future__ import annotations

from typing import Any

import jax

from gradwire import _native, _uncaught
from gradwire._errors import GradwireError


def last_error() -> GradwireError | None:
    """Returns the exception of the last call in a compiled function that has failed.

    Returns:
        The exception, with its kind, rank, host and tensor; None if none has failed.

    Example:
        ```python
        try:
            params = step(params, batch)
        except jax.errors.JaxRuntimeError:
            print(gw.last_error().rank)
            raise
        ```
    """
    found: Any = _native.xla_last_error()
    return found


def behind(error: BaseException) -> GradwireError | None:
    """Returns Gradwire's exception behind one of JAX."""
    own = last_error()
    is_ours = own is not None and isinstance(error, jax.errors.JaxRuntimeError)
    return own if is_ours and str(own) in str(error) else None


def _cause(error: BaseException) -> _native.Failure | None:
    """Returns the failure behind an uncaught exception, for the other ranks (TELL)."""
    own = behind(error)
    return None if own is None else own._failure


_uncaught.causes.append(_cause)
