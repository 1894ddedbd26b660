"""One rank of `frameworks.py`: a training step with one framework, with and without an exchange of
ResNet-50's gradients.

All ways of a framework share the same processes and take turns. A step computes gradients that are
the same in each step; its result is compared after the timed part. Its time is that of the slowest
rank. Rank 0 prints a line of JSON.
"""

import argparse
import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from math import prod
from typing import Any

import gradwire as gw
import numpy as np

from shapes import resnet50

# A step, which returns the gradients of the framework.
Step = Callable[[], list[Any]]
SHAPES = [dims for _, dims in resnet50()]


def given(rank: int) -> list[np.ndarray]:
    """Returns a rank's gradients: small whole numbers, whose averages are exact."""
    counts = [prod(dims) for dims in SHAPES]
    return [
        ((np.arange(count) % 61 + 1) * (rank + 1)).astype(np.float32).reshape(dims)
        for count, dims in zip(counts, SHAPES, strict=True)
    ]


def own_address() -> str:
    """Returns the address of this node on the network of the benchmark."""
    if gw.size() == gw.local_size():
        return "127.0.0.1"
    words = ["ip", "-4", "-o", "address", "show", "dev", os.environ["GLOO_SOCKET_IFNAME"]]
    fields = subprocess.check_output(words, text=True).split()
    return fields[fields.index("inet") + 1].partition("/")[0]


def torch_steps() -> dict[str, Step]:
    """PyTorch: the optimizer, with gradients in new memory in each step."""
    import gradwire.torch as hvd
    import torch

    import torch_rank

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            parts = [torch.nn.Parameter(torch.zeros(dims)) for dims in SHAPES]
            self.all = torch.nn.ParameterList(parts)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for parameter, gradient in zip(self.all, gradients, strict=True):
                x = torch_rank.Give.apply(x, parameter, gradient)
            return x

    gradients = [torch.from_numpy(each) for each in given(gw.rank())]
    begin = torch.zeros(1, requires_grad=True)

    def made(wrapped: bool) -> Step:
        model = Model()
        optimizer: torch.optim.Optimizer = torch_rank.Nothing(model.parameters())
        if wrapped:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

        def step() -> list[Any]:
            model.zero_grad()
            model(begin).sum().backward()
            optimizer.step()
            return [parameter.grad for parameter in model.parameters()]

        return step

    return {"compute": made(False), "gradwire": made(True)}


def tensorflow_steps() -> dict[str, Step]:
    """TensorFlow: tapes in compiled functions, and its own strategy."""
    import tensorflow as tf

    def cluster() -> None:
        with socket.create_server((own_address(), 0)) as probe:
            own = "{}:{}".format(*probe.getsockname()[:2])
        workers = gw.allgather_object(own)
        task = {"type": "worker", "index": gw.rank()}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})

    cluster()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    import gradwire.tensorflow as hvd

    factors = [tf.constant(each) for each in given(gw.rank())]

    def loss_of(variables: list[Any]) -> Any:  # noqa: ANN401
        pairs = zip(variables, factors, strict=True)
        return tf.add_n([tf.reduce_sum(variable * factor) for variable, factor in pairs])

    variables = [tf.Variable(tf.zeros(dims)) for dims in SHAPES]
    with strategy.scope():
        mirrored = [tf.Variable(tf.zeros(dims)) for dims in SHAPES]

    @tf.function
    def compute() -> list[Any]:
        with tf.GradientTape() as tape:
            loss = loss_of(variables)
        return tape.gradient(loss, variables)

    @tf.function
    def ours() -> list[Any]:
        with tf.GradientTape() as tape:
            loss = loss_of(variables)
        return hvd.DistributedGradientTape(tape).gradient(loss, variables)

    @tf.function
    def theirs() -> list[Any]:
        def replica() -> list[Any]:
            with tf.GradientTape() as tape:
                loss = loss_of(mirrored)
            gradients = tape.gradient(loss, mirrored)
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.MEAN, gradients)

        return strategy.run(replica)

    return {"compute": compute, "gradwire": ours, "MultiWorkerMirroredStrategy": theirs}


