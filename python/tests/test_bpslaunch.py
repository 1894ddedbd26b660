"""Hosts with BytePS's variables become one job, as with ``bpslaunch``."""

from __future__ import annotations

import contextlib
import secrets
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from launchers import Tasks
from launching import LAUNCHER, LIMIT, free_ports, needs_torch, remains, running, until

# Every rank tells its place; the third rank of four leaves early if it is asked to.
RANK = """
import os, signal, sys
import torch
import gradwire.torch.byteps as bps
from gradwire import GradwireError
bps.init()
try:
    if sys.argv[1:] == ["dies"] and bps.rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    total = bps.push_pull(torch.full((1 << 18,), bps.rank() + 1.0), average=False, name="sum")
except GradwireError as error:
    print(f"TOLD {error.rank}\\n", end="", flush=True)
    sys.exit(8)
local = [os.environ[f"BYTEPS_LOCAL_{name}"] for name in ("RANK", "SIZE")]
words = ["RANK", bps.rank(), bps.size(), *local, total[0].item(), total[-1].item()]
print(" ".join(map(str, words)) + "\\n", end="", flush=True)
"""
SHORT = {"GRADWIRE_LAUNCH__START_TIMEOUT_MS": "4000"}


@dataclass
class Hosts:
    """Hosts of one job, all of them on this machine."""

    folder: Path
    stack: contextlib.ExitStack
    workers: int = 2
    servers: int = 1
    secret: str = field(default_factory=lambda: secrets.token_hex(32))
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    port: int = field(default_factory=lambda: free_ports(1)[0])

    def start(self, role: str, number: int | None, *arguments: str, **variables: str) -> Host:
        """Starts ``gradwire join`` with the variables of a role."""
        given = {
            "DMLC_ROLE": role,
            "DMLC_NUM_WORKER": str(self.workers),
            "DMLC_NUM_SERVER": str(self.servers),
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": str(self.port),
            "GRADWIRE_SECRET": self.secret,
            "GWTEST_MARK": self.mark,
        }
        if role == "worker":
            given["BYTEPS_LOCAL_SIZE"] = "2"  # which a server need not know
        if number is not None:
            given["DMLC_WORKER_ID" if role == "worker" else "DMLC_SERVER_ID"] = str(number)
        given |= variables
        words = [LAUNCHER, "join", "--", sys.executable, str(self.folder / "rank.py"), *arguments]
        words = ["env", *(f"--unset={name}" for name, text in given.items() if not text), *words]
        log = self.folder / f"{role}.{number}.{uuid.uuid4().hex}"
        process = self.stack.enter_context(running(words, log, **given))
        return Host(process, log)


@dataclass
class Host:
    """A host that runs, or has ended."""

    process: object
    log: Path

    def wait(self) -> int:
        """Waits for its end; returns its exit code."""
        return self.process.wait(LIMIT)  # type: ignore[attr-defined,no-any-return]

    @property
    def text(self) -> str:
        """What it has written."""
        return self.log.read_text(errors="replace")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """A job whose hosts leave nothing behind."""
    needs_torch(2, 0, why="gradwire.torch needs PyTorch 2.0")
    (tmp_path / "rank.py").write_text(RANK)
    with contextlib.ExitStack() as stack:
        one = Hosts(tmp_path, stack)
        yield one
    until("all processes have ended", lambda: not remains(one.mark.encode()))


def test_workers_and_servers_make_a_job(hosts: Hosts) -> None:
    """In any order; the host with the first rank comes last. No scheduler is needed."""
    started = [hosts.start("server", None), hosts.start("worker", 1), hosts.start("worker", 0)]
    assert [host.wait() for host in started] == [0, 0, 0], [host.text for host in started]
    for rank in range(4):
        line = f"RANK {rank} 4 {rank % 2} 2 10.0 10.0"
        text = started[2 if rank < 2 else 1].text
        assert line in text and "no effect" not in text, text
    idle = hosts.start("scheduler", None)
    assert idle.wait() == 0 and "DMLC_ROLE=scheduler: a job needs no scheduler" in idle.text


def test_a_single_worker_needs_no_address(hosts: Hosts) -> None:
    hosts.workers = 1
    alone = {"DMLC_PS_ROOT_URI": "", "DMLC_PS_ROOT_PORT": "", "GRADWIRE_SECRET": ""}
    worker = hosts.start("worker", None, **alone)
    assert worker.wait() == 0 and "RANK 1 2 1 2 3.0 3.0" in worker.text, worker.text
    server = hosts.start("server", None, **alone)
    assert server.wait() == 0 and "needs no servers" in server.text, server.text


def test_a_killed_rank_ends_all_hosts(hosts: Hosts) -> None:
    started = [hosts.start("worker", number, "dies") for number in (0, 1)]
    started.append(hosts.start("server", 0))
    codes = [host.wait() for host in started]
    assert codes[:2] == [8, 137] and codes[2] != 0, [codes, *(host.text for host in started)]
    assert started[0].text.count("TOLD 2") == 2, started[0].text
    assert "rank 2 was killed by SIGKILL" in started[1].text, started[1].text


def test_a_host_that_does_not_come_is_named(hosts: Hosts) -> None:
    worker = hosts.start("worker", 0, **SHORT)
    assert worker.wait() == 1 and "1 of 3 nodes" in worker.text, worker.text


def test_wrong_variables_are_named(hosts: Hosts) -> None:
    for variables, says in (
        ({"GRADWIRE_SECRET": ""}, "4 ranks are on 3 hosts, which needs a secret"),
        ({"DMLC_WORKER_ID": "2"}, "DMLC_WORKER_ID=2: it must be less than DMLC_NUM_WORKER=2"),
        ({"DMLC_PS_ROOT_URI": ""}, "DMLC_ROLE is set, but DMLC_PS_ROOT_URI is not"),
        ({"DMLC_PS_ROOT_URI": "192.0.2.7"}, "set DMLC_PS_ROOT_URI to an address of this host"),
        ({"BYTEPS_LOCAL_SIZE": "many"}, "BYTEPS_LOCAL_SIZE=many: it must be a number"),
    ):
        worker = hosts.start("worker", 0, **SHORT, **variables)
        assert worker.wait() in (1, 2) and says in worker.text, worker.text
        assert "RANK" not in worker.text and "panicked" not in worker.text, worker.text


def test_a_program_not_started_by_join_is_refused(tmp_path: Path) -> None:
    needs_torch(2, 0, why="gradwire.torch needs PyTorch 2.0")
    variables = {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "2", "DMLC_WORKER_ID": "0"}
    done = Tasks(tmp_path, variables).run([], RANK)
    assert done.code == 1 and "gradwire join -- python train.py" in done.text, done.text
