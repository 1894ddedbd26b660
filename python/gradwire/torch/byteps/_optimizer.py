"""BytePS's optimizer: the one of ``gradwire.torch`` with BytePS's arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from gradwire._errors import InvalidRequest
from gradwire._ops import Average
from gradwire.torch import _functions
from gradwire.torch import _optimizer as horovods
from gradwire.torch._compression import Compression, Compressor
from gradwire.torch.byteps._ops import no_staleness

# What names a compressor of BytePS, in `compression_params`.
_COMPRESSORS = ("compressor", "ef", "momentum")


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: horovods.Named | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    staleness: int = 0,
    pipesgd_warmup_iter: int = 0,
    compression_params: Mapping[str, Any] | None = None,
) -> Any:
    """Makes an optimizer step with the average of all ranks' gradients.

    The first layers' gradients go first, because the next forward pass needs them first.

    Args:
        optimizer: A PyTorch optimizer.
        named_parameters: ``model.named_parameters()``, the same names on all ranks.
        compression: One of ``Compression``, or another subclass of ``Compressor``.
        backward_passes_per_step: How many backward passes add up before each exchange.
        staleness: 0.
        pipesgd_warmup_iter: Accepted with ``staleness=0``, where it has no effect.
        compression_params: ``{"fp16": True}`` is ``Compression.fp16``.

    Returns:
        The given optimizer, which now also has ``synchronize()``, ``skip_synchronize()`` and
        ``set_backward_passes_per_step(passes)``.

    Raises:
        NotInitialized: ``init()`` has not been called.
        ValueError: An argument is invalid, or the optimizer is already distributed.
        InvalidRequest: Stale gradients or one of BytePS's compressors are asked for.
    """
    no_staleness(staleness)
    given = {key: value for key, value in (compression_params or {}).items() if value}
    chosen = [f"{key}={given[key]!r}" for key in _COMPRESSORS if key in given]
    if chosen:
        raise InvalidRequest(
            f"compression_params with {', '.join(chosen)}: these compressors do not exist here; "
            "use {'fp16': True}, or data.compression=int8 between nodes, which keeps what it "
            "rounds off for the next step",
            kind="invalid",
        )
    if given.get("fp16"):
        compression = Compression.fp16
    return horovods.DistributedOptimizer(
        optimizer,
        named_parameters,
        compression=compression,
        backward_passes_per_step=backward_passes_per_step,
        op=Average,
    )


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]],
    root_rank: int,
    prefix: str = "Parameter.",
) -> None:
    """Copies the root's parameters to every rank, in place.

    Args:
        params: A ``state_dict()`` or ``named_parameters()``, with the same names, dtypes and shapes
            on all ranks.
        root_rank: The rank whose parameters all ranks receive.
        prefix: Accepted for compatibility; it has no effect.

    Raises:
        InvalidRequest: An argument is invalid on one of the ranks. Nothing was sent.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    _functions.broadcast_parameters(params, root_rank)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, prefix: str = "Parameter."
) -> None:
    """Copies the root's optimizer state and options to every rank.

    Args:
        optimizer: The optimizer, distributed or not.
        root_rank: The rank whose state all ranks receive.
        prefix: Accepted for compatibility; it has no effect.

    Raises:
        InvalidRequest: An argument is invalid on one of the ranks. Nothing was sent.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    _functions.broadcast_optimizer_state(optimizer, root_rank)
