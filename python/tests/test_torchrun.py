"""Jobs that torchrun starts, and others with its variables."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from launching import LIMIT, PLACES, Job, free_ports, torchrun


def test_torchrun(tmp_path: Path) -> None:
    done = torchrun(PLACES, tmp_path, 2)
    for rank in range(2):
        assert f"RANK {rank} of 2 local {rank} of 2 sum 3.0" in done.stdout, done.stdout
    assert done.returncode == 0, done.stdout


def test_torchrun_starts_a_process_group_again(tmp_path: Path) -> None:
    """All attempts have the same store."""
    program = """
import os
import torch
import torch.distributed as dist
import gradwire.torch

attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
dist.init_process_group("gradwire")
dist.all_reduce(torch.ones(3))
if attempt == "0" and dist.get_rank() == 1:
    os.kill(os.getpid(), 9)
dist.all_reduce(torch.ones(3))
print(f"DONE {attempt}", flush=True)
"""
    done = torchrun(program, tmp_path, 3, "--max-restarts=1")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("DONE 1") == 3 and "DONE 0" not in done.stdout, done.stdout


# The exiting rank, how it exits, and the other ranks' error.
TORCHRUN_ENDS = [
    (0, "os._exit(3)", "ended without leaving"),
    (1, "sys.exit(3)", "exit code 3"),
    (0, "sys.exit(3)", "exit code 3"),
]


@pytest.mark.parametrize(("who", "how", "what"), TORCHRUN_ENDS)
def test_an_exited_torchrun_rank_is_named(tmp_path: Path, who: int, how: str, what: str) -> None:
    # torchrun stops the others as soon as it sees the exit, perhaps before they get the error.
    program = f"""
import os, signal, sys
import gradwire as gw
signal.signal(signal.SIGTERM, signal.SIG_IGN)
gw.init()
if gw.rank() == {who}:
    {how}
try:
    gw.barrier()
except gw.GradwireError as error:
    # In one write: the ranks share torchrun's output, which is not buffered.
    os.write(1, f"TOLD {{error.rank}} {{error}}\\n".encode())
    sys.exit(8)
"""
    done = torchrun(program, tmp_path, 3)
    reported = [line for line in done.stdout.splitlines() if "TOLD" in line]
    assert reported and all(f"TOLD {who} " in line and what in line for line in reported), (
        done.stdout
    )
    assert "is it running on this machine" not in done.stdout and done.returncode != 0, done.stdout


@pytest.mark.parametrize("how", ["raise ValueError('a hole')", "os.kill(os.getpid(), 9)"])
def test_torchrun_names_the_first_cause(tmp_path: Path, how: str) -> None:
    program = f"""
import os
import gradwire as gw
gw.init()
gw.barrier()
if gw.rank() == 1:
    {how}
gw.barrier()
"""
    done = torchrun(program, tmp_path, 3)
    root = done.stdout.partition("Root Cause (first observed failure)")[2]
    assert re.search(r"rank +: 1 \(local_rank: 1\)", root), done.stdout
    says = "ValueError: a hole" if "raise" in how else "Signal 9 (SIGKILL) received"
    assert says in root and done.returncode != 0, done.stdout


def as_torchrun(
    program: Path, places: list[tuple[int, int, int]], size: int | None = None
) -> list[subprocess.Popen[str]]:
    """Starts ranks as torchrun does: with rank, local rank and local size.

    With ``size``, only some of the ranks are started.
    """
    [port] = free_ports(1)
    variables = {
        "WORLD_SIZE": str(len(places) if size is None else size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return [
        subprocess.Popen(
            [sys.executable, str(program)],
            env={
                **os.environ,
                **variables,
                "RANK": str(rank),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(slots),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, local, slots in places
    ]


MISSING = [
    ([(0, 0, 1), (2, 0, 1)], "ranks 1, 3-4 of 5 did not call init() within 10 s"),
    ([(1, 0, 1)], "the ranks' store at 127.0.0.1:"),
]


@pytest.mark.parametrize(("places", "what"), MISSING, ids=["some", "the first"])
def test_missing_ranks_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    places: list[tuple[int, int, int]],
    what: str,
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "10")
    program = tmp_path / "program.py"
    # Rank 0, which hosts the store, is the first one to give up.
    late = "import os, time\ntime.sleep(3 * (os.environ['RANK'] == '2'))\n"
    program.write_text(late + "import gradwire as gw\ngw.init()\n")
    ranks = as_torchrun(program, places, size=5)
    for rank in ranks:
        said, _ = rank.communicate(timeout=LIMIT)
        *frames, error = said.rstrip().splitlines()
        assert error.startswith(f"gradwire.NotLaunched: {what}"), said
        assert "HOROVOD_START_TIMEOUT=SECONDS" in error, said
        assert frames[-1].strip() == "gw.init()" and "DistStoreError" not in said, said
        assert rank.returncode == 1


def test_a_serving_rank_that_exits_early_is_named(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch")
    program = tmp_path / "program.py"
    program.write_text(
        """
import os, pathlib, sys, time
import gradwire as gw
from gradwire import _start

met = pathlib.Path(__file__).parent / "met"
prepare = _start.prepare
if os.environ["RANK"] == "0":
    prepare()
    while not met.exists():
        time.sleep(0.05)
    os._exit(3)

def late():
    prepare()
    met.touch()
    time.sleep(2)

_start.prepare = late
try:
    gw.init()
except gw.PeerLost as error:
    print("TOLD", error.rank, error, flush=True)
    sys.exit(8)
