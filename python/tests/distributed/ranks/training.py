"""Training with torch.distributed: DDP, FSDP2, HSDP, DTensor, checkpoints and more."""

from __future__ import annotations

import copy
import inspect
import os
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_metrics import ADDRESS, steps
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch as gradwire

ROWS, STEPS = 4, 5


def size() -> int:
    return dist.get_world_size()


def kind() -> str:
    """Returns the default device; see ``gpu_by_default``."""
    return torch.empty(0).device.type


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the batch of all ranks."""
    made = torch.Generator().manual_seed(step)
    rows = ROWS * size()
    return torch.randn(rows, 16, generator=made), torch.randn(rows, 4, generator=made)


def mine(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[ROWS * dist.get_rank() : ROWS * (dist.get_rank() + 1)]


def alone() -> tuple[nn.Module, list[float]]:
    """Runs the same training in one process, with the same data."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        inputs, targets = batch(step)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def train(model: nn.Module, accumulate: bool = False) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        inputs, targets = (mine(tensor) for tensor in batch(step))
        optimizer.zero_grad()
        if accumulate:
            assert isinstance(model, DistributedDataParallel)
            with model.no_sync():
                (nn.functional.mse_loss(model(inputs), targets) / 2).backward()
        loss = nn.functional.mse_loss(model(inputs), targets)
        (loss / 2 if accumulate else loss).backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(mean.item())
    return losses


def check(parameters: list[torch.Tensor], losses: list[float]) -> None:
    """Compares with single-process training, and the bits between all ranks (SAME)."""
    expected, expected_losses = alone()
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    for got, wanted in zip(parameters, expected.parameters()):
        torch.testing.assert_close(got.detach(), wanted.detach(), atol=1e-5, rtol=1e-5)
        every = [torch.empty_like(got) for _ in range(size())]
        dist.all_gather(every, got.detach())
        assert all(torch.equal(one, every[0]) for one in every)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"bucket_cap_mb": 0.001},
    ],
    ids=str,
)
def test_ddp(options: dict[str, Any]) -> None:
    model = DistributedDataParallel(network(), **options)
    check(list(model.parameters()), train(model))


def test_ddp_accumulates_gradients() -> None:
    model = DistributedDataParallel(network())
    check(list(model.parameters()), train(model, accumulate=True))


def test_ddp_with_unused_and_sparse_gradients() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.table = nn.Embedding(8, 4, sparse=True)
            self.ways = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, at: torch.Tensor, way: int) -> torch.Tensor:
            return self.ways[way](self.table(at))

    model = DistributedDataParallel(Model(), find_unused_parameters=True)
    rank = dist.get_rank()
    model(torch.tensor([rank, 7]), rank % 2).sum().backward()
    gradient = model.module.table.weight.grad
    assert gradient is not None and gradient.is_sparse
    dense = gradient.to_dense()
    assert dense[7].abs().sum() > 0 and all(
        dense[member].abs().sum() > 0 for member in range(size())
    )
    for way in list(model.module.ways)[: size()]:
        assert way.weight.grad is not None


@pytest.mark.parametrize("bucket_view", [False, True])
def test_ddp_hook(bucket_view: bool) -> None:
    model = DistributedDataParallel(
        network(), gradient_as_bucket_view=bucket_view, bucket_cap_mb=0.01
    )
    model.register_comm_hook(gradwire.DdpHookState(), gradwire.ddp_hook)
    before = steps() if ADDRESS else 0
    check(list(model.parameters()), train(model))
    assert not ADDRESS or steps() == before + STEPS


def test_ddp_hook_beside_another_backend() -> None:
    other = dist.new_group(backend="gloo")
    model = DistributedDataParallel(network(), process_group=other)
    model.register_comm_hook(None, gradwire.ddp_hook)
    check(list(model.parameters()), train(model))


def test_ddp_hook_with_compression() -> None:
    model = DistributedDataParallel(network())
    model.register_comm_hook(
        gradwire.DdpHookState(compression=gradwire.Compression.fp16), gradwire.ddp_hook
    )
    _, expected = alone()
    assert train(model) == pytest.approx(expected, rel=0.01)


def own_hooks() -> dict[str, Callable[[], tuple[Any, Any]]]:
    from torch.distributed.algorithms.ddp_comm_hooks import (
        default_hooks,
        powerSGD_hook,
        quantization_hooks,
    )

    def state(feedback: bool = True) -> Any:
        # Without a warm start, PyTorch's hook drops data of other buckets.
        return powerSGD_hook.PowerSGDState(
            None, start_powerSGD_iter=2, min_compression_rate=0.5, use_error_feedback=feedback
        )

    return {
        "allreduce": lambda: (None, default_hooks.allreduce_hook),
        "fp16": lambda: (None, default_hooks.fp16_compress_hook),
        "bf16": lambda: (None, default_hooks.bf16_compress_hook),
        "fp16 around": lambda: (
            None,
            default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
        ),
        "powerSGD": lambda: (state(), powerSGD_hook.powerSGD_hook),
        "powerSGD without feedback": lambda: (state(feedback=False), powerSGD_hook.powerSGD_hook),
        "powerSGD in fp16": lambda: (
            state(),
            default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
        ),
        "quantized": lambda: (None, quantization_hooks.quantization_pertensor_hook),
        "quantized by channel": lambda: (None, quantization_hooks.quantization_perchannel_hook),
    }


