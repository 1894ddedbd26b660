"""Tensors in shared memory outlive sessions and daemons."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
from launching import Job

torch = pytest.importorskip("torch")
if not hasattr(torch.UntypedStorage, "resizable"):
    pytest.skip("tensors of this PyTorch do not move", allow_module_level=True)

START = """
import os, signal, sys, time, torch
import gradwire.torch as hvd
from gradwire.torch import _adopt
from gradwire.torch._adopt import is_shared as adopted

_adopt.LOOK_PAUSE = 0.0
N = 200_000

def fresh():
    return (torch.arange(N) % 61 + 1).float() * (hvd.rank() + 1)

def total():
    return (torch.arange(N) % 61 + 1).float() * (hvd.size() * (hvd.size() + 1) // 2)

def exchange(tensor, name="t"):
    tensor.copy_(fresh())
    hvd.allreduce_(tensor, name=name, op=hvd.Sum)
    assert torch.equal(tensor, total())

hvd.init()
"""


def test_it_outlives_sessions(job: Job) -> None:
    done = job(
        START
        + """
tensor, other = torch.zeros(N), torch.zeros(N)
for turn in range(4):
    for _ in range(3):
        exchange(tensor)
        exchange(other, "other")
    assert adopted(tensor) and adopted(other)
    address, values = tensor.data_ptr(), tensor.clone()
    hvd.shutdown()
    assert tensor.data_ptr() == address and torch.equal(tensor, values)
    tensor.add_(1)
    assert torch.equal(tensor, values + 1)
    if turn == 2:
        del other
        other = torch.zeros(N)
    if turn < 3:
        hvd.init()
print("END", flush=True)
""",
        ranks=None,
    )
    assert done.returncode == 0 and done.stdout.count("END") == 1, done.stdout


@pytest.mark.parametrize("under_way", [False, True])
@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP"])
def test_it_outlives_the_daemon(job: Job, signal: str, under_way: bool) -> None:
    """The tensor keeps its memory. Data outside of operations keeps its values (TELL, INPUT)."""
    done = job(
        START
        + f"""
tensor, idle = torch.zeros(N), torch.zeros(N)
for _ in range(2):
    exchange(tensor)
    exchange(idle, "idle")
assert adopted(tensor) and adopted(idle)
hvd.barrier()
def parent(pid):
    return int(open(f"/proc/{{pid}}/stat").read().rpartition(")")[2].split()[1])
def is_daemon(pid):
    try:
        words = open(f"/proc/{{pid}}/cmdline").read().split(chr(0))
        return os.path.basename(words[0]) == "gradwired" and parent(pid) == os.getppid()
    except OSError:
        return False
daemon = next(filter(is_daemon, map(int, filter(str.isdigit, os.listdir("/proc")))))
handle = None
if {under_way} and hvd.rank() == 1:
    handle = hvd.allreduce_async_(tensor, name="lost", op=hvd.Sum)
    time.sleep(0.2)
hvd.barrier()
# The other rank may not have left the barrier yet.
mark = os.path.join(os.path.dirname(os.path.abspath(__file__)), "through")
open(mark + str(hvd.rank()), "w").close()
while not all(os.path.exists(mark + str(rank)) for rank in range(hvd.size())):
    time.sleep(0.01)
# The launcher stops the remaining processes a while after a daemon has exited.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if hvd.rank() == 0:
    os.kill(daemon, signal.{signal})
def over():
    # A signal may take effect after it was sent.
    try:
        folder = f"/proc/{{daemon}}/task"
        tasks = [open(f"{{folder}}/{{task}}/stat").read() for task in os.listdir(folder)]
        return all(task.rpartition(")")[2].split()[0] in "TZX" for task in tasks)
    except OSError:
        return True
while not over():
    time.sleep(0.01)
try:
    hvd.allreduce_(idle if handle is None else torch.zeros(3), name="after", op=hvd.Sum)
    sys.exit("it succeeded")
except hvd.PeerLost as error:
    print("LOST", flush=True)
if handle is not None:
    try:
        handle.wait()
        sys.exit("it succeeded")
    except hvd.GradwireError:
        print("HANDLE", flush=True)
    assert torch.equal(idle, total())
tensor.copy_(torch.arange(N))
assert tensor.sum() == torch.arange(N).float().sum()
del tensor
print("END", flush=True)
try:
    os.kill(daemon, signal.SIGKILL)
except ProcessLookupError:
    pass  # The launcher has stopped it, or the other rank was faster.
os._exit(0)
""",
        GRADWIRE_LAUNCH__GRACE_MS="60000",
    )
    assert done.stdout.count("END") == 2, done.stdout
    assert done.stdout.count("LOST") == 2, done.stdout
    assert done.stdout.count("HANDLE") == int(under_way), done.stdout


def test_off_means_copies_and_the_same_bits(job: Job) -> None:
    text = (
        START
        + """
import hashlib
torch.manual_seed(5 + hvd.rank())
digest, tensors = hashlib.sha256(), [torch.zeros(n) for n in (N, 30_001, 77, 300_000)]
for step in range(5):
    for at, tensor in enumerate(tensors):
        tensor.normal_()
        hvd.allreduce_(tensor, name=f"a{at}", op=hvd.Average)
        digest.update(tensor.numpy().tobytes() if step == 4 else tensor.clone().numpy().tobytes())
    for tensor in tensors:
        tensor.mul_(0.5)
    hvd.grouped_allreduce_(tensors, name="group", op=hvd.Sum)
    for tensor in tensors:
        digest.update(tensor.clone().numpy().tobytes())
print("BITS", digest.hexdigest(), sum(map(adopted, tensors)), flush=True)
"""
    )
    found = {}
    for adopt in ("auto", "off"):
        done = job(text, ranks=3, GRADWIRE_WORKER__ADOPT=adopt)
        assert done.returncode == 0, done.stdout
        lines = re.findall(r"BITS (\w+) (\d)", done.stdout)
        assert len(lines) == 3 and len(set(lines)) == 1, done.stdout
        found[adopt] = lines[0]
    assert found["auto"][0] == found["off"][0]
    assert (found["auto"][1], found["off"][1]) == ("3", "0")


def test_a_large_storage_stays(job: Job) -> None:
    text = START + "tensor = torch.zeros(N)\nfor _ in range(3): exchange(tensor)\n"
    done = job(text + "assert not adopted(tensor)\n", GRADWIRE_WORKER__ADOPT_MAX_BYTES="700KiB")
    assert done.returncode == 0, done.stdout
    done = job(text + "assert adopted(tensor)\n", GRADWIRE_WORKER__ADOPT_MAX_BYTES="800KB")
    assert done.returncode == 0, done.stdout


def test_too_little_space_is_one_line(job: Job) -> None:
    """The folder may be small, as in a container."""
    done = job(
        START
        + """
_adopt._moving.way = lambda: _adopt._moving.Way(intercepted=True, reserves=True)
real = os.statvfs
os.statvfs = lambda path: os.statvfs_result((4096, 4096, 100, 50, 50, 9, 9, 9, 0, 255))
tensors = [torch.zeros(N), torch.zeros(N)]
for _ in range(4):
    for at, tensor in enumerate(tensors):
        exchange(tensor, f"t{at}")
assert not any(map(adopted, tensors))
os.statvfs = real
for at, tensor in enumerate(tensors):
    exchange(tensor, f"t{at}")
assert all(map(adopted, tensors))
"""
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("is copied for each exchange") == 2, done.stdout


def test_few_descriptors(job: Job) -> None:
    done = job(
        START
        + """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
tensors = [torch.zeros(N // 4) for _ in range(90)]
for _ in range(3):
    for at, tensor in enumerate(tensors):
        hvd.allreduce_(tensor, name=f"t{at}", op=hvd.Sum)
print("MOVED", sum(map(adopted, tensors)), flush=True)
"""
    )
    assert done.returncode == 0 and done.stdout.count("MOVED 50") == 2, done.stdout


def test_adoption_leaves_segments_for_others(job: Job) -> None:
    """BOUND: the arena must be able to grow after them."""
    done = job(
        START
        + """
tensors = [torch.zeros(N // 4) for _ in range(20)]
def turn():
    for at, tensor in enumerate(tensors):
        hvd.allreduce_(tensor, name=f"t{at}", op=hvd.Sum)
for _ in range(3):
    turn()
print("MOVED", sum(map(adopted, tensors)), flush=True)
hvd.allreduce_(torch.zeros(20_000_000), name="large", op=hvd.Sum)
# The remaining tensors take the places of the deleted ones.
del tensors[:4]
turn()
print("LATER", sum(map(adopted, tensors)), flush=True)
""",
        GRADWIRE_WORKER__MAX_SEGMENTS="16",
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("MOVED 8") == done.stdout.count("LATER 8") == 2, done.stdout
    assert done.stdout.count("half of a rank's memory segments") == 2, done.stdout


def test_a_pytorch_without_the_function_copies(job: Job) -> None:
    done = job(
        START
        + """
real = torch.UntypedStorage._share_fd_cpu_
def gone(self):
    raise RuntimeError("not available")
torch.UntypedStorage._share_fd_cpu_ = gone
tensor = torch.zeros(N)
for _ in range(20):
    exchange(tensor)
assert not adopted(tensor)
"""
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("can't move into shared memory and will be copied") == 2, done.stdout


# A large tensor whose values show where each byte came from.
LARGE = (
    START
    + """
N = int(os.environ["TEST_BYTES"]) // 4
tensor, mine, ours = torch.zeros(N), fresh(), total()
def turn(at):
    tensor.copy_(mine)
    hvd.allreduce_(tensor, name="large", op=hvd.Sum)
    assert torch.equal(tensor, ours)
    return adopted(tensor)
"""
)


def test_all_ranks_have_moved_by_the_tenth_call(job: Job) -> None:
    """They move at the same time, and none gives up."""
    done = job(
        LARGE
        + """
turns = [turn(at) for at in range(10)]
copied = hvd.stats()["copied_bytes"]
print("MOVED", turns[1], turns[9], hvd.stats()["adopted_bytes"] == 4 * N, flush=True)
turn(10)
assert hvd.stats()["copied_bytes"] == copied
""",
        ranks=8,
        TEST_BYTES=str(64 << 20),
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("MOVED False True True") == 8, done.stdout


@pytest.mark.parametrize(
    ("folder", "moved"), [("3m", False), ("5m", True)], ids=["too-small", "for-one-rank"]
)
def test_a_small_folder(job: Job, folder: str, moved: bool) -> None:
    """PyTorch's folder has space for the file of one rank at most: the others try again."""
    mount = f"mount -t tmpfs -o size={folder} tmpfs /dev/shm"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("this needs a mount namespace")
    done = job(
        LARGE
        + """
reserves = _adopt._moving.way().reserves
for at in range(24):
    turn(at)
left = os.statvfs("/dev/shm")
assert left.f_bfree == left.f_blocks
print("MOVED", adopted(tensor), not reserves, flush=True)
""",
        ranks=3,
        before=["unshare", "-m", "sh", "-c", mount + ' && exec "$@"', "sh"],
        TEST_BYTES=str(2 << 20),
    )
    assert done.returncode == 0, done.stdout
    either = f"MOVED {moved} False", "MOVED True True"  # old releases don't need the space
    assert sum(map(done.stdout.count, either)) == 3, done.stdout


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_rank_killed_while_it_moves(job: Job, moment: str) -> None:
    """CLEAN: no file is left. The other ranks learn what happened (TELL)."""
    done = job(
        LARGE
        + f"""
_adopt._moving.way()
real = _adopt._moving._share
def kill(storage, put):
    def half(file, fd):
        if "{moment}" == "after":
            put(file, fd)
        os.kill(os.getpid(), signal.SIGKILL)
    return real(storage, half)
if hvd.rank() == 1:
    _adopt._moving._share = kill
print("PID", os.getpid(), flush=True)
try:
    for at in range(10):
        turn(at)
    sys.exit("it succeeded")
except hvd.PeerLost as error:
    print("LOST", error, flush=True)
""",
        ranks=3,
        TEST_BYTES=str(4 << 20),
    )
    assert done.returncode != 0, done.stdout
    assert done.stdout.count("LOST") == 2 and "SIGKILL" in done.stdout, done.stdout
    pids = re.findall(r"PID (\d+)", done.stdout)
    left = [name for name in os.listdir("/dev/shm") for pid in pids if pid in name.split("_")]
    assert len(pids) == 3 and not left
