"""Works and futures: dropped, late, numerous, with callbacks, and with unusual tensors."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist


def size() -> int:
    return dist.get_world_size()


def rank() -> int:
    return dist.get_rank()


def everybody() -> Any:
    """Returns the group of all ranks, untyped because PyTorch's types lack its methods."""
    return dist.group.WORLD


def total() -> float:
    return float(sum(range(size())))


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, "it has not come"
        time.sleep(0.005)


def unsorted_groups() -> None:
    try:
        group = dist.new_group(list(range(size())), sort_ranks=False)  # type: ignore[call-arg]
    except TypeError:
        pytest.skip("this PyTorch sorts the ranks of groups")
    dist.destroy_process_group(group)


def test_the_value_of_a_future() -> None:
    """As with Gloo: a list of tensors, or a list of lists if several were gathered."""
    outputs = [torch.empty(2) for _ in range(size())]
    work = dist.all_gather(outputs, torch.full((2,), float(rank())), async_op=True)
    assert work is not None
    for value in (work.get_future().wait(), work.result()):
        assert len(value) == size() and all(got is output for got, output in zip(value, outputs))
    several = [[torch.empty(1) for _ in range(size())] for _ in range(2)]
    value = everybody().allgather(several, [torch.ones(1), torch.ones(1)]).get_future().wait()
    assert [len(each) for each in value] == [size()] * 2
    single = torch.empty(size())
    work = dist.all_gather_into_tensor(single, torch.ones(1), async_op=True)
    assert work is not None and work.get_future().wait()[0] is single


def test_a_dropped_work_still_completes() -> None:
    tensor = torch.full((5,), float(rank()))
    dist.all_reduce(tensor, async_op=True)
    gc.collect()
    eventually(lambda: bool((tensor == total()).all()))
    small = torch.full((1,), float(rank()))  # as small as DDP's counts in a join
    dist.all_reduce(small, async_op=True)
    eventually(lambda: small.item() == total())
    if size() > 1:
        # A work that never completes does not block other works.
        lonely = torch.zeros(1)
        dist.irecv(lonely, (rank() + 1) % size(), tag=77)
        got = torch.full((3,), -1.0)
        dist.irecv(got, (rank() - 1) % size())
        dist.isend(torch.full((3,), float(rank())), (rank() + 1) % size())
        eventually(lambda: bool((got == (rank() - 1) % size()).all()))
        for _ in range(3):
            outputs = [torch.full((1,), -1.0) for _ in range(size())]
            dist.all_gather(outputs, torch.full((1,), float(rank())), async_op=True)
            eventually(
                lambda outputs=outputs: [int(each) for each in outputs] == list(range(size()))
            )
        assert lonely.item() == 0.0
        dist.barrier()
        dist.send(torch.ones(1), (rank() - 1) % size(), tag=77)
        eventually(lambda: lonely.item() == 1.0)


@pytest.mark.parametrize("drop", [True, False])
def test_a_barrier_waits_for_earlier_works(drop: bool) -> None:
    """As with Gloo. Without that, results would overwrite what the program stores afterwards."""
    shapes = [[], [1], [40], [7, 5], [3, 40, 9], [2, 3, 4, 5]]
    dtypes = [torch.float32, torch.int64, torch.bfloat16, torch.complex64]
    tensors = [torch.empty(shape, dtype=dtype) for shape in shapes for dtype in dtypes]
    for turn in range(20):
        for tensor in tensors:
            tensor.fill_(rank() + turn)
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        if drop:
            works.clear()
        dist.barrier()
        for tensor in tensors:
            assert bool((tensor == total() + turn * size()).all()), (turn, tensor.dtype)
        for tensor in tensors:
            tensor.fill_(-1)
        for work in works:
            assert work is not None and work.is_completed()
        assert all(bool((tensor == -1).all()) for tensor in tensors)


def test_a_late_work_writes_no_result() -> None:
    if size() == 1:
        pytest.skip("needs two ranks")
    tensor = torch.full((3,), -1.0)
    if rank() == 0:
        with pytest.raises(RuntimeError, match="did not complete within"):
            everybody().broadcast(tensor, 1, timedelta(seconds=0.2)).wait()
    dist.barrier(dist.new_group())  # rank 0 has given up by now
    if rank() > 0:
        everybody().broadcast(tensor, 1).wait()
    dist.barrier()
    time.sleep(0.3)
    assert bool((tensor == -1.0).all())


