"""A rank of `elastic.py`.

    elastic_rank.py train DIRECTORY SECONDS [CHECKPOINT]
    elastic_rank.py torchft DIRECTORY SECONDS LIGHTHOUSE REPLICA
    elastic_rank.py vote DIRECTORY COUNT
    elastic_rank.py commit DIRECTORY MEGABYTES
    elastic_rank.py sync DIRECTORY MEGABYTES

`train` makes steps of SECONDS until it is ended. Each process writes a line for each step to a file
of its own in DIRECTORY: the system's monotonic time in seconds, the epoch, the rank, the number of
ranks and the step. It commits every tenth step. With CHECKPOINT, it is a script that knows no
elastic jobs: it writes that file every tenth step, and begins with it. `torchft` is one replica of
the same training with torchft over Gloo; LIGHTHOUSE is the address of its server.

`vote`, `commit` and `sync` write the measured seconds to DIRECTORY.
"""

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import gradwire.torch as hvd
import torch
from gradwire import _world
from gradwire.torch.elastic import TorchState, run

LAYER = 256
EVERY = 10


def median(times: int, measured: Callable[[], object]) -> float:
    """Returns the median time of a call."""
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        measured()
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[times // 2]


def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Returns the model and its optimizer."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(LAYER, LAYER) for _ in range(4)))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def loss_of(model: torch.nn.Module, number: int, rank: int) -> torch.Tensor:
    """Returns the loss of a rank in a step."""
    data = torch.Generator().manual_seed(number * 1000 + rank)
    return model(torch.randn(8, LAYER, generator=data)).square().mean()


class Training:
    """A small model, and the lines of its steps."""

    def __init__(self, directory: Path, seconds: float) -> None:
        """Begins."""
        self.seconds = seconds
        self.model, optimizer = made()
        self.optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=self.model.named_parameters()
        )
        self.log = (directory / f"{os.getpid()}.txt").open("w", buffering=1)

    def step(self, number: int) -> None:
        """Makes a step."""
        self.optimizer.zero_grad()
        loss_of(self.model, number, hvd.rank()).backward()
        time.sleep(self.seconds)
        self.optimizer.step()

    def note(self, step: int) -> None:
        """Writes a line."""
        epoch = _world.session().epoch
        self.log.write(f"{time.monotonic():.6f} {epoch} {hvd.rank()} {hvd.size()} {step}\n")


def train(directory: Path, seconds: float) -> None:
    """Trains until it is ended, whatever is lost meanwhile."""
    training = Training(directory, seconds)

    @run
    def steps(state: TorchState) -> None:
        while True:
            training.step(state.step)
            state.step += 1
            training.note(state.step)
            if state.step % EVERY == 0:
                state.commit()

    steps(TorchState(model=training.model, optimizer=training.optimizer, step=0))


def train_with_checkpoint(directory: Path, seconds: float, checkpoint: Path) -> None:
    """Trains until it is ended, from the last checkpoint."""
    training, step = Training(directory, seconds), 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        training.model.load_state_dict(saved["model"])
        training.optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    while True:
        training.step(step)
        step += 1
        training.note(step)
        if step % EVERY == 0 and hvd.rank() == 0:
            new = checkpoint.with_suffix(".new")
            states = {"model": training.model.state_dict(), "step": step}
            torch.save({**states, "optimizer": training.optimizer.state_dict()}, new)
            new.rename(checkpoint)


def train_with_torchft(directory: Path, seconds: float, lighthouse: str, replica: str) -> None:
    """Trains until it is ended, as torchft's own examples do."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    model, inner = made()

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    meeting = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timedelta(seconds=30)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        timeout=timedelta(seconds=30),
        replica_id=replica,
        store_addr="localhost",
        store_port=meeting.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname="localhost",
    )
    parallel, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    with (directory / f"{os.getpid()}.txt").open("w", buffering=1) as log:
        while True:
            optimizer.zero_grad()
            step = manager.current_step()
            loss_of(parallel, step, manager.participating_rank() or 0).backward()
            time.sleep(seconds)
            optimizer.step()
            if manager.current_step() > step:
                size = manager.num_participants()
                now = f"{time.monotonic():.6f}"
                log.write(f"{now} 0 {replica} {size} {manager.current_step()}\n")


def vote(directory: Path, count: int) -> None:
    """Measures votes beside small operations."""
    session, small = _world.session(), torch.zeros(1)

    def operation() -> None:
        hvd.allreduce_(small, name="small", op=hvd.Sum)

    for warm in (lambda: session.vote(True), operation):
        median(50, warm)
    seconds = median(count, lambda: session.vote(True)), median(count, operation)
    if hvd.rank() == 0:
        (directory / "seconds").write_text(f"{seconds[0]} {seconds[1]}")


def of_state(call: str, directory: Path, megabytes: int) -> None:
    """Measures a method of a state: commits, or copies to all ranks."""
    # 250,000 elements of 4 bytes for each of them.
    state = TorchState(model=torch.nn.Linear(250_000, megabytes, bias=False), step=0)
    method = getattr(state, call)
    method()
    seconds = median(5, method)
    if hvd.rank() == 0:
        (directory / "seconds").write_text(str(seconds))


def main(mode: str, directory: Path, amount: str, *rest: str) -> None:
    """Does one of these."""
    torch.set_num_threads(1)
    if mode == "torchft":
        train_with_torchft(directory, float(amount), *rest)
    hvd.init()
    if mode == "train" and rest:
        train_with_checkpoint(directory, float(amount), Path(rest[0]))
    elif mode == "train":
        train(directory, float(amount))
    elif mode == "vote":
        vote(directory, int(amount))
    else:
        of_state(mode, directory, int(amount))
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
