"""Measures the cost of observing a job: `make bench BENCH_ARGS=--overhead`.

An older release and this one run the same work in turn: small, medium and large allreduces and the
gradients of ResNet-50, with two daemons on this machine's loopback addresses, and the negotiation
of 256 simulated nodes. This release runs a second time with viewers: its metrics are read every
second, the status page is followed, and `gradwire top` runs. It runs a third time while `gradwire
trace` writes a file. Processor time, waits and page faults are those of all processes of the job,
without the viewers. A job runs with few steps and with many, and the difference is divided by the
number of additional steps. So the cost of one-time work, such as the probe of the links, does not
count. Each round gives a ratio to the older release, and the median of the rounds counts.

At the end `gradwire bench resources` runs once with each release.

A run may be divided: `--only` selects works by their names, and `--add` adds the rounds to those in
the folder for results.
"""

import json
import os
import re
import socket
import statistics
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from install import ROOT
from machine import Noise, noise_text
from shell import Trouble, call, clean_environment, end, say

TABLE, DATA = "overhead.md", "overhead.json"
HOSTS = "127.0.0.1:1,127.0.0.2:1"
# Releases choose differently, and algorithms differ in their waits.
ALIKE = ("--set", "negotiation.algorithm=ring")
NODES = 256
SECONDS = 300
OLD, NEW, WATCHED, TRACED = "old", "new", "watched", "traced"
# The additional processor time that each may need compared with the older release. A trace of small
# tensors has no goal.
GOALS = {NEW: 0.01, WATCHED: 0.02, TRACED: 0.05}
COORDINATOR, COORDINATOR_GOAL = f"coordinator, {NODES} nodes", 0.02
RESOURCES = "resources"
# The share of the steps in a job with few steps.
FEW = 5


@dataclass(frozen=True)
class Load:
    """A work to run."""

    name: str
    words: tuple[str, ...]
    steps: int
    is_small: bool = False


LOADS = (
    Load("4 B", ("allreduce", "-b", "4", "-e", "4"), 20_000, is_small=True),
    Load("1 MiB", ("allreduce", "-b", "1M", "-e", "1M"), 3_000),
    Load("64 MiB", ("allreduce", "-b", "64M", "-e", "64M"), 60),
    Load("ResNet-50", ("model", "--shapes", "resnet50"), 60),
)


@dataclass(frozen=True)
class Use:
    """The resources of one run, per step."""

    time_us: float
    cpu_us: float
    waits: float = 0.0
    faults: float = 0.0


@dataclass
class Rows:
    """All runs: by load and variant, one per round."""

    uses: dict[tuple[str, str], list[Use]] = field(default_factory=dict)

    def add(self, load: str, variant: str, use: Use) -> None:
        """Adds a run."""
        self.uses.setdefault((load, variant), []).append(use)

    def ratios(self, load: str, variant: str, what: Callable[[Use], float]) -> list[float]:
        """Returns the ratio to the older release in each round, in order."""
        pairs = zip(self.uses[load, OLD], self.uses[load, variant], strict=True)
        return sorted(what(new) / what(old) for old, new in pairs if what(old) > 0)

    def more(self, load: str, variant: str, what: Callable[[Use], float]) -> float:
        """Returns the additional amount per step, in the median of the rounds."""
        pairs = zip(self.uses[load, OLD], self.uses[load, variant], strict=True)
        return statistics.median(what(new) - what(old) for old, new in pairs)


def build(base: str) -> dict[str, Path]:
    """Builds both releases; returns their programs."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    words = ["cargo", "build", "--release", "-p", "gradwire-cli", "-p", "gradwire-daemon"]
    revision = call(["git", "-C", ROOT, "rev-parse", "--verify", f"{base}^{{commit}}"]).strip()
    tree = target / "overhead" / revision[:12]
    if not tree.exists():
        new = tree.with_suffix(".new")
        new.mkdir(parents=True, exist_ok=True)
        archive = ["git", "-C", ROOT, "archive", "--output", new / "tree.tar", revision]
        call(archive)
        call(["tar", "-xf", new / "tree.tar", "-C", new])
        (new / "tree.tar").unlink()
        # Renamed once it is complete.
        new.rename(tree)
    programs = {}
    for name, folder, into in ((OLD, tree, target / "overhead" / "build"), (NEW, ROOT, target)):
        say(f"building the {'older' if name == OLD else 'newer'} release")
        environment = {**os.environ, "CARGO_TARGET_DIR": str(into)}
        # Older releases have the measurements in `gradwire` itself.
        lab = ["-p", "gradwire-lab"] if (folder / "lab" / "program").exists() else []
        call([*words, *lab], 3600, cwd=folder, env=environment)
        programs[name] = into / "release" / "gradwire"
    return programs


def free_port() -> int:
    """Returns a free port; the next one is most likely free, too."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def follow(url: str, ended: threading.Event) -> None:
    """Reads a stream or, repeatedly, a page, until the end."""
    while not ended.wait(1.0):
        with suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            while not ended.is_set() and answer.read(1 << 16):
                pass


