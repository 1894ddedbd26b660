"""The collectives as autograd functions.

Gradients are computed with such functions as well, so they can be differentiated again
(``create_graph``). All ranks make the same calls in a backward pass, even if their part of a
gradient is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradwire._arguments import whole_number
from gradwire._ops import Adasum, Average, Max, Min, Product, ReduceOp, Sum, factors
from gradwire._positions import position
from gradwire._process_sets import ProcessSet
from gradwire._world import members, rank
from gradwire.torch._adapter import check_is_tensor, collectives


def _backward_name(name: str | None) -> str | None:
    return None if name is None else f"{name}.backward"


def _reduce(
    gradients: Sequence[torch.Tensor],
    name: str | None,
    op: ReduceOp,
    scale: float,
    process_set: ProcessSet,
) -> Sequence[torch.Tensor]:
    results: Sequence[torch.Tensor] = GroupedAllreduce.apply(
        name, op, scale, 1.0, process_set, *gradients
    )
    return results


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Returns the product, computed at least in f32 and rounded once."""
    if factor == 1.0:
        return tensor
    wide = torch.float32 if tensor.dtype.itemsize < 4 else tensor.dtype
    return (tensor.to(wide) * factor).to(tensor.dtype)


def _has_extremum(given: torch.Tensor, extremum: torch.Tensor) -> torch.Tensor:
    """Returns a mask of the elements where a rank has the extremum of all ranks."""
    return (given == extremum) | (given.isnan() & extremum.isnan())


def _extremum_gradient(
    gradient: torch.Tensor,
    had: torch.Tensor,
    name: str | None,
    scale: float,
    process_set: ProcessSet,
) -> torch.Tensor:
    """Returns the gradient of a Min or Max: ranks that had it share the sum of the gradients.

    Horovod returns the extremum of the gradients instead, which is mathematically wrong.
    """
    own = had.to(gradient.dtype)
    total, holders = _reduce([gradient, own], name, Sum, 1.0, process_set)
    return total * scale * own / holders.detach().clamp(min=1)


