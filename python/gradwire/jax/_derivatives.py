"""The collectives as functions that JAX can differentiate.

Their derivatives are those of ``gradwire.torch``, and consist of such functions as well, so they
can be differentiated again. All ranks make the same calls, even if their part of a gradient is
zero.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradwire.jax._exchange import Plan, exchange

Arrays = tuple[Any, ...]


@jax.tree_util.register_static
@dataclass(frozen=True)
class Shapes:
    """The shapes of the arrays of a call: for the backward pass, without the arrays."""

    all: tuple[tuple[int, ...], ...]


def _is_inexact(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def _back(plan: Plan, collective: str, **changes: Any) -> Plan:
    """Returns the plan of the call in the backward pass.

    If a function that contains a gradient is differentiated, the call has another backward pass:
    its second derivative, whose names end in ``.backward.2``. So these names don't depend on the
    order in which JAX traces the passes, nor on what this rank has traced before, and the passes
    need not wait for each other.
    """
    ending = f".backward.{plan.derivatives + 1}" if plan.derivatives else ".backward"
    return replace(
        plan,
        collective=collective,
        prefix=plan.prefix + ending,
        names=tuple(name + ending for name in plan.names),
        is_step=False,
        derivatives=0,
        **changes,
    )


def _scaled(leaf: Any, factor: float) -> Any:
    """Returns the product, computed at least in f32 and rounded once."""
    if factor == 1.0:
        return leaf
    wide = jnp.promote_types(leaf.dtype, jnp.float32) if leaf.dtype.itemsize < 4 else leaf.dtype
    return (leaf.astype(wide) * factor).astype(leaf.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def collective(plan: Plan, leaves: Arrays) -> Arrays:
    """Returns the results of a call; all of its arrays are exchanged."""
    return exchange(replace(plan, derivatives=0), leaves)


def _forward(plan: Plan, leaves: Arrays) -> tuple[Arrays, tuple[Shapes, Arrays]]:
    # What differentiates this function again takes one more derivative of the call.
    results = collective(replace(plan, derivatives=plan.derivatives + 1), leaves)
    masks: Arrays = ()
    if plan.op in ("min", "max"):
        # Whether this rank has the extremum of all ranks.
        pairs = zip(leaves, results)
        masks = tuple((own == most) | ((own != own) & (most != most)) for own, most in pairs)
    return results, (Shapes(tuple(leaf.shape for leaf in leaves)), masks)


def _backward(plan: Plan, saved: tuple[Shapes, Arrays], gradients: Arrays) -> tuple[Arrays]:
    shapes, masks = saved
    # Arrays of integers have no gradients.
    chosen = [gradient.dtype != jax.dtypes.float0 for gradient in gradients]
    given = _taken(gradients, chosen)
    found: Iterator[Any] = iter(())
    if given:
        some = Shapes(_taken(shapes.all, chosen))
        found = iter(_gradients(_of(plan, chosen), some, _taken(masks, chosen), given))
    none = jax.dtypes.float0
    pairs = zip(chosen, shapes.all)
    return (tuple(next(found) if take else np.zeros(shape, none) for take, shape in pairs),)


collective.defvjp(_forward, _backward)


def _taken(values: tuple[Any, ...], chosen: list[bool]) -> tuple[Any, ...]:
    return tuple(value for value, take in zip(values, chosen) if take)


def _of(plan: Plan, chosen: list[bool]) -> Plan:
    """Returns the plan for some of the arrays."""
    if plan.collective == "barrier":
        return plan
    return replace(plan, names=_taken(plan.names, chosen))


def _gradients(plan: Plan, shapes: Shapes, masks: Arrays, given: Arrays) -> Arrays:
    """Returns the gradients of the arrays, which have these shapes."""
    if plan.collective == "barrier":
        return given
    if plan.collective == "alltoall":
        return collective(_back(plan, "alltoall"), given)
    if plan.collective == "broadcast":
        reduced = collective(_back(plan, "allreduce", op="average"), given)
        is_root = plan.position == plan.root_position
        # Zeros that depend on the gradients, so that all ranks take part in a second
        # differentiation.
        return tuple(jnp.where(is_root, each, jnp.zeros_like(each)) for each in reduced)
    if plan.collective == "allgather":
        reduced = collective(_back(plan, "allreduce", op="average"), given)
        return tuple(_own_rows(plan, *pair) for pair in zip(reduced, shapes.all))
    if plan.op not in ("sum", "average", "min", "max"):
        raise NotImplementedError(
            f"gradwire.jax.{plan.collective} with op={plan.op} can't be differentiated"
        )
    factor = plan.prescale * plan.postscale
    if plan.collective == "reducescatter" and plan.op in ("sum", "average"):
        factor *= plan.members if plan.op == "sum" else 1
        scaled = tuple(_scaled(each, factor) for each in given)
        back = _back(plan, "allgather", op="", prescale=1.0, postscale=1.0)
        return _gathered(back, scaled, shapes)
    if plan.collective == "reducescatter":
        raise NotImplementedError(
            f"gradwire.jax.reducescatter with op={plan.op} can't be differentiated"
        )
    if plan.op in ("min", "max"):
        return _to_holders(plan, masks, given)
    return collective(_back(plan, "allreduce", prescale=factor, postscale=1.0), given)


def _own_rows(plan: Plan, gathered: Any, shape: tuple[int, ...]) -> Any:
    rows = shape[0] if shape else 1
    part = jax.lax.slice_in_dim(gathered, plan.position * rows, (plan.position + 1) * rows)
    return part.reshape(shape)


def _gathered(plan: Plan, parts: Arrays, shapes: Shapes) -> Arrays:
    """Gathers the parts of all ranks, of which some may have one row more than others."""
    padded = []
    for part, shape in zip(parts, shapes.all):
        most = -(-shape[0] // plan.members)
        padded.append(jnp.pad(part, [(0, most - part.shape[0])] + [(0, 0)] * (part.ndim - 1)))
    whole = []
    for each, shape in zip(collective(plan, tuple(padded)), shapes.all):
        least, more = divmod(shape[0], plan.members)
        most = least + (more > 0)
        is_kept = np.tile(np.arange(most), plan.members) < np.repeat(
            [least + (rank < more) for rank in range(plan.members)], most
        )
        whole.append(each if more == 0 else each[np.flatnonzero(is_kept)])
    return tuple(whole)


def _to_holders(plan: Plan, masks: Arrays, given: Arrays) -> Arrays:
    """Returns the gradients of a minimum or maximum, which go to the ranks that had it."""
    own = tuple(mask.astype(each.dtype) for mask, each in zip(masks, given))
    back = _back(plan, "allreduce", op="sum", prescale=1.0, postscale=1.0)
    holders = tuple(f"{name}.holders" for name in back.names)
    found = collective(replace(back, names=back.names + holders), (*given, *own))
    totals, counts = found[: len(given)], found[len(given) :]
    counts = tuple(jax.lax.stop_gradient(jnp.maximum(count, 1)) for count in counts)
    return tuple(total * mine / count for total, mine, count in zip(totals, own, counts))


def extremum(plan: Plan, leaves: Arrays) -> Arrays:
    """Returns a minimum or maximum.

    Equal values tell which ranks had it. So floats are scaled here: during the exchange, short ones
    would be rounded differently.
    """
    before, after = plan.prescale, plan.postscale
    if before == after == 1.0 or not all(map(_is_inexact, leaves)):
        return collective(plan, leaves)
    given = tuple(_scaled(leaf, before) for leaf in leaves)
    found = collective(replace(plan, prescale=1.0, postscale=1.0), given)
    return tuple(_scaled(each, after) for each in found)
