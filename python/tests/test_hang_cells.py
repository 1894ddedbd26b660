"""One sentence of `gradwire why` for each way in which a job hangs.

`test_hangs.py` and `test_standstill.py` have further ways, and say more about each.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import LAUNCHER, LIMIT, needs_torch, running, until

HERE = Path(__file__).parent
ONE, TWO = "127.0.0.1:3", "127.0.0.1:1,127.0.0.2:2"
# Ranks that wait for each other are not a deadlock that ends the job.
GO_ON = ("--set", "negotiation.deadlock=warn")
SECOND = r"tensor 'allreduce.step.2' has waited .* for rank 2 on host "

# How rank 2 hangs, where the ranks are, and what the text says.
CELLS = {
    "debugger": (TWO, [SECOND, r"rank 2 .* sleeps", r"hanging.py:\d+ in debugger"]),
    "socket_pair": (
        ONE,
        [SECOND, "it waits for a local socket|rank 2 .* sleeps", "in socket_pair"],
    ),
    "network": (TWO, [SECOND, "it waits for the network|rank 2 .* sleeps", "in network"]),
    "child": (ONE, [SECOND, "it waits for a child process|data or a timer|sleeps", "in child"]),
    "evaluate": (TWO, [SECOND, r"rank 2 .* is running, \d+ % of a core", "in evaluate"]),
    "swallowed": (ONE, [r"ranks 0-1 are at 'allreduce.step.2'; rank 2 at 'allreduce.step.3'"]),
    "never_joins": (TWO, [r"rank 2 .* has not called init\(\)"]),
}
# Ways of PyTorch: what the ranks wait for.
TORCH = {
    "optimizer": r"tensor '[^']+' .*for rank 2 on host ",
    "ddp": r"tensor '[^']+' .*for rank 2 on host ",
    "fsdp2": r"tensor '[^']+' .*for rank 2 on host ",
    "loader": SECOND,
}


def words(*program: str, hosts: str = ONE) -> list[str]:
    return [LAUNCHER, "run", "-H", hosts, *GO_ON, "--", sys.executable, *program]


def start(
    folder: Path, command: list[str]
) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    (folder / "run").mkdir(mode=0o700)
    return running(command, folder / "log", XDG_RUNTIME_DIR=str(folder / "run"))


def address(folder: Path) -> str:
    """Where the coordinator of the job that was started in this folder serves; "" before it does.

    Without an address, `gradwire why` may find the job of another test.
    """
    for file in (folder / "run" / "gradwire").glob("*"):
        with contextlib.suppress(OSError, ValueError):
            return str(json.loads(file.read_text())["coordinator"])
    found = re.search(r"COORDINATOR (\S+)", (folder / "log").read_text())
    return found[1] if found else ""


def says(job: subprocess.Popen[bytes], folder: Path, *sentences: str) -> None:
    """Waits until `gradwire why` says all of these sentences."""
    at = until("a job", lambda: address(folder), LIMIT, job)

    def see() -> bool:
        done = subprocess.run(
            [LAUNCHER, "why", at],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            env={**os.environ, "XDG_RUNTIME_DIR": str(folder / "run")},
            check=False,
        )
        (folder / "why").write_text(done.stdout + done.stderr)
        return all(re.search(part, done.stdout) for part in sentences)

    try:
        until(" and ".join(sentences), see, LIMIT, job)
    except AssertionError as error:
        log, last = (folder / "log").read_text(), (folder / "why").read_text()
        raise AssertionError(f"{error}\n{last}\n{log}") from None


@pytest.mark.parametrize("way", CELLS)
def test_a_hang_is_explained(way: str, tmp_path: Path) -> None:
    hosts, sentences = CELLS[way]
    with start(tmp_path, words(str(HERE / "hanging.py"), way, hosts=hosts)) as job:
        says(job, tmp_path, *sentences)


@pytest.mark.parametrize("hosts", [ONE, TWO], ids=["one node", "two nodes"])
@pytest.mark.parametrize("way", TORCH)
def test_a_hang_of_pytorch_is_explained(way: str, hosts: str, tmp_path: Path) -> None:
    needs_torch(2, 6, why="FSDP2 has no public name")
    with start(tmp_path, words(str(HERE / "hanging_torch.py"), way, hosts=hosts)) as job:
        says(job, tmp_path, TORCH[way], r"hanging_torch.py:\d+ in ")


def daemons(folder: Path) -> dict[int, dict[str, str]]:
    """The daemons of the job that was started in this folder, with their variables."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            name, environment = (process / "comm").read_text(), (process / "environ").read_text()
        except OSError:
            continue
        variables = dict(word.partition("=")[::2] for word in environment.split("\0"))
        if name == "gradwired\n" and variables.get("XDG_RUNTIME_DIR") == str(folder / "run"):
            found[int(process.name)] = variables
    return found


def test_a_hang_under_torchrun_is_explained(tmp_path: Path) -> None:
    needs_torch(2, 6, why="FSDP2 has no public name")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    with start(tmp_path, [*torchrun, str(HERE / "hanging_torch.py"), "ddp"]) as job:
        says(job, tmp_path, TORCH["ddp"], r"hanging_torch.py:\d+ in hang")


def patient() -> list[str]:
    """A job on two nodes in which a daemon may be stopped for a while."""
    patience = {"heartbeat.timeout_ms": 60000, "recovery.return_timeout_ms": 60000}
    patience["job.timeout_ms"] = 200000
    command = words(str(HERE / "hanging.py"), "sleep", hosts=TWO)
    command[2:2] = [word for key in patience for word in ("--set", f"{key}={patience[key]}")]
    return command


def test_a_stopped_daemon_is_named(tmp_path: Path) -> None:
    with start(tmp_path, patient()) as job:
        says(job, tmp_path, SECOND)
        of_host = daemons(tmp_path).items()
        (pid,) = (pid for pid, named in of_host if named["GRADWIRE_HOST"] == "127.0.0.2")
        os.kill(pid, signal.SIGSTOP)
        try:
            says(job, tmp_path, "host 127.0.0.2 did not answer")
        finally:
            os.kill(pid, signal.SIGCONT)


def test_without_a_coordinator_the_daemon_answers(tmp_path: Path) -> None:
    with start(tmp_path, patient()) as job:
        says(job, tmp_path, SECOND)
        of_host = daemons(tmp_path).items()
        (pid,) = (pid for pid, named in of_host if named["GRADWIRE_ORDER"] == "0")
        os.kill(pid, signal.SIGSTOP)
        try:
            says(job, tmp_path, r"the coordinator 127.0.0.1:\d+ has been silent for \d", SECOND)
        finally:
            os.kill(pid, signal.SIGCONT)
        says(job, tmp_path, "the world is complete")
