"""``DistributedGradientTape``: a tape whose gradients are those of all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from gradwire._errors import InvalidRequest
from gradwire._ops import ReduceOp
from gradwire._process_sets import ProcessSet, global_process_set
from gradwire._world import members
from gradwire.tensorflow._compression import Compression, Compressor
from gradwire.tensorflow._gradients import Exchange, Groups
from gradwire.tensorflow._running import as_python


class _DistributedTape(tf.GradientTape):
    """A tape that shares the state of another one, so either may be in a ``with`` statement."""

    _exchange: Exchange
    _scale_local: bool
    _local: set[Any]

    def register_local_source(self, source: Any) -> None:
        """Keeps the gradient of a variable on this rank: it is not exchanged.

        Args:
            source: A variable of TensorFlow or Keras.
        """
        self._local.add(_ref(source))

    @as_python
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        **options: Any,
    ) -> Any:
        """Returns the gradients, reduced over all ranks.

        Args:
            target: What to differentiate: a tensor, or a list of tensors.
            sources: Variables: a list or another structure. All ranks pass the same ones.
            output_gradients: Gradients of ``target``, or None.
            use_generic_names: Whether numbers identify the gradients across ranks, and not the
                names of the variables, which may differ.
            **options: Further options of ``tf.GradientTape.gradient``.

        Returns:
            A structure like that of ``sources``. It has None for sources that ``target`` does not
            depend on. An outer tape can differentiate the gradients again.

        Raises:
            InvalidRequest: An argument is invalid.
            GradwireError: The exchange failed; the subclass and ``kind`` tell why.
        """
        found = super().gradient(target, sources, output_gradients, **options)
        flat_sources, flat = tf.nest.flatten(sources), tf.nest.flatten(found)
        shared = [at for at, each in enumerate(flat_sources) if _ref(each) not in self._local]
        reduced = self._exchange(
            [flat[at] for at in shared],
            [flat_sources[at] for at in shared],
            use_generic_names,
            differentiable=True,
        )
        results = [self._scaled(gradient) for gradient in flat]
        for at, gradient in zip(shared, reduced):
            results[at] = gradient
        return tf.nest.pack_sequence_as(sources, results)

    def _scaled(self, gradient: Any) -> Any:
        """Returns the gradient of a local source, divided as in an average of the ranks' losses."""
        if gradient is None or not self._scale_local:
            return gradient
        size = members(self._exchange.process_set)
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(gradient.values / size, gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(size, gradient.dtype)


def _ref(source: Any) -> Any:
    inner = source.value if hasattr(source, "path") and hasattr(source, "value") else source
    return inner.ref() if hasattr(inner, "ref") else id(inner)


def check_groups(num_groups: int, groups: Groups) -> Groups:
    """Returns the groups of ``groups`` or Horovod's deprecated argument ``num_groups``."""
    if num_groups == 0:
        return groups
    warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=3)
    return num_groups if groups is None else groups


@as_python
def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp | int | None = None,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """Returns a tape whose gradients are reduced over all ranks.

    Args:
        gradtape: A ``tf.GradientTape``, before or after it has recorded.
        device_dense: Ignored; exists for Horovod scripts.
        device_sparse: Ignored; exists for Horovod scripts.
        compression: One of ``Compression``, or another subclass of ``Compressor``.
        sparse_as_dense: Whether gradients that are ``tf.IndexedSlices`` become dense tensors first.
            Otherwise, the rows of all ranks are gathered.
        op: The reduction; ``Average`` by default.
        gradient_predivide_factor: The number by which gradients are divided before they are added,
            against overflow. The result is still the average.
        num_groups: Deprecated: use ``groups``.
        groups: The number of groups that gradients are exchanged in, or a list of lists of
            variables. By default, groups are made by size.
        process_set: The participating ranks. The default is all ranks.
        scale_local_gradients: Whether gradients of local sources are divided by the number of
            ranks.

    Returns:
        The tape. ``register_local_source`` excludes a variable from the exchange.

    Raises:
        InvalidRequest: An argument is invalid.

    Example:
        ```python
        with tf.GradientTape() as tape:
            loss = loss_of(model(images, training=True), digits)
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        ```
    """
    del device_dense, device_sparse
    if not isinstance(gradtape, tf.GradientTape):
        raise InvalidRequest(
            f"gradtape is a {type(gradtape).__name__}, not a tf.GradientTape", kind="invalid"
        )
    exchange = Exchange(
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        check_groups(num_groups, groups),
        process_set,
    )
    kind: Any = type(gradtape)
    if not issubclass(kind, _DistributedTape):
        kind = type(kind.__name__, (_DistributedTape, kind), {})
    tape: Any = kind.__new__(kind)
    tape.__dict__ = gradtape.__dict__
    tape._exchange, tape._scale_local, tape._local = exchange, scale_local_gradients, set()
    return tape


@as_python
def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp | int | None = None,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """Returns a tape whose gradients are reduced over all ranks, except those of some layers.

    Args:
        gradtape: A ``tf.GradientTape``, before or after it has recorded.
        device_dense: Ignored; exists for Horovod scripts.
        device_sparse: Ignored; exists for Horovod scripts.
        compression: One of ``Compression``, or another subclass of ``Compressor``.
        sparse_as_dense: Whether gradients that are ``tf.IndexedSlices`` become dense tensors first.
        op: The reduction; ``Average`` by default.
        gradient_predivide_factor: The number by which gradients are divided before they are added.
        num_groups: Deprecated: use ``groups``.
        groups: The number of groups that gradients are exchanged in, or a list of lists of
            variables. By default, groups are made by size.
        process_set: The participating ranks. The default is all ranks.
        local_layers: A Keras layer, or several, whose gradients stay on their rank.
        scale_local_gradients: Whether these gradients are divided by the number of ranks.

    Returns:
        The tape.

    Raises:
        InvalidRequest: An argument is invalid.
    """
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    given = [] if local_layers is None else local_layers
    for layer in given if isinstance(given, Iterable) else [given]:
        if not hasattr(layer, "trainable_weights"):
            raise InvalidRequest(
                f"local_layers contains a {type(layer).__name__}, not a Keras layer",
                kind="invalid",
            )
        for weight in layer.trainable_weights:
            tape.register_local_source(weight)
    return tape
