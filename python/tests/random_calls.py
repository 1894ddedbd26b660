"""Random calls of the Horovod-style collectives, and their expected results.

All ranks draw the same calls and the same tensors, so each rank can compute the result of a call.
Each rank starts calls and waits for them in its own random order.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from random_values import (
    BITS,
    FLOATS,
    INTEGERS,
    OF_NUMPY,
    OF_TORCH,
    Numbers,
    array_of,
    compare,
    laid_out,
    numbers,
    numbers_of,
    reduced,
    tensor_of,
)

import gradwire as gw
import gradwire.torch as hvd

OPS = [gw.Sum, gw.Average, gw.Min, gw.Max, gw.Product, gw.BitAnd, gw.BitOr, gw.BitXor]
FACTORS = [1.0, 1.0, 0.5, -2.0, 1 / 3, 3.0]
# The function that waits for the results of a call.
Wait = Callable[[], Any]


class Call:
    """One call: the members' arguments, how this rank makes the call, and a check of its result."""

    def __init__(self, seed: str, at: int, sets: list[hvd.ProcessSet]) -> None:
        self.seed, self.at, self.dice = seed, at, random.Random(f"{seed}.{at}")
        dice = self.dice
        self.set = dice.choice([hvd.global_process_set, *sets])
        self.members = self.set.ranks
        self.size = len(self.members)
        self.of_numpy = dice.random() < 0.3
        self.what = dice.choice(
            [*OF_BOTH, "reduce", "gather", "scatter"] if self.of_numpy else OF_BOTH
        )
        self.kind = dice.choice(OF_NUMPY if self.of_numpy else OF_TORCH)
        self.named = dice.random() < 0.6
        self.options: dict[str, Any] = {"process_set": self.set}
        if self.named:
            self.options["name"] = f"call{at}"
        self.group = dice.random() < 0.3 and self.what in GROUPED
        self.kinds = [self.kind] * (dice.randint(1, 4) if self.group else 1)
        if dice.random() < 0.5:
            self.kinds = [
                self.kind,
                *(dice.choice(OF_NUMPY if self.of_numpy else OF_TORCH) for _ in self.kinds[1:]),
            ]
        self.in_place = dice.random() < 0.4 and self.what in ("allreduce", "broadcast")
        self.in_place &= not (self.of_numpy and self.group)
        in_flight = ASYNC_NUMPY if self.of_numpy else ASYNC_TORCH
        self.is_async = dice.random() < 0.6 and (self.what, self.group, self.in_place) in in_flight
        self.op = dice.choice([op for op in OPS if all(_has(op, kind) for kind in self.kinds)])
        self.factors = 1.0, 1.0
        if all(kind != "bool" for kind in self.kinds) and self.op.name not in BITS:
            self.factors = dice.choice(FACTORS), dice.choice(FACTORS)
        self.root = dice.choice(self.members)
        self._shapes()

    def _shapes(self) -> None:
        dice = self.dice
        inner = [
            tuple(dice.choice([0, 1, 2, 3, 5]) for _ in range(dice.randint(0, 2)))
            for _ in self.kinds
        ]
        by_rows = self.what not in ("allreduce", "reduce", "broadcast")

        def rows() -> int:
            return dice.choice([0, 1, 2, 3, 4, 7, 300 if dice.random() < 0.05 else 5])

        self.splits: dict[int, list[int]] | None = None
        if self.what in ("allgather", "gather"):
            self.shapes = {rank: [(rows(), *dims) for dims in inner] for rank in self.members}
        elif self.what in ("alltoall", "scatter"):
            given = dice.random() < 0.6
            if given:
                self.splits = {
                    rank: [dice.randint(0, 3) for _ in self.members] for rank in self.members
                }
            self.shapes = {}
            for rank in self.members:
                many = sum(self.splits[rank]) if self.splits else self.size * dice.randint(0, 3)
                spare = dice.choice([0, 0, 2]) if self.splits and self.what == "alltoall" else 0
                self.shapes[rank] = [(many + spare, *inner[0])]
        else:
            first = (rows(),) if by_rows or dice.random() < 0.8 else ()
            shapes = [(*first, *dims) for dims in inner]
            self.shapes = dict.fromkeys(self.members, shapes)

    def _own_dice(self, rank: int) -> random.Random:
        return random.Random(f"{self.seed}.{self.at}.{rank}")

    def _given(self, rank: int) -> list[Any]:
        """Returns the input of a rank."""
        dice = self._own_dice(rank)
        product = self.op == gw.Product
        make = array_of if self.of_numpy else tensor_of
        pairs = zip(self.kinds, self.shapes[rank])
        return [make(kind, numbers(dice, kind, shape, product)) for kind, shape in pairs]

    def everybody(self) -> list[list[Numbers]]:
        """Returns the inputs of all members as numbers, by tensor and rank."""
        all_ = [[numbers_of(given) for given in self._given(rank)] for rank in self.members]
        return [list(part) for part in zip(*all_)]

    def __repr__(self) -> str:
        words = [
            f"call {self.at}: {self.what}",
            "of numpy" if self.of_numpy else "of torch",
            f"kinds={self.kinds}",
        ]
        words += [f"op={self.op} factors={self.factors} root={self.root} splits={self.splits}"]
        words += [f"group={self.group} in_place={self.in_place} async={self.is_async}"]
        return " ".join([*words, f"shapes={self.shapes}", f"options={self.options}"])

    def start(self) -> Wait:
        """Makes the call; blocking calls have completed when this returns."""
        rank, dice = gw.rank(), self._own_dice(1000 + gw.rank())
        given = [laid_out(dice, one) for one in self._given(rank)]
        before = [numbers_of(one) for one in given]
        module: Any = gw if self.of_numpy else hvd
        name = ("grouped_" if self.group else "") + self.what
        name += ("_async" if self.is_async else "") + ("_" if self.in_place else "")
        arguments: dict[str, Any] = dict(self.options)
        if self.what in ("allreduce", "reducescatter", "reduce"):
            arguments |= {
                "op": self.op,
                "prescale_factor": self.factors[0],
                "postscale_factor": self.factors[1],
            }
        if self.what in ("broadcast", "reduce", "gather", "scatter"):
            arguments["root_rank"] = self.root
        if self.splits is not None and (self.what == "alltoall" or rank == self.root):
            own = self.splits[rank]
            arguments["splits"] = (
                torch.tensor(own) if not self.of_numpy and dice.random() < 0.5 else own
            )
        called = getattr(module, name)(given if self.group else given[0], **arguments)

        def wait() -> None:
            result = called.wait() if self.is_async else called
            if self.in_place:
                assert all(a is b for a, b in zip(result if self.group else [result], given))
            else:
                for one, other in zip(given, before):
                    assert np.array_equal(numbers_of(one), other), "an argument has changed"
            self._check(result)

        return wait

    def _check(self, result: Any) -> None:
        everybody, at = self.everybody(), self.members.index(gw.rank())
        if self.what in ("allreduce", "reduce", "reducescatter"):
            if self.what == "reduce" and gw.rank() != self.root:
                assert result is None
                return
            for one, kind, given in zip(result if self.group else [result], self.kinds, everybody):
                expected, bound = reduced(kind, self.op, given, *self.factors)
                if self.what == "reducescatter":
                    rows = _share(len(expected), self.size, at)
                    expected, bound = expected[rows], bound[rows]
                compare(one, kind, expected, bound)
        elif self.what in ("allgather", "gather"):
            if self.what == "gather" and gw.rank() != self.root:
                assert result is None
                return
            for one, kind, given in zip(result if self.group else [result], self.kinds, everybody):
                compare(one, kind, np.concatenate(given))
        elif self.what == "broadcast":
            compare(result, self.kind, everybody[0][self.members.index(self.root)])
        elif self.what == "scatter":
            source = self.members.index(self.root)
            compare(result, self.kind, everybody[0][source][self._rows(self.root, at)])
        else:
            parts = [given[self._rows(rank, at)] for rank, given in zip(self.members, everybody[0])]
            if self.splits is not None:
                result, received = result
                assert list(map(int, received)) == [len(part) for part in parts]
            compare(result, self.kind, np.concatenate(parts))

    def _rows(self, rank: int, at: int) -> slice:
        """Returns the rows that a rank sends to a member."""
        if self.splits is None:
            each = self.shapes[rank][0][0] // self.size
            return slice(at * each, (at + 1) * each)
        first = sum(self.splits[rank][:at])
        return slice(first, first + self.splits[rank][at])


OF_BOTH = ["allreduce", "allreduce", "allgather", "broadcast", "reducescatter", "alltoall"]
GROUPED = ("allreduce", "allgather", "reducescatter")
# Calls with an asynchronous form: call, group or not, in place or not.
ASYNC_TORCH = {(what, group, False) for what in GROUPED for group in (False, True)}
ASYNC_TORCH |= {("allreduce", False, True), ("allreduce", True, True), ("broadcast", False, True)}
ASYNC_TORCH |= {("broadcast", False, False), ("alltoall", False, False)}
ASYNC_NUMPY = {("allreduce", False, False), ("allreduce", False, True), ("allreduce", True, False)}
ASYNC_NUMPY |= {("broadcast", False, False)}


def _has(op: gw.ReduceOp, kind: str) -> bool:
    if op.name in BITS:
        return kind in INTEGERS or kind == "bool"
    if kind == "bool":
        return op != gw.Average
    return kind in INTEGERS or kind in FLOATS or op in (gw.Sum, gw.Average)


def _share(rows: int, size: int, at: int) -> slice:
    """Returns a member's share of the rows: the first members get the remainder."""
    each, more = divmod(rows, size)
    first = at * each + min(at, more)
    return slice(first, first + each + (at < more))
