"""The collectives of ``gradwire.jax``, on all ranks of a job: each test is a collective.

``test_jax.py`` runs this file on several jobs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from launching import AT_NIGHT

import gradwire
import gradwire.jax as gw

jax.config.update("jax_enable_x64", True)

FLOATS = ["float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
KINDS = [*FLOATS, *INTEGERS, "bool", "complex64", "complex128"]
OPS = [gw.Average, gw.Sum, gw.Min, gw.Max, gw.Product]
BITS = [gw.BitAnd, gw.BitOr, gw.BitXor]


@pytest.fixture(scope="module", autouse=True)
def job() -> Iterator[None]:
    gw.init()
    yield
    gw.shutdown()
    assert not gw.is_initialized()


@pytest.fixture(params=["eager", "jit"])
def mode(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """How a function of arrays is called."""
    return jax.jit if request.param == "jit" else lambda function: function


def of_rank(kind: str, shape: tuple[int, ...] = (4, 3), seed: int = 7) -> Any:
    """Returns this rank's array, as one of JAX."""
    random = np.random.default_rng([seed, gw.rank()])
    if kind == "bool":
        return jnp.asarray(random.integers(0, 2, shape).astype(bool))
    if kind in INTEGERS:
        return jnp.asarray(random.integers(0, 5, shape).astype(kind))
    values = random.standard_normal(shape)
    if kind.startswith("complex"):
        values = values + 1j * random.standard_normal(shape)
    return jnp.asarray(values).astype(kind)


def same(found: Any, expected: Any) -> None:
    """Compares types, shapes and bits."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


def ops_of(kind: str) -> list[gw.ReduceOp]:
    if kind == "bool":
        return BITS[:2]
    if kind.startswith("complex"):
        return [gw.Average, gw.Sum]
    return OPS + BITS if kind in INTEGERS else OPS


def every_call(own: Any, kind: str) -> dict[str, Any]:
    """Returns the results of all collectives on an array."""
    odd = own[: 2 * gw.size() - 1]
    found = {
        "allgather": gw.allgather(own, name=kind),
        "alltoall": gw.alltoall(own, name=kind),
        "broadcast": gw.broadcast(own, gw.size() - 1, name=kind),
    }
    for op in ops_of(kind):
        found[f"allreduce {op}"] = gw.allreduce(own, name=f"{kind} {op}", op=op)
        found[f"reducescatter {op}"] = gw.reducescatter(odd, name=f"{kind} {op}", op=op)
    return found


def numpys(array: np.ndarray, kind: str) -> dict[str, Any]:
    """Returns the same results of NumPy's path."""
    odd = array[: 2 * gw.size() - 1]
    found = {
        "allgather": gradwire.allgather(array),
        "alltoall": gradwire.alltoall(array),
        "broadcast": gradwire.broadcast(array, gw.size() - 1),
    }
    for op in ops_of(kind):
        found[f"allreduce {op}"] = gradwire.allreduce(array, op=op)
        found[f"reducescatter {op}"] = gradwire.reducescatter(odd, op=op)
    return found


@pytest.mark.parametrize("kinds", [KINDS, ["bfloat16"], ["bool"]], ids=["jit", "bf16", "bool"])
def test_bits_are_those_of_numpy(kinds: list[str]) -> None:
    """All types in one compiled function, and some outside."""
    arrays = {kind: of_rank(kind, (2 * gw.size(), 3)) for kind in kinds}

    def program(arrays: dict[str, Any]) -> dict[str, Any]:
        return {kind: every_call(own, kind) for kind, own in arrays.items()}

    found = (jax.jit(program) if len(kinds) > 1 else program)(arrays)
    for kind, own in arrays.items():
        for what, expected in numpys(np.asarray(own), kind).items():
            same(found[kind][what], expected)


def test_factors_are_those_of_numpy(mode: Callable[[Any], Any]) -> None:
    factors: dict[str, Any] = {"prescale_factor": 0.3, "postscale_factor": 1 / 3, "op": gw.Sum}
    for kind in ("float32", "float16", "int32"):
        own = of_rank(kind)
        found = mode(lambda x: gw.allreduce(x, **factors))(own)
        same(found, gradwire.allreduce(np.asarray(own), **factors))


