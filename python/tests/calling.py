"""A rank that starts an operation in one of many ways, while the other one sleeps."""

import sys
import threading
import time

import numpy as np
import torch
import torch.distributed as dist

import gradwire
import gradwire.torch as gw


def late() -> None:
    if gw.rank() == 1:
        time.sleep(1000)


def plain() -> None:
    late()
    gw.allreduce(torch.ones(4), name="w")  # here


def in_a_thread() -> None:
    thread = threading.Thread(target=plain)
    thread.start()
    thread.join()


def of_arrays() -> None:
    late()
    gradwire.allreduce(np.ones(4, np.float32), name="w")  # here


def of_objects() -> None:
    late()
    gw.broadcast_object([1, 2], name="w")  # here


def of_optimizers() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = gw.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for number in range(2):
        if number == 1:
            late()
        model(torch.ones(4)).sum().backward()
        optimizer.step()  # here


def of_groups() -> None:
    late()
    dist.all_reduce(torch.ones(4))  # here


def of_ddp() -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    late()
    model(torch.ones(4)).sum().backward()  # here


way = globals()[sys.argv[1]]
gw.init()
if way in (of_groups, of_ddp):
    dist.init_process_group("gradwire")
way()
