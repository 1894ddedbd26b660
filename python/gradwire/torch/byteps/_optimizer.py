"""BytePS's optimizer: the one of ``gradwire.torch`` with BytePS's arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from gradwire import _byteps
from gradwire._arguments import whole_number
from gradwire._errors import InvalidRequest
from gradwire._ops import Average
from gradwire._world import is_elastic, session
from gradwire.torch import _functions, _scaler
from gradwire.torch import _optimizer as horovods
from gradwire.torch._compression import Compression, Compressor
from gradwire.torch._wrapping import wrap
from gradwire.torch.byteps import _asynchronous, _stale

# The keys of `compression_params` that select a compressor of BytePS.
_COMPRESSORS = ("compressor", "ef", "momentum")
# Its other keys, which have no effect without a compressor, and Gradwire's.
_PARAMETERS = ("fp16", "k", "normalize", "partition", "scaling", "seed")


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

    With ``BYTEPS_ENABLE_ASYNC=1``, ranks don't wait for each other: each step changes the
    parameters of its rank with its own gradients, and the differences of all ranks are added in the
    background. They are summed, not averaged. ``BYTEPS_ASYNC_MAX_STEPS_AHEAD`` limits how many
    steps a rank may be ahead of the slowest one; by default there is no limit.

    Args:
        optimizer: A PyTorch optimizer.
        named_parameters: ``model.named_parameters()``, the same names on all ranks.
        compression: One of ``Compression``, or another subclass of ``Compressor``.
        backward_passes_per_step: How many backward passes add up before each exchange.
        staleness: 1 applies the gradients of the step before, so that their exchange overlaps with
            a whole step (Pipe-SGD, Li et al., NeurIPS 2018). 0 applies those of the same step.
        pipesgd_warmup_iter: With ``staleness=1``, how many first steps apply their own gradients.
        compression_params: ``{"fp16": True}`` is ``Compression.fp16``.

    Returns:
        The given optimizer, which now also has ``synchronize()``, ``skip_synchronize()`` and
        ``set_backward_passes_per_step(passes)``; if it is asynchronous, also ``finish()``.

    Raises:
        NotInitialized: ``init()`` has not been called.
        ValueError: An argument is invalid, or the optimizer is already distributed.
        InvalidRequest: The arguments select one of BytePS's compressors, have unknown keys, or
            can't be combined with asynchronous training.
    """
    given = {key: value for key, value in (compression_params or {}).items() if value}
    unknown = [key for key in compression_params or {} if key not in _COMPRESSORS + _PARAMETERS]
    if unknown:
        raise InvalidRequest(
            f"unknown keys in compression_params: {', '.join(map(repr, unknown))}; "
            "{'fp16': True} compresses",
            kind="invalid",
        )
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
    if staleness not in (0, 1):
        raise InvalidRequest(f"staleness={staleness!r}: it must be 0 or 1", kind="invalid")
    warmup = whole_number("pipesgd_warmup_iter", pipesgd_warmup_iter)
    is_asynchronous = _byteps.is_asynchronous()
    if not is_asynchronous and staleness == 0:
        return horovods.DistributedOptimizer(
            optimizer,
            named_parameters,
            compression=compression,
            backward_passes_per_step=backward_passes_per_step,
            op=Average,
        )
    session()  # raises an error that says what to do
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidRequest(
            f"optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer",
            kind="invalid",
        )
    _scaler.patch()
    named = horovods.name_parameters(optimizer.param_groups, named_parameters)
    if not is_asynchronous:
        made = wrap(optimizer, _stale.Stale)
        _stale.begin(made, named, compression, warmup)
        return made
    _check_asynchronous(staleness, compression)
    bound = _asynchronous.bound()
    made = wrap(optimizer, _asynchronous.Asynchronous)
    _asynchronous.begin(made, named, bound)
    return made


def _check_asynchronous(staleness: int, compression: type[Compressor]) -> None:
    """Raises InvalidRequest for what asynchronous training can't be combined with."""
    if staleness != 0:
        why = "staleness=1 is for synchronous training: use staleness=0"
    elif compression is not Compression.none:
        why = "differences of parameters are exchanged in full: use Compression.none"
    elif is_elastic():
        why = "an elastic job can't train asynchronously: start it without --min-np"
    else:
        return
    raise InvalidRequest(f"{_byteps.ASYNC}: {why}", kind="invalid")


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
