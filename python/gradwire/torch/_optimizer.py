"""``DistributedOptimizer``: an optimizer that steps with the gradients of all ranks.

It is the given optimizer object, with the same state and a new class of the same name whose
``step`` first waits for the exchange of the gradients. The exchange of a gradient starts during the
backward pass, as soon as the gradient is ready.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gradwire._errors import InvalidRequest
from gradwire._ops import Adasum, Average, ReduceOp, reduce_op
from gradwire._world import ProcessSet, global_process_set, is_initialized, note_step, session
from gradwire.torch import _scaler
from gradwire.torch._adasum import DistributedAdasum, checked_passes
from gradwire.torch._agreement import Call
from gradwire.torch._compression import Compression, Compressor
from gradwire.torch._gradients import Exchange
from gradwire.torch._parameters import Parameters, without_waiting
from gradwire.torch._wrapping import Wrapped, without_hooks, wrap

Named = Iterable[tuple[str, torch.Tensor]]

# The limits of a request: Request::MAX_PARTS and Request::MAX_EXTRA_WORDS. Each tensor takes 5
# words plus one per dimension.
_MAX_TENSORS, _MAX_WORDS, _WORDS = 1024, 8192, 5


def name_parameters(
    param_groups: Sequence[dict[str, Any]], named_parameters: Named | None
) -> list[tuple[str, torch.Tensor]]:
    """Returns the optimizer's parameters, each with a unique name, in the order of the names given.

    The order of the parameters in the optimizer may differ between ranks.

    Raises:
        ValueError: The names are not unique, or a parameter has none.
    """
    own = [parameter for group in param_groups for parameter in group["params"]]
    if named_parameters is None:
        return [(f"noname.{at}", parameter) for at, parameter in enumerate(own)]
    named = list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in named):
        raise ValueError(
            "named_parameters must contain pairs (name, parameter), like model.named_parameters()"
        )
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"named_parameters contains duplicate names: {', '.join(twice)}")
    by_identity = {id(parameter): name for name, parameter in named}
    unnamed = [str(at) for at, parameter in enumerate(own) if id(parameter) not in by_identity]
    if unnamed:
        raise ValueError(
            "named_parameters lacks some of the optimizer's parameters, at the positions "
            f"{', '.join(unnamed)}"
        )
    mine = {id(parameter): parameter for parameter in own}
    chosen = {name: at for at, name in by_identity.items() if at in mine}
    return [(name, mine[chosen[name]]) for name in names if name in chosen]


def _groups(
    groups: int | Sequence[Sequence[torch.Tensor]] | None, trainable: list[torch.Tensor]
) -> list[list[torch.Tensor]]:
    """Returns the parameters of each request; a large group is split into several requests."""
    if groups is None:
        return []
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError(
                f"groups={groups}: it must be a number of groups, or lists of parameters"
            )
        count = min(groups, len(trainable))
        each, more = divmod(len(trainable), max(count, 1))
        sizes = [each + (at < more) for at in range(count)]
        rest = iter(trainable)
        return _requests([next(rest) for _ in range(size)] for size in sizes)
    own, seen = {id(parameter) for parameter in trainable}, set()
    for group in groups:
        for parameter in group:
            if not isinstance(parameter, torch.Tensor):
                raise ValueError("groups must be a number, or lists of the optimizer's parameters")
            if id(parameter) in seen:
                raise ValueError("a parameter is in more than one group")
            seen.add(id(parameter))
    # Frozen parameters and those of other optimizers are not exchanged here.
    return _requests([p for p in group if id(p) in own] for group in groups)


def _requests(groups: Iterable[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Returns the groups, splitting those that exceed the limits of a request."""
    requests: list[list[torch.Tensor]] = []
    for group in groups:
        size = words = _MAX_WORDS  # starts a new request for the group
        for parameter in group:
            size, words = size + 1, words + _WORDS + parameter.dim()
            if size > _MAX_TENSORS or words > _MAX_WORDS:
                requests.append([])
                size, words = 1, _WORDS + parameter.dim()
            requests[-1].append(parameter)
    return requests


