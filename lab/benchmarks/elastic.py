#!/usr/bin/env python3
"""`make bench-elastic`: what losses cost an elastic job, and what being ready for them costs.

    lab/benchmarks/elastic.py .venv-python/bin --losses 10

A job trains on two hosts of this machine. The tables on standard output show:

- **losses**: again and again a process is killed: a rank, the daemon of the second host, that of
  the first, or the agent of a host with all of its processes. The time from the kill to the first
  step that all living ranks have finished in a new epoch. Each kind has a job of its own.
- **growth**: from the first step without a rank to the first one with its replacement.
- **vote**: a vote beside an allreduce of 4 bytes.
- **commit**: of 100 MB and of 1 GB.
- **sync**: the copy of 1 GB to the other three ranks, as for ranks that have come.
- **goodput**: the share of time in steps that counted, with a loss of a rank every minute: in an
  elastic job, in one that is started again from a checkpoint, and with torchft over Gloo where it
  is installed, whose replicas are started again at once. The first two save every tenth step. A
  step counts with the median time of all steps.
"""

import argparse
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import machine
from shell import Trouble, clean_environment, say

HERE = Path(__file__).resolve().parent
HOST_OF_FIRST, HOST_OF_SECOND = "127.0.0.1", "127.0.0.2"
HOSTS = f"{HOST_OF_FIRST}:2,{HOST_OF_SECOND}:2"
KINDS = ("rank", "daemon", "first daemon", "host", "first host")
WAYS = {
    "elastic": "elastic",
    "restart": "restart from a checkpoint",
    "torchft": "torchft over Gloo",
}
PARTS = ("losses", "growth", "vote", "commit", "sync", "goodput")
# Between two losses the job must be whole again.
SETTLES = 180.0
LIMIT = 600.0
# The seconds of a step, and of the part of a training that shows how long steps take.
STEP = 0.05
UNDISTURBED = 10.0


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

    def __init__(self, programs: Path, directory: Path, words: list[str], flags: list[str]) -> None:
        """Starts it; `words` follow the directory on the command line of the ranks."""
        self.directory = directory
        rank = [programs / "python", HERE / "elastic_rank.py", words[0], directory, *words[1:]]
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
        return {pid for pid in self.last() if running(pid)}

    def furthest(self) -> Step:
        """Returns the last step that a living rank has finished."""
        steps = [step for pid, step in self.last().items() if running(pid)]
        if not steps:
            raise Trouble(f"no rank has finished a step\n{self.text()}")
        return max(steps, key=lambda step: step.step)

    def whole_again(self, size: int) -> None:
        """Waits until all ranks are there and have finished a step together."""
        until = time.monotonic() + SETTLES
        while time.monotonic() < until:
            self.check()
            sizes = [step.size for pid, step in self.last().items() if running(pid)]
            if len(sizes) == size and set(sizes) == {size}:
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

    def times(self) -> list[float]:
        """Returns the times between two steps that followed each other, of all ranks."""
        lists = [steps_of(path) for path in self.directory.glob("*.txt")]
        pairs = [pair for steps in lists for pair in itertools.pairwise(steps)]
        return [b.at - a.at for a, b in pairs if b.step == a.step + 1 and b.epoch == a.epoch]

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
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.output.close()


class Replicas(Job):
    """The same training with torchft. A replica that is lost is started again."""

    SERVER = (
        "import time; from torchft.coordination import LighthouseServer; "
        "server = LighthouseServer(bind='[::]:0', min_replicas=1, join_timeout_ms=100); "
        "print(server.address(), flush=True); time.sleep(1e6)"
    )

    def __init__(self, programs: Path, directory: Path) -> None:
        """Starts the server and all replicas."""
        self.programs, self.directory = programs, directory
        self.output = (directory / "output").open("w+")
        self.process = subprocess.Popen(
            [programs / "python", "-c", self.SERVER], stdout=subprocess.PIPE, stderr=self.output
        )
        assert self.process.stdout is not None
        self.lighthouse = self.process.stdout.readline().decode().strip()
        self.replicas = {number: self.replica(number) for number in range(4)}

    def replica(self, number: int) -> subprocess.Popen[bytes]:
        """Starts a replica."""
        words = ["torchft", self.directory, str(STEP), self.lighthouse, str(number)]
        return subprocess.Popen(
            [self.programs / "python", HERE / "elastic_rank.py", *words],
            stdout=self.output,
            stderr=subprocess.STDOUT,
            env=clean_environment() | {"RUST_LOG": "error"},
        )

    def start_again(self) -> None:
        """Starts the replicas that have ended."""
        for number, process in self.replicas.items():
            if process.poll() is not None:
                self.replicas[number] = self.replica(number)

    def end(self) -> None:
        """Stops all."""
        for process in (*self.replicas.values(), self.process):
            process.kill()
            process.wait()
        self.output.close()