@pytest.mark.parametrize(
    "call", ["allreduce", "list", "broadcast", "allgather", "alltoall", "reduce", "barrier"]
)
def test_the_timeout_of_a_call(call: str) -> None:
    """Call variants without options also have a timeout."""
    if size() == 1:
        pytest.skip("needs two ranks")
    group: Any = dist.new_group(timeout=timedelta(seconds=100))
    short = timedelta(seconds=0.2)
    ones = [torch.ones(1) for _ in range(size())]
    start = {
        "allreduce": lambda: group.allreduce(torch.ones(1), dist.ReduceOp.SUM, short),
        "list": lambda: group.allreduce([torch.ones(1)], dist.ReduceOp.SUM, timeout=short),
        "broadcast": lambda: group.broadcast(torch.ones(1), size() - 1, short),
        "allgather": lambda: group.allgather(ones, torch.ones(1), short),
        "alltoall": lambda: group.alltoall(ones, ones, short),
        "reduce": lambda: group.reduce(torch.ones(1), 0, dist.ReduceOp.SUM, short),
        "barrier": lambda: group.barrier(short),
    }[call]
    if rank() == 0:
        with pytest.raises(RuntimeError, match=r"did not complete within 0\.2 s"):
            start().wait()
    dist.barrier()
    if rank() > 0:
        start().wait(timedelta(seconds=60))
    dist.destroy_process_group(group)


def test_keywords_of_calls() -> None:
    tensor = torch.full((2,), float(rank()))
    everybody().allreduce(tensor, op=dist.ReduceOp.MAX, timeout=timedelta(seconds=60)).wait()
    assert bool((tensor == size() - 1).all())
    everybody().broadcast(tensor.fill_(rank()), root=size() - 1).wait()
    assert bool((tensor == size() - 1).all())
    everybody().reduce(tensor.fill_(1), root=0, op=dist.ReduceOp.SUM).wait()
    assert rank() > 0 or bool((tensor == size()).all())


def late(who: int) -> None:
    """Delays a rank."""
    if rank() == who:
        time.sleep(0.1)


@pytest.mark.parametrize("ended", [False, True])
def test_callbacks_that_start_operations(ended: bool) -> None:
    """Their order, and the thread that runs them, differ between ranks."""
    sums = []

    def after(number: int) -> Callable[[Any], torch.Tensor]:
        def second(future: Any) -> torch.Tensor:
            late(number % size())
            [value] = future.value()
            dist.all_reduce(value)
            more = torch.full_like(value, 10.0 * number)
            work = dist.all_reduce(more, async_op=True)
            (got,) = work.get_future().wait()  # type: ignore[union-attr]
            return value + got

        return second

    def third(future: Any) -> torch.Tensor:
        value = future.value().clone()
        dist.all_reduce(value)
        return value

    for number in range(6):
        tensor = torch.full((2,), float(number))
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        if ended and number % size() == rank():
            work.wait()  # its callbacks run immediately, in this thread
        future = work.get_future().then(after(number)).then(third)
        future.add_done_callback(lambda _: dist.all_reduce(torch.ones(3)))
        sums.append(future)
        plain = torch.ones(2)
        dist.all_reduce(plain)
        assert bool((plain == size()).all())
    for number, future in enumerate(sums):
        expected = (number * size() * size() + 10.0 * number * size()) * size()
        assert bool((future.wait() == expected).all())


def test_a_chain_of_callbacks_of_any_length() -> None:
    future = dist.all_reduce(torch.ones(1), async_op=True).get_future()  # type: ignore[union-attr]

    def further(_: Any) -> torch.Tensor:
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return tensor

    for _ in range(150):
        future = future.then(further)
    assert future.wait().item() == size()


def test_rejected_calls_are_not_counted() -> None:
    """This holds for single ranks, too, and in different parts of the library."""
    refused = [
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG),
        lambda: dist.all_reduce(torch.ones(1).expand(3)),
        lambda: everybody().reduce_scatter(
            [torch.ones(1, dtype=torch.bool)],
            [[torch.ones(1 + to % 2, dtype=torch.bool) for to in range(size())]],
            dist.ReduceOp.AVG,
        ),
        lambda: everybody().broadcast([torch.ones(1)], size()),
    ]
    for at, call in enumerate(refused):
        if at % size() == rank():
            with pytest.raises(ValueError):
                call()
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == size()


def test_more_messages_than_names() -> None:
    """Both ends first start all their sends, then all their receives."""
    if size() == 1:
        pytest.skip("needs two ranks")
    after, before = (rank() + 1) % size(), (rank() - 1) % size()
    sends = [dist.isend(torch.full((2,), float(number)), after) for number in range(300)]
    got = [torch.empty(2) for _ in range(300)]
    receives = [dist.irecv(tensor, before) for tensor in got]
    for work in reversed([*sends, *receives]):
        assert work is not None
        work.wait()
    assert [int(tensor[0]) for tensor in got] == list(range(300))
    # Queued messages may also be dropped.
    late_ones = [torch.full((1,), -1.0) for _ in range(100)]
    for tensor in late_ones:
        dist.irecv(tensor, before)
    for number in range(100):
        dist.isend(torch.full((1,), float(number)), after)
    eventually(lambda: [int(tensor) for tensor in late_ones] == list(range(100)))


