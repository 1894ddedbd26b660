"""The methods of a distributed optimizer that wait for the exchange of its gradients."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gradwire._ops import ReduceOp
from gradwire._process_sets import ProcessSet
from gradwire._world import note_step
from gradwire.torch._adasum import checked_passes
from gradwire.torch._agreement import Call
from gradwire.torch._compression import Compressor
from gradwire.torch._gradients import Exchange
from gradwire.torch._options import OptionsOf
from gradwire.torch._parameters import Parameters, without_waiting
from gradwire.torch._wrapping import Wrapped, without_hooks

_contributors = 0


def contributors() -> int:
    """Returns the number of ranks whose gradients are in the last step.

    In an elastic job, it changes with the ranks.

    Returns:
        The number of ranks that have exchanged gradients for the last step of this process with a
        ``DistributedOptimizer`` or with the optimizer of a ``DdpHookState``; 0 before the first
        step.

    Example:
        ```python
        optimizer.step()
        samples += hvd.contributors() * batch_size
        ```
    """
    return _contributors


def note_contributors(count: int) -> None:
    """Notes the number of ranks whose gradients are in the last step."""
    global _contributors
    _contributors = count


class Distributed(Wrapped):
    """The methods that a distributed optimizer adds to the original optimizer."""

    _exchange: Exchange
    _should_synchronize: bool
    # The ids of the parameters in the groups.
    _listed: list[int]
    # By thread, whether access to a group's parameters waits for their gradients; see
    # ``Parameters``. Programs save states in threads of their own.
    _access: threading.local

    def _begin(self, exchange: Exchange) -> None:
        self._exchange, self._should_synchronize = exchange, True
        names = {id(parameter): slot.name for parameter, slot in exchange.slots.items()}
        own = weakref.ref(self)
        exchange.options = OptionsOf(own, names)
        self._access = threading.local()
        self._known, self._listed = exchange.slots, []
        self._check_parameters()
        exchange.takes_part()

    def _finish(self, call: Call) -> None:
        self._exchange.finish(call, self._check_parameters)

    def _finish_for_step(self) -> None:
        """Exchanges the gradients, unless the program has done so and skips the agreement."""
        if self._should_synchronize or not self._synchronized or self._exchange.in_flight:
            self._finish(Call.STEP)
        else:
            self._exchange.note_options()

    def _before_parameters_are_read(self) -> None:
        """Waits for gradients being exchanged, before a program accesses a group's parameters."""
        if getattr(self._access, "waits", True) and self._exchange.is_due:
            self._finish(Call.READ)

    @contextmanager
    def _without_waiting(self) -> Iterator[None]:
        """Returns a context in which this thread reads parameters without their gradients."""
        before, self._access.waits = getattr(self._access, "waits", True), False
        try:
            yield
        finally:
            self._access.waits = before

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the optimizer's state without waiting for gradients.

        Args:
            *args: The arguments of the optimizer's ``state_dict``.
            **kwargs: The keyword arguments of the optimizer's ``state_dict``.

        Returns:
            The state of the optimizer.
        """
        with self._without_waiting():
            return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Loads a state into the optimizer without waiting for gradients.

        Args:
            *args: The arguments of the optimizer's ``load_state_dict``.
            **kwargs: The keyword arguments of the optimizer's ``load_state_dict``.
        """
        with self._without_waiting():
            super().load_state_dict(*args, **kwargs)

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes accumulated for a step."""
        return self._exchange.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes the number of backward passes accumulated for a step.

        Args:
            passes: The number of passes, at least 1.

        Raises:
            ValueError: ``passes`` is less than 1.
        """
        self._exchange.set_passes(checked_passes(passes))

    def synchronize(self) -> None:
        """Waits until all gradients are exchanged, for example to clip them before ``step``.

        All ranks call it, or none.

        Raises:
            InvalidRequest: An argument is invalid. Nothing was started.
            GradwireError: The operation failed; the subclass and ``kind`` tell why.
        """
        self._finish(Call.SYNCHRONIZE)

    def _before_gradients_are_read(self) -> None:
        """Exchanges the gradients if ``step`` would."""
        if self._should_synchronize:
            self.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Returns a context in which ``step`` skips the exchange, for use after ``synchronize``.

        Gradients that ``synchronize`` has not exchanged are exchanged nevertheless.

        Returns:
            A context manager.

        Example:
            ```python
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
            ```
        """
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    @without_hooks
    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Makes a step with the exchanged gradients.

        Gradients already exchanged by ``synchronize`` are not exchanged again: the ranks only agree
        that nothing has changed since. ``skip_synchronize`` saves this agreement, too.

        Args:
            closure: Computes the loss and its gradients again. The gradients are exchanged after
                each call, and so is the loss, because some optimizers use it to decide on further
                calls. Anything else is passed on to the optimizer's ``step``.
            *args: Further arguments of the optimizer's ``step``.
            **kwargs: Further keyword arguments of the optimizer's ``step``.

        Returns:
            The result of the optimizer's ``step``.

        Raises:
            InvalidRequest: An argument is invalid. Nothing was started.
            GradwireError: The operation failed; the subclass and ``kind`` tell why.
        """
        exchange = self._exchange
        if callable(closure):
            # An optimizer may use earlier gradients before it calls the closure, or never call it.
            self._before_parameters_are_read()
            inner = closure

            def closure() -> Any:
                loss = inner()
                with exchange.closure(loss):
                    self.synchronize()
                exchange.compare()
                exchange.hide()
                return exchange.loss(loss)
        else:
            self._finish_for_step()
        return self._step_with_results(closure, *args, **kwargs)

    def _step_with_results(
        self, closure: Callable[[], Any] | None, *args: Any, **kwargs: Any
    ) -> Any:
        """Makes the original step with exchanged gradients."""
        self._exchange.hide()
        complete = False
        try:
            with self._last_hook(closure):
                result = self._original_step(closure, *args, **kwargs)
            complete = True
        finally:
            self._exchange.stepped(complete)
        note_contributors(self._exchange.contributors)
        note_step()
        return result

    def _compare(self) -> None:
        """Compares the gradients of the step between the ranks, if the settings request it."""
        self._exchange.compare()

    @contextmanager
    def _last_hook(self, closure: Callable[[], Any] | None) -> Iterator[None]:
        """Returns a context in which a step's last hook compares and notes what the step sees."""
        # A closure computes the gradients only after the hooks.
        if callable(closure):
            yield
            return
        # Optimizers that a program defines may lack PyTorch's hooks.
        if not hasattr(self, "_optimizer_step_pre_hooks"):
            self._compare()
            yield
            return

        def look(*_: Any) -> None:
            self._compare()
            self._exchange.look()

        hook = self.register_step_pre_hook(look)
        try:
            yield
        finally:
            hook.remove()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clears the gradients like the original optimizer.

        Gradients in shared memory are zeroed and stay there.

        Args:
            *args: The arguments of the optimizer's ``zero_grad``.
            **kwargs: The keyword arguments of the optimizer's ``zero_grad``.

        Raises:
            AssertionError: Gradients are still being exchanged.
        """
        if self._exchange.in_flight:
            raise AssertionError(
                "zero_grad() was called after backward() but before step() or synchronize(), "
                "while the gradients are still being exchanged: call one of these first, on all "
                "ranks, also if the gradients are not used"
            )
        with self._without_waiting():
            self._exchange.cleared(partial(super().zero_grad, *args, **kwargs))

    def _check_parameters(self) -> None:
        super()._check_parameters()
        for group in self.param_groups:
            given = group["params"]
            if not isinstance(given, Parameters) or not given.waits_for(self):
                group["params"] = Parameters(given, self)
        groups = [without_waiting(group["params"]) for group in self.param_groups]
        listed = [id(parameter) for group in groups for parameter in group]
        if listed != self._listed:
            self._listed, ids = listed, {*listed}
            for parameter, slot in self._exchange.slots.items():
                slot.is_listed = id(parameter) in ids

    def _copied_for(self, made: Any, twins: dict[torch.Tensor, torch.Tensor]) -> None:
        made._begin(self._exchange.copy(twins))

    # Attributes of Horovod's optimizer that scripts read

    @property
    def _synchronized(self) -> bool:
        return self._exchange.exchanged and not self._exchange.fired

    @property
    def op(self) -> ReduceOp:
        """The reduction."""
        return self._exchange.op

    @property
    def gradient_predivide_factor(self) -> float:
        """The divisor that an average applies before the sum."""
        return self._exchange.predivide

    @property
    def sparse_as_dense(self) -> bool:
        """Whether sparse gradients are exchanged as dense ones."""
        return self._exchange.sparse_as_dense

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that exchange their gradients."""
        return self._exchange.process_set

    @property
    def _compression(self) -> type[Compressor]:
        return self._exchange.compression

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        return {parameter: slot.name for parameter, slot in self._exchange.slots.items()}

    @property
    def _requires_update(self) -> set[torch.Tensor]:
        return {parameter for parameter in self._exchange.slots if parameter.requires_grad}

    @property
    def _handles(self) -> dict[torch.Tensor, tuple[Any, Any]]:
        # Gradients that ``step`` will send have no handle yet.
        waiting = {slot.parameter: (None, None) for slot in self._exchange.submitted}
        flights = [(slot, handle) for handle, slots in self._exchange.handles for slot in slots]
        return {**waiting, **{slot.parameter: (handle, None) for slot, handle in flights}}

    @property
    def _allreduce_delay(self) -> dict[torch.Tensor, int]:
        return {parameter: slot.delay for parameter, slot in self._exchange.slots.items()}
