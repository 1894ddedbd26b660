"""What observing a job costs: `make bench BENCH_ARGS=--overhead`.

An older release and this one run the same work in turn: small, medium and large allreduces and the
gradients of ResNet-50, with two daemons on this machine's loopback addresses, and the negotiation
of 256 simulated nodes. This release runs a second time while somebody watches: its metrics are
read every second, the status page is followed, and `gradwire top` runs. Processor time, waits and
page faults are those of all processes of the job, and of no viewer. Each round gives a ratio to the
older release, and the median of the rounds counts.
"""

import json
import os
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

from install import ROOT
from machine import Noise, noise_text
from shell import Trouble, call, clean_environment, end, say

TABLE, DATA = "overhead.md", "overhead.json"
HOSTS = "127.0.0.1:1,127.0.0.2:1"
NODES = 256
SECONDS = 300
OLD, NEW, WATCHED = "old", "new", "watched"
# By how much each may need more processor time than the older release.
GOALS = {NEW: 0.01, WATCHED: 0.02}
COORDINATOR_GOAL = 0.02


@dataclass(frozen=True)
class Load:
    """What runs."""

    name: str
    words: tuple[str, ...]
    steps: int


LOADS = (
    Load("4 B", ("allreduce", "-b", "4", "-e", "4"), 10_000),
    Load("1 MiB", ("allreduce", "-b", "1M", "-e", "1M"), 2_000),
    Load("64 MiB", ("allreduce", "-b", "64M", "-e", "64M"), 60),
    Load("ResNet-50", ("model", "--shapes", "resnet50"), 60),
)


@dataclass(frozen=True)
class Use:
    """What one run took, per step."""

    time_us: float
    cpu_us: float
    waits: float = 0.0
    faults: float = 0.0


@dataclass
class Rows:
    """All runs: by load and variant, one of each round."""

    uses: dict[tuple[str, str], list[Use]] = field(default_factory=dict)

    def add(self, load: str, variant: str, use: Use) -> None:
        """Adds a run."""
        self.uses.setdefault((load, variant), []).append(use)

    def ratios(self, load: str, variant: str, what: Callable[[Use], float]) -> list[float]:
        """Returns the ratio to the older release in each round, in order."""
        pairs = zip(self.uses[load, OLD], self.uses[load, variant], strict=True)
        return sorted(what(new) / what(old) for old, new in pairs if what(old) > 0)

    def more(self, load: str, variant: str, what: Callable[[Use], float]) -> float:
        """Returns how many more there are per step, in the median of the rounds."""
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
        # Renamed when it is complete.
        new.rename(tree)
    programs = {}
    for name, folder, into in ((OLD, tree, target / "overhead" / "build"), (NEW, ROOT, target)):
        say(f"building the {'older' if name == OLD else 'newer'} release")
        environment = {**os.environ, "CARGO_TARGET_DIR": str(into)}
        call(words, 3600, cwd=folder, env=environment)
        programs[name] = into / "release" / "gradwire"
    return programs


