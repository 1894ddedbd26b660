"""`check_consistent` finds what differs between ranks, on every rank alike."""

from __future__ import annotations

import pytest
import torch

import gradwire.torch as hvd


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def found(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    with pytest.raises(hvd.Disagreement) as raised:
        hvd.check_consistent(model, optimizer)
    texts = hvd.allgather_object(str(raised.value))
    assert len(set(texts)) == 1, texts
    return texts[0]


def last() -> bool:
    return hvd.rank() == hvd.size() - 1


def several() -> None:
    if hvd.size() == 1:
        pytest.skip("needs several ranks")


def test_equal_ranks_are_consistent() -> None:
    model, optimizer = trained()
    assert hvd.check_consistent(model, optimizer) > 0
    seen = [hvd.check_consistent(model, every=3) is not None for _ in range(7)]
    assert seen == [False, False, True, False, False, True, False], "it was called before"


def test_a_changed_bit_is_found() -> None:
    several()
    model, _ = trained()
    if last():
        with torch.no_grad():
            model[0].weight[1, 2] = -model[0].weight[1, 2]
    text = found(model)
    assert f"parameter '0.weight': rank {hvd.size() - 1} differs" in text, text
    assert "0.bias" not in text, text


def test_buffers_and_states_are_compared() -> None:
    several()
    model, optimizer = trained()
    if last():
        model[1].running_mean += 1
        optimizer.state[model[0].bias]["exp_avg"].add_(1)
        optimizer.param_groups[0]["lr"] = 0.2
    text = found(model, optimizer)
    for part in (
        f"buffer '1.running_mean': rank {hvd.size() - 1} differs",
        f"'exp_avg' of the optimizer for parameter '0.bias': rank {hvd.size() - 1} differs",
        f"'lr' of parameter group 0: rank {hvd.size() - 1} has 0.2, not 0.1",
    ):
        assert part in text, text


def test_other_shapes_and_names_are_found() -> None:
    several()
    torch.manual_seed(2)
    model = torch.nn.ParameterDict({"a": torch.zeros(2)})
    if last():
        model = torch.nn.ParameterDict({"a": torch.zeros(3), "b": torch.zeros(1)})
    text = found(model)
    rank = f"rank {hvd.size() - 1}"
    assert f"parameter 'a': {rank} has torch.float32 (3,), not torch.float32 (2,)" in text, text
    assert f"parameter 'b': {rank} has it, the others lack it" in text, text


def test_a_wrong_interval_is_refused() -> None:
    for every in (0, -1, True, 1.5):
        with pytest.raises(hvd.InvalidRequest, match="positive whole number"):
            hvd.check_consistent(torch.nn.Linear(1, 1), every=every)
