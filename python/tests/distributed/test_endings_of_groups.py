"""How errors come to those who wait through torch.distributed, and how processes end (TELL, WAIT)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import LAUNCHER, LIMIT, Job, needs_torch

torch = pytest.importorskip("torch")
UNTOLD = "older releases do not tell a group that it is destroyed"

START = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn
import gradwire.torch as gw
from gradwire.torch.distributed import last_error

def start(**options):
    dist.init_process_group("gradwire", **options)
    return dist.get_rank()

def told(error):
    print("TOLD", dist.get_rank(), type(error).__name__, " ".join(str(error).split()), flush=True)
"""

# What waits when rank 1 is killed: the call itself, DDP's future, FSDP2's work.
WAITS = """
rank = start()
torch.manual_seed(0)
# A work and a future that deliver errors otherwise, to see what PyTorch makes of them.
way = os.environ["WAY"]
if way != "safe":
    from torch._C._distributed_c10d import _create_work_from_future
    from gradwire.torch.distributed import _base, _work
    class Unsafe(_work.Work):
        def get_future(self):
            if way == "work+then":
                return super().get_future()
            future = torch.futures.Future()
            def complete():
                try:
                    _work.Work.wait(self)
                    future.set_result(self.value)
                except BaseException as error:
                    future.set_exception(error)
            _work.start(complete)
            return future
    def make(*given):
        work = Unsafe(*given)
        if way.startswith("work"):
            return work
        if way == "future+then":
            return _create_work_from_future(_work.Work.get_future(work))
        return _create_work_from_future(work.get_future())
    _base.Work = make

def die(*_):
    if rank == 1:
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)

use = os.environ["USE"]
if use == "call":
    tensor = torch.ones(300)  # of up to 16 bytes the work is kept, and these stand-ins can't be
    dist.all_reduce(tensor)
    die()
    call = lambda: dist.all_reduce(tensor)
else:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    if use == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        model = fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model(torch.ones(2, 4)).sum().backward()
    loss = model(torch.ones(2, 4)).sum()
    die()
    call = loss.backward
try:
    call()
    print("SUCCESS", rank, flush=True)
except Exception as error:
    told(error)
    print("LAST", type(last_error()).__name__, last_error().rank, flush=True)
"""


def needs(use: str) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if use == "fsdp2" and not hasattr(fsdp, "fully_shard"):
        pytest.skip("this PyTorch has no FSDP2")


@pytest.mark.parametrize("use", ["call", "ddp", "fsdp2"])
def test_a_peers_death_is_told(job: Job, use: str) -> None:
    needs(use)
    done = job(START + WAITS, ranks=3, USE=use, WAY="safe")
    said = [line for line in done.stdout.splitlines() if "TOLD" in line]
    assert len(said) == 2, done.stdout
    for line in said:
        kind = "RuntimeError" if use == "ddp" else "PeerLost"  # DDP wraps it
        assert re.search(rf"TOLD [02] {kind} .*rank 1 on host .*killed", line), done.stdout
    assert done.stdout.count("LAST PeerLost 1") == 2, done.stdout
    assert "SUCCESS" not in done.stdout and "SIGSEGV" not in done.stdout, done.stdout


# The other three ways, so that nobody takes one: what PyTorch does to the ranks that survive.
@pytest.mark.parametrize(
    ("way", "use", "outcome"),
    [
        ("work+exception", "call", "raises"),
        ("work+exception", "ddp", "segfault"),
        ("work+exception", "fsdp2", "raises"),
        ("future+exception", "call", "success"),
        ("future+exception", "ddp", "segfault"),
        ("future+exception", "fsdp2", "success"),
        ("future+then", "call", "success"),
        ("future+then", "ddp", "raises"),
        ("future+then", "fsdp2", "success"),
    ],
)
def test_why_errors_are_delivered_as_they_are(job: Job, way: str, use: str, outcome: str) -> None:
    needs(use)
    done = job(START + WAITS, ranks=3, USE=use, WAY=way)
    seen = "success" if "SUCCESS" in done.stdout else "raises" if "TOLD" in done.stdout else "segfault"
    assert seen == outcome, f"PyTorch has changed; see _work.py\n{done.stdout}"