def coordinator(port: int) -> str | None:
    """Returns the address of the coordinator whose metrics are at a port, once it runs."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with suppress(OSError):
            where = f"http://127.0.0.1:{port}/coordinator"
            with urllib.request.urlopen(where, timeout=5) as answer:
                return str(answer.read().decode().split()[1])
        time.sleep(0.05)
    return None


@contextmanager
def command(program: Path, port: int, *words: str) -> Iterator[None]:
    """Runs a command of this release that observes the job, until the job or the block ends."""
    address = coordinator(port)
    child = address and subprocess.Popen(
        [program, words[0], address, *words[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        end([child] if child else [])


@contextmanager
def viewers(program: Path, port: int, pages: list[int]) -> Iterator[None]:
    """Runs viewers: of the page of one endpoint, of the metrics of several, and `gradwire top`."""
    ended = threading.Event()
    urls = [f"http://127.0.0.1:{port}/api/v1/watch"]
    urls += [f"http://127.0.0.1:{each}/metrics" for each in pages]
    threads = [threading.Thread(target=follow, args=(url, ended)) for url in urls]
    for thread in threads:
        thread.start()
    try:
        with command(program, port, "top"):
            yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def run(
    words: list[str], watch: Callable[[], AbstractContextManager[None]]
) -> tuple[float, int, int]:
    """Runs a program. Returns the seconds of processor time, the waits and the page faults of the
    program and of its child processes that have ended."""
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=clean_environment(),
        start_new_session=True,
    ) as child:
        late = threading.Timer(SECONDS, end, [[child]])
        late.start()
        try:
            with watch():
                assert child.stderr is not None
                text = child.stderr.read().decode(errors="replace")
                _, status, use = os.wait4(child.pid, 0)
                child.returncode = os.waitstatus_to_exitcode(status)
        finally:
            late.cancel()
            end([child])
    if child.returncode:
        raise Trouble(f"`{' '.join(words)}` ended with {child.returncode}:\n{text[-800:]}")
    return use.ru_utime + use.ru_stime, use.ru_nvcsw, use.ru_minflt


def looked_at(
    variant: str, program: Path, port: int, pages: list[int], folder: Path
) -> Callable[[], AbstractContextManager[None]]:
    """Returns the viewers of a job of this variant."""
    if variant == WATCHED:
        return partial(viewers, program, port, pages)
    if variant == TRACED:
        return partial(command, program, port, "trace", "-o", str(folder / "trace.json"))
    return nullcontext


def measure(variant: str, program: Path, load: Load, folder: Path) -> Use:
    """Runs one load with few steps and with many."""

    def job(steps: int) -> tuple[float, tuple[float, int, int]]:
        port, answer = free_port(), folder / "answer.json"
        words = [str(program), "bench", *load.words, "--iters", str(steps), "--json", str(answer)]
        words += ["-H", HOSTS, *ALIKE]
        # Older releases accept only a single port, and have no viewers.
        if variant != OLD:
            words += ["--set", f"metrics.listen=127.0.0.1:{port}-{port + 8}"]
        used = run(words, looked_at(variant, program, port, [port, port + 1], folder))
        [row] = json.loads(answer.read_text())["rows"]
        return float(row["median_us"]), used

    few = load.steps // FEW
    _, least = job(few)
    median_us, most = job(load.steps)
    cpu, waits, faults = (
        (more - less) / (load.steps - few) for more, less in zip(most, least, strict=True)
    )
    return Use(median_us, cpu * 1e6, waits, faults)


def negotiate(variant: str, program: Path, folder: Path) -> Use:
    """Negotiates the gradients of ResNet-50 with simulated nodes; counts the coordinator only."""
    port, answer = free_port(), folder / "answer.json"
    words = [str(program), "bench", "negotiation", "--nodes", str(NODES), "--iters", "60"]
    words += ["--json", str(answer), "--set", f"coordinator.metrics_listen=127.0.0.1:{port}"]
    run(words, looked_at(variant, program, port, [port], folder))
    [row] = json.loads(answer.read_text())["rows"]
    return Use(row["median_us"], row["coordinator_cpu_us"])


def resources(program: Path, folder: Path) -> list[dict[str, Any]]:
    """Returns the resources of each process of an idle job and of a busy one."""
    answer = folder / "answer.json"
    words = [str(program), "bench", "resources", "-H", HOSTS, *ALIKE, "--json", str(answer)]
    run(words, nullcontext)
    rows: list[dict[str, Any]] = json.loads(answer.read_text())["rows"]
    return rows


def judge(more: float, spread: float, goal: float) -> str:
    """Returns whether a goal is met, from the additional need and the goal, as shares."""
    if more <= goal:
        return "met"
    return "within noise" if more - spread <= goal else "NOT met"


def as_markdown(rows: Rows, base: str, noise: dict[str, float]) -> str:
    """Returns the table, with a verdict for each goal."""
    lines = [
        f"Older release: {base}. {noise_text(noise)}.",
        "",
        "| work | | processor time | goal | | time | waits per step | page faults per step |",
        "|---|---|--:|--:|---|--:|--:|--:|",
    ]
    small = {load.name for load in LOADS if load.is_small}
    for load, variant in rows.uses:
        if variant == OLD:
            continue
        ratios = rows.ratios(load, variant, lambda use: use.cpu_us)
        middle = statistics.median(ratios)
        spread = (ratios[len(ratios) * 3 // 4] - ratios[len(ratios) // 4]) / 2
        is_job = load != COORDINATOR
        cells = [load, variant, f"{middle - 1:+.1%} ± {spread:.1%}"]
        if variant == TRACED and load in small:
            cells += ["–", "–"]
        else:
            goal = GOALS[variant] if is_job else COORDINATOR_GOAL
            cells += [f"≤ {goal:+.0%}", judge(middle - 1, spread, goal)]
        times = statistics.median(rows.ratios(load, variant, lambda use: use.time_us))
        cells += [f"{times - 1:+.1%}"]
        if is_job:
            cells += [f"{rows.more(load, variant, lambda use: use.waits):+.2f}"]
            cells += [f"{rows.more(load, variant, lambda use: use.faults):+.2f}"]
        else:
            cells += ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def resources_as_markdown(found: dict[str, list[dict[str, Any]]]) -> str:
    """Returns the results of `gradwire bench resources` for both releases, by process."""
    lines = [
        "| process | | idle, of a core | own memory | processor per step | waits | page faults "
        "| system calls |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for old, new in zip(found[OLD], found[NEW], strict=True):
        for name, row in ((OLD, old), (NEW, new)):
            memory = max(row["private_bytes"].values()) / (1 << 20)
            calls = "–" if row["calls"] is None else f"{row['calls']:.1f}"
            cells = [f"{row['process']} on {row['host']}", name, f"{row['idle_share']:.2%}"]
            cells += [f"{memory:.1f} MiB", f"{row['cpu_us']:.0f} µs", f"{row['waits']:.2f}"]
            cells += [f"{row['faults']:.2f}", calls]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def before(data: Path, base: str) -> tuple[Rows, dict[str, list[dict[str, Any]]]]:
    """Returns the rounds that were measured earlier."""
    rows = Rows()
    if not data.exists():
        return rows, {}
    document = json.loads(data.read_text())
    if document["base"] != base:
        raise Trouble(f"{data} is about {document['base']}, not {base}: choose another --out")
    for row in document["rows"]:
        for use in row["runs"]:
            rows.add(row["work"], row["variant"], Use(**use))
    return rows, document["resources"]


@dataclass(frozen=True)
class Choice:
    """What to measure, and where to write the results."""

    base: str
    rounds: int
    only: str
    is_added: bool
    out: Path


def main(choice: Choice, folder: Path) -> int:
    """Measures everything that was selected, and writes tables and JSON."""
    names = [load.name for load in LOADS] + [COORDINATOR, RESOURCES]
    chosen = {name for name in names if re.search(choice.only, name)}
    if not chosen:
        raise Trouble(f"--only {choice.only} matches none of {', '.join(names)}")
    programs, noise = build(choice.base), Noise()
    data = choice.out / DATA
    rows, used = before(data, choice.base) if choice.is_added else (Rows(), {})
    variants = [(name, programs[OLD if name == OLD else NEW]) for name in (OLD, *GOALS)]
    for number in range(choice.rounds if chosen - {RESOURCES} else 0):
        noise.probe()
        say(f"round {number + 1} of {choice.rounds}")
        # Each variant is equally often the first.
        first = number % len(variants)
        turn = variants[first:] + variants[:first]
        for load in LOADS:
            if load.name in chosen:
                for name, program in turn:
                    rows.add(load.name, name, measure(name, program, load, folder))
        if COORDINATOR in chosen:
            for name, program in turn:
                if name != TRACED:
                    rows.add(COORDINATOR, name, negotiate(name, program, folder))
        # Written now, so that an interrupted run keeps its earlier rounds.
        write(choice, rows, noise, used)
    if RESOURCES in chosen:
        noise.probe()
        used = {name: resources(programs[name], folder) for name in (OLD, NEW)}
        write(choice, rows, noise, used)
    print((choice.out / TABLE).read_text())
    return 0


def write(choice: Choice, rows: Rows, noise: Noise, used: dict[str, list[dict[str, Any]]]) -> None:
    """Writes the tables and the JSON."""
    choice.out.mkdir(parents=True, exist_ok=True)
    text = as_markdown(rows, choice.base, noise.summary())
    if used:
        text += "\n" + resources_as_markdown(used)
    (choice.out / TABLE).write_text(text)
    plain = [
        {"work": load, "variant": variant, "runs": [vars(use) for use in uses]}
        for (load, variant), uses in rows.uses.items()
    ]
    document = {"base": choice.base, "noise": noise.summary(), "rows": plain, "resources": used}
    (choice.out / DATA).write_text(json.dumps(document, indent=1) + "\n")
