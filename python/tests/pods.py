"""Pods of Kubernetes, as namespaces of this machine: each has the command, the variables, the user,
the rights and the files that a manifest gives it, a network address and a host name."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from deployed import ROOT
from launching import LIMIT, remains, until

yaml = pytest.importorskip("yaml")

MANIFESTS = ROOT / "deploy" / "kubernetes" / "kustomize"
VENV = Path(sys.executable).parent.parent
SUBNET = "10.77.0"

# Runs as root in new mount, UTS and process namespaces. The arguments are the host name, the file
# of names, the file with the secret, the user, the virtual environment, the folder of Python, the
# folder above it that only its owner can enter, if there is one, and the command.
_SETUP = """
set -eu
hostname=$1 names=$2 secret=$(cat "$3") user=$4 venv=$5 python=$6 closed=$7
shift 7
mount --make-rprivate /
mount --bind "$venv" /mnt
if [ "$closed" ]; then
    mount --bind "$python" /media
    mount -t tmpfs -o mode=0755 tmpfs "$closed"
    mkdir -p "$python"
    mount --bind /media "$python"
fi
mount --bind "$names" /etc/hosts
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=1777,size=64m tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir -p /run/secrets/gradwire
if [ "$secret" ]; then
    echo "$secret" >/run/secrets/gradwire/secret
    chgrp "$user" /run/secrets/gradwire/secret
    chmod 0440 /run/secrets/gradwire/secret
fi
mount -t proc proc /proc
mount -o remount,bind,ro /
hostname "$hostname"
cd /
exec setpriv --reuid "$user" --regid "$user" --clear-groups --bounding-set=-all --inh-caps=-all \\
    --no-new-privs env -i "$@"