def test_trees_and_unusual_shapes(mode: Callable[[Any], Any]) -> None:
    tree = {
        "scalar": jnp.float32(gw.rank()),
        "empty": jnp.zeros((0, 3)),
        "nested": [of_rank("bfloat16"), (of_rank("int32", (1,)), None)],
    }
    found = mode(lambda tree: gw.allreduce(tree, op=gw.Sum))(tree)
    leaves, structure = jax.tree_util.tree_flatten(tree)
    assert jax.tree_util.tree_structure(found) == structure
    for leaf, each in zip(leaves, jax.tree_util.tree_leaves(found)):
        same(each, gradwire.allreduce(np.asarray(leaf), op=gw.Sum))
    assert mode(lambda tree: gw.allreduce(tree))({}) == {}
    same(mode(gw.allgather)(jnp.int32(gw.rank())), np.arange(gw.size(), dtype=np.int32))
    assert gw.barrier() is None
    same(mode(lambda x: gw.barrier(x, name="b"))(of_rank("int8")), of_rank("int8"))


def test_parameters_are_those_of_the_root() -> None:
    root = gw.size() - 1
    key = jax.random.key(gw.rank())
    given = {"w": of_rank("float32"), "key": key, "step": gw.rank(), "rate": 0.5}
    found = gw.broadcast_parameters(given, root_rank=root)
    same(jax.random.key_data(found["key"]), jax.random.key_data(jax.random.key(root)))
    assert int(found["step"]) == root and float(found["rate"]) == 0.5
    same(found["w"], gradwire.broadcast(np.asarray(given["w"]), root))


def test_compression_exchanges_short_floats(mode: Callable[[Any], Any]) -> None:
    tree = {"f": of_rank("float32"), "i": of_rank("int32"), "h": of_rank("float16")}
    found = mode(lambda tree: gw.allreduce(tree, compression="bf16"))(tree)
    short = np.asarray(tree["f"].astype(jnp.bfloat16))
    same(found["f"], gradwire.allreduce(short).astype(np.float32))
    same(found["i"], gradwire.allreduce(np.asarray(tree["i"])))
    same(found["h"], gradwire.allreduce(np.asarray(tree["h"])))
    with pytest.raises(gw.InvalidRequest, match="compression='int8'"):
        gw.allreduce(tree, compression="int8")


def test_process_sets(mode: Callable[[Any], Any]) -> None:
    even = gw.add_process_set(range(0, gw.size(), 2))
    own = of_rank("float32")
    if even.included():
        found = mode(lambda x: gw.allreduce(x, process_set=even))(own)
        same(found, gradwire.allreduce(np.asarray(own), process_set=even))
        found = mode(lambda x: gw.allgather(x, process_set=even))(own)
        same(found, gradwire.allgather(np.asarray(own), process_set=even))
    else:
        with pytest.raises(gw.InvalidRequest, match="not a member"):
            gw.allreduce(own, process_set=even)
    gw.barrier()
    gw.remove_process_set(even)
    with pytest.raises(gw.InvalidRequest, match="not registered"):
        gw.allreduce(own, process_set=even)


def test_calls_are_neither_dropped_nor_doubled() -> None:
    """A result that nobody uses, and two that are equal."""

    @jax.jit
    def program(x: Any) -> Any:
        gw.allreduce(x, name="unused")
        twice = gw.allreduce(x, name="a") + gw.allreduce(x, name="b")
        return jax.lax.fori_loop(0, 3, lambda _, y: gw.allreduce(y, name="loop"), twice)

    program(jnp.ones(3)).block_until_ready()
    before = gw.stats()["operations"]
    same(program(jnp.ones(3)), np.full(3, 2.0))
    assert gw.stats()["operations"] - before == 1 + 2 + 3


def test_both_calls_reuse_memory() -> None:
    def program(x: Any) -> Any:
        return gw.allreduce(x * 2, name="x")

    text = jax.jit(program).lower(jnp.ones(1000)).as_text()
    aliases = text.count("output_operand_alias<")
    assert text.count("gradwire_start") == text.count("gradwire_done") == 1
    assert aliases == 2, text
    assert text.count("has_side_effect = true") == 2


