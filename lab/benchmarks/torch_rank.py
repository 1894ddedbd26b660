"""One rank of `torch_model.py`: a training step of ResNet-50 in PyTorch, with each way to exchange
its gradients.

All systems share the same processes and take turns, a few steps each, so that other activity on the
machine affects all of them. Each has its own model with the same parameters. Steps change no
parameters, so every step has the same right result, which is compared after the timed part. A step
is `zero_grad`, forward, backward and the optimizer's `step`; its time is that of the slowest rank.

Rank 0 prints a line of JSON for each kind of compute.
"""

import argparse
import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import gradwire.torch as gw
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from device import finished, of_this_rank
from python_rank import pattern
from shapes import PARAMETERS, TENSORS, resnet50

# Sums in a different order differ in the last bits of float32. The real gradients reach some
# hundreds. On a GPU, the backward pass itself adds in a different order each time.
NEAR = {"cpu": {"rtol": 1e-4, "atol": 1e-4}, "cuda": {"rtol": 1e-2, "atol": 1e-2}}


class Give(torch.autograd.Function):
    """A function without cost, whose backward pass returns a parameter's gradient in new memory."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: torch.Tensor,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
    ) -> torch.Tensor:
        """Returns `x` unchanged."""
        ctx.gradient = gradient
        return x.view_as(x)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        *above: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Returns the stored gradient, whatever the incoming gradient is."""
        return above[0], ctx.gradient.clone(), None


