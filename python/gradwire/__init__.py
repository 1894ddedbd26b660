"""Gradwire averages gradients, and moves any tensor, between the processes of a training job.

```python
import numpy as np
import gradwire as gw

gw.init()  # under `gradwire run -np 4 -- python train.py`
mean = gw.allreduce(np.full(3, gw.rank(), np.float32), name="first")
print(gw.rank(), "of", gw.size(), mean)
```

``gradwire.torch`` is the same for PyTorch, with Horovod's interface. Every error is a
``GradwireError`` that names the rank, the host and the tensor, and says what to do.
"""

import importlib
from typing import Any

from gradwire import _draining as _draining
from gradwire._array_move_ops import (
    allgather,
    alltoall,
    broadcast,
    broadcast_,
    broadcast_async,
    gather,
    grouped_allgather,
    receive,
    scatter,
    send,
)
from gradwire._array_reduce_ops import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_async,
    grouped_reducescatter,
    reduce,
    reducescatter,
)
from gradwire._errors import (
    Cancelled,
    Disagreement,
    Forked,
    GradwireError,
    InvalidRequest,
    NotInitialized,
    NotLaunched,
    OutOfResources,
    PeerLost,
    WaitTimeout,
)
from gradwire._native import __version__
from gradwire._numpy import empty
from gradwire._objects import allgather_object, broadcast_object
from gradwire._ops import (
    Adasum,
    Average,
    BitAnd,
    BitOr,
    BitXor,
    Handle,
    Max,
    Min,
    Product,
    ReduceOp,
    Sum,
    barrier,
    join,
    poll,
    synchronize,
)
from gradwire._process_sets import ProcessSet, global_process_set
from gradwire._run import run
from gradwire._stopping import should_stop
from gradwire._timeline import start_timeline, stop_timeline
from gradwire._world import (
    abort,
    add_process_set,
    cross_rank,
    cross_size,
    get_process_set_ids_and_ranks,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mark_step,
    paused,
    rank,
    remove_process_set,
    shutdown,
    size,
    stats,
)

__all__ = [
    "Adasum",
    "Average",
    "BitAnd",
    "BitOr",
    "BitXor",
    "Cancelled",
    "Disagreement",
    "Forked",
    "GradwireError",
    "Handle",
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
    "WaitTimeout",
    "__version__",
    "abort",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_object",
    "cross_rank",
    "cross_size",
    "empty",
    "gather",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_async",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mark_step",
    "paused",
    "poll",
    "rank",
    "receive",
    "reduce",
    "reducescatter",
    "remove_process_set",
    "run",
    "scatter",
    "send",
    "should_stop",
    "shutdown",
    "size",
    "start_timeline",
    "stats",
    "stop_timeline",
    "synchronize",
]


def __getattr__(name: str) -> Any:
    """Imports ``gradwire.torch`` and the like when a program first uses them."""
    if name not in ("common", "elastic", "jax", "keras", "tensorflow", "torch"):
        raise AttributeError(f"module 'gradwire' has no attribute {name!r}")
    try:
        return importlib.import_module(f"gradwire.{name}")
    except ModuleNotFoundError as error:
        raise AttributeError(f"gradwire.{name} can't be imported: {error}") from error
