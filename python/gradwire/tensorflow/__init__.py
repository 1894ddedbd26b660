"""Horovod's interface for TensorFlow 2: ``import gradwire.tensorflow as hvd`` runs its scripts.

```python
import tensorflow as tf
import gradwire.tensorflow as hvd

hvd.init()


@tf.function
def train_step(images, digits):
    with tf.GradientTape() as tape:
        loss = loss_of(digits, model(images, training=True))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss
```

All functions work eagerly and in a ``tf.function``, but not with XLA (``jit_compile=True``).
docs/frameworks.md lists the differences from Horovod.
"""

from gradwire import (
    Adasum,
    Average,
    BitAnd,
    BitOr,
    BitXor,
    Cancelled,
    Disagreement,
    Forked,
    GradwireError,
    Handle,
    InvalidRequest,
    Max,
    Min,
    NotInitialized,
    NotLaunched,
    OutOfResources,
    PeerLost,
    ProcessSet,
    Product,
    ReduceOp,
    Sum,
    WaitTimeout,
    __version__,
    abort,
    add_process_set,
    cross_rank,
    cross_size,
    get_process_set_ids_and_ranks,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mark_step,
    paused,
    rank,
    remove_process_set,
    run,
    should_stop,
    shutdown,
    size,
    start_timeline,
    stats,
    stop_timeline,
)
from gradwire import GradwireError as HorovodInternalError
from gradwire._built import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from gradwire.tensorflow import elastic, util
from gradwire.tensorflow._compression import (
    Compression,
    Compressor,
)
from gradwire.tensorflow._functions import (
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from gradwire.tensorflow._move_ops import (
    allgather,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    grouped_allgather,
    join,
)
from gradwire.tensorflow._optimizer import (
    DistributedOptimizer,
)
from gradwire.tensorflow._rank_ops import (
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from gradwire.tensorflow._reduce_ops import (
    allreduce,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from gradwire.tensorflow._sync_batch_norm import (
    SyncBatchNormalization,
)
from gradwire.tensorflow._tape import (
    DistributedGradientTape,
    PartialDistributedGradientTape,
)

__all__ = [
    "Adasum",
    "Average",
    "BitAnd",
    "BitOr",
    "BitXor",
    "Cancelled",
    "Compression",
    "Compressor",
    "Disagreement",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Forked",
    "GradwireError",
    "Handle",
    "HorovodInternalError",
    "InvalidRequest",
    "Max",
    "Min",
    "NotInitialized",
    "NotLaunched",
    "OutOfResources",
    "PartialDistributedGradientTape",
    "PeerLost",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "SyncBatchNormalization",
    "WaitTimeout",
    "__version__",
    "abort",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mark_step",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "paused",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "run",
    "should_stop",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stats",
    "stop_timeline",
    "util",
]