HOOKS = [
    *(
        "allreduce",
        "fp16",
        "bf16",
        "fp16 around",
        "powerSGD",
        "powerSGD without feedback",
        "powerSGD in fp16",
    ),
    *("quantized", "quantized by channel"),
]


@pytest.mark.parametrize("name", HOOKS)
def test_pytorchs_own_hooks(name: str) -> None:
    """Many buckets, so that callbacks of several run concurrently, in any order."""
    state, hook = own_hooks()[name]()
    source = inspect.getsource(hook)
    if ".cuda(" in source:
        pytest.skip("this PyTorch's hook needs a GPU")
    if "fut.wait()[0]" in source and "quantized" in name:
        pytest.skip("this PyTorch's hook takes NCCL's lists of lists, and fails over Gloo, too")
    model = DistributedDataParallel(network(), bucket_cap_mb=0.002)
    model.register_comm_hook(state, hook)
    losses = train(model)
    assert losses[0] == pytest.approx(alone()[1][0], rel=0.01) and losses[-1] == losses[-1]
    for parameter in model.parameters():
        every = [torch.empty_like(parameter) for _ in range(size())]
        dist.all_gather(every, parameter.detach())
        assert all(torch.equal(one, every[0]) for one in every)


def test_join_of_uneven_inputs() -> None:
    from torch.distributed.algorithms.join import Join

    model = DistributedDataParallel(network())
    with Join([model]):
        for step in range(1 + dist.get_rank()):
            inputs, targets = batch(step)
            nn.functional.mse_loss(model(mine(inputs)), mine(targets)).backward()


def test_sync_batch_norm() -> None:
    torch.manual_seed(3)
    rows = torch.randn(ROWS * size(), 5)
    expected = nn.BatchNorm1d(5)(rows)
    try:
        layer = nn.SyncBatchNorm(5)
        got = layer(mine(rows))
    except ValueError as error:
        assert "expected input tensor to be on" in str(error)  # PyTorch's needs a GPU
        return
    torch.testing.assert_close(got, mine(expected))


def fully_sharded() -> Callable[..., Any]:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this PyTorch has no FSDP2")
    return fsdp.fully_shard


