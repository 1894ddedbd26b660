"""NaN in the contribution of one rank: ``checks.finite``."""

from __future__ import annotations

import re

import pytest
from launching import Job

TRAINING = """
import torch
import gradwire.torch as hvd

hvd.init()
net = torch.nn.Linear(3, 2)
hvd.broadcast_parameters(net.state_dict(), 0)
steps = hvd.DistributedOptimizer(
    torch.optim.SGD(net.parameters(), lr=0.1), named_parameters=net.named_parameters()
)
for step in range(14):
    steps.zero_grad()
    data = torch.ones(4, 3)
    if step == 12 and hvd.rank() == 1:
        data[2, 1] = float("nan")
    net(data).sum().backward()
    steps.step()
print("END", bool(net.weight.isnan().any()), flush=True)
"""
TOLD = "rank 1 contributes NaN to 'allreduce.optimizer1.weight' at element 1 of 6, and 1 more"


@pytest.mark.parametrize("hosts", ["127.0.0.1:2", "127.0.0.1:1,127.0.0.2:1"])
def test_the_rank_where_a_nan_comes_from_is_named(job: Job, hosts: str) -> None:
    pytest.importorskip("torch")
    done = job(TRAINING, hosts=hosts, GRADWIRE_CHECKS__FINITE="fail")
    assert done.returncode == 1, done.stdout
    for rank in (0, 1):
        told = [line for line in done.stdout.splitlines() if f"[{rank}]" in line and TOLD in line]
        assert len(told) == 1, done.stdout
    # The launcher may see the end of the rank before the daemons report it.
    ended = rf"gradwire: (the job failed: )?rank 1 on host 127\.0\.0\.{len(hosts.split(','))}"
    assert re.search(ended, done.stdout), done.stdout


def test_a_warning_lets_the_job_go_on(job: Job) -> None:
    pytest.importorskip("torch")
    done = job(TRAINING, hosts="127.0.0.1:2", GRADWIRE_CHECKS__FINITE="warn")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(TOLD) == 1, done.stdout
    assert done.stdout.count("END True") == 2, done.stdout
