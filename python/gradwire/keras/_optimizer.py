"""``DistributedOptimizer`` for Keras 3.

The given optimizer changes its class: to a subclass with the same name, which exchanges gradients
where Keras clips them. That is once per update, after the accumulation of gradients, and before
clipping and weight decay. Models are saved with the original class, so they load without Gradwire.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import keras
from keras.src import api_export
from keras.src.saving import object_registration

from gradwire._arguments import whole_number
from gradwire._errors import InvalidRequest
from gradwire._ops import ReduceOp
from gradwire._process_sets import ProcessSet, global_process_set
from gradwire._world import members
from gradwire.keras import _backends, _xla

_LOSS_SCALE = (
    "a DistributedOptimizer can't be combined with a LossScaleOptimizer, because the ranks would "
    "skip different steps: use the dtype policy mixed_bfloat16, or compile(auto_scale_loss=False)"
)


class _Options:
    """What a distributed optimizer keeps besides Keras' own attributes."""

    def __init__(
        self, exchange: _backends.Exchange, process_set: ProcessSet, factor: int, scale_local: bool
    ) -> None:
        self.exchange, self.process_set, self.factor = exchange, process_set, factor
        self.scale_local = scale_local
        # The variables whose gradients stay here, by their identity, which needs a reference.
        self.local: dict[int, Any] = {}
        self.declared: list[Any] = []
        self.variables: list[Any] = []

    def __deepcopy__(self, memo: dict[int, object]) -> _Options:
        return self


class _Distributed:
    """The methods that a distributed optimizer overrides."""

    _gradwire: _Options

    def register_local_var(self, variable: Any) -> None:
        """Keeps the gradient of a variable on this rank: it is not exchanged.

        Args:
            variable: A variable of the model: that of Keras, or the one of TensorFlow or PyTorch
                in it.

        Raises:
            InvalidRequest: It is not a variable of the optimizer. Before the first step, which
                makes them known, that step raises it.
        """
        if not _backends.is_variable(variable):
            raise InvalidRequest(
                f"register_local_var() takes a variable of the model, and this is a "
                f"{type(variable).__name__}",
                kind="invalid",
            )
        if getattr(self, "built", False):
            self._check_known(variable)
        self._gradwire.declared.append(variable)
        self._gradwire.local[id(variable)] = variable

    def build(self, variables: Any) -> None:
        super().build(variables)  # type: ignore[misc]
        for each in self._gradwire.declared:
            self._check_known(each)

    def _check_known(self, variable: Any) -> None:
        known = self._trainable_variables  # type: ignore[attr-defined]
        if not any(variable is each or variable is each.value for each in known):
            name = getattr(variable, "path", None) or getattr(variable, "name", "of no name")
            raise InvalidRequest(
                f"the variable {name} of register_local_var() is not one of the "
                f"{len(known)} variables that this optimizer trains",
                kind="invalid",
            )

    def __setattr__(self, name: str, value: Any) -> None:
        # A LossScaleOptimizer clears this attribute of the optimizer that it wraps.
        if name == "loss_scale_factor":
            asking = sys._getframe(1).f_locals.get("self")
            if isinstance(asking, keras.optimizers.LossScaleOptimizer):
                raise InvalidRequest(_LOSS_SCALE, kind="invalid")
        super().__setattr__(name, value)

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        # ``_clip_gradients`` does not receive the variables.
        self._gradwire.variables = list(trainable_variables)
        super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        options = self._gradwire
        given, variables = list(grads), options.variables
        if len(given) != len(variables):
            raise InvalidRequest(
                f"Keras clips {len(given)} gradients of {len(variables)} variables: this release "
                "of Keras is not supported",
                kind="invalid",
            )
        if options.factor != 1:
            given = [gradient * options.factor for gradient in given]
        local = options.local
        shared = [
            at
            for at, each in enumerate(variables)
            if id(each) not in local and id(each.value) not in local
        ]
        reduced = _backends.in_update(
            self, options.exchange, [given[at] for at in shared], [variables[at] for at in shared]
        )
        if options.scale_local and len(shared) < len(given):
            size = members(options.process_set)
            given = [_backends.divided(gradient, size) for gradient in given]
        for at, gradient in zip(shared, reduced):
            given[at] = gradient
        return super()._clip_gradients(given)  # type: ignore[misc]


def is_distributed(optimizer: object) -> bool:
    """Returns whether an optimizer exchanges its gradients."""
    return isinstance(optimizer, _Distributed)


