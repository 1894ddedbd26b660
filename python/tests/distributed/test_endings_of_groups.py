"""How processes of torch.distributed end: Ctrl-C, exits, forks (TELL)."""

from __future__ import annotations

import re

import pytest
from group_programs import START
from launching import Job

torch = pytest.importorskip("torch")


def test_ctrl_c_ends_a_wait(job: Job) -> None:
    done = job(
        START
        + """
import threading
rank = start()
if rank == 0:
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        dist.all_reduce(torch.ones(3))
    except KeyboardInterrupt:
        print("INTERRUPTED", flush=True)
    dist.barrier()
else:
    time.sleep(3)
    dist.all_reduce(torch.ones(3))
    dist.barrier()
"""
    )
    assert "INTERRUPTED" in done.stdout and done.returncode == 0, done.stdout


@pytest.mark.parametrize("destroys", [True, False])
def test_an_exit_with_futures_in_flight(job: Job, destroys: bool) -> None:
    done = job(
        START
        + f"""
rank = start()
group = dist.new_group([0])
futures = [dist.all_reduce(torch.ones(1000), async_op=True).get_future() for _ in range(8)]
if rank == 1:
    lonely = dist.all_reduce(torch.ones(10), async_op=True).get_future()
for future in futures:
    future.wait()
if {destroys}:
    dist.destroy_process_group()
print("LEAVES", rank, flush=True)
"""
    )
    assert done.stdout.count("LEAVES") == 2, done.stdout
    assert not re.search("SIGABRT|SIGSEGV|terminate called|Traceback", done.stdout), done.stdout


def test_a_child_of_fork_says_so(job: Job) -> None:
    done = job(
        START
        + """
rank = start()
child = os.fork()
if child == 0:
    try:
        dist.all_reduce(torch.ones(3))
    except gw.Forked as error:
        print("CHILD", "forked" in str(error), flush=True)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
tensor = torch.ones(3)
dist.all_reduce(tensor)
print("PARENT", tensor[0].item(), flush=True)
dist.destroy_process_group()
"""
    )
    assert done.stdout.count("CHILD True") == 2 and done.stdout.count("PARENT 2.0") == 2, (
        done.stdout
    )
    assert done.returncode == 0, done.stdout


def test_a_data_loader_that_forks(job: Job) -> None:
    done = job(
        START
        + """
rank = start()
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
data = TensorDataset(torch.arange(16.0))
sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=2)
for [batch] in loader:
    total = batch.sum()
    dist.all_reduce(total)
    print("SUM", total.item(), flush=True)
dist.destroy_process_group()
"""
    )
    assert done.stdout.count("SUM 28.0") == 2 and done.stdout.count("SUM 92.0") == 2, done.stdout
    assert done.returncode == 0, done.stdout


def test_an_exit_code_is_told_at_once(job: Job) -> None:
    """A rank that fails does not wait until the others remove their process sets, too."""
    done = job(
        START
        + """
rank = start()
dist.all_reduce(torch.ones(3))
if rank == 1:
    sys.exit(3)
dist.all_reduce(torch.ones(3))
"""
    )
    assert done.returncode == 3 and "ended with exit code 3" in done.stdout, done.stdout
    assert " has waited " not in done.stdout, done.stdout
    # The group that a rank leaves is none of its tensors.
    assert "remove-process-set" not in done.stdout, done.stdout


def test_a_rank_with_fewer_backwards_is_named(job: Job) -> None:
    """PyTorch wraps the error in one of its own. The ranks that raise it are not at fault."""
    done = job(
        START
        + """
rank = start()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
for _ in range(5 if rank == 1 else 6):
    model(torch.ones(3, 4)).sum().backward()
""",
        ranks=3,
    )
    lines = done.stdout.splitlines()
    [report] = [line for line in lines if line.startswith("gradwire: the job failed: ")]
    assert "rank 1 " in report and "has left the job" in report, done.stdout
    assert done.returncode != 0, done.stdout
