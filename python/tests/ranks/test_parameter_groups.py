"""In a DistributedOptimizer's groups, only access to the parameters waits for gradients.

A single rank reads what must not wait, then takes part in another collective. If it waited, the
ranks would deadlock.
"""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from small_training import (  # noqa: E402
    Forked,
    adam,
    batch,
    bits_are_the_same_everywhere,
    distributed,
    loss_of,
    model,
    parameters_are_near,
    part,
    sgd,
)

import gradwire.torch as hvd  # noqa: E402


def write_rate(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 1.0
        group.update(lr=group["lr"])
        group.setdefault("lr", 0.5)


READS: dict[str, Callable[[Any], Any]] = {
    "rate": lambda optimizer: [group["lr"] for group in optimizer.param_groups],
    "write": write_rate,
    "length": lambda optimizer: [len(group["params"]) for group in optimizer.param_groups],
    "group": lambda optimizer: [dict(group) for group in optimizer.param_groups],
    "items": lambda optimizer: [list(group.items()) for group in optimizer.param_groups],
    "repr": repr,
    "state": lambda optimizer: optimizer.state_dict(),
    "load": lambda optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    "copy": lambda optimizer: copy.deepcopy(optimizer.param_groups),
    "pickle": pickle.dumps,
    "save": lambda optimizer: torch.save(optimizer.state_dict(), io.BytesIO()),
}


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("how", [*READS])
def test_one_rank_reads(how: str, make: Callable[[Any], Any]) -> None:
    expected, net = model(), model()
    plain, ours = make(expected), distributed(net, make)
    for step in range(3):
        plain.zero_grad(), ours.zero_grad()
        loss_of(expected, *batch(step)).backward()
        loss = loss_of(net, *map(part, batch(step)))
        loss.backward()
        if hvd.rank() == 0:
            READS[how](ours)
        hvd.allreduce(loss.detach(), name="loss")
        plain.step(), ours.step()
    parameters_are_near(net, expected)
    bits_are_the_same_everywhere(net)


def test_a_thread_saves_the_state() -> None:
    """Meanwhile, other threads wait for gradients as before."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("p", parameter)])
    saving, done = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        saving.set()
        assert done.wait(60)

    optimizer.register_state_dict_pre_hook(hold)
    thread = threading.Thread(target=optimizer.state_dict)
    thread.start()
    assert saving.wait(60)
    (parameter.sum() * (hvd.rank() + 1)).backward()
    [only] = optimizer.param_groups[0]["params"]
    gradient = only.grad.tolist()
    done.set()
    thread.join()
    assert gradient == [(hvd.size() + 1) / 2] * 2
    optimizer.step()
    bits_are_the_same_everywhere(torch.nn.ParameterList([parameter]))


def test_one_rank_reads_between_two_passes() -> None:
    first, second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, second], lr=1.0))
    for step in range(2):
        optimizer.zero_grad()
        (first.sum() * (hvd.rank() + 1.0)).backward()
        if hvd.rank() == 0:
            assert optimizer.param_groups[0]["lr"] == 1.0
        (second.sum() * (hvd.rank() + 1.0)).backward()
        optimizer.step()
        expected = [-(step + 1) * (hvd.size() + 1) / 2] * 2
        assert first.tolist() == second.tolist() == expected


def extended(optimizer: Any) -> list[Any]:
    result: list[Any] = []
    for group in optimizer.param_groups:
        result += group["params"]
    return result


def from_values(optimizer: Any) -> list[Any]:
    values = optimizer.param_groups[0].values()
    return [*next(value for value in values if isinstance(value, list))]


PARAMETERS: dict[str, Callable[[Any], list[Any]]] = {
    "loop": lambda optimizer: [p for group in optimizer.param_groups for p in group["params"]],
    "chain": lambda optimizer: [
        *itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    ],
    "sum": lambda optimizer: [] + optimizer.param_groups[0]["params"],  # as sum(lists, []) does
    "plus": lambda optimizer: optimizer.param_groups[0]["params"] + [],
    "list": lambda optimizer: list(optimizer.param_groups[0]["params"]),
    "tuple": lambda optimizer: list(tuple(optimizer.param_groups[0]["params"])),
    "extend": extended,
    "copy": lambda optimizer: optimizer.param_groups[0]["params"].copy(),
    "slice": lambda optimizer: optimizer.param_groups[0]["params"][:],
    "one": lambda optimizer: [optimizer.param_groups[0]["params"][0]],
    "backwards": lambda optimizer: [*reversed(optimizer.param_groups[0]["params"])],
    "get": lambda optimizer: [*optimizer.param_groups[0].get("params")],
    "dict": lambda optimizer: [*dict(optimizer.param_groups[0])["params"]],
    "or": lambda optimizer: [*(optimizer.param_groups[0] | {})["params"]],
    "values": from_values,
}


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("how", [*PARAMETERS])
def test_parameters_have_their_gradients(how: str, loaded: bool) -> None:
    net = Forked()  # no rank uses one of its layers
    optimizer = distributed(net)
    if loaded:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(2):
        optimizer.zero_grad()
        net(part(batch(step)[0]), left=True).mean().backward()
        gradients = [p.grad for p in PARAMETERS[how](optimizer) if p.grad is not None]
        mine = torch.cat([torch.zeros(1), *(gradient.flatten() for gradient in gradients)])
        assert gradients
        for theirs in hvd.allgather(mine.unsqueeze(0), name="gradients"):
            assert torch.equal(theirs, mine)
        optimizer.step()
    bits_are_the_same_everywhere(net)


def test_pickling_gives_the_original_optimizer() -> None:
    net = model()
    optimizer = distributed(net, adam)
    loss_of(net, *map(part, batch(0))).backward()
    optimizer.step()
    again = pickle.loads(pickle.dumps(optimizer))
    assert type(again) is torch.optim.Adam
    assert type(again.param_groups[0]["params"]) is list
    assert again.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    for one, other in zip(again.param_groups[0]["params"], net.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_list_of_parameters_is_one_of_python() -> None:
    net = model()
    plain = sgd(net)
    group, parameters = plain.param_groups[0], list(net.parameters())
    optimizer = hvd.DistributedOptimizer(plain, net.named_parameters())
    assert optimizer.param_groups[0] is group
    kept = group["params"]
    assert isinstance(kept, list) and len(kept) == len(parameters)
    assert all(one is other for one, other in zip(kept, parameters, strict=True))
    for twin in (copy.copy(kept), copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))):
        assert type(twin) is list and len(twin) == len(parameters)
    # A list set by the program waits from the next step on.
    group["params"] = parameters
    loss_of(net, *map(part, batch(0))).backward()
    optimizer.step()
    assert type(group["params"]) is type(kept) and type(parameters) is list
    # It does not keep its optimizer alive.
    seen = weakref.ref(optimizer)
    del optimizer, plain
    gc.collect()
    assert seen() is None and len([*kept]) == len(parameters)