class GroupedAllreduce(torch.autograd.Function):
    """The gradient of a sum is the sum of the ranks' gradients; of an average, their average."""

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
        """Returns the reduced tensors."""
        before, after = factors(prescale_factor, postscale_factor)
        ctx.arguments = (name, op, before * after, process_set)
        ctx.had = None
        for tensor in tensors:
            check_is_tensor(tensor)
        scales = all(tensor.is_floating_point() for tensor in tensors) or before == after == 1.0
        if op not in (Min, Max) or not scales:
            return tuple(
                collectives.grouped_allreduce(tensors, name, op, before, after, process_set).wait()
            )
        # The mask needs bitwise equality, so the factors are applied here: during the exchange,
        # they would round short floats differently, depending on the placement of the ranks.
        given = [_scaled(tensor.detach(), before) for tensor in tensors]
        extrema = collectives.grouped_allreduce(given, name, op, 1.0, 1.0, process_set).wait()
        if any(ctx.needs_input_grad):
            # Not a saved tensor, so that each output can be differentiated separately.
            ctx.had = [_has_extremum(*pair) for pair in zip(given, extrema)]
        return tuple(_scaled(extremum, after) for extremum in extrema)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Returns the gradients of the tensors."""
        name, op, scale, process_set = ctx.arguments
        name = _backward_name(name)
        if op == Product or op not in (Average, Sum, Adasum, Min, Max):
            raise NotImplementedError(f"an allreduce with {op!r} can't be differentiated")
        if op in (Min, Max):
            if ctx.had is None:
                raise NotImplementedError(
                    f"{op!r} of integers with factors can't be differentiated"
                )
            reduced: Sequence[torch.Tensor] = [
                _extremum_gradient(
                    g, had, None if name is None else f"{name}.{at}", scale, process_set
                )
                for at, (g, had) in enumerate(zip(gradients, ctx.had))
            ]
        else:
            # Adasum takes a single tensor and no factors.
            reduced = _reduce(gradients, name, op, scale, process_set)
        return None, None, None, None, None, *reduced


class Allgather(torch.autograd.Function):
    """The gradient is the average of all ranks' gradients for this rank's rows."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Returns the gathered tensors."""
        results = collectives.allgather(tensors, name, process_set).wait()
        at = _position(len(results[0][1]), name, process_set)
        ctx.arguments = (name, process_set)
        # A scalar tensor counts as one row.
        ctx.rows = [(sum(rows[:at]), rows[at]) for _, rows in results]
        ctx.shapes = [tensor.shape for tensor in tensors]
        return tuple(result for result, _ in results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Returns the gradients of the tensors."""
        name, process_set = ctx.arguments
        reduced = _reduce(gradients, _backward_name(name), Average, 1.0, process_set)
        own = [
            gradient.narrow(0, *rows).reshape(shape)
            for gradient, rows, shape in zip(reduced, ctx.rows, ctx.shapes)
        ]
        return None, None, *own


class Broadcast(torch.autograd.Function):
    """The gradient is the average of all ranks' gradients at the root, and zero elsewhere."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        """Returns the root's tensor."""
        root_rank = whole_number("root_rank", root_rank)
        ctx.arguments = (root_rank, name, process_set)
        return collectives.broadcast(tensor, root_rank, name, process_set).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Returns the gradient of the tensor."""
        root_rank, name, process_set = ctx.arguments
        [reduced] = _reduce([gradients[0]], _backward_name(name), Average, 1.0, process_set)
        # Zeros that depend on the reduced value, so that all ranks take part in a second
        # differentiation.
        at_root = torch.tensor(rank() == root_rank, device=reduced.device)
        return torch.where(at_root, reduced, torch.zeros_like(reduced)), None, None, None


class Alltoall(torch.autograd.Function):
    """The gradient is sent back to where the rows came from."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        splits: list[int] | None,
        name: str | None,
        process_set: ProcessSet,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the received rows, and the number of rows from each rank."""
        result, received = collectives.alltoall(tensor, splits, name, process_set).wait()
        ctx.arguments = (name, process_set, received, tensor.shape)
        counts = torch.tensor(received, dtype=torch.int32, device="cpu")
        ctx.mark_non_differentiable(counts)
        return result, counts

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Returns the gradient of the tensor."""
        name, process_set, received, shape = ctx.arguments
        back, _ = Alltoall.apply(gradients[0], received, _backward_name(name), process_set)
        # Rows beyond the splits were not sent.
        left = shape[0] - back.shape[0]
        if left:
            back = torch.cat([back, back.new_zeros((left, *shape[1:]))])
        return back, None, None, None


class ReduceScatter(torch.autograd.Function):
    """The gradient is the allgather of the gradients; for a sum, times the number of ranks."""

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
        """Returns this rank's rows."""
        before, after = factors(prescale_factor, postscale_factor)
        ctx.arguments = (name, op, before * after, process_set)
        results = collectives.reducescatter(tensors, name, op, before, after, process_set).wait()
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Returns the gradients of the tensors."""
        name, op, scale, process_set = ctx.arguments
        if op not in (Average, Sum):
            raise NotImplementedError(f"a reducescatter with {op!r} can't be differentiated")
        by = scale * (members(process_set) if op == Sum else 1)
        scaled = [gradient * by for gradient in gradients]
        gathered = Allgather.apply(_backward_name(name), process_set, *scaled)
        return None, None, None, None, None, *gathered


def _position(givers: int, name: str | None, process_set: ProcessSet) -> int:
    """Returns this rank's position among the contributing ranks."""

    def gather() -> list[int]:
        own = torch.tensor([rank()], device="cpu")
        called = None if name is None else f"{name}.ranks"
        [(ranks, _)] = collectives.allgather([own], called, process_set).wait()
        return list(ranks.tolist())

    return position(givers, process_set, gather)
