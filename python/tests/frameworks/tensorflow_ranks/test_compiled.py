"""Calls in a ``tf.function``: their order, refusals, and memory."""

from __future__ import annotations

import gc
import resource

import numpy as np
import pytest
import tensorflow as tf
from launching import AT_NIGHT

import gradwire as gw
import gradwire.tensorflow as hvd
from gradwire.tensorflow import _running

STEPS = 10_000 if AT_NIGHT else 500


def total() -> float:
    return float(sum(range(gw.size())))


def test_loops_branches_and_functions() -> None:
    """The calls of loops, branches and functions stay in the program's order, unnamed."""

    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(x, op=hvd.Sum) + 1

    @tf.function
    def program(x: tf.Tensor, many: tf.Tensor) -> tf.Tensor:
        a = hvd.allreduce(x, op=hvd.Sum)
        b = tf.cond(many > 1, lambda: inner(x * 10), lambda: x)
        c = hvd.allreduce(x * 100, op=hvd.Max)
        result = a + b + c
        for at in tf.range(many):
            result += hvd.allreduce(x * tf.cast(at, tf.float32), op=hvd.Sum)
        return result + hvd.allreduce(x, op=hvd.Min)

    rank = tf.constant(float(gw.rank()))
    for many in (1, 3, 5):
        steps = sum(range(many)) * total()
        branch = 10 * total() + 1 if many > 1 else gw.rank()
        expected = total() + branch + 100 * (gw.size() - 1) + steps
        assert float(program(rank, tf.constant(many))) == expected


def test_a_retrace_on_one_rank() -> None:
    function = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))
    if gw.rank() == 0:
        function.get_concrete_function(tf.TensorSpec([None], tf.float32))
    for length in (2, 3, 4):
        assert function(tf.ones([length])).numpy().tolist() == [gw.size()] * length


def test_shapes_that_are_known_later() -> None:
    @tf.function(input_signature=[tf.TensorSpec(None, tf.float32)])
    def function(x: tf.Tensor) -> tf.Tensor:
        return hvd.allgather(hvd.allreduce(x, op=hvd.Sum))

    assert function(tf.ones([2, 3])).shape == (2 * gw.size(), 3)
    assert function(tf.ones([])).shape == (gw.size(),)


def test_static_shapes() -> None:
    @tf.function
    def function(x: tf.Tensor) -> tf.Tensor:
        assert hvd.allreduce(x).shape == (4, 3)
        assert hvd.broadcast(x, 0).shape == (4, 3)
        assert hvd.allgather(x).shape.as_list() == [None, 3]
        assert hvd.reducescatter(x).shape.as_list() == [None, 3]
        return hvd.alltoall(x, [0] * gw.size())[0]

    assert function(tf.ones([4, 3])).shape == (0, 3)


def test_xla_is_refused_in_one_sentence() -> None:
    @tf.function(jit_compile=True)
    def function(x: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(x)

    with pytest.raises(gw.InvalidRequest, match="remove jit_compile=True") as caught:
        function(tf.ones([2]))
    assert str(caught.value).count(". ") == 0


def test_an_error_has_its_own_type() -> None:
    @tf.function
    def function(x: tf.Tensor) -> tf.Tensor:
        return hvd.broadcast(x, root_rank=gw.size() + 5)

    with pytest.raises(gw.InvalidRequest, match=f"{gw.size() + 5}"):
        function(tf.ones([2]))
    # Errors of others keep theirs.
    with pytest.raises(tf.errors.InvalidArgumentError):
        tf.function(lambda x: tf.debugging.check_numerics(x, "other"))(tf.constant(np.nan))
    assert hvd.allreduce(tf.ones([1])).numpy() == 1.0


def test_memory_does_not_grow() -> None:
    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        parts = hvd.grouped_allreduce([x, x + 1], op=hvd.Sum)
        return hvd.allreduce(parts[0] + parts[1])

    given = tf.ones([1 << 14])
    for _ in range(300):
        step(given)
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(STEPS):
        step(given)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 16 << 10, f"{grown} KiB more after {STEPS} steps"
    assert not _running._started


def test_results_outlive_a_function() -> None:
    function = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))
    results = [function(tf.fill([1000], float(at))) for at in range(30)]
    for at, result in enumerate(results):
        np.testing.assert_array_equal(result.numpy(), np.full(1000, at * gw.size(), np.float32))
