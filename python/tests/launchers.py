"""Launchers of other systems: Open MPI, MPICH, and Slurm with two nodes on this machine."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from deployed import ROOT
from launching import LAUNCHER, LIMIT, free_ports, remains, running, until

MPI = {
    "Open MPI": ["mpirun.openmpi", "--oversubscribe", "-np"],
    "Open MPI 5": [str(Path(LAUNCHER).parent / "mpirun"), "--oversubscribe", "-np"],
    "MPICH": ["mpiexec.hydra", "-n"],
}
# Open MPI refuses root otherwise.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
PATH = f"{os.environ['PATH']}:/usr/sbin"


@functools.cache
def install() -> None:
    """Installs the launchers; skips the test if they can't be."""
    script = str(ROOT / "scripts" / "launchers.sh")
    done = subprocess.run([script], capture_output=True, text=True, timeout=LIMIT * 4)
    if done.returncode == 3:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr


@dataclass
class Done:
    """A job that has ended."""

    code: int
    text: str


@dataclass
class Tasks:
    """Runs programs as the tasks of a launcher."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    def run(self, words: list[str], text: str, *arguments: str, **variables: str) -> Done:
        """Runs a program text; ``words`` are the launcher's. Nothing must be left behind."""
        program = self.folder / "program.py"
        program.write_text(text)
        return self.start([*words, sys.executable, str(program), *arguments], **variables)

    def start(self, words: list[str], **variables: str) -> Done:
        """Runs a command. Nothing must be left behind."""
        mark = uuid.uuid4().hex
        done = subprocess.run(
            words,
            env={
                **os.environ,
                **AS_ROOT,
                **self.variables,
                "PATH": f"{Path(LAUNCHER).parent}:{PATH}",
                "GWTEST_MARK": mark,
                **variables,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
        until("all processes have ended", lambda: not remains(mark.encode()))
        return Done(done.returncode, done.stdout)


CONFIGURATION = """\
ClusterName=gwtest{number}
SlurmctldHost={hosts[0]}({addresses[0]})
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=n1 NodeHostname={hosts[0]} NodeAddr={addresses[0]} Port={ports[1]} CPUs=4
NodeName=n2 NodeHostname={hosts[1]} NodeAddr={addresses[1]} Port={ports[2]} CPUs=4
PartitionName=all Nodes=n1,n2 Default=YES State=UP MaxTime=INFINITE
"""


@dataclass
class Slurm:
    """Slurm with two nodes: what its commands need, and its daemons."""

    variables: dict[str, str]
    # On the first node: the controller and what it needs.
    first: list[list[str]]
    # One of each node.
    daemons: list[list[str]]

    @classmethod
    def configured(
        cls, folder: Path, hosts: Sequence[str], addresses: Sequence[str], ports: Sequence[int]
    ) -> Slurm:
        """Writes its configuration. The folder is on all hosts."""
        for part in ("state", "spool.n1", "spool.n2"):
            (folder / part).mkdir()
        config, key = folder / "slurm.conf", folder / "munge.key"
        config.write_text(
            CONFIGURATION.format(
                folder=folder, hosts=hosts, addresses=addresses, ports=ports, number=os.getpid()
            )
        )
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        munge = [f"--{what}-file={folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]
        return cls(
            {"SLURM_CONF": str(config), "PATH": PATH},
            [
                ["munged", "--foreground", "--force", f"--socket={folder}/munge", *munge],
                ["slurmctld", "-D", "-c"],
            ],
            [["slurmd", "-D", "-N", name] for name in ("n1", "n2")],
        )

    def wait(self, run: Callable[[list[str]], str]) -> None:
        """Waits until both nodes can be used. ``run`` returns what a command prints."""
        idle = ["sinfo", "--noheader", "--format=%D %t"]
        until("both nodes of Slurm are idle", lambda: run(idle).split() == ["2", "idle"])


@contextlib.contextmanager
def slurm() -> Iterator[dict[str, str]]:
    """Runs Slurm with two nodes; the value has the variables of its commands."""
    install()
    if os.geteuid() != 0:
        pytest.skip("only root can run the daemons of Slurm here")
    with tempfile.TemporaryDirectory(prefix="gw-slurm-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        folder.chmod(0o755)
        host = os.uname().nodename
        it = Slurm.configured(folder, [host] * 2, ["127.0.0.1"] * 2, free_ports(3))
        for number, words in enumerate([*it.first, *it.daemons]):
            stack.enter_context(running(words, folder / f"log.{number}", **it.variables))

        def run(words: list[str]) -> str:
            surroundings = {**os.environ, **it.variables}
            return subprocess.run(words, env=surroundings, capture_output=True, text=True).stdout

        it.wait(run)
        yield it.variables
