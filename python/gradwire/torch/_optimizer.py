"""``DistributedOptimizer``: an optimizer whose steps use the gradients of all ranks.

It is the optimizer that it was made of, with the same state, and a class of the same name whose ``step``
waits for the exchange of the gradients first. The exchange of each gradient begins in the
backward pass, when it is ready.
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
from gradwire._world import ProcessSet, global_process_set, is_initialized, session
from gradwire.torch import _scaler
from gradwire.torch._adasum import DistributedAdasum, at_least_one
from gradwire.torch._compression import Compression, Compressor
from gradwire.torch._gradients import Exchange
from gradwire.torch._wrapping import Wrapped, become, counted

Named = Iterable[tuple[str, torch.Tensor]]

# Two optimizers may give their parameters the same names.
_made: dict[int, int] = {}


def _prefix(process_set: ProcessSet) -> str:
    number = process_set.process_set_id or 0
    _made[number] = _made.get(number, 0) + 1
    return f"optimizer{_made[number]}."


def name_parameters(
    param_groups: Sequence[dict[str, Any]], named_parameters: Named | None
) -> list[tuple[str, torch.Tensor]]:
    """The optimizer's parameters in their order, with names that are theirs alone."""
    own = [parameter for group in param_groups for parameter in group["params"]]
    if named_parameters is None:
        return [(f"noname.{at}", parameter) for at, parameter in enumerate(own)]
    named = list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in named):
        raise ValueError("named_parameters must be pairs (name, parameter), such as model.named_parameters() gives")
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"named_parameters has names more than once: {', '.join(twice)}")
    by_identity = {id(parameter): name for name, parameter in named}
    unnamed = [str(at) for at, parameter in enumerate(own) if id(parameter) not in by_identity]
    if unnamed:
        raise ValueError(
            f"named_parameters lacks parameters of the optimizer: numbers {', '.join(unnamed)} in its order"
        )
    return [(by_identity[id(parameter)], parameter) for parameter in own]


def _groups(
    groups: int | Sequence[Sequence[torch.Tensor]] | None, trainable: list[torch.Tensor]
) -> list[list[torch.Tensor]]:
    if groups is None:
        return []
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError(f"groups={groups}: it must be a number of groups, or lists of parameters")
        count = min(groups, len(trainable))
        each, more = divmod(len(trainable), max(count, 1))
        sizes = [each + (at < more) for at in range(count)]
        rest = iter(trainable)
        return [[next(rest) for _ in range(size)] for size in sizes]
    own, seen = {id(parameter) for parameter in trainable}, set()
    for group in groups:
        for parameter in group:
            if not isinstance(parameter, torch.Tensor):
                raise ValueError("groups must be a number, or lists of the optimizer's parameters")
            if id(parameter) in seen:
                raise ValueError("a parameter is in more than one group")
            seen.add(id(parameter))
    # What is frozen or another optimizer's is not exchanged here.
    return [kept for group in groups if (kept := [p for p in group if id(p) in own])]


