"""The collectives of ``gradwire.jax`` on trees of arrays, and functions that use them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from gradwire import _native, _world
from gradwire._arguments import whole_number
from gradwire._errors import InvalidRequest
from gradwire._ops import OPS, Adasum, ReduceOp, factors, reduce_op
from gradwire._process_sets import ProcessSet, global_process_set, native_set
from gradwire.jax import _derivatives, _errors, _tracing
from gradwire.jax._exchange import Plan

if TYPE_CHECKING:
    import optax

# As in proto/src/types.rs.
_MAX_NAME = 1024
_WIRE = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
_NAMES = {
    *("float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("bool", "complex64", "complex128"),
}


def _array(leaf: Any, path: str) -> Any:
    """Returns a leaf as an array that can be exchanged."""
    try:
        array = jnp.asarray(leaf)
    except TypeError as error:
        what = f"the leaf {path}" if path else "the given value"
        raise InvalidRequest(f"{what} isn't an array: {error}", kind="invalid") from error
    if array.dtype.name not in _NAMES:
        known = ", ".join(sorted(_NAMES))
        raise InvalidRequest(
            f"arrays of {array.dtype} can't be exchanged: supported dtypes are {known}",
            kind="invalid",
        )
    return array


def _members(process_set: ProcessSet) -> tuple[int, list[int], int]:
    """Returns the id, the ranks and this rank's position of a process set."""
    native = native_set(process_set)
    if native is None:
        return 0, list(range(_world.size())), _world.rank()
    if native.position is None:
        raise InvalidRequest(
            f"this rank is not a member of {native}: only members can use it", kind="invalid"
        )
    _native.xla_know(native)
    return native.id, native.ranks, native.position


def _call(
    collective: str,
    tree: Any,
    name: str | None,
    process_set: ProcessSet,
    *,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    root_rank: int | None = None,
    compression: str | None = None,
    is_step: bool = False,
    what: str = "",
) -> Any:
    """Runs a collective on all arrays of a tree, and returns a tree of the results."""
    what = what or collective
    if _world.is_elastic():
        raise InvalidRequest(
            f"gradwire.jax.{what} can't be used in an elastic job: compiled functions contain the "
            "number of ranks",
            kind="invalid",
        )
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    if not paths:
        return tree
    texts = [jax.tree_util.keystr(path) for path, _ in paths]
    leaves = [_array(leaf, text) for (_, leaf), text in zip(paths, texts)]
    _tracing.check(what)
    number, ranks, position = _members(process_set)
    prefix = collective if name is None else f"{collective}.{name}"
    names = tuple(prefix + text for text in texts)
    for each in names:
        if len(each.encode()) > _MAX_NAME:
            raise InvalidRequest(
                f"the name '{each[:60]}…' is longer than {_MAX_NAME} bytes", kind="invalid"
            )
    given_numbers = {
        "root_rank": (root_rank, "a whole number"),
        "prescale_factor": (prescale_factor, "a number"),
        "postscale_factor": (postscale_factor, "a number"),
        "op": (op, "a reduction"),
    }
    for argument, (value, kind) in given_numbers.items():
        _check_known(argument, value, kind)
    before, after = factors(prescale_factor, postscale_factor)
    reduction = _reduction(op) if collective in ("allreduce", "reducescatter") else ""
    root = whole_number("root_rank", root_rank) if collective == "broadcast" else 0
    if collective == "broadcast" and root not in ranks:
        raise InvalidRequest(
            f"root_rank={root}: it must be one of the ranks {ranks}", kind="invalid"
        )
    if collective in ("reducescatter", "alltoall"):
        for leaf, text in zip(leaves, texts):
            _check_rows(what, leaf, text, len(ranks) if collective == "alltoall" else 1)
    plan = Plan(
        collective=collective,
        prefix=prefix,
        names=(prefix,) if collective == "barrier" else names,
        members=len(ranks),
        position=position,
        process_set=number,
        op=reduction,
        prescale=before,
        postscale=after,
        root=root,
        root_position=ranks.index(root) if root in ranks else 0,
        is_step=is_step,
        site=_native.xla_site(),
    )
    given, wide = _compressed(leaves, compression)
    run = _derivatives.extremum if reduction in ("min", "max") else _derivatives.collective
    results = run(plan, tuple(given))
    back = [each.astype(dtype) if dtype else each for each, dtype in zip(results, wide)]
    return structure.unflatten(back)


def _check_known(argument: str, value: Any, kind: str) -> None:
    """Refuses an argument whose value the compiled function only has when it runs."""
    if isinstance(value, jax.core.Tracer):
        raise InvalidRequest(
            f"{argument} is an array that is traced: it must be {kind} that is known when the "
            "function is traced, such as an argument in jax.jit's static_argnames",
            kind="invalid",
        )


