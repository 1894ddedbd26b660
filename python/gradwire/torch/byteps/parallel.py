"""``DistributedDataParallel`` with BytePS's arguments: PyTorch's own, over Gradwire.

It needs no ``torch.distributed.init_process_group``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from gradwire._world import session
from gradwire.torch._compression import Compression, Compressor
from gradwire.torch.distributed._group import ProcessGroupGradwire
from gradwire.torch.distributed._hook import DdpHookState, ddp_hook
from gradwire.torch.distributed._world import Everybody

__all__ = ["DistributedDataParallel"]

_TIMEOUT = timedelta(minutes=30)
# All ranks create their models in the same order, as for PyTorch's class.
_models = itertools.count()


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """A model whose backward pass averages the gradients of all ranks.

    It begins with the parameters of rank 0. ``no_sync()`` gives a context in which gradients add up
    without an exchange.

    Args:
        module: The model, the same on all ranks.
        device_ids: The GPU of the model, as for PyTorch's class.
        broadcast_buffers: Whether each forward pass begins with the buffers of rank 0.
        compression: One of ``Compression``, or another subclass of ``Compressor``.

    Raises:
        NotInitialized: ``init()`` has not been called.
        GradwireError: The models differ, or an operation failed.

    Example:
        ```python
        model = bps.parallel.DistributedDataParallel(model)
        loss_of(model(batch)).backward()
        optimizer.step()
        ```
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[Any] | None = None,
        broadcast_buffers: bool = True,
        compression: type[Compressor] = Compression.none,
    ) -> None:
        job = session()
        # Any, as for a group whose steps are skipped.
        everybody: Any = Everybody()
        name = f"byteps.{next(_models)}"
        group: Any = ProcessGroupGradwire(
            None, job.rank, everybody, range(job.size), name, _TIMEOUT
        )
        # The default of PyTorch; newer releases warn where the argument is given.
        options: dict[str, Any] = {} if broadcast_buffers else {"broadcast_buffers": False}
        super().__init__(module, device_ids=device_ids, process_group=group, **options)
        self.register_comm_hook(DdpHookState(compression=compression), ddp_hook)
