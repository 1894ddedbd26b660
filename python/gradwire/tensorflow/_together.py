"""Reductions that start together, as one differentiable function.

A step reduces its gradients with several requests, and all of them start before the first wait. A
program may differentiate the results again, as for a penalty on the size of a gradient. That is
one such exchange again, of all requests: so all ranks make the same ones, whichever they need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from gradwire._errors import InvalidRequest
from gradwire._ops import Average, ReduceOp, Sum
from gradwire._process_sets import ProcessSet
from gradwire.tensorflow._derivatives import (
    as_tensor,
    backward_name,
    check_differentiable,
    gathering,
    own_rows,
    reduction,
)
from gradwire.tensorflow._running import Start, run


class Part(Protocol):
    """One of the requests."""

    @property
    def tensors(self) -> Sequence[tf.Tensor]:
        """The tensors that are reduced."""

    def start(self) -> Start:
        """Prepares the request."""

    def results(self, found: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns as many results as there are tensors, from those of the request."""

    def backward(self, upstream: Sequence[Any]) -> Dense:
        """Returns the request that reduces the gradients of the results."""

    def gradients(self, reduced: list[tf.Tensor], found: list[tf.Tensor]) -> list[Any]:
        """Returns the gradients of the tensors.

        Args:
            reduced: The results of ``backward``.
            found: The results of the request itself.
        """


class Dense(NamedTuple):
    """A group of dense tensors. The gradient is the group of their gradients, reduced likewise."""

    tensors: Sequence[tf.Tensor]
    name: str | None
    op: ReduceOp
    prescale_factor: float
    postscale_factor: float
    process_set: ProcessSet

    def start(self) -> Start:
        scales = self.prescale_factor, self.postscale_factor
        return reduction(self.tensors, self.name, self.op, *scales, self.process_set)

    def results(self, found: list[tf.Tensor]) -> list[tf.Tensor]:
        return found

    def backward(self, upstream: Sequence[Any]) -> Dense:
        check_differentiable(self.op)
        factor = self.prescale_factor * self.postscale_factor
        ups, name = [as_tensor(each) for each in upstream], backward_name(self.name)
        return Dense(ups, name, self.op, factor, 1.0, self.process_set)

    def gradients(self, reduced: list[tf.Tensor], found: list[tf.Tensor]) -> list[Any]:
        return reduced


class Slices(NamedTuple):
    """The values and indices of ``tf.IndexedSlices``. Their rows on all ranks are gathered.

    Rows with the same index are not added. The gradient is that of a reduction of dense tensors,
    for the rows that this rank gave.
    """

    tensors: Sequence[tf.Tensor]
    name: str | None
    op: ReduceOp
    process_set: ProcessSet

    def start(self) -> Start:
        # Named like an allreduce, so a rank with a dense tensor of that name fails immediately.
        return gathering(self.tensors, self.name, self.process_set, kind="allreduce", op=self.op)

    def results(self, found: list[tf.Tensor]) -> list[tf.Tensor]:
        values, indices, rows, _ = found
        if self.op == Average:
            # The number of contributing ranks: joined ranks have no rows.
            values = values / tf.cast(tf.shape(rows)[1], values.dtype)
        return [values, indices]

    def backward(self, upstream: Sequence[Any]) -> Dense:
        ups, name = [as_tensor(upstream[0])], backward_name(self.name)
        return Dense(ups, name, self.op, 1.0, 1.0, self.process_set)

    def gradients(self, reduced: list[tf.Tensor], found: list[tf.Tensor]) -> list[Any]:
        _, _, rows, at = found
        return [own_rows(reduced[0], rows[0], at, self.tensors[0]), None]


def slices_part(
    slices: tf.IndexedSlices, name: str | None, op: ReduceOp, process_set: ProcessSet
) -> Slices:
    """Returns the request that reduces slices.

    Raises:
        InvalidRequest: The reduction is neither Average nor Sum.
    """
    if op not in (Average, Sum):
        raise InvalidRequest(
            f"tf.IndexedSlices can't be reduced with {op!r}: use Average or Sum, or "
            "sparse_as_dense=True",
            kind="invalid",
        )
    return Slices([slices.values, slices.indices], name, op, process_set)


def reduced_slices(results: Sequence[tf.Tensor], given: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns the slices of all ranks, from the results of their request."""
    values, indices = results
    return tf.IndexedSlices(values, indices, given.dense_shape)


def reduce(
    parts: Sequence[Part], after: Callable[[], object] | None = None
) -> list[list[tf.Tensor]]:
    """Starts requests and waits for all of them; returns the results of each.

    Args:
        parts: The requests. They start in this order.
        after: Called after the wait.
    """
    found = run([part.start() for part in parts], after)
    return [part.results(each) for part, each in zip(parts, found)]


def differentiable_reduce(
    parts: Sequence[Part], after: Callable[[], object] | None = None
) -> list[list[tf.Tensor]]:
    """Does the same as ``reduce``, and the results are differentiable.

    TensorFlow keeps the gradient function of each graph forever.
    """

    @tf.custom_gradient
    def reduced(*_: tf.Tensor) -> Any:
        found = run([part.start() for part in parts], after)
        results = [part.results(each) for part, each in zip(parts, found)]

        def gradient(*upstream: Any) -> list[Any]:
            backwards = [part.backward(ups) for part, ups in zip(parts, divided(upstream))]
            own = zip(parts, differentiable_reduce(backwards), found)
            return [each for part, ups, given in own for each in part.gradients(ups, given)]

        return flat(results), gradient

    def divided(tensors: Sequence[Any]) -> Iterator[list[Any]]:
        """Divides tensors among the requests."""
        rest = iter(tensors)
        return (list(islice(rest, len(part.tensors))) for part in parts)

    def flat(lists: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        return [each for one in lists for each in one]

    if not parts:
        return reduce(parts, after)
    return list(divided(reduced(*flat([part.tensors for part in parts]))))
