"""Tapes and optimizers: N ranks train as one process with all data does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from launching import AT_NIGHT

import gradwire as gw
import gradwire.tensorflow as hvd

Call = Callable[..., Any]
OPTIMIZERS = ["Momentum", "Adam", "Lamb"]
if AT_NIGHT:
    OPTIMIZERS += ["SGD", "AdamW", "RMSprop", "Adagrad", "Adamax", "Nadam", "Lion", "Adadelta"]
    OPTIMIZERS += ["Ftrl"]
STEPS, BATCH = 4, 12


def optimizer_of(name: str, **options: Any) -> keras.optimizers.Optimizer:
    if name == "Momentum":
        return keras.optimizers.SGD(0.05, momentum=0.9, **options)
    return getattr(keras.optimizers, name)(0.01, **options)


def model_of() -> keras.Model:
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    )
    return model


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    dice = np.random.default_rng(3)
    given = dice.normal(size=(STEPS, BATCH * gw.size(), 6)).astype("f4")
    return [(each, each.sum(1, keepdims=True)) for each in given]


def share(array: np.ndarray) -> np.ndarray:
    return array[gw.rank() :: gw.size()]


def train(
    optimizer: Any, wrap: Callable[[tf.GradientTape], tf.GradientTape], own: bool, compiled: bool
) -> list[np.ndarray]:
    """The weights after a training, with this rank's data or with all."""
    model = model_of()

    def step(given: tf.Tensor, wanted: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(given, training=True) - wanted) ** 2)
        gradients = wrap(tape).gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    run = tf.function(step) if compiled else step
    for given, wanted in batches():
        pair = (share(given), share(wanted)) if own else (given, wanted)
        run(*(tf.constant(each) for each in pair))
    return [np.asarray(weight) for weight in model.weights]


def close(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_n_ranks_train_as_one(name: str) -> None:
    alone = train(optimizer_of(name), lambda tape: tape, own=False, compiled=True)
    found = train(optimizer_of(name), hvd.DistributedGradientTape, own=True, compiled=True)
    close(found, alone)
    optimizer = hvd.DistributedOptimizer(optimizer_of(name))
    again = train(optimizer, lambda tape: tape, own=True, compiled=name != "Adam")
    close(again, alone)
    for weight in found:
        assert (gw.allgather(weight[None]) == weight).all(), "the same bits on all ranks"


@pytest.mark.parametrize(
    "options",
    [
        {"compression": hvd.Compression.none, "gradient_predivide_factor": 4.0},
        {"groups": 2},
        {"groups": 99},
        {"sparse_as_dense": True, "op": hvd.Average},
        {"device_dense": "/cpu:0", "device_sparse": "/cpu:0", "scale_local_gradients": False},
    ],
    ids=str,
)
def test_options_of_tapes(options: dict[str, Any]) -> None:
    alone = train(optimizer_of("SGD"), lambda tape: tape, own=False, compiled=True)
    wrap = lambda tape: hvd.DistributedGradientTape(tape, **options)  # noqa: E731
    close(train(optimizer_of("SGD"), wrap, own=True, compiled=True), alone)
    close(train(optimizer_of("SGD"), wrap, own=True, compiled=False), alone)


def test_groups_of_variables(call: Call) -> None:
    first, second, third = (tf.Variable([float(gw.rank() + at)]) for at in range(3))

    def gradients() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(first * first + second * second + third * third)
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, groups=[[third, first]])
        return tape.gradient(loss, [first, second, third], use_generic_names=True)

    found = [float(each[0]) for each in call(gradients)]
    assert found == [2.0 * sum(rank + at for rank in range(gw.size())) for at in range(3)]


def test_none_and_structures(call: Call) -> None:
    used, unused = tf.Variable(2.0, name="used"), tf.Variable(3.0, name="unused")

    def gradients() -> Any:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = used * float(gw.rank())
        return tape.gradient(loss, {"used": used, "unused": unused})

    found = call(gradients)
    assert found["unused"] is None
    assert float(found["used"]) == sum(range(gw.size())) / gw.size()


def test_nothing_is_exchanged(call: Call) -> None:
    unused, used = tf.Variable(1.0, name="unused"), tf.Variable(2.0, name="used")

    def gradients(sources: list[tf.Variable]) -> Any:
        with tf.GradientTape() as tape:
            loss = used * used
        return hvd.DistributedGradientTape(tape).gradient(loss, sources)

    assert call(lambda: gradients([unused])) == [None]
    assert call(lambda: gradients([])) == []
    assert call(lambda: hvd.broadcast_variables([], 0)) is None


@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"groups": 3}], ids=str)
def test_gradients_of_gradients(options: dict[str, Any], call: Call) -> None:
    first, second = (tf.Variable(float(gw.rank() + at), name=f"v{at}") for at in (1, 2))

    def gradients() -> Any:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = first**3 + second**3
            tape = hvd.DistributedGradientTape(inner, **options)
            found = tape.gradient(loss, [first, second])
            total = first + found[0] ** 2 + 3.0 * found[1]
        return outer.gradient(total, [first, second])

    mean = np.mean([3 * (rank + 1) ** 2 for rank in range(gw.size())])
    own = gw.rank() + 1
    np.testing.assert_allclose(call(gradients), [1 + 12 * mean * own, 18 * (own + 1)], rtol=1e-6)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_gradients_of_sparse_gradients(dense: bool, op: gw.ReduceOp, call: Call) -> None:
    table = tf.Variable(np.arange(1, 6, dtype="f4")[:, None] * [1, 2], name="table")
    rows = [[rank, 4, *[1] * rank] for rank in range(gw.size())]

    def gradients() -> Any:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_sum(tf.gather(table, rows[gw.rank()]) ** 3)
            tape = hvd.DistributedGradientTape(inner, sparse_as_dense=dense, op=op)
            found = tf.convert_to_tensor(tape.gradient(loss, table))
            total = tf.reduce_sum(found * found)
        return tf.convert_to_tensor(outer.gradient(total, table))

    counts = np.stack([np.bincount(each, minlength=5) for each in rows])[:, :, None]
    by = gw.size() if op == hvd.Sum else 1
    mean = (3 * table.numpy() ** 2 * counts).mean(0) * by
    # The upstream gradient is the same on all ranks, and is reduced as well.
    expected = by * 2 * mean * 6 * table.numpy() * counts[gw.rank()]
    np.testing.assert_allclose(call(gradients), expected, rtol=1e-5)