def _reduction(op: ReduceOp | int | None) -> str:
    """Returns the name of a reduction."""
    try:
        chosen = reduce_op(op)
    except InvalidRequest:
        usable = [each.name.title().replace("-", "") for each in OPS if each != Adasum]
        names = ", ".join(f"gradwire.jax.{each}" for each in usable)
        raise InvalidRequest(
            f"op={op!r} is not a reduction: use one of {names}", kind="invalid"
        ) from None
    if chosen == Adasum:
        raise InvalidRequest("gradwire.jax has no Adasum: use Average", kind="invalid")
    return chosen.name


def _check_rows(what: str, leaf: Any, path: str, members: int) -> None:
    if leaf.ndim == 0 or leaf.shape[0] % members:
        wanted = "at least one dimension" if members == 1 else f"a multiple of {members} rows"
        raise InvalidRequest(
            f"gradwire.jax.{what} splits the rows of arrays: {path or 'this one'} of shape "
            f"{leaf.shape} needs {wanted}",
            kind="invalid",
        )


def _compressed(leaves: list[Any], compression: str | None) -> tuple[list[Any], list[Any]]:
    """Returns the arrays as they are sent, and the dtypes that their results need again."""
    if compression is None:
        return leaves, [None] * len(leaves)
    if compression not in _WIRE:
        raise InvalidRequest(
            f"compression={compression!r}: it must be None or one of {', '.join(_WIRE)}",
            kind="invalid",
        )
    short = _WIRE[compression]
    is_wide = [
        jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize > 2 for leaf in leaves
    ]
    given = [leaf.astype(short) if wide else leaf for leaf, wide in zip(leaves, is_wide)]
    return given, [leaf.dtype if wide else None for leaf, wide in zip(leaves, is_wide)]


def allreduce(
    tree: Any,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: str | None = None,
) -> Any:
    """Reduces the arrays of a tree over all ranks.

    Args:
        tree: An array, or a tree of arrays, of any supported dtypes and shapes. All ranks pass the
            same structure, dtypes and shapes.
        name: Identifies the call across ranks, together with the path of each array in the tree.
            Calls of one name in a compiled function run one after the other.
        op: The reduction; ``Average`` by default. Averages of integers are truncated.
        prescale_factor: A finite factor for each contribution. Integer products are truncated.
        postscale_factor: A finite factor for the result.
        process_set: The participating ranks. The default is all ranks.
        compression: ``bf16`` or ``fp16`` exchanges wider floats in that type; sums are computed in
            f32.

    Returns:
        A tree of the same structure, dtypes and shapes.

    Raises:
        InvalidRequest: An argument is invalid, or the call is in a place where it can't work.
        NotInitialized: ``init()`` has not been called.

    Example:
        ```python
        @jax.jit
        def mean_loss(loss):
            return gw.allreduce(loss, name="loss")
        ```
    """
    return _call(
        "allreduce",
        tree,
        name,
        process_set,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        compression=compression,
    )


