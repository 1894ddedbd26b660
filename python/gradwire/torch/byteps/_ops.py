"""``push_pull``: BytePS's allreduce.

BytePS pairs tensors by the order in which their names are declared. It must be the same on all
ranks, and BytePS does not notice a difference. Here the ranks agree on names without declarations.
"""

from __future__ import annotations

import time

import torch

import gradwire
from gradwire._errors import InvalidRequest
from gradwire._ops import Average, Handle, Sum
from gradwire._process_sets import global_process_set
from gradwire._world import session
from gradwire.torch._adapter import collectives
from gradwire.torch._compression import Compression, Compressor
from gradwire.torch._reduce_ops import allreduce

# The time of the last call of ``get_pushpull_speed``, and the bytes exchanged until then.
_asked: tuple[float, int] | None = None


def declare(name: str, **parameters: object) -> None:
    """Does nothing: names need no declaration.

    Args:
        name: A name of ``push_pull``.
        **parameters: BytePS's options of a compressor; must be empty.

    Raises:
        InvalidRequest: There are options.
    """
    if parameters:
        raise InvalidRequest(
            f"declare('{name}', {', '.join(parameters)}): these compressors do not exist here; "
            "use Compression.fp16, or data.compression=int8 between nodes",
            kind="invalid",
        )


byteps_declare_tensor = declare


def push_pull_async(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
) -> Handle[torch.Tensor]:
    """Starts an allreduce and returns immediately. The tensor is not modified.

    Args:
        tensor: A dense tensor on any device. All ranks pass the same dtype and shape.
        average: Whether the result is the average, and not the sum.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        version: Accepted for compatibility; it has no effect.
        priority: Tensors with a larger number go first.

    Returns:
        A handle for ``synchronize``, which returns a new tensor.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
    """
    return _start(tensor, average, name, priority, in_place=False)


def push_pull_async_inplace(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    staleness: int = 0,
) -> Handle[torch.Tensor]:
    """Starts an allreduce in place and returns immediately.

    Args:
        tensor: A dense tensor on any device, which receives the result. All ranks pass the same
            dtype and shape.
        average: Whether the result is the average, and not the sum.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        version: Accepted for compatibility; it has no effect.
        priority: Tensors with a larger number go first.
        staleness: Must be 0.

    Returns:
        A handle for ``synchronize``, which returns the tensor.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
    """
    no_staleness(staleness)
    return _start(tensor, average, name, priority, in_place=True)


def push_pull(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    compression: type[Compressor] = Compression.none,
) -> torch.Tensor:
    """Reduces a tensor over all ranks; every rank gets the result. Differentiable.

    Args:
        tensor: A dense tensor on any device. All ranks pass the same dtype and shape.
        average: Whether the result is the average, and not the sum.
        name: Identifies the call across ranks. It must be given.
        version: Accepted for compatibility; it has no effect.
        priority: Tensors with a larger number go first, except those that need a gradient.
        compression: One of ``Compression``, or another subclass of ``Compressor``.

    Returns:
        A new tensor of the same dtype and shape, on the same device.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.

    Example:
        ```python
        mean = bps.push_pull(loss.detach(), name="loss")
        ```
    """
    if name is None:
        raise InvalidRequest(
            "push_pull needs a name: push_pull(tensor, name='loss')", kind="invalid"
        )
    if torch.is_grad_enabled() and tensor.requires_grad:
        op = Average if average else Sum
        return allreduce(tensor, name=_named(name), op=op, compression=compression)
    small, ctx = compression.compress(tensor)
    handle = _start(small, average, name, priority, in_place=False)
    return compression.decompress(handle.wait(), ctx)


def push_pull_inplace(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    staleness: int = 0,
) -> torch.Tensor:
    """Reduces a tensor over all ranks, in place.

    Args:
        tensor: A dense tensor on any device, which receives the result. All ranks pass the same
            dtype and shape.
        average: Whether the result is the average, and not the sum.
        name: Identifies the call across ranks. Unnamed calls are matched by their order.
        version: Accepted for compatibility; it has no effect.
        priority: Tensors with a larger number go first.
        staleness: Must be 0.

    Returns:
        The tensor.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    return push_pull_async_inplace(tensor, average, name, version, priority, staleness).wait()


def get_pushpull_speed() -> tuple[float, float]:
    """Returns how fast this rank has exchanged tensors since the last call.

    Returns:
        The time in seconds since 1970, and the speed in MB per second.

    Raises:
        NotInitialized: ``init()`` has not been called.
    """
    global _asked
    now, moved = time.monotonic(), gradwire.stats()["bytes"]
    since, before = _asked or (now, moved)
    _asked = (now, moved)
    return time.time(), (moved - before) / max(now - since, 1e-9) / 1e6


def no_staleness(staleness: int) -> None:
    """Raises an error unless gradients are of the current step.

    Raises:
        InvalidRequest: The value is not 0.
    """
    if staleness != 0:
        raise InvalidRequest(
            f"staleness={staleness}: a single call always gets the present gradients; use "
            "DistributedOptimizer(…, staleness=1) to apply those of the step before",
            kind="invalid",
        )


def _named(name: str | None) -> str | None:
    return None if name is None else f"push_pull.{name}"


def _start(
    tensor: torch.Tensor, average: bool, name: str | None, priority: int, *, in_place: bool
) -> Handle[torch.Tensor]:
    session()  # raises an error that says what to do
    if not isinstance(priority, int) or abs(priority) >= 1 << 31:
        raise InvalidRequest(
            f"priority={priority!r}: it must be a whole number of 32 bits", kind="invalid"
        )
    op = Average if average else Sum
    return collectives.allreduce(
        tensor, _named(name), op, 1.0, 1.0, global_process_set, in_place, priority
    )
