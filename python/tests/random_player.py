"""Makes random calls of torch.distributed, waits for their works and checks the results.

All ranks draw the same calls from one seed. Each rank draws separately how and in which order it
waits for its works. Calls are independent of earlier ones.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from random_tensors import REDUCED, Place, operation_for, values
from torch.distributed import ReduceOp

LIMIT = 30.0
Check = Callable[[], None]


class Group:
    """A group, its ranks in order, and this rank's position."""

    def __init__(self, group: Any, members: Sequence[int]) -> None:
        self.group, self.members, self.size = group, list(members), len(members)
        self.place = self.members.index(dist.get_rank()) if dist.get_rank() in self.members else -1


def groups(chance: random.Random) -> list[Group]:
    """Creates groups of all ranks, in different orders, and of some ranks."""
    everybody = list(range(dist.get_world_size()))
    orders = [everybody, everybody[::-1], chance.sample(everybody, len(everybody))]
    orders += [chance.sample(everybody, chance.randint(1, len(everybody))) for _ in range(3)]
    made = [Group(dist.group.WORLD, everybody)]
    for order in orders:
        try:
            group = dist.new_group(order, sort_ranks=False)  # type: ignore[call-arg]
        except TypeError:  # older releases sort them
            order = sorted(order)
            group = dist.new_group(order)
        made.append(Group(group, order))
    return made


class Player:
    """Makes calls and checks their results. Its methods ``call_*`` are the kinds of calls."""

    def __init__(self, name: str, groups: Sequence[Group]) -> None:
        self.name, self.groups = name, groups
        # The choices of this rank alone.
        self.own = random.Random(f"{name} of rank {dist.get_rank()}")
        self.pending: list[tuple[str, Any, list[Check], list[tuple[Place, torch.Tensor]]]] = []
        self.kinds = [getattr(self, name) for name in sorted(dir(self)) if name.startswith("call_")]

    def play(self, first: int, calls: int) -> None:
        for number in range(first, first + calls):
            self.key = f"{self.name} call {number}"
            self.chance = random.Random(self.key)
            self.at = self.chance.choice(self.groups)
            kind = self.chance.choice(self.kinds)
            if self.at.place < 0:
                continue
            try:
                kind()
                while self.pending and (len(self.pending) > 12 or self.own.random() < 0.4):
                    self.end(self.own.randrange(len(self.pending)))
            except BaseException:
                print(
                    f"rank {dist.get_rank()}: {self.key} ({kind.__name__}) among {self.at.members}",
                    flush=True,
                )
                raise
        while self.pending:
            self.end(self.own.randrange(len(self.pending)))

    # The ways to wait for works.

    def start(
        self,
        call: Callable[[bool], Any],
        *expected: tuple[Place, torch.Tensor | None],
        close: bool = False,
    ) -> None:
        """Makes a call, blocking or not; ``expected`` contains the correct tensors afterwards."""
        checks = [
            lambda place=place, wanted=wanted: place.check(wanted, close)
            for place, wanted in expected
        ]
        what = f"{self.key} among {self.at.members}"
        way = self.own.choice(["blocking", "wait", "wait", "poll", "future", "then", "dropped"])
        if way == "blocking":
            call(False)
            for check in checks:
                check()
            return
        work = call(True)
        if way == "dropped":
            # Only exact results that differ from the inputs.
            waited = (
                []
                if close
                else [(place, wanted) for place, wanted in expected if wanted is not None]
            )
            if waited:
                del work
                self.pending.append((what, None, checks, waited))
                return
            way = "wait"
        if way == "poll":
            self.pending.append((what, lambda: eventually(work.is_completed, what), checks, []))
        elif way == "future":
            self.pending.append((what, work.get_future().wait, checks, []))
        elif way == "then":
            self.pending.append(
                (what, work.get_future().then(lambda future: future.value()).wait, checks, [])
            )
        else:
            self.pending.append((what, work.wait, checks, []))

    def end(self, at: int) -> None:
        """Waits for one of the works and checks its results."""
        what, wait, checks, waited = self.pending.pop(at)
        if wait is not None:
            wait()
        until = time.monotonic() + LIMIT
        while time.monotonic() < until and not all(place.holds(wanted) for place, wanted in waited):
            time.sleep(0.0005)
        for check in checks:
            try:
                check()
            except AssertionError as error:
                raise AssertionError(f"{what}: {error}") from error

    # The calls' tensors.

    def part(
        self, place: int, dtype: torch.dtype, shape: tuple[int, ...], number: int = 0
    ) -> torch.Tensor:
        """Returns the input of a member."""
        return values(f"{self.key} {place} {number}", dtype, shape)

    def parts(
        self, dtype: torch.dtype, shape: tuple[int, ...], number: int = 0
    ) -> list[torch.Tensor]:
        return [self.part(place, dtype, shape, number) for place in range(self.at.size)]

    def mine(self, dtype: torch.dtype, shape: tuple[int, ...], number: int = 0) -> Place:
        """Returns this rank's input, in a random layout."""
        return Place(self.part(self.at.place, dtype, shape, number), self.own)

    def empty(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Place:
        """Returns a tensor for a result."""
        return Place(values("nothing yet", dtype, shape), self.own)

    def read(self, dtype: torch.dtype, shape: tuple[int, ...], number: int = 0) -> torch.Tensor:
        """Like ``mine``, for a tensor that is only read."""
        return self.mine(dtype, shape, number).tensor

    def rooted(self) -> tuple[int, int]:
        """Draws a root; returns its position and its rank."""
        place = self.chance.randrange(self.at.size)
        return place, self.at.members[place]

    def reduction(self) -> tuple[torch.dtype, str, Any, bool]:
        dtype = self.chance.choice(REDUCED)
        name = operation_for(dtype, self.chance)
        return (
            dtype,
            name,
            getattr(ReduceOp, name),
            name == "AVG" and (dtype.is_floating_point or dtype.is_complex),
        )


def eventually(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < until, f"{what}: it has not come"
        time.sleep(0.0005)
