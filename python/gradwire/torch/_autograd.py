"""The collectives as functions that autograd knows the gradients of."""

from __future__ import annotations

from typing import Any

import torch

from gradwire._ops import Adasum, Average, Max, Min, Product, ReduceOp, Sum
from gradwire._world import ProcessSet, global_process_set, members, rank
from gradwire.torch._adapter import collectives


def _backward_name(name: str | None) -> str | None:
    return None if name is None else f"{name}.backward"


def _reduce(
    gradients: list[torch.Tensor],
    name: str | None,
    op: ReduceOp,
    scale: float,
    process_set: ProcessSet,
) -> list[torch.Tensor]:
    return collectives.grouped_allreduce(gradients, name, op, scale, 1.0, process_set).wait()


def _extremum(
    gradient: torch.Tensor,
    given: torch.Tensor,
    result: torch.Tensor,
    name: str | None,
    scale: float,
    process_set: ProcessSet,
) -> torch.Tensor:
    """Of Min and Max: what all ranks want of the result goes to those that had it.

    Horovod gives everybody the extremum of the gradients, which is the gradient of nothing.
    """
    had = (given == result).to(gradient.dtype)
    total, holders = _reduce([gradient, had], name, Sum, 1.0, process_set)
    return total * scale * had / holders.clamp(min=1)


def _reduced_gradient(
    gradients: list[torch.Tensor],
    given: list[torch.Tensor],
    results: list[torch.Tensor],
    name: str | None,
    op: ReduceOp,
    scale: float,
    process_set: ProcessSet,
) -> list[torch.Tensor]:
    name = _backward_name(name)
    if op == Product or op not in (Average, Sum, Adasum, Min, Max):
        raise NotImplementedError(f"an allreduce with {op!r} can't be differentiated")
    if op in (Min, Max):
        # The comparison is with what was reduced: the scaled input.
        both = zip(gradients, given, results)
        return [
            _extremum(g, x, y, None if name is None else f"{name}.{at}", scale, process_set)
            for at, (g, x, y) in enumerate(both)
        ]
    if op == Adasum:
        return [collectives.allreduce(g, name, op, 1.0, 1.0, process_set).wait() for g in gradients]
    return _reduce(gradients, name, op, scale, process_set)


class Allreduce(torch.autograd.Function):
    """Of a sum the gradient is the sum of the ranks' gradients, of an average their average."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        name: str | None,
        op: ReduceOp,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        result = collectives.allreduce(tensor, name, op, prescale_factor, postscale_factor, process_set).wait()
        ctx.asked = (name, op, prescale_factor, postscale_factor, process_set)
        if op in (Min, Max):
            ctx.save_for_backward(tensor * prescale_factor, result / postscale_factor)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        name, op, before, after, process_set = ctx.asked
        saved = [[tensor] for tensor in ctx.saved_tensors] or [[], []]
        reduced = _reduced_gradient([gradients[0]], saved[0], saved[1], name, op, before * after, process_set)
        return reduced[0], None, None, None, None, None


class GroupedAllreduce(torch.autograd.Function):
    """The same of several tensors in one request."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: ReduceOp,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        results = collectives.grouped_allreduce(
            tensors, name, op, prescale_factor, postscale_factor, process_set
        ).wait()
        ctx.asked = (name, op, prescale_factor, postscale_factor, process_set)
        if op in (Min, Max):
            before = [tensor * prescale_factor for tensor in tensors]
            ctx.save_for_backward(*before, *[result / postscale_factor for result in results])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        name, op, before, after, process_set = ctx.asked
        count = len(ctx.saved_tensors) // 2
        reduced = _reduced_gradient(
            list(gradients),
            list(ctx.saved_tensors[:count]),
            list(ctx.saved_tensors[count:]),
            name,
            op,
            before * after,
            process_set,
        )
        return None, None, None, None, None, *reduced


class Allgather(torch.autograd.Function):
    """The gradient is the average of what all ranks want of this rank's rows."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        results = collectives.allgather(tensors, name, process_set).wait()
        at = _position(len(results[0][1]), name, process_set)
        ctx.asked = (name, process_set)
        # Tensors of no dimensions are one row.
        ctx.rows = [(sum(rows[:at]), rows[at]) for _, rows in results]
        ctx.shapes = [tensor.shape for tensor in tensors]
        return tuple(result for result, _ in results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        name, process_set = ctx.asked
        reduced = _reduce(list(gradients), _backward_name(name), Average, 1.0, process_set)
        own = [gradient.narrow(0, *rows).reshape(shape) for gradient, rows, shape in zip(reduced, ctx.rows, ctx.shapes)]
        return None, None, *own


class Broadcast(torch.autograd.Function):
    """The gradient is the average of what all ranks want, at the root; elsewhere nothing."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        ctx.asked = (root_rank, name, process_set)
        return collectives.broadcast(tensor, root_rank, name, process_set).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        root_rank, name, process_set = ctx.asked
        [reduced] = _reduce([gradients[0]], _backward_name(name), Average, 1.0, process_set)
        if rank() != root_rank:
            reduced = torch.zeros_like(reduced)
        return reduced, None, None, None


class Alltoall(torch.autograd.Function):
    """The gradient goes back the way that the rows came."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        splits: list[int] | None,
        name: str | None,
        process_set: ProcessSet,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        result, received = collectives.alltoall(tensor, splits, name, process_set).wait()
        ctx.asked = (name, process_set, received, tensor.shape)
        counts = torch.tensor(received, dtype=torch.int32)
        ctx.mark_non_differentiable(counts)
        return result, counts

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        name, process_set, received, shape = ctx.asked
        back, _ = collectives.alltoall(gradients[0], received, _backward_name(name), process_set).wait()
        # Rows that the splits left out went nowhere.
        left = shape[0] - back.shape[0]
        if left:
            back = torch.cat([back, back.new_zeros((left, *shape[1:]))])
        return back, None, None, None


class ReduceScatter(torch.autograd.Function):
    """The gradient is all ranks' gradients; of a sum, times the number of ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: ReduceOp,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.asked = (name, op, prescale_factor * postscale_factor, process_set)
        results = collectives.reducescatter(tensors, name, op, prescale_factor, postscale_factor, process_set).wait()
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        name, op, scale, process_set = ctx.asked
        if op not in (Average, Sum):
            raise NotImplementedError(f"a reducescatter with {op!r} can't be differentiated")
        factor = scale * (members(process_set) if op == Sum else 1)
        gathered = collectives.allgather(
            [gradient * factor for gradient in gradients], _backward_name(name), process_set
        ).wait()
        return None, None, None, None, None, *[result for result, _ in gathered]


def _position(givers: int, name: str | None, process_set: ProcessSet) -> int:
    """This rank's place among those that gave rows."""
    if givers == members(process_set):
        at = rank() if process_set is global_process_set else process_set.rank()
        assert at is not None, "a rank that is not a member was refused before"
        return at
    # Some have joined. Those that have not see the same, and ask each other who they are.
    own = torch.tensor([rank()])
    name = None if name is None else f"{name}.ranks"
    [(ranks, _)] = collectives.allgather([own], name, process_set).wait()
    return ranks.tolist().index(rank())
