"""Makes a ``GradScaler`` decide in the same way on all ranks whether to make a step.

The scaler does not notify the optimizer, so its class is patched. The gradients of a distributed
optimizer are exchanged before the scaler reads them, even if the scaler is disabled, because
clipping may follow. The ranks compare the scale with the optimizer's options. Adasum does not
exchange gradients; there, the ranks share the scaler's findings.

After a loss, ranks with ``on_loss="skip"`` may have gradients of their own. So they vote on each
step, whatever the scaler has found, and a finding in a skipped step does not count.
"""

from __future__ import annotations

import functools
from typing import Any

from gradwire.torch._wrapping import Wrapped

# Attributes that a scaler sets on a fused optimizer during a step.
_FOR_FUSED = ("grad_scale", "found_inf")


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
    make_step, make_or_skip = scaler.step, scaler._maybe_opt_step

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

    @functools.wraps(make_step)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(optimizer, Wrapped) or not self.is_enabled():
            return make_step(self, optimizer, *args, **kwargs)
        own = vars(optimizer)
        before = {name: own[name] for name in _FOR_FUSED if name in own}
        optimizer._loss_scale = self.get_scale()
        try:
            return make_step(self, optimizer, *args, **kwargs)
        except BaseException:
            # PyTorch leaves them there, and would multiply the scale of the next step by this one.
            for name in _FOR_FUSED:
                own.pop(name, None)
            own.update(before)
            raise
        finally:
            optimizer._loss_scale = None

    @functools.wraps(make_or_skip)
    def _maybe_opt_step(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(optimizer, Wrapped) or optimizer._vote_without_step is None:
            return make_or_skip(self, optimizer, state, *args, **kwargs)
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
    scaler.step, scaler._maybe_opt_step = step, _maybe_opt_step