def running(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def victims(job: Job, kind: str, chance: random.Random) -> set[int]:
    """Chooses the processes to kill."""
    if kind == "rank":
        return {chance.choice(sorted(job.alive()))}
    there = processes(job.process.pid)
    host = HOST_OF_FIRST if kind.startswith("first") else HOST_OF_SECOND
    daemons = [p for p in there if p.name == "gradwired" and p.host == host]
    if kind.endswith("daemon"):
        return {p.pid for p in daemons}
    agents = {p.parent for p in daemons}
    return agents | {p.pid for p in there if p.parent in agents}


def kill(pids: set[int]) -> float:
    """Kills processes; returns when."""
    at = time.monotonic()
    for pid in pids:
        # A child of an agent may have ended with it.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return at


def losses(
    programs: Path, kind: str, count: int, chance: random.Random
) -> Iterator[tuple[float, float]]:
    """Yields the seconds from each loss to the next step, and from there until all are back."""
    with tempfile.TemporaryDirectory() as folder:
        # A cool-down that does not outlast the measurement.
        flags = ["--min-np", "1", "--blacklist-cooldown-range", "1", "1"]
        job = Job(programs, Path(folder), ["train", str(STEP)], flags)
        try:
            job.whole_again(4)
            for _ in range(count):
                time.sleep(chance.uniform(0.5, 1.5))
                lost = victims(job, kind, chance)
                at = kill(lost)
                step = job.next_step(lost, at)
                job.whole_again(4)
                yield step - at, time.monotonic() - step
                if "host" in kind:
                    # The hosts change their order.
                    return
        finally:
            job.end()


def show_losses(options: argparse.Namespace, chance: random.Random) -> None:
    """Prints the times after losses, and those of growing again."""
    growth: list[float] = []
    kinds = [options.kind] if options.kind else KINDS
    rows = []
    for kind in kinds:
        seconds: list[float] = []
        while len(seconds) < options.losses:
            left = options.losses - len(seconds)
            for took, whole in losses(options.programs, kind, left, chance):
                say(f"{kind}: {took:.2f} s, whole again after {whole:.2f} s")
                seconds.append(took)
                if kind == "rank":
                    growth.append(whole)
        rows.append((kind, seconds))
    print("| lost | losses | to the next step: median | most |\n|---|--:|--:|--:|")
    for kind, seconds in rows:
        middle, most = statistics.median(seconds), max(seconds)
        print(f"| {kind} | {len(seconds)} | {middle:.2f} s | {most:.2f} s |", flush=True)
    if growth:
        middle, most = statistics.median(growth), max(growth)
        print(f"\nwhole again after a lost rank: {middle:.2f} s later, at most {most:.2f} s")


def measured(options: argparse.Namespace, words: list[str]) -> list[float]:
    """Returns what the first rank of a job has measured."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(options.programs, Path(folder), words, ["--min-np", "4"])
        try:
            job.process.wait(LIMIT)
        finally:
            job.end()
        found = Path(folder) / "seconds"
        if not found.exists():
            raise Trouble(f"the job has measured nothing\n{(Path(folder) / 'output').read_text()}")
        return [float(word) for word in found.read_text().split()]


def goodput(options: argparse.Namespace, way: str, chance: random.Random) -> float:
    """Returns the share of time in steps that counted."""
    with tempfile.TemporaryDirectory() as folder:
        words, flags = ["train", str(STEP)], list[str]()
        if way == "elastic":
            flags = ["--min-np", "1", "--blacklist-cooldown-range", "1", "1"]
        else:
            words.append(str(Path(folder) / "checkpoint"))

        def started() -> Job:
            if way == "torchft":
                return Replicas(options.programs, Path(folder))
            return Job(options.programs, Path(folder), words, flags)

        job = started()
        try:
            job.whole_again(4)
            time.sleep(UNDISTURBED)
            begin, times = job.furthest(), list[float]()
            for _ in range(options.minutes):
                until = time.monotonic() + 60
                time.sleep(chance.uniform(5, 55))
                kill(victims(job, "rank", chance))
                if way == "restart":
                    job.process.wait(SETTLES)
                    times += job.times()
                    job.end()
                    for file in Path(folder).glob("*.txt"):
                        file.unlink()
                    job = started()
                while time.monotonic() < until:
                    if isinstance(job, Replicas):
                        job.start_again()
                    time.sleep(0.1)
            end = job.furthest()
            each = statistics.median(times + job.times())
            say(f"{way}: {end.step - begin.step} steps of {each:.4f} s")
            return (end.step - begin.step) * each / (end.at - begin.at)
        finally:
            job.end()


def main() -> int:
    """Measures, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("programs", type=Path, help="the folder of `gradwire` and `python`")
    parser.add_argument("--losses", type=int, default=10, help="losses of each kind")
    parser.add_argument("--minutes", type=int, default=5, help="minutes of each goodput")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--way", choices=WAYS, help="one way of the goodput")
    parser.add_argument("--kind", choices=KINDS, help="one kind of loss")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    say(f"seed {options.seed}")
    chance = random.Random(options.seed)
    parts = [options.only] if options.only else PARTS
    print("; ".join(f"{name}: {value}" for name, value in machine.describe().items()), flush=True)
    if "losses" in parts or "growth" in parts:
        show_losses(options, chance)
    if "vote" in parts:
        vote, operation = measured(options, ["vote", "500"])
        print(f"\nvote {vote * 1e6:.0f} us, allreduce of 4 bytes {operation * 1e6:.0f} us")
    if "commit" in parts:
        for megabytes in (100, 1000):
            (seconds,) = measured(options, ["commit", str(megabytes)])
            print(f"\ncommit of {megabytes} MB: {seconds:.3f} s", flush=True)
    if "sync" in parts:
        (seconds,) = measured(options, ["sync", "1000"])
        print(f"\nsync of 1 GB: {seconds:.3f} s, {1 / seconds:.2f} GB/s to each rank", flush=True)
    if "goodput" in parts:
        for way, name in WAYS.items():
            if options.way not in (None, way):
                continue
            check = [options.programs / "python", "-c", f"import {way}"]
            if (
                way == "torchft"
                and subprocess.run(check, stderr=subprocess.DEVNULL).returncode != 0
            ):
                say("torchft is not installed: pip install gradwire[torchft]")
                continue
            share = goodput(options, way, random.Random(options.seed))
            print(f"\ngoodput, {name}: {share:.1%}", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Trouble as trouble:
        sys.exit(f"bench: {trouble}")