def test_slices_are_differentiable(call: Call) -> None:
    def gradient(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            slices = tf.IndexedSlices(x, tf.constant([gw.rank(), 4]), tf.constant([5, 1]))
            total = tf.convert_to_tensor(hvd.allreduce(slices, name="slices"))
            loss = tf.reduce_sum(total * tf.range(5.0)[:, None])
        return tape.gradient(loss, x)

    assert call(gradient, tf.ones([2, 1])).numpy().tolist() == [[gw.rank()], [4.0]]


@pytest.mark.parametrize("dense", [False, True])
def test_embeddings(dense: bool, call: Call) -> None:
    table = tf.Variable(np.zeros((10, 3), "f4"), name="table")

    def gradients() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [gw.rank(), 9]) * float(gw.rank() + 1))
        tape = hvd.DistributedGradientTape(tape, sparse_as_dense=dense)
        return tape.gradient(loss, table)

    found = call(gradients)
    assert isinstance(found, tf.IndexedSlices) != (dense and gw.size() > 1)
    expected = np.zeros((10, 3), "f4")
    for rank in range(gw.size()):
        for row in (rank, 9):
            expected[row] += (rank + 1) / gw.size()
    np.testing.assert_allclose(tf.convert_to_tensor(found).numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("scale", [True, False])
def test_local_layers(scale: bool, call: Call) -> None:
    shared, local = keras.layers.Dense(2), keras.layers.Dense(2)
    for layer in (shared, local):
        layer.build((None, 2))
    given = tf.ones([3, 2]) * float(gw.rank() + 1)

    def gradients() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(shared(given) + local(given))
        tape = hvd.PartialDistributedGradientTape(
            tape, local_layers=local, scale_local_gradients=scale, op=hvd.Sum
        )
        return tape.gradient(loss, [shared.kernel.value, local.kernel.value])

    total, own = call(gradients)
    assert (total.numpy() == 3 * sum(range(1, gw.size() + 1))).all()
    expected = 3.0 * (gw.rank() + 1) / (gw.size() if scale else 1)
    np.testing.assert_allclose(own.numpy(), np.full((2, 2), expected))
    with pytest.raises(gw.InvalidRequest, match="not a Keras layer"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=["dense"])


def test_many_buckets(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradwire.tensorflow import _gradients

    monkeypatch.setattr(_gradients, "_BUCKET_BYTES", 64)
    variables = [tf.Variable(tf.fill([at % 7 + 1, 5], 1.0), name=f"v{at}") for at in range(40)]

    def gradients() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v) * float(at) for at, v in enumerate(variables)])
            loss *= float(gw.rank() + 1)
        return hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, variables)

    for at, found in enumerate(call(gradients)):
        assert (found.numpy() == at * sum(range(1, gw.size() + 1))).all()


def test_arguments_of_tapes() -> None:
    for options in [
        {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
        {"gradient_predivide_factor": 0.0},
        {"groups": -1},
        {"op": 55},
    ]:
        with pytest.raises(gw.InvalidRequest):
            hvd.DistributedGradientTape(tf.GradientTape(), **options)
    with pytest.raises(gw.InvalidRequest, match=r"not a tf\.GradientTape"):
        hvd.DistributedGradientTape("tape")
    with pytest.raises(gw.InvalidRequest, match="Keras 3"):
        hvd.DistributedOptimizer("adam")


@pytest.mark.parametrize("shape", [(3, 4), (2, 5, 4)])
def test_batch_norm_of_all_ranks(shape: tuple[int, ...], call: Call) -> None:
    dice = np.random.default_rng(5)
    sizes = [rank + 2 for rank in range(gw.size())]
    parts = [dice.normal(3.0, 2.0, (size, *shape[1:])).astype("f4") for size in sizes]
    ups = [dice.normal(size=part.shape).astype("f4") for part in parts]

    def run(layer: keras.Layer, given: np.ndarray, up: np.ndarray) -> tuple[Any, Any]:
        layer.build(given.shape)

        def differentiate(x: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                result = layer(x, training=True)
                loss = tf.reduce_sum(result * up)
            return result, tape.gradient(loss, x)

        return call(differentiate, tf.constant(given))

    alone, together = keras.layers.BatchNormalization(), hvd.SyncBatchNormalization()
    expected, gradient = run(alone, np.concatenate(parts), np.concatenate(ups))
    found, own = run(together, parts[gw.rank()], ups[gw.rank()])
    first = sum(sizes[: gw.rank()])
    rows = slice(first, first + sizes[gw.rank()])
    np.testing.assert_allclose(found, expected[rows], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(own, gradient[rows], rtol=1e-3, atol=1e-5)
    for one, other in zip(together.non_trainable_weights, alone.non_trainable_weights):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert call(lambda x: together(x), parts[0]).shape == parts[0].shape