def jax_steps() -> dict[str, Step]:
    """JAX: compiled functions, and JAX's own processes over Gloo."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if gw.size() > gw.local_size():
        # Otherwise, it looks up the name of its host, which a namespace does not have.
        from jax._src import xla_bridge

        made = xla_bridge._jax.make_gloo_tcp_collectives
        device = os.environ["GLOO_SOCKET_IFNAME"]
        xla_bridge._jax.make_gloo_tcp_collectives = functools.partial(made, interface=device)
    import gradwire.jax as gwj
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    gwj.initialize_distributed()
    factors = [jnp.asarray(each) for each in given(gw.rank())]
    zeros = [jnp.zeros(dims) for dims in SHAPES]

    def loss_of(parameters: list[Any], factors: list[Any]) -> Any:  # noqa: ANN401
        return sum((p * f).sum() for p, f in zip(parameters, factors, strict=True))

    gradients_of = jax.grad(loss_of)
    compute = jax.jit(gradients_of)
    ours = jax.jit(lambda p, f: gwj.allreduce(gradients_of(p, f), name="gradients"))
    mesh = Mesh(np.array(jax.devices()), ("ranks",))
    split = NamedSharding(mesh, PartitionSpec("ranks"))
    shared = [
        jax.make_array_from_single_device_arrays((gw.size(), *dims), split, [each[None]])
        for each, dims in zip(factors, SHAPES, strict=True)
    ]

    def replica(factors: list[Any]) -> list[Any]:
        gradients = gradients_of([jnp.zeros(dims) for dims in SHAPES], [f[0] for f in factors])
        return jax.lax.pmean(gradients, "ranks")

    theirs = jax.jit(
        jax.shard_map(
            replica,
            mesh=mesh,
            in_specs=(PartitionSpec("ranks"),),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )

    def waited(call: Callable[[], list[Any]]) -> Step:
        return lambda: jax.block_until_ready(call())

    return {
        "compute": waited(lambda: compute(zeros, factors)),
        "gradwire": waited(lambda: ours(zeros, factors)),
        "Gloo": waited(lambda: [each.addressable_data(0) for each in theirs(shared)]),
    }


def trainer_steps() -> dict[str, Step]:
    """PyTorch's DDP over the backend, plain and prepared by Accelerate and Lightning."""
    import gradwire.torch.distributed as backend
    import torch

    import torch_rank

    backend.prepare()
    from accelerate import Accelerator
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    begin = torch.zeros(1, requires_grad=True)
    ddp = torch.nn.parallel.DistributedDataParallel

    def made(prepare: Callable[[Any, Any], tuple[Any, Any]], backward: Callable[..., Any]) -> Step:
        net = torch_rank.Gradients(torch.device("cpu"))
        model, optimizer = prepare(net, torch.optim.SGD(net.parameters(), 0.0))

        def step() -> list[Any]:
            optimizer.zero_grad()
            backward(model(begin).sum())
            optimizer.step()
            return [parameter.grad for parameter in net.parameters()]

        return step

    accelerator = Accelerator(cpu=True)
    fabric = Fabric(
        accelerator="cpu",
        devices=gw.local_size(),
        num_nodes=gw.size() // gw.local_size(),
        strategy=DDPStrategy(process_group_backend="gradwire"),
    )
    fabric.launch()
    plain = made(lambda net, optimizer: (ddp(net), optimizer), lambda loss: loss.backward())
    return {
        "compute": made(lambda net, optimizer: (net, optimizer), lambda loss: loss.backward()),
        "gradwire": plain,
        "Accelerate": made(accelerator.prepare, accelerator.backward),
        "Lightning": made(fabric.setup, fabric.backward),
    }


FRAMEWORKS = {
    "torch": torch_steps,
    "tensorflow": tensorflow_steps,
    "jax": jax_steps,
    "trainers": trainer_steps,
}


def check(way: str, gradients: list[Any]) -> None:
    """Ends the program if gradients are not the expected averages."""
    factor = gw.rank() + 1 if way == "compute" else (gw.size() + 1) / 2
    for number, (gradient, single) in enumerate(zip(gradients, given(0), strict=True)):
        if not np.array_equal(np.asarray(gradient), single * np.float32(factor)):
            sys.exit(f"framework_rank: rank {gw.rank()}: {way}: wrong gradient {number}")


def main() -> None:
    """Joins the job that started it, and measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--framework", choices=FRAMEWORKS, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    asked = parser.parse_args()
    gw.init()
    # Some libraries write to the folder of the program.
    os.chdir(tempfile.mkdtemp())
    steps = FRAMEWORKS[asked.framework]()
    times: dict[str, list[list[float]]] = {way: [] for way in steps}
    ways = list(steps)
    for number in range(-1, asked.rounds):  # the first one is for warm-up
        turn = max(number, 0) % len(ways)
        for way in ways[turn:] + ways[:turn]:
            row, gradients = [], list[Any]()
            # In its first ten steps, the optimizer of PyTorch compares gradients by value.
            for at in range(-12 if number < 0 else -1, asked.steps):
                gw.barrier()
                begin = time.perf_counter()
                gradients = steps[way]()
                if at >= 0:
                    row.append((time.perf_counter() - begin) * 1e6)
            check(way, gradients)
            del gradients
            slowest = gw.allreduce(np.array(row), op=gw.Max, name="times")
            if number >= 0:
                times[way].append(slowest.tolist())
    if gw.rank() == 0:
        print(json.dumps({"kind": asked.framework, "times_us": times}), flush=True)
    gw.barrier()
    with contextlib.suppress(RuntimeError):
        gw.shutdown()
    # TensorFlow's servers and JAX's service have threads that need not end.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
