"""Programs for test_replay.py. Each writes what it has received to ``GWTEST_OUT/rank.N``."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import numpy as np


def report(rank: int, *lines: object) -> None:
    """Writes the results of a rank."""
    text = "\n".join(map(str, lines)) + "\n"
    (Path(os.environ["GWTEST_OUT"]) / f"rank.{rank}").write_text(text)


def digest(array: np.ndarray) -> str:
    """Returns a text that differs if a single bit differs."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def arrays() -> None:
    """Every kind of call with NumPy."""
    import gradwire as gw

    gw.init()
    rank, size = gw.rank(), gw.size()
    random = np.random.default_rng(rank)
    lines: list[object] = [rank, size, gw.local_rank(), gw.local_size(), gw.cross_size()]
    for elements in (1, 1000, 700_001):
        mine = random.standard_normal(elements).astype(np.float32)
        lines.append(digest(gw.allreduce(mine, name=f"sum.{elements}")))
    lines.append(digest(gw.allreduce(np.arange(7, dtype=np.int64), op=gw.Max)))
    lines.append(digest(gw.allgather(random.standard_normal((rank + 1, 3)))))
    lines.append(digest(gw.broadcast(random.standard_normal(5), root_rank=1)))
    lines.append(digest(gw.alltoall(random.standard_normal(size * 2))))
    received, splits = gw.alltoall(random.standard_normal(3), splits=[1 + rank, 2 - rank])
    lines += [digest(received), list(splits)]
    lines.append(digest(np.asarray(gw.reducescatter(random.standard_normal((4, 3))))))
    lines.append(gw.broadcast_object({"from": rank, "list": [1.5] * rank}, root_rank=1))
    lines.append(gw.allgather_object(["of", rank] * (rank + 1)))
    one = gw.add_process_set([1])
    if one.included():
        lines.append(digest(gw.allreduce(np.ones(3), process_set=one)))
    handles = [gw.allreduce_async(random.standard_normal(9), name=f"h{i}") for i in range(20)]
    lines += [digest(gw.synchronize(handle)) for handle in reversed(handles)]
    try:
        gw.allreduce(np.ones(rank + 1), name="differs")
    except gw.GradwireError as error:
        lines.append(error)
    gw.barrier()
    report(rank, *lines)


def optimizer() -> None:
    """A training with the optimizer."""
    import torch

    import gradwire.torch as hvd

    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sgd = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(sgd, root_rank=0)
    losses = []
    for _ in range(12):
        data, target = torch.randn(16, 20), torch.randn(16, 3)
        sgd.zero_grad()
        loss = torch.nn.functional.mse_loss(model(data), target)
        loss.backward()
        sgd.step()
        losses.append(float(hvd.allreduce(loss.detach(), name="loss")).hex())
    hvd.join()
    weights = [digest(weight.detach().numpy()) for weight in model.parameters()]
    report(hvd.rank(), *losses, *weights)


def groups() -> None:
    """A training with DDP, and a group of a part of the ranks."""
    import torch
    import torch.distributed as dist

    import gradwire.torch  # noqa: F401

    dist.init_process_group("gradwire")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(30, 4))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    lines = []
    for _ in range(6):
        sgd.zero_grad()
        loss = model(torch.randn(8, 30)).square().mean()
        loss.backward()
        sgd.step()
        lines.append(loss.item().hex())
    other, both = dist.new_group([1]), dist.new_group([0, 1])
    one = torch.full((3,), float(rank) + 0.1)
    if rank == 1:
        dist.all_reduce(one, group=other)
    dist.all_reduce(one, group=both)
    everybody: list[object] = [None, None]
    dist.all_gather_object(everybody, {"rank": rank})
    dist.destroy_process_group(both)
    dist.barrier()
    lines += [digest(one.numpy()), everybody]
    lines += [digest(weight.detach().numpy()) for weight in model.parameters()]
    report(rank, *lines)
    dist.destroy_process_group()


def steps(*changes: str) -> None:
    """Some steps. ``name=K``, ``shape=K``, ``skip=K`` change the call of step K."""
    import gradwire as gw

    gw.init()
    lines = []
    last = int(os.environ.get("GWTEST_STEPS", "10"))
    for step in range(last):
        name, elements = f"step.{step % 3}", int(os.environ.get("GWTEST_ELEMENTS", "4"))
        if f"skip={step}" in changes:
            continue
        if f"name={step}" in changes:
            name = "another"
        if f"shape={step}" in changes:
            elements += 1
        mine = np.random.default_rng(step).standard_normal(elements)
        lines.append(digest(gw.allreduce(mine, name=name)))
        if f"die={step}" in changes and gw.rank() == 0:
            os.kill(os.getpid(), 9)
    report(gw.rank(), *lines)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
