"""BytePS's interface for TensorFlow gives the averages of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import gradwire.tensorflow.byteps as bps
from gradwire import InvalidRequest

Call = Callable[..., Any]


def own(rank: int | None = None) -> Any:
    return tf.range(6.0) * ((bps.rank() if rank is None else rank) + 1.0)


def total() -> Any:
    return sum(own(rank) for rank in range(bps.size()))


def test_push_pull(call: Call) -> None:
    mean = call(lambda: bps.push_pull(own(), name="a", scope="s."))
    np.testing.assert_allclose(mean, total() / bps.size(), rtol=1e-6)
    added = call(lambda: bps.push_pull(own(), op=bps.Sum))
    np.testing.assert_allclose(added, total(), rtol=1e-6)
    half = call(lambda: bps.push_pull(own(), average=False, compression=bps.Compression.fp16))
    np.testing.assert_allclose(half, total(), rtol=1e-2)


def test_broadcasts(call: Call) -> None:
    last = bps.size() - 1
    found = call(lambda: bps.broadcast(own(), last, scope="s.", name="b"))
    np.testing.assert_array_equal(found, own(last))
    variables = [tf.Variable(own()), tf.Variable(own()[:2])]
    call(lambda: bps.broadcast_variables(variables, root_rank=last, scope="s."))
    np.testing.assert_array_equal(variables[0], own(last))
    np.testing.assert_array_equal(variables[1], own(last)[:2])


def test_tape(call: Call) -> None:
    variable = tf.Variable(tf.ones([6]))

    def gradient() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * own())
        return bps.DistributedGradientTape(tape).gradient(loss, variable)

    np.testing.assert_allclose(call(gradient), total() / bps.size(), rtol=1e-6)


def test_optimizer() -> None:
    keras.utils.set_random_seed(1)
    variable = keras.Variable(np.ones(6, "f4"))
    optimizer = bps.DistributedOptimizer(keras.optimizers.SGD(0.5), op=bps.Average)
    optimizer.apply([own()], [variable])
    np.testing.assert_allclose(variable.numpy(), 1 - 0.5 * total() / bps.size(), rtol=1e-6)


def test_what_does_not_exist() -> None:
    with pytest.raises(InvalidRequest, match=r"asynchronous training .* is not supported"):
        bps.push_pull(own(), enable_async=True)
    with pytest.raises(InvalidRequest, match=r"asynchronous training .* is not supported"):
        bps.DistributedOptimizer(keras.optimizers.SGD(), enable_async=True)
    with pytest.raises(InvalidRequest, match=r"suspend\(\) does not exist here: an elastic job"):
        bps.suspend()
