"""How errors reach ranks that wait through torch.distributed (TELL, WAIT)."""

from __future__ import annotations

import re

import pytest
from group_programs import START
from launching import AT_NIGHT, Job

torch = pytest.importorskip("torch")

# The wait during which rank 1 is killed: a call, DDP's future, or FSDP2's work.
WAITS = """
rank = start()
torch.manual_seed(0)
# A work and a future that deliver errors in other ways, to test PyTorch's reaction.
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
            _work._threads.start(complete)
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
    tensor = torch.ones(300)  # works of up to 16 bytes are kept, which fails for these fakes
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
    reported(error)
    print("LAST", type(last_error()).__name__, last_error().rank, flush=True)
"""


def needs(use: str) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if use == "fsdp2" and not hasattr(fsdp, "fully_shard"):
        pytest.skip("this PyTorch has no FSDP2")


@pytest.mark.parametrize("use", ["call", "ddp", "fsdp2"])
def test_a_peers_death_is_reported(job: Job, use: str) -> None:
    needs(use)
    done = job(START + WAITS, ranks=3, USE=use, WAY="safe")
    said = [line for line in done.stdout.splitlines() if "TOLD" in line]
    assert len(said) == 2, done.stdout
    for line in said:
        kind = "RuntimeError" if use == "ddp" else "PeerLost"  # DDP wraps it
        assert re.search(rf"TOLD [02] {kind} .*rank 1 on host .*killed", line), done.stdout
    assert done.stdout.count("LAST PeerLost 1") == 2, done.stdout
    assert "SUCCESS" not in done.stdout and "SIGSEGV" not in done.stdout, done.stdout


# With the other three ways, PyTorch does worse things to the surviving ranks. This can change only
# with a new PyTorch release, so it is checked nightly.
@pytest.mark.skipif(not AT_NIGHT, reason="about PyTorch alone: make nightly runs it")
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
def test_other_ways_to_deliver_errors_fail(job: Job, way: str, use: str, outcome: str) -> None:
    needs(use)
    done = job(START + WAITS, ranks=3, USE=use, WAY=way)
    seen = (
        "success" if "SUCCESS" in done.stdout else "raises" if "TOLD" in done.stdout else "segfault"
    )
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
dist.all_reduce(tensor)  # the job continues
print("WENT ON", tensor[0].item(), flush=True)
dist.destroy_process_group()
"""
    )
    for name in ("shape", "dtype", "op", "root", "call", "future"):
        assert len(re.findall(rf"TOLD {name} \w+ True", done.stdout)) == 2, done.stdout
    assert done.stdout.count("WENT ON 2.0") == 2 and done.returncode == 0, done.stdout


def test_errors_of_dropped_works_are_logged(job: Job) -> None:
    """Once each; errors that the program has seen are not logged."""
    done = job(
        START
        + """
rank = start()
for elements in (3, 300):
    dist.all_reduce(torch.ones(elements + rank), async_op=True)
    dist.barrier()
waited = dist.all_reduce(torch.ones(40 + rank), async_op=True)
try:
    waited.wait()
except RuntimeError:
    print("TOLD", flush=True)
seen = dist.all_reduce(torch.ones(50 + rank), async_op=True)
dist.barrier()
assert "disagree" in str(seen.exception())
del waited, seen
print("WENT ON", flush=True)
dist.destroy_process_group()
"""
    )
    assert done.returncode == 0 and done.stdout.count("WENT ON") == 2, done.stdout
    logged = re.findall(r"allreduce '(.*)' of .*, whose work was dropped, failed: ", done.stdout)
    assert len(logged) == 4 and len(set(logged)) == 2, done.stdout


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
            reported(error)
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
        reported(error)
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
    print("TOLD rows", "sent 3 elements" in str(error), flush=True)
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


def test_different_sizes(job: Job) -> None:
    """Equal and unequal parts are reduced in different ways."""
    done = job(
        START
        + """
rank = start(timeout=timedelta(seconds=200))

def scattered(sizes):
    output = torch.empty(sizes[rank])
    dist.reduce_scatter(output, [torch.ones(size) for size in sizes])
    return output

try:
    if rank == 0:
        dist.reduce_scatter(torch.empty(3), [torch.ones(4), torch.ones(4)])
        print("SUCCESS", flush=True)
except ValueError as error:
    print("TOLD own", type(error).__name__, flush=True)
print("SUM", scattered([4, 4]).tolist(), flush=True)
print("SUM", scattered([3, 5])[:3].tolist(), flush=True)
for name, sizes in {
    "even": ([4, 4], [6, 6]),
    "one way and the other": ([4, 4], [3, 5]),
    "the first": ([4, 4], [4, 5]),
    "turned": ([3, 5], [5, 3]),
    "the last": ([3, 5], [3, 6]),
}.items():
    try:
        scattered(sizes[rank])
        print("SUCCESS", name, flush=True)
    except RuntimeError as error:
        print("TOLD", name, ":", type(error).__name__, "disagree" in str(error), flush=True)
tensor = torch.ones(3)
dist.all_reduce(tensor)
print("WENT ON", tensor[0].item(), flush=True)
dist.destroy_process_group()
"""
    )
    assert "SUCCESS" not in done.stdout, done.stdout
    assert done.stdout.count("TOLD own InvalidRequest") == 1, done.stdout
    for name in ("even", "one way and the other", "the first", "turned", "the last"):
        assert done.stdout.count(f"TOLD {name} : Disagreement True") == 2, done.stdout
    assert done.stdout.count("SUM [2.0, 2.0, 2.0, 2.0]") == 2, done.stdout
    assert done.stdout.count("SUM [2.0, 2.0, 2.0]") == 2, done.stdout
    assert done.stdout.count("WENT ON 2.0") == 2 and done.returncode == 0, done.stdout