class _Distributed(Wrapped):
    """The methods that a distributed optimizer adds to the original optimizer."""

    _exchange: Exchange
    _should_synchronize: bool
    # The number of parameters in the groups.
    _listed: int
    # Whether access to a group's parameters waits for their gradients; see ``Parameters``.
    _parameters_wait: bool

    def _begin(self, exchange: Exchange) -> None:
        self._exchange, self._should_synchronize = exchange, True
        self._parameters_wait = True
        self._known, self._listed = exchange.slots, len(exchange.slots)
        self._check_parameters()
        exchange.takes_part()

    def _finish(self, call: Call) -> None:
        self._exchange.finish(call, self._check_parameters)

    def _before_parameters_are_read(self) -> None:
        """Waits for gradients being exchanged, before a program accesses a group's parameters."""
        if self._parameters_wait and self._exchange.is_due:
            self._finish(Call.READ)

    @contextmanager
    def _without_waiting(self) -> Iterator[None]:
        """Returns a context in which parameters are read without their gradients."""
        before, self._parameters_wait = self._parameters_wait, False
        try:
            yield
        finally:
            self._parameters_wait = before

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
        that nothing has changed since, for which ``skip_synchronize`` also saves the time.

        Args:
            closure: Computes the loss and its gradients again. The gradients are exchanged after
                each call, and so is the loss, because some optimizers use it to decide on further
                calls.
            *args: Further arguments of the optimizer's ``step``.
            **kwargs: Further keyword arguments of the optimizer's ``step``.

        Returns:
            The result of the optimizer's ``step``.

        Raises:
            InvalidRequest: An argument is invalid. Nothing was started.
            GradwireError: The operation failed; the subclass and ``kind`` tell why.
        """
        exchange = self._exchange
        if closure is not None and self._should_synchronize:
            inner = closure

            def closure() -> Any:
                loss = inner()
                self.synchronize()
                exchange.compare()
                exchange.hide()
                return exchange.loss(loss)
        elif self._should_synchronize:
            self._finish(Call.STEP)
        if closure is None:
            exchange.compare()
        exchange.hide()
        try:
            result = self._original_step(closure, *args, **kwargs)
        finally:
            exchange.stepped()
        note_step()
        return result

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
                "ranks"
            )
        with self._without_waiting():
            self._exchange.cleared(partial(super().zero_grad, *args, **kwargs))

    def _check_parameters(self) -> None:
        super()._check_parameters()
        for group in self.param_groups:
            if not isinstance(group["params"], Parameters):
                group["params"] = Parameters(group["params"], self)
        if sum(len(group["params"]) for group in self.param_groups) != self._listed:
            groups = [without_waiting(group["params"]) for group in self.param_groups]
            listed = {parameter for group in groups for parameter in group}
            self._listed = len(listed)
            for parameter, slot in self._exchange.slots.items():
                slot.is_listed = parameter in listed

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


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Named | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp | int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Makes an optimizer step with the gradients of all ranks.

    The optimizer stays the same object, so its schedulers keep working. A backward pass starts the
    exchange of each gradient as soon as it is ready, and ``step`` waits for all of them. Between
    backward pass and step, ``synchronize()`` waits for the gradients, for example to clip them.
    Reading the parameters in ``param_groups`` also waits, so all ranks must do it. Access to other
    entries of ``param_groups``, such as the learning rate, does not wait.

    Args:
        optimizer: Any PyTorch optimizer.
        named_parameters: Pairs of name and parameter for all parameters of the optimizer. By
            default, parameters are named by their order.
        compression: One of ``Compression``, or another subclass of ``Compressor``.
        backward_passes_per_step: The number of backward passes accumulated before the gradients are
            exchanged.
        op: ``Average``, ``Sum`` or ``Adasum``.
        gradient_predivide_factor: A positive factor for averages: gradients are divided by it
            before the sum, and the sum is multiplied by it and divided by the number of ranks.
        num_groups: Deprecated: use ``groups``.
        groups: A number of groups, or lists of parameters. The gradients of a group are exchanged
            in one request, or in several if it has more than about a thousand parameters.
        sparse_as_dense: Whether sparse gradients are exchanged as dense ones.
        process_set: The ranks that exchange their gradients. The default is all ranks. It may be
            registered later, before the first step.

    Returns:
        The given optimizer, which now also has ``synchronize()``, ``skip_synchronize()`` and
        ``set_backward_passes_per_step(passes)``.

    Raises:
        NotInitialized: ``init()`` has not been called.
        ValueError: An argument is invalid, or the optimizer is already distributed.
        InvalidRequest: The arguments can't be combined with ``Adasum``.

    Example:
        ```python
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        loss_of(model(batch)).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ```
    """
    if not is_initialized():
        session()  # raises an error that says what to do
    if not hasattr(optimizer, "param_groups"):
        raise ValueError(f"optimizer={optimizer!r}: it must be a PyTorch optimizer")
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise ValueError(f"compression={compression!r}: it must be one of hvd.Compression")
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"process_set={process_set!r}: it must be a ProcessSet")
    op = reduce_op(op)
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor requires op=Average")
    if gradient_predivide_factor <= 0:
        raise ValueError(
            f"gradient_predivide_factor={gradient_predivide_factor}: it must be positive"
        )
    passes = checked_passes(backward_passes_per_step)
    if isinstance(optimizer, Wrapped):
        raise ValueError("this optimizer is already distributed")
    named = name_parameters(optimizer.param_groups, named_parameters)
    trainable = [parameter for _, parameter in named if parameter.requires_grad]
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    parts = _groups(groups, trainable)
    if op == Adasum and (groups is not None or sparse_as_dense):
        raise InvalidRequest("groups and sparse_as_dense can't be used with Adasum", kind="invalid")
    _scaler.patch()
    if op == Adasum:
        made = wrap(optimizer, DistributedAdasum)
        made._begin(named, compression, passes, process_set)
        return made
    if isinstance(optimizer, torch.optim.SparseAdam):
        # It does not accept dense gradients, which both options would produce.
        parts, sparse_as_dense = [], False
    made = wrap(optimizer, _Distributed)
    exchange = Exchange(
        named,
        parts,
        compression=compression,
        passes=passes,
        op=op,
        predivide=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    made._begin(exchange)
    return made
