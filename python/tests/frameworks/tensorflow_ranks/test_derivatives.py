"""The gradients of the collectives are Horovod's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradwire as gw
import gradwire.tensorflow as hvd

Call = Callable[..., Any]


def weights(shape: tuple[int, ...], rank: int | None = None) -> np.ndarray:
    dice = np.random.default_rng(gw.rank() if rank is None else rank)
    return dice.integers(-4, 5, shape).astype("f4")


def gradient(call: Call, function: Callable[[tf.Tensor], Any], given: np.ndarray) -> np.ndarray:
    """The gradient of the sum of the results times the weights of this rank."""

    def differentiate(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = function(x)
            loss = tf.reduce_sum(result * upstream(result))
        return tape.gradient(loss, x)

    return call(differentiate, tf.constant(given)).numpy()


def upstream(result: tf.Tensor) -> tf.Tensor:
    """This rank's weights for any shape."""
    numbers = tf.range(tf.size(result), dtype=tf.float32) % 5 + gw.rank()
    return tf.reshape(numbers, tf.shape(result))


def upstreams(*shape: int) -> list[np.ndarray]:
    numbers = np.arange(np.prod(shape), dtype="f4") % 5
    return [(numbers + rank).reshape(shape) for rank in range(gw.size())]


def test_allreduce(call: Call) -> None:
    given, ups = weights((3, 2)), upstreams(3, 2)
    found = gradient(call, lambda x: hvd.allreduce(x, op=hvd.Sum), given)
    np.testing.assert_allclose(found, sum(ups))
    found = gradient(call, lambda x: hvd.allreduce(x, name="named"), given)
    np.testing.assert_allclose(found, sum(ups) / gw.size(), rtol=1e-6)
    found = gradient(
        call, lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2, postscale_factor=3), given
    )
    np.testing.assert_allclose(found, 6 * sum(ups))
    found = gradient(call, lambda x: sum(hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum)), given)
    np.testing.assert_allclose(found, 3 * sum(ups))


@pytest.mark.parametrize("op", [gw.Min, gw.Max])
def test_extrema(op: gw.ReduceOp, call: Call) -> None:
    everybody = np.stack([weights((3, 2), rank) for rank in range(gw.size())])
    extremum = everybody.min(0) if op is gw.Min else everybody.max(0)
    had = everybody == extremum
    expected = sum(upstreams(3, 2)) * had[gw.rank()] / had.sum(0)
    found = gradient(call, lambda x: hvd.allreduce(x, op=op), weights((3, 2)))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    with pytest.raises((NotImplementedError, LookupError)):
        gradient(call, lambda x: hvd.allreduce(x, op=hvd.Product), weights((3, 2)))


def test_allgather(call: Call) -> None:
    rows = [rank + 1 for rank in range(gw.size())]
    ups = sum(upstreams(sum(rows), 2)) / gw.size()
    first = sum(rows[: gw.rank()])
    found = gradient(call, hvd.allgather, weights((rows[gw.rank()], 2)))
    np.testing.assert_allclose(found, ups[first : first + rows[gw.rank()]], rtol=1e-6)
    found = gradient(call, hvd.allgather, weights(()))
    np.testing.assert_allclose(found, (sum(upstreams(gw.size())) / gw.size())[gw.rank()])


def test_broadcast(call: Call) -> None:
    root = gw.size() - 1
    found = gradient(call, lambda x: hvd.broadcast(x, root), weights((4,)))
    mean = sum(upstreams(4)) / gw.size()
    np.testing.assert_allclose(found, mean if gw.rank() == root else 0 * mean, rtol=1e-6)


def test_alltoall(call: Call) -> None:
    splits = [1] * gw.size()
    found = gradient(
        call, lambda x: hvd.alltoall(x, splits)[0], weights((gw.size() + 2, 3))
    )  # two rows are not sent
    ups = upstreams(gw.size(), 3)
    expected = np.stack([ups[to][gw.rank()] for to in range(gw.size())])
    np.testing.assert_allclose(found[: gw.size()], expected)
    assert not found[gw.size() :].any()


