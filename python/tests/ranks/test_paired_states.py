"""``broadcast_optimizer_state``: what it pairs by name, and what tensors a state may have."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from launching import needs_torch  # noqa: E402
from small_training import bits_are_the_same_everywhere  # noqa: E402

import gradwire.torch as hvd  # noqa: E402

RATES = {"a": 0.5, "b": 0.5, "c": 0.25, "d": 0.125}


def in_some_order(values: list[Any]) -> list[Any]:
    """Returns the values in the reverse order on ranks with odd numbers."""
    return values[::-1] if hvd.rank() % 2 else values


def works_as_before() -> None:
    assert hvd.allreduce(torch.ones(1)).item() == 1.0


def is_refused(optimizer: torch.optim.Optimizer, root: int, why: str) -> None:
    """Checks that all ranks raise an error, keep their states, and go on."""
    before = repr(optimizer.state_dict())
    with pytest.raises(
        hvd.InvalidRequest, match=f"^broadcast_optimizer_state: nothing was sent.*{why}"
    ):
        hvd.broadcast_optimizer_state(optimizer, root)
    assert repr(optimizer.state_dict()) == before
    works_as_before()


@pytest.mark.parametrize("names", ["given", "own", "Adasum"])
def test_states_follow_the_names(names: str) -> None:
    if names == "own":
        needs_torch(2, 6, why="optimizers accept names since PyTorch 2.6")
    root = hvd.size() - 1
    parameters = {name: torch.nn.Parameter(torch.zeros(2)) for name in RATES}
    number = {name: at + 1.0 for at, name in enumerate(RATES)}
    groups = []
    for members in in_some_order([["a", "b"], ["c"], ["d"]]):
        pairs = [(name, parameters[name]) for name in in_some_order(members)]
        listed = pairs if names == "own" else [parameter for _, parameter in pairs]
        rate = RATES[members[0]] if hvd.rank() == root else 9.0
        groups.append({"params": listed, "lr": rate})
    optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.5)
    if hvd.rank() == root:
        for name, parameter in parameters.items():
            parameter.grad = torch.full_like(parameter, number[name])
        optimizer.step()
    op = hvd.Adasum if names == "Adasum" else hvd.Average
    given = None if names == "own" else in_some_order([*parameters.items()])
    optimizer = hvd.DistributedOptimizer(optimizer, given, op=op)
    hvd.broadcast_optimizer_state(optimizer, root)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == in_some_order([RATES["a"], RATES["c"], RATES["d"]])
    for name, parameter in parameters.items():
        momentum = optimizer.state[parameter]["momentum_buffer"]
        assert momentum.tolist() == [number[name]] * 2, name
    if names == "own":
        told = [group["param_names"] for group in optimizer.param_groups]
        assert told == in_some_order([in_some_order(["a", "b"]), ["c"], ["d"]])


def test_without_names_the_position_counts() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (1, 2)]
    optimizer = torch.optim.SGD(parameters, lr=1.0 + hvd.rank(), momentum=0.5)
    if hvd.rank() == 0:
        parameters[1].grad = torch.ones(2)
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert optimizer.state[parameters[1]]["momentum_buffer"].tolist() == [1.0, 1.0]


@pytest.mark.usefixtures("several_ranks")
def test_optimizers_that_can_not_be_paired() -> None:
    def sgd(*sizes: int) -> torch.optim.Optimizer:
        groups = [{"params": [torch.nn.Parameter(torch.zeros(size))]} for size in sizes]
        return torch.optim.SGD(groups, lr=float(hvd.rank()), momentum=0.5)

    def named(*groups: str, kind: Any = torch.optim.SGD) -> torch.optim.Optimizer:
        made = {name: torch.nn.Parameter(torch.zeros(2)) for name in "".join(groups)}
        listed = [{"params": [made[name] for name in group]} for group in groups]
        return hvd.DistributedOptimizer(kind(listed, lr=1.0 + hvd.rank()), made.items())

    odd = hvd.rank() == 1
    for root in (0, 1):
        is_refused(sgd(2, 3 if odd else 4), root, r"group 1 is torch.float32 \[4\] on rank 0, but")
        is_refused(sgd(*[2] * (2 if odd else 3)), root, "rank 1 lacks .*parameter 0 of group 2")
        both = [torch.nn.Parameter(torch.zeros(2, dtype=torch.double if odd else None))]
        is_refused(torch.optim.SGD(both, lr=0.1), root, "torch.float64")
        is_refused(named("ax" if odd else "ab"), root, "rank 1 lacks .*: b")
        cuts = ("ab", "c") if odd else ("a", "bc")
        is_refused(named(*cuts), root, "different groups")
        kind = torch.optim.Adagrad if odd else torch.optim.RMSprop
        is_refused(named("ab", kind=kind), root, "rank 0 has an optimizer RMSprop, but rank 1 Adag")
        flat = named("ba" if odd else "ab", kind=torch.optim.LBFGS)
        is_refused(flat, root, "different orders.*LBFGS")
    is_refused(sgd(2), hvd.rank() % 2, "rank 0 passed root_rank=0, but rank 1 1")


def test_a_state_with_sparse_tensors() -> None:
    torch.manual_seed(hvd.rank())
    table = torch.nn.Embedding(10, 3, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)

    def trained(of: Any, steps: int) -> None:
        for step in range(steps):
            of.zero_grad()
            table(torch.tensor([hvd.rank(), 3, 3 + step])).square().sum().backward()
            of.step()

    root = hvd.size() - 1
    if hvd.rank() == root:
        trained(optimizer, 3)
    optimizer = hvd.DistributedOptimizer(optimizer, table.named_parameters())
    hvd.broadcast_parameters(table.state_dict(), root)
    hvd.broadcast_optimizer_state(optimizer, root)
    momentum = optimizer.state[table.weight]["momentum_buffer"]
    told = hvd.allgather_object(
        (momentum.is_coalesced(), momentum._indices().tolist(), momentum._values().tolist())
    )
    assert momentum.is_sparse and told[0][1] and all(each == told[root] for each in told)
    trained(optimizer, 3)
    bits_are_the_same_everywhere(table)


def odd_tensors() -> dict[str, torch.Tensor]:
    """Returns tensors that a state may have."""
    with torch.inference_mode():
        inferred = torch.arange(3.0)
    twice = torch.sparse_coo_tensor([[2, 0, 2]], [1.0, 2.0, 3.0], (4,), check_invariants=True)
    return {
        "expanded": torch.arange(2.0)[:, None].expand(2, 3),
        "windows": torch.arange(5.0).unfold(0, 3, 1),
        "with gaps": torch.arange(6.0)[::2],
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "learns": torch.ones(2, requires_grad=True),
        "inferred": inferred,
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "number": torch.tensor(3, dtype=torch.int16),
        "empty": torch.ones(0, 3),
        "not coalesced": twice,
        "coalesced": twice.coalesce(),
        "without entries": torch.zeros(4, 2).to_sparse(),
        "of rows": torch.eye(3).to_sparse(1),
        "scalar": torch.tensor(2.0).to_sparse(),
        "expanded values": torch.sparse_coo_tensor(
            [[0, 1]], torch.ones(1).expand(2), (3,), check_invariants=True
        ),
    }


@pytest.mark.parametrize("kind", odd_tensors())
def test_tensors_of_a_state(kind: str) -> None:
    wanted = odd_tensors()[kind]
    own = torch.nn.Parameter(torch.zeros(2, dtype=wanted.dtype), requires_grad=False)
    optimizer, root = torch.optim.SGD([own], lr=0.1), hvd.size() - 1
    if hvd.rank() == root:
        optimizer.state[own] = {"nested": [{"odd": (wanted, 3)}]}
    with torch.device("meta"):  # the program's default device does not matter
        hvd.broadcast_optimizer_state(optimizer, root)
    given, number = optimizer.state[own]["nested"][0]["odd"]
    assert number == 3 and given.dtype == wanted.dtype and given.layout == wanted.layout
    if wanted.is_sparse:
        assert given.is_coalesced() == wanted.is_coalesced()
        assert torch.equal(given._indices(), wanted._indices())
    assert torch.equal(given.to_dense(), wanted.to_dense())


@pytest.mark.filterwarnings("ignore::UserWarning")  # some of these tensors are experimental
def test_states_that_can_not_be_sent() -> None:
    def broken(*_: Any) -> None:
        raise KeyError("broken hook")

    own = torch.nn.Parameter(torch.zeros(2))
    odd = {
        "sparse_csr": torch.eye(2).to_sparse_csr(),
        "complex32": torch.zeros(2, dtype=torch.complex32),
        "'meta'": torch.zeros(2, device="meta"),
        "nested": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    }
    if hasattr(torch, "quantize_per_tensor"):  # later releases may not have it
        odd["a quantized"] = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    for root in range(hvd.size()):
        mine = hvd.rank() == root
        for why, tensor in odd.items():
            optimizer = torch.optim.SGD([own], lr=0.1)
            if mine:
                optimizer.state[own] = {"odd": tensor}
            is_refused(optimizer, root, f"rank {root} .*its state: .*{why}")
        optimizer = torch.optim.SGD([own], lr=0.1)
        if mine:
            optimizer.param_groups[0]["iterator"] = (each for each in ())
        is_refused(optimizer, root, f"rank {root} .*generator")
        if mine:
            optimizer.register_state_dict_pre_hook(broken)
        with pytest.raises(hvd.InvalidRequest, match=f"rank {root} .*KeyError: 'broken hook'"):
            hvd.broadcast_optimizer_state(optimizer, root)
        works_as_before()