def allgather(
    tree: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenates all ranks' arrays along the first dimension.

    Args:
        tree: An array, or a tree of arrays. All ranks pass the same structure, dtypes and shapes.
            An array without dimensions counts as one row.
        name: Identifies the call across ranks, together with the path of each array in the tree.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        A tree of the same structure. Its arrays have the rows of all ranks, in rank order.

    Raises:
        InvalidRequest: An argument is invalid, or the call is in a place where it can't work.
        NotInitialized: ``init()`` has not been called.
    """
    return _call("allgather", tree, name, process_set)


def broadcast(
    tree: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Copies the root's arrays to every rank.

    Args:
        tree: An array, or a tree of arrays. All ranks pass the same structure, dtypes and shapes.
        root_rank: The global rank whose arrays all ranks receive.
        name: Identifies the call across ranks, together with the path of each array in the tree.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        A tree of the same structure with the root's elements.

    Raises:
        InvalidRequest: An argument is invalid, or the call is in a place where it can't work.
        NotInitialized: ``init()`` has not been called.
    """
    return _call("broadcast", tree, name, process_set, root_rank=root_rank)


def reducescatter(
    tree: Any,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduces arrays over all ranks and splits the results along the first dimension.

    Args:
        tree: An array, or a tree of arrays, each with at least one dimension. All ranks pass the
            same structure, dtypes and shapes.
        name: Identifies the call across ranks, together with the path of each array in the tree.
        op: The reduction; ``Average`` by default. Averages of integers are truncated.
        prescale_factor: A finite factor for each contribution. Integer products are truncated.
        postscale_factor: A finite factor for the result.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        A tree of the same structure. Its arrays have this rank's rows of the results; if their
        number is not a multiple of the number of ranks, the first ranks receive one more.

    Raises:
        InvalidRequest: An argument is invalid, or the call is in a place where it can't work.
        NotInitialized: ``init()`` has not been called.
    """
    return _call(
        "reducescatter",
        tree,
        name,
        process_set,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )


def alltoall(
    tree: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Splits every rank's arrays along the first dimension and sends each rank its part.

    Args:
        tree: An array, or a tree of arrays. The number of rows of each is a multiple of the number
            of ranks. All ranks pass the same structure, dtypes and shapes.
        name: Identifies the call across ranks, together with the path of each array in the tree.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        A tree of the same structure, dtypes and shapes. Its arrays have the rows from all ranks, in
        rank order.

    Raises:
        InvalidRequest: An argument is invalid, or the call is in a place where it can't work.
        NotInitialized: ``init()`` has not been called.
    """
    return _call("alltoall", tree, name, process_set)


def barrier(
    tree: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Waits until every rank of the process set has reached it.

    XLA computes in any order that the data allows. So in a compiled function, pass as ``tree`` the
    arrays that must be computed first, and use the result in later computations.

    Args:
        tree: What the barrier waits for: an array, or a tree of arrays. None in a program that is
            not compiled.
        name: Identifies the call across ranks.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        The tree, which is available when all ranks have reached the barrier.

    Raises:
        InvalidRequest: An argument is invalid, or the call is in a place where it can't work.
        NotInitialized: ``init()`` has not been called.
        GradwireError: The barrier failed, and was called without a tree.
    """
    if tree is not None:
        return _call("barrier", tree, name, process_set)
    try:
        reached = _call("barrier", jnp.zeros((), bool), name, process_set)
        if not isinstance(reached, jax.core.Tracer):
            reached.block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        raise _errors.behind(error) or error from None
    return None


def broadcast_parameters(
    params: Any,
    root_rank: int = 0,
    name: str = "parameters",
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Gives all ranks the root's parameters, or any other state of a training.

    Args:
        params: A tree of arrays and numbers, such as the parameters of a model, the state of an
            optimizer or random keys. All ranks pass the same structure, dtypes and shapes.
        root_rank: The global rank whose values all ranks receive.
        name: Identifies the call across ranks.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        A tree of the same structure with the root's values, as arrays.

    Raises:
        InvalidRequest: An argument is invalid, or the call is in a place where it can't work.
        NotInitialized: ``init()`` has not been called.

    Example:
        ```python
        params = gw.broadcast_parameters(model.init(key, images))
        ```
    """

    def is_key(leaf: Any) -> bool:
        return bool(jnp.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key))

    def bare(leaf: Any) -> Any:
        return jax.random.key_data(leaf) if is_key(leaf) else leaf

    def restored(leaf: Any, found: Any) -> Any:
        if not is_key(leaf):
            return found
        return jax.random.wrap_key_data(found, impl=jax.random.key_impl(leaf))

    sent = jax.tree_util.tree_map(bare, params)
    found = _call(
        "broadcast", sent, name, process_set, root_rank=root_rank, what="broadcast_parameters"
    )
    return jax.tree_util.tree_map(restored, params, found)


def step_gradients(
    gradients: Any,
    name: str,
    op: ReduceOp | int | None,
    process_set: ProcessSet,
    compression: str | None,
) -> Any:
    """Returns the gradients of a step, reduced over all ranks."""
    return _call(
        "allreduce",
        gradients,
        name,
        process_set,
        op=op,
        compression=compression,
        is_step=True,
        what="average_gradients",
    )


def average_gradients(
    name: str = "gradients",
    op: ReduceOp | int | None = None,
    process_set: ProcessSet = global_process_set,
    compression: str | None = None,
) -> optax.GradientTransformation:
    """Returns a transformation of optax that averages gradients over all ranks.

    It comes first in a chain, so that what follows, such as clipping, sees the same gradients on
    all ranks. Each update counts as a training step in the metrics.

    Args:
        name: Identifies the gradients across ranks. Transformations of one name in a compiled
            function run one after the other.
        op: The reduction; ``Average`` by default.
        process_set: The participating ranks. The default is all ranks.
        compression: ``bf16`` or ``fp16`` exchanges wider floats in that type; sums are computed in
            f32.

    Returns:
        The transformation.

    Raises:
        ImportError: optax is not installed.

    Example:
        ```python
        tx = optax.chain(gw.average_gradients(), optax.adam(1e-3))
        ```
    """
    import optax

    def init(params: Any) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        return step_gradients(updates, name, op, process_set, compression), state

    return optax.GradientTransformation(init, update)
