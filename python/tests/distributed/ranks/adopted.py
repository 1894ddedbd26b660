"""Ordinary tensors of a process group move into shared memory."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch as gradwire
from gradwire.torch import _adopt
from gradwire.torch._adopt import is_shared as adopted

if not hasattr(torch.UntypedStorage, "resizable"):
    pytest.skip("tensors of this PyTorch do not move", allow_module_level=True)

N = 40_000


@pytest.fixture(autouse=True)
def _look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the pauses, because the tests create tensors more often than programs do."""
    monkeypatch.setattr(_adopt, "LOOK_PAUSE", 0.0)
    # Tests in other files may have started a pause.
    monkeypatch.setattr(_adopt, "_look_from", 0.0)
    # Large storages move as soon as small ones.
    monkeypatch.setattr(_adopt, "AT_ONCE", 1 << 40)


def fresh(elements: int = N) -> torch.Tensor:
    return (torch.arange(elements) % 61 + 1).float() * (dist.get_rank() + 1)


def total(elements: int = N, ranks: int | None = None) -> torch.Tensor:
    ranks = dist.get_world_size() if ranks is None else ranks
    return (torch.arange(elements) % 61 + 1).float() * (ranks * (ranks + 1) // 2)


def copied() -> int:
    return gradwire.stats()["copied_bytes"]


def test_all_reduce_moves_it() -> None:
    tensor = torch.zeros(N)
    for turn in range(4):
        tensor.copy_(fresh())
        version, before = tensor._version, copied()
        if turn % 2:
            dist.all_reduce(tensor)
        else:
            work = dist.all_reduce(tensor, async_op=True)
            assert work.get_future().wait()[0] is not None
            work.wait()
        assert torch.equal(tensor, total()) and tensor._version == version
        assert (copied() == before) == (turn > 0)
    assert adopted(tensor)
    for op, expected in [
        (dist.ReduceOp.MAX, fresh() / (dist.get_rank() + 1) * dist.get_world_size()),
        (dist.ReduceOp.AVG, total() / dist.get_world_size()),
    ]:
        tensor.copy_(fresh())
        dist.all_reduce(tensor, op=op)
        assert torch.allclose(tensor, expected)


@pytest.mark.parametrize("coalesced", [False, True])
def test_one_rank_moves_and_another_copies(coalesced: bool) -> None:
    tensor = torch.zeros(4, N // 4)
    view = tensor.numpy() if dist.get_rank() == 0 else None  # such a tensor stays
    for _ in range(4):
        tensor.copy_(fresh().view(4, -1))
        if coalesced:
            dist.all_reduce_coalesced([tensor])
        else:
            dist.all_reduce(tensor)
        assert torch.equal(tensor, total().view(4, -1))
    assert adopted(tensor) == (view is None)


def test_a_factor_is_applied_to_a_copy() -> None:
    tensor = torch.zeros(N)
    for _ in range(3):
        tensor.copy_(fresh())
        dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(2.0))
        assert torch.equal(tensor, 2 * total())


def test_two_groups_use_one_storage() -> None:
    everyone = list(range(dist.get_world_size()))
    groups = [dist.new_group(everyone), dist.new_group(everyone[:2])]
    tensor = torch.zeros(2 * N)
    for _ in range(2):
        dist.all_reduce(tensor)
    assert adopted(tensor)
    for turn in range(4):
        left, right = tensor[:N], tensor[N:]
        left.copy_(fresh())
        right.copy_(fresh())
        works = [dist.all_reduce(left, group=groups[0], async_op=True)]
        if dist.get_rank() < 2:
            works.append(dist.all_reduce(right, group=groups[1], async_op=True))
        for work in works:
            work.wait()
        assert torch.equal(left, total()), turn
        both = min(2, dist.get_world_size())
        assert torch.equal(right, total(N, both) if dist.get_rank() < 2 else fresh()), turn
    # Removing a group does not affect other groups.
    assert adopted(tensor)
    dist.barrier()
    for group in groups:
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    tensor.copy_(fresh(2 * N))
    dist.all_reduce(tensor)
    assert torch.equal(tensor, total(2 * N))


def test_a_dropped_work_reaches_its_tensor() -> None:
    tensor = torch.zeros(N)
    for _ in range(3):
        tensor.copy_(fresh())
        dist.all_reduce(tensor, async_op=True)
        dist.barrier()
        work = dist.all_reduce(torch.zeros(1), async_op=True)
        work.wait()
        del work
    del tensor
    dist.barrier()


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(200, 300), nn.Tanh(), nn.Linear(300, 200))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def rows(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 200, generator=torch.Generator().manual_seed(100 * step + rank))


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("to_none", [False, True])
def test_ddp(view: bool, to_none: bool) -> None:
    """DDP's buckets move; its gradients equal those of a model that sees all data."""
    model = DistributedDataParallel(Wide(), gradient_as_bucket_view=view, bucket_cap_mb=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = Wide()
    other = torch.optim.SGD(alone.parameters(), lr=0.1)
    size = dist.get_world_size()
    for step in range(6):
        before = copied()
        optimizer.zero_grad(set_to_none=to_none)
        model(rows(step, dist.get_rank())).square().mean().backward()
        optimizer.step()
        if step == 5:
            assert copied() - before < 64 << 10
        other.zero_grad()
        sum(alone(rows(step, rank)).square().mean() / size for rank in range(size)).backward()
        other.step()
    for mine, theirs in zip(model.parameters(), alone.parameters()):
        assert torch.allclose(mine, theirs, atol=1e-5)
        if mine.numel() > N:
            assert not adopted(mine.data)


def test_a_wait_that_times_out() -> None:
    """The operation continues in the tensor's own memory."""
    if dist.get_world_size() == 1:
        pytest.skip("needs two ranks")
    tensor = torch.zeros(N)
    for _ in range(2):
        tensor.copy_(fresh())
        dist.all_reduce(tensor)
    tensor.copy_(fresh())
    late = dist.get_rank() == dist.get_world_size() - 1
    ready = torch.zeros(1)
    if not late:
        work = dist.all_reduce(tensor, async_op=True)
        with pytest.raises(gradwire.WaitTimeout):
            work.wait(timedelta(milliseconds=50))
    else:
        import time

        time.sleep(0.5)
        work = dist.all_reduce(tensor, async_op=True)
    dist.all_reduce(ready)
    if late:
        work.wait()
    dist.barrier()
    assert torch.equal(tensor, total())
    tensor.copy_(fresh())
    dist.all_reduce(tensor)
    assert torch.equal(tensor, total())


def test_buffers_that_the_group_allocates() -> None:
    group = dist.distributed_c10d._get_default_group()
    size = dist.get_world_size()
    assert group.supports_tensor_alloc(torch.device("cpu"))
    assert not group.supports_tensor_alloc(torch.device("cuda"))
    with pytest.raises(gradwire.InvalidRequest, match="on the CPU"):
        group.allocate_tensor(3, dtype=torch.float32, device="cuda")
    for _ in range(3):
        tensor = group.allocate_tensor(N * size, dtype=torch.float32, device="cpu")
        assert tensor.shape == (N * size,) and adopted(tensor)
        tensor.copy_(fresh(N).repeat(size))
        before, output = copied(), torch.zeros(N)
        dist.reduce_scatter_tensor(output, tensor)
        assert torch.equal(output, total()) and copied() == before
        assert torch.equal(tensor, fresh(N).repeat(size))
        dist.all_reduce(tensor)
        assert torch.equal(tensor, total(N).repeat(size)) and copied() == before
        del tensor
    assert group.allocate_tensor(0, dtype=torch.int64, device="cpu").shape == (0,)
    assert group.allocate_tensor(5, dtype=torch.bfloat16, device="cpu").dtype == torch.bfloat16


def test_fsdp2_with_buffers_of_the_group() -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard") or not hasattr(
        fsdp.FSDPModule, "set_allocate_memory_from_process_group_for_comm"
    ):
        pytest.skip("this PyTorch has no such hook")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    models = [Wide(), Wide()]
    for at, model in enumerate(models):
        fsdp.fully_shard(model, mesh=mesh)
        if at == 1:
            model.set_allocate_memory_from_process_group_for_comm(True)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    taken = []
    for step in range(3):
        for model, optimizer in zip(models, optimizers):
            before = copied()
            optimizer.zero_grad()
            model(rows(step, dist.get_rank())).square().mean().backward()
            optimizer.step()
            taken.append(copied() - before)
    for one, other in zip(models[0].parameters(), models[1].parameters()):
        assert torch.equal(one.full_tensor(), other.full_tensor())
    # A single rank exchanges nothing.
    assert taken[-1] < taken[-2] or (dist.get_world_size() == 1 and not any(taken))
