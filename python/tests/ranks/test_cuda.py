"""Tensors on a real GPU; skipped without one (test_staging.py simulates one)."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import gradwire.torch as hvd  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch has no usable GPU")


def device() -> Any:
    """Returns this rank's GPU. Ranks share GPUs if there are fewer GPUs than ranks."""
    return torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())


def test_operations_and_kernels_run_in_order() -> None:
    for at in range(10):
        big = torch.randn(512, 512, device=device())
        tensor = torch.full((1 << 16,), float(hvd.rank()), device=device())
        for _ in range(20):
            big = big @ big.T / 512  # delays the computation of the tensor
        tensor += big[0, 0] * 0 + at
        result = hvd.allreduce(tensor, op=hvd.Sum, name=f"cuda{at}") * 2
        assert result.device == device()
        expected = 2.0 * (sum(range(hvd.size())) + at * hvd.size())
        assert bool((result == expected).all()), (at, result[:3])


def test_every_function() -> None:
    size, rank = hvd.size(), hvd.rank()
    own = torch.full((size, 2), float(rank), device=device())
    everybody = torch.arange(float(size), device=device())
    assert torch.equal(hvd.allgather(own[:1])[:, 0], everybody)
    assert torch.equal(hvd.broadcast(own, size - 1), torch.full_like(own, size - 1))
    assert torch.equal(hvd.alltoall(own)[:, 0], everybody)
    assert torch.equal(
        hvd.reducescatter(own, op=hvd.Sum),
        torch.full((1, 2), sum(range(size)) * 1.0, device=device()),
    )
    handles = [
        hvd.allreduce_async_(own.clone(), name=f"in place {at}", op=hvd.Sum) for at in range(8)
    ]
    for handle in reversed(handles):
        assert torch.equal(handle.wait(), torch.full_like(own, sum(range(size))))
    sparse = torch.sparse_coo_tensor([[0, rank]], torch.ones(2, 3), (size, 3)).to(device())
    total = hvd.sparse_allreduce_async(sparse, name="sparse cuda", op=hvd.Sum)()
    assert total.to_dense()[0].tolist() == [size + 1.0] * 3


@pytest.mark.parametrize("small", [hvd.Compression.none, hvd.Compression.bf16])
def test_training(small: Any) -> None:
    def trained(where: Any, distributed: bool) -> Any:
        torch.manual_seed(3)
        net = torch.nn.Sequential(
            torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        ).to(where)
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        if distributed:
            optimizer = hvd.DistributedOptimizer(
                optimizer, net.named_parameters(), compression=small
            )
        for step in range(6):
            made = torch.Generator().manual_seed(step)
            rows = torch.randn(4 * hvd.size(), 6, generator=made)
            given = rows[4 * hvd.rank() :][:4] if distributed else rows
            optimizer.zero_grad()
            net(given.to(where)).square().mean().backward()
            optimizer.step()
        return net

    alone, together = trained("cpu", False), trained(device(), True)
    within = 1e-5 if small is hvd.Compression.none else 0.02
    for expected, got in zip(alone.parameters(), together.parameters()):
        torch.testing.assert_close(got.cpu(), expected, atol=within, rtol=within)


def test_memory_that_is_reused_at_once() -> None:
    """The caller drops its tensors while they are copied; its next kernels reuse freed memory."""
    handles = []
    for at in range(20):
        tensor = torch.full((1 << 18,), float(hvd.rank() + at), device=device())
        handles.append(hvd.allreduce_async(tensor, name=f"dropped {at}", op=hvd.Sum))
        del tensor
        torch.full((1 << 18,), -1.0, device=device())
    for at, handle in enumerate(handles):
        result = handle.wait()
        torch.full((1 << 18,), -1.0, device=device())
        expected = float(sum(range(hvd.size())) + at * hvd.size())
        assert bool((result == expected).all()), (at, result[:3])


def test_lazily_negated_and_conjugated_tensors() -> None:
    """Imaginary parts of a conjugate, and conjugates: copying just the memory would be wrong."""
    for at in range(5):
        made = torch.complex(torch.ones(300), torch.full((300,), 2.0 + at)).to(device())
        assert made.conj().imag.is_neg() and made.conj().is_conj()
        result = hvd.allreduce(made.conj().imag, op=hvd.Sum, name=f"imaginary {at}")
        assert bool((result == -(2.0 + at) * hvd.size()).all()), result[:3]
        result = hvd.allreduce(made.conj(), op=hvd.Sum, name=f"conjugate {at}")
        assert bool((result == hvd.size() * complex(1, -2 - at)).all()), result[:3]