@functools.cache
def _distributed(kind: Any) -> Any:
    """Returns the subclass of an optimizer's class that exchanges gradients."""

    def from_config(_: Any, /, config: dict[str, Any], **options: Any) -> Any:
        """Returns an optimizer of the original class, which exchanges nothing."""
        return kind.from_config(config, **options)

    attributes: dict[str, Any] = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "from_config": classmethod(from_config),
    }
    made = type(kind.__name__, (_Distributed, kind), attributes)
    # In a saved model, Keras writes the name of the original class.
    public = api_export.get_name_from_symbol(kind)
    if public is not None:
        api_export.REGISTERED_OBJS_TO_NAMES[made] = public
    registered = object_registration.GLOBAL_CUSTOM_NAMES.get(kind)
    if registered is not None:
        object_registration.GLOBAL_CUSTOM_NAMES[made] = registered
    return made


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp | int | None = None,
    groups: Any = None,
    num_groups: int = 0,
    process_set: ProcessSet = global_process_set,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    scale_local_gradients: bool = True,
) -> keras.optimizers.Optimizer:
    """Makes an optimizer apply the gradients of all ranks.

    The optimizer keeps its name, its configuration and its state. Gradients are exchanged once per
    update: after Keras' ``gradient_accumulation_steps``, and before clipping. XLA is switched off
    for models that are compiled with it.

    Args:
        optimizer: An optimizer of Keras 3, which is changed.
        name: Ignored; exists for Horovod scripts.
        device_dense: Ignored; exists for Horovod scripts.
        device_sparse: Ignored; exists for Horovod scripts.
        compression: One of ``Compression``, or another class with ``compress`` and ``decompress``.
            None compresses nothing.
        sparse_as_dense: Whether gradients that are ``tf.IndexedSlices`` become dense tensors first.
        gradient_predivide_factor: The number by which gradients are divided before they are added.
        op: The reduction; ``Average`` by default.
        groups: The number of groups that gradients are exchanged in, or a list of lists of
            variables. By default, groups are made by size.
        num_groups: Deprecated: use ``groups``.
        process_set: The participating ranks. The default is all ranks.
        backward_passes_per_step: How many gradients are accumulated before an exchange: Keras'
            ``gradient_accumulation_steps``.
        average_aggregated_gradients: Whether these gradients are averaged, as Keras does it, and
            not added.
        scale_local_gradients: Whether gradients of local variables are divided by the number of
            ranks. ``register_local_var`` of the optimizer declares such a variable.

    Returns:
        The given optimizer.

    Raises:
        InvalidRequest: An argument is invalid, the optimizer is a ``LossScaleOptimizer``, or the
            backend of Keras is not supported.

    Example:
        ```python
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size()))
        model.compile(optimizer, "sparse_categorical_crossentropy")
        model.fit(images, digits, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        ```
    """
    del name, device_dense, device_sparse
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise InvalidRequest(
            f"optimizer is a {type(optimizer).__name__}, not an optimizer of Keras 3",
            kind="invalid",
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise InvalidRequest(_LOSS_SCALE, kind="invalid")
    passes = whole_number("backward_passes_per_step", backward_passes_per_step, least=1)
    exchange = _backends.exchange(
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        groups or num_groups or None,
        process_set,
    )
    if passes != 1:
        if optimizer.built or optimizer.gradient_accumulation_steps:
            raise InvalidRequest(
                f"backward_passes_per_step={passes} needs an optimizer that has made no step and "
                "has no gradient_accumulation_steps",
                kind="invalid",
            )
        optimizer.gradient_accumulation_steps = passes
    factor = 1 if average_aggregated_gradients else passes
    if not isinstance(optimizer, _Distributed):
        kind: Any = type(optimizer)
        optimizer.__class__ = _distributed(kind)
    options = _Options(exchange, process_set, factor, scale_local_gradients)
    object.__setattr__(optimizer, "_gradwire", options)
    if keras.backend.backend() == "tensorflow":
        _xla.switch_off()
    return optimizer


def PartialDistributedOptimizer(
    optimizer: keras.optimizers.Optimizer, local_layers: Any = None, **options: Any
) -> keras.optimizers.Optimizer:
    """Makes an optimizer apply the gradients of all ranks, except those of some layers.

    Args:
        optimizer: An optimizer of Keras 3, which is changed.
        local_layers: A Keras layer, or several, whose gradients stay on their rank. They must be
            built.
        **options: The further arguments of ``DistributedOptimizer``.

    Returns:
        The given optimizer.

    Raises:
        InvalidRequest: An argument is invalid, as for ``DistributedOptimizer``.
    """
    layers = [] if local_layers is None else local_layers
    layers = [layers] if isinstance(layers, keras.layers.Layer) else list(layers)
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise InvalidRequest(
                f"local_layers contains a {type(layer).__name__}, not a Keras layer",
                kind="invalid",
            )
    made = DistributedOptimizer(optimizer, **options)
    for layer in layers:
        # One list of layers may be for several optimizers, of which each trains some.
        made._gradwire.local.update((id(weight), weight) for weight in layer.trainable_weights)
    return made
