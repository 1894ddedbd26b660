"""``DistributedOptimizer``: an optimizer that steps with the gradients of all ranks.

It is the given optimizer object, with the same state and a new class of the same name whose
``step`` first waits for the exchange of the gradients. The exchange of a gradient starts during the
backward pass, as soon as the gradient is ready.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gradwire._arguments import compressor, factor, whole_number
from gradwire._errors import InvalidRequest
from gradwire._ops import Adasum, Average, ReduceOp, Sum, reduce_op
from gradwire._process_sets import ProcessSet, global_process_set
from gradwire._world import is_initialized, session
from gradwire.elastic import State
from gradwire.torch import _scaler
from gradwire.torch._adasum import DistributedAdasum, checked_passes
from gradwire.torch._compression import Compression, Compressor
from gradwire.torch._gradients import Exchange
from gradwire.torch._parameters import names_in
from gradwire.torch._skipping import PatientExchange, Skipping
from gradwire.torch._stepping import Distributed
from gradwire.torch._wrapping import Wrapped, wrap

Named = Iterable[tuple[str, torch.Tensor]]

# The limits of a request: Request::MAX_PARTS and Request::MAX_EXTRA_WORDS. Each tensor takes 5
# words plus one per dimension.
_MAX_TENSORS, _MAX_WORDS, _WORDS = 1024, 8192, 5
# The longest name of a parameter, in bytes: TensorName::MAX_BYTES without the optimizer's prefix.
_MAX_NAME = 960


def name_parameters(
    param_groups: Sequence[dict[str, Any]], named_parameters: Named | None
) -> list[tuple[str, torch.Tensor]]:
    """Returns the optimizer's parameters, each with a unique name, in the order of the names given.

    The order of the parameters in the optimizer may differ between ranks. By default, the names are
    those that the optimizer was made with, if there are any and they are unique.

    Raises:
        ValueError: The names are not unique, or a parameter has none.
    """
    own = [parameter for group in param_groups for parameter in group["params"]]
    if named_parameters is None:
        made_with = names_in(param_groups)
        if made_with is not None:
            named_parameters = zip(made_with, own)
    if named_parameters is None:
        return [(f"noname.{at}", parameter) for at, parameter in enumerate(own)]
    named = list(named_parameters)
    if any(
        not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str)
        for pair in named
    ):
        raise ValueError(
            "named_parameters must contain pairs (name, parameter), like model.named_parameters()"
        )
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"named_parameters contains duplicate names: {', '.join(twice)}")
    long = [name for name in names if len(name.encode()) > _MAX_NAME]
    if long:
        raise ValueError(
            f"the name {long[0][:60]}… in named_parameters is longer than {_MAX_NAME} bytes"
        )
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
    if isinstance(groups, bool):
        raise ValueError("groups must be a number, or lists of the optimizer's parameters")
    if not isinstance(groups, Iterable):
        count = min(whole_number("groups", groups), len(trainable))
        each, more = divmod(len(trainable), max(count, 1))
        sizes = [each + (at < more) for at in range(count)]
        rest = iter(trainable)
        return _requests([next(rest) for _ in range(size)] for size in sizes)
    own, seen = {id(parameter) for parameter in trainable}, set()
    for group in groups:
        is_group = isinstance(group, Iterable) and not isinstance(group, torch.Tensor)
        for parameter in group if is_group else [None]:
            if not isinstance(parameter, torch.Tensor):
                raise ValueError("groups must be a number, or lists of the optimizer's parameters")
            if id(parameter) not in own and not isinstance(parameter, torch.nn.Parameter):
                raise ValueError("groups contains a tensor that is not a parameter")
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
    on_loss: str = "raise",
    state: State | None = None,
) -> Any:
    """Makes an optimizer step with the gradients of all ranks.

    The optimizer stays the same object, so its schedulers keep working. A backward pass starts the
    exchange of each gradient as soon as it is ready, and ``step`` waits for all of them. Between
    backward pass and step, ``synchronize()`` waits for the gradients, for example to clip them.
    Reading the parameters in ``param_groups`` also waits, so all ranks must do it. Access to other
    entries of ``param_groups``, such as the learning rate, does not wait.

    Args:
        optimizer: Any PyTorch optimizer.
        named_parameters: Pairs of name and parameter for all parameters of the optimizer. The
            default is the names that the optimizer was made with, as in
            ``SGD(model.named_parameters())``; without names, parameters are paired by their order.
        compression: One of ``Compression``, or another subclass of ``Compressor``.
        backward_passes_per_step: The number of backward passes accumulated before the gradients are
            exchanged.
        op: ``Average``, ``Sum`` or ``Adasum``.
        gradient_predivide_factor: A positive factor for averages: gradients are divided by it
            before the sum, and the sum is multiplied by it and divided by the number of ranks.
        num_groups: Deprecated: use ``groups``.
        groups: A number of groups, or lists of parameters. The gradients of a group are exchanged
            in one request, or in several if it has more than about a thousand parameters. Sparse
            gradients in it are exchanged as dense ones.
        sparse_as_dense: Whether sparse gradients are exchanged as dense ones.
        process_set: The ranks that exchange their gradients. The default is all ranks. It may be
            registered later, before the first step.
        on_loss: What happens if a rank of an elastic job is lost. ``"raise"``: the operation raises
            an error, for ``elastic.run``. ``"skip"``: all ranks skip the step, and training goes on
            with the ranks that are left. A new rank then receives the parameters and the state of
            the optimizer from another one. All ranks make such an optimizer directly before their
            loop. This copies parameters and state of rank 0 to all ranks.
        state: With ``on_loss="skip"``, what else a new rank receives, such as a
            ``TorchState(model=model, step=0)`` for buffers and the place in the loop.

    Returns:
        The given optimizer, which now also has ``synchronize()``, ``skip_synchronize()`` and
        ``set_backward_passes_per_step(passes)``; with ``on_loss="skip"`` also ``skipped_steps``.

    Raises:
        NotInitialized: ``init()`` has not been called.
        ValueError: An argument is invalid, or the optimizer is already distributed.
        InvalidRequest: The arguments can't be combined with ``Adasum`` or ``on_loss="skip"``.

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
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer; if it wraps "
            "one, give that one to DistributedOptimizer"
        )
    compressor(compression)
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"process_set={process_set!r}: it must be a ProcessSet")
    op = reduce_op(op)
    if op not in (Average, Sum, Adasum):
        raise ValueError(f"op={op.name}: gradients are reduced by Average, Sum or Adasum")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor requires op=Average")
    if factor("gradient_predivide_factor", gradient_predivide_factor) <= 0:
        raise ValueError(
            f"gradient_predivide_factor={gradient_predivide_factor}: it must be positive"
        )
    if not isinstance(sparse_as_dense, int) or sparse_as_dense not in (False, True):
        raise ValueError(f"sparse_as_dense={sparse_as_dense!r}: it must be True or False")
    passes = checked_passes(backward_passes_per_step)
    _check_loss(on_loss, state, op, process_set)
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
    skips = on_loss == "skip"
    made = wrap(optimizer, Skipping if skips else Distributed)
    exchange = (PatientExchange if skips else Exchange)(
        named,
        parts,
        compression=compression,
        passes=passes,
        op=op,
        predivide=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    if skips:
        made._begin_with(exchange, state)
    else:
        made._begin(exchange)
    return made


def _check_loss(on_loss: str, state: State | None, op: ReduceOp, process_set: ProcessSet) -> None:
    """Raises an error if ``on_loss`` is invalid, or can't be combined with other arguments."""
    if on_loss not in ("raise", "skip"):
        raise ValueError(f"on_loss={on_loss!r}: it must be 'raise' or 'skip'")
    if on_loss == "raise" and state is not None:
        raise ValueError("state requires on_loss='skip'; elastic.run has its own state")
    if on_loss == "skip" and (op == Adasum or process_set is not global_process_set):
        raise InvalidRequest(
            "on_loss='skip' can't be used with Adasum, or with a part of the ranks: all ranks skip "
            "a step together",
            kind="invalid",
        )
