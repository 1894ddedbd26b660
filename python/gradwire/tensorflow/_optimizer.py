"""``DistributedOptimizer`` of Horovod's TensorFlow interface, for optimizers of Keras 3."""

from __future__ import annotations

import keras

from gradwire._errors import InvalidRequest
from gradwire._ops import ReduceOp
from gradwire._process_sets import ProcessSet, global_process_set
from gradwire.keras import DistributedOptimizer as KerasOptimizer
from gradwire.tensorflow._compression import Compression, Compressor
from gradwire.tensorflow._gradients import Groups
from gradwire.tensorflow._tape import check_groups


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp | int | None = None,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> keras.optimizers.Optimizer:
    """Makes an optimizer of Keras apply the gradients of all ranks.

    Args:
        optimizer: An optimizer of Keras 3. Those of TensorFlow 1 are not supported.
        name: Ignored; exists for Horovod scripts. The optimizer keeps its name.
        use_locking: Ignored; exists for Horovod scripts.
        device_dense: Ignored; exists for Horovod scripts.
        device_sparse: Ignored; exists for Horovod scripts.
        compression: One of ``Compression``, or another subclass of ``Compressor``.
        sparse_as_dense: Whether gradients that are ``tf.IndexedSlices`` become dense tensors first.
        backward_passes_per_step: How many gradients are accumulated before an exchange.
        op: The reduction; ``Average`` by default.
        gradient_predivide_factor: The number by which gradients are divided before they are added.
        average_aggregated_gradients: Whether accumulated gradients are averaged, and not added.
        num_groups: Deprecated: use ``groups``.
        groups: The number of groups that gradients are exchanged in, or a list of lists of
            variables. By default, groups are made by size.
        process_set: The participating ranks. The default is all ranks.
        scale_local_gradients: Whether gradients of local variables are divided by the number of
            ranks.

    Returns:
        The given optimizer.

    Raises:
        InvalidRequest: An argument is invalid.
    """
    del use_locking, device_dense, device_sparse
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise InvalidRequest(
            f"optimizer is a {type(optimizer).__name__}, not an optimizer of Keras 3; those of "
            "TensorFlow 1 and Keras 2 are not supported",
            kind="invalid",
        )
    return KerasOptimizer(
        optimizer,
        name=name,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        groups=check_groups(num_groups, groups),
        process_set=process_set,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        scale_local_gradients=scale_local_gradients,
    )
