"""Tensors on a real GPU; skipped without one (test_staging.py simulates one)."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import gradwire.torch as hvd  # noqa: E402

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no GPU that PyTorch can use"
)


def device() -> Any:
    """Returns this rank's GPU. Ranks share GPUs if there are fewer GPUs than ranks."""
    return torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())


def test_operations_come_after_kernels_and_kernels_after_operations() -> None:
    for at in range(10):
        big = torch.randn(512, 512, device=device())
        tensor = torch.full((1 << 16,), float(hvd.rank()), device=device())
        for _ in range(20):
            big = big @ big.T / 512  # so that the tensor is computed late
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
