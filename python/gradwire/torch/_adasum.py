"""``DistributedOptimizer`` with ``op=Adasum``: combines the ranks' steps, not their gradients.

Each rank makes its own step, with any optimizer and any prior change to the gradients. Then the
changes of each parameter are combined and applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gradwire import _epochs, _native, _world
from gradwire._ops import Adasum, ReduceOp
from gradwire._world import ProcessSet, native_set
from gradwire.torch import _agreement
from gradwire.torch._adapter import collectives
from gradwire.torch._agreement import Agreement
from gradwire.torch._compression import Compressor
from gradwire.torch._identity import Description, Identity
from gradwire.torch._resumable import Resumable
from gradwire.torch._wrapping import Wrapped, without_hooks

# The number of parameters combined at a time; a rank may have 256 tasks in flight.
AT_ONCE = 128


def checked_passes(passes: int) -> int:
    """Returns the number of passes.

    Raises:
        ValueError: It is less than 1.
    """
    if passes < 1:
        raise ValueError(f"backward_passes_per_step={passes}: it must be at least 1")
    return passes


class PendingChange:
    """A parameter's change that is being combined."""

    def __init__(
        self, handle: _native.Handle, buffer: _native.Buffer, small: torch.Tensor, ctx: Any
    ) -> None:
        self.handle, self.buffer, self.small, self.ctx = handle, buffer, small, ctx

    def wait(self, compression: type[Compressor]) -> torch.Tensor:
        """Waits for the combined change."""
        self.handle.wait()
        return compression.decompress(collectives.adapter.view(self.buffer, self.small), self.ctx)


class DistributedAdasum(Wrapped):
    """Each rank makes its own step; the changes of the parameters are combined with Adasum."""

    op: ReduceOp = Adasum
    backward_passes_per_step: int
    process_set: ProcessSet
    # In the order of the names.
    _names: list[tuple[str, torch.Tensor]]
    _compression: type[Compressor]
    _identity: Identity

    def _begin(
        self,
        named: list[tuple[str, torch.Tensor]],
        compression: type[Compressor],
        passes: int,
        process_set: ProcessSet,
    ) -> None:
        self._names = sorted(named, key=lambda pair: pair[0])
        self._known = {parameter for _, parameter in named}
        self._check_parameters()
        self._compression, self.process_set = compression, process_set
        self.backward_passes_per_step = passes
        names = tuple(name for name, _ in self._names)
        options = f"op=Adasum, compression={compression.__name__}"
        # A step waits for all its operations, so it needs no number.
        self._identity = Identity(Description(names, (), options), process_set)
        self._agreement = Agreement(process_set, 0)
        self._infinities = Agreement(process_set, 0)
        self._session: _native.Session | None = None
        _epochs.on_change(self._end_epoch)

    def _end_epoch(self) -> None:
        self._session = None

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes the number of backward passes accumulated for a step.

        Autograd itself accumulates them.
        """
        self.backward_passes_per_step = checked_passes(passes)

    def synchronize(self) -> None:
        """Does nothing: gradients are not exchanged."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raises ``AssertionError``: steps are always exchanged."""
        raise AssertionError(
            "skip_synchronize() can't be used with Adasum, which exchanges the step itself"
        )
        yield

    def _takes_part(self) -> bool:
        native = _world.session()
        if native is not self._session:
            self._session = native
            for one in (self._identity, self._agreement, self._infinities):
                one.forget()
        native_set(self.process_set)  # raises if it is not registered
        if self.process_set.included() is False:
            return False
        Resumable(self._identity.introduce()).run()
        return True

    def _share_infinities(self, found: dict[torch.device, torch.Tensor]) -> None:
        """Makes all ranks agree: if any rank has found infinities, no rank makes a step."""
        if not self._takes_part():
            return
        words = [int(any(bool(inf) for inf in found.values()))]
        name = f"{self._identity.prefix}infinities"
        [anywhere] = Resumable(self._infinities.exchange(name, words)).run()
        if anywhere:
            for inf in found.values():
                inf.fill_(1.0)

    @without_hooks
    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Makes this rank's step and combines it with the others'."""
        self._check_parameters()
        if not self._takes_part():
            return self._original_step(closure, *args, **kwargs)
        with torch.no_grad():
            # A parameter without a gradient does not change, unless a closure computes one.
            changing = [
                closure is not None or parameter.grad is not None for _, parameter in self._names
            ]
            before = [
                p.detach().clone() if may else p for (_, p), may in zip(self._names, changing)
            ]
        loss = self._original_step(closure, *args, **kwargs)
        # Parameters without a gradient on any rank did not change; all ranks combine the others.
        words = [
            _agreement.USED if parameter.grad is not None else 0 for _, parameter in self._names
        ]
        used = Resumable(self._agreement.exchange(self._identity.agreement, words)).run()
        changes = [(old, *named) for old, named, word in zip(before, self._names, used) if word]
        with torch.no_grad():
            for first in range(0, len(changes), AT_ONCE):
                self._combine(changes[first : first + AT_ONCE])
        _world.note_step()
        return loss

    def _combine(self, changes: list[tuple[torch.Tensor, str, torch.Tensor]]) -> None:
        pending = []
        for at, (old, name, parameter) in enumerate(changes):
            small, ctx = self._compression.compress(parameter.detach() - old)
            buffer = collectives.place(small)
            priority = len(changes) - at
            called = f"{self._identity.prefix}{name}"
            handle = collectives.reduced(
                [buffer], called, Adasum, 1.0, 1.0, self.process_set, priority=priority
            )
            pending.append(PendingChange(handle, buffer, small, ctx))
        # Old and new are the same tensor if the parameter did not change here.
        for change, (old, _, parameter) in zip(pending, changes):
            parameter.copy_(old + change.wait(self._compression))

    def _copied_for(self, made: Any, twins: dict[torch.Tensor, torch.Tensor]) -> None:
        named = [(name, twins[parameter]) for name, parameter in self._names]
        made._begin(named, self._compression, self.backward_passes_per_step, self.process_set)

    # Attributes of Horovod's optimizer that scripts read

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        return {parameter: name for name, parameter in self._names}

    @property
    def _requires_update(self) -> set[torch.Tensor]:
        return {parameter for _, parameter in self._names if parameter.requires_grad}