def test_gradients_that_are_parts_of_one_tensor() -> None:
    """A backward pass that accumulates one of them counts as a write to all."""
    torch.manual_seed(8)
    parts = [torch.nn.Parameter(torch.randn(2, 3, device=device())) for _ in range(3)]
    plain = torch.optim.SGD(parts, lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        plain, [(str(at), part) for at, part in enumerate(parts)], backward_passes_per_step=2
    )
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        for at in range(2):
            torch.cat(parts).sum().mul(hvd.rank() + at).backward()
        optimizer.synchronize()
        mean = sum(rank + at for rank in range(hvd.size()) for at in range(2)) / hvd.size()
        for part in parts:
            assert part.grad is not None
            torch.testing.assert_close(part.grad, torch.full_like(part, mean))
        with optimizer.skip_synchronize():
            optimizer.step()


def test_custom_streams() -> None:
    for at in range(10):
        stream = torch.cuda.Stream(device())
        big = torch.randn(512, 512, device=device())
        stream.wait_stream(torch.cuda.current_stream(device()))
        with torch.cuda.stream(stream):
            for _ in range(20):
                big = big @ big.T / 512
            tensor = torch.full((1 << 16,), float(hvd.rank() + at), device=device())
            tensor += big[0, 0] * 0
            handle = hvd.allreduce_async_(tensor, name=f"own stream {at}", op=hvd.Sum)
        assert handle.wait() is tensor
        expected = float(sum(range(hvd.size())) + at * hvd.size())
        assert bool((tensor + 0 == expected).all()), (at, tensor[:3])


def test_devices_beside_each_other() -> None:
    """Unnamed operations are matched by their order, on whatever device the tensors are."""
    handles = []
    for at in range(12):
        where = device() if (at + hvd.rank()) % 3 else torch.device("cpu")
        mine = torch.full((3,), float(at), device=where)
        handles.append((at, where, hvd.allreduce_async(mine, op=hvd.Sum)))
    for at, where, handle in handles:
        result = handle.wait()
        assert result.device == where and result.tolist() == [float(at * hvd.size())] * 3


def test_a_scaler_and_autocast() -> None:
    """One rank's gradient overflows: all ranks skip the step and reduce the scale."""
    torch.manual_seed(5)
    net = torch.nn.Linear(8, 1).to(device())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters()
    )
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for step in range(4):
        before = net.weight.detach().clone()
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            rows = torch.ones(4, 8, device=device()) * (hvd.rank() + 1)
            loss = net(rows).float().square().mean()
        overflows = step == 2
        if overflows and hvd.rank() == hvd.size() - 1:
            loss = loss * float("inf")
        scale = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, net.weight) == overflows
        assert scaler.get_scale() == (scale / 2 if overflows else scale)
    assert torch.equal(hvd.broadcast(net.weight.detach(), 0), net.weight)


@pytest.mark.parametrize("channels_last", [False, True])
def test_batch_norm_over_all_ranks(channels_last: bool) -> None:
    made = torch.Generator().manual_seed(11)
    rows = torch.randn(3 * hvd.size(), 4, 5, 5, generator=made).double()
    plain = torch.nn.BatchNorm2d(4).double()
    ours = hvd.SyncBatchNorm(4).double().to(device())
    whole = rows.clone().requires_grad_()
    plain(whole).square().sum().backward()
    own = rows[3 * hvd.rank() :][:3].to(device())
    if channels_last:
        own = own.contiguous(memory_format=torch.channels_last)
    own.requires_grad_()
    ours(own).square().sum().backward()
    assert whole.grad is not None and own.grad is not None
    torch.testing.assert_close(own.grad.cpu(), whole.grad[3 * hvd.rank() :][:3])
    torch.testing.assert_close(ours.running_var.cpu(), plain.running_var)


def test_the_state_of_an_optimizer() -> None:
    torch.manual_seed(hvd.rank())
    net = torch.nn.Linear(4, 4).to(device())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1 * (hvd.rank() + 1))
    net(torch.ones(1, 4, device=device())).sum().backward()
    optimizer.step()
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    for state in optimizer.state.values():
        assert state["exp_avg"].device == device()
    states = hvd.allgather_object([each.cpu() for each in optimizer.state[net.weight].values()])
    for state in states[1:]:
        assert all(map(torch.equal, state, states[0]))


def test_missing_and_sparse_gradients() -> None:
    """One rank uses another branch; a sparse result is in memory that GPU tensors use."""
    torch.manual_seed(6)
    table = torch.nn.Embedding(8, 4, sparse=True)
    ways = torch.nn.ModuleList(torch.nn.Linear(4, 1) for _ in range(3)).to(device())
    named = [*table.named_parameters(), *ways.named_parameters()]
    plain = torch.optim.SGD([parameter for _, parameter in named], lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, named)
    for step in range(4):
        optimizer.zero_grad()
        rows = table(torch.tensor([hvd.rank(), 7])).to(device())
        ways[(hvd.rank() + step) % 2](rows).square().mean().backward()
        optimizer.step()
        assert ways[2].weight.grad is None
    for _, parameter in named:
        same = hvd.broadcast(parameter.detach(), 0)
        assert torch.equal(same, parameter)
