"""Where a call is made: alone, or in a function that JAX traces or maps.

JAX keeps the transformations around a call in a chain of traces, for which it has no public
interface. This is the only module that looks at them. If a release of JAX changes them, calls work
as before, but mistakes are found later, when the program runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from gradwire._errors import InvalidRequest


def _allow_derivatives() -> None:
    """Lets functions with derivatives of their own, and checkpoints, contain calls of XLA's FFI.

    Later releases of JAX allow it themselves.
    """
    try:
        from jax._src import effects, ffi

        effects.custom_derivatives_allowed_effects.add_type(ffi.FfiEffect)
        effects.remat_allowed_effects.add_type(ffi.FfiEffect)
    except (ImportError, AttributeError):
        pass


_allow_derivatives()
# The names of the calls in each function that is being traced.
_names: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def _chain() -> Iterator[Any]:
    """Returns the traces around this call, the innermost one first."""
    try:
        from jax._src import core

        trace = core.trace_ctx.trace
    except (ImportError, AttributeError):
        return
    while trace is not None:
        yield trace
        trace = getattr(trace, "parent_trace", None)


def in_vmap(what: str) -> InvalidRequest:
    """Returns the error of a call in a function that ``vmap`` maps."""
    return InvalidRequest(
        f"gradwire.jax.{what} can't be called in a function that vmap maps: call it outside, with "
        "the whole batch",
        kind="invalid",
    )


def check(what: str) -> None:
    """Refuses a call in a place where it can't work.

    Args:
        what: The name of the function that is called.

    Raises:
        InvalidRequest: The call is in ``vmap``, ``pmap`` or ``shard_map``, or this process has
            several devices.
    """
    kinds = {type(trace).__name__ for trace in _chain()}
    if "BatchTrace" in kinds:
        raise in_vmap(what)
    mesh = jax.sharding.get_abstract_mesh()
    if kinds & {"ShardMapTrace", "MapTrace"} or mesh.manual_axes:
        raise InvalidRequest(
            f"gradwire.jax.{what} can't be called in a function that pmap or shard_map maps: call "
            "it outside, or use jax.lax's collectives for the devices of a mesh",
            kind="invalid",
        )
    if jax.local_device_count() > 1:
        raise InvalidRequest(
            f"gradwire.jax.{what} needs one device in each process, and this one has "
            f"{jax.local_device_count()}: start one rank for each device",
            kind="invalid",
        )


def claim(names: Iterable[str]) -> None:
    """Refuses a name that another call in the same traced function has.

    Raises:
        InvalidRequest: Another call has one of the names.
    """
    frames = [trace for trace in _chain() if type(trace).__name__ == "DynamicJaxprTrace"]
    known = _names.setdefault(frames[0], set()) if frames else set()
    for name in names:
        if name in known:
            raise InvalidRequest(
                f"two calls in one compiled function have the name '{name}': give each of them "
                "another name=",
                kind="invalid",
            )
        known.add(name)
