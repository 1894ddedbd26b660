"""Each kind of tensor in each call: the right result, or a refusal on every rank.

A refused call has started nothing, so the next cell of the table follows at once. A call that waits
for another rank fails by the timeout of the group.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradwire.torch as hvd

Kind = Callable[[int], torch.Tensor]
Call = Callable[[torch.Tensor, list[torch.Tensor]], Any]
SHAPE = (12, 12)  # its rows can be divided among up to four ranks


def plain(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns a rank's values. All sums are exact, also in bfloat16."""
    values = (torch.arange(144) % 20).view(SHAPE) + 10 * rank + 1
    return values.to(dtype)


def conj(rank: int) -> torch.Tensor:
    real = plain(rank, torch.float64)
    return torch.complex(real, real + 1).conj()


def negative(rank: int) -> torch.Tensor:
    made = conj(rank).imag
    assert made.is_neg()
    return made


def expanded(rank: int) -> torch.Tensor:
    return plain(rank)[:1].expand(SHAPE)


def zero_strides(rank: int) -> torch.Tensor:
    return plain(rank).as_strided(SHAPE, (0, 0))


def overlapping(rank: int) -> torch.Tensor:
    return plain(rank).as_strided(SHAPE, (2, 1))


def gaps(rank: int) -> torch.Tensor:
    return torch.cat([plain(rank)] * 2, 1)[:, ::2].contiguous().repeat(2, 2)[::2, ::2]


def coo(rank: int) -> torch.Tensor:
    return torch.diag(plain(rank)[0]).to_sparse()


def csr(rank: int) -> torch.Tensor:
    return torch.diag(plain(rank)[0]).to_sparse_csr()


def bsr(rank: int) -> torch.Tensor:
    return torch.diag(plain(rank)[0]).to_sparse_bsr((2, 2))


def quantized(rank: int) -> torch.Tensor:
    return torch.quantize_per_tensor(plain(rank), 0.5, 3, torch.qint8)


def nested(rank: int) -> torch.Tensor:
    return torch.nested.nested_tensor([plain(rank), plain(rank)[:2]])


def jagged(rank: int) -> torch.Tensor:
    return torch.nested.nested_tensor([plain(rank), plain(rank)[:2]], layout=torch.jagged)


def meta(rank: int) -> torch.Tensor:
    return plain(rank).to("meta")


def mkldnn(rank: int) -> torch.Tensor:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("needs MKL-DNN")
    return plain(rank).to_mkldnn()


def two_tensor(rank: int) -> torch.Tensor:
    module = pytest.importorskip("torch.testing._internal.two_tensor")
    made: torch.Tensor = module.TwoTensor(plain(rank), plain(rank) + 1)
    return made


def masked(rank: int) -> torch.Tensor:
    return torch.masked.masked_tensor(plain(rank), plain(rank) > 5)


def dtensor(rank: int) -> torch.Tensor:
    module = pytest.importorskip("torch.distributed.tensor")
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    made: torch.Tensor = module.DTensor.from_local(plain(rank), mesh, [module.Shard(0)])
    return made


def asynchronous(rank: int) -> torch.Tensor:
    module = pytest.importorskip("torch.distributed._functional_collectives")
    made: torch.Tensor = module.AsyncCollectiveTensor(plain(rank))
    return made


def fake(rank: int) -> torch.Tensor:
    module = pytest.importorskip("torch._subclasses.fake_tensor")
    made: torch.Tensor = module.FakeTensorMode().from_tensor(plain(rank))
    return made


def functional(rank: int) -> torch.Tensor:
    return torch._to_functional_tensor(plain(rank))


def of_bytes(rank: int) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of the memory
        return torch.frombuffer(bytes(plain(rank).numpy().data), dtype=torch.float32).view(SHAPE)


def leaf(rank: int) -> torch.Tensor:
    return plain(rank).requires_grad_()


def computed(rank: int) -> torch.Tensor:
    return plain(rank).requires_grad_() * 1


def inference(rank: int) -> torch.Tensor:
    with torch.inference_mode():
        return plain(rank) + 0


class Own(torch.Tensor):
    """A subclass with ordinary memory."""


def subclass(rank: int) -> torch.Tensor:
    return plain(rank).as_subclass(Own)


