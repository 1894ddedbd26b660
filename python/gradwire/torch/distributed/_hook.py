"""DDP's gradients by Gradwire, with any backend of the process group.

```python
import gradwire.torch as gw

gw.init()
model = DistributedDataParallel(model, gradient_as_bucket_view=True)
model.register_comm_hook(gw.DdpHookState(), gw.ddp_hook)
```

With ``gradient_as_bucket_view=True`` DDP's buckets are moved to shared memory when they are first
seen. After that only DDP itself copies, from the gradients that autograd makes. DDP does not
notice: it has a tensor for each bucket and one for each parameter's part of it, and gives both to
the hook, which puts other memory under them. Each time the hook checks that DDP has really used
that memory, by the address of each parameter's gradient.
"""

# Without `from __future__ import annotations`: DDP reads the annotations of the hook.
import itertools
from datetime import timedelta
from typing import Any, Optional

import torch
from torch._C._distributed_c10d import GradBucket

from gradwire import _native
from gradwire._ops import Average, ReduceOp
from gradwire._world import ProcessSet, global_process_set, note_step
from gradwire.torch._adapter import as_tensor, collectives
from gradwire.torch._compression import Compression, Compressor, NoneCompressor
from gradwire.torch._slots import copied
from gradwire.torch.distributed._memory import overwrite
from gradwire.torch.distributed._work import Work

_PLACE = "_gradwire_place"


class DdpHookState:
    """How ``ddp_hook`` exchanges gradients. All ranks create their states in the same order.

    Args:
        process_set: The ranks that exchange their gradients. The default is all ranks.
        compression: The dtype that gradients have in shared memory: one of ``Compression``, or
            another subclass of ``Compressor``.
        op: ``Average``, or another reduction.
        timeout: The longest time to wait for a bucket.

    Example:
        ```python
        state = hvd.DdpHookState(compression=hvd.Compression.bf16)
        model.register_comm_hook(state, hvd.ddp_hook)
        ```
    """

    _states = itertools.count()

    def __init__(
        self,
        process_set: ProcessSet = global_process_set,
        compression: type[Compressor] = Compression.none,
        op: ReduceOp = Average,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        self.process_set, self.compression, self.op, self.timeout = (
            process_set,
            compression,
            op,
            timeout,
        )
        self.name = f"ddp{next(self._states)}"


class _Place:
    """A bucket in shared memory. DDP's tensor of the bucket holds it, and ends it."""

    def __init__(self, gradients: torch.Tensor) -> None:
        self.buffer: _native.Buffer = collectives.place(gradients)
        self.memory: torch.Tensor = as_tensor(self.buffer)
        # The address of each parameter's gradient, and its part of the memory.
        self.parts: list[tuple[int, torch.Tensor]] = []

    @staticmethod
    def of(bucket: GradBucket, gradients: torch.Tensor) -> Optional["_Place"]:
        """Returns the bucket's place, which may be new; None if the bucket can't have one."""
        known = getattr(gradients, _PLACE, None)
        if known is not None:
            if gradients.data_ptr() != known.memory.data_ptr():
                return None
            known._look(bucket)
            return known
        own = [parameter.grad for parameter in bucket.parameters()]
        if (
            gradients.device.type != "cpu"
            or gradients.numel() == 0
            or _tensors_on(gradients) != len(own) + 1
        ):
            return None
        for grad, part in zip(own, bucket.gradients()):
            # DDP has gradients of its own here, or none yet.
            if grad is None or grad.data_ptr() != part.data_ptr() or grad.dtype != gradients.dtype:
                return None
        place = _Place(gradients)
        copied(gradients)
        place._take([*(grad for grad in own if grad is not None), gradients])
        return place

    def _take(self, tensors: list[torch.Tensor]) -> None:
        """Puts the memory under the bucket's parts and under the bucket, the last tensor."""
        *parts, whole = tensors
        first, size = whole.data_ptr(), whole.element_size()
        for tensor in tensors:
            with torch.no_grad():
                at = (tensor.data_ptr() - first) // size
                tensor.set_(self.memory.untyped_storage(), at, tensor.shape, tensor.stride())
        self.parts = [(part.data_ptr(), part.detach()) for part in parts]
        setattr(whole, _PLACE, self)

    def _look(self, bucket: GradBucket) -> None:
        """Makes sure that the memory has the gradients that DDP has."""
        for parameter, (address, part) in zip(bucket.parameters(), self.parts):
            grad = parameter.grad
            if grad is None:
                part.zero_()  # this rank has not used it
            elif grad.data_ptr() != address:
                # DDP has another tensor for it than the one that was moved. DDP copies the result
                # itself.
                part.copy_(grad)
                copied(part)


def _tensors_on(bucket: torch.Tensor) -> int:
    """Returns the number of tensors on a bucket's memory.

    DDP has one for each parameter and one for the bucket. If there are more the program has made
    some. A gradient may be one of those; DDP takes it for its own, and it can't be given other
    memory.
    """
    storage = bucket.untyped_storage()
    return (
        torch._C._storage_Use_Count(storage._cdata) - 1
    )  # one more is the reference in this function


def _store_on_gpu(
    memory: _native.Buffer,
    small: torch.Tensor,
    ctx: Any,
    compression: type[Compressor],
    gradients: torch.Tensor,
) -> None:
    """Copies the result to DDP's bucket, by way of the tensor that was sent.

    A tensor of its own for the result would be a second bucket on the GPU in each step.
    """
    collectives.adapter.store(memory, small)
    if small is gradients:
        return
    # The copy converts what was only converted.
    casts = compression in (Compression.fp16, Compression.bf16)
    overwrite(gradients, small if casts else compression.decompress(small, ctx))


_default: Optional[DdpHookState] = None  # noqa: UP045 - DDP needs real types


def ddp_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduces a bucket of DDP's gradients over all ranks: a communication hook.

    Buckets that the next forward pass needs first are sent first. The last bucket marks a step for
    the metrics, as ``mark_step`` does.

    Args:
        state: A ``DdpHookState``, or None for the default one.
        bucket: DDP's bucket.

    Returns:
        A future of the reduced bucket, as DDP expects it.

    Raises:
        NotInitialized: ``init()`` has not been called.
        InvalidRequest: An argument is not usable. Nothing was started.

    Example:
        ```python
        hvd.init()
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        model.register_comm_hook(hvd.DdpHookState(), hvd.ddp_hook)
        ```
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
    handle = collectives.reduced(
        [memory], name, state.op, 1.0, 1.0, state.process_set, priority=bucket.index()
    )

    if bucket.is_last():
        note_step()

    def finish(_: list[Any]) -> None:
        if gradients.is_cuda:
            _store_on_gpu(memory, small, ctx, compression, gradients)
        elif place is None or gradients.data_ptr() != place.memory.data_ptr():
            # DDP takes the gradients from the value of the future, which may be shared memory.
            work.value = compression.decompress(collectives.adapter.view(memory, gradients), ctx)

    work = Work(
        f"the bucket {name!r} of DDP",
        [handle],
        finish,
        gradients,
        state.timeout,
        [gradients.device],
    )
    return work.get_future()
