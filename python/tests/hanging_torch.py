"""A rank of PyTorch that hangs, while the others wait for it. Started with the way."""

import sys
import time

import torch
import torch.distributed as dist

import gradwire.torch as gw
from gradwire._world import session

gw.init()
last = gw.rank() == gw.size() - 1
model = torch.nn.Linear(4, 2)


def step(net: torch.nn.Module) -> None:
    net(torch.ones(3, 4)).sum().backward()


def hang() -> None:
    time.sleep(1000)


def optimizer() -> None:
    sgd = gw.DistributedOptimizer(torch.optim.SGD(model.parameters()), model.named_parameters())
    for number in range(3):
        if last and number == 2:
            hang()
        sgd.zero_grad()
        step(model)
        sgd.step()


def ddp() -> None:
    dist.init_process_group("gradwire")
    net = torch.nn.parallel.DistributedDataParallel(model)
    for number in range(3):
        if last and number == 2:
            hang()
        step(net)


def fsdp2() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gradwire")
    net = fully_shard(model, mesh=init_device_mesh("cpu", (gw.size(),)))
    for number in range(3):
        if last and number == 2:
            hang()
        step(net)


class Slow(torch.utils.data.Dataset[torch.Tensor]):
    """Its third item never comes."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, at: int) -> torch.Tensor:
        if last and at == 2:
            time.sleep(1000)
        return torch.ones(3, 4)


def loader() -> None:
    for number, _ in enumerate(torch.utils.data.DataLoader(Slow(), num_workers=1)):
        gw.allreduce(torch.ones(3), name=f"step.{number}")


if gw.rank() == 0:
    print("COORDINATOR", session().coordinator, flush=True)
globals()[sys.argv[1]]()
