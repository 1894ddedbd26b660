"""What happens at any moment of a job: phase by event, with real processes.

Each cell is a job of two or three ranks on one or two nodes, in which rank 1 (or a daemon, an agent
or the launcher) ends or stops in a phase. The table says what the other ranks are told, and the
exit code of the launcher. In every cell the job ends by itself, and no process of it remains.

A line that is cut in these phases is tested where there are lines to cut, in
``tests/tests/system/network.rs``.

| phase | what rank 1 has done |
|---|---|
| start | nothing: it is about to call ``init()`` |
| joining | called ``init()``, while rank 2 has not |
| connecting | called ``init()``, like all others just before; data connections are made |
| probing | the same a moment later; links are measured (on two nodes) |
| idle | joined; the others wait for it in an operation |
| busy | an operation is running, again and again |
| leaving | called ``shutdown()``; the others still work together |
| left | everybody has left; its process still runs |
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from launching import AT_NIGHT, LAUNCHER, remains

PROGRAM = """
import faulthandler, os, signal, sys, threading, time
faulthandler.enable()
import gradwire as gw, numpy as np

phase, event = sys.argv[1:3]
rank = int(os.environ["GRADWIRE_RANK"])

def pids(name):
    job = ("GRADWIRE_JOB=" + os.environ["GRADWIRE_JOB"]).encode()
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{number}/comm") as comm, open(f"/proc/{number}/environ", "rb") as own:
                if comm.read().strip() == name and job in own.read().split(b"\\0"):
                    yield int(number)
        except OSError:
            pass

def happen():
    if rank != 1:
        return
    if event == "exit 0":
        os._exit(0)
    elif event == "exit 3":
        os._exit(3)
    elif event == "exception":
        raise ValueError("the data has a hole")
    elif event.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, event))
    elif event.startswith("daemon"):
        os.kill(next(pids("gradwired")), getattr(signal, event.split()[1]))
    elif event.startswith("agent"):
        os.kill(os.getppid(), getattr(signal, event.split()[1]))
    elif event.startswith("launcher"):
        os.kill(int(os.environ["TEST_LAUNCHER"]), signal.SIGKILL)
    time.sleep(30)

def reduce(name="x", elements=3):
    return gw.allreduce(np.ones(elements, np.float32), name=name)

def meet():
    # Until all ranks are about to call init().
    open(f"here.{rank}", "w").close()
    while not all(os.path.exists(f"here.{each}") for each in range(3)):
        time.sleep(0.005)

def main():
    if phase == "start":
        happen()
    if phase == "joining":
        if rank == 2:
            time.sleep(4)
        threading.Timer(2, happen).start() if event != "exception" else None
        if rank == 1 and event == "exception":
            gw.init(comm=[5])
    if phase in ("connecting", "probing"):
        meet()
        after = 0.02 if phase == "connecting" else 0.25
        if rank == 1:
            threading.Timer(after, happen).start()
    gw.init()
    reduce("first")
    if phase in ("connecting", "probing"):
        for _ in range(2000):
            reduce("busy", 1000)
    if phase == "idle":
        happen()
        reduce("idle")
    if phase == "busy":
        if rank == 1:
            threading.Timer(0.5, happen).start()
        for _ in range(2000):
            reduce("busy", 1_000_000)
    if phase == "leaving":
        if rank == 1:
            gw.shutdown()
            happen()
        reduce("leaving")
    if phase == "left":
        gw.shutdown()
        happen()

try:
    main()
except gw.GradwireError as error:
    print("TOLD", rank, str(error).replace("\\n", " "), flush=True)
    sys.exit(1)
