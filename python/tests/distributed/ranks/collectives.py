"""Every torch.distributed call that moves or reduces tensors."""

from __future__ import annotations

import functools
import operator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
OTHERS = [
    getattr(torch, name)
    for name in (
        "uint16",
        "uint32",
        "uint64",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e8m0fnu",
    )
    if hasattr(torch, name)
]
MOVED = [*FLOATS, *INTEGERS, torch.bool, *COMPLEX, *OTHERS]


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def last() -> int:
    return size() - 1


def of(member: int, dtype: torch.dtype = torch.float32, number: int = 6) -> torch.Tensor:
    """Returns the input of a rank: small numbers that every element type can represent."""
    values = (torch.arange(number) + member) % 3
    return values.to(torch.float32).to(dtype) if dtype in OTHERS else values.to(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    assert one.dtype == other.dtype and one.shape == other.shape
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def everyone(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [of(member, dtype) for member in range(size())]


def test_ranks_and_sizes() -> None:
    assert dist.get_backend() == "gradwire"
    assert dist.group.WORLD is not None
    assert (dist.group.WORLD.rank(), dist.group.WORLD.size()) == (rank(), size())


REDUCED = [
    *[(dtype, name) for dtype in [*FLOATS, *INTEGERS] for name in ("SUM", "MIN", "MAX", "PRODUCT")],
    *[(dtype, "SUM") for dtype in COMPLEX],  # PyTorch refuses the others
]


@pytest.mark.parametrize(("dtype", "name"), REDUCED)
def test_all_reduce(dtype: torch.dtype, name: str) -> None:
    tensor = of(rank(), dtype)
    dist.all_reduce(tensor, getattr(ReduceOp, name))
    pairs = {
        "SUM": operator.add,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "PRODUCT": operator.mul,
    }
    assert torch.equal(tensor, functools.reduce(pairs[name], everyone(dtype)))


@pytest.mark.parametrize("name", ["BAND", "BOR", "BXOR"])
def test_all_reduce_of_bits(name: str) -> None:
    pairs = {"BAND": operator.and_, "BOR": operator.or_, "BXOR": operator.xor}
    for dtype in [*INTEGERS, torch.bool]:
        tensor = of(rank(), dtype)
        dist.all_reduce(tensor, getattr(ReduceOp, name))
        assert torch.equal(tensor, functools.reduce(pairs[name], everyone(dtype)))


def test_averages_and_factors() -> None:
    tensor = of(rank())
    dist.all_reduce(tensor, ReduceOp.AVG)
    torch.testing.assert_close(tensor, sum(everyone()) / size())
    premul: Any = dist._make_nccl_premul_sum  # type: ignore[attr-defined]
    for factor in (3.0, torch.tensor([3.0])):
        tensor = of(rank())
        dist.all_reduce(tensor, premul(factor))
        torch.testing.assert_close(tensor, 3.0 * sum(everyone()))


def test_reduce() -> None:
    for root in range(size()):
        tensor = of(rank())
        dist.reduce(tensor, root)
        assert torch.equal(tensor, sum(everyone()) if rank() == root else of(rank()))


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_moves_of(dtype: torch.dtype) -> None:
    for root in range(size()):
        tensor = of(rank(), dtype) if rank() == root else torch.empty(6, dtype=dtype)
        dist.broadcast(tensor, root)
        assert same(tensor, of(root, dtype))
    outputs = [torch.empty(6, dtype=dtype) for _ in range(size())]
    dist.all_gather(outputs, of(rank(), dtype))
    assert all(map(same, outputs, everyone(dtype)))
    single = torch.empty(6 * size(), dtype=dtype)
    dist.all_gather_into_tensor(single, of(rank(), dtype))
    assert same(single, torch.cat([part.view(torch.uint8) for part in everyone(dtype)]).view(dtype))
    gathered = [torch.empty(6, dtype=dtype) for _ in range(size())] if rank() == last() else None
    dist.gather(of(rank(), dtype), gathered, dst=last())
    assert gathered is None or all(map(same, gathered, everyone(dtype)))
    tensor = torch.empty(6, dtype=dtype)
    dist.scatter(tensor, everyone(dtype) if rank() == last() else None, src=last())
    assert same(tensor, of(rank(), dtype))
    outputs = [torch.empty(6, dtype=dtype) for _ in range(size())]
    dist.all_to_all(outputs, [of(rank() + 2 * to, dtype) for to in range(size())])
    assert all(
        same(output, of(source + 2 * rank(), dtype)) for source, output in enumerate(outputs)
    )


def test_reduce_scatter() -> None:
    output = torch.empty(6)
    dist.reduce_scatter(output, [of(rank() + to) for to in range(size())])
    assert torch.equal(output, sum(of(source + rank()) for source in range(size())))
    single = torch.empty(3)
    dist.reduce_scatter_tensor(single, torch.arange(3.0 * size()) + rank())
    expected = torch.arange(3.0 * size()) * size() + sum(range(size()))
    assert torch.equal(single, expected[3 * rank() : 3 * rank() + 3])
    average = torch.empty(3)
    dist.reduce_scatter_tensor(average, torch.arange(3.0 * size()) + rank(), ReduceOp.AVG)
    torch.testing.assert_close(average, single / size())


def test_parts_of_different_sizes() -> None:
    output = torch.empty(rank() + 1)
    dist.reduce_scatter(output, [torch.full((to + 1,), rank() + 1.0) for to in range(size())])
    assert torch.equal(output, torch.full((rank() + 1,), sum(range(1, size() + 1)) * 1.0))
    outputs = [torch.empty(member, 2) for member in range(size())]  # none from rank 0
    dist.all_gather(outputs, torch.full((rank(), 2), float(rank())))
    assert all(
        torch.equal(output, torch.full((member, 2), float(member)))
        for member, output in enumerate(outputs)
    )
    # Rank i sends i + j rows to rank j.
    given = [rank() + to for to in range(size())]
    single = torch.empty(sum(given), 2)
    dist.all_to_all_single(single, torch.full((sum(given), 2), float(rank())), given, given)
    expected = [torch.full((rank() + source, 2), float(source)) for source in range(size())]
    assert torch.equal(single, torch.cat(expected))


def test_all_to_all_single() -> None:
    output = torch.empty(2 * size(), 3)
    source = torch.arange(6.0 * size()).view(2 * size(), 3) + 100 * rank()
    dist.all_to_all_single(output, source)
    expected = [
        (torch.arange(6.0 * size()).view(2 * size(), 3) + 100 * member)[2 * rank() : 2 * rank() + 2]
        for member in range(size())
    ]
    assert torch.equal(output, torch.cat(expected))


def test_shapes_and_strides() -> None:
    for shape in [(), (0,), (0, 3), (2, 0), (1, 2, 3)]:
        tensor = torch.full(shape, rank() + 1.0)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full(shape, sum(range(1, size() + 1)) * 1.0))
        outputs = [torch.empty(shape) for _ in range(size())]
        dist.all_gather(outputs, torch.full(shape, float(rank())))
        assert all(
            torch.equal(output, torch.full(shape, float(member)))
            for member, output in enumerate(outputs)
        )
    wide = torch.zeros(4, 6)
    view = wide.t()[::2]  # no two elements are neighbours
    view.copy_(torch.arange(12.0).view(3, 4) * (rank() + 1))
    dist.all_reduce(view)
    assert torch.equal(view, torch.arange(12.0).view(3, 4) * sum(range(1, size() + 1)))
    assert wide.t()[1::2].count_nonzero() == 0
    dist.broadcast(view, last())
    parameter = torch.nn.Parameter(torch.full((2,), float(rank())))
    dist.broadcast(parameter, last())  # a leaf that requires a gradient
    assert torch.equal(parameter.detach(), torch.full((2,), float(last())))


def test_async() -> None:
    tensors = [torch.full((5,), float(number + rank())) for number in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for number, (work, tensor) in reversed(list(enumerate(zip(works, tensors)))):
        assert work is not None and work.wait()
        assert work.is_completed() and work.is_success() and work.exception() is None
        assert torch.equal(tensor, torch.full((5,), number * size() + sum(range(size())) * 1.0))
        assert work.result()[0] is tensor
    tensor = of(rank())
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    while not work.is_completed():  # without wait, as in PyTorch's documentation
        pass
    assert torch.equal(tensor, sum(everyone()))


def test_futures() -> None:
    tensors = [of(rank()) for _ in range(5)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    futures = [work.get_future() for work in works]  # type: ignore[union-attr]
    doubled = [future.then(lambda future: future.value()[0] * 2) for future in futures]
    for tensor, future in zip(tensors, doubled):
        assert torch.equal(future.wait(), 2 * sum(everyone()))
        assert torch.equal(tensor, sum(everyone()))
    torch.futures.collect_all(futures).wait()


def test_a_future_waits_for_a_later_operation() -> None:
    """The first future completes only after the sender has seen the second one's result."""
    if size() == 1:
        pytest.skip("needs two ranks")
    if rank() == 0:
        late = torch.empty(2)
        first = dist.irecv(late, 1).get_future()
        second = torch.ones(2)
        dist.all_reduce(second, async_op=True).get_future().wait()  # type: ignore[union-attr]
        first.wait()
        assert torch.equal(late, second)
    else:
        second = torch.ones(2)
        dist.all_reduce(second)
        if rank() == 1:
            dist.send(second, 0)


def test_coalesced() -> None:
    tensors = [of(rank()), torch.full((2, 2), float(rank()))]
    dist.all_reduce_coalesced(tensors)
    assert torch.equal(tensors[0], sum(everyone()))
    assert torch.equal(tensors[1], torch.full((2, 2), sum(range(size())) * 1.0))
    mixed = [
        of(rank()),
        of(rank(), torch.int64),
    ]  # the group accepts this, but PyTorch's function does not
    assert dist.group.WORLD is not None
    dist.group.WORLD.allreduce_coalesced(mixed).wait()
    assert torch.equal(mixed[0], sum(everyone())) and torch.equal(
        mixed[1], sum(everyone(torch.int64))
    )
    by_rank = [[torch.empty(6), torch.empty(2)] for _ in range(size())]
    dist.all_gather_coalesced(by_rank, [of(rank()), torch.full((2,), float(rank()))])
    for member, (first, second) in enumerate(by_rank):
        assert torch.equal(first, of(member)) and torch.equal(
            second, torch.full((2,), float(member))
        )
    manager: Any = dist.distributed_c10d._coalescing_manager
    inputs = [of(rank()), torch.full((2,), float(rank()))]
    outputs = [torch.empty(6 * size()), torch.empty(2 * size())]
    with manager():
        for output, given in zip(outputs, inputs):
            dist.all_gather_into_tensor(output, given)
    assert torch.equal(outputs[0], torch.cat(everyone()))
    assert torch.equal(outputs[1], torch.arange(size() * 1.0).repeat_interleave(2))
    scattered = [torch.empty(6), torch.empty(2)]
    with manager():
        for output, given in zip(scattered, outputs):
            dist.reduce_scatter_tensor(output, given)
    assert torch.equal(scattered[0], size() * of(rank())) and torch.equal(
        scattered[1], torch.full((2,), size() * rank() * 1.0)
    )
    again = [torch.ones(3), torch.ones(2)]
    with manager(async_ops=True) as works:
        for tensor in again:
            dist.all_reduce(tensor)
    works.wait()
    assert all(bool((tensor == size()).all()) for tensor in again)


def test_messages() -> None:
    if size() == 1:
        pytest.skip("needs two ranks")
    after, before = (rank() + 1) % size(), (rank() - 1) % size()
    got = torch.empty(2, 3)
    requests = [dist.isend(torch.full((2, 3), float(rank())), after), dist.irecv(got, before)]
    for request in requests:
        assert request is not None
        request.wait()
    assert torch.equal(got, torch.full((2, 3), float(before)))
    # Messages with the same tag stay in order.
    values = [torch.tensor([float(rank() * 10 + number)]) for number in range(3)]
    sent = [dist.isend(value, after, tag=number % 2) for number, value in enumerate(values)]
    for number in (1, 0, 2):
        one = torch.empty(1)
        dist.recv(one, before, tag=number % 2)
        assert one.item() == before * 10 + number
    for request in sent:
        assert request is not None
        request.wait()
    pairs = [
        dist.P2POp(dist.isend, torch.full((4,), float(rank())), after),
        dist.P2POp(dist.irecv, got.view(-1)[:4], before),
    ]
    for request in dist.batch_isend_irecv(pairs):
        request.wait()
    assert torch.equal(got.view(-1)[:4], torch.full((4,), float(before)))


def test_objects() -> None:
    objects: list[Any] = [None] * size()
    dist.all_gather_object(objects, {"rank": rank(), "text": "x" * rank()})
    assert objects == [{"rank": member, "text": "x" * member} for member in range(size())]
    given = [("from", rank()), None] if rank() == last() else [None, None]
    dist.broadcast_object_list(given, src=last())
    assert given == [("from", last()), None]
    gathered: list[Any] | None = [None] * size() if rank() == 0 else None
    dist.gather_object(rank() * "y", gathered)
    assert gathered is None or gathered == ["y" * member for member in range(size())]
    mine: list[Any] = [None]
    dist.scatter_object_list(
        mine, [f"for {member}" for member in range(size())] if rank() == 0 else [None], src=0
    )
    assert mine == [f"for {rank()}"]


def test_sparse() -> None:
    indices = torch.tensor([[0, rank() + 1], [1, 0]])
    tensor = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0]), (size() + 1, 2))
    dist.all_reduce(tensor)
    expected = torch.zeros(size() + 1, 2)
    expected[0, 1] = size()
    expected[1:, 0] = 2.0
    assert torch.equal(tensor.to_dense(), expected)