class Gradients(torch.nn.Module):
    """The parameters of ResNet-50 without its arithmetic."""

    # One list for all models of a process: 98 MiB.
    given: list[torch.Tensor] = []  # noqa: RUF012

    def __init__(self, device: torch.device) -> None:
        """Makes parameters of zeros, and gradients of small whole numbers, whose averages are
        exact."""
        super().__init__()
        shapes = [dims for _, dims in resnet50()]
        if not Gradients.given:
            factor = dist.get_rank() + 1
            Gradients.given = [pattern(prod(dims), factor).view(dims).to(device) for dims in shapes]
        self.all = torch.nn.ParameterList(
            [torch.nn.Parameter(torch.zeros(dims)) for dims in shapes]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Uses the parameters front layer first, so that gradients come last layer first."""
        for parameter, gradient in zip(self.all, Gradients.given, strict=True):
            x = Give.apply(x, parameter, gradient)
        return x


class Bottleneck(torch.nn.Module):
    """Three convolutions and a connection around them (He et al. 2015)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        """Makes a block with `4 * width` output channels."""
        super().__init__()
        self.conv1 = convolution(inputs, width, 1)
        self.conv2 = convolution(width, width, 3, stride)
        self.conv3 = convolution(width, 4 * width, 1)
        self.downsample = (
            convolution(inputs, 4 * width, 1, stride) if inputs != 4 * width or stride > 1 else None
        )
        self.relu = torch.nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes one block."""
        around = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.conv2(self.relu(self.conv1(x))))
        return self.relu(self.conv3(out) + around)


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> torch.nn.Module:
    """A convolution with its normalisation."""
    plain = torch.nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return torch.nn.Sequential(plain, torch.nn.BatchNorm2d(outputs))


class ResNet50(torch.nn.Sequential):
    """The network itself, as in torchvision."""

    def __init__(self) -> None:
        """Makes sixteen blocks between a convolution and a linear layer."""
        layers: list[torch.nn.Module] = [
            convolution(3, 64, 7, 2),
            torch.nn.ReLU(inplace=True),
            torch.nn.MaxPool2d(3, 2, 1),
        ]
        inputs = 64
        for stage, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)]):
            for block in range(blocks):
                layers.append(Bottleneck(inputs, width, 2 if stage > 0 and block == 0 else 1))
                inputs = 4 * width
        super().__init__(
            *layers,
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
            torch.nn.Linear(inputs, 1000),
        )


class Nothing(torch.optim.Optimizer):
    """An optimizer that changes no parameter."""

    def __init__(self, parameters: Iterator[torch.nn.Parameter]) -> None:
        """Keeps the parameters, like any optimizer."""
        super().__init__(parameters, {})

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Changes nothing."""


def keep(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook of DDP that exchanges nothing. Its time is DDP's own work of copying gradients into
    buckets."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class Step:
    """A training step with one way to exchange gradients."""

    def __init__(self, module: torch.nn.Module, wrap: str, gloo: dist.ProcessGroup) -> None:
        """Sets up the way named `wrap`, one of `WAYS`."""
        self.parameters = list(module.parameters())
        self.optimizer: torch.optim.Optimizer = Nothing(module.parameters())
        self.module = module
        # DistributedOptimizer sets gradients to zero in place. A plain model drops them, and
        # autograd allocates new ones.
        self.clear: Callable[[], None] = self.optimizer.zero_grad
        if wrap.startswith("optimizer"):
            self.optimizer = gw.DistributedOptimizer(
                self.optimizer, named_parameters=module.named_parameters()
            )
            self.clear = module.zero_grad if wrap == "optimizer-new" else self.optimizer.zero_grad
        elif wrap != "compute":
            # Buffers differ between ranks here, in every system.
            options: dict[str, Any] = {
                "broadcast_buffers": False,
                "gradient_as_bucket_view": wrap != "gloo-copied",
            }
            group = dist.group.WORLD if wrap == "backend" else gloo
            self.module = DistributedDataParallel(module, process_group=group, **options)
            if wrap == "hook":
                self.module.register_comm_hook(gw.DdpHookState(), gw.ddp_hook)
            elif wrap == "ddp":
                self.module.register_comm_hook(None, keep)

    def __call__(self, given: torch.Tensor) -> None:
        """Runs one step."""
        self.clear()
        self.module(given).sum().backward()
        self.optimizer.step()


# These exchange nothing.
LOCAL = ("compute", "ddp")
WAYS = (*LOCAL, "gloo", "gloo-copied", "optimizer", "optimizer-new", "backend", "hook")


def processor_time() -> float:
    """Returns the seconds that this process has used; on the node's first rank also those of the
    daemon."""
    used = time.process_time()
    if os.environ["LOCAL_RANK"] == "0":
        for name in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # processes come and go
                program, _, rest = name.read_text().rpartition(")")
                fields = rest.split()
                # The launcher's agent has started both.
                if program.endswith("(gradwired") and int(fields[1]) == os.getppid():
                    used += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


def inputs(kind: str, batch: int, pixels: int, device: torch.device) -> torch.Tensor:
    """Returns this rank's part of the data."""
    if kind == "none":
        return torch.zeros(1, requires_grad=True, device=device)
    random = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(batch, 3, pixels, pixels, generator=random).to(device)


def right(
    steps: dict[str, Step], given: torch.Tensor, gloo: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Returns the averages, by Gloo, of the model's gradients without an exchange."""
    step = steps["compute"]
    step(given)
    means = [parameter.grad.clone() for parameter in step.parameters if parameter.grad is not None]
    for mean in means:
        dist.all_reduce(mean, group=gloo)
        mean /= dist.get_world_size()
    return means


def check(name: str, step: Step, means: list[torch.Tensor]) -> None:
    """Ends the program if gradients are not the expected averages."""
    for number, (parameter, mean) in enumerate(zip(step.parameters, means, strict=True)):
        near = NEAR[mean.device.type]
        if parameter.grad is None or not torch.allclose(parameter.grad, mean, **near):
            sys.exit(
                f"torch_rank: rank {dist.get_rank()}: {name}: wrong gradient of tensor {number}"
            )


def measure(
    kind: str, ways: list[str], asked: argparse.Namespace, gloo: dist.ProcessGroup
) -> dict[str, Any]:
    """Times all ways in turn: returns rounds for each, with the steps' times in microseconds."""
    made: dict[str, Step] = {}
    for way in ways:
        torch.manual_seed(5)  # the same parameters for all of them, on all ranks
        module = Gradients(asked.device) if kind == "none" else ResNet50()
        made[way] = Step(module.to(asked.device), way, gloo)
    counts = [parameter.numel() for parameter in made["compute"].parameters]
    if (len(counts), sum(counts)) != (TENSORS, PARAMETERS):
        sys.exit(f"torch_rank: not ResNet-50: {len(counts)} tensors, {sum(counts)} parameters")
    given = inputs(kind, asked.batch, asked.pixels, asked.device)
    means = right(made, given, gloo)
    times: dict[str, list[list[float]]] = {way: [] for way in ways}
    busy, used = dict.fromkeys(ways, 0.0), 0.0
    for number in range(-1, asked.rounds):  # the first one is for warm-up
        turn = max(number, 0) % len(ways)
        for way in ways[turn:] + ways[:turn]:
            row = []
            for at in range(-1, asked.steps):
                dist.barrier(group=gloo)
                begin = time.perf_counter()
                made[way](given)
                finished(asked.device)
                if at >= 0 and number >= 0:
                    row.append((time.perf_counter() - begin) * 1e6)
                elif number >= 0:
                    used = processor_time()
            if number >= 0:
                busy[way] += processor_time() - used
            if way not in LOCAL:
                check(way, made[way], means)
            slowest = torch.tensor(row, dtype=torch.float64)
            if number >= 0:
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=gloo)
                times[way].append(slowest.tolist())
    cpu = torch.tensor([busy[way] / asked.rounds / asked.steps * 1e6 for way in ways])
    dist.all_reduce(cpu, group=gloo)
    return {"kind": kind, "times_us": times, "cpu_us": dict(zip(ways, cpu.tolist(), strict=True))}


def latency(asked: argparse.Namespace, gloo: dist.ProcessGroup) -> dict[str, Any]:
    """Times blocking calls with one element: returns rounds with the calls' times in
    microseconds."""
    tensor = torch.ones(1)
    calls: dict[str, Callable[[], object]] = {
        "gloo": lambda: dist.all_reduce(tensor, group=gloo),
        "backend": lambda: dist.all_reduce(tensor),
        "allreduce_": lambda: gw.allreduce_(tensor, name="latency", op=gw.Average),
    }
    times: dict[str, list[list[float]]] = {name: [] for name in calls}
    for _ in range(asked.rounds):
        for name, call in calls.items():
            row = []
            for at in range(-20, 200):
                tensor.fill_(1.0)
                begin = time.perf_counter()
                call()
                if at >= 0:
                    row.append((time.perf_counter() - begin) * 1e6)
            times[name].append(row)
    return {"kind": "latency", "times_us": times}


def main() -> None:
    """Joins the job that started it, and measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default="latency,none,resnet50")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    asked = parser.parse_args()
    asked.device = of_this_rank(asked.device)
    ways = [way for way in WAYS if way in asked.ways.split(",") or way == "compute"]

    # All nodes are on this machine.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["WORLD_SIZE"])))
    dist.init_process_group("gradwire")
    gloo = dist.new_group(backend="gloo")
    for kind in asked.kinds.split(","):
        found = latency(asked, gloo) if kind == "latency" else measure(kind, ways, asked, gloo)
        gc.collect()
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
    dist.barrier(group=gloo)
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