def test_reducescatter(call: Call) -> None:
    for op, by in [(hvd.Sum, gw.size()), (hvd.Average, 1)]:
        found = gradient(
            call, lambda x, op=op: hvd.reducescatter(x, op=op), weights((2 * gw.size(), 2))
        )
        np.testing.assert_allclose(found, by * np.concatenate(upstreams(2, 2)))


def test_second_derivatives(call: Call) -> None:
    def second(x: tf.Tensor) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(hvd.allreduce(x * x * x, op=hvd.Sum))
            [first] = inner.gradient(loss, [x])
        return outer.gradient(first, x)

    given = np.arange(3, dtype="f4")
    np.testing.assert_allclose(
        call(second, tf.constant(given)).numpy(), 6 * given * gw.size(), rtol=1e-6
    )


def loop(op: Call, x: tf.Tensor) -> tf.Tensor:
    y = x
    for _ in tf.range(3):
        y = op(y * x)
    return y


def branch(op: Call, x: tf.Tensor) -> tf.Tensor:
    return op(x * x) if tf.reduce_sum(x) > 0 else x


def both(op: Call, x: tf.Tensor) -> tf.Tensor:
    y = x
    for at in tf.range(3):
        if at % 2 == 0:
            y = op(y * x) + op(x)
        else:
            for _ in tf.range(2):
                y = op(y) * x
    return y


def function(op: Call, x: tf.Tensor) -> tf.Tensor:
    inner = tf.function(lambda z: op(z) * z)
    y = x
    for _ in tf.range(2):
        y = inner(y) + inner(x)
    return y


@pytest.mark.parametrize("program", [loop, branch, both, function])
@pytest.mark.parametrize("name", ["allreduce", "broadcast", "allgather"])
def test_loops_and_branches(program: Call, name: str) -> None:
    """The gradients of a compiled program are those of the same one without TensorFlow's loops."""
    ops: dict[str, Call] = {
        "allreduce": hvd.allreduce,
        "broadcast": lambda x: hvd.broadcast(x, 0),
        "allgather": lambda x: tf.reduce_mean(
            tf.reshape(hvd.allgather(x), (gw.size(), *x.shape)), 0
        ),
    }
    given = tf.constant(np.abs(weights((2, 2))) + 1)
    compiled = tf.function(lambda x: program(ops[name], x))

    def gradients(program: Call) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(given)
            with tf.GradientTape() as inner:
                inner.watch(given)
                result = program(given)
                loss = tf.reduce_sum(result * upstream(result))
            first = inner.gradient(loss, given)
        return first, outer.gradient(first, given)

    expected = gradients(lambda x: program(ops[name], x))
    for found, one in zip(gradients(compiled), expected):
        np.testing.assert_allclose(found, one, rtol=1e-5)
    inside = tf.function(lambda: gradients(compiled)[0])()
    np.testing.assert_allclose(inside, expected[0], rtol=1e-5)


def test_unnamed_calls_keep_their_order() -> None:
    """Also in the gradient of a function that is called outside of it."""
    numbers = range(12)

    def part(x: tf.Tensor) -> tf.Tensor:
        each = [hvd.allreduce(x * (at + 1.0), op=hvd.Sum) * 4.0 ** (at % 4) for at in numbers]
        return tf.add_n(each)

    @tf.function
    def program(x: tf.Tensor) -> tf.Tensor:
        result = part(x)
        for _ in tf.range(2):
            result += part(x)
        return result + part(x)

    expected = 4 * sum((at + 1) * 4 ** (at % 4) for at in numbers) * sum(range(1, gw.size() + 1))
    for _ in range(5):
        x = tf.ones([2])
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(program(x)) * (gw.rank() + 1)
        assert tape.gradient(loss, x).numpy().tolist() == [expected] * 2
