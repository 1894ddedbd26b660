"""DDP's gradients through Gradwire, whatever backend the process group has.

import gradwire.torch as gw

gw.init()
model = DistributedDataParallel(model)
model.register_comm_hook(gw.DdpHookState(), gw.ddp_hook)
"""

# No annotations as text here: DDP looks at those of the hook.
import itertools
from datetime import timedelta
from typing import Any, Optional

import torch
from torch._C._distributed_c10d import GradBucket

from gradwire._ops import Average, ReduceOp
from gradwire._world import ProcessSet, global_process_set
from gradwire.torch._adapter import as_tensor, collectives
from gradwire.torch._compression import Compression, Compressor
from gradwire.torch.distributed._work import Work


class DdpHookState:
    """How the gradients are exchanged: among whom, compressed how, reduced how, waited for how long.

    All ranks make their states in the same order: each has names of its own.
    """

    _states = itertools.count()

    def __init__(
        self,
        process_set: ProcessSet = global_process_set,
        compression: type[Compressor] = Compression.none,
        op: ReduceOp = Average,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        self.process_set, self.compression, self.op, self.timeout = process_set, compression, op, timeout
        self.name = f"ddp{next(self._states)}"


_default: Optional[DdpHookState] = None  # noqa: UP045 - no text


def ddp_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket of gradients over the ranks: ``model.register_comm_hook(state, ddp_hook)``.

    The state is a ``DdpHookState``, or None for the usual one. The buckets that the next forward pass needs
    first, which come last, go first.
    """
    global _default
    if state is None:
        state = _default = _default or DdpHookState()
    gradients, compression = bucket.buffer(), state.compression
    small, ctx = compression.compress(gradients)
    name = f"{state.name}.{bucket.index()}"
    memory = collectives.place(small)
    handle = collectives.reduced([memory], name, state.op, 1.0, 1.0, state.process_set, priority=bucket.index())

    def finish(_: list[Any]) -> None:
        # DDP takes the gradients out of what the future gives it: shared memory will do.
        work.value = compression.decompress(as_tensor(memory).to(gradients.device), ctx)

    work = Work(f"the bucket {name!r} of DDP", [handle], finish, gradients, state.timeout, [gradients.device])
    return work.get_future()
