"""The class of every distributed optimizer.

A distributed optimizer is the same object as the optimizer that it was made of: schedulers and
scalers that know one know the other. Its ``step`` and ``zero_grad`` do more than the original ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Step = TypeVar("Step", bound=Callable[..., Any])


def without_hooks(step: Step) -> Step:
    """Marks a ``step`` as one that PyTorch need not wrap.

    PyTorch's hooks run in the original step, and would run twice. Schedulers check whether there
    was a step before theirs; ``Wrapped._original_step`` counts it for them.
    """
    for mark in ("hooked", "_wrapped_by_lr_sched", "_with_counter"):
        setattr(step, mark, True)
    return step


class Wrapped(torch.optim.Optimizer):
    """An optimizer that was made of another one."""

    # The original class, and a ``step`` that was set on the object.
    _original: type[torch.optim.Optimizer]
    _instance_step: Callable[..., Any] | None

    def _original_step(self, closure: Callable[[], Any] | None, *args: Any, **kwargs: Any) -> Any:
        """Makes the original step."""
        # What schedulers check, in newer and in older releases.
        marks = self.__dict__
        marks["_opt_called"] = True
        marks["_step_count"] = marks.get("_step_count", 0) + 1
        step = self._instance_step or super().step
        return (
            step(*args, **kwargs)
            if closure is None and not args
            else step(closure, *args, **kwargs)
        )

    def _before_gradients_are_read(self) -> None:
        """Is called before all gradients are read, on all ranks."""

    def _share_infinities(self, found: dict[torch.device, torch.Tensor]) -> None:
        """Is called when a scaler has looked for infinities in all gradients."""

    def _copied_for(self, made: Any, parameters: list[torch.Tensor]) -> None:
        """Makes a copy of this optimizer, which has copies of the parameters, distributed, too."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made: Any = object.__new__(self._original)
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        parameters = [parameter for group in made.param_groups for parameter in group["params"]]
        self._copied_for(wrap(made, type(self).__mro__[1]), parameters)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled it is the optimizer that it was made of."""
        # Not ``copyreg.__newobj__``: pickle takes that for objects of their own class only.
        return object.__new__, (self._original,), self.__getstate__()


def wrap(optimizer: Any, kind: type[Wrapped]) -> Any:
    """Changes the class of an optimizer to one that is both ``kind`` and the optimizer's own class.

    Raises:
        ValueError: The optimizer is distributed already.
    """
    if isinstance(optimizer, Wrapped):
        raise ValueError("this optimizer is distributed already")
    original = type(optimizer)
    about = {"__doc__": original.__doc__, "__module__": original.__module__, "_original": original}
    optimizer.__class__ = type(original.__name__, (kind, original), about)
    # Schedulers set a ``step`` on the object that calls the original class's.
    optimizer._instance_step = vars(optimizer).pop("step", None)
    return optimizer
