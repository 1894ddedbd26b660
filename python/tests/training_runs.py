"""Runs random trainings (``training_plans``) in one process and on all ranks, and compares them.

    gradwire run -np 2 -- python training_runs.py 0 20

After each step, the parameters of N ranks equal those of one process with the combined batch. At
the end, all ranks have the same bits. Each rank also runs the single-process training.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F
from training_plans import Plan, plan

import gradwire.torch as hvd
from gradwire.torch._parameters import without_waiting

ROWS = 4
WORDS = 12


class Net(torch.nn.Module):
    """A small model with all layers that plans need."""

    def __init__(self, made: Plan, distributed: bool) -> None:
        super().__init__()
        self.made, self.sides_tied = made, False
        if made.model == "conv":
            self.first = torch.nn.Conv2d(3, 8, 3, padding=1, bias=False)
            norm = hvd.SyncBatchNorm if distributed else torch.nn.BatchNorm2d
            self.norm = norm(8) if made.norm else torch.nn.Identity()
            self.second = torch.nn.Conv2d(8, 8, 3, padding=1, stride=2)
        elif made.model == "words":
            self.words = torch.nn.Embedding(WORDS, 8, sparse=made.sparse is not None)
        else:
            self.first = torch.nn.Linear(6, 8)
        self.left, self.right = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.late = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, WORDS if made.tied else 1, bias=not made.tied)
        if made.tied:
            self.head.weight = self.words.weight
        if made.frozen:
            self.late.requires_grad_(False)

    def forward(self, given: torch.Tensor, left: bool) -> torch.Tensor:
        if self.made.model == "conv":
            if self.made.channels_last:
                given = given.contiguous(memory_format=torch.channels_last)
            hidden = torch.tanh(self.second(torch.tanh(self.norm(self.first(given))))).mean((2, 3))
        elif self.made.model == "words":
            hidden = torch.tanh(self.words(given).mean(1) * 3)
        else:
            hidden = torch.tanh(self.first(given))
        hidden = torch.tanh((self.left if left or self.sides_tied else self.right)(hidden))
        return self.head(hidden + torch.tanh(self.late(hidden)))


def distance(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Returns the mean squared difference, which PyTorch 2.2 lacks for bf16 on CPUs."""
    if found.dtype is torch.bfloat16:
        found, wanted = found.float(), wanted.float()
    return F.mse_loss(found, wanted)


def drop(parameter: Any) -> None:
    parameter.grad = None


def replace(parameter: Any) -> None:
    parameter.grad = parameter.grad * 0.5


def write(parameter: Any) -> None:
    parameter.grad.data.mul_(0.5)


# What all ranks do to exchanged gradients, and what one rank does to gradients in flight.
CHANGES = {"drop": drop, "replace": replace, "write data": write}
ROOTS_CHANGES = {"root drops": drop, "root replaces": replace, "root writes": write}


def unwrapped(optimizer: Any) -> Any:
    """Returns an ordinary optimizer with the same parameters and the same state."""
    plain, state = object.__new__(optimizer._original), dict(optimizer.__getstate__())
    state["param_groups"] = [
        {**group, "params": list(without_waiting(group["params"]))}
        for group in optimizer.param_groups
    ]
    plain.__setstate__(state)
    return plain


