"""What every distributed optimizer is: the optimizer that it was made of, with another class.

It is the same object: schedulers, scalers and whoever else has it see the distributed one. Its ``step`` and
``zero_grad`` do something before and after the original's.
"""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Step = TypeVar("Step", bound=Callable[..., Any])


def counted(step: Step) -> Step:
    """Marks a ``step`` as one that PyTorch need not wrap.

    Its hooks run in the original's step, and would run twice. Schedulers want to know whether there was a step before
    theirs: ``Wrapped.own_step`` sees to that.
    """
    for mark in ("hooked", "_wrapped_by_lr_sched", "_with_counter"):
        setattr(step, mark, True)
    return step


class Wrapped(torch.optim.Optimizer):
    """An optimizer that was made of another one."""

    # The class that it had, and the ``step`` that somebody had put over that class's.
    _original: type[torch.optim.Optimizer]
    _planted_step: Callable[..., Any] | None

    def own_step(self, closure: Callable[[], Any] | None, *args: Any, **kwargs: Any) -> Any:
        """The original's step."""
        # What schedulers look at, those of newer and those of older releases.
        marks = self.__dict__
        marks["_opt_called"] = True
        marks["_step_count"] = marks.get("_step_count", 0) + 1
        step = self._planted_step or super().step
        return step(*args, **kwargs) if closure is None and not args else step(closure, *args, **kwargs)

    def gradients_are_wanted(self) -> None:
        """Somebody is about to look at all gradients, on all ranks."""

    def infinities(self, found: dict[torch.device, torch.Tensor]) -> None:
        """A scaler has looked for infinities in all gradients, and found these here."""

    def _copied_for(self, made: Any, parameters: list[torch.Tensor]) -> None:
        """Makes a copy of this optimizer, with copies of the parameters, distributed, too."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made: Any = object.__new__(self._original)
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        parameters = [parameter for group in made.param_groups for parameter in group["params"]]
        self._copied_for(become(made, type(self).__mro__[1]), parameters)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled it is the optimizer that it was made of."""
        return copyreg.__newobj__, (self._original,), self.__getstate__()  # type: ignore[attr-defined]


def become(optimizer: Any, kind: type[Wrapped]) -> Any:
    """Gives an optimizer a class that is of a kind and of its own."""
    if isinstance(optimizer, Wrapped):
        raise ValueError("this optimizer is distributed already")
    original = type(optimizer)
    about = {"__doc__": original.__doc__, "__module__": original.__module__, "_original": original}
    optimizer.__class__ = type(original.__name__, (kind, original), about)
    # Schedulers put a step over the class's, which knows only that one.
    optimizer._planted_step = vars(optimizer).pop("step", None)
    return optimizer
