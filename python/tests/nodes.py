"""Two machines for real launchers, as namespaces: each has a network address, a host name, its own
processes, shared memory and temporary files, and a server of ssh if there is one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from deployed import ROOT
from launchers import AS_ROOT, PATH, Done, Slurm
from launching import LAUNCHER, LIMIT, until

NAMES = ("n1", "n2")
ADDRESSES = ("10.78.0.1", "10.78.0.2")
VENV = Path(sys.executable).parent.parent
# A name without an address. The nodes have no name server.
NOBODY = "nobody.invalid"

# Runs as root in new namespaces. The arguments are the host name, the folder of the test, and the
# folders in /tmp that stay visible. Init must reap: launchers leave processes to it.
_SETUP = """
set -eu
name=$1 folder=$2
shift 2
mount --make-rprivate /
mount -t tmpfs tmpfs /mnt
number=0
for path; do
    mkdir "/mnt/$number"
    mount --bind "$path" "/mnt/$number"
    number=$((number + 1))
done
mount -t tmpfs -o mode=1777 tmpfs /tmp
number=0
for path; do
    mkdir -p "$path"
    mount --bind "/mnt/$number" "$path"
    number=$((number + 1))
done
umount -l /mnt
mount -t tmpfs -o mode=1777,size=64m tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir /run/sshd
mount --bind "$folder/hosts" /etc/hosts
mount --bind "$folder/passwd" /etc/passwd
[ ! -e "$folder/ssh_config" ] || mount --bind "$folder/ssh_config" /etc/ssh/ssh_config
mount -t proc proc /proc
hostname "$name"
ip link set lo up
sleep infinity &
touch "$folder/$name.up"
wait
"""

_SERVER = """\
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
SetEnv PATH={path}
"""

_CLIENT = """\
Host *
    IdentityFile {folder}/key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    StrictHostKeyChecking yes
"""


def _call(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


@dataclass
class Nodes:
    """The two machines. The folder is the same on both, as a shared file system is."""

    folder: Path
    path: str
    # Why ssh is missing, if it is.
    no_ssh: str = ""
    processes: list[int] = field(default_factory=list)
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def _inside(self, node: int, *words: str) -> list[str]:
        spaces = [f"--{kind}" for kind in ("net", "mount", "uts", "ipc", "pid")]
        enter = ["nsenter", "--target", str(self.processes[node]), *spaces, "--"]
        return [*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(self.folder), *words]

    def start(self, node: int, words: list[str], log: Path, **variables: str) -> Started:
        """Starts a command on a node, with both outputs in a file."""
        # Not those of the tests' own surroundings, which may be a job of Slurm.
        given = {
            "PATH": self.path,
            "HOME": os.environ.get("HOME", "/"),
            "OMP_NUM_THREADS": "1",
            **AS_ROOT,
            **variables,
        }
        with log.open("wb") as output:
            process = subprocess.Popen(
                self._inside(node, *words),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={name: text for name, text in given.items() if text},
            )
        self.started.append(process)
        return Started(process, log)

    def run(self, node: int, words: list[str], **variables: str) -> Done:
        """Runs a command on a node until it has ended."""
        return self.start(node, words, self.folder / f"log.{node}", **variables).wait()

    @contextlib.contextmanager
    def nothing_is_left(self) -> Iterator[None]:
        """Checks that what is started in this context leaves nothing behind: no process, and thus
        no memory of one, and no file."""
        processes, files = self._processes(), self._files()
        yield
        until("all processes have ended", lambda: self._processes() <= processes)
        assert self._files() == files

    def _processes(self) -> set[str]:
        """All processes on the nodes; the daemons of Slurm and sshd are among them."""
        own = {os.readlink(f"/proc/{process}/ns/pid") for process in self.processes}
        found = set()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(process / "ns" / "pid") in own:
                    words = (process / "cmdline").read_text(errors="replace").replace("\0", " ")
                    found.add(f"{process.name} {words[:200]}")
        return found

    def _files(self) -> list[str]:
        """Gradwire's files and folders on the nodes, and all in shared memory."""
        words = ["find", "/dev/shm", "/run", "/tmp", "-xdev"]
        words += ["(", "-path", "*gradwire*", "-o", "-path", "/dev/shm/*", ")"]
        found = []
        for node in range(len(NAMES)):
            done = self.run(node, words)
            assert done.code == 0, done.text
            found += sorted(done.text.splitlines())
        return found


