"""BytePS's interface for PyTorch: ``import gradwire.torch.byteps as bps`` runs BytePS scripts.

```python
import torch
import gradwire.torch.byteps as bps

bps.init()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * bps.size())
optimizer = bps.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
bps.broadcast_parameters(model.state_dict(), root_rank=0)
bps.broadcast_optimizer_state(optimizer, root_rank=0)
```

``gradwire run`` starts the processes instead of ``bpslaunch``. A server of BytePS corresponds to a
host of ``gradwire run --servers``. docs/byteps.md lists the differences.
"""

from gradwire import (
    Handle,
    broadcast_object,
    is_initialized,
    local_rank,
    local_size,
    poll,
    rank,
    shutdown,
    size,
    synchronize,
)
from gradwire._byteps import init, resume, suspend
from gradwire.torch._compression import Compression
from gradwire.torch.byteps import parallel
from gradwire.torch.byteps._ops import (
    byteps_declare_tensor,
    declare,
    get_pushpull_speed,
    push_pull,
    push_pull_async,
    push_pull_async_inplace,
    push_pull_inplace,
)
from gradwire.torch.byteps._optimizer import (
    DistributedOptimizer,
    broadcast_optimizer_state,
    broadcast_parameters,
)

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "Handle",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "byteps_declare_tensor",
    "declare",
    "get_pushpull_speed",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "parallel",
    "poll",
    "push_pull",
    "push_pull_async",
    "push_pull_async_inplace",
    "push_pull_inplace",
    "rank",
    "resume",
    "shutdown",
    "size",
    "suspend",
    "synchronize",
]