"""
    )
    first, second = as_torchrun(program, [(0, 0, 2), (1, 1, 2)])
    said, _ = second.communicate(timeout=LIMIT)
    first.communicate(timeout=LIMIT)
    assert "TOLD 0 rank 0, which runs this node's daemon, has exited or is stopped: " in said, said
    assert (first.returncode, second.returncode) == (3, 8), said


# Each round is a new job with new daemons, even if the last one failed.
AGAIN = """
import os
import torch, torch.distributed as dist
import gradwire.torch as gw
from gradwire import _start

jobs = set()

def total():
    jobs.add(os.environ["GRADWIRE_JOB"])
    return int(gw.allreduce(torch.full((2,), gw.rank() + 1.0), op=gw.Sum)[0])

for turn in range(4):
    if turn % 2 == 0:
        gw.init()
    else:
        dist.init_process_group("gradwire")
    print(f"TURN {turn} SUM {total()}\\n", end="", flush=True)
    if turn % 2 == 1:
        dist.destroy_process_group()
    gw.shutdown()
    assert not gw.is_initialized() and "GRADWIRE_JOB" not in os.environ and not _start._services
gw.init()

def stop():
    gw.barrier()  # all have started
    gw.abort("enough") if gw.rank() == 1 else gw.barrier()

for end in (stop, gw.shutdown):
    try:
        end()
    except gw.GradwireError as error:
        assert "enough" in str(error), error
gw.init()
print(f"LAST SUM {total()} JOBS {len(jobs)}\\n", end="", flush=True)
"""


def test_torchrun_again_and_again(tmp_path: Path) -> None:
    done = torchrun(AGAIN, tmp_path, 3)
    for turn in range(4):
        assert done.stdout.count(f"TURN {turn} SUM 6\n") == 3, done.stdout
    assert done.stdout.count("LAST SUM 6 JOBS 5\n") == 3 and done.returncode == 0, done.stdout


def test_torchruns_variables_of_two_nodes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    program = tmp_path / "program.py"
    # Twice: rank 0 hosts torch's store and keeps it.
    program.write_text(
        PLACES
        + "gw.shutdown()\ngw.init()\nprint('AGAIN', gw.size(), gw.local_rank(), flush=True)\n"
    )
    places = [(0, 0, 2), (1, 1, 2), (2, 0, 1)]  # two ranks on one node, one on the other
    ranks = as_torchrun(program, places)
    for process, (rank, local, slots) in zip(ranks, places):
        said, _ = process.communicate(timeout=LIMIT)
        assert f"RANK {rank} of 3 local {local} of {slots} sum 6.0" in said, said
        assert f"AGAIN 3 {local}" in said, said
        assert process.returncode == 0, said


def test_half_of_torchruns_variables(job: Job) -> None:
    done = job(PLACES, ranks=None, RANK="0", WORLD_SIZE="2")
    assert done.returncode != 0
    assert "NotLaunched" in done.stdout and "LOCAL_RANK" in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("variables", "name", "accepted"),
    [
        ({"RANK": "2"}, "RANK=2", "from 0 to 1, since WORLD_SIZE is 2"),
        ({"RANK": "-1"}, "RANK=-1", "from 0 to 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0", "1 or more"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3", "from 1 to 2"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2", "from 0 to 1, since LOCAL_WORLD_SIZE is 2"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK=0", "whose 2 ranks follow each other"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999", "from 1 to 65535"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http'", "a number"),
    ],
)
def test_contradictions_of_torchrun_are_refused(
    variables: dict[str, str], name: str, accepted: str, job: Job
) -> None:
    right = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    done = job(PLACES, ranks=None, **(right | place | variables))
    assert done.returncode == 1, done.stdout
    assert f"InvalidRequest: {name}: it must be " in done.stdout, done.stdout
    assert accepted in done.stdout and "did not answer" not in done.stdout, done.stdout


def test_a_store_that_is_stopped_is_named(job: Job) -> None:
    # Torch waits without a limit for the answers of a store that has accepted its connection.
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "HOROVOD_START_TIMEOUT": "1"}
        done = job(PLACES, ranks=None, **(variables | place))
    assert done.returncode == 1, done.stdout
    expected = f"NotLaunched: the ranks' store at 127.0.0.1:{port} has not answered for 6 s"
    assert expected in done.stdout, done.stdout


def test_another_program_at_the_port_is_named(job: Job) -> None:
    """It closes connections, which torch takes for a store that is still being started."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):  # closed at the end
                while True:
                    server.accept()[0].close()

        threading.Thread(target=serve, daemon=True).start()
        port = str(server.getsockname()[1])
        variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "HOROVOD_START_TIMEOUT": "1"}
        done = job(PLACES, ranks=None, **(variables | place))
        server.shutdown(socket.SHUT_RDWR)
    assert done.returncode == 1, done.stdout
    expected = f"NotLaunched: this rank can't use the ranks' store at 127.0.0.1:{port} ("
    assert expected in done.stdout and "if another program uses" in done.stdout, done.stdout


def test_a_rank_stops_before_it_leaves(tmp_path: Path) -> None:
    """Nothing else tells torchrun that the job has failed."""
    program = """
import os, signal, time
import gradwire as gw
gw.init()
gw.barrier()
if gw.rank() == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
gw.shutdown()
"""
    done = torchrun(program, tmp_path, 2)
    assert done.returncode != 0 and "the job failed after this rank had left it" in done.stdout, (
        done.stdout
    )