def test_gradients_of_reductions(mode: Callable[[Any], Any]) -> None:
    own, weights = of_rank("float64"), of_rank("float64", seed=8)

    def loss(x: Any, op: gw.ReduceOp) -> Any:
        return (gw.allreduce(x, name="x", op=op, prescale_factor=0.5) * weights).sum()

    for op in (gw.Sum, gw.Average):
        found = mode(jax.grad(lambda x, op=op: loss(x, op)))(own)
        expected = gradwire.allreduce(np.asarray(weights), op=op, prescale_factor=0.5)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    total = gradwire.allreduce(np.asarray(weights), op=gw.Sum)
    most = gradwire.allreduce(np.asarray(own), op=gw.Max)
    found = mode(jax.grad(lambda x: loss(x, gw.Max)))(own)
    np.testing.assert_allclose(found, 0.5 * total * (np.asarray(own) == most), rtol=1e-12)
    with pytest.raises(NotImplementedError, match="product"):
        jax.grad(lambda x: loss(x, gw.Product))(own)


def test_gradients_of_moves(mode: Callable[[Any], Any]) -> None:
    size, rank = gw.size(), gw.rank()
    own = of_rank("float64", (size, 3))
    wide = of_rank("float64", (size * size, 3), seed=8)
    weights = wide[:size]

    def of(function: Callable[[Any], Any], by: Any) -> Any:
        return mode(jax.grad(lambda x: (function(x) * by).sum()))(own)

    averages = gradwire.allreduce(np.asarray(wide))
    found = of(lambda x: gw.allgather(x, name="g"), wide)
    np.testing.assert_allclose(found, averages[rank * size :][:size], rtol=1e-12)
    found = of(lambda x: gw.broadcast(x, 0, name="b"), weights)
    expected = gradwire.allreduce(np.asarray(weights)) * (rank == 0)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    found = of(lambda x: gw.alltoall(x, name="a"), weights)
    np.testing.assert_allclose(found, gradwire.alltoall(np.asarray(weights)), rtol=1e-12)
    found = of(lambda x: gw.barrier(x, name="w"), weights)
    np.testing.assert_allclose(found, weights, rtol=1e-12)
    for op, factor in ((gw.Sum, size), (gw.Average, 1)):
        found = of(lambda x, op=op: gw.reducescatter(x, name="r", op=op), weights[:1])
        expected = gradwire.allgather(np.asarray(weights[:1])) * factor
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    odd = of_rank("float64", (size + 1, 2))
    found = mode(jax.grad(lambda x: (gw.reducescatter(x, name="r") ** 2).sum()))(odd)
    np.testing.assert_allclose(found, 2 * gradwire.allreduce(np.asarray(odd)), rtol=1e-12)


def test_gradients_of_gradients_and_mixed_trees(mode: Callable[[Any], Any]) -> None:
    own = of_rank("float64", (3,))

    def loss(x: Any) -> Any:
        tree = gw.allreduce({"x": x, "n": jnp.arange(3)}, name="t", op=gw.Sum)
        return (tree["x"] ** 3).sum() + tree["n"].sum()

    found = mode(jax.grad(lambda x: (jax.grad(loss)(x) ** 2).sum()))(own)
    size, total = gw.size(), gradwire.allreduce(np.asarray(own), op=gw.Sum)
    # The loss of every rank is the same, so its gradient is size * 3 * total ** 2.
    np.testing.assert_allclose(found, size * 36 * size**2 * total**3, rtol=1e-9)


