"""Callbacks of futures that start operations of other groups, at different times on the ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


class Grid:
    """The ranks in rows of two; each row and each column is a group."""

    def __init__(self) -> None:
        self.ranks = range(size())
        rows = [[r for r in self.ranks if r // 2 == at] for at in range((size() + 1) // 2)]
        columns = [[r for r in self.ranks if r % 2 == at] for at in range(min(2, size()))]
        made = [[dist.new_group(each) for each in groups] for groups in (rows, columns)]
        self.row, self.column = made[0][rank() // 2], made[1][rank() % 2]

    def row_sum(self, values: list[float]) -> list[float]:
        """Returns each rank's result of a sum over its row."""
        return [sum(values[s] for s in self.ranks if s // 2 == r // 2) for r in self.ranks]

    def column_sum(self, values: list[float]) -> list[float]:
        return [sum(values[s] for s in self.ranks if s % 2 == r % 2) for r in self.ranks]


@pytest.fixture(scope="module")
def grid() -> Iterator[Grid]:
    yield Grid()
    dist.barrier()


def late(turn: int) -> None:
    """Makes callbacks run in a different order on each rank."""
    time.sleep(0.02 * ((turn * (rank() + 1) + rank()) % 3))


def reduced(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    dist.all_reduce(tensor, group=group)
    return tensor


def future(tensor: torch.Tensor, group: Any) -> Any:
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    return work.get_future()


def test_stages_in_several_groups(grid: Grid) -> None:
    """Each tensor is summed over rows, columns and rows, with many tensors in flight."""
    found, expected = [], []
    for turn in range(8):

        def second(done: Any, turn: int = turn) -> torch.Tensor:
            late(turn)
            return reduced(done.value()[0], grid.column)

        def third(done: Any, turn: int = turn) -> torch.Tensor:
            late(turn + 1)
            return reduced(done.value(), grid.row)

        values = [float(10**turn * (r + 1)) for r in grid.ranks]
        tensor = torch.full((4,), values[rank()], dtype=torch.float64)
        found.append(future(tensor, grid.row).then(second).then(third))
        expected.append(grid.row_sum(grid.column_sum(grid.row_sum(values))))
        # The program's own operations of these groups have their own order.
        plain = reduced(torch.ones(1), grid.column)
        assert plain.item() == len([r for r in grid.ranks if r % 2 == rank() % 2])
    for got, wanted in zip(found, expected):
        assert got.wait().tolist() == [wanted[rank()]] * 4


def test_callbacks_inside_callbacks(grid: Grid) -> None:
    found = []
    for turn in range(6):

        def outer(done: Any, turn: int = turn) -> torch.Tensor:
            def inner(done: Any) -> torch.Tensor:
                late(turn)
                return reduced(reduced(done.value()[0], grid.row), None)

            late(turn + 1)
            return future(done.value()[0], grid.column).then(inner).wait()

        found.append(future(torch.full((2,), 1.0 + turn), grid.row).then(outer))
    for turn, got in enumerate(found):
        values = grid.row_sum(grid.column_sum(grid.row_sum([1.0 + turn] * size())))
        assert got.wait().tolist() == [sum(values)] * 2


def test_callbacks_of_messages() -> None:
    """Only two ranks have each message, and all of them start an operation."""
    found = []
    for turn in range(4):

        def then(_: Any, turn: int = turn) -> torch.Tensor:
            late(turn)
            return reduced(torch.full((3,), float(turn)), None)

        to, source = (rank() + 1) % size(), (rank() - 1) % size()
        if to == rank():
            return
        sent = dist.isend(torch.ones(3), to)
        got = dist.irecv(torch.ones(3), source)
        assert sent is not None and got is not None
        found.append((turn, got.get_future().then(then)))
        sent.wait()
    for turn, each in found:
        assert each.wait().tolist() == [float(turn * size())] * 3


def test_a_callback_that_only_one_rank_has(grid: Grid) -> None:
    seen: list[int] = []

    def note(_: Any) -> None:
        seen.append(1)

    def more(done: Any) -> torch.Tensor:
        return reduced(done.value()[0], grid.column)

    found = [future(torch.ones(2), grid.row) for _ in range(3)]
    if rank() == 0:
        found[1].then(note)
    values = grid.column_sum(grid.row_sum([1.0] * size()))
    for each in [each.then(more) for each in found]:
        assert each.wait().tolist() == [values[rank()]] * 2
    assert len(seen) == (rank() == 0)


@pytest.mark.parametrize("same", [True, False])
def test_a_callback_that_blocks(grid: Grid, same: bool) -> None:
    """It waits for another callback, of the same future or of another one."""
    ready, begin = threading.Event(), threading.Event()

    def blocks(_: Any) -> bool:
        return ready.wait(60)

    def frees(done: Any) -> torch.Tensor:
        value = reduced(done.value()[0], grid.column)
        ready.set()
        return value

    # Not complete before both callbacks are requested.
    first = future(torch.ones(2), grid.row).then(lambda done: begin.wait(60) and done.value())
    second = first if same else future(torch.ones(2), grid.row)
    blocked, freeing = first.then(blocks), second.then(frees)
    begin.set()
    values = grid.column_sum(grid.row_sum([1.0] * size()))
    assert freeing.wait().tolist() == [values[rank()]] * 2
    assert blocked.wait() is True


def test_errors_of_callbacks_with_threads() -> None:
    begin = threading.Event()

    def fails(_: Any) -> None:
        raise LookupError("of this callback")

    first = future(torch.ones(1), None).then(lambda _: begin.wait(60))
    made = [first.then(lambda _: 1), first.then(fails), first.then(lambda _: 2)]
    first.add_done_callback(fails)
    begin.set()
    assert (made[0].wait(), made[2].wait()) == (1, 2)
    with pytest.raises(Exception, match="of this callback"):
        made[1].wait()


def test_threads_with_their_own_groups() -> None:
    """The same callback in two threads, whose calls take turns in any order."""
    grids = [Grid(), Grid()]
    found: dict[int, list[list[float]]] = {}

    def run(at: int) -> None:
        def more(done: Any) -> torch.Tensor:
            return reduced(done.value()[0], grids[at].column)

        futures = []
        for turn in range(4):
            late(turn + at)
            futures.append(future(torch.full((2,), 1.0 + at + turn), grids[at].row).then(more))
        found[at] = [each.wait().tolist() for each in futures]

    threads = [threading.Thread(target=run, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for at, grid in enumerate(grids):
        every = [grid.column_sum(grid.row_sum([1.0 + at + turn] * size())) for turn in range(4)]
        assert found[at] == [[values[rank()]] * 2 for values in every]
