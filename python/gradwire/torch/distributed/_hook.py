"""Exchanges DDP's gradients with Gradwire, whatever the process group's backend.

```python
import gradwire.torch as gw

gw.init()
model = DistributedDataParallel(model, gradient_as_bucket_view=True)
model.register_comm_hook(gw.DdpHookState(), gw.ddp_hook)
```

With ``gradient_as_bucket_view=True``, the hook moves DDP's buckets to shared memory when it first
sees them. Afterwards, only DDP itself copies, from the gradients that autograd produces. The move
is transparent to DDP: it has a tensor for each bucket and one for each parameter's part of it, and
passes both to the hook, which replaces their memory. Each time, the hook checks the address of each
parameter's gradient to verify that DDP has used that memory.

A bucket's name contains the number of its model, because several models may share a state and a
backward pass. DDP does not tell the hook which model a bucket belongs to, and the order in which
buckets become ready differs between ranks that use different parameters. So models are numbered
when the hook is registered, which programs do in the same order on all ranks. For this, DDP's
method to register a hook is replaced, and passes DDP a state of our own; other hooks are not
affected.

With ``on_loss="skip"``, buckets of a step with a loss stay as they are; see ``_ddp_steps``.
"""

# Without `from __future__ import annotations`, because DDP inspects the hook's annotations.
import functools
import itertools
from datetime import timedelta
from typing import Any, Optional

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from gradwire import _native
from gradwire._arguments import compressor
from gradwire._errors import InvalidRequest
from gradwire._ops import Average, ReduceOp, reduce_op
from gradwire._process_sets import ProcessSet, global_process_set
from gradwire._world import note_step, session
from gradwire.elastic import State
from gradwire.torch._adapter import as_tensor, collectives
from gradwire.torch._compression import Compression, Compressor, NoneCompressor, decompressed
from gradwire.torch._slots import copied
from gradwire.torch._sparse import sparse_allreduce_async
from gradwire.torch.distributed._ddp_steps import PatientWork, Skip
from gradwire.torch.distributed._memory import overwrite
from gradwire.torch.distributed._work import Work

_PLACE = "_gradwire_place"


class DdpHookState:
    """How ``ddp_hook`` exchanges gradients. All ranks create their states in the same order.

    Several models may share a state if all ranks register the hook with them in the same order. A
    custom hook that calls ``ddp_hook`` needs a separate state for each model.

    Args:
        process_set: The ranks that exchange their gradients. The default is all ranks.
        compression: One of ``Compression``, or another subclass of ``Compressor``.
        op: ``Average``, or another reduction.
        timeout: The maximum time to wait for a bucket.
        on_loss: What happens if a rank of an elastic job is lost. ``"raise"``: DDP raises an error.
            ``"skip"``: all ranks skip the step, and training goes on with the ranks that are left.
            A new rank receives the model and the state of the optimizer from another one. Make the
            model with ``process_group=state.process_group``, and register the hook directly before
            the loop. This copies the model and the state of rank 0 to all ranks.
        optimizer: With ``on_loss="skip"``, the optimizer of the model. Its ``step`` ends each step
            with a vote, and it has ``skipped_steps``.
        state: With ``on_loss="skip"``, what else a new rank receives, such as an
            ``ObjectState(step=0)`` for the place in the loop.

    Raises:
        ValueError: An argument is invalid, or can't be combined with the others.
        InvalidRequest: This process has an optimizer with ``on_loss="skip"`` already.
        NotInitialized: ``init()`` has not been called; with ``on_loss="skip"`` only.

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
        on_loss: str = "raise",
        optimizer: Optional[torch.optim.Optimizer] = None,  # noqa: UP045
        state: Optional[State] = None,  # noqa: UP045
    ) -> None:
        compressor(compression)
        op = reduce_op(op)
        if not isinstance(process_set, ProcessSet):
            raise ValueError(f"process_set={process_set!r}: it must be a ProcessSet")
        if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
            raise ValueError(
                f"timeout={timeout!r}: it must be a positive datetime.timedelta, such as "
                "timedelta(minutes=30)"
            )
        _check_loss(on_loss, optimizer, state, process_set)
        self.process_set, self.compression, self.op, self.timeout = (
            process_set,
            compression,
            op,
            timeout,
        )
        self.skip = Skip(optimizer, state, timeout) if on_loss == "skip" else None
        # A process has only one state that skips. A new rank need not have made other states.
        self.name = f"ddp{next(self._states)}" if self.skip is None else "ddp.skip"
        # The number of models that use it.
        self._models = 0

    @property
    def process_group(self) -> Any:
        """The process group for the model, with ``on_loss="skip"``; None without."""
        return None if self.skip is None else self.skip.group


def _check_loss(on_loss: str, optimizer: Any, state: Any, process_set: ProcessSet) -> None:
    """Raises an error if ``on_loss`` is invalid, or can't be combined with other arguments."""
    if on_loss not in ("raise", "skip"):
        raise ValueError(f"on_loss={on_loss!r}: it must be 'raise' or 'skip'")
    if on_loss == "raise" and (optimizer is not None or state is not None):
        raise ValueError("optimizer and state require on_loss='skip'")
    if on_loss == "skip" and process_set is not global_process_set:
        raise ValueError(
            "on_loss='skip' can't be used with a part of the ranks: all ranks skip a step together"
        )


