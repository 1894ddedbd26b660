"""``DistributedOptimizer`` with ``op=Adasum``: ranks combine what their steps would change, not gradients.

Each rank makes its own step; the changes are combined and applied. Where a parameter's step depends on
nothing but its gradient it can be made, and exchanged, while the backward pass goes on with other
parameters. Clipping, loss scaling or another learning rate may come between ``backward`` and ``step`` however: so
that is done only after a step has shown that nothing did, and if something does later that is an error and not a
wrong step. Changes are exchanged under the parameters' names: which rank begins when is its own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gradwire import _native
from gradwire._ops import Adasum
from gradwire._world import ProcessSet, members
from gradwire.torch._adapter import collectives
from gradwire.torch._compression import Compressor

CHANGED = (
    "the gradient of {name}, or a setting of its group, was changed between backward() and step(): with op=Adasum "
    "the step of each parameter is made as soon as its gradient is there, since earlier steps changed nothing in "
    "between; change it before backward() or after step(), or make a new DistributedOptimizer before"
)
MORE_PASSES = (
    "the gradient of {name} was computed more than backward_passes_per_step={passes} times before step(): "
    "raise backward_passes_per_step to add gradients up"
)


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

    _names: dict[torch.Tensor, str]
    _priorities: dict[torch.Tensor, int]
    _compression: type[Compressor]
    _process_set: ProcessSet
    # How often each gradient was computed since the last step.
    _passes: dict[torch.Tensor, int]
    # Each gradient and its group's settings when it was ready.
    _ready: dict[torch.Tensor, Any]
    _flights: dict[torch.Tensor, Flight]
    # Whether steps are made in the backward pass.
    _early: bool

    backward_passes_per_step: int

    def _begin(self, named: list[tuple[str, torch.Tensor]], compression: Any, passes: int, process_set: Any) -> None:
        self._names = {parameter: name for name, parameter in named}
        self._priorities = {parameter: len(named) - at for at, (_, parameter) in enumerate(named)}
        self._compression, self._process_set = compression, process_set
        self.backward_passes_per_step = passes
        self._passes, self._ready, self._flights, self._early = {}, {}, {}, False
        if process_set.included() is not False and members(process_set) > 1:
            for _, parameter in named:
                parameter.register_post_accumulate_grad_hook(partial(DistributedAdasum._computed, self))

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes are added up for a step."""
        self.backward_passes_per_step = at_least_one(passes)

    def synchronize(self) -> None:
        """Nothing: gradients are not exchanged, steps are."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """There is no step without an exchange."""
        raise AssertionError("skip_synchronize() does not go with Adasum: a step is what it exchanges")
        yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, unless their steps are on their way."""
        if self._flights:
            raise AssertionError("zero_grad() was called after backward() but before step(): steps are on their way")
        self._forget()
        super().zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """This rank's step, combined with the others'."""
        if self._process_set.included() is False:
            return super().step(closure)
        unchanged = closure is None and self._unchanged()
        try:
            if self._flights:
                if not unchanged:
                    raise AssertionError(CHANGED.format(name=self._changed()))
                loss = None
                for parameter in self._names:
                    if parameter not in self._flights:  # this rank did not use it
                        self._depart(parameter, self._alone(parameter))
            else:
                with torch.no_grad():
                    before = {parameter: parameter.detach().clone() for parameter in self._names}
                loss = super().step(closure)
                for parameter, old in before.items():
                    with torch.no_grad():
                        change = parameter.detach() - old
                        parameter.copy_(old)
                    self._depart(parameter, change)
            with torch.no_grad():
                for parameter, flight in self._flights.items():
                    parameter.add_(flight.land(self._compression))
            self._early = unchanged
        finally:
            self._flights.clear()
            self._forget()
        return loss

    def _forget(self) -> None:
        self._passes.clear()
        self._ready.clear()

    def _settings(self, parameter: torch.Tensor) -> Any:
        """The gradient, how often it was written to, and the settings of its group."""
        gradient = parameter.grad
        for group in self.param_groups:
            if any(parameter is own for own in group["params"]):
                settings = {name: value for name, value in group.items() if name != "params"}
                return gradient, None if gradient is None else gradient._version, repr(settings)
        return gradient, None, ""

    def _changed(self) -> str | None:
        """Something that has changed since its gradient was computed."""
        for parameter, (gradient, version, settings) in self._ready.items():
            now = self._settings(parameter)
            if now[0] is not gradient or now[1:] != (version, settings):
                return self._names[parameter]
        return None

    def _unchanged(self) -> bool:
        """Whether each step could have been made as soon as its gradient was there."""
        hooks = (getattr(self, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post"))
        used = {parameter for parameter in self._names if parameter.grad is not None}
        return bool(self._ready) and used <= self._ready.keys() and not any(hooks) and self._changed() is None

    def _computed(self, parameter: torch.Tensor) -> None:
        """The backward pass has a gradient."""
        self._passes[parameter] = self._passes.get(parameter, 0) + 1
        if self._passes[parameter] < self.backward_passes_per_step:
            return
        if parameter in self._flights:
            text = MORE_PASSES.format(name=self._names[parameter], passes=self.backward_passes_per_step)
            raise AssertionError(text)
        self._ready[parameter] = self._settings(parameter)
        if self._early:
            self._depart(parameter, self._alone(parameter))
            # The optimizer may have written to it.
            self._ready[parameter] = self._settings(parameter)

    def _alone(self, parameter: torch.Tensor) -> torch.Tensor:
        """What a step would change of this parameter; it stays as it is, as the backward pass may look at it."""
        twin = torch.nn.Parameter(parameter.detach().clone())
        twin.grad = parameter.grad
        groups: Any = self.param_groups
        kept = [group["params"] for group in groups]
        if parameter in self.state:
            self.state[twin] = self.state.pop(parameter)
        for group in groups:
            group["params"] = [twin] if any(parameter is own for own in group["params"]) else []
        try:
            super().step()
        finally:
            for group, own in zip(groups, kept):
                group["params"] = own
            if twin in self.state:
                self.state[parameter] = self.state.pop(twin)
        with torch.no_grad():
            return twin.detach().sub_(parameter.detach())

    def _depart(self, parameter: torch.Tensor, change: torch.Tensor) -> None:
        """Sends a parameter's change on its way."""
        small, ctx = self._compression.compress(change)
        buffer = collectives.place(small)
        handle = collectives.reduced(
            [buffer],
            self._names[parameter],
            Adasum,
            1.0,
            1.0,
            self._process_set,
            priority=self._priorities[parameter],
        )
        self._flights[parameter] = Flight(handle, buffer, small, ctx)
