"""Random calls of torch.distributed, compared with results computed by every rank.

``GWTEST_SEED`` is the seed, ``GWTEST_CALLS`` the number of calls, ``GWTEST_FIRST`` the first call.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from random_player import Group, Player, groups
from random_tensors import (
    FLOATS,
    MOVED,
    Place,
    reduced,
    same,
    shape_of,
)
from torch.distributed import ReduceOp

SEED = os.environ.get("GWTEST_SEED", "1")
CALLS = int(os.environ.get("GWTEST_CALLS", "400"))
FIRST = int(os.environ.get("GWTEST_FIRST", "0"))


class Calls(Player):
    """All kinds of calls."""

    def __init__(self, name: str, groups: Sequence[Group]) -> None:
        super().__init__(name, groups)
        # The futures of callbacks that have not started their calls yet.
        self.continued: list[torch.futures.Future[Any]] = []

    def call_all_reduce(self) -> None:
        (dtype, name, op, close), shape = self.reduction(), shape_of(self.chance)
        place, expected = self.mine(dtype, shape), reduced(self.parts(dtype, shape), name)
        group = self.at.group
        self.start(
            lambda late: dist.all_reduce(place.tensor, op, group, late),
            (place, expected),
            close=close,
        )

    def call_all_reduce_of_several(self) -> None:
        dtype, name, op, close = self.reduction()
        shapes = [shape_of(self.chance) for _ in range(self.chance.randint(1, 4))]
        places = [self.mine(dtype, shape, number) for number, shape in enumerate(shapes)]
        expected = [
            reduced(self.parts(dtype, shape, number), name) for number, shape in enumerate(shapes)
        ]
        options = dist.AllreduceCoalescedOptions()
        options.reduceOp = op
        self.group_call(
            lambda: self.at.group.allreduce_coalesced([place.tensor for place in places], options),
            *zip(places, expected),
            close=close,
        )

    def group_call(
        self,
        call: Callable[[], Any],
        *expected: tuple[Place, torch.Tensor | None],
        close: bool = False,
    ) -> None:
        """Calls a method of the group, which always returns a work."""
        self.start(lambda late: call() if late else call().wait(), *expected, close=close)

    def call_premul_sum(self) -> None:
        dtype, shape = self.chance.choice(FLOATS[:2]), shape_of(self.chance)
        place, expected = self.mine(dtype, shape), reduced(self.parts(dtype, shape), "SUM") * 2
        op = dist._make_nccl_premul_sum(2.0)  # type: ignore[attr-defined]
        group = self.at.group
        self.start(lambda late: dist.all_reduce(place.tensor, op, group, late), (place, expected))

    def call_reduce(self) -> None:
        (dtype, name, op, close), shape = self.reduction(), shape_of(self.chance)
        root, rank = self.rooted()
        place = self.mine(dtype, shape)
        expected = reduced(self.parts(dtype, shape), name) if root == self.at.place else None
        group = self.at.group
        self.start(
            lambda late: dist.reduce(place.tensor, rank, op, group, late),
            (place, expected),
            close=close,
        )

    def call_broadcast(self) -> None:
        dtype, shape, (root, rank) = self.chance.choice(MOVED), shape_of(self.chance), self.rooted()
        place, expected = self.mine(dtype, shape), self.part(root, dtype, shape)
        group = self.at.group
        self.start(lambda late: dist.broadcast(place.tensor, rank, group, late), (place, expected))

    def call_all_gather(self) -> None:
        """Gathers tensors, possibly of different sizes."""
        dtype, shape = self.chance.choice(MOVED), shape_of(self.chance)
        shapes = [shape] * self.at.size
        if shape and self.chance.random() < 0.3:
            shapes = [(self.chance.randint(0, 4), *shape[1:]) for _ in shapes]
        places = [self.empty(dtype, each) for each in shapes]
        given = self.read(dtype, shapes[self.at.place])
        expected = [self.part(place, dtype, each) for place, each in enumerate(shapes)]
        outputs, group = [place.tensor for place in places], self.at.group
        self.start(
            lambda late: dist.all_gather(outputs, given, group, late), *zip(places, expected)
        )

    def call_all_gather_into_tensor(self) -> None:
        dtype, shape = self.chance.choice(MOVED), shape_of(self.chance)
        parts = torch.stack(
            [
                part.view(torch.uint8) if dtype.itemsize == 1 else part
                for part in self.parts(dtype, shape)
            ]
        )
        expected = parts.view(dtype)
        if shape and self.chance.random() < 0.5:
            expected = expected.view(self.at.size * shape[0], *shape[1:])
        place, given, group = (
            self.empty(dtype, tuple(expected.shape)),
            self.read(dtype, shape),
            self.at.group,
        )
        self.start(
            lambda late: dist.all_gather_into_tensor(place.tensor, given, group, late),
            (place, expected),
        )

    def call_all_gather_of_several(self) -> None:
        dtypes = [self.chance.choice(MOVED) for _ in range(self.chance.randint(1, 3))]
        shapes = [shape_of(self.chance) for _ in dtypes]
        each = list(enumerate(zip(dtypes, shapes)))
        places = [
            [self.empty(dtype, shape) for _, (dtype, shape) in each] for _ in range(self.at.size)
        ]
        expected = [
            [self.part(at, dtype, shape, no) for no, (dtype, shape) in each]
            for at in range(self.at.size)
        ]
        given = [self.read(dtype, shape, number) for number, (dtype, shape) in each]
        outputs = [[place.tensor for place in row] for row in places]
        pairs = [pair for row, wanted in zip(places, expected) for pair in zip(row, wanted)]
        self.group_call(lambda: self.at.group.allgather_coalesced(outputs, given), *pairs)

    def call_gather(self) -> None:
        dtype, shape, (root, rank) = self.chance.choice(MOVED), shape_of(self.chance), self.rooted()
        given, group, pairs = self.read(dtype, shape), self.at.group, []
        if root == self.at.place:
            pairs = [(self.empty(dtype, shape), part) for part in self.parts(dtype, shape)]
        outputs = [place.tensor for place, _ in pairs] or None
        self.start(lambda late: dist.gather(given, outputs, rank, group, late), *pairs)

    def call_scatter(self) -> None:
        dtype, shape, (root, rank) = self.chance.choice(MOVED), shape_of(self.chance), self.rooted()
        place, group = self.empty(dtype, shape), self.at.group
        given = None
        if root == self.at.place:
            given = [
                Place(self.part(root, dtype, shape, to), self.own).tensor
                for to in range(self.at.size)
            ]
        expected = self.part(root, dtype, shape, self.at.place)
        self.start(
            lambda late: dist.scatter(place.tensor, given, rank, group, late), (place, expected)
        )

    def call_reduce_scatter(self) -> None:
        """Reduces and scatters, possibly in parts of different sizes."""
        (dtype, name, op, close), shape = self.reduction(), shape_of(self.chance)
        shapes = [shape] * self.at.size
        if shape and self.chance.random() < 0.3:
            shapes = [(self.chance.randint(0, 4), *shape[1:]) for _ in shapes]
        given = [self.read(dtype, each, to) for to, each in enumerate(shapes)]
        place, group = self.empty(dtype, shapes[self.at.place]), self.at.group
        expected = reduced(self.parts(dtype, shapes[self.at.place], self.at.place), name)
        self.start(
            lambda late: dist.reduce_scatter(place.tensor, given, op, group, late),
            (place, expected),
            close=close,
        )

    def call_reduce_scatter_tensor(self) -> None:
        (dtype, name, op, close), shape = self.reduction(), shape_of(self.chance)
        whole = (self.at.size, *shape)
        given, place, group = self.read(dtype, whole), self.empty(dtype, shape), self.at.group
        expected = reduced(self.parts(dtype, whole), name)[self.at.place]
        self.start(
            lambda late: dist.reduce_scatter_tensor(place.tensor, given, op, group, late),
            (place, expected),
            close=close,
        )

    def call_all_to_all(self) -> None:
        dtype, shape = self.chance.choice(MOVED), shape_of(self.chance)
        rows = {}
        for sender in range(self.at.size):
            for receiver in range(self.at.size):
                uneven = bool(shape) and self.chance.random() < 0.5
                rows[sender, receiver] = (
                    (self.chance.randint(0, 3), *shape[1:]) if uneven else shape
                )
        me = self.at.place
        given = [self.read(dtype, rows[me, to], to) for to in range(self.at.size)]
        places = [self.empty(dtype, rows[sender, me]) for sender in range(self.at.size)]
        expected = [
            self.part(sender, dtype, rows[sender, me], me) for sender in range(self.at.size)
        ]
        outputs, group = [place.tensor for place in places], self.at.group
        self.start(
            lambda late: dist.all_to_all(outputs, given, group, late), *zip(places, expected)
        )

    def call_all_to_all_single(self) -> None:
        dtype, shape, size, me = (
            self.chance.choice(MOVED),
            shape_of(self.chance),
            self.at.size,
            self.at.place,
        )
        even = self.chance.random() < 0.4
        high = self.chance.choice([0, 1, 3])
        rows = [
            [high if even else self.chance.randint(0, high) for _ in range(size)]
            for _ in range(size)
        ]
        sent = [self.part(place, dtype, (sum(rows[place]), *shape[1:])) for place in range(size)]
        given = Place(sent[me], self.own).tensor
        received = [row[me] for row in rows]
        expected = torch.cat(
            [raw_split(sent[place], rows[place])[me] for place in range(size)]
        ).view(dtype)
        place, group = self.empty(dtype, (sum(received), *shape[1:])), self.at.group
        splits = (None, None) if even else (received, rows[me])
        self.start(
            lambda late: dist.all_to_all_single(place.tensor, given, *splits, group, late),
            (place, expected.view(place.tensor.shape)),
        )

    def call_barrier(self) -> None:
        self.start(lambda late: dist.barrier(self.at.group, late))

    def call_functional(self) -> None:
        from torch.distributed import _functional_collectives as functional

        dtype, shape = self.chance.choice(FLOATS), (self.at.size, self.chance.randint(0, 5))
        parts = self.parts(dtype, shape)
        given = self.part(self.at.place, dtype, shape)
        group = self.at.group
        kind = self.chance.choice(
            ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "several"]
        )
        if kind == "all_reduce":
            got, expected = functional.all_reduce(given, "sum", group), reduced(parts, "SUM")
        elif kind == "all_gather":
            got, expected = functional.all_gather_tensor(given, 0, group), torch.cat(parts)
        elif kind == "reduce_scatter":
            got = functional.reduce_scatter_tensor(given, "sum", 0, group)
            expected = reduced(parts, "SUM")[self.at.place : self.at.place + 1]
        elif kind == "all_to_all":
            got = functional.all_to_all_single(given, None, None, group)
            expected = torch.stack([part[self.at.place] for part in parts])
        else:
            [got] = functional.all_reduce_coalesced([given], "max", group)
            expected = reduced(parts, "MAX")
        assert same(functional.wait_tensor(got), expected)
        assert same(given, parts[self.at.place])

    def call_coalesced(self) -> None:
        manager: Any = dist.distributed_c10d._coalescing_manager
        dtype, group = self.chance.choice(FLOATS), self.at.group
        shapes = [(self.chance.randint(0, 5),) for _ in range(self.chance.randint(1, 3))]
        wide = [(self.at.size, *shape) for shape in shapes]
        kind = self.chance.choice(["all_reduce", "all_gather", "reduce_scatter"])
        # Inside the manager, PyTorch collects the group's calls of all threads, including those of
        # callbacks.
        torch.futures.wait_all(self.continued)
        self.continued.clear()
        with manager(group=group):
            if kind == "all_reduce":
                places = [self.mine(dtype, shape, number) for number, shape in enumerate(shapes)]
                wanted = [
                    reduced(self.parts(dtype, shape, number), "SUM")
                    for number, shape in enumerate(shapes)
                ]
                for place in places:
                    dist.all_reduce(place.tensor, group=group)
            elif kind == "all_gather":
                places = [self.empty(dtype, shape) for shape in wide]
                wanted = [
                    torch.stack(self.parts(dtype, shape, number))
                    for number, shape in enumerate(shapes)
                ]
                for number, (place, shape) in enumerate(zip(places, shapes)):
                    dist.all_gather_into_tensor(
                        place.tensor, self.read(dtype, shape, number), group=group
                    )
            else:
                places = [self.empty(dtype, shape) for shape in shapes]
                sums = [
                    reduced(self.parts(dtype, shape, number), "SUM")
                    for number, shape in enumerate(wide)
                ]
                wanted = [each[self.at.place] for each in sums]
                for number, (place, shape) in enumerate(zip(places, wide)):
                    dist.reduce_scatter_tensor(
                        place.tensor, self.read(dtype, shape, number), group=group
                    )
        for place, expected in zip(places, wanted):
            place.check(expected)

    def call_messages(self) -> None:
        """Sends any number of messages with several tags, which stay in order."""
        if self.at.size == 1:
            return
        dtype, group = self.chance.choice(MOVED), self.at.group
        sender, receiver = self.chance.sample(range(self.at.size), 2)
        number = self.chance.choice([1, 1, 2, 5, 90])
        for at in range(number):
            shape, tag = shape_of(self.chance) if number < 90 else (2,), self.chance.randrange(2)
            expected = self.part(sender, dtype, shape, at)
            if self.at.place == sender:
                tensor = Place(expected, self.own).tensor
                to = self.at.members[receiver]
                self.start_message(
                    lambda to=to, tag=tag, tensor=tensor: dist.isend(tensor, to, group, tag)
                )
            elif self.at.place == receiver:
                place, source = self.empty(dtype, shape), self.at.members[sender]
                self.start_message(
                    lambda source=source, tag=tag, place=place: dist.irecv(
                        place.tensor, source, group, tag
                    ),
                    (place, expected),
                )

    def start_message(
        self, call: Callable[[], Any], *expected: tuple[Place, torch.Tensor | None]
    ) -> None:
        """Starts a message without waiting, because the other end may make other calls first."""
        what = f"{self.key} among {self.at.members}"
        work = call()
        checks = [
            lambda place=place, wanted=wanted: place.check(wanted) for place, wanted in expected
        ]
        self.pending.append((what, work.wait, checks, []))

    def call_batch_of_messages(self) -> None:
        if self.at.size == 1:
            return
        dtype, shape, size, me = (
            self.chance.choice(MOVED),
            shape_of(self.chance),
            self.at.size,
            self.at.place,
        )
        after, before = (me + 1) % size, (me - 1) % size
        place = self.empty(dtype, shape)
        pairs = [
            dist.P2POp(
                dist.isend, self.read(dtype, shape), self.at.members[after], self.at.group, 7
            ),
            dist.P2POp(dist.irecv, place.tensor, self.at.members[before], self.at.group, 7),
        ]
        self.own.shuffle(pairs)
        for work in dist.batch_isend_irecv(pairs):
            work.wait()
        place.check(self.part(before, dtype, shape))

    def call_objects(self) -> None:
        group, size, me, (root, rank) = self.at.group, self.at.size, self.at.place, self.rooted()
        of = [
            {"from": at, "text": "x" * random.Random(f"{self.key} {at}").randrange(2000)}
            for at in range(size)
        ]
        kind = self.chance.choice(["all_gather", "gather", "broadcast", "scatter", "send"])
        if kind == "all_gather":
            got: list[Any] = [None] * size
            dist.all_gather_object(got, of[me], group)
            assert got == of
        elif kind == "gather":
            gathered: list[Any] | None = [None] * size if me == root else None
            dist.gather_object(of[me], gathered, rank, group)
            assert gathered is None or gathered == of
        elif kind == "broadcast":
            several = [of[root], root, None] if me == root else [None] * 3
            dist.broadcast_object_list(several, rank, group)
            assert several == [of[root], root, None]
        elif kind == "scatter":
            mine: list[Any] = [None]
            dist.scatter_object_list(mine, of if me == root else None, rank, group)
            assert mine == [of[me]]
        elif size > 1 and hasattr(dist, "send_object_list"):
            to = (root + 1) % size
            if me == root:
                dist.send_object_list([of[root], 7], self.at.members[to], group)
            elif me == to:
                couple: list[Any] = [None, None]
                dist.recv_object_list(couple, rank, group)
                assert couple == [of[root], 7]

    def call_sparse(self) -> None:
        dtype, shape = (
            self.chance.choice(FLOATS[:2]),
            (self.chance.randint(1, 4), self.chance.randint(0, 3)),
        )
        number = [self.chance.randint(0, 4) for _ in range(self.at.size)]
        parts = []
        for place in range(self.at.size):
            drawn = random.Random(f"{self.key} {place}")
            at = [drawn.randrange(shape[0]) for _ in range(number[place])]
            rows = self.part(place, dtype, (number[place], shape[1]))
            parts.append(
                torch.sparse_coo_tensor(torch.tensor([at]).long().view(1, -1), rows, shape)
            )
        tensor = parts[self.at.place].clone()
        dist.all_reduce(tensor, group=self.at.group)
        assert torch.equal(tensor.to_dense(), reduced([part.to_dense() for part in parts], "SUM"))

    def call_callbacks(self) -> None:
        """Makes callbacks start operations, at different times on different ranks."""
        group, shape = self.at.group, (3,)
        parts = self.parts(torch.float64, shape)
        tensor = self.part(self.at.place, torch.float64, shape)
        pause = self.own.choice([0.0, 0.0, 0.003])

        def further(future: Any) -> torch.Tensor:
            time.sleep(pause)
            value = future.value()
            value = (value[0] if isinstance(value, list) else value) + 1
            dist.all_reduce(value, group=group)
            return value

        work = dist.all_reduce(tensor, group=group, async_op=True)
        if self.own.random() < 0.5:
            work.wait()
        future = work.get_future().then(further).then(further)
        self.continued.append(future)
        once = (reduced(parts, "SUM") + 1) * self.at.size
        twice = (once + 1) * self.at.size

        def check() -> None:
            assert same(future.value(), twice)

        self.pending.append((self.key, future.wait, [check], []))

    # Failing calls, after which the job continues.

    def call_refused(self) -> None:
        """Some members make a call that is rejected immediately."""
        group, one, rank = self.at.group, torch.ones(1), self.at.members[0]
        calls: list[Callable[[], Any]] = [
            lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), ReduceOp.AVG, group),
            lambda: dist.all_reduce(one.expand(2), group=group),
            lambda: dist.all_gather([one] * (self.at.size + 1), one, group),
            lambda: dist.all_gather_into_tensor(torch.ones(self.at.size + 1), one, group),
            lambda: dist.reduce_scatter_tensor(one, torch.ones(self.at.size + 1), group=group),
            lambda: dist.all_to_all_single(one, one, [2] * self.at.size, [0] * self.at.size, group),
            lambda: dist.all_reduce(one.to(torch.float8_e4m3fnuz), group=group),
            lambda: dist.broadcast(one.to("meta"), rank, group),
            lambda: dist.all_reduce(one.to_sparse(), ReduceOp.MAX, group),
            lambda: dist.isend(one, dist.get_rank(), group),
            lambda: dist.all_gather([one], [one], group),  # type: ignore[arg-type]
        ]
        call = self.chance.choice(calls)
        if self.own.random() < 0.5:
            with pytest.raises((ValueError, TypeError, NotImplementedError)):
                call()

    def call_disagreed(self) -> None:
        """One member makes a different call: all members get the error."""
        if self.at.size == 1:
            return
        odd, group = self.chance.randrange(self.at.size) == self.at.place, self.at.group
        first, last = self.at.members[0], self.at.members[-1]
        calls: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
            (
                lambda: dist.all_reduce(torch.ones(2), group=group),
                lambda: dist.all_reduce(torch.ones(3), group=group),
            ),
            (lambda: dist.all_reduce(torch.ones(2), group=group), lambda: dist.barrier(group)),
            (
                lambda: dist.all_reduce(torch.ones(2), group=group),
                lambda: dist.all_reduce(torch.ones(2), ReduceOp.MAX, group),
            ),
            (
                lambda: dist.all_reduce(torch.ones(2), group=group),
                lambda: dist.all_reduce(torch.ones(2).double(), group=group),
            ),
            (
                lambda: dist.broadcast(torch.ones(2), first, group),
                lambda: dist.broadcast(torch.ones(2), last, group),
            ),
            (
                lambda: dist.all_gather_into_tensor(torch.ones(self.at.size), torch.ones(1), group),
                lambda: dist.reduce_scatter_tensor(
                    torch.ones(1), torch.ones(self.at.size), group=group
                ),
            ),
        ]
        usual, other = self.chance.choice(calls)
        with pytest.raises(RuntimeError, match="disagree"):
            (other if odd else usual)()


def raw_split(tensor: torch.Tensor, rows: list[int]) -> list[torch.Tensor]:
    """Returns random splits of a tensor of any element type."""
    bytes_of = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    return list(bytes_of.split(rows))


def test_random_calls() -> None:
    print(f"GWTEST_SEED={SEED} GWTEST_CALLS={CALLS} GWTEST_FIRST={FIRST}")
    chance = random.Random(SEED)
    made = groups(chance)
    Calls(SEED, made).play(FIRST, CALLS)
    dist.barrier()
    for each in made[1:]:
        if each.place >= 0:
            dist.destroy_process_group(each.group)


def test_threads_with_a_group_each() -> None:
    chance = random.Random(f"{SEED} threads")
    made = [each for _ in range(2) for each in groups(chance)[1:4]]
    failures: list[BaseException] = []

    def play(at: int) -> None:
        try:
            Calls(f"{SEED} thread {at}", [made[at]]).play(FIRST, CALLS // 8)
        except BaseException as error:
            failures.append(error)
            # Otherwise, other ranks' threads would wait for this one.
            dist.group.WORLD.abort()  # type: ignore[union-attr]

    threads = [threading.Thread(target=play, args=(at,)) for at in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    dist.barrier()
    for each in made:
        dist.destroy_process_group(each.group)
