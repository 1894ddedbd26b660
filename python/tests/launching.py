"""Helpers for tests that start jobs."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# A limit against hangs; tests never check how long something takes.
LIMIT = 300
# The long run of `make nightly`.
AT_NIGHT = os.environ.get("GWTEST_JOBS") == "all"
at_night = pytest.mark.skipif(not AT_NIGHT, reason="make nightly runs it")
LAUNCHER = str(Path(sys.executable).parent / "gradwire")
Job = Callable[..., "subprocess.CompletedProcess[str]"]

# One to four ranks on one and two nodes.
_EVERY = ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", "127.0.0.1:4"]
_EVERY += [
    "127.0.0.1:1,127.0.0.2:1",
    "127.0.0.1:2,127.0.0.2:1",
    "127.0.0.1:1,127.0.0.2:2",
    "127.0.0.1:2,127.0.0.2:2",
]


def needs_torch(*least: int, why: str) -> None:
    """Skips a test if PyTorch is missing or older than this."""
    torch = pytest.importorskip("torch")
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < least:
        pytest.skip(why)


def jobs_of(*usual: str) -> list[str]:
    """The jobs for the tests of ranks: the usual ones, or all of them in nightly runs."""
    return list(dict.fromkeys([*usual, *_EVERY])) if AT_NIGHT else list(usual)


def until(
    what: str,
    see: Callable[[], Any],
    seconds: float = 60,
    of: subprocess.Popen[bytes] | None = None,
) -> Any:
    """Waits until a function returns a result, and returns it.

    A process `of` that ends first ends the wait.
    """
    end = time.monotonic() + seconds
    while True:
        ended = of is not None and of.poll() is not None
        seen = see()
        if seen:
            return seen
        assert not ended, f"the process ended before: {what}"
        assert time.monotonic() < end, f"not after {seconds} s: {what}"
        time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    """Returns ports that nobody uses now.

    They are outside of the range from which the system takes the ports of other connections.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(ports) < count:
            port = random.randrange(max(lowest - 10_000, 1024), lowest)
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                ports.append(port)
    return ports


def remains(mark: bytes) -> list[str]:
    """The processes with this text in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " ")[:200])
        except OSError:
            pass
    return found


@contextlib.contextmanager
def running(words: list[str], log: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is killed afterwards, by its id."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **variables}
        )
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30)


# Prints the place of a rank, and a sum over all ranks.
PLACES = """
import os
import gradwire as gw, numpy as np
gw.init()
total = gw.allreduce(np.full(3, gw.rank() + 1.0), op=gw.Sum)
place = f"{gw.rank()} of {gw.size()} local {gw.local_rank()} of {gw.local_size()}"
print(f"RANK {place} sum {total[0]}", flush=True)
"""


def torchrun(
    program: str, tmp_path: Path, ranks: int, *options: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program on ranks of one node under torchrun."""
    pytest.importorskip("torch")
    path = tmp_path / "program.py"
    path.write_text(program)
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        *options,
    ]
    # The ranks share one pipe. Without a buffer, Python would write lines in parts, mixed with
    # those of other ranks.
    return subprocess.run(
        [*words, str(path)],
        env={**os.environ, "PYTHONUNBUFFERED": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
