"""Collectives for JAX on CPUs, inside and outside of compiled functions.

```python
import jax
import optax
import gradwire.jax as gw

gw.init()
params = gw.broadcast_parameters(params)
tx = optax.chain(gw.average_gradients(), optax.adam(1e-3))
state = tx.init(params)

@jax.jit
def step(params, state, batch):
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, gw.allreduce(loss, name="loss")
```

Each rank has one device. The calls of the ranks are paired by name: the name of the call and the
path of each array in its tree. If a call in a compiled function fails, JAX raises a
``JaxRuntimeError`` with Gradwire's text, and ``last_error()`` returns the exception.
"""

from gradwire import (
    Average,
    BitAnd,
    BitOr,
    BitXor,
    Cancelled,
    Disagreement,
    Forked,
    GradwireError,
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
    broadcast_object,
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
from gradwire.jax._calls import (
    allgather,
    allreduce,
    alltoall,
    average_gradients,
    barrier,
    broadcast,
    broadcast_parameters,
    reducescatter,
)
from gradwire.jax._distributed import initialize_distributed
from gradwire.jax._errors import last_error

__all__ = [
    "Average",
    "BitAnd",
    "BitOr",
    "BitXor",
    "Cancelled",
    "Disagreement",
    "Forked",
    "GradwireError",
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
    "alltoall",
    "average_gradients",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "init",
    "initialize_distributed",
    "is_homogeneous",
    "is_initialized",
    "last_error",
    "local_rank",
    "local_size",
    "mark_step",
    "paused",
    "rank",
    "reducescatter",
    "remove_process_set",
    "run",
    "should_stop",
    "shutdown",
    "size",
    "start_timeline",
    "stats",
    "stop_timeline",
]
