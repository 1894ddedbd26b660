"""DDP's gradients through Gradwire, whatever backend the process group has.

import gradwire.torch as gw

gw.init()
model = DistributedDataParallel(model, gradient_as_bucket_view=True)
model.register_comm_hook(gw.DdpHookState(), gw.ddp_hook)

With ``gradient_as_bucket_view=True`` DDP's buckets move into shared memory when they are first seen, and nothing
is copied any more but by DDP itself, from the gradients that autograd makes. DDP knows nothing of it: it has a
tensor for each bucket and one for each parameter's part of it, and gives both to the hook, which puts other memory
under them. That DDP has really used that memory is not believed but looked at, each time: an address for
each parameter.
"""

# No annotations as text here: DDP looks at those of the hook.
import itertools
from datetime import timedelta
from typing import Any, Optional

import torch
from torch._C._distributed_c10d import GradBucket

from gradwire import _native
from gradwire._ops import Average, ReduceOp
from gradwire._world import ProcessSet, global_process_set
from gradwire.torch._adapter import as_tensor, collectives
from gradwire.torch._compression import Compression, Compressor, NoneCompressor
from gradwire.torch._slots import copied
from gradwire.torch.distributed._work import Work

_PLACE = "_gradwire_place"


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


class _Place:
    """A bucket in shared memory. It is kept by DDP's tensor of the bucket, and so goes when that does."""

    def __init__(self, gradients: torch.Tensor) -> None:
        self.buffer: _native.Buffer = collectives.place(gradients)
        self.memory: torch.Tensor = as_tensor(self.buffer)
        # Where each parameter's gradient is, and its part of the memory.
        self.parts: list[tuple[int, torch.Tensor]] = []

    @staticmethod
    def of(bucket: GradBucket, gradients: torch.Tensor) -> Optional["_Place"]:
        """The bucket's place, which it gets now if it has none; None where it can't have one."""
        known = getattr(gradients, _PLACE, None)
        if known is not None:
            if gradients.data_ptr() != known.memory.data_ptr():
                return None
            known._look(bucket)
            return known
        own = [parameter.grad for parameter in bucket.parameters()]
        if gradients.device.type != "cpu" or gradients.numel() == 0 or _tensors_on(gradients) != len(own) + 1:
            return None
        for grad, part in zip(own, bucket.gradients()):
            # They are not the bucket's parts where DDP has gradients of their own, or none yet.
            if grad is None or grad.data_ptr() != part.data_ptr() or grad.dtype != gradients.dtype:
                return None
        place = _Place(gradients)
        copied(gradients)
        place._take([*(grad for grad in own if grad is not None), gradients])
        return place

    def _take(self, tensors: list[torch.Tensor]) -> None:
        """Puts the memory under the bucket's parts and under the bucket itself, the last of them."""
        *parts, whole = tensors
        first, size = whole.data_ptr(), whole.element_size()
        for tensor in tensors:
            with torch.no_grad():
                at = (tensor.data_ptr() - first) // size
                tensor.set_(self.memory.untyped_storage(), at, tensor.shape, tensor.stride())
        self.parts = [(part.data_ptr(), part.detach()) for part in parts]
        setattr(whole, _PLACE, self)

    def _look(self, bucket: GradBucket) -> None:
        """Sees to it that the memory has what DDP has."""
        for parameter, (address, part) in zip(bucket.parameters(), self.parts):
            grad = parameter.grad
            if grad is None:
                part.zero_()  # this rank has not used it
            elif grad.data_ptr() != address:
                # DDP has a tensor for it that is not the one that was moved. Results it copies by itself.
                part.copy_(grad)
                copied(part)


def _tensors_on(bucket: torch.Tensor) -> int:
    """How many tensors there are on a bucket's memory.

    DDP has one for each parameter and one for the bucket. Where there are more the program has made some, and a
    gradient may be one of those, which DDP does not tell from its own and can't be given other memory.
    """
    storage = bucket.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # the last one is this function's


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
    name = f"{state.name}.{bucket.index()}"
    small, ctx = compression.compress(gradients)
    place = _Place.of(bucket, gradients) if compression is NoneCompressor else None
    if place is not None:
        memory = place.buffer
    else:
        memory = collectives.place(small)
        copied(small)
    handle = collectives.reduced([memory], name, state.op, 1.0, 1.0, state.process_set, priority=bucket.index())

    def finish(_: list[Any]) -> None:
        # DDP takes the gradients out of what the future gives it: shared memory will do.
        if place is None or gradients.data_ptr() != place.memory.data_ptr():
            work.value = compression.decompress(collectives.adapter.view(memory, gradients), ctx)

    work = Work(f"the bucket {name!r} of DDP", [handle], finish, gradients, state.timeout, [gradients.device])
    return work.get_future()
