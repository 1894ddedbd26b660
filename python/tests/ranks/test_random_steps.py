"""Random sequences of what programs do around steps, compared with one process."""

from __future__ import annotations

import contextlib
import os
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from promised import Interrupted, alarm  # noqa: E402

import gradwire.torch as hvd  # noqa: E402
from gradwire.torch import _checks  # noqa: E402

FIRST = int(os.environ.get("GWTEST_SEED", "0"))
NAMES = ["one", "two", "three"]


class Trained:
    """Parameters and their optimizers, on the ranks or in one process."""

    def __init__(self, dice: random.Random, distributed: bool) -> None:
        self.op = dice.choice([hvd.Average, hvd.Sum])
        self.options = dice.choice([{}, {"momentum": 0.5}, {"weight_decay": 0.1}])
        self.groups, self.shared = dice.choice([None, None, 1]), dice.random() < 0.3
        self.distributed = distributed
        self.parameters = [torch.nn.Parameter(torch.ones(3).double()) for _ in NAMES]
        self.optimizers = self._made()

    def _made(self) -> list[Any]:
        made = []
        for those in ((0, 1, 2), (0, 2)) if self.shared else ((0, 1, 2),):
            own = [self.parameters[at] for at in those]
            plain: Any = torch.optim.SGD(own, lr=0.1, **self.options)
            if self.distributed:
                named = list(zip([NAMES[at] for at in those], own))
                plain = hvd.DistributedOptimizer(plain, named, op=self.op, groups=self.groups)
            made.append(plain)
        return made

    def make_again(self) -> None:
        for optimizer in self.optimizers:
            optimizer.state.clear()
        self.optimizers = self._made()

    def clear(self, how: str) -> None:
        for optimizer in reversed(self.optimizers) if how == "optimizer" else ():
            optimizer.zero_grad()
        for parameter in self.parameters:
            if how == "none":
                parameter.grad = None
            elif how == "zeros" and parameter.grad is not None:
                parameter.grad.zero_()

    def add(self, given: list[list[float | None]], by_hand: bool) -> None:
        """Adds gradients: by rank and parameter, a number, or None if it is not used."""
        ranks = [hvd.rank()] if self.distributed else range(hvd.size())
        parts = hvd.size() if self.op == hvd.Average and not self.distributed else 1
        losses = [
            parameter.sum() * number / parts
            for rank in ranks
            for parameter, number in zip(self.parameters, given[rank])
            if number is not None
        ]
        if by_hand:
            used = [any(row[at] is not None for row in given) for at in range(len(NAMES))]
            mine = [p for p, is_used in zip(self.parameters, used) if is_used]
            found = torch.autograd.grad(sum(losses), mine, allow_unused=True) if losses else ()
            for parameter, gradient in zip(mine, found):
                if gradient is not None:
                    parameter.grad = gradient.clone()
        elif losses:
            sum(losses).backward()  # type: ignore[union-attr]

    def synchronize(self) -> None:
        for optimizer in self.optimizers if self.distributed else ():
            optimizer.synchronize()

    def change(self, how: str) -> None:
        for parameter in self.parameters:
            if parameter.grad is None:
                continue
            if how == "scale":
                parameter.grad.mul_(0.5)
            elif how == "replace":
                parameter.grad = parameter.grad * 0.5
            elif how == "move":
                parameter.grad.data = parameter.grad.data.clone()
        if how == "drop":
            self.parameters[0].grad = None

    def step(self, how: str, interrupted: bool) -> None:
        for optimizer in self.optimizers:
            if not self.distributed:
                optimizer.step()
                continue
            if interrupted and hvd.size() > 1:
                if hvd.rank() == 0:
                    with pytest.raises(Interrupted), alarm(0.3):
                        optimizer.step()
                hvd.barrier()
            if how == "read":
                assert len(list(optimizer.param_groups[0]["params"])) > 1
            with optimizer.skip_synchronize() if how == "skip" else contextlib.nullcontext():
                optimizer.step()


def moves(dice: random.Random) -> list[dict[str, Any]]:
    """Returns what happens in each iteration."""
    made = []
    for _ in range(8):
        used = lambda: dice.choice([None, 1.0, 2.0, 3.0])  # noqa: E731
        given = [[used() for _ in NAMES] for _ in range(4)]
        if dice.random() < 0.3:
            given[dice.randrange(2)] = [None] * len(NAMES)  # a rank without a batch
        made.append(
            {
                "again": dice.random() < 0.1,
                "clear": dice.choice(["optimizer", "optimizer", "none", "zeros", "not"]),
                "given": given,
                "by hand": dice.random() < 0.15,
                "synchronize": dice.choice([0, 0, 1, 2]),
                "change": dice.choice(["scale", "replace", "move", "drop", "not"]),
                "twice": dice.random() < 0.15,
                "step": dice.choice(["step", "step", "read", "skip", "no step"]),
                "interrupted": dice.random() < 0.05,
            }
        )
    return made


def train(trained: Trained, move: dict[str, Any]) -> None:
    if move["again"]:
        trained.make_again()
    # The optimizer that is cleared last submits the gradients of shared parameters.
    trained.clear("optimizer" if trained.shared else move["clear"])
    by_hand = move["by hand"] and move["clear"] == "none" and not trained.shared
    trained.add(move["given"], by_hand)
    for _ in range(move["synchronize"]):
        trained.synchronize()
        trained.change(move["change"])
    unclear = move["change"] == "replace" and trained.op == hvd.Sum
    if move["twice"] and move["synchronize"] and not (trained.shared or unclear):
        trained.add(move["given"][::-1], False)
        trained.synchronize()
    if move["step"] == "no step":
        trained.synchronize()
    elif move["step"] != "skip" or move["synchronize"]:
        trained.step(move["step"], move["interrupted"] and not move["synchronize"])
    else:
        trained.step("step", False)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + 12))
def test_random_steps(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = random.Random(seed).choice(["early", "late", "first"])
    if sent != "first":
        monkeypatch.setattr(_checks, "is_due", lambda *_: sent == "late")
    ranks = Trained(random.Random(seed), True)
    alone = Trained(random.Random(seed), False)
    for at, move in enumerate(moves(random.Random(f"moves {seed}"))):
        train(ranks, move)
        train(alone, move)
        for name, ours, one in zip(NAMES, ranks.parameters, alone.parameters):
            same = torch.allclose(ours.detach(), one.detach(), atol=1e-12)
            assert same, (seed, at, name, move, ours.tolist(), one.tolist())
