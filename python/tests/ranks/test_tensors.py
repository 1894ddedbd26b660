"""PyTorch tensors: every function, every element type, gradients."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import gradwire.torch as hvd  # noqa: E402

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.complex64,
    torch.complex128,
]
SMALL = [torch.float8_e4m3fn, torch.float8_e5m2] if hasattr(torch, "float8_e4m3fn") else []


def of_rank(rank: int, dtype: torch.dtype = torch.float32, *shape: int) -> torch.Tensor:
    shape = shape or (2, 3)
    count = int(torch.tensor(shape).prod())
    return (torch.arange(count).reshape(shape) % 3 + rank + 1).to(dtype)


def total(dtype: torch.dtype = torch.float32, *shape: int) -> torch.Tensor:
    return sum(
        (of_rank(rank, dtype, *shape) for rank in range(1, hvd.size())), of_rank(0, dtype, *shape)
    )


def same(given: torch.Tensor, expected: torch.Tensor) -> None:
    assert given.dtype == expected.dtype and given.shape == expected.shape
    assert torch.equal(given, expected), (given, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_type(dtype: torch.dtype) -> None:
    own = of_rank(hvd.rank(), dtype)
    same(hvd.allreduce(own, op=hvd.Sum), total(dtype))
    same(own, of_rank(hvd.rank(), dtype))
    same(hvd.allgather(own), torch.cat([of_rank(rank, dtype) for rank in range(hvd.size())]))
    same(hvd.broadcast(own, 0), of_rank(0, dtype))
    everything, received = hvd.alltoall(own, torch.tensor([2] + [0] * (hvd.size() - 1)))
    assert (
        received.tolist() == [2 if hvd.rank() == 0 else 0] * hvd.size()
        and everything.dtype == dtype
    )


@pytest.mark.parametrize("dtype", SMALL)
def test_small_floats(dtype: torch.dtype) -> None:
    own = torch.tensor([1.0, 2.0, 0.5]).to(dtype)
    result = hvd.allreduce(own, op=hvd.Sum)
    assert result.dtype == dtype
    assert result.float().tolist() == (torch.tensor([1.0, 2.0, 0.5]) * hvd.size()).tolist()


def test_booleans() -> None:
    own = torch.tensor([hvd.rank() == 0, True])
    same(hvd.allreduce(own, op=hvd.Min), torch.tensor([hvd.size() == 1, True]))
    same(hvd.broadcast(own, 0), torch.tensor([True, True]))


def test_reductions() -> None:
    own = of_rank(hvd.rank())
    everybody = torch.stack([of_rank(rank) for rank in range(hvd.size())])
    torch.testing.assert_close(hvd.allreduce(own), everybody.mean(0))
    same(hvd.allreduce(own, average=False), everybody.sum(0))
    same(hvd.allreduce(own, op=hvd.Min), everybody.amin(0))
    same(hvd.allreduce(own, op=hvd.Max), everybody.amax(0))
    same(hvd.allreduce(own, op=hvd.Product), everybody.prod(0))
    with pytest.raises(ValueError, match="not both"):
        hvd.allreduce(own, average=True, op=hvd.Sum)
    # Adasum of equal vectors is that vector; of orthogonal vectors, their sum.
    torch.testing.assert_close(hvd.allreduce(torch.ones(8), op=hvd.Adasum), torch.ones(8))
    square = torch.zeros(hvd.size())
    square[hvd.rank()] = 1.0
    torch.testing.assert_close(hvd.allreduce(square, op=hvd.Adasum), torch.ones(hvd.size()))


@pytest.mark.parametrize("small", [hvd.Compression.fp16, hvd.Compression.bf16])
def test_compression(small: type) -> None:
    result = hvd.allreduce(of_rank(hvd.rank()), compression=small, op=hvd.Sum)
    same(result, total())
    ints = hvd.allreduce(of_rank(hvd.rank(), torch.int64), compression=small, op=hvd.Sum)
    same(ints, total(torch.int64))


def test_in_place_and_without_gaps() -> None:
    own = of_rank(hvd.rank())
    assert hvd.allreduce_(own, op=hvd.Sum) is own
    same(own, total())
    turned = of_rank(hvd.rank()).t()
    assert not turned.is_contiguous()
    hvd.allreduce_(turned, op=hvd.Sum)
    same(turned, total().t())
    handles = [
        hvd.allreduce_async_(of_rank(hvd.rank()), name=f"n{at}", op=hvd.Sum) for at in range(5)
    ]
    for handle in handles:
        same(hvd.synchronize(handle), total())
        assert hvd.poll(handle)
    parameter = torch.nn.Parameter(of_rank(hvd.rank()))
    hvd.broadcast_(parameter, hvd.size() - 1)
    same(parameter.data, of_rank(hvd.size() - 1))


def test_groups() -> None:
    own = [
        of_rank(hvd.rank()),
        of_rank(hvd.rank(), torch.int64, 5),
        of_rank(hvd.rank(), torch.bfloat16),
    ]
    for given, dtype in zip(
        hvd.grouped_allreduce(own, op=hvd.Sum), [torch.float32, torch.int64, torch.bfloat16]
    ):
        assert given.dtype == dtype
    same(own[0], of_rank(hvd.rank()))
    hvd.grouped_allreduce_(own, op=hvd.Sum)
    same(own[0], total())
    first, second = hvd.grouped_allgather(own[:2])
    assert len(first) == 2 * hvd.size() and len(second) == 5 * hvd.size()
    assert len(hvd.grouped_reducescatter(own[:2], op=hvd.Sum)) == 2
    with pytest.raises(ValueError, match="at least one tensor"):
        hvd.grouped_allreduce([])


def test_rows() -> None:
    size, rank = hvd.size(), hvd.rank()
    own = torch.full((rank + 1, 2), float(rank))
    expected = torch.cat([torch.full((r + 1, 2), float(r)) for r in range(size)])
    same(hvd.allgather(own), expected)
    same(hvd.synchronize(hvd.allgather_async(own, name="rows")), expected)
    mine = hvd.reducescatter(of_rank(rank, torch.float32, size + 1, 2), op=hvd.Sum)
    first = rank + min(rank, 1)
    same(mine, total(torch.float32, size + 1, 2)[first:][: 2 if rank == 0 else 1])
    splits = torch.tensor([1] * size, dtype=torch.int32)
    result, received = hvd.alltoall(torch.arange(size) + 10 * rank, splits)
    same(result, torch.arange(size) * 10 + rank)
    assert received.dtype == torch.int32 and received.tolist() == [1] * size
    same(hvd.alltoall(torch.arange(size)), torch.full((size,), rank))
    with pytest.raises(ValueError, match="whole numbers"):
        hvd.alltoall(own, torch.ones(size))


def test_sparse_tensors_of_different_sizes() -> None:
    """All ranks get the error, even those where the entries would fit."""
    if hvd.size() == 1:
        pytest.skip("needs two ranks")
    for size in ((3 + hvd.rank(), 2), (3, 2)[: 1 + (hvd.rank() == 0)]):
        shape = (2, *size[1:]) if len(size) == 2 else (2,)
        own = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.ones(shape), size)
        with pytest.raises(hvd.Disagreement):
            hvd.sparse_allreduce_async(own, name="of different sizes")()
    hvd.barrier()


def test_sparse() -> None:
    places = torch.tensor([[0, hvd.rank() + 1, 0]])
    own = torch.sparse_coo_tensor(
        places, torch.tensor([[1.0, 1], [2, 2], [1, 1]]), (hvd.size() + 1, 2)
    )
    result = hvd.sparse_allreduce_async(own, name="sparse", op=hvd.Sum)().to_dense()
    expected = torch.full((hvd.size() + 1, 2), 2.0)
    expected[0] = 2.0 * hvd.size()
    same(result, expected)
    whole = torch.tensor([0, 7 + 2 * hvd.rank()]).to_sparse()
    average = hvd.sparse_allreduce_async(whole, name="whole", op=hvd.Average)()
    assert average.dtype == torch.int64 and average.to_dense().tolist() == [0, 6 + hvd.size()]
    average = hvd.synchronize(hvd.sparse_allreduce_async(own, name="mean", op=hvd.Average))
    torch.testing.assert_close(average.to_dense(), expected / hvd.size())
    with pytest.raises(ValueError, match="use Average or Sum"):
        hvd.sparse_allreduce_async(own, name="max", op=hvd.Max)


def grown(*shape: int) -> torch.Tensor:
    return of_rank(hvd.rank(), torch.float32, *shape).requires_grad_()


def test_gradients_of_reductions() -> None:
    size = hvd.size()
    weight = torch.full((2, 3), float(hvd.rank() + 1))
    everybody = size * (size + 1) / 2
    for op, expected in [(hvd.Sum, everybody), (hvd.Average, everybody / size)]:
        own = grown()
        (hvd.allreduce(own, op=op, name=f"g{op}") * weight).sum().backward()
        torch.testing.assert_close(own.grad, torch.full((2, 3), expected))
    own = grown()
    (hvd.allreduce(own, op=hvd.Max) * weight).sum().backward()
    mine = everybody if hvd.rank() == size - 1 else 0.0
    torch.testing.assert_close(own.grad, torch.full((2, 3), mine))
    one, two = grown(), grown(4)
    first, second = hvd.grouped_allreduce([one, two], op=hvd.Sum, prescale_factor=0.5)
    (first.sum() + second.sum()).backward()
    torch.testing.assert_close(one.grad, torch.full((2, 3), size / 2))
    torch.testing.assert_close(two.grad, torch.full((4,), size / 2))
    with pytest.raises(NotImplementedError, match="product"):
        hvd.allreduce(grown(), op=hvd.Product).sum().backward()


def test_gradients_of_moves() -> None:
    size, rank = hvd.size(), hvd.rank()
    own = grown(rank + 1, 2)
    hvd.allgather(own).sum().backward()
    torch.testing.assert_close(own.grad, torch.ones(rank + 1, 2))
    own = grown()
    (hvd.broadcast(own, 0) * (rank + 1)).sum().backward()
    torch.testing.assert_close(own.grad, torch.full((2, 3), (size + 1) / 2 if rank == 0 else 0.0))
    own = grown(size, 2)
    received = hvd.alltoall(own)
    (received * torch.arange(1.0, size + 1).unsqueeze(1)).sum().backward()
    torch.testing.assert_close(own.grad, torch.full((size, 2), rank + 1.0))
    own = grown(size, 2)
    hvd.reducescatter(own, op=hvd.Sum).sum().backward()
    torch.testing.assert_close(own.grad, torch.full((size, 2), float(size)))
    own = grown(size, 2)
    hvd.reducescatter(own).sum().backward()
    torch.testing.assert_close(own.grad, torch.ones(size, 2))


@pytest.mark.usefixtures("several_ranks")
def test_ranks_disagree_on_a_sparse_reduction() -> None:
    op = hvd.Sum if hvd.rank() else hvd.Average
    with pytest.raises(hvd.Disagreement, match="the ranks disagree on op"):
        hvd.sparse_allreduce_async(torch.eye(3).to_sparse(), name="of two ops", op=op)()


def test_batches_that_can_not_be_normalised() -> None:
    layer = hvd.SyncBatchNorm(3)
    for odd, why in [
        (torch.zeros(3), "at least 2 dimensions"),
        (torch.zeros(4, 3, dtype=torch.int64), "floating-point"),
        (torch.zeros(4, 1), "expected 3 channels, got 1"),
        (torch.zeros(4, 5), "expected 3 channels, got 5"),
    ]:
        with pytest.raises(ValueError, match=why):
            layer(odd)
    assert layer.num_batches_tracked.item() == 0


def test_batch_norm_over_all_ranks() -> None:
    torch.manual_seed(1)
    whole = torch.randn(4 * hvd.size(), 3, 5, dtype=torch.float64) * 2 + 7
    ours, theirs = hvd.SyncBatchNorm(3).double(), torch.nn.BatchNorm1d(3).double()
    with torch.no_grad():
        for layer in (ours, theirs):
            layer.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
    part = whole[4 * hvd.rank() :][:4].clone().requires_grad_()
    everything = whole.clone().requires_grad_()
    result, expected = ours(part), theirs(everything)
    torch.testing.assert_close(result, expected[4 * hvd.rank() :][:4])
    (result**3).sum().backward()
    (expected**3).sum().backward()
    torch.testing.assert_close(part.grad, everything.grad[4 * hvd.rank() :][:4])
    weight = hvd.allreduce(ours.weight.grad, op=hvd.Sum)
    torch.testing.assert_close(weight, theirs.weight.grad)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    ours.eval(), theirs.eval()
    torch.testing.assert_close(ours(part), theirs(part))
    if hvd.rank() == 0:  # nor does it need the other ranks without running statistics
        plain = torch.nn.BatchNorm1d(3, track_running_stats=False).double().eval()
        alone = hvd.SyncBatchNorm(3, track_running_stats=False).double().eval()
        torch.testing.assert_close(alone(part), plain(part))
    # Batches may have different sizes, and one may be empty.
    ours.train(), theirs.train()
    mine = whole[: 4 * (hvd.size() - 1)] if hvd.rank() == 0 else whole[:0]
    mine = whole if hvd.size() == 1 else mine
    everything = whole if hvd.size() == 1 else whole[: 4 * (hvd.size() - 1)]
    torch.testing.assert_close(ours(mine), theirs(everything)[: len(mine)])
    torch.testing.assert_close(ours.running_var, theirs.running_var)


def test_process_sets() -> None:
    if hvd.size() < 3:
        pytest.skip("needs three ranks")
    even = hvd.add_process_set(range(0, hvd.size(), 2))
    odd = hvd.add_process_set(hvd.ProcessSet(range(1, hvd.size(), 2)))
    own = even if hvd.rank() % 2 == 0 else odd
    assert own.included() and own.size() == len(own.ranks) and own.ranks[own.rank()] == hvd.rank()
    expected = sum((of_rank(rank) for rank in own.ranks[1:]), of_rank(own.ranks[0]))
    same(hvd.allreduce(of_rank(hvd.rank()), op=hvd.Sum, name="same", process_set=own), expected)
    same(hvd.broadcast(of_rank(hvd.rank()), own.ranks[-1], process_set=own), of_rank(own.ranks[-1]))
    assert hvd.broadcast_object(hvd.rank(), own.ranks[0], process_set=own) == own.ranks[0]
    other = odd if own is even else even
    with pytest.raises(ValueError, match="not a member"):
        hvd.allreduce(of_rank(0), process_set=other)
    with pytest.raises(ValueError, match="not a member"):
        hvd.broadcast(of_rank(0), other.ranks[0], process_set=own)
    assert set(hvd.get_process_set_ids_and_ranks()) == {0, even.process_set_id, odd.process_set_id}
    assert hvd.remove_process_set(even) and hvd.remove_process_set(odd)
    assert not hvd.remove_process_set(hvd.global_process_set) and even.process_set_id is None
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(of_rank(0), process_set=even)


def test_join() -> None:
    # Rank r has r more batches than rank 0; averages are over ranks with data.
    for at in range(hvd.rank() + 1):
        givers = hvd.size() - at
        average = hvd.allreduce(torch.full((4,), float(hvd.rank())), name=f"batch{at}")
        expected = sum(range(at, hvd.size())) / givers
        torch.testing.assert_close(average, torch.full((4,), expected))
        smallest = hvd.allreduce(torch.full((2,), 5.0 + hvd.rank()), name=f"min{at}", op=hvd.Min)
        same(smallest, torch.full((2,), 5.0 + at))
        assert len(hvd.allgather(torch.zeros(1), name=f"rows{at}")) == givers
    assert hvd.join() in range(hvd.size())
    same(hvd.allreduce(of_rank(hvd.rank()), op=hvd.Sum), total())
