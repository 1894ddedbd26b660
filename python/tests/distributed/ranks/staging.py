"""Tensors on a simulated GPU (see fake_cuda): the order of streams and works."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_cuda import FakeCuda, OnGpu, raw
from on_fake_gpu import simulated


@pytest.fixture
def gpu() -> Iterator[FakeCuda]:
    yield from simulated()


def size() -> int:
    return dist.get_world_size()


def rank() -> int:
    return dist.get_rank()


def filled(gpu: FakeCuda, value: float, *shape: int) -> torch.Tensor:
    return gpu.made(torch.full(shape or (3,), value))


def holds(gpu: FakeCuda, tensor: torch.Tensor, expected: Any) -> None:
    assert torch.equal(
        gpu.read(tensor), torch.as_tensor(expected, dtype=tensor.dtype).expand(tensor.shape)
    )


def test_calls_and_kernels_run_in_order(gpu: FakeCuda) -> None:
    tensor = filled(gpu, rank() + 1.0)
    for _ in range(3):
        dist.all_reduce(tensor)
        memory = raw(tensor)
        gpu.launch(lambda memory=memory: memory.div_(size()))
    holds(gpu, tensor, (size() + 1) / 2)
    assert gpu.waited == {"gw-staging"}


def test_waiting_streams_follow_the_copies(gpu: FakeCuda) -> None:
    """Another thread first sees the completion and copies the result, on its own stream."""
    for at in range(5):
        with gpu.on_a_stream():
            tensor = filled(gpu, float(at))
            work = dist.all_reduce(tensor, async_op=True)
            assert work is not None
        first = threading.Thread(target=work.wait)
        first.start()
        first.join()
        with gpu.on_a_stream():
            work.wait()
            holds(gpu, tensor, at * size())


def test_moves(gpu: FakeCuda) -> None:
    everybody = torch.arange(float(size()))
    gathered = filled(gpu, -1.0, size())
    dist.all_gather_into_tensor(gathered, filled(gpu, float(rank()), 1))
    holds(gpu, gathered, everybody)
    parts = [filled(gpu, -1.0, 2) for _ in range(size())]
    dist.all_gather(parts, filled(gpu, float(rank()), 2))
    for member, part in enumerate(parts):
        holds(gpu, part, member)
    tensor = filled(gpu, float(rank()))
    options = dist.BroadcastOptions()
    options.rootRank = size() - 1
    # dist.broadcast would query the GPU.
    dist.group.WORLD.broadcast([tensor], options).wait()  # type: ignore[union-attr]
    holds(gpu, tensor, size() - 1)
    part = filled(gpu, -1.0, 2)
    dist.reduce_scatter_tensor(part, gpu.made(everybody.repeat_interleave(2)))
    holds(gpu, part, rank() * size())
    moved = filled(gpu, -1.0, size())
    sent = filled(gpu, float(rank()), size())
    # dist.all_to_all_single would use the real device of the tensor.
    dist.group.WORLD.alltoall_base(moved, sent, [], []).wait()  # type: ignore[union-attr]
    holds(gpu, moved, everybody)
    if size() > 1 and rank() < 2:
        other = filled(gpu, -1.0, 2)
        if rank() == 0:
            dist.send(filled(gpu, 5.0, 2), 1)
            dist.recv(other, 1)
        else:
            dist.recv(other, 0)
            dist.send(filled(gpu, 6.0, 2), 0)
        holds(gpu, other, 6 if rank() == 0 else 5)
    dist.barrier()


def test_a_group_in_another_order(gpu: FakeCuda) -> None:
    """The result is reordered on the device, between the copies and the waiting streams."""
    backwards = dist.new_group(list(reversed(range(size()))))
    gathered = filled(gpu, -1.0, size())
    work = dist.all_gather_into_tensor(
        gathered, filled(gpu, float(rank()), 1), group=backwards, async_op=True
    )
    assert work is not None
    work.wait()
    members = dist.get_process_group_ranks(backwards)
    holds(gpu, gathered, torch.tensor([float(member) for member in members]))


def test_factors_are_applied_after_the_copy(gpu: FakeCuda) -> None:
    tensor = filled(gpu, rank() + 1.0)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
    holds(gpu, tensor, size() * (size() + 1) / 4)


def test_devices_beside_each_other(gpu: FakeCuda) -> None:
    """Calls keep their order on all devices."""
    works = []
    for at in range(8):
        here = (at + rank()) % 2 == 0
        tensor = torch.full((2,), float(at)) if here else filled(gpu, float(at), 2)
        works.append((at, here, tensor, dist.all_reduce(tensor, async_op=True)))
    for at, here, tensor, work in works:
        assert work is not None
        work.wait()
        got = tensor if here else gpu.read(tensor)
        assert got.tolist() == [float(at * size())] * 2
        assert here == (not isinstance(tensor, OnGpu))


def test_rejected_calls_are_not_counted(gpu: FakeCuda) -> None:
    """One rank's call is rejected immediately, although its tensor is not computed yet."""
    if rank() == 0:
        with pytest.raises(ValueError, match="bool"):
            dist.all_reduce(gpu.made(torch.ones(2, dtype=torch.bool)), dist.ReduceOp.AVG)
        with pytest.raises(ValueError, match="itself"):
            dist.isend(filled(gpu, 1.0), 0)
    tensor = filled(gpu, 1.0)
    dist.all_reduce(tensor)
    holds(gpu, tensor, size())
