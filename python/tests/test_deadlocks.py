"""Ranks that wait for each other forever: the job ends, but only if that is certain."""

from __future__ import annotations

import gc
import weakref

import pytest
from launching import Job

from gradwire._quiet import others_are_quiet

HEAD = """
import threading, time
import gradwire as gw, numpy as np

def start(name):
    return gw.allreduce_async(np.ones(4, np.float32), name=name, op=gw.Sum)

def reduce(name):
    return start(name).wait()

gw.init()
gw.barrier()
"""
TELL = """
try:
    {calls}
except gw.Disagreement as error:
    print("TOLD", gw.rank(), str(error).replace("\\n", " | "), flush=True)
"""

# What ranks 0 and 1 call, and what the table says of each.
STUCK = {
    "two names in two orders": (
        "reduce('a'), reduce('b')",
        "reduce('b'), reduce('a')",
        ("allreduce 'allreduce.a'", "allreduce 'allreduce.b'"),
    ),
    "a barrier and an object": (
        "gw.barrier()",
        "gw.broadcast_object({}, 0)",
        ("barrier 'barrier.", "allgather 'broadcast-object."),
    ),
    "a message that nobody sends": (
        "gw.receive(np.zeros(2), 1)",
        "reduce('a')",
        ("send-receive", "allreduce 'allreduce.a'"),
    ),
    "others in flight": (
        "[gw.allreduce_async(np.ones(1), name=f'n{at}') for at in range(3)], reduce('a')",
        "reduce('b')",
        ("allreduce 'allreduce.a', with 3 more in flight", "allreduce 'allreduce.b'"),
    ),
    "two threads each": (
        "both('a', 'b')",
        "both('c', 'd')",
        ("allreduce 'allreduce.", "allreduce 'allreduce."),
    ),
}
BOTH = """
def both(one, other):
    def wait():
        try:
            reduce(other)
        except gw.GradwireError:
            pass
    thread = threading.Thread(target=wait)
    thread.start()
    reduce(one)
"""


@pytest.mark.parametrize("case", STUCK)
@pytest.mark.parametrize("hosts", ["127.0.0.1:2", "127.0.0.1:1,127.0.0.2:1"])
def test_a_deadlock_ends_with_a_table(job: Job, case: str, hosts: str) -> None:
    first, second, waits = STUCK[case]
    calls = f"({first}) if gw.rank() == 0 else ({second})"
    done = job(HEAD + BOTH + TELL.format(calls=calls), hosts=hosts)
    for rank in range(2):
        [told] = [line for line in done.stdout.splitlines() if f"TOLD {rank} " in line]
        for at, wait in enumerate(waits):
            assert f"| rank {at} {wait}" in " ".join(told.split()), told
    assert done.returncode != 0


def test_an_error_of_one_rank_ends_with_a_table(job: Job) -> None:
    calls = """
    try:
        if gw.rank() == 1:
            gw.allreduce(np.ones(3), name="loss", op="nonsense")
        gw.allreduce(np.ones(3), name="loss")
    except gw.InvalidRequest:
        gw.barrier()
    """
    done = job(HEAD + TELL.format(calls=calls.strip()))
    assert done.stdout.count("TOLD") == 2, done.stdout
    assert "rank 1  barrier" in done.stdout, done.stdout


def test_only_a_warning_if_the_setting_says_so(job: Job) -> None:
    program = (
        HEAD
        + """
mine, others = ("a", "b") if gw.rank() == 0 else ("b", "a")
handle = start(mine)
if gw.rank() == 0:
    import os, signal, subprocess
    def help(*_):
        reduce(others)
        print("HELPED")
    signal.signal(signal.SIGUSR1, help)
    subprocess.Popen(["sh", "-c", f"sleep 4; kill -USR1 {os.getpid()}"])
    handle.wait()
else:
    handle.wait()
    reduce(others)
print("WENT ON", flush=True)
"""
    )
    done = job(program, GRADWIRE_NEGOTIATION__DEADLOCK="warn", GRADWIRE_LOG__LEVEL="warn")
    assert done.stdout.count("WENT ON") == 2 and done.returncode == 0, done.stdout
    assert "the ranks wait for different operations" in done.stdout, done.stdout


