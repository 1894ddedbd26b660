"""Functions that synchronize ranks: parameters, optimizer states, objects."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from small_training import bits_are_the_same_everywhere  # noqa: E402

import gradwire.torch as hvd  # noqa: E402


def test_parameters_in_every_form() -> None:
    def net() -> torch.nn.Module:
        torch.manual_seed(hvd.rank())
        return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))

    forms = [
        lambda net: net.state_dict(),
        lambda net: list(net.named_parameters()),
        lambda net: net.named_parameters(),
        lambda net: list(net.parameters()),
        lambda net: net.parameters(),
        lambda net: [None, *net.parameters()][1:],
    ]
    for form in forms:
        made = net()
        hvd.broadcast_parameters(form(made), 0)
        bits_are_the_same_everywhere(made)
    for wrong in (3, torch.zeros(2), [3], ["ab"], [("a", 3)]):
        with pytest.raises(ValueError, match="broadcast"):
            hvd.broadcast_parameters(wrong, 0)


def test_tensors_that_can_not_be_exchanged() -> None:
    """Every rank gets the error, whichever rank has the tensor."""

    def refuses(call: str, who: int, why: str) -> Any:
        return pytest.raises(hvd.InvalidRequest, match=f"{call}: .* rank {who} .*{why}")

    for who in range(hvd.size()):
        for root in {0, who}:
            mine = hvd.rank() == who
            model = torch.nn.Linear(3, 2, device="meta" if mine else "cpu")
            with refuses("broadcast_parameters", who, "parameter.bias: .*'meta'"):
                hvd.broadcast_parameters(model.state_dict(), root)
            sparse = torch.eye(2).to_sparse() if mine else torch.eye(2)
            with refuses("broadcast_parameters", who, "sparse"):
                hvd.broadcast_parameters({"eye": sparse}, root)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            with refuses("broadcast_optimizer_state", who, "'meta'"):
                hvd.broadcast_optimizer_state(optimizer, root)
            expanded = torch.zeros(1).expand(3) if mine else torch.zeros(3)
            with refuses("broadcast_parameters", who, "clone"):
                hvd.broadcast_parameters({"expanded": expanded}, root)


def test_parameters_that_differ_between_the_ranks() -> None:
    last = hvd.size() - 1
    if last == 0:
        pytest.skip("needs two ranks")
    net, wide, long = (
        torch.nn.Linear(given, 2, dtype=dtype).state_dict()
        for given, dtype in ((3, torch.float32), (3, torch.float64), (4, torch.float64))
    )
    more = {**net, "more": torch.ones(1)}
    cases: list[tuple[Any, Any, int, str]] = [
        (net, more, 0, "rank 0 lacks parameters that another rank has: parameter.more"),
        (wide, net, 0, rf"bias is .*64 \[2\] .*32 .*rank {last}"),
        (wide, long, 0, rf"weight is .* \[2, 3\] on rank 0, but .* \[2, 4\] on rank {last}"),
        (wide, wide, hvd.rank(), "rank 0 passed root_rank=0, but rank 1 1"),
    ]
    for others, its, root, why in cases:
        given = its if hvd.rank() == last else others
        for _ in range(2):
            with pytest.raises(
                hvd.InvalidRequest, match=f"broadcast_parameters: nothing was sent, .*{why}"
            ):
                hvd.broadcast_parameters(given, root)


def test_names_that_occur_twice() -> None:
    one, two = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    both = [*one.named_parameters(), *two.named_parameters()]
    for _ in range(2):
        with pytest.raises(
            hvd.InvalidRequest, match=r"nothing was sent, .* several parameters named weight, bias"
        ):
            hvd.broadcast_parameters(both, 0)
    hvd.broadcast_parameters(one.named_parameters(), 0)


def test_texts_in_the_state_of_an_optimizer() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {"kind": "a", "list": ["b", 3]} if hvd.rank() == 0 else {}
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert optimizer.state[parameter] == {"kind": "a", "list": ["b", 3]}


def test_arguments_that_are_wrong_on_one_rank() -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for who in range(hvd.size()):
        mine = hvd.rank() == who
        with pytest.raises(hvd.InvalidRequest, match=f"rank {who} .*extra is a int, not a tensor"):
            hvd.broadcast_parameters({**net.state_dict(), "extra": 3 if mine else torch.ones(1)}, 0)
        with pytest.raises(hvd.InvalidRequest, match=f"rank {who} .*root_rank=-1"):
            hvd.broadcast_parameters(net.state_dict(), -1 if mine else 0)
        with pytest.raises(hvd.InvalidRequest, match=f"rank {who} .*optimizer is a Linear"):
            hvd.broadcast_optimizer_state(net if mine else optimizer, 0)
        with pytest.raises(hvd.InvalidRequest, match=f"rank {who} .*root_rank=-1"):
            hvd.broadcast_optimizer_state(optimizer, -1 if mine else 0)


OPTIMIZERS = ["NAdam", "ASGD", "Adam", "SGD", "RAdam", "Adagrad", "LBFGS"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_keeps_its_types(name: str, dtype: torch.dtype) -> None:
    def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value = net(torch.ones(2, 3, dtype=dtype)).square().sum()
            value.backward()
            return value

        for _ in range(steps):
            optimizer.step(loss)

    torch.manual_seed(4)
    net = torch.nn.Linear(3, 2).to(dtype)
    made = getattr(torch.optim, name)(net.parameters(), lr=0.01)
    if hvd.rank() == 0:
        train(net, made, 3)
    hvd.broadcast_parameters(net.state_dict(), 0)
    hvd.broadcast_optimizer_state(made, 0)

    def types(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return str(value.dtype)
        if isinstance(value, dict):
            return {key: types(inner) for key, inner in value.items()}
        return (
            [types(inner) for inner in value]
            if isinstance(value, (list, tuple))
            else type(value).__name__
        )

    everybody = hvd.allgather_object(types(made.state_dict()["state"]))
    assert all(one == everybody[0] for one in everybody), everybody
    train(net, made, 3)
    bits_are_the_same_everywhere(net)


def test_objects_after_a_join() -> None:
    for at in range(3):
        # Some ranks have made more calls than others when they join.
        for batch in range(hvd.rank() + at):
            everybody = hvd.allgather_object((hvd.rank(), batch))
            assert (hvd.rank(), batch) in everybody
        hvd.join()
        assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
        assert hvd.broadcast_object(hvd.rank(), hvd.size() - 1) == hvd.size() - 1


def test_objects_of_process_sets_that_come_and_go() -> None:
    if hvd.size() < 3:
        pytest.skip("needs three ranks")
    for first in range(hvd.size() - 1):
        # A rank of an earlier set has made calls that the other rank has not.
        pair = hvd.add_process_set([first, first + 1])
        if pair.included():
            for _ in range(2):
                assert hvd.allgather_object(hvd.rank(), process_set=pair) == pair.ranks
            assert hvd.broadcast_object(hvd.rank(), first + 1, process_set=pair) == first + 1
        hvd.remove_process_set(pair)