class Run:
    """One training: by one process with all shards, or by a rank with its own."""

    def __init__(self, made: Plan, distributed: bool) -> None:
        self.made, self.distributed = made, distributed
        self.size, self.rank = hvd.size(), hvd.rank()
        self.ranks = list(range(self.size))  # ranks that still have data
        torch.manual_seed(made.seed)
        self.net = Net(made, distributed).to(made.dtype)
        if made.channels_last:
            self.net = self.net.to(memory_format=torch.channels_last)
        self.hooked = [0, 0]
        self.optimizers: list[Any] = []
        self.schedulers: list[Any] = []
        self.scaler: Any = None
        # The gradients that the program keeps.
        self.kept: list[torch.Tensor] | None = None
        if made.scaler is not None:
            on = made.scaler == "on"
            self.scaler = torch.amp.GradScaler(
                "cpu", init_scale=64.0, growth_interval=2, enabled=on
            )
        self._make()
        if made.flat:
            self._flatten()

    # Preparation

    def _make(self) -> None:
        made, net = self.made, self.net
        sparse = [net.words.weight] if made.sparse is not None else []
        rest = [p for p in net.parameters() if all(p is not q for q in sparse)]
        plain = [self._optimizer(made.optimizer, rest, made.options)]
        if made.shared:
            plain.append(torch.optim.SGD(net.head.parameters(), lr=0.01))
        if sparse:
            plain.append(getattr(torch.optim, made.sparse)(sparse, lr=0.05))
        if made.optimizer == "Muon":
            flat = [p for p in rest if p.dim() != 2]
            plain[0] = torch.optim.Muon(
                [p for p in rest if p.dim() == 2], lr=0.02, weight_decay=0.0
            )
            plain.append(torch.optim.SGD(flat, lr=0.05))
        if made.hooks:
            plain[0].register_step_pre_hook(lambda *_: self._count(0))
            plain[0].register_step_post_hook(lambda *_: self._count(1))
        if made.scheduled_before:
            self._schedule(plain)
        self.optimizers = (
            [self._wrap(optimizer) for optimizer in plain] if self.distributed else plain
        )
        if not made.scheduled_before:
            self._schedule(self.optimizers)

    def _count(self, which: int) -> None:
        self.hooked[which] += 1

    def _optimizer(self, name: str, parameters: list[Any], options: dict[str, Any]) -> Any:
        made = self.made
        given: dict[str, Any] = {"lr": 0.5 if name == "LBFGS" else 0.05, **options}
        if name == "Muon":
            return None
        if made.way is not None:
            given["foreach"] = made.way == "foreach"
        if made.way == "fused":
            given.update(fused=True, foreach=None)
        turn = -1 if made.reordered and self.distributed and self.rank % 2 else 1
        if made.groups_of_parameters:
            half = len(parameters) // 2
            parts = [
                {"params": parameters[:half][::turn]},
                {"params": parameters[half:][::turn], "lr": 0.01},
            ]
            return getattr(torch.optim, name)(parts, **given)
        return getattr(torch.optim, name)(parameters[::turn], **given)

    def _wrap(self, optimizer: Any) -> Any:
        made, options = self.made, dict(self.made.wrapped)
        if "op" in options:
            options["op"] = getattr(hvd, options["op"])
        if "compression" in options:
            options["compression"] = getattr(hvd.Compression, options["compression"])
        own = [p for group in optimizer.param_groups for p in group["params"]]
        own = [p for p in self.net.parameters() if any(p is q for q in own)]
        if made.groups == "lists":
            options["groups"] = [own[:2], own[2:3], own[4:]]
        elif made.groups is not None:
            options["groups"] = made.groups
        named = [(name, p) for name, p in self.net.named_parameters() if any(p is q for q in own)]
        return hvd.DistributedOptimizer(
            optimizer, named, backward_passes_per_step=made.passes, **options
        )

    def _schedule(self, optimizers: list[Any]) -> None:
        kinds = torch.optim.lr_scheduler
        for optimizer in optimizers:
            name = self.made.scheduler
            if name == "StepLR":
                self.schedulers.append(kinds.StepLR(optimizer, 2, gamma=0.5))
            elif name == "ExponentialLR":
                self.schedulers.append(kinds.ExponentialLR(optimizer, 0.8))
            elif name == "CosineAnnealingLR":
                self.schedulers.append(kinds.CosineAnnealingLR(optimizer, 10))
            elif name == "OneCycleLR":
                cycled = any(key in optimizer.defaults for key in ("momentum", "betas"))
                self.schedulers.append(
                    kinds.OneCycleLR(optimizer, 0.06, total_steps=40, cycle_momentum=cycled)
                )
            elif name == "ReduceLROnPlateau":
                self.schedulers.append(kinds.ReduceLROnPlateau(optimizer, patience=0, factor=0.5))

    # Data

    def _batch(self, step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.made
        random = torch.Generator().manual_seed(made.seed * 1009 + step * 101 + micro * 17 + rank)
        if made.model == "words":
            given = torch.randint(WORDS, (ROWS, 3), generator=random)
        else:
            shape = (ROWS, 3, 4, 4) if made.model == "conv" else (ROWS, 6)
            given = torch.randn(shape, generator=random, dtype=torch.float64).to(made.dtype)
        wanted = torch.randn(
            (ROWS, WORDS if made.tied else 1), generator=random, dtype=torch.float64
        )
        return given, wanted.to(made.dtype)

    def _left(self, step: int, rank: int) -> bool:
        ways = {
            "left": True,
            "step": step % 2 == 0,
            "rank": rank % 2 == 0,
            "rank and step": (rank + step) % 3 > 0,
        }
        return ways[self.made.branch]

    def loss(self, step: int, micro: int, without: int | None = None) -> torch.Tensor | None:
        """Returns the loss of this rank's data, or of all ranks' data; None without data."""
        made = self.made
        shards = [self.rank] if self.distributed else self.ranks
        count = len(shards)
        if without is not None:
            shards = [rank for rank in shards if rank != without % self.size]
        if not shards:
            return None
        batches = [self._batch(step, micro, rank) for rank in shards]
        if made.norm:
            given, wanted = (torch.cat(parts) for parts in zip(*batches))
            losses = [distance(self.net(given, self._left(step, 0)), wanted) * len(shards)]
        else:
            losses = [
                distance(self.net(x, self._left(step, r)), y) for (x, y), r in zip(batches, shards)
            ]
        if made.infinity is not None and made.infinity[0] == step:
            broken = made.infinity[1] % self.size
            if broken in shards:
                losses[0 if made.norm else shards.index(broken)] *= float("inf")
        total = sum(losses[1:], losses[0])
        return total if made.wrapped.get("op") == "Sum" else total / count

    # Steps

    def clear(self) -> None:
        how = self.made.clear
        if how.startswith("optimizer"):
            # The optimizer that steps first submits shared parameters.
            for optimizer in reversed(self.optimizers):
                if how == "optimizer":
                    optimizer.zero_grad()
                else:
                    optimizer.zero_grad(set_to_none=False)
        elif how.startswith("model"):
            self.net.zero_grad(set_to_none=how == "model")
        elif how == "data zeros":
            for gradient in self._gradients():
                gradient.data.zero_()
        elif how == "kept zeros" and self.kept is not None:
            for gradient in self.kept:
                gradient.zero_()
        if how.endswith("zeros"):
            self.kept = self._gradients()

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.net.parameters() if p.grad is not None]

    def _flatten(self) -> None:
        """Makes the gradients views of one buffer of zeros."""
        parameters = [p for p in self.net.parameters() if p.requires_grad]
        flat = torch.zeros(sum(p.numel() for p in parameters), dtype=self.made.dtype)
        for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters])):
            parameter.grad = part.view(parameter.shape)

    def backward(self, step: int, happens: dict[str, Any]) -> torch.Tensor:
        total = torch.zeros(())
        for micro in range(happens["micro"]):
            loss = self.loss(step, micro, happens.get("without"))
            if loss is None:
                continue
            (self.scaler.scale(loss) if self.scaler is not None else loss).backward()
            total = total + loss.detach()
        return total

    def before(self, event: str | None) -> None:
        if event == "load state":
            for optimizer in self.optimizers:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif event == "broadcast" and self.distributed:
            hvd.broadcast_parameters(self.net.state_dict(), root_rank=0)
            for optimizer in self.optimizers:
                hvd.broadcast_optimizer_state(optimizer, root_rank=self.size - 1)
        elif (
            event == "copy"
            and self.made.optimizer != "LBFGS"
            and not self.schedulers
            and not self.made.hooks
        ):
            # PyTorch can't copy LBFGS.
            self.net, self.optimizers = copy.deepcopy((self.net, self.optimizers))
        elif event == "recast":
            other = torch.float32 if self.made.dtype is torch.float64 else torch.float64
            self.net.to(other)
            self.net.to(self.made.dtype)
        elif event == "share memory" and self.made.sparse is None:
            self.net.share_memory()
        elif event == "tie":
            self.net.sides_tied = True
        elif event in ("freeze", "unfreeze"):
            self.net.late.requires_grad_(event == "unfreeze")
        elif event == "restart" and self.distributed:
            hvd.shutdown()
            hvd.init()
        elif (
            event is not None
            and event.endswith("again")
            and self.distributed
            and (self.rank == 0 or event == "wrap again")
            and not (self.schedulers or self.made.hooks)
            # A new optimizer can't know which gradients are sums.
            and (self.made.clear != "never" or self.made.wrapped.get("op") != "Sum")
        ):
            self.optimizers = [self._wrap(unwrapped(one)) for one in self.optimizers]

    def between(self, event: str | None) -> None:
        if event == "swap storage":
            self.synchronized()
            for parameter in self.net.parameters():
                if parameter.grad is not None and not parameter.grad.is_sparse:
                    parameter.grad.data = parameter.grad.data.clone()
        elif event == "read groups":
            groups = [group for one in self.optimizers for group in one.param_groups]
            assert all(isinstance(p, torch.Tensor) for group in groups for p in group["params"])
        elif event == "root reads groups" and self.rank == 0:
            groups = [group for one in self.optimizers for group in one.param_groups]
            assert all(group["lr"] >= 0 and len(group["params"]) >= 0 for group in groups)
        elif event == "synchronize":
            self.synchronized()
        elif event == "freeze in flight":
            self.net.late.requires_grad_(False)
        elif event in CHANGES:
            self.synchronized()
            for parameter in self._computed():
                CHANGES[event](parameter)
        elif event == "look at gradients" and self.synchronized():
            norms = [p.grad.detach().norm() for p in self.net.parameters() if p.grad is not None]
            assert norms or not self.ranks

    def synchronized(self) -> bool:
        if self.distributed:
            for optimizer in self.optimizers:
                optimizer.synchronize()
        return True

    def _clip(self) -> None:
        how, made_sparse = self.made.clip, self.made.sparse is not None
        groups = [
            p for optimizer in self.optimizers for g in optimizer.param_groups for p in g["params"]
        ]
        parameters = [
            p
            for p in (groups if how == "norm of groups" else self.net.parameters())
            if p.grad is not None
        ]
        if how == "by hand":
            for parameter in parameters:
                parameter.grad.mul_(0.5)
        elif not parameters or made_sparse:
            return  # PyTorch's functions do not accept sparse ones
        elif how == "value":
            torch.nn.utils.clip_grad_value_(parameters, 0.05)
        else:
            torch.nn.utils.clip_grad_norm_(parameters, 0.1)

    def finish(self, skip: bool) -> None:
        made, scaler = self.made, self.scaler
        if made.clip is not None:
            if scaler is None:
                self.synchronized()
            else:
                for optimizer in self.optimizers:
                    scaler.unscale_(optimizer)
            self._clip()
        with contextlib.ExitStack() as stack:
            if self.distributed and skip and made.clip is not None:
                for optimizer in self.optimizers:
                    stack.enter_context(optimizer.skip_synchronize())
            for optimizer in self.optimizers:
                if (
                    any(p.grad is not None for g in optimizer.param_groups for p in g["params"])
                    or scaler is None
                ):
                    scaler.step(optimizer) if scaler is not None else optimizer.step()
            if scaler is not None:
                scaler.update()

    def step(self, step: int, happens: dict[str, Any]) -> None:
        self.before(happens.get("before"))
        if self.made.closure:
            loss = self._by_closure(step, happens)
        else:
            self.clear()
            instead = happens.get("instead")
            loss = torch.zeros(())
            if instead != "no backward":
                loss = self.backward(step, happens)
                self.between(happens.get("between"))
            if instead == "begin again":
                self.synchronized()
                self.net.zero_grad()
                loss = self.backward(step, happens)
            elif instead is not None and instead.startswith("root"):
                self._fail(instead)
                self.net.zero_grad()
                loss = self.backward(step, happens)
            elif instead == "another backward":
                self.synchronized()
                loss = loss + self.backward(step + 50, happens)
            if instead == "skip the step":
                self.synchronized()
                return
            self.finish(skip=step % 2 == 0)
        for scheduler in self.schedulers:
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step(step % 2)
            else:
                scheduler.step()
        del loss

    def _computed(self) -> list[Any]:
        """Returns some parameters that have a dense gradient other than zeros.

        Groups of parameters are exchanged as dense ones.
        """
        sparse = self.net.words.weight if self.made.sparse is not None else None
        every = [p for p in [*self.net.parameters()][::2] if p is not sparse]
        some = [p for p in every if p.grad is not None]
        return [p for p in some if not p.grad.is_sparse and bool(p.grad.any())]

    def _fail(self, how: str) -> None:
        """Lets the first rank change gradients in flight, and all ranks catch the error."""
        if self.distributed and self.rank == 0:
            for parameter in self._computed():
                ROOTS_CHANGES[how](parameter)
        for optimizer in self.optimizers if self.distributed else ():
            with contextlib.suppress(AssertionError):
                optimizer.synchronize()

    def _by_closure(self, step: int, happens: dict[str, Any]) -> Any:
        def closure() -> torch.Tensor:
            self.clear()
            loss = self.loss(step, 0)
            assert loss is not None
            loss.backward()
            if self.distributed:
                for optimizer in others:
                    optimizer.synchronize()
            return loss

        first, *others = self.optimizers
        loss = first.step(closure)
        for optimizer in others:
            optimizer.step()
        return loss

    def state(self) -> list[torch.Tensor]:
        return [tensor.detach().clone() for tensor in self.net.state_dict().values()]

    def run(self) -> Iterator[list[torch.Tensor]]:
        """Yields the parameters after each step."""
        for step, happens in enumerate(self.made.steps):
            self.step(step, happens)
            yield self.state()
        for step in range(self.made.tail if self.size > 1 else 0):
            # The first rank has no data left; the second one has none from the second step on.
            left = [rank for rank in range(self.size) if rank > min(step, self.size - 2)]
            if self.distributed and self.rank in self.ranks and self.rank not in left:
                hvd.join()
            self.ranks = left
            if not self.distributed or self.rank in left:
                self.step(100 + step, {"micro": self.made.passes})
            yield self.state()
        if self.distributed and self.made.tail and self.size > 1:
            if self.rank in self.ranks:
                hvd.join()
            hvd.broadcast_parameters(self.net.state_dict(), root_rank=self.size - 1)