def free_port() -> int:
    """Returns a port that is free now, and the next one, too, most likely."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def follow(url: str, ended: threading.Event) -> None:
    """Reads a stream or, again and again, a page, until the end."""
    while not ended.wait(1.0):
        with suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            while not ended.is_set() and answer.read(1 << 16):
                pass


@contextmanager
def viewers(program: Path, port: int, pages: list[int]) -> Iterator[None]:
    """Somebody watches: the page of one endpoint, the metrics of several, and `gradwire top`."""
    ended = threading.Event()
    urls = [f"http://127.0.0.1:{port}/api/v1/watch"]
    urls += [f"http://127.0.0.1:{each}/metrics" for each in pages]
    threads = [threading.Thread(target=follow, args=(url, ended)) for url in urls]
    for thread in threads:
        thread.start()
    top = None
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with suppress(OSError):
                where = f"http://127.0.0.1:{port}/coordinator"
                with urllib.request.urlopen(where, timeout=5) as answer:
                    address = answer.read().decode().split()[1]
                top = subprocess.Popen(
                    [program, "top", address],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
                break
            time.sleep(0.05)
        yield
    finally:
        ended.set()
        end([top] if top else [])
        for thread in threads:
            thread.join()


def run(
    words: list[str], watch: Callable[[], AbstractContextManager[None]]
) -> tuple[float, int, int]:
    """Runs a program; returns seconds of processor time, waits and page faults of it and of the
    processes that it has waited for."""
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


def measure(program: Path, load: Load, folder: Path, is_watched: bool) -> Use:
    """Runs one load."""
    port, answer = free_port(), folder / "answer.json"
    words = [str(program), "bench", *load.words, "--iters", str(load.steps), "--json", str(answer)]
    words += ["-H", HOSTS, "--set", f"metrics.listen=127.0.0.1:{port}-{port + 8}"]
    watch = partial(viewers, program, port, [port, port + 1]) if is_watched else nullcontext
    cpu, waits, faults = run(words, watch)
    [row] = json.loads(answer.read_text())["rows"]
    return Use(row["median_us"], cpu / load.steps * 1e6, waits / load.steps, faults / load.steps)


def negotiate(program: Path, folder: Path, is_watched: bool) -> Use:
    """Negotiates the gradients of ResNet-50 with simulated nodes; counts the coordinator only."""
    port, answer = free_port(), folder / "answer.json"
    words = [str(program), "bench", "negotiation", "--nodes", str(NODES), "--iters", "60"]
    words += ["--json", str(answer), "--set", f"coordinator.metrics_listen=127.0.0.1:{port}"]
    run(words, partial(viewers, program, port, [port]) if is_watched else nullcontext)
    [row] = json.loads(answer.read_text())["rows"]
    return Use(row["median_us"], row["coordinator_cpu_us"])


def judge(more: float, spread: float, goal: float) -> str:
    """Returns whether a goal is met: what is needed more, and its goal, as shares."""
    if more <= goal:
        return "met"
    return "within noise" if more - spread <= goal else "NOT met"


def as_markdown(rows: Rows, base: str, noise: dict[str, float]) -> str:
    """Returns the table, with the verdict of each goal."""
    lines = [
        f"Older release: {base}. {noise_text(noise)}.",
        "",
        "| work | | processor time | goal | | time | waits per step | page faults per step |",
        "|---|---|--:|--:|---|--:|--:|--:|",
    ]
    for load, variant in rows.uses:
        if variant == OLD:
            continue
        ratios = rows.ratios(load, variant, lambda use: use.cpu_us)
        middle = statistics.median(ratios)
        spread = (ratios[len(ratios) * 3 // 4] - ratios[len(ratios) // 4]) / 2
        is_job = any(load == own.name for own in LOADS)
        goal = GOALS[variant] if is_job else COORDINATOR_GOAL
        verdict = judge(middle - 1, spread, goal)
        times = statistics.median(rows.ratios(load, variant, lambda use: use.time_us))
        cells = [load, variant, f"{middle - 1:+.1%} ± {spread:.1%}", f"≤ {goal:+.0%}", verdict]
        cells += [f"{times - 1:+.1%}"]
        if is_job:
            cells += [f"{rows.more(load, variant, lambda use: use.waits):+.2f}"]
            cells += [f"{rows.more(load, variant, lambda use: use.faults):+.2f}"]
        else:
            cells += ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(base: str, rounds: int, out: Path, folder: Path) -> int:
    """Measures all, and writes a table and JSON."""
    programs = build(base)
    rows, noise = Rows(), Noise()
    variants = ((OLD, programs[OLD]), (NEW, programs[NEW]), (WATCHED, programs[NEW]))
    for number in range(rounds):
        noise.probe()
        say(f"round {number + 1} of {rounds}")
        # Each is first as often as the others.
        turn = variants[number % 3 :] + variants[: number % 3]
        for load in LOADS:
            for name, program in turn:
                rows.add(load.name, name, measure(program, load, folder, name == WATCHED))
        for name, program in turn:
            use = negotiate(program, folder, name == WATCHED)
            rows.add(f"coordinator, {NODES} nodes", name, use)
    out.mkdir(parents=True, exist_ok=True)
    text = as_markdown(rows, base, noise.summary())
    (out / TABLE).write_text(text)
    plain = [
        {"work": load, "variant": variant, "runs": [vars(use) for use in uses]}
        for (load, variant), uses in rows.uses.items()
    ]
    document = {"base": base, "noise": noise.summary(), "rows": plain}
    (out / DATA).write_text(json.dumps(document, indent=1) + "\n")
    print(text)
    return 0