# The kinds with ordinary memory: every call is right, or can't write to it.
ORDINARY = [conj, negative, expanded, zero_strides, overlapping, gaps, of_bytes, leaf, computed]
ORDINARY += [inference, subclass]
SPARSE = [coo, csr, bsr]
# The kinds without one dense memory.
OTHERS = [quantized, nested, jagged, meta, mkldnn, two_tensor, masked, dtensor, asynchronous]
OTHERS += [fake, functional]


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the values as an ordinary tensor."""
    with torch.no_grad():
        return tensor.detach().resolve_conj().resolve_neg().to_dense().clone()


_numbers = itertools.count()


def name() -> str:
    return f"kinds.{next(_numbers)}"


def at() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def total(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(parts).sum(0)


# Each call gets a tensor, and every rank's values; it returns what it got and what is right.


def hvd_allreduce(tensor: torch.Tensor, parts: list[torch.Tensor]) -> Any:
    return hvd.allreduce(tensor, name=name(), op=hvd.Sum), total(parts)


def hvd_allreduce_(tensor: torch.Tensor, parts: list[torch.Tensor]) -> Any:
    with torch.no_grad():
        return hvd.allreduce_(tensor, name=name(), op=hvd.Sum), total(parts)


def hvd_grouped_allreduce(tensor: torch.Tensor, parts: list[torch.Tensor]) -> Any:
    given = [torch.ones(2), tensor]
    return hvd.grouped_allreduce(given, name=name(), op=hvd.Sum)[1], total(parts)


def hvd_grouped_allreduce_(tensor: torch.Tensor, parts: list[torch.Tensor]) -> Any:
    with torch.no_grad():
        return hvd.grouped_allreduce_([tensor, torch.ones(2)], name=name(), op=hvd.Sum)[0], total(
            parts
        )


def hvd_compressed(tensor: torch.Tensor, parts: list[torch.Tensor]) -> Any:
    compression = hvd.Compression.bf16
    return hvd.allreduce(tensor, name=name(), op=hvd.Sum, compression=compression), total(parts)


def hvd_adasum(tensor: torch.Tensor, parts: list[torch.Tensor]) -> Any:
    return hvd.allreduce(tensor, name=name(), op=hvd.Adasum), None


def hvd_allgather(tensor: torch.Tensor, parts: list[torch.Tensor]) -> Any:
    return hvd.allgather(tensor, name=name()), torch.cat(parts)


def hvd_grouped_allgather(tensor: torch.Tensor, parts: list[torch.Tensor]) -> Any:
    return hvd.grouped_allgather([tensor], name=name())[0], torch.cat(parts)


def hvd_broadcast(tensor: torch.Tensor, parts: list[torch.Tensor]) -> Any:
    return hvd.broadcast(tensor, 0, name=name()), parts[0]


def hvd_broadcast_(tensor: torch.Tensor, parts: list[torch.Tensor]) -> Any:
    with torch.no_grad():
        return hvd.broadcast_(tensor, at()[1] - 1, name=name()), parts[-1]


def hvd_broadcast_parameters(tensor: torch.Tensor, parts: list[torch.Tensor]) -> Any:
    hvd.broadcast_parameters({name(): tensor}, 0)
    return tensor, parts[0]


def hvd_alltoall(tensor: torch.Tensor, parts: list[torch.Tensor]) -> Any:
    rank, size = at()
    got = hvd.alltoall(tensor, name=name())
    return got, torch.cat([part.chunk(size)[rank] for part in parts])


def hvd_reducescatter(tensor: torch.Tensor, parts: list[torch.Tensor]) -> Any:
    rank, size = at()
    return hvd.reducescatter(tensor, name=name(), op=hvd.Sum), total(parts).chunk(size)[rank]


def hvd_sparse_allreduce(tensor: torch.Tensor, parts: list[torch.Tensor]) -> Any:
    got = hvd.sparse_allreduce_async(tensor, name(), hvd.Sum)
    return hvd.synchronize(got), total(parts)


def all_reduce(tensor: torch.Tensor, parts: list[torch.Tensor]) -> Any:
    dist.all_reduce(tensor)
    return tensor, total(parts)


def broadcast(tensor: torch.Tensor, parts: list[torch.Tensor]) -> Any:
    dist.broadcast(tensor, 0)
    return tensor, parts[0]


def reduce(tensor: torch.Tensor, parts: list[torch.Tensor]) -> Any:
    dist.reduce(tensor, 0)
    return (tensor, total(parts)) if at()[0] == 0 else (torch.ones(1), torch.ones(1))


def all_gather(tensor: torch.Tensor, parts: list[torch.Tensor]) -> Any:
    got = [torch.zeros_like(part) for part in parts]
    dist.all_gather(got, tensor)
    return torch.stack(got), torch.stack(parts)


def all_gather_into_list(tensor: torch.Tensor, parts: list[torch.Tensor]) -> Any:
    """The outputs are of the kind."""
    rank, _ = at()
    got = [torch.zeros_like(part) for part in parts]
    got[0] = tensor
    dist.all_gather(got, parts[rank])
    return torch.stack([dense(each) for each in got]), torch.stack(parts)


def all_gather_into_tensor(tensor: torch.Tensor, parts: list[torch.Tensor]) -> Any:
    got = torch.zeros_like(torch.cat(parts))
    dist.all_gather_into_tensor(got, tensor)
    return got, torch.cat(parts)


def gather(tensor: torch.Tensor, parts: list[torch.Tensor]) -> Any:
    got = [torch.zeros_like(part) for part in parts] if at()[0] == 0 else None
    dist.gather(tensor, got)
    return (torch.stack(got), torch.stack(parts)) if got else (torch.ones(1), torch.ones(1))


def scatter(tensor: torch.Tensor, parts: list[torch.Tensor]) -> Any:
    dist.scatter(tensor, [part + 1 for part in parts] if at()[0] == 0 else None)
    return tensor, parts[at()[0]] + 1


def reduce_scatter_tensor(tensor: torch.Tensor, parts: list[torch.Tensor]) -> Any:
    rank, size = at()
    got = torch.zeros_like(parts[0].chunk(size)[rank])
    dist.reduce_scatter_tensor(got, tensor)
    return got, total(parts).chunk(size)[rank]


def reduce_scatter_into(tensor: torch.Tensor, parts: list[torch.Tensor]) -> Any:
    """The output is of the kind."""
    dist.reduce_scatter(tensor, parts)
    return tensor, parts[at()[0]] * at()[1]


def all_to_all_single(tensor: torch.Tensor, parts: list[torch.Tensor]) -> Any:
    rank, size = at()
    got = torch.zeros_like(parts[0])
    dist.all_to_all_single(got, tensor)
    return got, torch.cat([part.chunk(size)[rank] for part in parts])


def messages(tensor: torch.Tensor, parts: list[torch.Tensor]) -> Any:
    """The ranks send in a ring."""
    rank, size = at()
    got = torch.zeros_like(parts[0])
    if size == 1:
        return got, got
    sent = dist.isend(tensor, (rank + 1) % size)
    dist.recv(got, (rank - 1) % size)
    assert sent is not None
    sent.wait()
    return got, parts[rank - 1]


def received(tensor: torch.Tensor, parts: list[torch.Tensor]) -> Any:
    """Messages into tensors of the kind."""
    rank, size = at()
    if size == 1:
        return torch.ones(1), torch.ones(1)
    wait = dist.irecv(tensor, (rank - 1) % size)
    dist.send(parts[rank], (rank + 1) % size)
    assert wait is not None
    wait.wait()
    return tensor, parts[rank - 1]


MOVES = [hvd_allgather, hvd_grouped_allgather, hvd_broadcast, hvd_broadcast_]
MOVES += [hvd_broadcast_parameters, hvd_alltoall, broadcast, all_gather, all_gather_into_tensor]
MOVES += [all_gather_into_list, gather, scatter, all_to_all_single, messages, received]
REDUCES = [hvd_allreduce, hvd_allreduce_, hvd_grouped_allreduce, hvd_grouped_allreduce_]
REDUCES += [hvd_compressed, hvd_adasum, hvd_reducescatter, hvd_sparse_allreduce, all_reduce]
REDUCES += [reduce, reduce_scatter_tensor, reduce_scatter_into]


CALLS: list[Call] = [*MOVES, *REDUCES]
ANYWHERE = (ValueError, RuntimeError, NotImplementedError, TypeError)


def outcome(kind: Kind, call: Call, parts: list[torch.Tensor]) -> str:
    """Returns ``right``, or why the call was refused."""
    try:
        got, right = call(kind(at()[0]), parts)
    except hvd.InvalidRequest as error:
        return f"refused: {error}"
    except ANYWHERE as error:
        # PyTorch has refused the tensor before it called the backend.
        assert not isinstance(error, hvd.GradwireError), error
        return f"refused by PyTorch: {error}"
    if right is not None:
        torch.testing.assert_close(dense(got), right, rtol=0, atol=0, check_dtype=False)
    return "right"


def table(kind: Kind, parts: list[torch.Tensor]) -> dict[str, str]:
    """Makes all calls; returns the outcomes, which are the same on all ranks."""
    found: dict[str, str] = {}
    for call in CALLS:
        found[call.__name__] = outcome(kind, call, parts)
    every: list[Any] = [None] * at()[1]
    dist.all_gather_object(every, {call: what == "right" for call, what in found.items()})
    assert all(each == every[0] for each in every), every
    return found


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of some kinds
        yield


WRITES = {"hvd_allreduce_", "hvd_grouped_allreduce_", "hvd_broadcast_", "hvd_broadcast_parameters"}
WRITES |= {"broadcast", "all_gather_into_list", "scatter", "received", "all_reduce", "reduce"}
WRITES |= {"reduce_scatter_into"}
# A single rank sends no messages.
ALONE = {"messages", "received"}


@pytest.mark.parametrize("kind", ORDINARY)
def test_ordinary_memory(kind: Kind) -> None:
    found = table(kind, [dense(kind(rank)) for rank in range(at()[1])])
    assert "sparse COO" in found.pop("hvd_sparse_allreduce")
    for call, what in found.items():
        if kind in (expanded, zero_strides) and call in WRITES:
            # With a single rank, many calls write nothing.
            assert "share memory" in what or (at()[1] == 1 and what == "right"), (call, what)
        elif kind is conj and what.startswith("refused"):
            # PyTorch sends complex numbers as pairs, and does not take lazily conjugated ones.
            assert "adasum of c128" in what or "view_as_real" in what, (call, what)
        else:
            assert what == "right", (call, what)


@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_tensors(kind: Kind) -> None:
    found = table(kind, [dense(kind(rank)) for rank in range(at()[1])])
    right = {"hvd_sparse_allreduce", "all_reduce"} if kind is coo else set()
    right |= ALONE if at()[1] == 1 else set()
    assert {call for call, what in found.items() if what == "right"} == right, found


@pytest.mark.parametrize("kind", OTHERS)
def test_tensors_without_dense_memory(kind: Kind) -> None:
    found = table(kind, [plain(rank) for rank in range(at()[1])])
    right = {call for call, what in found.items() if what == "right"}
    # A compressor may have made an ordinary tensor.
    assert right <= {"hvd_compressed"} | (ALONE if at()[1] == 1 else set()), found


# Kinds as gradients.


class Give(torch.autograd.Function):
    """A function of a parameter with a given gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return parameter.detach().abs().sum()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[torch.Tensor, None]:
        return ctx.gradient, None