def test_disagreement(job: Job) -> None:
    done = job(
        START
        + """
rank = start()
for name, call in {
    "shape": lambda: dist.all_reduce(torch.ones(3 + rank)),
    "dtype": lambda: dist.all_reduce(torch.ones(3, dtype=[torch.float32, torch.float64][rank])),
    "op": lambda: dist.all_reduce(torch.ones(3), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank]),
    "root": lambda: dist.broadcast(torch.ones(3), rank),
    "call": lambda: dist.all_reduce(torch.ones(3)) if rank else dist.broadcast(torch.ones(3), 0),
    "future": lambda: dist.all_reduce(torch.ones(3 + rank), async_op=True).get_future().wait(),
}.items():
    try:
        call()
        print("SUCCESS", flush=True)
    except RuntimeError as error:
        print("TOLD", name, type(error).__name__, "disagree" in str(error), flush=True)
tensor = torch.ones(3)
dist.all_reduce(tensor)  # and the job goes on
print("WENT ON", tensor[0].item(), flush=True)
dist.destroy_process_group()
"""
    )
    for name in ("shape", "dtype", "op", "root", "call", "future"):
        assert len(re.findall(rf"TOLD {name} \w+ True", done.stdout)) == 2, done.stdout
    assert done.stdout.count("WENT ON 2.0") == 2 and done.returncode == 0, done.stdout


def test_timeouts(job: Job) -> None:
    done = job(
        START
        + """
rank = start(timeout=timedelta(seconds=2))
patient = dist.new_group([0, 1], timeout=timedelta(seconds=300))
if rank == 0:
    started = time.monotonic()
    for call in (
        lambda: dist.all_reduce(torch.ones(3)),
        lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(timedelta(seconds=1)),
        lambda: dist.all_reduce(torch.ones(3), async_op=True).get_future().wait(),
        lambda: dist.recv(torch.ones(3), 1),
    ):
        try:
            call()
            print("SUCCESS", flush=True)
        except RuntimeError as error:
            told(error)
    assert time.monotonic() - started > 6.0
    dist.all_reduce(torch.ones(3), group=patient)
else:
    time.sleep(12)
    dist.all_reduce(torch.ones(3), group=patient)
    for _ in range(3):
        dist.all_reduce(torch.ones(3))
    dist.send(torch.ones(3), 0)
dist.barrier(patient)
print("END", flush=True)
"""
    )
    said = [line for line in done.stdout.splitlines() if "TOLD" in line]
    assert len(said) == 4 and all("did not complete within" in line for line in said), done.stdout
    assert sum("WaitTimeout" in line for line in said) >= 3, done.stdout
    assert done.stdout.count("END") == 2 and done.returncode == 0, done.stdout


def test_a_rank_that_leaves_is_named(job: Job) -> None:
    done = job(
        START
        + """
rank = start()
dist.barrier()
if rank == 0:
    try:
        dist.all_reduce(torch.ones(3))
    except gw.PeerLost as error:
        told(error)
"""
    )
    assert re.search(r"TOLD 0 PeerLost .*rank 1", done.stdout), done.stdout