def test_unsupported_calls_raise() -> None:
    group = dist.group.WORLD
    assert group is not None
    one, sparse = torch.ones(1), torch.eye(2).to_sparse()
    for what, call in {
        "pass src to recv": lambda: dist.recv(one),
        "only by SUM": lambda: dist.all_reduce(sparse, ReduceOp.MAX),
        "one output and a list": lambda: group.reduce_scatter([one, one], [[one] * size()] * 2),
        "pg_options must be None": lambda: dist.new_group(pg_options=object()),
    }.items():
        with pytest.raises(NotImplementedError, match=what):
            call()


def test_groups() -> None:
    if size() == 1:
        pytest.skip("needs two ranks")
    first = dist.new_group([0, 1])
    last = dist.new_group([size() - 1])
    evens = dist.new_group(list(range(0, size(), 2)))
    everybody = dist.new_group()
    again = dist.new_group([1, 0])
    for group, members in [
        (first, [0, 1]),
        (last, [size() - 1]),
        (evens, list(range(0, size(), 2))),
        (everybody, list(range(size()))),
        (again, [0, 1]),
    ]:
        if rank() not in members:
            assert group == dist.GroupMember.NON_GROUP_MEMBER
            continue
        assert dist.get_process_group_ranks(group) == members
        tensor = torch.full((3,), float(rank()))
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, torch.full((3,), float(sum(members))))
        dist.broadcast(tensor.fill_(rank()), members[-1], group=group)
        assert torch.equal(tensor, torch.full((3,), float(members[-1])))
        outputs = [torch.empty(1) for _ in members]
        dist.all_gather(outputs, torch.tensor([float(rank())]), group=group)
        assert [int(output) for output in outputs] == members
        dist.barrier(group)
    if rank() < 2:
        # Messages of two groups with the same ranks are kept apart.
        if rank() == 0:
            requests = [
                dist.isend(torch.tensor([at * 1.0]), 1, group=group)
                for at, group in enumerate((first, again))
            ]
            for request in requests:
                assert request is not None
                request.wait()
        else:
            for at, group in ((1, again), (0, first)):
                one = torch.empty(1)
                dist.recv(one, 0, group=group)
                assert one.item() == at


def test_groups_that_only_their_members_make() -> None:
    """The other ranks make other calls and need not know of the group."""
    half = [member for member in range(size()) if member % 2 == rank() % 2]
    group = dist.new_group(half, use_local_synchronization=True)
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    assert tensor[0] == len(half)
    dist.destroy_process_group(group)


def test_subgroups() -> None:
    if size() % 2:
        pytest.skip("needs pairs of ranks")
    mine, groups = dist.new_subgroups(2)
    assert len(groups) == size() // 2
    tensor = torch.full((1,), float(rank()))
    dist.all_reduce(tensor, group=mine)
    assert tensor.item() == rank() // 2 * 4 + 1


def test_names_repeat() -> None:
    """Daemons remember every name, so there are no more names than operations in flight."""
    from gradwire._names import NAMES
    from gradwire.torch.distributed._numbering import Numbers

    numbers = Numbers("names")
    names: set[str] = set()
    for _ in range(NAMES + 5):
        numbers.start(names.add)
    assert (len(names), numbers.count) == (NAMES, NAMES + 5)
    for call in range(10):
        tensor = torch.tensor([call, rank()])
        dist.all_reduce(tensor)
        assert tensor.tolist() == [size() * call, size() * (size() - 1) // 2]