"""


@dataclass(frozen=True)
class Cell:
    """One cell of the table."""

    phase: str
    event: str
    # A pattern of the text that the others get; empty: they get none.
    told: str
    # The exit codes that the launcher may have: that of rank 1, or that of a rank that was told.
    codes: tuple[int, ...]
    # What the launcher says.
    said: str = ""


ABSENT = " before it had joined the job"
LEFT = "rank 1 on host .*it has left the job"
STOPPED = r"the process is stopped \(SIGSTOP"
DAEMON = "(gradwired|the daemon|the coordinator)"
HOLE = "ValueError: the data has a hole"
CELLS = [
    Cell("start", "exit 0", "ended with exit code 0" + ABSENT, (1,)),
    Cell("start", "exit 3", "ended with exit code 3" + ABSENT, (3,)),
    Cell("start", "exception", "ended with exit code 1" + ABSENT, (1,), HOLE),
    Cell("start", "SIGKILL", "was killed by SIGKILL" + ABSENT, (137,)),
    Cell("start", "SIGSEGV", "was killed by SIGSEGV" + ABSENT, (139,)),
    Cell("start", "SIGSTOP", STOPPED, (1,), "has not joined the job within"),
    Cell("start", "launcher SIGKILL", ".*", (-9,)),
    Cell("joining", "exit 3", "ended with exit code 3", (3,)),
    Cell("joining", "exception", "must contain all ranks", (1,), "comm=[5]"),
    Cell("joining", "SIGKILL", "was killed by SIGKILL", (137,)),
    Cell("joining", "SIGSEGV", "was killed by SIGSEGV", (139,)),
    Cell("joining", "SIGSTOP", STOPPED, (1,)),
    Cell("connecting", "exit 3", "ended with exit code 3", (3,)),
    Cell("connecting", "SIGKILL", "was killed by SIGKILL", (137,)),
    Cell("connecting", "SIGSTOP", STOPPED, (1,)),
    Cell("connecting", "daemon SIGKILL", DAEMON, (1,)),
    Cell("connecting", "daemon SIGSTOP", DAEMON, (1,)),
    Cell("connecting", "launcher SIGKILL", ".*", (-9,)),
    Cell("probing", "exit 3", "ended with exit code 3", (3,)),
    Cell("probing", "SIGKILL", "was killed by SIGKILL", (137,)),
    Cell("probing", "SIGSEGV", "was killed by SIGSEGV", (139,)),
    Cell("probing", "SIGSTOP", STOPPED, (1,)),
    Cell("probing", "daemon SIGKILL", DAEMON, (1,)),
    Cell("probing", "daemon SIGSTOP", DAEMON, (1,)),
    Cell("probing", "launcher SIGKILL", ".*", (-9,)),
    Cell("idle", "exit 0", "ended with exit code 0 without leaving the job", (1,)),
    Cell("idle", "exit 3", "ended with exit code 3 without leaving the job", (3,)),
    Cell("idle", "exception", HOLE, (1,), HOLE),
    Cell("idle", "SIGKILL", "was killed by SIGKILL", (137,)),
    Cell("idle", "SIGSEGV", "was killed by SIGSEGV", (139,)),
    Cell("idle", "SIGSTOP", STOPPED, (1,)),
    Cell("idle", "daemon SIGKILL", DAEMON, (1,)),
    Cell("idle", "daemon SIGSTOP", DAEMON, (1,)),
    Cell("idle", "daemon SIGTERM", "host .*gradwired was asked to end: by SIGTERM", (1,)),
    Cell("idle", "launcher SIGKILL", ".*", (-9,)),
    Cell("busy", "exit 3", "ended with exit code 3", (3,)),
    Cell("busy", "SIGKILL", "was killed by SIGKILL", (137,)),
    Cell("busy", "SIGSEGV", "was killed by SIGSEGV", (139,)),
    Cell("busy", "SIGSTOP", STOPPED, (1,)),
    Cell("busy", "daemon SIGKILL", DAEMON, (1,)),
    Cell("busy", "daemon SIGSTOP", DAEMON, (1,)),
    Cell("busy", "launcher SIGKILL", ".*", (-9,)),
    Cell("leaving", "exit 0", LEFT, (1,)),
    Cell("leaving", "SIGKILL", LEFT, (1, 137)),
    Cell("left", "exit 0", "", (0,)),
    Cell("left", "exit 3", "", (3,)),
    Cell("left", "exception", "", (1,), HOLE),
    Cell("left", "SIGKILL", "", (137,)),
    Cell("left", "SIGSEGV", "", (139,)),
    Cell("left", "SIGSTOP", "", (1,), "has been stopped (SIGSTOP) since it left the launcher"),
    Cell("left", "launcher SIGKILL", "", (-9,)),
    Cell("left", "agent SIGTERM", "", (1,), "left the job: its agent received SIGTERM"),
]
HOSTS = {"one node": "127.0.0.1:3", "two nodes": "127.0.0.1:1,127.0.0.2:2"}
# By day, each cell is played on one or two nodes, in turn.
PLACES = [
    (cell, nodes)
    for at, cell in enumerate(CELLS)
    for turn, nodes in enumerate(HOSTS)
    if AT_NIGHT or (at + turn) % 2 == 0
]


@dataclass(frozen=True)
class Ended:
    """What came of a cell."""

    code: int
    output: str
    # What remained of the job after a while.
    left: list[str]


def play(cell: Cell, hosts: str, folder: Path) -> Ended:
    """Plays a cell; afterwards waits a while until nothing of it remains."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    runs = folder / "run"
    runs.mkdir(mode=0o700)
    mark = f"TEST_CELL={folder}"
    words = [LAUNCHER, "run", "-H", hosts, "--", sys.executable, str(program)]
    done = subprocess.run(
        ["sh", "-c", 'TEST_LAUNCHER=$$ exec "$@"', "sh", *words, cell.phase, cell.event],
        cwd=folder,
        env={
            **os.environ,
            "TEST_CELL": str(folder),
            "XDG_RUNTIME_DIR": str(runs),
            "HOROVOD_START_TIMEOUT": "8",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    end = time.monotonic() + 20
    while (left := remains(mark.encode())) and time.monotonic() < end:
        time.sleep(0.1)
    left += [str(path) for path in folder.glob("core*")]
    if "launcher" not in cell.event:
        left += [str(path) for path in runs.rglob("*") if path.is_file()]
    return Ended(done.returncode, done.stdout, left)


def check(cell: Cell, ended: Ended) -> None:
    """Compares what came of a cell with the table."""
    told = [line for line in ended.output.splitlines() if "TOLD" in line]
    others = {rank for rank in (0, 2) if any(f"TOLD {rank} " in line for line in told)}
    # A rank that is not in a call when the job ends is only ended, and the output of a killed
    # launcher is lost.
    early = ("start", "joining", "connecting", "probing")
    if cell.phase not in early and "launcher" not in cell.event:
        assert others == ({0, 2} if cell.told else set()), ended.output
    of_others = [line for line in told if "TOLD 1 " not in line]
    assert all(re.search(cell.told or "nothing", line) for line in of_others), ended.output
    assert ended.code in cell.codes and cell.said in ended.output, ended.output
    assert ended.left == []


@pytest.mark.parametrize("phase", dict.fromkeys(cell.phase for cell in CELLS))
def test_a_phase(phase: str, tmp_path: Path) -> None:
    places = [(cell, nodes) for cell, nodes in PLACES if cell.phase == phase]

    def wrong(at: int) -> str:
        cell, nodes = places[at]
        folder = tmp_path / str(at)
        folder.mkdir()
        try:
            check(cell, play(cell, HOSTS[nodes], folder))
        except AssertionError as error:
            return f"{cell.event}, {nodes}: {error}"
        return ""

    # Several at a time, because most of them wait.
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(filter(None, pool.map(wrong, range(len(places)))))
    assert not found, "\n".join(found)
