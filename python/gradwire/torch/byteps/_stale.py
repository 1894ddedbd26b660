"""Applies the gradients of the previous step: their exchange overlaps with a whole step.

This is Pipe-SGD of Li et al. (NeurIPS 2018) with a depth of two: a step starts the exchange of its
own gradients, and applies those of the step before.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from gradwire import _world
from gradwire._errors import GradwireError
from gradwire._ops import Average, Handle, Max
from gradwire.torch._compression import Compressor
from gradwire.torch._reduce_ops import allreduce_async, allreduce_async_
from gradwire.torch._wrapping import without_hooks
from gradwire.torch.byteps._flat import Flat, flats_of
from gradwire.torch.byteps._stepping import Stepping

# Numbers the optimizers, which all ranks make in the same order.
_optimizers = itertools.count()
_last: weakref.WeakSet[_Started] = weakref.WeakSet()


class _Started:
    """The exchange of one step's gradients.

    Ranks may have gradients of different parameters. A parameter without a gradient counts as
    zeros, unless it has none on any rank.
    """

    def __init__(self, flats: list[Flat], name: str, compression: type[Compressor]) -> None:
        self._flats, self._compression = flats, compression
        self._sums: list[tuple[Handle[torch.Tensor], Any]] = []
        self._has: list[Handle[torch.Tensor]] = []
        for at, flat in enumerate(flats):
            values = flat.zeros()
            has = torch.zeros(len(flat.parameters), dtype=torch.uint8)
            for place, (parameter, part) in enumerate(flat.views(values)):
                if parameter.grad is not None:
                    part.copy_(parameter.grad.detach().to_dense())
                    has[place] = 1
            small, context = compression.compress(values)
            handle = allreduce_async(small, name=f"{name}.{at}", op=Average)
            self._sums.append((handle, context))
            self._has.append(allreduce_async_(has, name=f"{name}.{at}.has", op=Max))
        _last.add(self)

    def wait(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Returns each parameter with its average; None if no rank has a gradient."""
        averages: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for flat, (handle, context), has in zip(self._flats, self._sums, self._has):
            values = self._compression.decompress(handle.wait(), context)
            is_there = has.wait().tolist()
            for place, (parameter, part) in enumerate(flat.views(values)):
                average = part.to(parameter.device, parameter.dtype) if is_there[place] else None
                averages.append((parameter, average))
        _last.discard(self)
        return averages


class Stale(Stepping):
    """An optimizer that applies the gradients of the step before."""

    _name: str
    _flats: list[Flat]
    _compression: type[Compressor]
    # Steps that still wait for their own gradients.
    _warmup: int
    _before: _Started | None = None
    _is_odd = False

    @without_hooks
    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Starts the exchange of this step's gradients, and applies those of the step before.

        The first steps (``pipesgd_warmup_iter``) apply their own; the step after them applies
        nothing. The gradients of the program are not changed.

        Args:
            closure: Computes the loss once, with its gradients.
            *args: Further arguments of the original ``step``.
            **kwargs: Further arguments of the original ``step``.

        Returns:
            What ``closure`` returns.

        Raises:
            GradwireError: An exchange has failed; the subclass and ``kind`` tell why.
        """
        self._check_parameters()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # The exchanges of two steps are in flight at the same time, under different names.
        self._is_odd = not self._is_odd
        name = f"{self._name}.{'odd' if self._is_odd else 'even'}"
        started = _Started(self._flats, name, self._compression)
        _world.note_step()
        if self._warmup > 0:
            self._warmup -= 1
            ready: _Started | None = started
        else:
            ready, self._before = self._before, started
        if ready is None:
            return loss
        averages = ready.wait()
        own = [parameter.grad for parameter, _ in averages]
        for parameter, average in averages:
            parameter.grad = average
        try:
            self._original_step(None, *args, **kwargs)
        finally:
            for (parameter, _), gradient in zip(averages, own):
                parameter.grad = gradient
        return loss

    def _share_infinities(self, found: dict[torch.device, torch.Tensor]) -> None:
        """Makes all ranks agree: if any rank has found infinities, no rank makes a step."""
        own = torch.tensor([any(bool(inf) for inf in found.values())], dtype=torch.uint8)
        name = f"{self._name}.infinities"
        if allreduce_async_(own, name=name, op=Max).wait().item():
            for inf in found.values():
                inf.fill_(1.0)

    def _copied_for(self, made: Any, twins: dict[torch.Tensor, torch.Tensor]) -> None:
        named = [("", twins[each]) for flat in self._flats for each in flat.parameters]
        begin(made, named, self._compression, self._warmup)


def begin(
    made: Any,
    named: list[tuple[str, torch.Tensor]],
    compression: type[Compressor],
    warmup: int,
) -> None:
    """Sets the attributes of a wrapped optimizer. Nothing is exchanged before the first step."""
    made._name = f"byteps.stale.{next(_optimizers)}"
    made._flats = flats_of(each for _, each in named if each.requires_grad)
    made._known = {each for _, each in named}
    made._compression, made._warmup = compression, warmup
    if hasattr(made, "_step_supports_amp_scaling"):
        # A scaler would pass the scale of this step, and the gradients are of the step before.
        made._step_supports_amp_scaling = False


def _wait_for_last() -> None:
    """Waits at the end of the program for exchanges that other ranks may still need."""
    for started in list(_last):
        try:
            started.wait()
        except GradwireError:
            return


_world.before_shutdown.insert(0, _wait_for_last)