class _OfModel:
    """The state of one model, with which DDP calls the hook."""

    def __init__(self, state: DdpHookState) -> None:
        self.state = state
        self.name = f"{state.name}.{state._models}"


class _Place:
    """A bucket in shared memory, owned by DDP's tensor of the bucket."""

    def __init__(self, gradients: torch.Tensor) -> None:
        self.buffer: _native.Buffer = collectives.place(gradients)
        self.memory: torch.Tensor = as_tensor(self.buffer)
        # Each parameter's gradient address and part of the memory.
        self.parts: list[tuple[int, torch.Tensor]] = []

    @staticmethod
    def of(bucket: GradBucket, gradients: torch.Tensor) -> Optional["_Place"]:
        """Returns the bucket's place, created if necessary; None if the bucket can't have one."""
        known = getattr(gradients, _PLACE, None)
        if known is not None and not session().owns(known.buffer):
            # The place's session has ended. The tensors keep its memory until they move again, in
            # the next pass: DDP still has views of the last result, which this pass drops.
            delattr(gradients, _PLACE)
            known = None
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
            # DDP has separate gradients here, or none yet.
            if grad is None or grad.data_ptr() != part.data_ptr() or grad.dtype != gradients.dtype:
                return None
        place = _Place(gradients)
        copied(gradients)
        place._take([*(grad for grad in own if grad is not None), gradients])
        return place

    def _take(self, tensors: list[torch.Tensor]) -> None:
        """Moves the bucket's parts and the bucket (the last tensor) to this memory."""
        *parts, whole = tensors
        first, size = whole.data_ptr(), whole.element_size()
        for tensor in tensors:
            with torch.no_grad():
                at = (tensor.data_ptr() - first) // size
                tensor.set_(self.memory.untyped_storage(), at, tensor.shape, tensor.stride())
        self.parts = [(part.data_ptr(), part.detach()) for part in parts]
        setattr(whole, _PLACE, self)

    def _look(self, bucket: GradBucket) -> None:
        """Ensures that the memory contains DDP's gradients."""
        for parameter, (address, part) in zip(bucket.parameters(), self.parts):
            grad = parameter.grad
            if grad is None:
                part.zero_()  # this rank has not used the parameter
            elif grad.data_ptr() != address:
                # DDP uses a different tensor than the moved one, and copies the result itself.
                part.copy_(grad)
                copied(part)


def _tensors_on(bucket: torch.Tensor) -> int:
    """Returns the number of tensors on a bucket's memory.

    DDP has one for each parameter and one for the bucket. The program may have created more, and a
    gradient that is one of them can't be moved.
    """
    storage = bucket.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # without this function's reference


