"""NumPy arrays and DLPack."""

from __future__ import annotations

import numpy as np
import pytest

import gradwire as gw

KINDS = ["f2", "f4", "f8", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "c8", "c16"]


def of_rank(rank: int, kind: str, shape: tuple[int, ...] = (3, 5)) -> np.ndarray:
    count = int(np.prod(shape))
    return (np.arange(count).reshape(shape) % 4 + rank + 1).astype(kind)


def everybody(kind: str) -> list[np.ndarray]:
    return [of_rank(rank, kind) for rank in range(gw.size())]


def same(given: np.ndarray, expected: np.ndarray) -> None:
    assert given.dtype == expected.dtype
    np.testing.assert_array_equal(given, expected)


def test_the_world() -> None:
    assert 0 <= gw.rank() < gw.size() and gw.is_initialized()
    assert 0 <= gw.local_rank() < gw.local_size() <= gw.size()
    assert 0 <= gw.cross_rank() < gw.cross_size() <= gw.size()
    assert sorted(gw.global_process_set.ranks) == list(range(gw.size()))
    assert gw.global_process_set.process_set_id == 0 and gw.global_process_set.rank() == gw.rank()
    gw.init()  # a second call does nothing


@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_every_element_type(kind: str) -> None:
    own = of_rank(gw.rank(), kind)
    before = own.copy()
    same(gw.allreduce(own, op=gw.Sum), sum(everybody(kind)[1:], everybody(kind)[0]))
    same(own, before)
    gathered = gw.allgather(own)
    same(gathered, np.concatenate(everybody(kind)))
    same(gw.broadcast(own, root_rank=gw.size() - 1), everybody(kind)[-1])


@pytest.mark.parametrize("kind", ["f4", "f2", "i4", "u8"])
def test_every_reduction(kind: str) -> None:
    own, all_ = of_rank(gw.rank(), kind), np.stack(everybody(kind))
    same(gw.allreduce(own, op=gw.Min), all_.min(0))
    same(gw.allreduce(own, op=gw.Max), all_.max(0))
    same(gw.allreduce(own, op=gw.Product), all_.prod(0, dtype=own.dtype))
    mean = all_.sum(0, dtype="f8") / gw.size()
    average = gw.allreduce(own)
    if own.dtype.kind == "f":
        np.testing.assert_allclose(average, mean, rtol=2e-3 if kind == "f2" else 1e-6)
    else:
        same(average, np.trunc(mean).astype(kind))
        same(gw.allreduce(own, op=gw.BitOr), np.bitwise_or.reduce(all_))
        same(gw.allreduce(own, op=gw.BitAnd), np.bitwise_and.reduce(all_))
        same(gw.allreduce(own, op=gw.BitXor), np.bitwise_xor.reduce(all_))


def test_booleans() -> None:
    own = np.array([gw.rank() == 0, True, False])
    same(gw.allreduce(own, op=gw.Max), np.array([True, True, False]))
    same(gw.allreduce(own, op=gw.Min), np.array([gw.size() == 1, True, False]))


def test_factors_and_places() -> None:
    own = of_rank(gw.rank(), "f8")
    total = sum(everybody("f8")[1:], everybody("f8")[0])
    same(gw.allreduce(own, op=gw.Sum, prescale_factor=0.5, postscale_factor=4.0), total * 2)
    result = gw.allreduce_(own, op=gw.Sum)
    assert result is own
    same(own, total)
    own = of_rank(gw.rank(), "f4")
    gw.broadcast_(own, 0)
    same(own, of_rank(0, "f4"))
    # It has gaps, so it is packed and unpacked.
    wide = np.stack([of_rank(gw.rank(), "f4")] * 2, axis=-1)
    gw.allreduce_(wide[..., 1], op=gw.Sum)
    same(wide[..., 1], sum(everybody("f4")[1:], everybody("f4")[0]))
    same(wide[..., 0], of_rank(gw.rank(), "f4"))


def test_handles() -> None:
    handles = [
        gw.allreduce_async(of_rank(gw.rank(), "f4"), name=f"h{at}", op=gw.Sum) for at in range(20)
    ]
    for handle in reversed(handles):
        same(gw.synchronize(handle), sum(everybody("f4")[1:], everybody("f4")[0]))
        assert gw.poll(handle) and handle.wait() is handle.wait()


