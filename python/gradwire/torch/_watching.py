"""The hooks of parameters that tell an exchange when their gradients are ready."""

from __future__ import annotations

import gc
import weakref
from typing import Any, Protocol

import torch

from gradwire.torch._slots import Slot

# By the id of each parameter, the slot that submits its gradient. With two slots, each would
# mistake the other's result for this rank's own gradient. A slot keeps its parameter, and so its
# id. (PyTorch refuses to swap parameters that have weak references.)
_watched: weakref.WeakValueDictionary[int, Slot] = weakref.WeakValueDictionary()


class Watcher(Protocol):
    """The receiver of the hooks of gradients."""

    def before(self, slot: Slot) -> None:
        """Called before a backward pass accumulates a gradient."""

    def ready(self, slot: Slot) -> None:
        """Called when a backward pass has accumulated a gradient."""


def watch(slot: Slot, watcher: Watcher, *, before: bool) -> None:
    """Makes a parameter's backward passes call ``watcher.ready``, instead of those of other slots.

    Args:
        slot: The slot of the parameter.
        watcher: The receiver of the calls. The hooks do not keep it alive.
        before: Whether ``watcher.before`` is called as well.

    Raises:
        AssertionError: Another slot of the parameter is in flight.
    """
    own(slot)
    if slot.hooks:  # swapped: PyTorch keeps the dictionaries of the hooks, but does not call them
        slot.unwatch()
        parameter: Any = slot.parameter
        for hooks in ("_post_accumulate_grad_hooks", "_backward_hooks"):
            setattr(parameter, hooks, getattr(parameter, hooks))
    slot.hooked = slot.parameter._cdata
    known, its = weakref.ref(watcher), weakref.ref(slot)

    def call(method: str) -> Any:
        def hook(_: torch.Tensor) -> None:
            alive, own = known(), its()
            if alive is not None and own is not None:
                getattr(alive, method)(own)

        # With compiled autograd, the compiler would analyze it.
        return torch.compiler.disable(hook)

    slot.hooks.append(slot.parameter.register_post_accumulate_grad_hook(call("ready")))
    if before:
        slot.hooks.append(slot.parameter.register_hook(call("before")))


def owns(slot: Slot) -> bool:
    """Returns whether a slot submits its parameter's gradient."""
    return _watched.get(id(slot.parameter)) is slot


def own(slot: Slot) -> None:
    """Makes a slot submit its parameter's gradient, and gives it what is known about that.

    Raises:
        AssertionError: Another slot of the parameter is in flight.
    """
    other = _watched.get(id(slot.parameter))
    if other is not None and other is not slot and other.in_flight:
        other = None
        gc.collect()  # optimizers are parts of reference cycles, and it may have been deleted
        other = _watched.get(id(slot.parameter))
    if other is not None and other is not slot:
        if other.in_flight:
            raise AssertionError(
                f"the gradient of {slot.name} is still being exchanged by another optimizer that "
                "has the same parameter: first call synchronize() or step() of that optimizer, on "
                "all ranks; to use two optimizers in turn, call zero_grad() of the next one to "
                "step before each backward pass"
            )
        other.unwatch()
        slot.take_over(other)
    _watched[id(slot.parameter)] = slot