class Net(torch.nn.Module):
    def __init__(self, like: torch.Tensor) -> None:
        super().__init__()
        self.parameter = torch.nn.Parameter(torch.zeros(like.shape, dtype=like.dtype))

    def forward(self, gradient: list[torch.Tensor]) -> Any:
        return Give.apply(self.parameter, gradient[0])


def of_ddp(net: Net, gradient: torch.Tensor) -> torch.Tensor:
    model = torch.nn.parallel.DistributedDataParallel(net)
    model([gradient]).backward()
    assert net.parameter.grad is not None
    return net.parameter.grad


def of_optimizer(net: Net, gradient: torch.Tensor) -> torch.Tensor:
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters()
    )
    net([gradient]).backward()
    optimizer.step()
    return -net.parameter.detach()


@pytest.mark.parametrize("use", [of_ddp, of_optimizer])
@pytest.mark.parametrize("kind", [*ORDINARY, coo])
def test_gradients(kind: Kind, use: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
    parts = [dense(kind(rank)) for rank in range(at()[1])]
    net = Net(parts[0])
    if kind is coo and use is of_ddp:
        with pytest.raises(NotImplementedError):  # PyTorch's DDP takes none for a dense parameter
            use(net, kind(at()[0]))
    else:
        torch.testing.assert_close(dense(use(net, kind(at()[0]))), total(parts) / at()[1])
    hvd.barrier()


@pytest.mark.parametrize("use", [of_ddp, of_optimizer])
@pytest.mark.parametrize("kind", [csr, bsr, nested, jagged, meta, mkldnn, fake, functional])
def test_gradients_that_are_refused(
    kind: Kind, use: Callable[[Net, torch.Tensor], torch.Tensor]
) -> None:
    gradient = kind(at()[0])
    with pytest.raises((*ANYWHERE, AssertionError)) as refused:
        use(Net(plain(0)), gradient)
    assert not isinstance(refused.value, (hvd.Disagreement, hvd.WaitTimeout)), refused.value
    hvd.barrier()


@pytest.mark.parametrize("kind", [two_tensor, masked])
def test_gradients_that_wrap_another_tensor(kind: Kind) -> None:
    if at()[1] == 1:
        pytest.skip("a single rank exchanges no gradients")
    with pytest.raises(hvd.InvalidRequest, match="no memory of its own"):
        of_optimizer(Net(plain(0)), kind(at()[0]))
    hvd.barrier()
