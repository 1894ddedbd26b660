"""``DistributedOptimizer`` with ``op=Adasum``: combines the ranks' steps, not their gradients.

Each rank makes its own step, with any optimizer and any prior change to the gradients. Then the
changes of each parameter are combined and applied. If a rank's own step fails, all ranks raise an
error, and their parameters stay as they were. If an exception of the program, such as Ctrl-C,
interrupts a wait, the next call continues it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gradwire import _epochs, _native, _world
from gradwire._arguments import compressor_name, whole_number
from gradwire._objects import start_allgather
from gradwire._ops import Adasum, ReduceOp
from gradwire._process_sets import ProcessSet, native_set
from gradwire.torch import _agreement
from gradwire.torch._adapter import collectives
from gradwire.torch._agreement import Agreement
from gradwire.torch._compression import Compressor, decompressed
from gradwire.torch._identity import Description, Identity
from gradwire.torch._resumable import Resumable, Waits
from gradwire.torch._wrapping import Wrapped, without_hooks

# The number of parameters combined at a time; a rank may have 256 tasks in flight.
AT_ONCE = 128


def checked_passes(passes: int) -> int:
    """Returns the number of passes.

    Raises:
        ValueError: It is not a whole number, or less than 1.
    """
    return whole_number("backward_passes_per_step", passes, least=1)


def _word(old: torch.Tensor, parameter: torch.Tensor) -> int:
    """Returns this rank's word about a parameter.

    A hook of the step, or a closure, may have cleared the gradient that the step used.
    """
    used = parameter.grad is not None or not torch.equal(old, parameter)
    return _agreement.USED if used else 0


class PendingChange:
    """A parameter's change that is being combined."""

    def __init__(
        self, handle: _native.Handle, buffer: _native.Buffer, small: torch.Tensor, ctx: Any
    ) -> None:
        self.handle, self.buffer, self.small, self.ctx = handle, buffer, small, ctx

    def result(self, compression: type[Compressor], like: torch.Tensor) -> torch.Tensor:
        """Returns the combined change, after a wait for the handle."""
        small = collectives.adapter.view(self.buffer, self.small)
        return decompressed(compression, small, self.ctx, like)


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
        options = f"op=Adasum, compression={compressor_name(compression)}"
        # A step waits for all its operations, so it needs no number.
        described = Description(names, (), options)
        self._identity = Identity(described, process_set, has_number=False)
        self._agreement = Agreement(process_set, 0)
        self._infinities = Agreement(process_set, 0)
        self._session: _native.Session | None = None
        # The work that was begun and may have been interrupted, and its kind.
        self._begun: tuple[str, Resumable[Any]] | None = None
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
            self._session, self._begun = native, None
            for one in (self._identity, self._agreement, self._infinities):
                one.forget()
        native_set(self.process_set)  # raises if it is not registered
        return self.process_set.included() is not False

    def _run(self, kind: str, begin: Callable[[], Waits[Any]]) -> Any:
        """Runs work to its end, or goes on with work of this kind that was interrupted."""
        if self._begun is not None and self._begun[0] != kind:
            self._complete(self._begun[1])
        if self._begun is None:
            self._begun = kind, Resumable(begin())
        return self._complete(self._begun[1])

    def _complete(self, work: Resumable[Any]) -> Any:
        try:
            return work.run()
        finally:
            if not work.is_waiting:
                self._begun = None

    def _share_infinities(self, found: dict[torch.device, torch.Tensor]) -> None:
        """Makes all ranks agree: if any rank has found infinities, no rank makes a step."""
        if not self._takes_part():
            return

        def share() -> Waits[int]:
            yield from self._identity.introduce()
            words = [int(any(bool(inf) for inf in found.values()))]
            name = f"{self._identity.prefix}infinities"
            [anywhere] = yield from self._infinities.exchange(name, words)
            return anywhere

        if self._run("infinities", share):
            for inf in found.values():
                inf.fill_(1.0)

    @without_hooks
    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Makes this rank's step and combines it with the others'."""
        if not self._takes_part():
            self._check_parameters()
            return self._original_step(closure, *args, **kwargs)
        own = partial(self._original_step, closure, *args, **kwargs)
        loss = self._run("step", partial(self._step, own))
        _world.note_step()
        return loss

    def _step(self, own: Callable[[], Any]) -> Waits[Any]:
        """Makes a step; ``own`` makes the step of this rank."""
        yield from self._identity.introduce()
        parameters = [parameter for _, parameter in self._names]
        # ``no_grad`` only here: hooks and closures compute gradients. All parameters: a step may
        # also change those without a gradient.
        with torch.no_grad():
            before = [parameter.detach().clone() for parameter in parameters]
        problem: BaseException | None = None
        loss, words = None, [0 for _ in parameters]
        try:
            self._check_parameters()
            loss = own()
            words = [_word(*pair) for pair in zip(before, parameters)]
        except BaseException as error:
            # TELL: the other ranks would wait for this one, which may also go on after Ctrl-C.
            problem = error
        about, *used = yield from self._agreement.exchange(
            self._identity.agreement, [_agreement.FAILED if problem else 0, *words]
        )
        if about & _agreement.FAILED:
            with torch.no_grad():
                for old, parameter in zip(before, parameters):
                    parameter.copy_(old)
            told = yield start_allgather(
                (_world.rank(), _agreement.description(problem)),
                f"{self._identity.prefix}failures",
                self.process_set,
            )
            raise problem or _agreement.disagree(_agreement.not_taking_part(told))
        # Parameters without a gradient on any rank did not change; all ranks combine the others.
        changes = [(old, *named) for old, named, word in zip(before, self._names, used) if word]
        for first in range(0, len(changes), AT_ONCE):
            yield from self._combine(changes[first : first + AT_ONCE])
        return loss

    def _combine(self, changes: list[tuple[torch.Tensor, str, torch.Tensor]]) -> Waits[None]:
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
        for change, (old, _, parameter) in zip(pending, changes):
            yield change.handle.wait
            with torch.no_grad():
                parameter.copy_(old + change.result(self._compression, old))

    def _copied_for(self, made: Any, twins: dict[torch.Tensor, torch.Tensor]) -> None:
        named = [(name, twins[p]) for name, p in self._names if p in twins]
        made._begin(named, self._compression, self.backward_passes_per_step, self.process_set)

    # Attributes of Horovod's optimizer that scripts read

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        return {parameter: name for name, parameter in self._names}

    @property
    def _requires_update(self) -> set[torch.Tensor]:
        return {parameter for _, parameter in self._names if parameter.requires_grad}