def test_tensors_saved_for_backward() -> None:
    """With any backend, autograd does not treat a result as a change."""
    weight = torch.full((3,), 2.0, requires_grad=True)
    buffer = torch.full((3,), float(rank()))
    product = weight * buffer
    version = buffer._version
    dist.broadcast(buffer, size() - 1)
    dist.all_reduce(buffer)
    dist.all_gather_into_tensor(torch.empty(3 * size()), buffer)
    assert buffer._version == version
    product.sum().backward()
    expected = torch.full((3,), float((size() - 1) * size()))
    assert torch.equal(weight.grad, expected)  # type: ignore[arg-type]
    inner = weight * 1
    dist.broadcast(inner, 0)  # not a leaf, and requires a gradient
    assert inner.grad_fn is not None and bool((inner == 2.0).all())


def test_inference_tensors() -> None:
    with torch.inference_mode():
        tensor, whole = torch.full((2,), float(rank())), torch.empty(size(), 2)
    dist.all_reduce(tensor)
    assert bool((tensor == total()).all())
    unsorted_groups()
    order = list(reversed(range(size())))
    group = dist.new_group(order, sort_ranks=False)  # type: ignore[call-arg]
    dist.all_gather_into_tensor(whole, torch.full((2,), float(rank())), group=group)
    assert whole[:, 0].tolist() == [float(member) for member in order]
    with torch.inference_mode():
        parts = [torch.empty(2) for _ in order]
        dist.all_gather(parts, torch.full((2,), float(rank())), group=group)
        assert [int(part[0]) for part in parts] == order
        dist.reduce_scatter_tensor(tensor, whole, group=group)
        assert bool((tensor == size() * rank()).all())
    dist.destroy_process_group(group)


@pytest.mark.parametrize("shape", [(4, 0), (4, 2, 0), (0, 3), (3,), ()])
def test_sparse_tensors_of_odd_shapes(shape: tuple[int, ...]) -> None:
    for sparse_dim in range(len(shape) + 1):
        dense = shape[sparse_dim:]
        rows = 0 if 0 in shape[:sparse_dim] else min(rank() + 1, 3) if sparse_dim else 1
        indices = torch.tensor(
            [[at % shape[dim] for at in range(rows)] for dim in range(sparse_dim)]
        ).long()
        indices = indices.view(sparse_dim, rows)
        tensor = torch.sparse_coo_tensor(indices, torch.ones(rows, *dense), shape)
        parts = []
        for member in range(size()):
            number = 0 if 0 in shape[:sparse_dim] else min(member + 1, 3) if sparse_dim else 1
            at = torch.tensor(
                [[row % shape[dim] for row in range(number)] for dim in range(sparse_dim)]
            ).long()
            at = at.view(sparse_dim, number)
            parts.append(torch.sparse_coo_tensor(at, torch.ones(number, *dense), shape).to_dense())
        dist.all_reduce(tensor)
        assert tensor.shape == torch.Size(shape) and tensor.sparse_dim() == sparse_dim
        assert torch.equal(tensor.to_dense(), torch.stack(parts).sum(0))


def test_sparse_tensors_of_different_sizes() -> None:
    if size() == 1:
        pytest.skip("needs two ranks")
    own = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1, 2), (1 + rank(), 2))
    with pytest.raises(RuntimeError, match="sparse tensors of different shapes"):
        dist.all_reduce(own)
    dist.barrier()


@pytest.mark.parametrize("elements", [5, 900])
def test_a_small_tensor_that_gets_new_memory(elements: int) -> None:
    """The result is written to the tensor's memory at the time of the wait."""
    expected = total() + size()

    def grow(tensor: torch.Tensor) -> None:
        tensor.untyped_storage().resize_(1 << 20)

    def replace(tensor: torch.Tensor) -> None:
        tensor.data = torch.zeros(elements)

    def replace_by_columns(tensor: torch.Tensor) -> None:
        tensor.data = torch.zeros(elements, 2)[:, 1]

    def replace_by_another_type(tensor: torch.Tensor) -> None:
        tensor.data = torch.zeros(elements, dtype=torch.float64)

    def share(tensor: torch.Tensor) -> None:
        tensor.share_memory_()

    for change in (grow, replace, replace_by_columns, replace_by_another_type, share):
        tensor = torch.full((elements,), rank() + 1.0)
        before = tensor[:]
        work = dist.all_reduce(tensor, async_op=True)
        change(tensor)
        work.wait()
        assert (tensor == expected).all(), change.__name__
        assert (before == (rank() + 1.0)).all() or (before == expected).all()
        del work, before


