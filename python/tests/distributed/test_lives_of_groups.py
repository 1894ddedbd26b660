"""How process groups are created and removed, also by jobs without a launcher (TELL, WAIT)."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from group_programs import START
from launching import LAUNCHER, LIMIT, Job, needs_torch

torch = pytest.importorskip("torch")
UNTOLD = "older releases do not tell a group that it is destroyed"


def test_groups_again(job: Job) -> None:
    done = job(
        START
        + """
for turn in range(3):
    rank, _ = start_turn("gradwire", turn)
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
    # Non-members also create and remove the sets, in a background thread.
    if rank != 1:
        _, first, second = sets.values()  # the set of all ranks, and one per group
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
# The remaining groups end with the world of groups.
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
def test_unmatched_calls_end_with_their_group(hosts: str, tmp_path: Path) -> None:
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
            # The other group of the same ranks is not affected.
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
                    assert type(last_error()) is gw.Cancelled, error
                    assert "process group was destroyed" in str(error), error
                    print("GIVEN UP", name, flush=True)
            later = dist.new_group([1, 2])
            if rank > 0:
                dist.barrier(later)
    dist.barrier()
    # Also in the group of all ranks, and in a new one afterwards.
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
    time.sleep(0.01)  # the groups' sets are being removed
print("END", gw.stats()["in_flight"], flush=True)
"""
    )
    words = [LAUNCHER, "run", "-np", "3", "-H", hosts, "--", sys.executable, str(program)]
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT
    )
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
        reported(error)
""",
        ranks=3,
    )
    assert (
        len(re.findall("TOLD [01] Cancelled rank 2 has left the process groups", done.stdout)) == 2
    ), done.stdout


@pytest.mark.parametrize("leaves", ["destroys", "exits"])
@pytest.mark.parametrize("late", [0, 1])
def test_ranks_that_leave_before_a_group_exists(job: Job, late: int, leaves: str) -> None:
    """The others have called new_group, and the late member still does something else."""
    done = job(
        START
        + f"""
rank = start(timeout=timedelta(seconds=60))
dist.barrier()
if rank == {late}:
    time.sleep(2)
groups = [dist.new_group([1, 0]), dist.new_group([0, 1]), dist.new_group([2])]
if rank < 2:
    for group in groups[:2]:
        tensor = torch.full((2,), rank + 1.0)
        dist.all_reduce(tensor, group=group)
        print("SUM", tensor[0].item(), flush=True)
if {leaves == "destroys"} or rank < 2:
    dist.destroy_process_group()
print("END", rank, flush=True)
""",
        ranks=4,
    )
    assert done.returncode == 0 and done.stdout.count("END") == 4, done.stdout
    assert done.stdout.count("SUM 3.0") == 4, done.stdout


BESIDE = """
rank, size = start_turn("gloo", turn)
groups = [dist.new_group(backend="gradwire"), dist.new_group([2, 0, 1], backend="gradwire")]
halves = [dist.new_group(half, backend="gradwire") for half in ([0, 1], [2])]
groups.append(halves[rank // 2])
gloo = torch.full((2,), float(rank))
dist.all_reduce(gloo)
for group in groups:
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
    program = f"for turn in range({turns}):" + textwrap.indent(BESIDE, "    ")
    done = job(START + program, ranks=3)
    assert done.stdout.count("DONE 3.0 gradwire") == 3 * turns and done.returncode == 0, done.stdout


def test_a_group_that_some_ranks_do_not_create(job: Job) -> None:
    done = job(
        START
        + """
dist.init_process_group("gloo")
if dist.get_rank() < 2:
    try:
        dist.new_group([0, 1], backend="gradwire", use_local_synchronization=True)
        print("SUCCESS", flush=True)
    except gw.GradwireError as error:
        reported(error)
dist.barrier()
""",
        ranks=3,
        GRADWIRE_LAUNCH__START_TIMEOUT_MS="3000",
    )
    assert "SUCCESS" not in done.stdout, done.stdout


def test_ddps_hook_in_another_session(job: Job) -> None:
    """Its buckets move to the memory of the new session, and are not copied afterwards."""
    done = job(
        START
        + """
place = "file://" + os.environ["TEST_FOLDER"] + "/store"
dist.init_process_group("gloo", init_method=place, rank=0, world_size=1)
gw.init()
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4), gradient_as_bucket_view=True)
model.register_comm_hook(gw.DdpHookState(), gw.ddp_hook)
for step in range(12):
    if step in (4, 8):
        gw.shutdown()
        gw.init()
    model.zero_grad(set_to_none=step < 6)
    before = gw.gradient_bytes_copied()
    model(torch.full((1, 4), step + 1.0)).sum().backward()
    assert (model.module.weight.grad == step + 1).all() and (model.module.bias.grad == 1).all()
    print("STEP", step, "COPIED", gw.gradient_bytes_copied() - before, flush=True)
dist.destroy_process_group()
""",
        ranks=None,
    )
    assert done.returncode == 0, done.stdout
    # DDP creates new buckets after its first step. In another session, it must first drop its views
    # of the last result, and the buckets move in the step after that.
    for step in range(12):
        copied = 80 if step in (0, 1, 4, 5, 8, 9) else 0
        assert f"STEP {step} COPIED {copied}\n" in done.stdout, done.stdout


@pytest.mark.parametrize("backend", ["gradwire", "cpu:gradwire,cuda:gradwire", "cpu:gradwire"])
def test_ways_to_name_the_backend(job: Job, backend: str) -> None:
    """PyTorch's own checks are enabled, which request every group's sequence number."""
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
    assert done.stdout.count("SUM 2.0 ProcessGroupGradwire") == 2 and done.returncode == 0, (
        done.stdout
    )


def test_a_group_of_the_wrong_size(job: Job) -> None:
    done = job(
        START
        + """
try:
    dist.init_process_group("gradwire", rank=0, world_size=1, store=dist.HashStore())
    print("SUCCESS", flush=True)
except ValueError as error:
    print("TOLD", "of 2 in its gradwire job" in str(error), flush=True)
"""
    )
    assert done.stdout.count("TOLD True") == 2, done.stdout


def test_processes_that_no_launcher_started(tmp_path: Path) -> None:
    """They use torch.multiprocessing and a file store, as in PyTorch's own tests."""
    program = tmp_path / "program.py"
    program.write_text(
        START
        + f"""
def work(rank, size):
    place = "file://{tmp_path}/meet"
    dist.init_process_group("gradwire", rank=rank, world_size=size, init_method=place)
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
