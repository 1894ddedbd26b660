"""Horovod's interface for Keras 3, with Keras' backends TensorFlow, PyTorch and JAX.

```python
import keras
import gradwire.keras as hvd

hvd.init()
model = keras.Sequential([keras.layers.Dense(10, activation="softmax")])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * hvd.size()))
model.compile(optimizer, "sparse_categorical_crossentropy")
model.fit(images, digits, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
```

The collectives of this module take NumPy arrays. docs/frameworks.md lists the differences from
Horovod.
"""

from typing import Any

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
    allgather,
    allgather_object,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_object,
    cross_rank,
    cross_size,
    get_process_set_ids_and_ranks,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_size,
    mark_step,
    paused,
    rank,
    reducescatter,
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
from gradwire.keras import _backends, callbacks, elastic
from gradwire.keras._backends import last_error
from gradwire.keras._models import (
    broadcast_variables,
    load_model,
)
from gradwire.keras._optimizer import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
)

__all__ = [
    "Adasum",
    "Average",
    "BitAnd",
    "BitOr",
    "BitXor",
    "Cancelled",
    "Compression",
    "Disagreement",
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
    "PartialDistributedOptimizer",
    "PeerLost",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
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
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
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
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "last_error",
    "load_model",
    "local_rank",
    "local_size",
    "mark_step",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "paused",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "run",
    "should_stop",
    "shutdown",
    "size",
    "start_timeline",
    "stats",
    "stop_timeline",
]


def __getattr__(name: str) -> Any:
    """Returns ``Compression`` for the tensors of Keras' backend, when a program first asks."""
    if name == "Compression":
        return _backends.compressors()
    raise AttributeError(f"module 'gradwire.keras' has no attribute {name!r}")
