"""Every function with every element type, on all ranks and in a smaller process set.

Values are 0 and 1, so that sums of four ranks are exact in every type, even in 8-bit floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import gradwire.torch as hvd  # noqa: E402

NAMES = """float32 float64 float16 bfloat16 int8 uint8 int16 int32 int64 bool complex64 complex128
uint16 uint32 uint64 float8_e4m3fn float8_e5m2"""
# Later PyTorch releases added some dtypes.
DTYPES = [getattr(torch, name) for name in NAMES.split() if hasattr(torch, name)]
Wide = Any


def wide(rank: int, rows: int, shift: int = 0) -> Wide:
    """Returns a rank's values in a type that supports all operations."""
    return ((torch.arange(rows * 3) // (rank + 1) + rank + shift) % 2).view(rows, 3)


def widened(tensor: Any) -> Wide:
    return (
        tensor.real.to(torch.int64)
        if tensor.dtype.is_complex
        else tensor.to(torch.float64).to(torch.int64)
    )


class Ranks:
    """The members of a process set, and their inputs."""

    def __init__(self, process_set: Any, dtype: Any) -> None:
        self.process_set, self.dtype = process_set, dtype
        self.members = process_set.ranks
        self.at = self.members.index(hvd.rank())
        self.size = len(self.members)
        self.op = hvd.Max if dtype == torch.bool else hvd.Sum

    def own(self, rows: int | None = None, shift: int = 0) -> Any:
        return wide(hvd.rank(), self.size if rows is None else rows, shift).to(self.dtype)

    def reduced(self, shift: int = 0) -> Wide:
        all_ = torch.stack([wide(rank, self.size, shift) for rank in self.members])
        return all_.amax(0) if self.dtype == torch.bool else all_.sum(0)

    def rows(self, at: int, shift: int = 0) -> Wide:
        """Returns a member's rows in an allgather. The number differs between members."""
        return wide(self.members[at], at + 1, shift)

    def gathered(self, shift: int = 0) -> Wide:
        return torch.cat([self.rows(at, shift) for at in range(self.size)])

    def root(self) -> int:
        return self.members[-1]

    def sent(self) -> Wide:
        """Returns the root's input."""
        return wide(self.root(), self.size)

    def exchanged(self) -> Wide:
        return torch.cat([wide(rank, self.size)[self.at : self.at + 1] for rank in self.members])

    def scattered(self, shift: int = 0) -> Wide:
        return self.reduced(shift)[self.at : self.at + 1]


Case = tuple[Callable[[Ranks, dict[str, Any]], Any], Callable[[Ranks], Any]]


def in_place(call: Callable[[Any], Any], given: Any) -> Any:
    """Returns the result of an in-place function, which is its argument."""
    result = call(given)
    result = result.wait() if isinstance(result, hvd.Handle) else result
    for one, other in zip(
        result if isinstance(result, list) else [result],
        given if isinstance(given, list) else [given],
    ):
        assert one is other
    return result


def two(ranks: Ranks) -> list[Any]:
    return [ranks.own(), ranks.own(shift=1)]


def given_rows(ranks: Ranks, shift: int = 0) -> Any:
    return ranks.rows(ranks.at, shift).to(ranks.dtype)


CASES: dict[str, Case] = {
    "allreduce": (lambda r, o: hvd.allreduce(r.own(), op=r.op, **o), lambda r: r.reduced()),
    "allreduce_": (
        lambda r, o: in_place(lambda t: hvd.allreduce_(t, op=r.op, **o), r.own()),
        lambda r: r.reduced(),
    ),
    "allreduce_async": (
        lambda r, o: hvd.allreduce_async(r.own(), op=r.op, **o),
        lambda r: r.reduced(),
    ),
    "allreduce_async_": (
        lambda r, o: in_place(lambda t: hvd.allreduce_async_(t, op=r.op, **o), r.own()),
        lambda r: r.reduced(),
    ),
    "grouped_allreduce": (
        lambda r, o: hvd.grouped_allreduce(two(r), op=r.op, **o),
        lambda r: [r.reduced(), r.reduced(1)],
    ),
    "grouped_allreduce_": (
        lambda r, o: in_place(lambda t: hvd.grouped_allreduce_(t, op=r.op, **o), two(r)),
        lambda r: [r.reduced(), r.reduced(1)],
    ),
    "grouped_allreduce_async": (
        lambda r, o: hvd.grouped_allreduce_async(two(r), op=r.op, **o),
        lambda r: [r.reduced(), r.reduced(1)],
    ),
    "grouped_allreduce_async_": (
        lambda r, o: in_place(lambda t: hvd.grouped_allreduce_async_(t, op=r.op, **o), two(r)),
        lambda r: [r.reduced(), r.reduced(1)],
    ),
    "allgather": (lambda r, o: hvd.allgather(given_rows(r), **o), lambda r: r.gathered()),
    "allgather_async": (
        lambda r, o: hvd.allgather_async(given_rows(r), **o),
        lambda r: r.gathered(),
    ),
    "grouped_allgather": (
        lambda r, o: hvd.grouped_allgather([given_rows(r), given_rows(r, 1)], **o),
        lambda r: [r.gathered(), r.gathered(1)],
    ),
    "grouped_allgather_async": (
        lambda r, o: hvd.grouped_allgather_async([given_rows(r), given_rows(r, 1)], **o),
        lambda r: [r.gathered(), r.gathered(1)],
    ),
    "broadcast": (lambda r, o: hvd.broadcast(r.own(), r.root(), **o), lambda r: r.sent()),
    "broadcast_": (
        lambda r, o: in_place(lambda t: hvd.broadcast_(t, r.root(), **o), r.own()),
        lambda r: r.sent(),
    ),
    "broadcast_async": (
        lambda r, o: hvd.broadcast_async(r.own(), r.root(), **o),
        lambda r: r.sent(),
    ),
    "broadcast_async_": (
        lambda r, o: in_place(lambda t: hvd.broadcast_async_(t, r.root(), **o), r.own()),
        lambda r: r.sent(),
    ),
    "alltoall": (lambda r, o: hvd.alltoall(r.own(), **o), lambda r: r.exchanged()),
    "alltoall_async": (lambda r, o: hvd.alltoall_async(r.own(), **o), lambda r: r.exchanged()),
    "alltoall with splits": (
        lambda r, o: hvd.alltoall(r.own(), torch.ones(r.size, dtype=torch.int32), **o)[0],
        lambda r: r.exchanged(),
    ),
    "reducescatter": (
        lambda r, o: hvd.reducescatter(r.own(), op=r.op, **o),
        lambda r: r.scattered(),
    ),
    "reducescatter_async": (
        lambda r, o: hvd.reducescatter_async(r.own(), op=r.op, **o),
        lambda r: r.scattered(),
    ),
    "grouped_reducescatter": (
        lambda r, o: hvd.grouped_reducescatter(two(r), op=r.op, **o),
        lambda r: [r.scattered(), r.scattered(1)],
    ),
    "grouped_reducescatter_async": (
        lambda r, o: hvd.grouped_reducescatter_async(two(r), op=r.op, **o),
        lambda r: [r.scattered(), r.scattered(1)],
    ),
}


def check(ranks: Ranks, call: Any, expected: Any, options: dict[str, Any]) -> None:
    result = call(ranks, options)
    if isinstance(result, hvd.Handle):
        result = hvd.synchronize(result)
    wanted = expected(ranks)
    pairs = list(zip(result, wanted)) if isinstance(wanted, list) else [(result, wanted)]
    for got, want in pairs:
        assert got.dtype == ranks.dtype and got.shape == want.shape, (
            ranks.dtype,
            got.shape,
            want.shape,
        )
        assert torch.equal(widened(got), want), (ranks.dtype, got, want)


@pytest.mark.parametrize("name", CASES)
def test_of_all_ranks(name: str) -> None:
    call, expected = CASES[name]
    for dtype in DTYPES:
        check(Ranks(hvd.global_process_set, dtype), call, expected, {"name": f"{name} {dtype}"})
        check(Ranks(hvd.global_process_set, dtype), call, expected, {})


def test_in_a_process_set() -> None:
    if hvd.size() == 1:
        pytest.skip("no smaller set")
    mine = hvd.add_process_set(range(1, hvd.size()))
    if hvd.rank() > 0:
        for name, (call, expected) in CASES.items():
            for dtype in DTYPES:
                check(
                    Ranks(mine, dtype),
                    call,
                    expected,
                    {"process_set": mine, "name": f"{name} {dtype}"},
                )
    hvd.barrier()
    assert hvd.remove_process_set(mine)


SPARSE = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", SPARSE)
def test_sparse(dtype: Any) -> None:
    places = torch.tensor([[0, hvd.rank() + 1]])
    own = torch.sparse_coo_tensor(places, torch.ones(2, 3).to(dtype), (hvd.size() + 1, 3))
    result = hvd.sparse_allreduce_async(own, name=f"sparse {dtype}", op=hvd.Sum)().to_dense()
    expected = torch.ones(hvd.size() + 1, 3, dtype=torch.int64)
    expected[0] = hvd.size()
    assert result.dtype == dtype and torch.equal(widened(result), expected)


REDUCED = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "reducescatter",
    "reducescatter_async",
]


@pytest.mark.parametrize("name", REDUCED)
def test_every_reduction_and_its_factors(name: str) -> None:
    function = getattr(hvd, name)
    size = hvd.size()

    def result(op: Any, **options: Any) -> Any:
        made = function(torch.full((size, 2), float(hvd.rank() + 1)), op=op, **options)
        return made.wait() if isinstance(made, hvd.Handle) else made

    rows = 1 if "scatter" in name else size
    product = float(torch.arange(1, size + 1).prod())
    sums = size * (size + 1) / 2
    for op, expected in [
        (hvd.Average, sums / size),
        (hvd.Sum, sums),
        (hvd.Min, 1.0),
        (hvd.Max, float(size)),
        (hvd.Product, product),
    ]:
        torch.testing.assert_close(result(op), torch.full((rows, 2), expected))
    scaled = result(hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    torch.testing.assert_close(scaled, torch.full((rows, 2), 2 * sums))


def test_gradients_of_groups() -> None:
    size, rank = hvd.size(), hvd.rank()
    one, two_ = (torch.ones(rows, 2, requires_grad=True) for rows in (rank + 1, size))
    first, second = hvd.grouped_allgather([one, two_])
    (first.sum() + 3 * second.sum()).backward()
    torch.testing.assert_close(one.grad, torch.ones(rank + 1, 2))
    torch.testing.assert_close(two_.grad, torch.full((size, 2), 3.0))
    one, two_ = (torch.ones(size, 2, requires_grad=True) for _ in range(2))
    first, second = hvd.grouped_reducescatter([one, two_], op=hvd.Sum, prescale_factor=0.5)
    (first.sum() * (rank + 1) + second.sum()).backward()
    torch.testing.assert_close(
        one.grad, torch.arange(1.0, size + 1).view(-1, 1).expand(size, 2) * size / 2
    )
    torch.testing.assert_close(two_.grad, torch.full((size, 2), size / 2))
    # Rows beyond the splits have no gradient.
    given = torch.ones(size + 1, 2, requires_grad=True)
    received, _ = hvd.alltoall(given, torch.ones(size, dtype=torch.int32))
    (received.sum() * (rank + 1)).backward()
    wanted = torch.cat([torch.arange(1.0, size + 1), torch.zeros(1)])
    torch.testing.assert_close(given.grad, wanted.view(-1, 1).expand(size + 1, 2))
    same = torch.ones(4, requires_grad=True)
    hvd.allreduce(same, op=hvd.Adasum).sum().backward()
    torch.testing.assert_close(same.grad, torch.ones(4))
    low = torch.full((3,), float(rank), requires_grad=True)
    hvd.allreduce(low, op=hvd.Min).sum().backward()
    torch.testing.assert_close(low.grad, torch.full((3,), float(size) if rank == 0 else 0.0))
