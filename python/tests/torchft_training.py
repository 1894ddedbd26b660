"""A replica of a training with torchft, over Gradwire.

    python torchft_training.py WAY REPLICA LIGHTHOUSE

WAY is ``ddp``, ``native``, ``local_sgd`` or ``diloco``. Replica 2 kills itself. Prints the steps
that count with their numbers of replicas, and a digest of the parameters.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer

from gradwire.torch.torchft import ProcessGroupGradwire

STEPS, KILLED_AT, EVERY = 8, 3, 2
TIMEOUT = timedelta(seconds=60)


def made() -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model: Any, step: int, rank: int) -> Any:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randn(3, 4, generator=generator)).square().mean()


def replay(steps: list[tuple[int, int]]) -> Any:
    """The model after these steps and numbers of replicas, in one process."""
    model, optimizer = made()
    for step, size in steps:
        optimizer.zero_grad()
        for rank in range(size):
            (loss_of(model, step, rank) / size).backward()
        optimizer.step()
    return model


def every_step(manager: Any, model: Any, inner: Any, die: Any) -> None:
    parallel, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    while manager.current_step() < STEPS:
        optimizer.zero_grad()
        step, size = manager.current_step(), manager.num_participants()
        loss_of(parallel, step, manager.participating_rank() or 0).backward()
        die(step)
        optimizer.step()
        if manager.current_step() > step:
            print(f"STEP {step} {size}", flush=True)


def now_and_then(context: Any, manager: Any, model: Any, inner: Any, die: Any) -> None:
    with context:
        made_here = 0
        while manager.current_step() < STEPS // EVERY:
            inner.zero_grad()
            loss_of(model, made_here, int(sys.argv[2])).backward()
            die(manager.current_step() * EVERY)
            inner.step()
            made_here += 1


def main() -> None:
    way, replica, lighthouse = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    model, inner = made()
    outer = torch.optim.SGD(model.parameters(), lr=0.5)
    group: Any
    if way == "native":
        store = dist.HashStore()
        dist.init_process_group(
            "gradwire", store=store, rank=0, world_size=1, timeout=TIMEOUT, enable_reconfigure=True
        )
        group = dist.group.WORLD
    else:
        group = ProcessGroupGradwire(TIMEOUT)
    meeting = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def load(state: Any) -> None:
        for name, one in (("model", model), ("inner", inner), ("outer", outer)):
            one.load_state_dict(state[name])

    manager = Manager(
        pg=group,
        min_replica_size=2,
        load_state_dict=load,
        state_dict=lambda: {
            "model": model.state_dict(),
            "inner": inner.state_dict(),
            "outer": outer.state_dict(),
        },
        use_async_quorum=False,
        timeout=TIMEOUT,
        replica_id=str(replica),
        store_addr="localhost",
        store_port=meeting.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname="localhost",
    )

    def die(step: int) -> None:
        if replica == 2 and step >= KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)

    if way in ("ddp", "native"):
        every_step(manager, model, inner, die)
    else:
        from torchft.local_sgd import DiLoCo, LocalSGD  # imports much

        context: Any = (
            LocalSGD(manager, model, inner, EVERY)
            if way == "local_sgd"
            else DiLoCo(manager, [model], inner, outer, EVERY, pin_memory=False)
        )
        now_and_then(context, manager, model, inner, die)
    bits = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print("SUM", sum(one.sum().item() for one in model.parameters()), flush=True)
    print("END", manager.current_step(), hashlib.sha256(bits).hexdigest(), flush=True)
    manager.shutdown()
    group.shutdown()


if __name__ == "__main__":
    main()
