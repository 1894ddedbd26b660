"""The order of the operations of a graph.

All nodes take the handle of one variable. TensorFlow runs operations on a variable in the order of
the program, also through loops, branches and called functions.

Two functions of TensorFlow are wrapped, because it does less in the graphs that it makes itself to
differentiate a program:

- It adds no order to the graph of a gradient of a ``tf.function``, if the program takes it outside
  of the function. So ranks would match their unnamed calls differently. The order is added when
  TensorFlow completes such a graph.
- The gradients of branches and loops can't take a tensor from outside of all graphs. So they take
  the handle from the graph around them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import func_graph

_variable: tf.Variable | None = None
_installed = False


def handle() -> tf.Tensor:
    """Returns what a node of the present graph takes, so that it has a place in the order."""
    global _variable
    if _variable is None:
        with tf.init_scope(), tf.device("CPU:0"):
            _variable = tf.Variable(0, trainable=False, name="gradwire_order")
    _install()
    found: tf.Tensor = _variable.handle
    return found


def _install() -> None:
    global _installed
    if _installed:
        return
    _installed = True
    make, capture = atomic_function.from_func_graph, func_graph.FuncGraph.capture

    @functools.wraps(make)
    def from_func_graph(name: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        _put_in_order(graph)
        return make(name, graph, *args, **kwargs)

    @functools.wraps(capture)
    def captured(graph: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            _is_ours(tensor)
            and graph.is_control_flow_graph
            and hasattr(graph.outer_graph, "capture")
        ):
            tensor = graph.outer_graph.capture(tensor)
        return capture(graph, tensor, *args, **kwargs)

    atomic_function.from_func_graph = from_func_graph
    func_graph.FuncGraph.capture = captured


def _put_in_order(graph: Any) -> None:
    """Makes each operation wait for the one before, where TensorFlow has not done so already."""
    users = {user for outer, inner in graph.captures if _is_ours(outer) for user in _users(inner)}
    if len(users) < 2:
        return
    chain = [operation for operation in graph.get_operations() if operation in users]
    for before, operation in itertools.pairwise(chain):
        if before not in operation.control_inputs:
            operation._add_control_input(before)


def _is_ours(tensor: Any) -> bool:
    return _variable is not None and tensor is _variable.handle


def _users(tensor: tf.Tensor) -> Iterator[Any]:
    """Returns the operations that take a tensor, as it is or through an Identity."""
    for operation in tensor.consumers():
        if operation.type == "Identity":
            yield from _users(operation.outputs[0])
        else:
            yield operation