def _store_on_gpu(
    memory: _native.Buffer,
    small: torch.Tensor,
    ctx: Any,
    compression: type[Compressor],
    gradients: torch.Tensor,
) -> None:
    """Copies the result to DDP's bucket, through the tensor that was sent.

    A separate tensor for the result would need a second bucket on the GPU in each step.
    """
    collectives.adapter.store(memory, small)
    if small is gradients:
        return
    # These compressors only convert, and so does the copy.
    casts = compression in (Compression.fp16, Compression.bf16)
    overwrite(gradients, small if casts else decompressed(compression, small, ctx, gradients))


_default: Optional[DdpHookState] = None  # noqa: UP045 - DDP needs real types


def _state(given: Any) -> Any:
    """Returns the given state, or the default one for None."""
    global _default
    if given is None:
        given = _default = _default or DdpHookState()
    return given


def ddp_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that reduces a bucket of DDP's gradients over all ranks.

    Buckets that the next forward pass needs first are sent first. The last bucket records a step in
    the metrics, as ``mark_step`` does.

    Args:
        state: A ``DdpHookState``, or None for the default one.
        bucket: DDP's bucket.

    Returns:
        A future of the reduced bucket, as DDP expects.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.

    Example:
        ```python
        hvd.init()
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        model.register_comm_hook(hvd.DdpHookState(), hvd.ddp_hook)
        ```
    """
    if isinstance(state, _OfModel):
        model, state = state.name, state.state
    else:  # called by a custom hook
        state = _state(state)
        model = state.name
    if state.skip is None:
        return _exchange(state, model, bucket).get_future()
    if state.skip.losses.lost is None:
        with state.skip.losses.patience():
            return _exchange(state, model, bucket).get_future()
    unchanged: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    unchanged.set_result(bucket.buffer())
    return unchanged


def _exchange(state: Any, model: str, bucket: GradBucket) -> Work:
    """Starts the exchange of a bucket."""
    gradients, compression = bucket.buffer(), state.compression
    name = f"{model}.{bucket.index()}"
    small, ctx = compression.compress(gradients)
    is_dense = gradients.layout == torch.strided
    place = _Place.of(bucket, gradients) if is_dense and compression is NoneCompressor else None
    if not is_dense:
        rows = sparse_allreduce_async(small, name, state.op, state.process_set)
        handle = rows._native
    elif place is not None:
        memory = place.buffer
    else:
        memory = collectives.place(small)
        copied(small)
    if is_dense:
        handle = collectives.reduced(
            [memory], name, state.op, 1.0, 1.0, state.process_set, priority=bucket.index()
        )

    if bucket.is_last():
        note_step()

    def finish(results: list[Any]) -> None:
        if not is_dense:
            rows_of_all = rows._finish(results[0])
            work.value = decompressed(compression, rows_of_all, ctx, gradients)
        elif gradients.is_cuda:
            _store_on_gpu(memory, small, ctx, compression, gradients)
        elif place is None or gradients.data_ptr() != place.memory.data_ptr():
            # DDP copies the gradients from the future's value, which may be shared memory.
            result = collectives.adapter.view(memory, gradients)
            work.value = decompressed(compression, result, ctx, gradients)

    work = (Work if state.skip is None else PatientWork)(
        f"the bucket {name!r} of DDP",
        [handle],
        finish,
        gradients,
        state.timeout,
        [gradients.device],
        members=frozenset(state.process_set.ranks),
    )
    if isinstance(work, PatientWork):
        work.losses, work.joined = state.skip.losses, state.skip.losses.joined
    return work


_Ddp: Any = DistributedDataParallel
_register = _Ddp.register_comm_hook


@functools.wraps(_register)
def _numbered_register(self: Any, state: Any, hook: Any) -> Any:
    if hook is not ddp_hook:
        return _register(self, state, hook)
    state = _state(state)
    if not isinstance(state, DdpHookState):
        raise InvalidRequest(
            f"ddp_hook takes a DdpHookState or None, not {type(state).__name__}", kind="invalid"
        )
    if state.skip is not None:
        state.skip.check(self)
    of_model = _OfModel(state)
    registered = _register(self, of_model, hook)
    state._models += 1  # not if DDP has rejected it, like a second hook
    if state.skip is not None:
        state.skip.begin(self, lambda: _register(self, of_model, hook))
    return registered


_Ddp.register_comm_hook = _numbered_register
