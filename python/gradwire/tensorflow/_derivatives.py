"""The collectives as differentiable functions, with Horovod's gradients.

Gradients are computed with the same functions, so they can be differentiated again. All ranks make
the same calls in a backward pass, even if their part of a gradient is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gradwire._arguments import whole_number
from gradwire._errors import InvalidRequest
from gradwire._ops import (
    Adasum,
    Average,
    Handle,
    Max,
    Min,
    ReduceOp,
    Sum,
    factors,
    not_empty,
)
from gradwire._positions import position
from gradwire._process_sets import ProcessSet
from gradwire._world import members, rank
from gradwire.tensorflow._adapter import collectives
from gradwire.tensorflow._running import Result, Start, like, like_rows, run


def as_tensor(value: Any) -> tf.Tensor:
    """Returns a dense tensor with the elements of a tensor, a variable or an array."""
    return tf.convert_to_tensor(value)


def as_tensors(values: Any) -> list[tf.Tensor]:
    """Returns the tensors of a group.

    Raises:
        InvalidRequest: ``values`` is a tensor, not a list.
    """
    if isinstance(values, (tf.Tensor, tf.Variable)):
        raise InvalidRequest("a group must be a list of tensors, not a tensor", kind="invalid")
    return [as_tensor(value) for value in not_empty(list(values))]


def backward_name(name: str | None) -> str | None:
    """Returns the name of the call that computes the gradient of a call."""
    return None if name is None else f"{name}.backward"


def check_differentiable(op: ReduceOp) -> None:
    """Raises NotImplementedError if an allreduce has no gradient that is an allreduce."""
    if op not in (Average, Sum, Adasum):
        raise NotImplementedError(f"an allreduce with {op!r} can't be differentiated")


def own_rows(total: tf.Tensor, rows: tf.Tensor, at: tf.Tensor, given: tf.Tensor) -> tf.Tensor:
    """Returns this rank's part of a tensor that is like a gathered one.

    Args:
        total: The tensor.
        rows: The number of rows from each contributing rank.
        at: This rank's position among them.
        given: What this rank gave to the gathered tensor.
    """
    first = tf.reduce_sum(rows[:at])
    # A tensor without dimensions counts as one row.
    return tf.reshape(total[first : first + rows[at]], tf.shape(given))


def _scaled(tensor: tf.Tensor, by: float) -> tf.Tensor:
    """Returns the product, computed at least in f32 and rounded once."""
    if by == 1.0:
        return tensor
    wide = tf.float32 if tensor.dtype.size < 4 else tensor.dtype
    return tf.cast(tf.cast(tensor, wide) * tf.cast(by, wide), tensor.dtype)


def reduction(
    tensors: Sequence[tf.Tensor],
    name: str | None,
    op: ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> Start:
    """Prepares an allreduce of a group; ``run`` starts it."""

    def begin(given: Sequence[tf.Tensor]) -> Handle[list[tf.Tensor]]:
        return collectives.grouped_allreduce(
            given, name, op, prescale_factor, postscale_factor, process_set
        )

    return Start(tensors, begin, [like(tensor) for tensor in tensors])


def gathering(
    tensors: Sequence[tf.Tensor],
    name: str | None,
    process_set: ProcessSet,
    kind: str,
    op: ReduceOp | None = None,
) -> Start:
    """Prepares an allgather of a group. ``op`` is the reduction that ranks apply to the rows.

    Its results are the gathered tensors, the number of rows from each contributing rank as a matrix
    with a row for each tensor, and this rank's position among the contributing ranks.
    """

    def begin(given: Sequence[tf.Tensor]) -> Handle[list[tf.Tensor]]:
        def convert(found: list[tuple[tf.Tensor, list[int]]]) -> list[tf.Tensor]:
            rows = [rows for _, rows in found]
            at = position(len(rows[0]), process_set, ranks)
            numbers = [tf.constant(rows, tf.int64), tf.constant(at, tf.int64)]
            return [result for result, _ in found] + numbers

        return collectives.allgather(given, name, process_set, kind, op)._map(convert)

    def ranks() -> list[int]:
        called = None if name is None else f"{name}.ranks"
        own = tf.constant([rank()], tf.int64)
        [(found, _)] = collectives.allgather([own], called, process_set).wait()
        return [int(each) for each in found.numpy()]

    rows = Result(tf.int64, tf.TensorShape([len(tensors), None]))
    results = [like_rows(tensor) for tensor in tensors]
    return Start(tensors, begin, [*results, rows, Result(tf.int64, tf.TensorShape([]))])


def allreduce(
    tensors: Sequence[tf.Tensor],
    name: str | None,
    op: ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> list[tf.Tensor]:
    """Reduces tensors.

    The gradient of a sum is the sum of the ranks' gradients; of an average, their average. For a
    Min or Max, the sum of the ranks' gradients goes to the ranks that had the extremum.
    """
    before, after = factors(prescale_factor, postscale_factor)
    if op in (Min, Max) and all(tensor.dtype.is_floating for tensor in tensors):
        return _extremum(tensors, name, op, before, after, process_set)

    @tf.custom_gradient
    def reduced(*given: tf.Tensor) -> Any:
        [results] = run([reduction(given, name, op, before, after, process_set)])

        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            check_differentiable(op)
            ups, back = _dense(upstream), backward_name(name)
            return allreduce(ups, back, op, before * after, 1.0, process_set)

        return results, gradient

    return list(reduced(*tensors))


def _extremum(
    tensors: Sequence[tf.Tensor],
    name: str | None,
    op: ReduceOp,
    before: float,
    after: float,
    process_set: ProcessSet,
) -> list[tf.Tensor]:
    """Returns the Min or Max of tensors.

    Equal values tell which ranks had it. So the factors are applied here: during the exchange, they
    would round short floats differently, depending on the placement of the ranks.
    """

    @tf.custom_gradient
    def reduced(*given: tf.Tensor) -> Any:
        scaled = [_scaled(tensor, before) for tensor in given]
        [results] = run([reduction(scaled, name, op, 1.0, 1.0, process_set)])

        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            found = []
            for at, (own, most, up) in enumerate(zip(scaled, results, _dense(upstream))):
                had = (own == most) | (tf.math.is_nan(own) & tf.math.is_nan(most))
                mask = tf.cast(had, up.dtype)
                called = None if name is None else f"{name}.{at}.backward"
                total, holders = allreduce([up, mask], called, Sum, 1.0, 1.0, process_set)
                by = tf.cast(before * after, up.dtype)
                found.append(total * by * mask / tf.maximum(holders, 1))
            return found

        return [_scaled(result, after) for result in results], gradient

    return list(reduced(*tensors))


def allgather(
    tensors: Sequence[tf.Tensor], name: str | None, process_set: ProcessSet
) -> list[tf.Tensor]:
    """Gathers tensors. The gradient is the average of all ranks' gradients for this rank's rows."""

    @tf.custom_gradient
    def gathered(*given: tf.Tensor) -> Any:
        [found] = run([gathering(given, name, process_set, "allgather")])
        *results, rows, at = found

        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            back = backward_name(name)
            reduced = allreduce(_dense(upstream), back, Average, 1.0, 1.0, process_set)
            parts = zip(reduced, tf.unstack(rows), given)
            return [own_rows(total, row, at, tensor) for total, row, tensor in parts]

        return results, gradient

    return list(gathered(*tensors))


def broadcast(
    tensor: tf.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
) -> tf.Tensor:
    """Returns the root's tensor.

    The gradient is the average of all ranks' gradients at the root, and zero elsewhere.
    """
    root_rank = whole_number("root_rank", root_rank)

    @tf.custom_gradient
    def copied(given: tf.Tensor) -> Any:
        [[result]] = run([copying(given, root_rank, name, process_set)])

        def gradient(*upstream: tf.Tensor) -> tf.Tensor:
            back = backward_name(name)
            [reduced] = allreduce(_dense(upstream), back, Average, 1.0, 1.0, process_set)
            # Zeros that depend on the reduced value, so that all ranks take part in a second
            # differentiation.
            return reduced if rank() == root_rank else reduced * 0

        return result, gradient

    return copied(tensor)


def copying(tensor: tf.Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Start:
    """Prepares a broadcast; ``run`` starts it."""

    def begin(given: Sequence[tf.Tensor]) -> Handle[list[tf.Tensor]]:
        handle = collectives.broadcast(given[0], root_rank, name, process_set)
        return handle._map(lambda result: [result])

    return Start([tensor], begin, [like(tensor)])


def alltoall(
    tensor: tf.Tensor, splits: tf.Tensor | None, name: str | None, process_set: ProcessSet
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the received rows, and an int32 vector with the number of rows from each rank.

    The gradient is sent back to where the rows came from.
    """
    equal = splits is None

    @tf.custom_gradient
    def exchanged(given: tf.Tensor) -> Any:
        def begin(now: Sequence[tf.Tensor]) -> Handle[list[tf.Tensor]]:
            parts = None if equal else [int(each) for each in now[1].numpy()]
            handle = collectives.alltoall(now[0], parts, name, process_set)
            return handle._map(lambda found: [found[0], tf.constant(found[1], tf.int32)])

        sent = [given] if splits is None else [given, splits]
        counts = Result(tf.int32, tf.TensorShape([None]))
        [[result, received]] = run([Start(sent, begin, [like_rows(given), counts])])

        def gradient(upstream: tf.Tensor, _: Any) -> tf.Tensor:
            back, _ = alltoall(_dense([upstream])[0], received, backward_name(name), process_set)
            # Rows beyond the splits were not sent.
            missing = tf.shape(given)[0] - tf.shape(back)[0]
            return tf.pad(back, [[0, missing]] + [[0, 0]] * (len(given.shape) - 1))

        return (result, received), gradient

    result, received = exchanged(tensor)
    return result, received


def reducescatter(
    tensors: Sequence[tf.Tensor],
    name: str | None,
    op: ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> list[tf.Tensor]:
    """Returns this rank's rows of the reduced tensors.

    The gradient is the allgather of the gradients; for a sum, times the number of ranks.
    """
    before, after = factors(prescale_factor, postscale_factor)

    @tf.custom_gradient
    def scattered(*given: tf.Tensor) -> Any:
        def begin(now: Sequence[tf.Tensor]) -> Handle[list[tf.Tensor]]:
            return collectives.reducescatter(now, name, op, before, after, process_set)

        [results] = run([Start(given, begin, [like_rows(tensor) for tensor in given])])

        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            if op not in (Average, Sum):
                raise NotImplementedError(f"a reducescatter with {op!r} can't be differentiated")
            by = before * after * (members(process_set) if op == Sum else 1)
            ups = [up * tf.cast(by, up.dtype) for up in _dense(upstream)]
            return allgather(ups, backward_name(name), process_set)

        return results, gradient

    return list(scattered(*tensors))


def _dense(gradients: Sequence[Any]) -> list[tf.Tensor]:
    return [as_tensor(gradient) for gradient in gradients]
