"""Models compiled by PyTorch exchange their gradients like others."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest
from launching import Job

torch = pytest.importorskip("torch")

PROGRAM = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import gradwire.torch as hvd

dist.init_process_group("gradwire")
rank, size = hvd.rank(), hvd.size()

def trained(wrap):
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model, optimizer, rows = wrap(net)
    for step in range(3):
        given = torch.randn(4 * size, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(rows(given)).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])

def mine(rows):
    return rows[4 * rank :][:4]

def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.05)

def distributed(net):
    return hvd.DistributedOptimizer(sgd(net), net.named_parameters())

expected = trained(lambda net: (net, sgd(net), lambda rows: rows))
ways = {
    "optimizer": lambda net: (torch.compile(net), distributed(net), mine),
    "ddp": lambda net: (torch.compile(DistributedDataParallel(net)), sgd(net), mine),
}
for name, way in ways.items():
    got = trained(way)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    everybody = hvd.allgather(got.unsqueeze(0))
    assert all(torch.equal(other, got) for other in everybody)
    print("TRAINED", name, flush=True)
dist.destroy_process_group()
"""


def test_machine_code(job: Job, tmp_path: Path) -> None:
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("PyTorch's compiler needs a C++ compiler")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        pytest.skip("PyTorch's compiler needs Python.h")
    # One compiling thread: others would be processes that each load PyTorch.
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = job(PROGRAM, ranks=2, **cache)
    assert done.stdout.count("TRAINED optimizer") == 2 and done.stdout.count("TRAINED ddp") == 2, (
        done.stdout
    )