def test_bad_calls(job: Job) -> None:
    done = job(
        START
        + """
rank = start()
for name, call in {
    "sizes": lambda: dist.all_gather_into_tensor(torch.empty(5), torch.ones(2)),
    "parts": lambda: dist.group.WORLD.allgather([[torch.empty(2)]], [torch.ones(2)]),
    "splits": lambda: dist.all_to_all_single(torch.empty(4), torch.empty(4), [1, 1], [2, 2]),
    "dtype": lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fnuz)),
    "tag": lambda: dist.send(torch.ones(1), 1 - rank, tag=1 << 32),
    "root": lambda: dist.group.WORLD.broadcast([torch.ones(1)], 2),
    "kinds": lambda: dist.group.WORLD.broadcast([torch.ones(1), torch.ones(1, dtype=torch.int32)]),
    "bool": lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG),
}.items():
    try:
        call()
        print("SUCCESS", name, flush=True)
    except ValueError as error:
        print("TOLD", name, type(error).__name__, flush=True)
outputs = [torch.empty(2) for _ in range(2)]
try:
    dist.all_gather(outputs, torch.ones(2 + rank))
except ValueError as error:
    print("TOLD rows", "gave 3 elements" in str(error), flush=True)
tensor = torch.ones(1)
dist.all_reduce(tensor)
print("WENT ON", tensor.item(), flush=True)
dist.destroy_process_group()
"""
    )
    assert "SUCCESS" not in done.stdout, done.stdout
    for name in ("sizes", "parts", "splits", "dtype", "tag", "root", "kinds", "bool"):
        assert done.stdout.count(f"TOLD {name} InvalidRequest") == 2, done.stdout
    assert done.stdout.count("TOLD rows True") == 2, done.stdout
    assert done.stdout.count("WENT ON 2.0") == 2 and done.returncode == 0, done.stdout


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


def test_groups_again(job: Job) -> None:
    done = job(
        START
        + """
for turn in range(3):
    rank = start()
    group = dist.new_group([0, 2])
    if rank != 1:
        tensor = torch.full((2,), turn + 1.0)
        dist.all_reduce(tensor, group=group)
        print("SUM", tensor[0].item(), flush=True)
    dist.barrier()
    dist.destroy_process_group()
""",
        ranks=3,
    )
    for turn in range(3):
        assert done.stdout.count(f"SUM {2 * (turn + 1)}.0") == 2, done.stdout
    assert done.returncode == 0, done.stdout


def test_the_process_set_of_a_group_goes_with_it(job: Job) -> None:
    needs_torch(2, 13, why=UNTOLD)
    done = job(
        START
        + """

from gradwire import _world as job
rank = start()
sets = dist.group.WORLD.world._sets

def gone():
    until = time.monotonic() + 60
    while len(sets) > 1 and time.monotonic() < until:
        time.sleep(0.01)
    return len(sets) == 1

for turn in range(3):
    one, two = dist.new_group([0, 2]), dist.new_group([2, 0])
    dist.barrier()
    tensor = torch.ones(1)
    # Who is no member makes their sets and removes them behind its own back.
    if rank != 1:
        _, first, second = sets.values()  # one each, and that of all ranks
        dist.destroy_process_group(one)
        dist.all_reduce(tensor, group=two)
        dist.destroy_process_group(two)
        print("SUM", tensor.item(), flush=True)
    print("GONE", gone(), flush=True)
    if rank != 1:
        for made in (first, second):
            try:
                job.session().barrier(process_set=made)
            except ValueError as error:
                print("REMOVED", flush=True)
    dist.barrier()
# Those that are left over go with the world of groups.
dist.new_group([0, 1])
dist.barrier()
dist.destroy_process_group()
print("END", rank, flush=True)
""",
        ranks=3,
    )
    assert done.returncode == 0 and done.stdout.count("END") == 3, done.stdout
    assert done.stdout.count("GONE True") == 9 and done.stdout.count("REMOVED") == 12, done.stdout
    assert done.stdout.count("SUM 2.0") == 6, done.stdout


