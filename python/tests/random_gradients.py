"""First and second gradients through the collectives, compared with a single process.

The single process has the tensors of all ranks. A collective is a function of all of them, and the
loss is the sum of the ranks' losses. Horovod's gradients of some collectives are multiples of the
true ones; ``Weighed`` applies the factors.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

import gradwire.torch as hvd

Tensors = list[torch.Tensor]
# This rank's call, and all ranks' results, computed from all tensors.
Pair = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[Tensors], Tensors]]
WHAT = [
    "sum",
    "average",
    "min",
    "max",
    "group",
    "allgather",
    "grouped_allgather",
    "broadcast",
    "alltoall",
]
WHAT += ["reducescatter", "grouped_reducescatter", "reducescatter_average"]


class Weighed(torch.autograd.Function):
    """The identity, with multiples of its first and second gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, first: float, second: float) -> torch.Tensor:
        ctx.first, ctx.second = first, second
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        again = ctx.second / ctx.first
        return ctx.first * Weighed.apply(gradient, again, again), None, None


def of_rank(dice: random.Random, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dice.getrandbits(32))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def check(what: str, dice: random.Random, process_set: hvd.ProcessSet, **named: str) -> None:
    """Compares this rank's gradients; all members draw the same random numbers."""
    members = process_set.ranks
    n, me = len(members), members.index(hvd.rank())
    before, after = dice.choice([1.0, 0.5, -0.3]), dice.choice([1.0, -0.7, 1 / 3])
    options: dict[str, Any] = {"process_set": process_set, **named}
    factors = {**options, "prescale_factor": before, "postscale_factor": after}
    each, inner = dice.randint(0, 3), dice.choice([(), (2,), (3, 2)])
    rows = [n * each] * n
    splits = [[dice.randint(0, 2) for _ in members] for _ in members]
    given_splits = what == "alltoall" and dice.random() < 0.5
    if "allgather" in what:
        rows = [dice.randint(0, 3) for _ in members]
    elif given_splits:
        rows = [sum(own) + dice.choice([0, 1]) for own in splits]
    elif what == "alltoall":
        splits = [[each] * n for _ in members]
    elif "reducescatter" in what:
        rows = [dice.randint(0, 2 * n + 1)] * n
    root = dice.choice(members)

    def total(all_: Tensors) -> torch.Tensor:
        return torch.stack(all_).sum(0) * (before * after)

    def extremum(all_: Tensors) -> torch.Tensor:
        scaled = torch.stack(all_) * before
        return (scaled.amax(0) if what == "max" else scaled.amin(0)) * after

    def share(whole: torch.Tensor) -> Tensors:
        return list(torch.tensor_split(whole, n)) if len(whole) else [whole] * n

    def exchange(all_: Tensors) -> Tensors:
        parts = [one[: sum(own)].split(own) for one, own in zip(all_, splits)]
        return [torch.cat([part[to] for part in parts]) for to in range(n)]

    def alltoall(x: torch.Tensor) -> torch.Tensor:
        result = hvd.alltoall(x, splits[me] if given_splits else None, **options)
        return result[0] if given_splits else result

    def twice(call: Callable[..., Any], **asked: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        # One result is unused.
        return lambda x: call([x * x, 2 * x], **asked)[1]

    pairs: dict[str, Pair] = {
        "sum": (lambda x: hvd.allreduce(x, op=hvd.Sum, **factors), lambda a: [total(a)] * n),
        "average": (lambda x: hvd.allreduce(x, **factors), lambda a: [total(a) / n] * n),
        "min": (lambda x: hvd.allreduce(x, op=hvd.Min, **factors), lambda a: [extremum(a)] * n),
        "max": (lambda x: hvd.allreduce(x, op=hvd.Max, **factors), lambda a: [extremum(a)] * n),
        "group": (
            twice(hvd.grouped_allreduce, op=hvd.Sum, **factors),
            lambda a: [2 * total(a)] * n,
        ),
        "allgather": (lambda x: hvd.allgather(x, **options), lambda a: [torch.cat(a)] * n),
        "grouped_allgather": (
            twice(hvd.grouped_allgather, **options),
            lambda a: [2 * torch.cat(a)] * n,
        ),
        "broadcast": (
            lambda x: hvd.broadcast(x, root, **options),
            lambda a: [a[members.index(root)]] * n,
        ),
        "alltoall": (alltoall, exchange),
        "reducescatter": (
            lambda x: hvd.reducescatter(x, op=hvd.Sum, **factors),
            lambda a: share(total(a)),
        ),
        "reducescatter_average": (
            lambda x: hvd.reducescatter(x, **factors),
            lambda a: share(total(a) / n),
        ),
        "grouped_reducescatter": (
            twice(hvd.grouped_reducescatter, op=hvd.Sum, **factors),
            lambda a: share(2 * total(a)),
        ),
    }
    # Gradients of allgather and broadcast are averages; those of reducescatter are multiples.
    first, second = 1.0, 1.0
    if "allgather" in what or what == "broadcast":
        first = second = 1 / n
    elif "reducescatter" in what:
        first = n
    call, locally = pairs[what]

    def loss(given: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        return (result**3).sum() + (given**2).sum() * result.sum()

    def penalty(gradient: torch.Tensor) -> torch.Tensor:
        return (gradient**2).sum() + gradient.sum()

    everybody = [of_rank(dice, count, *inner).requires_grad_() for count in rows]
    own = everybody[me].detach().clone().requires_grad_()
    [slope] = torch.autograd.grad(loss(own, call(own)), own, create_graph=True)
    [curve] = torch.autograd.grad(penalty(slope), own)

    results = locally([Weighed.apply(one, first, second) for one in everybody])
    slopes = torch.autograd.grad(sum(map(loss, everybody, results)), everybody, create_graph=True)
    curves = torch.autograd.grad(sum(map(penalty, slopes)), everybody)
    torch.testing.assert_close(slope, slopes[me])
    torch.testing.assert_close(curve, curves[me])