def test_second_derivatives_in_compiled_code() -> None:
    """Each backward pass of a call has its own name, also in loops and checkpoints."""
    own = of_rank("float64", (2 * gw.size(),))
    calls: dict[str, Callable[[Any], Any]] = {
        "allreduce": lambda x: gw.allreduce(x, name="a"),
        "max": lambda x: gw.allreduce(x, name="m", op=gw.Max),
        "allgather": lambda x: gw.allgather(x, name="g"),
        "broadcast": lambda x: gw.broadcast(x, 0, name="b"),
        "reducescatter": lambda x: gw.reducescatter(x[1:], name="r"),
        "alltoall": lambda x: gw.alltoall(x, name="t"),
        "tree": lambda x: sum(gw.allreduce([x, x * x[::-1]], name="l")),
    }

    def looped(loss: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def body(x: Any, _: Any) -> Any:
            return x * 0.5 + 0.01 * loss(x), None

        return lambda x: jax.lax.scan(body, x, None, length=2)[0].sum()

    for what, call in calls.items():

        def loss(x: Any, call: Callable[[Any], Any] = call) -> Any:
            return (call(x * x) ** 3).sum()

        def product(loss: Callable[[Any], Any]) -> Callable[[Any], Any]:
            return jax.grad(lambda x: jnp.vdot(jax.grad(loss)(x), own))

        tried = {"second": product(loss)}
        if what == "allreduce":
            tried |= {
                "checkpoint": product(jax.checkpoint(loss)),
                "function": product(jax.jit(loss)),
                "loop": product(looped(loss)),
            }
        for order, function in tried.items():
            expected = function(own)
            found = jax.jit(function)(own)
            np.testing.assert_allclose(found, expected, rtol=1e-9, err_msg=f"{what} {order}")
    names = re.findall(r'name = "([^"]*)"', jax.jit(tried["second"]).lower(own).as_text())
    ends = ["", ".backward", ".backward.2", ".backward.backward"]
    assert sorted(names) == sorted(f"allreduce.l[{at}]{end}" for at in (0, 1) for end in ends)


def test_places_that_are_refused() -> None:
    x = jnp.ones((4, 2))
    for function in (gw.allreduce, jax.jit(gw.allreduce)):
        with pytest.raises(gw.InvalidRequest, match="vmap"):
            jax.vmap(function)(x)
    with pytest.raises(gw.InvalidRequest, match="vmap"):
        jax.jit(jax.vmap(lambda x: gw.allreduce(x, name="v")))(x)
    mesh = Mesh(np.array(jax.local_devices()), ("i",))
    spec = PartitionSpec("i")
    mapped = jax.shard_map(lambda x: gw.allreduce(x), mesh=mesh, in_specs=spec, out_specs=spec)
    for function in (mapped, jax.jit(mapped), jax.pmap(lambda x: gw.allreduce(x))):
        with pytest.raises(gw.InvalidRequest, match="shard_map"):
            function(x[:1])


def test_arguments_that_are_refused() -> None:
    x = jnp.ones((2 * gw.size() + 1, 2))

    def traced(argument: str, function: Callable[..., Any]) -> Any:
        return jax.jit(lambda x, value: function(x, **{argument: value}))(x, 1)

    wrong: list[tuple[str, Callable[[], Any]]] = [
        ("root_rank=99", lambda: gw.broadcast(x, 99)),
        ("op=77", lambda: gw.allreduce(x, op=77)),
        (r"jax\.Average, gradwire\.jax\.Sum, gradwire\.jax\.Min", lambda: gw.allreduce(x, op=77)),
        ("root_rank=None", lambda: gw.broadcast(x, None)),
        ("root_rank .* a whole number that is known", lambda: traced("root_rank", gw.broadcast)),
        ("prescale_factor .* known", lambda: traced("prescale_factor", gw.allreduce)),
        ("postscale_factor .* known", lambda: traced("postscale_factor", gw.reducescatter)),
        ("op .* a reduction that is known", lambda: traced("op", gw.allreduce)),
        ("Adasum", lambda: gw.allreduce(x, op=gradwire.Adasum)),
        ("prescale_factor", lambda: gw.allreduce(x, prescale_factor=float("nan"))),
        ("dimension", lambda: gw.reducescatter(jnp.float32(1))),
        ("longer", lambda: gw.allreduce(x, name="n" * 2000)),
        ("int4", lambda: gw.allreduce(x.astype(jnp.int4))),
        ("leaf", lambda: gw.allreduce({"a": "text"})),
    ]
    if gw.size() > 1:
        wrong.append(("rows", lambda: gw.alltoall(x)))
    for text, call in wrong:
        with pytest.raises(gw.InvalidRequest, match=text):
            call()


def late(x: Any, seconds: Any) -> Any:
    """Returns the array after a while, in a compiled function."""

    def waits(x: Any, seconds: Any) -> Any:
        time.sleep(float(seconds))
        return np.asarray(x)

    return jax.pure_callback(waits, jax.ShapeDtypeStruct(x.shape, x.dtype), x, seconds)


def test_calls_of_one_name_keep_their_order() -> None:
    """The arrays of the first call are ready last on some ranks, so XLA would start the others."""
    layer = jax.jit(lambda x: gw.allreduce(x, name="layer", op=gw.Sum))
    layer(jnp.ones(3))  # From now on JAX does not trace it again for these arrays.
    total = gw.size() * (gw.size() + 1) / 2

    def functions(a: Any, b: Any) -> Any:
        return layer(a), layer(b)

    def calls(a: Any, b: Any) -> Any:
        return gw.allreduce(a, op=gw.Sum), gw.allreduce(b, op=gw.Sum)

    def loops(a: Any, b: Any) -> Any:
        def twice(x: Any) -> Any:
            return jax.lax.fori_loop(0, 2, lambda _, y: layer(y) / gw.size(), x) * gw.size()

        return twice(a), twice(b)

    def rows(a: Any, b: Any) -> Any:
        found = jax.lax.scan(lambda _, x: (0, layer(x)), 0, jnp.stack([a, b]), unroll=2)[1]
        return found[0], found[1]

    def branches(a: Any, b: Any) -> Any:
        first = jax.lax.cond(a[0] > 0, layer, lambda x: x, a)
        return first, jax.lax.cond(a[0] > 0, lambda x: -layer(x), layer, -b)

    def twice_back(a: Any, b: Any) -> Any:
        back = jax.vjp(layer, a)[1]
        return back(a)[0], back(b)[0]

    for program in (functions, calls, loops, rows, branches, twice_back):

        def both(seconds: Any, program: Callable[[Any, Any], Any] = program) -> Any:
            own = jnp.full(3, gw.rank() + 1.0)
            return program(late(own, seconds[0]), late(own * 10, seconds[1]))

        compiled = jax.jit(both)
        for step in range(3):
            slow = (gw.rank() + step) % 2
            first, second = compiled(jnp.array([0.1 * slow, 0.1 * (1 - slow)]))
            np.testing.assert_allclose(first, np.full(3, total), err_msg=program.__name__)
            np.testing.assert_allclose(second, np.full(3, 10 * total), err_msg=program.__name__)


def test_a_function_is_traced_for_each_shape() -> None:
    @jax.jit
    def traced_again(x: Any) -> Any:
        return gw.allreduce(x, name="x")

    for length in (1, 2, 3):
        same(traced_again(jnp.ones(length)), np.ones(length))


def test_one_rank_traces_more_often() -> None:
    """Calls are paired by name, not by their number."""

    @jax.jit
    def program(x: Any) -> Any:
        return gw.allreduce(x, name="first") + gw.allreduce(x * 2, name="second")

    for step in range(6):
        if gw.rank() == 0 and step % 2:
            jax.clear_caches()
            program.lower(jnp.ones(5, np.float16))
        same(program(jnp.ones(3)), np.full(3, 3.0))


def test_programs_run_in_the_order_of_the_program() -> None:
    """They have the same name, and nobody waits for the first one."""

    @jax.jit
    def slow(x: Any, value: Any) -> Any:
        for _ in range(4):
            x = jnp.sin(x @ x)
        return gw.allreduce(value + 0 * x[0, 0], name="x", op=gw.Sum)

    @jax.jit
    def quick(value: Any) -> Any:
        return gw.allreduce(value, name="x", op=gw.Sum)

    for step in range(4):
        if gw.rank() == step % gw.size():
            time.sleep(0.05)
        found = [slow(jnp.ones((400, 400)), 1.0), quick(10.0)]
        found.append(gw.allreduce(100.0, name="x", op=gw.Sum))
        assert [float(each) for each in found] == [gw.size() * by for by in (1, 10, 100)]


def test_control_flow_and_checkpoints() -> None:
    @jax.jit
    def program(x: Any, first: Any) -> Any:
        x = jax.lax.cond(
            first, lambda x: gw.allreduce(x, name="c"), lambda x: 2 * gw.allreduce(x, name="c"), x
        )

        def body(y: Any, _: Any) -> Any:
            return gw.allreduce(y, name="s"), None

        return jax.lax.scan(body, x, None, length=4)[0]

    same(program(jnp.ones(3), True), np.full(3, 1.0))
    same(program(jnp.ones(3), False), np.full(3, 2.0))
    kept = jax.checkpoint(lambda x: gw.allreduce(jnp.sin(x), name="k") ** 2)
    found = jax.jit(jax.grad(lambda x: kept(x).sum()))(jnp.ones(3))
    np.testing.assert_allclose(found, 2 * np.sin(1.0) * np.cos(1.0) * np.ones(3), rtol=1e-12)


def test_a_step_is_counted() -> None:
    optax = pytest.importorskip("optax")
    tx = optax.chain(gw.average_gradients(), optax.sgd(0.5))
    params = {"w": jnp.ones(3)}
    state = tx.init(params)
    updates, _ = jax.jit(tx.update)({"w": of_rank("float64", (3,))}, state)
    expected = -0.5 * gradwire.allreduce(np.asarray(of_rank("float64", (3,))))
    same(updates["w"], expected)


OPTIMIZERS = ["sgd", "adam", "adafactor", "clipped"]
MORE = ["adamw", "lamb", "rmsprop", "adagrad", "lion", "nadam"]


@pytest.mark.parametrize("kind", OPTIMIZERS + (MORE if AT_NIGHT else []))
def test_ranks_train_like_one_process(kind: str) -> None:
    """Each rank has a part of each batch, and all of them get what one process gets."""
    optax = pytest.importorskip("optax")
    if kind == "clipped":
        inner = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    else:
        inner = getattr(optax, kind)(1e-2)

    def initial() -> Any:
        keys = jax.random.split(jax.random.key(3), 2)
        return {
            "in": jax.random.normal(keys[0], (6, 16)) / 3,
            "out": jax.random.normal(keys[1], (16, 1)) / 4,
            "bias": jnp.zeros(1),
        }

    def loss(params: Any, given: Any) -> Any:
        found = jnp.tanh(given @ params["in"]) @ params["out"] + params["bias"]
        return ((found[:, 0] - (given**2).sum(1)) ** 2).mean()

    def train(tx: Any, params: Any, part: Callable[[Any], Any], mean: Callable[[Any], Any]) -> Any:
        state = tx.init(params)

        @jax.jit
        def step(params: Any, state: Any, given: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(params, given)
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, mean(value)

        losses = []
        for number in range(8):
            batch = jax.random.normal(jax.random.key(100 + number), (4 * gw.size(), 6))
            params, state, value = step(params, state, part(batch))
            losses.append(float(value))
        return params, losses

    alone, expected = train(inner, initial(), lambda batch: batch, lambda value: value)
    tx = optax.chain(gw.average_gradients(), inner)
    params = gw.broadcast_parameters(
        initial() if gw.rank() == 0 else jax.tree_util.tree_map(jnp.zeros_like, initial())
    )
    found, losses = train(
        tx,
        params,
        lambda batch: batch[4 * gw.rank() :][:4],
        lambda value: gw.allreduce(value, name="loss"),
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-9)
    for ours, theirs in zip(*map(jax.tree_util.tree_leaves, (found, alone))):
        np.testing.assert_allclose(ours, theirs, rtol=1e-7, atol=1e-9)
        assert len(set(gw.allgather_object(np.asarray(ours).tobytes()))) == 1


def test_random_programs() -> None:
    """Programs of several calls, in an order that XLA chooses."""
    kinds = ["float32", "int32", "bfloat16"]
    for seed in range(200 if AT_NIGHT else 4):
        random = np.random.default_rng(seed)
        calls = [
            (
                str(random.choice(["allreduce", "allgather", "broadcast", "alltoall"])),
                str(random.choice(kinds)),
                int(random.integers(1, 4000)),
            )
            for _ in range(int(random.integers(2, 9)))
        ]
        order = random.permutation(len(calls))
        arrays = [
            of_rank(kind, (rows * gw.size(),), seed=100 * seed + at)
            for at, (_, kind, rows) in enumerate(calls)
        ]

        def program(arrays: Any, calls: Any = calls, order: Any = order) -> Any:
            found = {}
            for at in order:
                function = getattr(gw, calls[at][0])
                more = (0,) if calls[at][0] == "broadcast" else ()
                found[int(at)] = function(arrays[at], *more, name=f"call{at}")
            return [found[at] for at in range(len(arrays))]

        print("SEED", seed, calls)
        for each, array, (what, _, _) in zip(jax.jit(program)(arrays), arrays, calls):
            more = (0,) if what == "broadcast" else ()
            same(each, getattr(gradwire, what)(np.asarray(array), *more))