@pytest.mark.parametrize("hosts", ["127.0.0.1:3", "127.0.0.1:1,127.0.0.2:2"])
def test_what_others_never_start_is_given_up_with_the_group(hosts: str, tmp_path: Path) -> None:
    needs_torch(2, 13, why=UNTOLD)
    program = tmp_path / "program.py"
    program.write_text(
        START
        + """
rank = start(timeout=timedelta(seconds=60))
calls = {
    "reduce": lambda group: dist.all_reduce(torch.ones(3), group=group, async_op=True),
    "large": lambda group: dist.all_reduce(torch.ones(1 << 22), group=group, async_op=True),
    "recv": lambda group: dist.irecv(torch.ones(3), 1, group=group),
    "future": lambda group: dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future(),
}
for turn in range(2):
    for name, call in calls.items():
        for members in ([0, 1], [0, 2], [0, 1, 2]):
            if name == "recv" and 1 not in members:
                continue
            group, beside = dist.new_group(members), dist.new_group(members)
            done, works = torch.ones(1 << 20), []
            if rank in members:
                works.append(dist.all_reduce(done, group=group, async_op=True))
            lonely = call(group) if rank == 0 else None
            # The other group of the same ranks has nothing to do with it.
            after = torch.ones(2)
            if rank in members:
                dist.destroy_process_group(group)
                dist.all_reduce(after, group=beside)
                works[0].wait()
                assert done[-1] == after[0] == len(members)
            if lonely is not None:
                try:
                    lonely.wait()
                    print("SUCCESS", name, flush=True)
                except RuntimeError as error:
                    assert type(last_error()) is gw.Cancelled and "process group was destroyed" in str(error), error
                    print("GIVEN UP", name, flush=True)
            later = dist.new_group([1, 2])
            if rank > 0:
                dist.barrier(later)
    dist.barrier()
    # Of the group of all ranks, too; and after it a new one.
    lonely = dist.all_reduce(torch.ones(3), async_op=True) if rank == 1 else None
    dist.destroy_process_group()
    if lonely is not None:
        try:
            lonely.wait()
            print("SUCCESS", flush=True)
        except gw.Cancelled as error:
            print("GIVEN UP all", flush=True)
    start(timeout=timedelta(seconds=60))
dist.barrier()
dist.destroy_process_group()
gw.barrier()
until = time.monotonic() + 60
while gw.stats()["in_flight"] and time.monotonic() < until:
    time.sleep(0.01)  # the sets of the groups are on their way out
print("END", gw.stats()["in_flight"], flush=True)
"""
    )
    words = [LAUNCHER, "run", "-np", "3", "-H", hosts, "--", sys.executable, str(program)]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT)
    assert "SUCCESS" not in done.stdout and done.returncode == 0, done.stdout
    for name, number in {"reduce": 6, "large": 6, "future": 6, "recv": 4, "all": 2}.items():
        assert done.stdout.count(f"GIVEN UP {name}") == number, done.stdout
    assert done.stdout.count("END 0") == 3, done.stdout


def test_a_group_after_a_rank_has_left(job: Job) -> None:
    needs_torch(2, 13, why=UNTOLD)
    done = job(
        START
        + """
rank = start(timeout=timedelta(seconds=60))
dist.barrier()
if rank == 2:
    dist.destroy_process_group()
    time.sleep(3)
else:
    time.sleep(1)
    try:
        dist.new_group([0, 1], use_local_synchronization=True)
        print("SUCCESS", flush=True)
    except gw.GradwireError as error:
        told(error)
""",
        ranks=3,
    )
    assert len(re.findall("TOLD [01] Cancelled rank 2 has left the process groups", done.stdout)) == 2, done.stdout


BESIDE = """
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
groups = [dist.new_group(backend="gradwire"), dist.new_group([2, 0, 1], backend="gradwire")]
groups.append([dist.new_group([0, 1], backend="gradwire"), dist.new_group([2], backend="gradwire")][rank // 2])
gloo = torch.full((2,), float(rank))
dist.all_reduce(gloo)
for turn, group in enumerate(groups):
    members = dist.get_process_group_ranks(group)
    tensor = torch.full((2,), float(rank))
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [float(sum(members))] * 2
    every = [None] * len(members)
    dist.all_gather_object(every, rank, group)
    assert every == members
dist.destroy_process_group(groups[0])
after = dist.new_group([0, 2], backend="gradwire")
if rank != 1:
    dist.barrier(after)
dist.barrier()
print("DONE", gloo[0].item(), dist.get_backend(groups[1]), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("turns", [1, 2])
def test_groups_beside_another_backend(job: Job, turns: int) -> None:
    done = job(START + turns * BESIDE, ranks=3)
    assert done.stdout.count("DONE 3.0 gradwire") == 3 * turns and done.returncode == 0, done.stdout


def test_a_group_beside_another_backend_that_some_ranks_know_nothing_of(job: Job) -> None:
    done = job(
        START
        + """
