"""Makes a ``GradScaler`` decide in the same way on all ranks whether to make a step.

The scaler does not notify the optimizer, so its class is patched. The gradients of a distributed
optimizer are exchanged before the scaler reads them, even if the scaler is disabled, because
clipping may follow. Adasum does not exchange gradients; there, the ranks share the scaler's
findings.
"""

from __future__ import annotations

import functools
from typing import Any

from gradwire.torch._wrapping import Wrapped


def _class() -> Any:
    try:
        from torch.amp.grad_scaler import GradScaler
    except ImportError:  # PyTorch 2.2
        from torch.cuda.amp import grad_scaler

        return grad_scaler.GradScaler
    return GradScaler


@functools.cache
def patch() -> None:
    """Patches the class, once."""
    scaler = _class()
    unscale, check = scaler.unscale_, scaler._unscale_grads_

    @functools.wraps(unscale)
    def unscale_(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        # An enabled scaler calls ``_unscale_grads_``.
        if isinstance(optimizer, Wrapped) and not self.is_enabled():
            optimizer._before_gradients_are_read()
        return unscale(self, optimizer, *args, **kwargs)

    @functools.wraps(check)
    def _unscale_grads_(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(optimizer, Wrapped):
            return check(self, optimizer, *args, **kwargs)
        optimizer._before_gradients_are_read()
        found = check(self, optimizer, *args, **kwargs)
        optimizer._share_infinities(found)
        return found

    scaler.unscale_, scaler._unscale_grads_ = unscale_, _unscale_grads_
