"""Deadlocks of process groups, also by callbacks of futures that differ between the ranks."""

from __future__ import annotations

import pytest
from launching import Job

from gradwire.torch.distributed._numbering import note

HEAD = """
import threading, time
from datetime import timedelta
import torch, torch.distributed as dist, gradwire, gradwire.torch
LONG = timedelta(minutes=10)
dist.init_process_group("gradwire", timeout=LONG)
rank, size = dist.get_rank(), dist.get_world_size()
def reduce(group=None, **more):
    return dist.all_reduce(torch.ones(2), group=group, **more)
def received(source):
    work = dist.irecv(torch.ones(1), source)
    return work.get_future()
def sent(to):
    return dist.isend(torch.ones(1), to).get_future()
"""
TELL = """
try:
    body()
    print("WENT ON", flush=True)
except (gradwire.GradwireError, RuntimeError) as error:
    text = str(error).replace(chr(10), " | ")
    print(f"TOLD {rank} {text}", flush=True)
    raise
"""

# What the ranks do, and what the table of each says.
STUCK = {
    "groups in different orders": (
        """
first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
def body():
    for group in (first, second) if rank == 0 else (second, first):
        reduce(group)
""",
        ["rank 0 allreduce", "rank 1 allreduce"],
    ),
    "a callback and the program": (
        """
def more(_):
    return reduce()
def body():
    if rank == 0:
        received(1).then(more).wait()
    else:
        dist.send(torch.ones(1), 0)
        reduce()
""",
        ["more1.1"],
    ),
    "one callback more": (
        """
pair = dist.new_group([0, 1])
def more(done):
    reduce(None if rank == 1 or done.value()[0].item() == 2 else pair)
def body():
    if rank == 0:
        works = [dist.irecv(torch.ones(1), 1) for _ in range(2)]
        for future in [work.get_future().then(more) for work in works]:
            future.wait()
    else:
        dist.send(torch.ones(1), 0)
        sent = dist.isend(torch.full((1,), 2.0), 0)
        sent.get_future().then(more).wait()
""",
        ["more1.1"],
    ),
}


@pytest.mark.parametrize("case", STUCK)
def test_a_deadlock_of_groups_ends_with_a_table(job: Job, case: str) -> None:
    program, expected = STUCK[case]
    done = job(HEAD + program + TELL, hosts="127.0.0.1:2")
    assert done.returncode != 0
    for rank in range(2):
        told = [line for line in done.stdout.splitlines() if f"TOLD {rank} " in line]
        assert told, done.stdout + done.stderr
        for text in ["wait for different operations", *expected]:
            assert text in " ".join(told[0].split()), told[0]


def test_a_timeout_names_the_callback() -> None:
    assert "'gradwire0.cross>more3.1' was started by a callback" in note("gradwire0.cross>more3.1")
    assert note("gradwire0.mesh.17") == note("gradwire0.1>0.tag5.2") == ""


# Each has a time in which all main threads wait, and goes on.
GOES_ON = {
    "an explicit timeout": """
def body():
    work = reduce(async_op=True) if rank == 0 else None
    if rank == 0:
        try:
            work.wait(timedelta(seconds=3))
        except RuntimeError:
            pass
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)
        reduce()
""",
    "a group with a short timeout": """
short = dist.new_group([0, 1], timeout=timedelta(seconds=4))
def body():
    if rank == 0:
        try:
            reduce(short)
        except RuntimeError:
            pass
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)
""",
    "a callback that takes its time": """
def later(_):
    time.sleep(3)
    return reduce()
def body():
    if rank == 0:
        future = received(1).then(later)
        other = reduce(async_op=True).get_future().then(lambda done: done.value())
        other.wait()
        future.wait()
    else:
        sent(0).then(later).wait()
        reduce()
""",
    "another thread": """
def body():
    if rank == 0:
        thread = threading.Timer(3, lambda: reduce())
        thread.start()
        dist.recv(torch.ones(1), 1)
        thread.join()
    else:
        reduce()
        dist.send(torch.ones(1), 0)
""",
    "groups that come and go": """
def body():
    for turn in range(12):
        group = dist.new_group([0, 1])
        if rank == turn % 2:
            time.sleep(0.3)
        reduce(group)
        dist.destroy_process_group(group)
""",
}


@pytest.mark.parametrize("case", GOES_ON)
def test_groups_that_can_go_on_go_on(job: Job, case: str) -> None:
    done = job(HEAD + GOES_ON[case] + TELL + "dist.destroy_process_group()", hosts="127.0.0.1:2")
    assert done.stdout.count("WENT ON") == 2, done.stdout + done.stderr
