"""``DistributedOptimizer`` with ``op=Adasum``: ranks combine what their steps would change, not gradients.

Each rank makes its own step, whatever the optimizer and whatever was done to the gradients before; then what the
step has changed is combined, one parameter beside the other, and applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gradwire import _native
from gradwire._ops import Adasum
from gradwire._world import ProcessSet
from gradwire.torch._adapter import collectives
from gradwire.torch._compression import Compressor

# Parameters that are combined at a time; a rank may have 256 such tasks.
AT_ONCE = 128


def at_least_one(passes: int) -> int:
    if passes < 1:
        raise ValueError(f"backward_passes_per_step={passes}: it must be at least 1")
    return passes


class Flight:
    """A parameter's change on its way."""

    def __init__(self, handle: _native.Handle, buffer: _native.Buffer, small: torch.Tensor, ctx: Any) -> None:
        self.handle, self.buffer, self.small, self.ctx = handle, buffer, small, ctx

    def land(self, compression: type[Compressor]) -> torch.Tensor:
        """Waits for the combined change."""
        self.handle.wait()
        return compression.decompress(collectives.adapter.view(self.buffer, self.small), self.ctx)


class DistributedAdasum(torch.optim.Optimizer):
    """Each rank makes its own step; what the steps changed is combined with Adasum."""

    _names: list[tuple[str, torch.Tensor]]
    _compression: type[Compressor]
    _process_set: ProcessSet

    backward_passes_per_step: int

    def _begin(self, named: list[tuple[str, torch.Tensor]], compression: Any, passes: int, process_set: Any) -> None:
        self._names, self._compression, self._process_set = named, compression, process_set
        self.backward_passes_per_step = passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """How many backward passes are added up for a step; autograd does that by itself."""
        self.backward_passes_per_step = at_least_one(passes)

    def synchronize(self) -> None:
        """Nothing: gradients are not exchanged, steps are."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """There is no step without an exchange."""
        raise AssertionError("skip_synchronize() does not go with Adasum: a step is what it exchanges")
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """This rank's step, combined with the others'."""
        if self._process_set.included() is False:
            return super().step(closure)
        with torch.no_grad():
            before = [parameter.detach().clone() for _, parameter in self._names]
        loss = super().step(closure)
        with torch.no_grad():
            for first in range(0, len(before), AT_ONCE):
                part = slice(first, first + AT_ONCE)
                self._combine(before[part], self._names[part])
        return loss

    def _combine(self, before: list[torch.Tensor], named: list[tuple[str, torch.Tensor]]) -> None:
        flights = []
        for at, (old, (name, parameter)) in enumerate(zip(before, named)):
            small, ctx = self._compression.compress(parameter.detach() - old)
            buffer = collectives.place(small)
            priority = len(named) - at
            handle = collectives.reduced([buffer], name, Adasum, 1.0, 1.0, self._process_set, priority=priority)
            flights.append(Flight(handle, buffer, small, ctx))
        for flight, old, (_, parameter) in zip(flights, before, named):
            parameter.copy_(old + flight.land(self._compression))
