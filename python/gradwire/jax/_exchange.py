"""Operations in programs of XLA: a start for each array, and one end for all arrays of a call.

``start`` submits an operation and returns a token; ``done`` takes the tokens of all starts of its
call. Both are functions of the native module that XLA calls without Python
(docs/decisions/043-jax.md). Both have side effects, so XLA neither drops nor repeats them, and both
reuse the memory of their arrays. ``_order`` lets calls of one name run one after the other.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.custom_batching import custom_vmap

from gradwire import _native, _world
from gradwire.jax import _order, _tracing

# The number of an operation, in two parts: XLA may have no 64-bit integers.
_TOKEN = jax.ShapeDtypeStruct((2,), np.uint32)


@dataclass(frozen=True)
class Plan:
    """A call of a collective, without its arrays. Compiled functions are kept for each plan.

    Attributes:
        collective: Its name in the native module.
        prefix: The name of the call: calls of one name run one after the other.
        names: The name of the operation on each array.
        members: The number of ranks that take part.
        position: The position of this rank among them.
        process_set: The id of the process set.
        op: The name of the reduction.
        prescale: The factor for each contribution.
        postscale: The factor for the result.
        root: The rank that a broadcast comes from.
        root_position: Its position among the members.
        is_step: Whether the call ends a training step.
        site: The line of the program that makes the call.
        derivatives: How many derivatives of the call are taken already: they have other names.
    """

    collective: str
    prefix: str
    names: tuple[str, ...]
    members: int
    position: int
    process_set: int = 0
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    root_position: int = 0
    is_step: bool = False
    site: str = ""
    derivatives: int = 0

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the result for an array of this shape."""
        if self.collective == "allgather":
            rows = shape or (1,)
            return (rows[0] * self.members, *rows[1:])
        if self.collective == "reducescatter":
            each, more = divmod(shape[0], self.members)
            return (each + (self.position < more), *shape[1:])
        return shape

    @property
    def in_place(self) -> bool:
        """Whether results have the sizes of their arrays."""
        return self.collective not in ("allgather", "reducescatter")


def _start(plan: Plan, name: str, leaves: tuple[Any, ...]) -> tuple[list[Any], Any]:
    """Starts an operation; returns the same arrays, and the token."""
    same = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    # Texts, because XLA's numbers depend on its settings. `repr` keeps all bits of a float.
    texts = {
        "collective": plan.collective,
        "name": name,
        "process_set": str(plan.process_set),
        "op": plan.op,
        "prescale": repr(plan.prescale),
        "postscale": repr(plan.postscale),
        "root": str(plan.root),
        "site": plan.site,
    }
    *kept, token = _order.call(
        "gradwire_start", [*same, _TOKEN], leaves, texts, order=plan.prefix, aliases=len(leaves)
    )
    return kept, token


def _run(plan: Plan, leaves: tuple[Any, ...]) -> tuple[Any, ...]:
    kept: list[Any] = []
    tokens: list[Any] = []
    if plan.collective == "barrier":
        kept, token = _start(plan, plan.names[0], leaves)
        tokens = [token]
    else:
        for name, leaf in zip(plan.names, leaves):
            same, token = _start(plan, name, (leaf,))
            kept += same
            tokens.append(token)
    results = [jax.ShapeDtypeStruct(plan.shape(leaf.shape), leaf.dtype) for leaf in leaves]
    given = kept if plan.in_place else []
    texts = {"tokens": str(len(tokens)), "step": str(int(plan.is_step))}
    ended = _order.call(
        "gradwire_done",
        results,
        [*given, *tokens],
        texts,
        order=plan.prefix,
        aliases=len(given),
    )
    return tuple(ended)


@functools.partial(jax.jit, static_argnums=0)
def exchange(plan: Plan, leaves: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the results of a call, which has at least one array."""

    def refuse(*_: Any) -> Any:
        raise _tracing.in_vmap(plan.collective)

    unmapped: Any = custom_vmap(lambda *leaves: _run(plan, leaves))
    # A function may be compiled first and mapped afterwards.
    unmapped.def_vmap(refuse)
    results: tuple[Any, ...] = unmapped(*leaves)
    return results


def _bind() -> None:
    _native.xla_bind(_world.session())


def _register() -> None:
    """Registers the functions with XLA, and gives them the session."""
    for name, handler in _native.xla_targets().items():
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    if _world.is_rank():
        _bind()
    _world.after_init.append(_bind)
    _world.before_shutdown.append(lambda: _native.xla_bind(None))


_register()