def sharded(mesh: Any) -> nn.Module:
    fully_shard = fully_sharded()
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def test_fsdp2() -> None:
    model = sharded(init_device_mesh(kind(), (size(),)))
    losses = train(model)
    full = [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
    check(full, losses)


def test_hsdp() -> None:
    if size() % 2:
        return
    model = sharded(
        init_device_mesh(kind(), (2, size() // 2), mesh_dim_names=("replicate", "shard"))
    )
    losses = train(model)
    full = [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
    check(full, losses)


def test_dtensor() -> None:
    tensors = pytest.importorskip("torch.distributed.tensor")
    if not hasattr(tensors, "Partial"):
        pytest.skip("this PyTorch has another DTensor")
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(kind(), (size(),))
    torch.manual_seed(2)
    whole = torch.randn(4 * size(), 2 * size() + 1)
    for placement in (Shard(0), Shard(1), Replicate()):
        tensor = distribute_tensor(whole, mesh, [placement])
        for target in (Replicate(), Shard(0), Shard(1)):
            moved = tensor.redistribute(mesh, [target])
            assert torch.equal(moved.full_tensor(), whole)
    left = distribute_tensor(whole, mesh, [Shard(1)])
    right = distribute_tensor(whole.t().contiguous(), mesh, [Shard(0)])
    product = left @ right
    assert product.placements == (Partial(),)
    torch.testing.assert_close(product.full_tensor(), whole @ whole.t())


def test_tensor_parallel() -> None:
    if 64 % size():
        pytest.skip("the layers can't be divided evenly")
    if size() == 1 and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 3):
        pytest.skip("this PyTorch can't plan for a mesh of one")
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model, expected = network(), network()
    parallel = parallelize_module(
        model, init_device_mesh(kind(), (size(),)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    inputs, _ = batch(0)
    torch.testing.assert_close(parallel(inputs), expected(inputs))


def test_functional_collectives() -> None:
    from torch.distributed import _functional_collectives as functional

    everybody = list(range(size()))
    rank = dist.get_rank()
    tensor = torch.full((2, size()), float(rank))
    total = functional.all_reduce(tensor, "sum", everybody)
    assert torch.equal(functional.wait_tensor(total), torch.full((2, size()), sum(everybody) * 1.0))
    assert torch.equal(tensor, torch.full((2, size()), float(rank)))  # the input is unchanged
    gathered = functional.all_gather_tensor(tensor, 0, everybody)
    assert torch.equal(
        functional.wait_tensor(gathered)[:, 0], torch.arange(size() * 1.0).repeat_interleave(2)
    )
    scattered = functional.reduce_scatter_tensor(tensor, "avg", 1, everybody)
    torch.testing.assert_close(
        functional.wait_tensor(scattered), torch.full((2, 1), sum(everybody) / size())
    )
    moved = functional.all_to_all_single(torch.full((size(),), float(rank)), None, None, everybody)
    assert torch.equal(functional.wait_tensor(moved), torch.arange(size() * 1.0))
    several = functional.all_reduce_coalesced([tensor, tensor[0]], "max", everybody)
    assert all(bool((functional.wait_tensor(one) == size() - 1).all()) for one in several)
    assert bool(
        (
            functional.wait_tensor(functional.broadcast(tensor, size() - 1, everybody))
            == size() - 1
        ).all()
    )


def test_compiled_functional_collectives() -> None:
    from torch.distributed import _functional_collectives as functional

    @torch.compile(backend="aot_eager", fullgraph=True)
    def double(tensor: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(tensor * 2, "sum", list(range(size()))) + 1

    assert torch.equal(double(torch.ones(3)), torch.full((3,), 2.0 * size() + 1))


def test_differentiable_collectives() -> None:
    from torch.distributed.nn import functional

    tensor = torch.full((3,), float(dist.get_rank()), requires_grad=True)
    total = functional.all_reduce(tensor)
    total.sum().backward()
    assert torch.equal(tensor.grad, torch.full((3,), float(size())))  # type: ignore[arg-type]


def test_distributed_checkpoint() -> None:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = sharded(init_device_mesh(kind(), (size(),)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    inputs, targets = batch(0)
    nn.functional.mse_loss(model(mine(inputs)), mine(targets)).backward()
    optimizer.step()
    made: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    state, moments = get_state_dict(model, optimizer)
    checkpoint.save({"model": state, "optimizer": moments}, checkpoint_id=made[0])
    before = [p.full_tensor().clone() for p in model.parameters()]  # type: ignore[attr-defined]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state, moments = get_state_dict(model, optimizer)
    checkpoint.load({"model": state, "optimizer": moments}, checkpoint_id=made[0])
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=moments)
    for parameter, wanted in zip(model.parameters(), before):
        assert torch.equal(parameter.full_tensor(), wanted)  # type: ignore[attr-defined]
    assert os.listdir(made[0])


def test_zero_redundancy_optimizer() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(mine(inputs)), mine(targets)).backward()
        optimizer.step()
    for got, wanted in zip(model.parameters(), alone()[0].parameters()):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_models_can_be_copied_beside_it() -> None:
    """DDP holds the group, which a copy of the model must not copy."""
    model = DistributedDataParallel(network())
    assert copy.deepcopy(model.module)[0].weight.shape == (64, 16)


def test_a_model_loaded_by_one_rank() -> None:
    """FSDP2 models are usually loaded like this: the first rank reads and sends the shards."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    model = sharded(init_device_mesh(kind(), (size(),)))
    full: dict[str, Any] = {}
    if dist.get_rank() == 0:
        full = {name: torch.full_like(value, 3.0) for name, value in network().state_dict().items()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)
    for parameter in model.parameters():
        assert bool((parameter.full_tensor() == 3.0).all())  # type: ignore[attr-defined]


@pytest.mark.parametrize("own_group", [False, True])
def test_an_asynchronous_checkpoint(own_group: bool) -> None:
    """With its own group, it may run during training."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    fully_sharded()
    model = sharded(init_device_mesh(kind(), (size(),)))
    made: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    before = [p.full_tensor().clone() for p in model.parameters()]  # type: ignore[attr-defined]
    group = dist.new_group() if own_group else None
    state = {"model": get_model_state_dict(model)}
    saved: Any = checkpoint.async_save(state, checkpoint_id=made[0], process_group=group)
    if own_group:
        train(model)
    getattr(saved, "upload_completion", saved).result()
    dist.barrier()
    loaded = {"model": get_model_state_dict(model)}
    checkpoint.load(loaded, checkpoint_id=made[0], process_group=group)
    set_model_state_dict(model, loaded["model"])
    for parameter, wanted in zip(model.parameters(), before):
        assert torch.equal(parameter.full_tensor(), wanted)  # type: ignore[attr-defined]
