#!/usr/bin/env python3
"""`make bench-elastic`: how long a job stands still after a loss, and how much of its time counts.

    lab/benchmarks/elastic.py .venv-python/bin --losses 10

One job at a time trains on two hosts of this machine. Again and again a process is killed: a rank,
the daemon of the second host, the daemon of the first host, or a whole host (its agent and all of
its processes). The figure is the time from the kill to the first step that all living ranks have
finished afterwards. Each kind has a job of its own. The result is a table on standard output.
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shell import Trouble, clean_environment, say

HERE = Path(__file__).resolve().parent
HOSTS = "127.0.0.1:2,127.0.0.2:2"
KINDS = ("rank", "daemon", "first daemon", "host")
# Between two losses the job must be whole again.
SETTLES = 60.0
LIMIT = 600.0


@dataclass(frozen=True)
class Step:
    """A line of a rank."""

    at: float
    epoch: int
    rank: int
    size: int
    step: int


@dataclass(frozen=True)
class Process:
    """A process of the job."""

    pid: int
    parent: int
    name: str
    host: str


def processes(job: int) -> list[Process]:
    """Returns all descendants of the launcher."""
    known: dict[int, Process] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        name, fields = stat[stat.index("(") + 1 : stat.rindex(")")], stat.rsplit(")", 1)[1].split()
        host = next((v[14:].decode() for v in variables if v.startswith(b"GRADWIRE_HOST=")), "")
        known[int(entry.name)] = Process(int(entry.name), int(fields[1]), name, host)

    def is_below(process: Process) -> bool:
        at: Process | None = process
        while at is not None and at.pid != job:
            at = known.get(at.parent)
        return at is not None and process.pid != job

    return [process for process in known.values() if is_below(process)]


def steps_of(path: Path) -> list[Step]:
    """Returns the whole lines of a rank."""
    lines = path.read_text().split("\n")[:-1]
    words = [line.split() for line in lines]
    return [Step(float(w[0]), int(w[1]), int(w[2]), int(w[3]), int(w[4])) for w in words]


class Job:
    """A job that trains."""

    def __init__(self, programs: Path, directory: Path, seconds: float, flags: list[str]) -> None:
        """Starts it."""
        self.directory = directory
        rank = [programs / "python", HERE / "elastic_rank.py", directory, "1000000", str(seconds)]
        self.output = (directory / "output").open("w+")
        self.process = subprocess.Popen(
            [programs / "gradwire", "run", "-H", HOSTS, "-np", "4", *flags, "--", *rank],
            stdout=self.output,
            stderr=subprocess.STDOUT,
            env=clean_environment(),
        )

    def last(self) -> dict[int, Step]:
        """Returns the last step of each process that has finished one."""
        files = self.directory.glob("*.txt")
        steps = {int(path.stem): steps_of(path) for path in files}
        return {pid: lines[-1] for pid, lines in steps.items() if lines}

    def alive(self) -> set[int]:
        """Returns the process ids of living ranks that have finished a step."""
        return {pid for pid in self.last() if Path(f"/proc/{pid}/stat").exists() and running(pid)}

    def whole_again(self, size: int) -> None:
        """Waits until all ranks are there and have finished a step together."""
        until = time.monotonic() + SETTLES
        while time.monotonic() < until:
            self.check()
            last, alive = self.last(), self.alive()
            if len(alive) == size and {last[pid].size for pid in alive} == {size}:
                return
            time.sleep(0.05)
        raise Trouble(f"the job does not have {size} ranks after {SETTLES:g} s\n{self.text()}")

    def next_step(self, lost: set[int], at: float) -> float:
        """Returns when all living ranks had first finished a step after a loss."""
        until = time.monotonic() + SETTLES
        while time.monotonic() < until:
            self.check()
            alive = self.alive() - lost
            firsts = []
            for pid in alive:
                steps = steps_of(self.directory / f"{pid}.txt")
                before = [line.epoch for line in steps if line.at < at]
                epoch = before[-1] if before else 0
                after = [line.at for line in steps if line.at > at and line.epoch > epoch]
                firsts.append(min(after, default=None))
            if firsts and None not in firsts:
                return max(firsts)
            time.sleep(0.02)
        raise Trouble(f"no step in {SETTLES:g} s after the loss\n{self.text()}")

    def check(self) -> None:
        """Raises if the job has ended."""
        if self.process.poll() is not None:
            raise Trouble(f"the job ended with {self.process.returncode}\n{self.text()}")

    def text(self) -> str:
        """Returns the end of its output."""
        self.output.seek(0)
        return self.output.read()[-4000:]

    def end(self) -> None:
        """Stops it."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.output.close()


def running(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def victims(job: Job, kind: str, chance: random.Random) -> set[int]:
    """Chooses the processes to kill."""
    there = processes(job.process.pid)
    if kind == "rank":
        return {chance.choice(sorted(job.alive()))}
    host = "127.0.0.1" if kind == "first daemon" else "127.0.0.2"
    daemons = [p for p in there if p.name == "gradwired" and p.host == host]
    if kind != "host":
        return {p.pid for p in daemons}
    agents = {p.parent for p in daemons}
    return agents | {p.pid for p in there if p.parent in agents}


def losses(programs: Path, kind: str, count: int, chance: random.Random) -> Iterator[float]:
    """Yields the seconds from each loss to the next step."""
    with tempfile.TemporaryDirectory() as folder:
        # A cool-down that does not outlast the measurement.
        flags = ["--min-np", "1", "--blacklist-cooldown-range", "1", "1"]
        job = Job(programs, Path(folder), 0.05, flags)
        try:
            job.whole_again(4)
            for _ in range(count):
                time.sleep(chance.uniform(0.5, 1.5))
                lost = victims(job, kind, chance)
                at = time.monotonic()
                for pid in lost:
                    os.kill(pid, signal.SIGKILL)
                yield job.next_step(lost, at) - at
                if kind == "host":
                    # A host that is lost stays away: one loss for each job.
                    return
                job.whole_again(4)
        finally:
            job.end()


def main() -> int:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("programs", type=Path, help="the folder of `gradwire` and `python`")
    parser.add_argument("--losses", type=int, default=10, help="losses of each kind")
    parser.add_argument("--only", choices=KINDS, help="one kind")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    say(f"seed {options.seed}")
    chance = random.Random(options.seed)
    print("| lost | losses | to the next step: median | most |\n|---|--:|--:|--:|", flush=True)
    for kind in [options.only] if options.only else KINDS:
        seconds: list[float] = []
        while len(seconds) < options.losses:
            for took in losses(options.programs, kind, options.losses - len(seconds), chance):
                say(f"{kind}: {took:.2f} s")
                seconds.append(took)
        middle, most = statistics.median(seconds), max(seconds)
        print(f"| {kind} | {len(seconds)} | {middle:.2f} s | {most:.2f} s |", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Trouble as trouble:
        sys.exit(f"bench: {trouble}")