def with_slurm(nodes: Nodes) -> dict[str, str]:
    """Starts Slurm on the nodes; returns the variables of its commands."""
    it = Slurm.configured(nodes.folder, NAMES, ADDRESSES, [6817, 6818, 6818])
    variables = {**it.variables, "PATH": nodes.path}
    for words in it.first:
        nodes.start(0, words, nodes.folder / f"{words[0]}.log", **variables)
    for node, words in enumerate(it.daemons):
        nodes.start(node, words, nodes.folder / f"slurmd.{node}.log", **variables)
    it.wait(lambda words: nodes.run(0, words, **variables).text)
    return variables


@dataclass
class Started:
    """A command that runs."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def text(self) -> str:
        """What it has written."""
        return self.log.read_text(errors="replace")

    def wait(self) -> Done:
        """Waits for its end."""
        code = self.process.wait(LIMIT)
        return Done(code, self.text)


def _server() -> tuple[str, str, str]:
    """Returns the server of ssh, the folder of its libraries, and why there is none if so."""
    script = str(ROOT / "scripts" / "sshd.sh")
    done = subprocess.run([script], capture_output=True, text=True, timeout=LIMIT * 4)
    if done.returncode == 3:
        return "", "", done.stderr
    assert done.returncode == 0, done.stderr
    server = Path(done.stdout.strip())
    libraries = (server.parents[1] / "lib").glob("*/libwrap.so.0")
    return str(server), ":".join(str(library.parent) for library in libraries), ""


def _ssh(folder: Path, path: str) -> None:
    for name in ("key", "host_key"):
        _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
    (folder / "server_config").write_text(_SERVER.format(folder=folder, path=path))
    (folder / "ssh_config").write_text(_CLIENT.format(folder=folder))
    host_key = (folder / "host_key.pub").read_text()
    places = zip(NAMES, ADDRESSES)
    lines = [f"{name},{address} {host_key}" for name, address in places]
    (folder / "known_hosts").write_text("".join(lines))


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[Nodes]:
    """Two nodes; the test is skipped where they are impossible."""
    if os.geteuid() != 0:
        pytest.skip("only root can make namespaces")
    kinds = [f"--{kind}" for kind in ("net", "mount", "uts", "ipc", "pid", "fork", "kill-child")]
    tried = subprocess.run(["unshare", *kinds, "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"namespaces can't be made here: {tried.stderr}")
    server, libraries, no_ssh = _server()
    path = f"{Path(LAUNCHER).parent}:{PATH}"
    hosts = [f"{address} {name}\n" for name, address in zip(NAMES, ADDRESSES)]
    (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *hosts]))
    sshd = "sshd:x:990:65534::/run/sshd:/usr/sbin/nologin\n"
    users = Path("/etc/passwd").read_text()
    (folder / "passwd").write_text(users if "\nsshd:" in users else users + sshd)
    if server:
        _ssh(folder, path)
    kept = {str(each) for each in (folder, ROOT, VENV, Path(sys.base_prefix))}
    kept = {each for each in kept if each.startswith("/tmp/")}
    nodes = Nodes(folder, path, no_ssh)
    holders = []
    try:
        for name in NAMES:
            with (folder / f"{name}.log").open("wb") as log:
                words = ["unshare", *kinds, "sh", "-c", _SETUP, "node", name, str(folder)]
                holders.append(
                    subprocess.Popen([*words, *sorted(kept)], stdout=log, stderr=subprocess.STDOUT)
                )
        for name, holder in zip(NAMES, holders):
            until(f"{name} is up", (folder / f"{name}.up").exists, of=holder)
            children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text()
            nodes.processes.append(int(children.split()[0]))
        first, second = (str(process) for process in nodes.processes)
        ends = ["eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second]
        _call("ip", "link", "add", *ends)
        for node, address in enumerate(ADDRESSES):
            for words in (
                ["ip", "address", "add", f"{address}/24", "dev", "eth0"],
                ["ip", "link", "set", "eth0", "up"],
            ):
                done = nodes.run(node, words)
                assert done.code == 0, done.text
            if server:
                nodes.start(
                    node,
                    [server, "-D", "-e", "-f", str(folder / "server_config")],
                    folder / f"{NAMES[node]}.sshd",
                    LD_LIBRARY_PATH=libraries,
                )
                until(
                    "sshd runs", lambda node=node: ":22 " in nodes.run(node, ["ss", "-Hltn"]).text
                )
        yield nodes
    finally:
        for holder in holders:
            holder.kill()
        for process in [*holders, *nodes.started]:
            process.wait(LIMIT)
