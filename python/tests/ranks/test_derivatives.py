"""Second gradients, gradients of single outputs, and gradients of extrema with factors."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from random_gradients import WHAT, check  # noqa: E402

import gradwire.torch as hvd  # noqa: E402


def of_rank(rank: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("what", WHAT)
def test_gradients_of_gradients(what: str) -> None:
    for seed in range(5):
        check(what, random.Random(seed), hvd.global_process_set)


def test_each_output_of_a_group_by_itself() -> None:
    groups: dict[str, Callable[[list[torch.Tensor]], list[torch.Tensor]]] = {
        "allreduce": lambda both: hvd.grouped_allreduce(both, op=hvd.Sum),
        "max": lambda both: hvd.grouped_allreduce(both, op=hvd.Max),
        "allgather": hvd.grouped_allgather,
        "reducescatter": hvd.grouped_reducescatter,
    }
    for name, group in groups.items():

        def both() -> list[torch.Tensor]:
            return [
                of_rank(at * 10 + hvd.rank(), hvd.size(), 2).requires_grad_() for at in range(2)
            ]

        apart, together = both(), both()
        for result in group(apart):
            (result**2).sum().backward()
        sum((result**2).sum() for result in group(together)).backward()
        for one, other in zip(apart, together):
            assert torch.equal(one.grad, other.grad), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", ["Min", "Max"])
def test_extrema_with_factors(op: str, dtype: torch.dtype) -> None:
    op = getattr(hvd, op)
    # Numbers whose products with these factors are not exact.
    own = (torch.arange(200) * 7919 % 211 * (hvd.rank() + 1) % 197 / 10).to(dtype).requires_grad_()
    result = hvd.allreduce(own, op=op, prescale_factor=-0.3, postscale_factor=1 / 3)
    result.sum().backward()
    # Each rank's gradient is 1: the ranks that had the extremum share the sum.
    shares = hvd.allreduce(own.grad.double(), op=hvd.Sum)
    factor = torch.full((200,), -0.1 * hvd.size(), dtype=torch.float64)
    torch.testing.assert_close(shares, factor, rtol=2e-2, atol=0)
    everything = hvd.allgather(own.detach().unsqueeze(0))
    best = everything.amin(0) if op == hvd.Max else everything.amax(0)
    assert (own.grad[own.detach() != best] == 0).all()
    expected = (best.double() * -0.1).to(dtype)
    torch.testing.assert_close(result.detach(), expected, rtol=2e-2, atol=1e-3)


def test_a_nan_is_an_extremum() -> None:
    own = torch.tensor([float("nan") if hvd.rank() == 0 else 1.0, 2.0], requires_grad=True)
    result = hvd.allreduce(own, op=hvd.Max)
    result.backward(torch.ones(2))
    expected = float(hvd.size()) if hvd.rank() == 0 else 0.0
    assert result[0].isnan() and own.grad[0] == expected and own.grad[1] == 1.0


def test_broadcast_of_non_finite_values() -> None:
    # On ranks other than the root, the gradient is zero.
    own = torch.ones(2, requires_grad=True)
    (hvd.broadcast(own, 0) * float("inf")).sum().backward()
    assert own.grad.tolist() == [float("inf") if hvd.rank() == 0 else 0.0] * 2


def penalised(layer: torch.nn.Module, given: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns a loss computed from the gradient of another loss."""
    result = layer(given)
    [slope] = torch.autograd.grad((result**3 * weights).sum(), given, create_graph=True)
    return (slope**2).sum() + (result**2).sum()


def test_gradients_of_gradients_of_batch_norm() -> None:
    whole, weights = of_rank(0, 4 * hvd.size(), 3), of_rank(1, 4 * hvd.size(), 3)
    mine = slice(4 * hvd.rank(), 4 * hvd.rank() + 4)
    ours, plain = hvd.SyncBatchNorm(3).double(), torch.nn.BatchNorm1d(3).double()
    part, everything = whole[mine].clone().requires_grad_(), whole.clone().requires_grad_()
    penalised(ours, part, weights[mine]).backward()
    penalised(plain, everything, weights).backward()
    torch.testing.assert_close(part.grad, everything.grad[mine])
    for one, other in zip(ours.parameters(), plain.parameters()):
        torch.testing.assert_close(hvd.allreduce(one.grad, op=hvd.Sum), other.grad)


def test_layers_that_only_some_ranks_have() -> None:
    import copy
    import pickle

    if hvd.rank() == 0:
        spare = hvd.SyncBatchNorm(2)
        spare.eval()(torch.ones(4, 2))
    layers = torch.nn.Sequential(hvd.SyncBatchNorm(2), torch.nn.Linear(2, 2), hvd.SyncBatchNorm(2))
    if hvd.rank() == hvd.size() - 1:
        layers = copy.deepcopy(layers)  # as for an average of weights
    torch.manual_seed(3)
    with torch.no_grad():
        layers[1].weight.copy_(torch.randn(2, 2))
        layers[1].bias.zero_()
    for _ in range(2):
        layers(of_rank(hvd.rank(), 4, 2).float()).square().sum().backward()
    layers = copy.deepcopy(layers)
    layers = pickle.loads(pickle.dumps(layers))
    layers(of_rank(hvd.rank(), 4, 2).float()).square().sum().backward()
    if hvd.size() > 2:
        # Each process set numbers its layers separately.
        some = hvd.add_process_set([0, hvd.size() - 1])
        if some.included():
            hvd.SyncBatchNorm(2, process_set=some)(of_rank(hvd.rank(), 4, 2).float())
        hvd.SyncBatchNorm(2)(of_rank(hvd.rank(), 4, 2).float())
        hvd.remove_process_set(some)
