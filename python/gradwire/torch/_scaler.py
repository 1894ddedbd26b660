"""A ``GradScaler`` looks at gradients to decide whether there is a step: on all ranks it has to see the same.

It has no way to tell an optimizer, so its class is taught to: before it looks at the gradients of a distributed
optimizer they are exchanged, also where it is switched off and what follows is clipping; and what it has found where
gradients are not exchanged (Adasum) is what any rank has found.
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
def teach() -> None:
    """Teaches it, once."""
    scaler = _class()
    unscale, check = scaler.unscale_, scaler._unscale_grads_

    @functools.wraps(unscale)
    def unscale_(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(optimizer, Wrapped):
            optimizer.gradients_are_wanted()
        return unscale(self, optimizer, *args, **kwargs)

    @functools.wraps(check)
    def _unscale_grads_(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(optimizer, Wrapped):
            return check(self, optimizer, *args, **kwargs)
        optimizer.gradients_are_wanted()
        found = check(self, optimizer, *args, **kwargs)
        optimizer.infinities(found)
        return found

    scaler.unscale_, scaler._unscale_grads_ = unscale_, _unscale_grads_