def compare(seed: int) -> str:
    """Returns the differences of the ranks' training from a single process; empty if none."""
    made = plan(seed)
    alone = Run(made, distributed=False)
    expected = list(alone.run())
    ours = Run(made, distributed=True)
    differences = []
    for step, (wanted, got) in enumerate(zip(expected, ours.run(), strict=True)):
        if step >= len(made.steps) and ours.rank not in ours.ranks:
            continue  # this rank has no more data
        for name, one, other in zip(ours.net.state_dict(), wanted, got):
            try:
                torch.testing.assert_close(
                    other, one, atol=made.within, rtol=made.within, equal_nan=True
                )
            except AssertionError as error:
                differences.append(f"step {step}, {name}: {error}")
    if ours.hooked != alone.hooked and not made.tail:
        differences.append(f"hooks ran {ours.hooked} times, not {alone.hooked}")
    mine = torch.cat([tensor.flatten().double() for tensor in ours.state()])
    for rank, theirs in enumerate(hvd.allgather(mine.unsqueeze(0))):
        if not torch.equal(theirs.view(torch.int64), mine.view(torch.int64)):
            differences.append(f"other bits than on rank {rank}")
    return "\n".join(differences[:3])


def main() -> None:
    first, count = map(int, sys.argv[1:3])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    hvd.init()
    differ = []
    for seed in range(first, first + count):
        print(f"SEED {seed}\n", end="", flush=True)
        try:
            difference = compare(seed)
        except BaseException:
            difference = traceback.format_exc()
            raise
        finally:
            if difference:
                differ.append(seed)
                print(
                    f"SEED {seed} DIFFERS on rank {hvd.rank()}: {plan(seed)}\n{difference}\n",
                    end="",
                    flush=True,
                )
    print(f"RUNS {count} DIFFER {differ}\n", end="", flush=True)


if __name__ == "__main__":
    main()