"""


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode != 0:
        raise OSError(f"{' '.join(words)}: {done.stderr}")


def _closed(path: Path) -> str:
    """Returns the outermost folder on a path that only its owner can enter."""
    above = [folder for folder in path.parents if not folder.stat().st_mode & 0o001]
    return str(above[-1]) if above else ""


def _pod_of(one: Any) -> Any:
    """Returns the specification of the pod in an object of a manifest."""
    if isinstance(one, dict):
        if "containers" in one:
            return one
        one = list(one.values())
    if isinstance(one, list):
        return next((pod for pod in map(_pod_of, one) if pod), None)
    return None


@dataclass
class Manifest:
    """What a manifest says about its pods."""

    kind: str
    name: str
    command: list[str]
    variables: dict[str, str]
    user: int
    nodes: int

    @classmethod
    def read(cls, kind: str) -> Manifest:
        """Reads one of the folders in ``deploy/kubernetes/kustomize``."""
        text = (MANIFESTS / kind / "objects.yaml").read_text(encoding="utf-8")
        objects = {one["kind"]: one for one in yaml.safe_load_all(text)}
        owner = objects.get("JobSet") or objects.get("Job") or objects["TrainingRuntime"]
        pod = _pod_of(owner)
        container = pod["containers"][0]
        variables = {one["name"]: one["value"] for one in container["env"]}
        name = owner["metadata"]["name"]
        if kind == "kubeflow":
            # Its Trainer sets these in each pod.
            trainer = objects["TrainJob"]["spec"]["trainer"]
            variables |= {
                "PET_NNODES": str(trainer["numNodes"]),
                "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
                "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
                "PET_MASTER_PORT": "29400",
            }
        nodes = int(variables["PET_NNODES"])
        return cls(
            kind, name, container["command"], variables, pod["securityContext"]["runAsUser"], nodes
        )

    def hostname(self, node: int) -> str:
        """Returns the host name of a pod."""
        return f"{self.name}-{node}" if self.kind == "job" else f"{self.name}-node-0-{node}"


@dataclass
class Pod:
    """A pod that runs, or has ended."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def text(self) -> str:
        """What it has written."""
        return self.log.read_text(errors="replace")

    def signal(self, number: int) -> None:
        """Sends a signal to the first process of the pod, as Kubernetes does."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(children[0]), number)

    def kill(self) -> None:
        """Kills all of its processes, if there are any: they end with the first one."""
        if self.process.poll() is None:
            with contextlib.suppress(IndexError, ProcessLookupError):
                self.signal(signal.SIGKILL)
            self.process.kill()
        self.process.wait(LIMIT)

    def wait(self) -> int:
        """Waits for its end; returns its exit code."""
        return self.process.wait(LIMIT)


@dataclass
class Cluster:
    """A network with a place for each pod."""

    folder: Path
    manifest: Manifest
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    pods: list[Pod] = field(default_factory=list)
    secret: str = field(default_factory=lambda: secrets.token_hex(32))

    def _space(self, node: int) -> str:
        return f"gwpod-{self.mark[:8]}-{node}"

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """The network namespaces: a switch, and one for each pod."""
        switch = f"gwpod-{self.mark[:8]}-s"
        with contextlib.ExitStack() as stack:
            for name in (switch, *map(self._space, range(self.manifest.nodes))):
                _run("ip", "netns", "add", name)
                stack.callback(_run, "ip", "netns", "delete", name)
            inside = ("ip", "-n", switch)
            _run(*inside, "link", "add", "switch", "type", "bridge")
            _run(*inside, "link", "set", "switch", "up")
            for node in range(self.manifest.nodes):
                pod = ("ip", "-n", self._space(node))
                ends = ("eth0", "type", "veth", "peer", "name", f"port{node}", "netns", switch)
                _run(*pod, "link", "add", *ends)
                _run(*inside, "link", "set", f"port{node}", "master", "switch", "up")
                _run(*pod, "address", "add", f"{SUBNET}.{node + 1}/24", "dev", "eth0")
                for link in ("lo", "eth0"):
                    _run(*pod, "link", "set", link, "up")
            yield

    def start(self, node: int, *program: str, **variables: str) -> Pod:
        """Starts the pod with this number. ``program`` replaces that of the manifest."""
        manifest = self.manifest
        hosts, secret = self.folder / "hosts", self.folder / f"secret.{node}"
        names = [manifest.hostname(each) for each in range(manifest.nodes)]
        lines = [
            f"{SUBNET}.{i + 1} {name}.{manifest.name} {name}\n" for i, name in enumerate(names)
        ]
        hosts.write_text("127.0.0.1 localhost\n" + "".join(lines))
        secret.write_text(variables.pop("SECRET", self.secret))
        given = {
            "PATH": "/mnt/bin:/usr/local/bin:/usr/bin:/bin",
            "HOSTNAME": names[node],
            "JOB_COMPLETION_INDEX": str(node),
            "GWTEST_MARK": self.mark,
            **manifest.variables,
            **variables,
        }
        command = manifest.command
        if program:
            command = [*command[: command.index("--") + 1], *program]
        outside = ["ip", "netns", "exec", self._space(node)]
        outside += ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child"]
        python = Path(sys.base_prefix)
        places = [names[node], str(hosts), str(secret), str(manifest.user), str(VENV)]
        places += [str(python), _closed(python)]
        log = self.folder / f"pod.{len(self.pods)}"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    *outside,
                    *("sh", "-c", _SETUP, "pod", *places),
                    *(f"{name}={value}" for name, value in given.items() if value),
                    *command,
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.pods.append(Pod(process, log))
        return self.pods[-1]

    def inside(self, node: int, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs a command in the network of a pod."""
        space = ["ip", "netns", "exec", self._space(node)]
        return subprocess.run([*space, *words], capture_output=True, text=True, timeout=LIMIT)

    def end(self) -> None:
        """Ends all pods. Nothing may be left."""
        for pod in self.pods:
            pod.kill()
        until("all processes have ended", lambda: not remains(self.mark.encode()))


def missing() -> str | None:
    """Returns why pods can't run on this machine."""
    if os.geteuid() != 0:
        return "only root can make namespaces"
    try:
        _run("ip", "netns", "list")
        _run("unshare", "--mount", "--uts", "--pid", "--fork", "true")
    except OSError as error:
        return str(error)
    return None


@contextlib.contextmanager
def cluster(folder: Path, manifest: Manifest) -> Iterator[Cluster]:
    """A cluster for the pods of a manifest; the test is skipped where that is impossible."""
    why = missing()
    if why is not None:
        pytest.skip(why)
    one = Cluster(folder, manifest)
    with one.network():
        try:
            yield one
        finally:
            one.end()
