"""The exchange of a step's gradients, for tapes and optimizers.

Gradients are packed into buckets, in the reverse order of their variables, as a backward pass
produces them. In a graph, a bucket starts as soon as its gradients exist, and the only wait comes
after all starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from gradwire import _world
from gradwire._arguments import compressor
from gradwire._errors import InvalidRequest
from gradwire._ops import Adasum, Average, ReduceOp, factors, reduce_op
from gradwire._process_sets import ProcessSet, global_process_set
from gradwire.tensorflow import _together
from gradwire.tensorflow._compression import Compression, Compressor
from gradwire.tensorflow._derivatives import as_tensor

# A bucket of this size takes no more gradients. Each bucket costs a call into Python.
_BUCKET_BYTES = 8 << 20
Groups = int | Sequence[Sequence[Any]] | None


def name_of(variable: Any) -> str:
    """Returns the name of a variable; for Keras, with the names of its layers."""
    return str(getattr(variable, "path", None) or variable.name)


def _key(variable: Any) -> int:
    """Returns a key for a variable; a Keras variable has the key of its TensorFlow variable."""
    return id(getattr(variable, "value", variable) if hasattr(variable, "path") else variable)


class Exchange:
    """How gradients are exchanged.

    Args:
        compression: One of ``Compression``, or another subclass of ``Compressor``.
        sparse_as_dense: Whether ``tf.IndexedSlices`` become dense tensors first.
        op: The reduction; ``Average`` by default.
        gradient_predivide_factor: The number by which gradients are divided before they are added.
            The result is still the average.
        groups: The number of buckets, or the variables of each bucket. Each other variable has its
            own bucket.
        process_set: The participating ranks.

    Raises:
        InvalidRequest: An argument is invalid.
    """

    def __init__(
        self,
        compression: type[Compressor] = Compression.none,
        sparse_as_dense: bool = False,
        op: ReduceOp | int | None = None,
        gradient_predivide_factor: float = 1.0,
        groups: Groups = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        self.op, self.process_set = reduce_op(op), process_set
        self.compression, self.sparse_as_dense = compressor(compression), sparse_as_dense
        self.predivide, _ = factors(gradient_predivide_factor, 1.0)
        if self.predivide != 1.0 and self.op != Average:
            raise InvalidRequest(
                f"gradient_predivide_factor needs op=Average, not {self.op!r}", kind="invalid"
            )
        if self.predivide == 0.0:
            raise InvalidRequest("gradient_predivide_factor is 0", kind="invalid")
        if (isinstance(groups, int) and groups < 0) or (
            groups is not None and isinstance(groups, str)
        ):
            raise InvalidRequest(
                f"groups={groups!r}: it must be a number of groups, or a list of lists of "
                "variables",
                kind="invalid",
            )
        self.groups = groups or None

    @property
    def is_needed(self) -> bool:
        """Whether there are other ranks, or there may be some when a graph runs."""
        return _world.is_elastic() or _world.members(self.process_set) > 1

    def __call__(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        generic_names: bool = False,
        differentiable: bool = False,
    ) -> list[Any]:
        """Returns the reduced gradients; None for those that are None.

        Args:
            gradients: Tensors, ``tf.IndexedSlices`` and None. All ranks have the same ones.
            variables: Their variables, whose names identify the gradients across ranks.
            generic_names: Whether numbers identify them instead.
            differentiable: Whether a program may differentiate the results again.
        """
        results = list(gradients)
        if not self.is_needed:
            return results
        names = [
            f"{at}" if generic_names else name_of(variable) for at, variable in enumerate(variables)
        ]
        contexts: dict[int, Any] = {}
        sent: dict[int, Any] = {}
        for at in reversed(range(len(results))):
            gradient = results[at]
            if isinstance(gradient, tf.IndexedSlices) and self.sparse_as_dense:
                gradient = tf.convert_to_tensor(gradient)
            if isinstance(gradient, tf.IndexedSlices):
                values, contexts[at] = self.compression.compress(gradient.values)
                sent[at] = tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
            elif gradient is not None:
                sent[at], contexts[at] = self.compression.compress(as_tensor(gradient))
        buckets = list(self._buckets(sent, variables))
        # Variables may have the same name; requests in flight must not.
        seen: Counter[str] = Counter()
        parts = []
        for bucket in buckets:
            name = names[bucket[0]]
            called = f"{name}.{seen[name]}" if seen[name] else name
            seen[name] += 1
            parts.append(self._part([sent[at] for at in bucket], called))
        reduce = _together.differentiable_reduce if differentiable else _together.reduce
        for bucket, found in zip(buckets, reduce(parts, _world.note_step)):
            first = sent[bucket[0]]
            if isinstance(first, tf.IndexedSlices):
                slices = _together.reduced_slices(found, first)
                values = self.compression.decompress(slices.values, contexts[bucket[0]])
                results[bucket[0]] = tf.IndexedSlices(values, slices.indices, slices.dense_shape)
                continue
            for at, tensor in zip(bucket, found):
                results[at] = self.compression.decompress(tensor, contexts[at])
        return results

    def _part(self, given: list[Any], name: str) -> _together.Part:
        called = f"gradient.{name}"
        if isinstance(given[0], tf.IndexedSlices):
            return _together.slices_part(given[0], called, self.op, self.process_set)
        scales = 1.0 / self.predivide, self.predivide
        return _together.Dense(given, called, self.op, *scales, self.process_set)

    def _buckets(self, sent: dict[int, Any], variables: Sequence[Any]) -> Iterator[list[int]]:
        """Divides gradients into buckets, which are the same on all ranks."""
        alone = [at for at in sent if self._is_alone(sent[at])]
        yield from ([at] for at in alone)
        others = [at for at in sent if at not in set(alone)]
        if isinstance(self.groups, int):
            size, more = divmod(len(others), self.groups)
            ends = [(at + 1) * size + min(at + 1, more) for at in range(self.groups)]
            parts = (others[start:end] for start, end in zip([0, *ends], ends))
            yield from (part for part in parts if part)
        elif self.groups is not None:
            group_of = {
                _key(variable): at for at, group in enumerate(self.groups) for variable in group
            }
            grouped: dict[Any, list[int]] = {}
            for at in others:
                key = _key(variables[at])
                grouped.setdefault(group_of.get(key, f"alone {at}"), []).append(at)
            yield from grouped.values()
        else:
            yield from _by_size(others, sent)

    def _is_alone(self, gradient: Any) -> bool:
        sparse = isinstance(gradient, tf.IndexedSlices)
        return sparse or self.op == Adasum or gradient.shape.num_elements() is None


def _by_size(others: list[int], sent: dict[int, Any]) -> Iterator[list[int]]:
    bucket: list[int] = []
    nbytes = 0
    for at in others:
        bucket.append(at)
        nbytes += sent[at].shape.num_elements() * sent[at].dtype.size
        if nbytes >= _BUCKET_BYTES or len(bucket) == 1024:
            yield bucket
            bucket, nbytes = [], 0
    if bucket:
        yield bucket