dist.init_process_group("gloo")
if dist.get_rank() < 2:
    try:
        dist.new_group([0, 1], backend="gradwire", use_local_synchronization=True)
        print("SUCCESS", flush=True)
    except gw.GradwireError as error:
        told(error)
dist.barrier()
""",
        ranks=3,
        GRADWIRE_LAUNCH__START_TIMEOUT_MS="3000",
    )
    assert "SUCCESS" not in done.stdout, done.stdout


@pytest.mark.parametrize("backend", ["gradwire", "cpu:gradwire,cuda:gradwire", "cpu:gradwire"])
def test_ways_to_name_the_backend(job: Job, backend: str) -> None:
    """Also with PyTorch's own checks switched on, which ask every group for its sequence number."""
    done = job(
        START
        + f"""
dist.init_process_group("{backend}")
tensor = torch.ones(3)
dist.all_reduce(tensor)
group = dist.new_group([1])
if dist.get_rank() == 1:
    dist.all_reduce(tensor, group=group)
dist.barrier()
print("SUM", tensor[0].item(), type(dist.group.WORLD).__name__, flush=True)
dist.destroy_process_group()
""",
        TORCH_DISTRIBUTED_DEBUG="DETAIL",
    )
    assert done.stdout.count("SUM 2.0 ProcessGroupGradwire") == 2 and done.returncode == 0, done.stdout


def test_a_group_of_the_wrong_size(job: Job) -> None:
    done = job(
        START
        + """
try:
    dist.init_process_group("gradwire", rank=0, world_size=1, store=dist.HashStore())
    print("SUCCESS", flush=True)
except ValueError as error:
    print("TOLD", "of 2 of its gradwire job" in str(error), flush=True)
"""
    )
    assert done.stdout.count("TOLD True") == 2, done.stdout


def test_processes_that_no_launcher_started(tmp_path: Path) -> None:
    """torch.multiprocessing and a file to meet in, as PyTorch's own tests do."""
    program = tmp_path / "program.py"
    program.write_text(
        START
        + f"""
def work(rank, size):
    dist.init_process_group("gradwire", rank=rank, world_size=size, init_method="file://{tmp_path}/meet")
    tensor = torch.full((2,), rank + 1.0)
    dist.all_reduce(tensor)
    print(f"RANK {{rank}} SUM {{tensor[0].item()}}", flush=True)
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.spawn(work, (3,), 3)
"""
    )
    done = subprocess.run(
        [sys.executable, str(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    for rank in range(3):
        assert f"RANK {rank} SUM 6.0" in done.stdout, done.stdout
    assert done.returncode == 0, done.stdout


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
    assert done.stdout.count("CHILD True") == 2 and done.stdout.count("PARENT 2.0") == 2, done.stdout
    assert done.returncode == 0, done.stdout


def test_a_data_loader_that_forks(job: Job) -> None:
    done = job(
        START
        + """
rank = start()
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
data = TensorDataset(torch.arange(16.0))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False), num_workers=2)
for [batch] in loader:
    total = batch.sum()
    dist.all_reduce(total)
    print("SUM", total.item(), flush=True)
dist.destroy_process_group()
"""
    )
    assert done.stdout.count("SUM 28.0") == 2 and done.stdout.count("SUM 92.0") == 2, done.stdout
    assert done.returncode == 0, done.stdout
