"""Where a call is made: alone, or in a function that JAX traces or maps.

JAX keeps the transformations around a call in a chain of traces, for which it has no public
interface. Only this module looks at them. If a release of JAX changes them, calls work
as before, but mistakes are found later, when the program runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from gradwire._errors import InvalidRequest


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