# Each has a time in which all main threads wait, and goes on.
GOES_ON = {
    "another thread comes late": """
if gw.rank() == 0:
    def late():
        time.sleep(3)
        reduce("b")
    thread = threading.Thread(target=late)
    thread.start()
    reduce("a")
    thread.join()
else:
    reduce("b")
    reduce("a")
""",
    "a pool has work": """
import concurrent.futures
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    if gw.rank() == 0:
        late = pool.submit(lambda: (time.sleep(3), reduce("b")))
        reduce("a")
        late.result()
    else:
        reduce("b")
        reduce("a")
""",
    "a pool gives itself work": """
import concurrent.futures
ends = time.monotonic() + 3
done = threading.Event()
def turn():
    if time.monotonic() < ends:
        pool.submit(turn)
    else:
        reduce("b")
        done.set()
if gw.rank() == 0:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(turn)
        reduce("a")
        done.wait()
else:
    reduce("b")
    reduce("a")
""",
    "a timer limits a wait": """
import signal
mine, others = ("a", "b") if gw.rank() == 0 else ("b", "a")
handle = start(mine)
if gw.rank() == 0:
    class Late(Exception):
        pass
    def late(*_):
        raise Late
    signal.signal(signal.SIGALRM, late)
    signal.alarm(3)
    try:
        handle.wait()
    except Late:
        reduce(others)
    handle.wait()
else:
    handle.wait()
    reduce(others)
""",
    "a signal handler works": """
import os, signal
np.ma.MaskedArray  # numpy imports it when it is first used, which the handler could interrupt
pid = gw.allgather_object(os.getpid())[0]
mine, others = ("a", "b") if gw.rank() == 0 else ("b", "a")
def late(*_):
    time.sleep(3)
    reduce(others)
signal.signal(signal.SIGUSR1, late)
gw.barrier()
if gw.rank() == 1:
    time.sleep(0.5)
    os.kill(pid, signal.SIGUSR1)
    start(mine).wait()
    reduce(others)
else:
    start(mine).wait()
""",
    "a wait has a limit": """
mine, others = ("a", "b") if gw.rank() == 0 else ("b", "a")
handle = start(mine)
if gw.rank() == 0:
    try:
        handle.wait(3.0)
    except gw.WaitTimeout:
        reduce(others)
    handle.wait()
else:
    handle.wait()
    reduce(others)
""",
    "one rank is slow": """
for turn in range(4):
    if gw.rank() == turn % 2:
        time.sleep(1.5)
    reduce(f"turn {turn}")
""",
    "a large operation": """
for _ in range(3):
    gw.allreduce(np.ones(50_000_000, np.float32), name="large")
""",
    "objects in two threads": """
handles = [gw.allreduce_async(np.ones(3), name=f"n{at}") for at in range(50)]
threads = [threading.Thread(target=reduce, args=(f"t{at}",)) for at in range(4)]
for thread in threads:
    thread.start()
    time.sleep(0.4 * (gw.rank() + 1))
for handle in handles:
    handle.wait()
for thread in threads:
    thread.join()
assert gw.allgather_object(gw.rank()) == [0, 1]
""",
}


@pytest.mark.parametrize("case", GOES_ON)
def test_a_job_that_can_go_on_goes_on(job: Job, case: str) -> None:
    done = job(HEAD + GOES_ON[case] + "\nprint('WENT ON', flush=True)\n")
    assert done.stdout.count("WENT ON") == 2 and done.returncode == 0, done.stdout


def test_a_look_at_the_threads_keeps_nothing() -> None:
    class Thing:
        pass

    def look() -> weakref.ref[Thing]:
        thing = Thing()
        others_are_quiet(frozenset())
        return weakref.ref(thing)

    gc.collect()
    gc.disable()
    try:
        assert look()() is None
    finally:
        gc.enable()


def test_a_long_wait_ends_the_job_as_in_horovod(job: Job) -> None:
    program = (
        HEAD
        + """
if gw.rank() == 1:
    time.sleep(60)
reduce("a")
"""
    )
    done = job(program, HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="2")
    assert done.returncode != 0
    assert "tensor 'allreduce.a'" in done.stdout, done.stdout
    assert "negotiation.stall_shutdown_ms" in done.stdout, done.stdout