def test_small_tensors_of_any_layout() -> None:
    whole, expected = torch.zeros(40), total() + size()
    cases = {
        "a part": whole[7:19],
        "columns": whole.view(4, 10)[:, 3],
        "transposed": whole.view(4, 10).t(),
        "a negative": torch.zeros(5, dtype=torch.complex64).conj().imag,
        "a leaf": torch.zeros(5, requires_grad=True),
        "a parameter": torch.nn.Parameter(torch.zeros(5)),
        "nothing": torch.zeros(0),
        "a number": torch.zeros(()),
    }
    for name, tensor in cases.items():
        whole.fill_(-1.0)
        with torch.no_grad():
            tensor.fill_(rank() + 1.0)
            version, address = tensor._version, tensor.data_ptr()
            dist.all_reduce(tensor)
        assert (tensor == expected).all(), name
        assert (tensor._version, tensor.data_ptr()) == (version, address), name
        if name == "a part":
            assert (whole[:7] == -1.0).all() and (whole[19:] == -1.0).all()


def test_tensors_that_can_not_hold_results() -> None:
    """Such outputs are rejected before anything is started; inputs may be expanded."""
    wide = torch.ones(1).expand(4)
    for call in [
        lambda: dist.all_reduce(wide),
        lambda: dist.broadcast(wide, 0),
        lambda: dist.all_gather([wide] * size(), torch.ones(4)),
        lambda: dist.reduce_scatter_tensor(wide, torch.ones(4 * size())),
        lambda: dist.all_to_all_single(torch.ones(1).expand(2 * size()), torch.ones(2 * size())),
    ]:
        with pytest.raises(ValueError, match="share memory"):
            call()
    if size() > 1:
        with pytest.raises(ValueError, match="share memory"):
            dist.irecv(wide, (rank() + 1) % size())
    whole = torch.empty(4 * size())
    dist.all_gather_into_tensor(whole, wide)
    assert bool((whole == 1.0).all())


def test_device_types() -> None:
    assert torch.device("cpu") in everybody()._device_types
    assert torch.device("cpu") in dist.new_group()._device_types  # type: ignore[union-attr]


def test_monitored_barrier() -> None:
    """PyTorch calls the group's method; all present ranks report the missing ones."""
    group: Any = dist.new_group()
    group.monitored_barrier(timedelta(seconds=60))
    group.monitored_barrier(timedelta(seconds=60), wait_all_ranks=True)
    if size() > 1:
        if rank() < size() - 1:
            with pytest.raises(
                RuntimeError, match=f"Rank {size() - 1} failed to pass monitoredBarrier in 200 ms"
            ):
                group.monitored_barrier(timedelta(seconds=0.2))
        dist.barrier()
    dist.destroy_process_group(group)


def test_tensors_without_data() -> None:
    """They are rejected, even if a tensor is only moved or only written to."""
    nothing = torch.ones(2, device="meta")
    for call in [
        lambda: dist.all_reduce(nothing),
        lambda: dist.broadcast(nothing, 0),
        lambda: dist.all_gather_into_tensor(torch.empty(2 * size()), nothing),
        lambda: dist.all_gather_into_tensor(torch.empty(2 * size(), device="meta"), torch.ones(2)),
        lambda: dist.reduce_scatter_tensor(nothing, torch.ones(2 * size())),
    ]:
        with pytest.raises(ValueError, match="meta"):
            call()
    dist.barrier()


def test_another_default_device() -> None:
    """The backend's own tensors are not on the program's default device."""
    with torch.device("meta"):
        tensor = torch.full((3,), float(rank()), device="cpu")
        dist.all_reduce(tensor)
        assert tensor.tolist() == [float(total())] * 3
        outputs = [torch.zeros(2, device="cpu") for _ in range(size())]
        dist.all_gather(outputs, torch.full((2,), float(rank()), device="cpu"))
        assert [each.tolist() for each in outputs] == [[float(at)] * 2 for at in range(size())]
        indices = torch.tensor([[0, rank()]], device="cpu")
        values = torch.ones(2, 3, device="cpu")
        sparse = torch.sparse_coo_tensor(indices, values, (size(), 3), device="cpu")
        dist.all_reduce(sparse)
        assert sparse.to_dense().sum().item() == 6 * size()
        group: Any = everybody()
        if hasattr(group, "allocate_tensor"):
            made = group.allocate_tensor(4, dtype=torch.float32, device=torch.device("cpu"))
            assert made.is_cpu
        dist.barrier()