class _Distributed(Wrapped):
    """What a distributed optimizer does before the one that it was made of."""

    _exchange: Exchange
    _should_synchronize: bool
    # Copies that were made of this one.
    _copies: int

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameters. Whoever looks at them may change gradients, as clipping does: so what is on
        its way is waited for first."""
        if self._exchange.is_due:
            self.synchronize()
        groups: list[dict[str, Any]] = self.__dict__["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    @property
    def backward_passes_per_step(self) -> int:
        """How many backward passes are added up for a step."""
        return self._exchange.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes are added up for a step."""
        self._exchange.set_passes(at_least_one(passes))

    def synchronize(self) -> None:
        """Waits until all gradients are exchanged: to clip them, or to look at them, before ``step``."""
        self._check_parameters()
        # A rank that has looked at param_groups has done it already; the others have not.
        if not self._exchange.is_exchanged:
            self._exchange.finish()

    @property
    def _synchronized(self) -> bool:
        """Whether there is nothing left to exchange before the next step."""
        return self._exchange.exchanged and not self._exchange.fired

    def gradients_are_wanted(self) -> None:
        if not self._synchronized and self._should_synchronize:
            self.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it ``step`` does not exchange: ``synchronize`` was called by hand before."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    @counted
    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's step with the exchanged gradients.

        What ``synchronize`` has exchanged is not exchanged again. A closure's gradients are exchanged after
        each of its calls, and so is its loss, by which some optimizers decide how often they call it.
        """
        exchange = self._exchange
        if closure is not None and self._should_synchronize:
            inner = closure

            def closure() -> Any:
                exchange.show()
                loss = inner()
                self.synchronize()
                exchange.hide()
                return exchange.loss(loss)
        elif self._should_synchronize and not self._synchronized:
            self.synchronize()
        exchange.hide()
        try:
            return self.own_step(closure, *args, **kwargs)
        finally:
            exchange.stepped()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clears the gradients, as the optimizer does. Those in shared memory are set to zero and stay."""
        if self._exchange.in_flight:
            raise AssertionError(
                "zero_grad() was called after backward() but before step() or synchronize(): the "
                "gradients are on their way to the other ranks"
            )
        self._exchange.cleared(partial(super().zero_grad, *args, **kwargs))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Is refused: the new parameters would be left out of the exchange."""
        raise NotImplementedError(
            "add the parameters to the optimizer before DistributedOptimizer is made of it: later ones would "
            "not be exchanged"
        )

    def _check_parameters(self) -> None:
        """Parameters that somebody has put into the groups would be left out as well."""
        groups = self.__dict__["param_groups"]
        if any(parameter not in self._exchange.slots for group in groups for parameter in group["params"]):
            self.add_param_group({})

    def _copied_for(self, made: Any, parameters: list[torch.Tensor]) -> None:
        self._copies += 1
        made._exchange = self._exchange.copy(f"{self._exchange.prefix}copy{self._copies}.", parameters)
        made._should_synchronize, made._copies = True, 0

    # What scripts read of Horovod's optimizer

    @property
    def op(self) -> ReduceOp:
        """The reduction."""
        return self._exchange.op

    @property
    def gradient_predivide_factor(self) -> float:
        """Of an average, how much of the division is done before the sum."""
        return self._exchange.predivide

    @property
    def sparse_as_dense(self) -> bool:
        """Whether sparse gradients travel as dense ones."""
        return self._exchange.sparse_as_dense

    @property
    def process_set(self) -> ProcessSet:
        """Who exchanges."""
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
        flights = [(slot, handle) for handle, slots in self._exchange.handles for slot in slots]
        return {slot.parameter: (handle, None) for slot, handle in flights}

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
    """Makes an optimizer use the gradients of all ranks.

    It is the same object afterwards, so that schedulers that were made of it before go on.

    - ``named_parameters``: pairs that name every parameter of the optimizer
    - ``compression``: what gradients become for the way
    - ``backward_passes_per_step``: how many passes are added up here before they are exchanged
    - ``op``: Average, Sum or Adasum
    - ``gradient_predivide_factor``: of an average, how much of the division is done before the sum
    - ``groups``: a number of groups, or lists of parameters; a group's gradients go in one request
    - ``sparse_as_dense``: sparse gradients travel as dense ones
    - ``process_set``: who exchanges
    """
    if not is_initialized():
        session()  # says what to do
    op = reduce_op(op)
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor goes with op=Average only")
    if gradient_predivide_factor <= 0:
        raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor}: it must be positive")
    passes = at_least_one(backward_passes_per_step)
    if isinstance(optimizer, Wrapped):
        raise ValueError("this optimizer is distributed already")
    named = name_parameters(optimizer.param_groups, named_parameters)
    trainable = [parameter for _, parameter in named if parameter.requires_grad]
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    parts = _groups(groups, trainable)
    if op == Adasum and (groups is not None or sparse_as_dense):
        raise InvalidRequest("groups and sparse_as_dense don't go with Adasum", kind="invalid")
    prefix = _prefix(process_set)
    _scaler.teach()
    if op == Adasum:
        made = become(optimizer, DistributedAdasum)
        made._begin(prefix, named, compression, passes, process_set)
        return made
    if isinstance(optimizer, torch.optim.SparseAdam):
        # It takes no dense gradients, as which both would let them travel.
        parts, sparse_as_dense = [], False
    made = become(optimizer, _Distributed)
    made._exchange = Exchange(
        named,
        parts,
        prefix=prefix,
        compression=compression,
        passes=passes,
        op=op,
        predivide=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    made._should_synchronize, made._copies = True, 0
    made._exchange.takes_part()
    return made
