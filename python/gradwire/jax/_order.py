"""The calls of XLA's FFI, in an order for each name.

Two calls of one name in a compiled function must run one after the other, in the same order on all
ranks: otherwise the first call of one rank meets the second one of another. XLA runs calls when
their arrays are ready, which differs between ranks. And equal names can't be refused when they are
traced: JAX does not trace a compiled function again that another one calls twice.

So each name is an ordered effect of JAX. Calls that have it pass a token to each other, through
loops, branches and functions, in the order of the program. Other calls don't wait for them.

JAX has no public interface for effects. If a release changes the private one, calls have no order:
two of one name at a time fail, with an error that says so, or meet the wrong call.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

try:
    from jax._src import dispatch, effects
    from jax.extend.core import Primitive
    from jax.interpreters import mlir

    _Effect: Any = effects.Effect
    _KINDS = (
        effects.ordered_effects,
        effects.lowerable_effects,
        effects.control_flow_allowed_effects,
        effects.custom_derivatives_allowed_effects,
        effects.remat_allowed_effects,
    )
    _RUNS: Any = dispatch.RuntimeTokenSet
    _first_token: Any = _RUNS.get_token_input
    IS_ORDERED = True
except (ImportError, AttributeError):
    _Effect = object
    IS_ORDERED = False


@dataclass(frozen=True)
class Named(_Effect):  # type: ignore[misc]
    """The effect of all calls of this name."""

    name: str


def _primitive(name: str, lowered: Any) -> Any:
    """Returns a primitive for calls of the FFI that have the effect of their name."""
    found = Primitive(name)
    found.multiple_results = True

    def shapes(*_: Any, results: Any, order: str, **__: Any) -> Any:
        return [jax.core.ShapedArray(each.shape, each.dtype) for each in results], {Named(order)}

    found.def_effectful_abstract_eval(shapes)
    # Only jax.disable_jit() runs it alone.
    found.def_impl(functools.partial(dispatch.apply_primitive, found))
    mlir.register_lowering(found, lowered)
    return found


def _rule(target: str, aliases: int) -> Any:
    same = {at: at for at in range(aliases)}
    return jax.ffi.ffi_lowering(target, has_side_effect=True, operand_output_aliases=same)


def _lowered_start(
    ctx: Any, *leaves: Any, target: str, order: str, aliases: int, texts: Any, results: Any
) -> Any:
    """A start waits for the token, so for the end of the last call of this name."""
    del results
    token = ctx.tokens_in.get(Named(order))
    more = ctx.replace(avals_in=[*ctx.avals_in, jax.core.abstract_token])
    found = _rule(target, aliases)(more, *leaves, token, **dict(texts))
    # The other starts of the call don't wait for this one.
    ctx.set_tokens_out(mlir.TokenSet({Named(order): token}))
    return found


def _lowered_done(
    ctx: Any, *leaves: Any, target: str, order: str, aliases: int, texts: Any, results: Any
) -> Any:
    """The end of a call returns the token for the next one."""
    del results
    more = ctx.replace(avals_out=[*ctx.avals_out, jax.core.abstract_token])
    *found, token = _rule(target, aliases)(more, *leaves, **dict(texts))
    ctx.set_tokens_out(mlir.TokenSet({Named(order): token}))
    return found


# For all programs on the same devices: it takes a while to make one.
_tokens: dict[Any, Any] = {}


def _fresh(runs: Any, effect: Any, devices: Any) -> Any:
    """Returns the token with which a program begins.

    JAX would give it that of the last program with this effect. If that one has failed, so would
    all later ones. And programs of one thread run one after the other anyway.
    """
    if not isinstance(effect, Named):
        return _first_token(runs, effect, devices)
    key = tuple(devices)
    if key not in _tokens:
        runs.current_tokens.pop(effect, None)
        _tokens[key] = _first_token(runs, effect, devices)
    return _tokens[key]


_primitives: dict[str, Any] = {}


def _register() -> None:
    """Tells JAX about the effects, and makes the primitives that have them."""
    for kind in _KINDS:
        kind.add_type(Named)
    _RUNS.get_token_input = _fresh
    _primitives["gradwire_start"] = _primitive("gradwire_start", _lowered_start)
    _primitives["gradwire_done"] = _primitive("gradwire_done", _lowered_done)


if IS_ORDERED:
    _register()


def call(
    target: str,
    results: Sequence[jax.ShapeDtypeStruct],
    operands: Sequence[Any],
    texts: Mapping[str, str],
    *,
    order: str,
    aliases: int,
) -> list[Any]:
    """Calls a function that is registered with XLA, and which has side effects.

    Args:
        target: ``gradwire_start`` or ``gradwire_done``.
        results: The shapes and dtypes of the results.
        operands: The arrays for the function.
        texts: Its attributes.
        order: The name of the call: calls of one name run one after the other.
        aliases: How many of the first results reuse the memory of the operand at their place.

    Returns:
        The results.
    """
    if not IS_ORDERED:
        same = {at: at for at in range(aliases)}
        unordered = functools.partial(jax.ffi.ffi_call, has_side_effect=True)
        found = unordered(target, tuple(results), input_output_aliases=same)(*operands, **texts)
        return list(found)
    bound: list[Any] = _primitives[target].bind(
        *operands,
        target=target,
        order=order,
        aliases=aliases,
        texts=tuple(texts.items()),
        results=tuple(results),
    )
    return bound
