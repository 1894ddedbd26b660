"""Horovod's interface for PyTorch: ``import gradwire.torch as hvd`` runs Horovod scripts as is.

```python
import torch
import gradwire.torch as hvd

hvd.init()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
```

The package's README lists the differences from Horovod.
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
    allgather_object,
    barrier,
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
    poll,
    rank,
    remove_process_set,
    run,
    should_stop,
    shutdown,
    size,
    start_timeline,
    stats,
    stop_timeline,
    synchronize,
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
from gradwire.torch import compression as compression
from gradwire.torch import elastic
from gradwire.torch import functions as functions
from gradwire.torch import mpi_ops as mpi_ops
from gradwire.torch import optimizer as optimizer
from gradwire.torch import sync_batch_norm as sync_batch_norm
from gradwire.torch._compression import Compression, Compressor
from gradwire.torch._consistency import check_consistency
from gradwire.torch._functions import broadcast_optimizer_state, broadcast_parameters
from gradwire.torch._move_ops import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
)
from gradwire.torch._optimizer import DistributedOptimizer
from gradwire.torch._reduce_ops import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from gradwire.torch._slots import gradient_bytes_copied
from gradwire.torch._sparse import sparse_allreduce_async
from gradwire.torch._stepping import contributors
from gradwire.torch._sync_batch_norm import SyncBatchNorm
from gradwire.torch.distributed import DdpHookState, ddp_hook

__all__ = [
    "Adasum",
    "Average",
    "BitAnd",
    "BitOr",
    "BitXor",
    "Cancelled",
    "Compression",
    "Compressor",
    "DdpHookState",
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
    "PeerLost",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "SyncBatchNorm",
    "WaitTimeout",
    "__version__",
    "abort",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "check_consistency",
    "contributors",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "ddp_hook",
    "elastic",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gradient_bytes_copied",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mark_step",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "paused",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "run",
    "should_stop",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stats",
    "stop_timeline",
    "synchronize",
]
