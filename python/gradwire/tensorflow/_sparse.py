"""The allreduce of ``tf.IndexedSlices``: an allgather of their rows and indices."""

from __future__ import annotations

import tensorflow as tf

from gradwire._errors import InvalidRequest
from gradwire._ops import Average, ReduceOp, Sum
from gradwire._process_sets import ProcessSet
from gradwire.tensorflow._derivatives import gathering
from gradwire.tensorflow._running import Start


def starting(
    slices: tf.IndexedSlices, name: str | None, op: ReduceOp, process_set: ProcessSet
) -> Start:
    """Prepares an allreduce of slices; ``finished`` converts its results.

    Raises:
        InvalidRequest: The reduction is neither Average nor Sum.
    """
    if op not in (Average, Sum):
        raise InvalidRequest(
            f"tf.IndexedSlices can't be reduced with {op!r}: use Average or Sum, or "
            "sparse_as_dense=True",
            kind="invalid",
        )
    # Named like an allreduce, so a rank with a dense tensor of that name fails immediately.
    return gathering([slices.values, slices.indices], name, process_set, kind="allreduce", op=op)


def finished(
    results: list[tf.Tensor], given: tf.IndexedSlices, op: ReduceOp, factor: float = 1.0
) -> tf.IndexedSlices:
    """Returns the slices of all ranks. Those with the same index are not added.

    Args:
        results: The results of the operation that ``starting`` has prepared.
        given: This rank's slices.
        op: The reduction.
        factor: A factor for the result.
    """
    values, indices, rows, _ = results
    if op == Average:
        # The number of contributing ranks: joined ranks have no rows.
        values = values / tf.cast(tf.shape(rows)[1], values.dtype)
    if factor != 1.0:
        values = values * tf.cast(factor, values.dtype)
    return tf.IndexedSlices(values, indices, given.dense_shape)
