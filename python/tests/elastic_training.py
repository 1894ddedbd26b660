"""A training that is killed, and the same training without losses in one process.

Each rank writes a line for each step that it has made: the epoch, the step, the number of ranks,
and a digest of the parameters. After the job, the test repeats these steps in one process.

    python elastic_training.py MODE FOLDER STEPS

MODE is ``rollback``, ``skip`` or ``ddp``. Variables say who is killed, and when:

- ``KILLS``: JSON, a list of [epoch, rank, step, moment]. ``moment`` is ``forward``, ``hook``,
  ``backward``, ``step`` or ``commit``.
- ``GROWS``: the training goes on until it has had this number of ranks for some steps after the
  first epoch.
- ``DDP``: JSON, the options of the DDP model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch as hvd
from gradwire import _world

COMMIT_EVERY = 3
MORE = 5


def made(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def loss_of(model: Any, step: int, rank: int) -> Any:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return model(torch.randn(4, 6, generator=generator)).square().mean()


def digest(model: Any) -> str:
    sha = hashlib.sha256()
    for parameter in model.parameters():
        sha.update(parameter.detach().numpy().tobytes())
    return sha.hexdigest()[:16]


class Rank:
    """What this process writes, and when it is killed."""

    def __init__(self, folder: Path) -> None:
        self.worker = os.environ.get("GRADWIRE_WORKER", str(hvd.rank()))
        self.file = (folder / f"worker{self.worker}.jsonl").open("a")
        self.kills = json.loads(os.environ.get("KILLS", "[]"))
        self.grows = int(os.environ.get("GROWS", "0"))

    @staticmethod
    def epoch() -> int:
        return int(_world.session().epoch)

    def at(self, step: int, moment: str) -> None:
        """Ends this process if it is its time."""
        if [self.epoch(), hvd.rank(), step, moment] in self.kills:
            os.kill(os.getpid(), signal.SIGKILL)

    def made(self, state: Any, model: Any, skipped: bool = False) -> None:
        """Writes a line about a step, and goes on to the next one."""
        line = {
            "epoch": self.epoch(),
            "rank": hvd.rank(),
            "size": hvd.contributors(),
            "step": state.step,
            "skipped": skipped,
            "digest": digest(model),
        }
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        # In the first epoch nobody has been lost yet.
        has_grown = hvd.size() == self.grows and self.epoch() > 1
        state.step, state.grown = state.step + 1, state.grown + has_grown

    def goes_on(self, state: Any, steps: int) -> bool:
        return state.step < steps or (self.grows > 0 and state.grown < MORE)

    @contextlib.contextmanager
    def hooked(self, model: Any, step: int) -> Iterator[None]:
        hook = model[0].weight.register_hook(lambda _: self.at(step, "hook"))
        yield
        hook.remove()


def backward(rank: Rank, model: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    rank.at(step, "forward")
    with rank.hooked(model, step):
        loss_of(model, step, hvd.rank()).backward()
    rank.at(step, "backward")


def rollback(rank: Rank, steps: int) -> Any:
    model, inner = made(hvd.rank())
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, grown=0)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while rank.goes_on(state, steps):
            backward(rank, model, optimizer, state.step)
            optimizer.step()
            rank.at(state.step, "step")
            rank.made(state, model)
            if state.step % COMMIT_EVERY == 0:
                rank.at(state.step - 1, "commit")
                state.commit()

    train(state)
    return model


def skip(rank: Rank, steps: int) -> Any:
    model, inner = made(hvd.rank())
    state = hvd.elastic.ObjectState(step=0, grown=0)
    optimizer = hvd.DistributedOptimizer(
        inner, named_parameters=model.named_parameters(), on_loss="skip", state=state
    )
    while rank.goes_on(state, steps):
        backward(rank, model, optimizer, state.step)
        before = optimizer.skipped_steps
        optimizer.step()
        rank.at(state.step, "step")
        rank.made(state, model, skipped=optimizer.skipped_steps > before)
    return model


def ddp(rank: Rank, steps: int) -> Any:
    model, optimizer = made(hvd.rank())
    state = hvd.elastic.ObjectState(step=0, grown=0)
    hook = hvd.DdpHookState(on_loss="skip", optimizer=optimizer, state=state)
    options = json.loads(os.environ.get("DDP", "{}"))
    parallel = DistributedDataParallel(model, process_group=hook.process_group, **options)
    parallel.register_comm_hook(hook, hvd.ddp_hook)
    voting: Any = optimizer
    while rank.goes_on(state, steps):
        optimizer.zero_grad()
        rank.at(state.step, "forward")
        loss = loss_of(parallel, state.step, hvd.rank())
        with rank.hooked(model, state.step):
            loss.backward()
        rank.at(state.step, "backward")
        before = voting.skipped_steps
        optimizer.step()
        rank.at(state.step, "step")
        rank.made(state, model, skipped=voting.skipped_steps > before)
    return model


def replay(lines: list[dict[str, Any]]) -> Any:
    """Returns the model after these steps, in one process."""
    model, optimizer = made(0)
    for line in lines:
        if not line["skipped"]:
            optimizer.zero_grad()
            for rank in range(line["size"]):
                (loss_of(model, line["step"], rank) / line["size"]).backward()
            optimizer.step()
    return model


def main() -> None:
    mode, folder, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    hvd.init()
    # The others wait for a new process from now on, so it has imported what takes long.
    assert not _world.is_newcomer() or "torch._dynamo" in sys.modules
    rank = Rank(folder)
    model = {"rollback": rollback, "skip": skip, "ddp": ddp}[mode](rank, steps)
    torch.save(model.state_dict(), folder / f"worker{rank.worker}.pt")
    print(f"END worker {rank.worker} rank {hvd.rank()} of {hvd.size()}", flush=True)


if __name__ == "__main__":
    main()
