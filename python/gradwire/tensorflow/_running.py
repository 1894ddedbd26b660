"""Runs collectives on tensors, now or in the graph of a ``tf.function``.

Eagerly, a call starts its operations and waits for them. In a graph, the same Python code runs in
``tf.py_function`` nodes: one for each start, and a single one that waits after all starts. A wait
blocks a thread of TensorFlow, which may have only one. So a node never waits while the same call
has operations to start, because another rank may wait for exactly these.

All ranks run the calls of a program in the same order, whatever the number of threads: ``_order``
has how (docs/decisions/042-tensorflow-without-kernels.md).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from gradwire import _world
from gradwire._errors import InvalidRequest
from gradwire._ops import Handle
from gradwire.tensorflow import _order, _raising

# The most operations that were started in graphs and not waited for (BOUND). A function that fails
# between start and wait leaves some.
_MAX_STARTED = 65_536

# For functions that programs call in a ``tf.function``: AutoGraph need not translate them.
as_python = tf.autograph.experimental.do_not_convert

_numbers = itertools.count()
_started: OrderedDict[int, Handle[list[tf.Tensor]]] = OrderedDict()


class Result(NamedTuple):
    """The dtype and the partly known shape of a result, when a function is traced."""

    dtype: tf.DType
    shape: tf.TensorShape


class Start(NamedTuple):
    """A collective that has not begun.

    ``begin`` is called with eager tensors. The handle that it returns has as many tensors as there
    are ``results``.
    """

    tensors: Sequence[tf.Tensor]
    begin: Callable[[Sequence[tf.Tensor]], Handle[list[tf.Tensor]]]
    results: Sequence[Result]


def like(tensor: tf.Tensor) -> Result:
    """Returns the result of a collective that keeps dtype and shape."""
    return Result(tensor.dtype, tensor.shape)


def like_rows(tensor: tf.Tensor) -> Result:
    """Returns the result of a collective that changes the number of rows."""
    if tensor.shape.rank is None:
        return Result(tensor.dtype, tensor.shape)
    return Result(tensor.dtype, tf.TensorShape([None, *tensor.shape[1:]]))


def run(
    starts: Sequence[Start], after: Callable[[], object] | None = None
) -> list[list[tf.Tensor]]:
    """Starts collectives and waits for all of them; returns the results of each.

    Args:
        starts: The collectives. They start in this order.
        after: Called after the wait.
    """
    if tf.executing_eagerly():
        handles = [_raising.raising(partial(start.begin, start.tensors)) for start in starts]
        results = [_raising.raising(handle.wait) for handle in handles]
        if after is not None:
            after()
        return results
    refuse_xla()
    _raising.install()
    with tf.device("CPU:0"):
        tickets = [_start_node(start) for start in starts]
        flat = iter(_wait_node(tickets, [each for one in starts for each in one.results], after))
    return [[next(flat) for _ in start.results] for start in starts]


def compute(function: Callable[[], Any], dtype: tf.DType) -> tf.Tensor:
    """Returns the number that a function returns; a graph calls the function in each run."""
    if tf.executing_eagerly():
        return tf.constant(function(), dtype)
    refuse_xla()
    _raising.install()

    def node(_: tf.Tensor) -> tf.Tensor:
        return tf.constant(_raising.noted(function), dtype)

    with tf.device("CPU:0"):
        number = tf.py_function(node, [_order.handle()], dtype)
    number.set_shape([])
    return number


def refuse_xla() -> None:
    """Raises InvalidRequest while a function is traced that XLA will compile."""
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise InvalidRequest(
            "XLA can't compile a function that exchanges tensors: remove jit_compile=True from "
            "this tf.function or from model.compile()",
            kind="invalid",
        )


def _start_node(start: Start) -> tf.Tensor:
    # TensorFlow keeps the function of a node forever, so it must not refer to the tensors' graph.
    begin = start.begin

    def node(_: tf.Tensor, *tensors: tf.Tensor) -> tf.Tensor:
        handle = _raising.noted(lambda: begin(tensors))
        number = next(_numbers)
        while len(_started) >= _MAX_STARTED:
            _started.popitem(last=False)
        _started[number] = handle
        return tf.constant(number, tf.int64)

    ticket = tf.py_function(node, [_order.handle(), *start.tensors], tf.int64)
    ticket.set_shape([])
    return ticket


def _wait_node(
    tickets: Sequence[tf.Tensor], results: Sequence[Result], after: Callable[[], object] | None
) -> list[tf.Tensor]:
    def node(_: tf.Tensor, *numbers: tf.Tensor) -> list[tf.Tensor]:
        handles = [_started.pop(int(number)) for number in numbers]
        found = _raising.noted(lambda: [each for handle in handles for each in handle.wait()])
        if after is not None:
            after()
        return found

    dtypes = [result.dtype for result in results]
    tensors = tf.py_function(node, [_order.handle(), *tickets], dtypes)
    if not results:
        return []  # TensorFlow returns the operation
    for tensor, result in zip(tensors, results):
        tensor.set_shape(result.shape)
    return list(tensors)


_world.before_shutdown.append(_started.clear)
