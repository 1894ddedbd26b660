"""The base class of distributed optimizers.

A distributed optimizer is the same object as the original optimizer, so its schedulers and scalers
keep working. Its ``step`` and ``zero_grad`` extend the original ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container
from typing import Any, TypeVar

import torch

from gradwire import _world
from gradwire.torch._parameters import without_waiting

Step = TypeVar("Step", bound=Callable[..., Any])


def without_hooks(step: Step) -> Step:
    """Marks a ``step`` that PyTorch need not wrap.

    PyTorch's hooks run in the original step, and would run twice. Schedulers check that a step came
    before theirs; ``Wrapped._original_step`` counts it for them.
    """
    for mark in ("hooked", "_wrapped_by_lr_sched", "_with_counter"):
        setattr(step, mark, True)
    return step


class Wrapped(torch.optim.Optimizer):
    """An optimizer made from another one."""

    # The original class, and a ``step`` that was set on the object.
    _original: type[torch.optim.Optimizer]
    _instance_step: Callable[..., Any] | None
    # The vote on a step that is not made, if the ranks vote on steps; see ``Voting``.
    _vote_without_step: Callable[[], None] | None = None
    _skipped = 0
    # During a step of a ``GradScaler``, its scale.
    _loss_scale: float | None = None
    # The parameters that it had when it was made.
    _known: Container[torch.Tensor]

    def _original_step(self, closure: Callable[[], Any] | None, *args: Any, **kwargs: Any) -> Any:
        """Makes the original step."""
        # Schedulers check these, in newer and older releases.
        marks = self.__dict__
        marks["_opt_called"] = True
        marks["_step_count"] = marks.get("_step_count", 0) + 1
        step = self._instance_step or super().step
        return (
            step(*args, **kwargs)
            if closure is None and not args
            else step(closure, *args, **kwargs)
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises an error: new parameters would not be exchanged.

        Args:
            param_group: The group.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "add parameters to the optimizer before passing it to DistributedOptimizer: later "
            "ones would not be exchanged"
        )

    def _check_parameters(self) -> None:
        """Rejects parameters that were added to the groups later, which would not be exchanged."""
        for group in self.param_groups:
            if any(parameter not in self._known for parameter in without_waiting(group["params"])):
                self.add_param_group({})

    def _before_gradients_are_read(self) -> None:
        """Called on all ranks before all gradients are read."""

    def _share_infinities(self, found: dict[torch.device, torch.Tensor]) -> None:
        """Called after a scaler has looked for infinities in all gradients."""

    def _copied_for(self, made: Any, twins: dict[torch.Tensor, torch.Tensor]) -> None:
        """Makes a copy of this optimizer distributed as well; ``twins`` has its parameters."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made: Any = object.__new__(self._original)
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        own, copies = (
            [p for group in one.param_groups for p in without_waiting(group["params"])]
            for one in (self, made)
        )
        self._copied_for(wrap(made, type(self).__mro__[1]), dict(zip(own, copies)))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the original optimizer."""
        # Not ``copyreg.__newobj__``, which pickle accepts only for the object's own class.
        return object.__new__, (self._original,), self.__getstate__()


def wrap(optimizer: Any, kind: type[Wrapped]) -> Any:
    """Changes an optimizer's class to a subclass of both ``kind`` and its original class.

    Raises:
        ValueError: The optimizer is already distributed.
    """
    if isinstance(optimizer, Wrapped):
        raise ValueError("this optimizer is already distributed")
    original = type(optimizer)
    about = {"__doc__": original.__doc__, "__module__": original.__module__, "_original": original}
    # A step exchanges gradients, which must not happen while PyTorch's compiler analyzes it.
    for method in ("step", "zero_grad"):
        own = [vars(base) for base in kind.__mro__ if issubclass(base, Wrapped)]
        found = next((each[method] for each in own if method in each), None)
        if found is not None:
            about[method] = torch.compiler.disable(found)
    optimizer.__class__ = type(original.__name__, (kind, original), about)
    # Schedulers set a ``step`` on the object, which calls that of the original class.
    optimizer._instance_step = vars(optimizer).pop("step", None)
    return optimizer


def _import_compiler() -> None:
    """Imports PyTorch's compiler, which optimizers need and which takes seconds."""
    torch.compiler.disable(lambda: None)


_world.before_joining.append(_import_compiler)
