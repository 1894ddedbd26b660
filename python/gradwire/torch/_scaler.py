"""Makes a ``GradScaler`` decide in the same way on all ranks whether to make a step.

The scaler does not notify the optimizer, so its class is patched. The gradients of a distributed
optimizer are exchanged before the scaler reads them, even if the scaler is disabled, because
clipping may follow. Adasum does not exchange gradients; there, the ranks share the scaler's
findings.

After a loss, ranks with ``on_loss="skip"`` may have gradients of their own. So they vote on each
step, whatever the scaler has found, and a finding in a skipped step does not count.
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
    unscale, check, step = scaler.unscale_, scaler._unscale_grads_, scaler._maybe_opt_step

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

    @functools.wraps(step)
    def _maybe_opt_step(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(optimizer, Wrapped) or optimizer._vote_without_step is None:
            return step(self, optimizer, state, *args, **kwargs)
        found, skipped = state["found_inf_per_device"], optimizer._skipped
        if any(each.item() for each in found.values()):
            result = optimizer._vote_without_step()
        else:
            result = optimizer.step(*args, **kwargs)
        if optimizer._skipped > skipped:
            for each in found.values():
                each.zero_()
        return result

    scaler.unscale_, scaler._unscale_grads_ = unscale_, _unscale_grads_
    scaler._maybe_opt_step = _maybe_opt_step
