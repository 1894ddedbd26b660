"""Programs that set PyTorch's default device, which Gradwire's own tensors must not use.

The default is ``meta`` here, where tensors have no data, so that nothing works by accident.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

import gradwire.torch as hvd  # noqa: E402


@pytest.fixture(autouse=True)
def default_device() -> Iterator[None]:
    with torch.device("meta"):
        assert torch.empty(1).is_meta
        yield


def own(*shape: int) -> torch.Tensor:
    return torch.full(shape, hvd.rank() + 1.0, device="cpu")


def total() -> float:
    return hvd.size() * (hvd.size() + 1) / 2


def test_every_function() -> None:
    size = hvd.size()
    assert hvd.allreduce(own(3), op=hvd.Sum).tolist() == [total()] * 3
    assert hvd.allgather(own(1)).tolist() == [each + 1.0 for each in range(size)]
    splits = torch.ones(size, dtype=torch.int32, device="cpu")
    moved, counts = hvd.alltoall(own(size), splits)
    assert moved.tolist() == [each + 1.0 for each in range(size)] and counts.tolist() == [1] * size
    moved, counts = hvd.alltoall_async(own(size), splits).wait()
    assert counts.tolist() == [1] * size
    assert hvd.broadcast_object({"a": own(2)}, 0)["a"].tolist() == [1.0, 1.0]
    entries = torch.sparse_coo_tensor(
        torch.tensor([[0, hvd.rank()]], device="cpu"), own(2, 3), (size, 3), device="cpu"
    )
    summed = hvd.sparse_allreduce_async(entries, name="sparse", op=hvd.Sum)()
    assert summed.to_dense().sum().item() == 2 * 3 * total()


def test_derivatives() -> None:
    for call in (
        lambda given: hvd.allgather(given),
        lambda given: hvd.alltoall(given, [1] * hvd.size()),
        lambda given: hvd.allreduce(given, op=hvd.Sum),
    ):
        given = own(hvd.size()).requires_grad_()
        result = call(given)
        (result[0] if isinstance(result, tuple) else result).sum().backward()
        assert given.grad is not None and not given.grad.is_meta


@pytest.mark.parametrize("kind", ["momentum", "lbfgs", "adasum"])
def test_training(kind: str) -> None:
    torch.manual_seed(4)
    with torch.device("cpu"):
        net = torch.nn.Sequential(
            torch.nn.Linear(4, 4), hvd.SyncBatchNorm(4), torch.nn.Linear(4, 1)
        ).append(torch.nn.Linear(4, 1))  # the last one has no gradient
    plain = {
        # Adam's step counts are on the default device.
        "momentum": lambda: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        "lbfgs": lambda: torch.optim.LBFGS(net.parameters(), max_iter=2),
        "adasum": lambda: torch.optim.SGD(net.parameters(), lr=0.1),
    }[kind]()
    op = hvd.Adasum if kind == "adasum" else hvd.Average
    optimizer = hvd.DistributedOptimizer(plain, net.named_parameters(), op=op)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        rows = torch.arange(12.0, device="cpu").view(3, 4) * (hvd.rank() + 1) / 12
        value = net[:3](rows).square().mean()
        value.backward()
        return value

    for _ in range(3):
        if kind == "lbfgs":
            optimizer.step(lambda: loss().item())
        else:
            loss()
            optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=hvd.size() - 1)
    for state in optimizer.state.values():
        assert not any(isinstance(each, torch.Tensor) and each.is_meta for each in state.values())
    weights = hvd.allgather(net[0].weight.detach().view(1, 16))
    assert all(torch.equal(each, weights[0]) for each in weights)