def test_groups() -> None:
    own = [of_rank(gw.rank(), "f4"), of_rank(gw.rank(), "i8", (7,)), of_rank(gw.rank(), "f8", ())]
    first, second, third = gw.grouped_allreduce(own, op=gw.Sum)
    same(first, sum(everybody("f4")[1:], everybody("f4")[0]))
    assert second.dtype == np.int64 and third.shape == ()
    one, two = gw.grouped_allgather(own[:2])
    assert one.shape == (3 * gw.size(), 5) and two.shape == (7 * gw.size(),)
    parts = gw.grouped_reducescatter(own[:2], op=gw.Sum)
    assert [part.dtype for part in parts] == [np.float32, np.int64]


def test_rows_may_differ() -> None:
    own = np.full((gw.rank(), 2), gw.rank(), np.int32)
    expected = np.concatenate([np.full((rank, 2), rank, np.int32) for rank in range(gw.size())])
    same(gw.allgather(own), expected)
    gathered = gw.gather(own, root_rank=gw.size() - 1)
    if gw.rank() == gw.size() - 1:
        same(gathered, expected)
    else:
        assert gathered is None
    same(gw.allgather(np.float64(gw.rank())), np.arange(gw.size(), dtype="f8"))


def test_reduce_and_scatter() -> None:
    reduced = gw.reduce(of_rank(gw.rank(), "f4"), root_rank=0, op=gw.Sum)
    if gw.rank() == 0:
        same(reduced, sum(everybody("f4")[1:], everybody("f4")[0]))
    else:
        assert reduced is None
    rows = np.arange(gw.size() * 4, dtype="f4").reshape(-1, 2)
    same(gw.scatter(rows if gw.rank() == 0 else rows[:0]), rows[2 * gw.rank() :][:2])
    splits = [rank + 1 for rank in range(gw.size())]
    many = np.arange(sum(splits), dtype="i8")
    first = sum(splits[: gw.rank()])
    same(gw.scatter(many, splits=splits), many[first:][: gw.rank() + 1])


def test_reducescatter_gives_the_first_ranks_more() -> None:
    size = gw.size()
    own = of_rank(gw.rank(), "f4", (2 * size + 1, 3))
    whole = sum(
        (of_rank(rank, "f4", own.shape) for rank in range(1, size)), of_rank(0, "f4", own.shape)
    )
    first = 2 * gw.rank() + min(gw.rank(), 1)
    same(gw.reducescatter(own, op=gw.Sum), whole[first:][: 3 if gw.rank() == 0 else 2])


def test_alltoall() -> None:
    size, rank = gw.size(), gw.rank()
    own = np.repeat(np.arange(size, dtype="f4"), 2) + 100 * rank
    expected = np.concatenate([np.full(2, rank + 100 * other, "f4") for other in range(size)])
    same(gw.alltoall(own), expected)
    splits = [to % 2 for to in range(size)]
    result, received = gw.alltoall(own, splits)
    assert received == [rank % 2] * size
    assert len(result) == size * (rank % 2)


def test_messages() -> None:
    if gw.size() == 1:
        pytest.skip("needs two ranks")
    if gw.rank() == 0:
        gw.send(of_rank(7, "f8"), to_rank=1, tag=3)
        same(gw.receive(np.zeros(0, "i4"), from_rank=1), np.arange(4, dtype="i4"))
    elif gw.rank() == 1:
        same(gw.receive(np.zeros((3, 5)), from_rank=0, tag=3), of_rank(7, "f8"))
        gw.send(np.arange(4, dtype="i4"), to_rank=0)
    gw.barrier()


def test_objects() -> None:
    theirs = {"rank": gw.rank(), "list": [None, "ä" * gw.rank()]}
    assert gw.broadcast_object(theirs, root_rank=gw.size() - 1)["rank"] == gw.size() - 1
    assert [each["rank"] for each in gw.allgather_object(theirs)] == list(range(gw.size()))
    assert gw.broadcast_object(None if gw.rank() else "", name="empty") == ""


def test_dlpack_arrays() -> None:
    class Speaks:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __dlpack__(self, **options: object) -> object:
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.array.__dlpack_device__()

        def __array_namespace__(self) -> object:
            return np

    result = gw.allreduce(Speaks(of_rank(gw.rank(), "f4")), op=gw.Sum)
    same(result, sum(everybody("f4")[1:], everybody("f4")[0]))
    assert result.flags.writeable


def test_memory_outlives_its_names() -> None:
    results = [gw.allreduce(np.full(1000, at, np.float32)) for at in range(50)]
    views = [result[10:20] for result in results]
    del results
    for at, view in enumerate(views):
        assert (view == at).all()
    assert gw.stats()["in_flight"] == 0 and gw.stats()["operations"] > 0


def test_empty_arrays() -> None:
    assert gw.allreduce(np.zeros((0, 3), "f4")).shape == (0, 3)
    assert gw.allgather(np.zeros((0, 3), "f4")).shape == (0, 3)
