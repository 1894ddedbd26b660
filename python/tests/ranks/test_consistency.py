"""``check_consistency``: ranks that differ are named, with what differs."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import gradwire.torch as hvd  # noqa: E402


def made(optimizer: Any = torch.optim.Adam) -> tuple[Any, Any]:
    """Returns a small model and its optimizer after a step, equal on all ranks."""
    torch.manual_seed(7)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    steps = optimizer(net.parameters(), lr=0.1)
    net(torch.ones(2, 3)).sum().backward()
    steps.step()
    return net, steps


def test_equal_ranks_pass() -> None:
    net, steps = made()
    assert hvd.check_consistency(net, steps) > 0
    # Other names of one parameter, other orders of groups' members: values are paired by name.
    tied = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2)})
    tied["b"] = tied["a"]
    torch.nn.init.ones_(tied["a"].weight)
    torch.nn.init.ones_(tied["a"].bias)
    order = list(tied.parameters())
    shuffled = order if hvd.rank() == 0 else order[::-1]
    hvd.check_consistency(tied, torch.optim.SGD(shuffled, lr=0.1, momentum=0.9))
    # Another order of the groups.
    groups: list[dict[str, Any]] = [{"params": [order[0]], "lr": 0.1}, {"params": [order[1]]}]
    hvd.check_consistency(
        tied, torch.optim.SGD(groups if hvd.rank() == 0 else groups[::-1], lr=0.2)
    )
    hvd.check_consistency(torch.nn.ReLU())


@pytest.mark.usefixtures("several_ranks")
def test_each_kind_of_difference_is_named() -> None:
    last = hvd.size() - 1

    def parameter(net: Any, steps: Any) -> None:
        net[2].weight.data[0, 1] += 1e-7

    def buffer(net: Any, steps: Any) -> None:
        net[1].running_mean.add_(1)

    def moment(net: Any, steps: Any) -> None:
        steps.state[net[0].bias]["exp_avg"].neg_()

    def count(net: Any, steps: Any) -> None:
        steps.state[net[0].bias]["step"] += 1

    def rate(net: Any, steps: Any) -> None:
        steps.param_groups[0]["lr"] = 0.2

    def dtype(net: Any, steps: Any) -> None:
        net[0].bias.data = net[0].bias.data.double()

    def added(net: Any, steps: Any) -> None:
        net.register_parameter("extra", torch.nn.Parameter(torch.zeros(1)))

    def lost(net: Any, steps: Any) -> None:
        del net[1].running_var

    for change, name in [
        (parameter, "2.weight"),
        (buffer, "1.running_mean"),
        (moment, "exp_avg of 0.bias"),
        (count, "step of 0.bias"),
        (rate, "lr of the group of 0.bias"),
        (dtype, "0.bias"),
        (added, "extra"),
        (lost, "1.running_var"),
    ]:
        net, steps = made()
        if hvd.rank() == last:
            change(net, steps)
        if change is buffer:
            hvd.check_consistency(copy.deepcopy(net), steps, buffers=False)
        with pytest.raises(hvd.Disagreement) as caught:
            hvd.check_consistency(net, steps)
        # Two ranks have no majority, so the first counts as right.
        assert (caught.value.rank, caught.value.tensor) == (last, name), caught.value
        assert f"rank {last}: 1 of " in str(caught.value)
        assert ("buffers=False" in str(caught.value)) == (change in (buffer, lost))


@pytest.mark.usefixtures("several_ranks")
def test_a_model_of_its_own_is_cut_to_five() -> None:
    torch.manual_seed(hvd.rank())
    net = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(6)))
    with pytest.raises(hvd.Disagreement, match=r"ranks? 1.*: 12 of 12 values: .* and 7 more"):
        hvd.check_consistency(net)


def test_every_nth_call_compares() -> None:
    net, steps = made(torch.optim.SGD)
    compared = [hvd.check_consistency(net, steps, every=3) > 0 for _ in range(7)]
    assert compared == [True, False, False, True, False, False, True]


def test_what_can_not_be_compared_is_refused() -> None:
    for wrong in (0, -1, 1.5):
        with pytest.raises(hvd.InvalidRequest, match="every"):
            hvd.check_consistency(torch.nn.ReLU(), every=wrong)
    with pytest.raises(hvd.InvalidRequest, match=r"model is a dict, not a torch\.nn\.Module"):
        hvd.check_consistency({})
    for who in range(hvd.size()):
        mine = hvd.rank() == who
        net = torch.nn.Linear(3, 2, device="meta" if mine else "cpu")
        with pytest.raises(hvd.InvalidRequest, match=f"rank {who} .*weight has no data"):
            hvd.check_consistency(net)
        net = torch.nn.LazyLinear(2) if mine else torch.nn.Linear(3, 2)
        with pytest.raises(hvd.InvalidRequest, match=f"rank {who} .*weight has no data"):
            hvd.check_consistency(net)
        given: Any = "adam" if mine else None
        with pytest.raises(hvd.InvalidRequest, match=f"rank {who} .*optimizer is a str"):
            hvd.check_consistency(torch.nn.ReLU(), given)


def test_a_distributed_optimizer_in_training() -> None:
    torch.manual_seed(3)
    net = torch.nn.Linear(3, 1)
    steps = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        named_parameters=net.named_parameters(),
    )
    for number in range(4):
        steps.zero_grad()
        net(torch.full((2, 3), float(hvd.rank() + number))).sum().backward()
        # While gradients are exchanged.
        hvd.check_consistency(net, steps)
        steps.step()
        hvd.check_consistency(net, steps)


def test_sparse_and_unusual_values() -> None:
    net = torch.nn.Module()
    net.register_buffer("sparse", torch.eye(2).to_sparse())
    net.register_buffer("empty", torch.zeros(0, 3))
    net.register_buffer("conj", torch.tensor([1 + 2j]).conj())
    net.register_buffer("nan", torch.tensor(float("nan")))
    hvd.check_consistency(net)
