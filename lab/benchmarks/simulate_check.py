#!/usr/bin/env python3
"""Checks the times of `gradwire simulate`: every algorithm is measured between nodes on slow links
(`places.py`), and simulated with the results of `gradwire probe` there. Nothing is fitted later.

A cell is a place, a work and an algorithm. Its error is the difference between the simulated and
the measured time, as a share of the measured one. Nine cells of ten must be within 20 %.

Measurements are kept in a file (`--json`), so that a run can be continued and divided. Simulated
times are recomputed from the descriptions of the clusters, which are kept there, too.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from places import PLACES, Place, Site, allreduces, is_wanted, site
from plan import MIB, size_text
from shell import Trouble, call, say

KIB = 1 << 10
MODEL = "resnet50"
MODEL_BYTES = 4 * 25_557_032
# The coordinator's choice.
AUTO = "auto"
# Errors up to this bound count as right; the goal is the share of right cells.
BOUND = 0.2
GOAL = 0.9
# The largest piece; tensors up to this size are one piece.
LARGEST_PIECE = 64 * MIB
# A number of seconds that is never reached.
FOREVER = 1e6
# The default numbers of data threads and of bytes in a chunk.
LANES = 2
CHUNK = 256 * KIB
# The most cells that are listed as the worst.
WORST = 12
# The head of a table of all cells.
HEAD = """# Simulated and measured times

All cells of the comparison in [simulator.md](simulator.md#measured-times): the measured time of an
allreduce, or of a step of ResNet-50, and by how much the simulated time is longer. Errors above
20 % are bold. [simulator-check.json](simulator-check.json) has the measured times and the
cluster files of the probe. `make simulate-check BENCH_ARGS="--dry --json RECORD --markdown FILE"`
computes these tables again from this record, with the current simulator.
"""


@dataclass(frozen=True)
class Work:
    """The work of a call: pieces of a size, all ready at once, or a step of a model."""

    bytes: int
    pieces: int = 1

    @property
    def is_model(self) -> bool:
        """Returns whether it is a step of the model."""
        return self.bytes == 0

    @property
    def name(self) -> str:
        """Returns its name in tables."""
        if self.is_model:
            return MODEL
        times = f"{self.pieces} × " if self.pieces > 1 else ""
        return times + size_text(self.bytes)

    @property
    def lanes(self) -> int:
        """Returns the number of data threads of daemons. Waiting work is divided among them, so a
        single piece needs a single thread to stay one piece."""
        return LANES if self.is_model or self.pieces > 1 else 1

    @property
    def chunk(self) -> int:
        """Returns the bytes of a chunk: the default, but at most those of a full piece."""
        return min(CHUNK, self.bytes) if self.pieces > 1 else CHUNK

    @property
    def total(self) -> int:
        """Returns the bytes of a call."""
        return MODEL_BYTES if self.is_model else self.bytes * self.pieces


STEP = Work(0)


@dataclass(frozen=True)
class Job:
    """The works that one run of `gradwire bench` measures, with the same pieces and repetitions."""

    works: tuple[Work, ...]
    warmup: int
    iterations: int

    def words(self, algorithm: str) -> list[str]:
        """Returns the command."""
        often = ["-w", str(self.warmup), "-i", str(self.iterations)]
        # Without checks between calls, which would let the lines idle.
        often += ["-c", "1000000", "--set", f"negotiation.algorithm={algorithm}"]
        first, last = self.works[0], self.works[-1]
        if first.is_model:
            return ["model", "--shapes", MODEL, *often]
        sizes = ["-b", str(first.total), "-e", str(last.total)]
        sizes += ["-f", str(max(2, last.total // first.total))]
        piece = first.bytes if first.pieces > 1 else LARGEST_PIECE
        often += ["--set", f"negotiation.piece_bytes={piece}"]
        often += ["--set", f"data.lanes={first.lanes}", "--set", f"data.chunk_bytes={first.chunk}"]
        return ["allreduce", *sizes, *often]


JOBS = (
    Job((Work(64 * KIB), Work(MIB)), 5, 25),
    Job((Work(16 * MIB), Work(64 * MIB)), 1, 3),
    Job((Work(64 * KIB, 16),), 3, 11),
    Job((Work(4 * MIB, 16),), 1, 3),
    Job((STEP,), 1, 3),
)
QUICK_JOBS = (Job((Work(64 * KIB), Work(MIB)), 5, 25), Job((Work(MIB, 16),), 1, 5))


def calls(work: Work) -> int:
    """Returns the number of measured calls of a work, including warm-up. The same number is
    simulated: the burst of a line passes in the first of them."""
    [job, *_] = (job for job in (*JOBS, *QUICK_JOBS) if work in job.works)
    return job.warmup + job.iterations


QUICK_PLACES = (Place(2, 1), Place(4, 1), Place(4, 1, racks=2))


@dataclass
class Measured:
    """The times of one cell in seconds, one per run."""

    place: str
    work: str
    algorithm: str
    times: list[float] = field(default_factory=list)


@dataclass
class Cell:
    """A measured time, and the simulated one."""

    place: str
    work: str
    algorithm: str
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """Returns the relative error of the simulated time; less than 0 if it is too short."""
        return self.simulated / self.measured - 1

    @property
    def is_right(self) -> bool:
        """Returns whether the error is small enough."""
        return abs(self.error) <= BOUND


@dataclass
class Record:
    """All measurements so far: the cluster file of each place, and times."""

    clusters: dict[str, str] = field(default_factory=dict)
    measured: list[Measured] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path | None) -> "Record":
        """Reads a record. A missing file is an empty record."""
        if path is None or not path.exists():
            return cls()
        try:
            found = json.loads(path.read_text())
            return cls(dict(found["clusters"]), [Measured(**one) for one in found["measured"]])
        except (ValueError, KeyError, TypeError) as error:
            what = f"{path} was not written by this program ({error!r}); remove it"
            raise Trouble(what) from error

    def write(self, path: Path | None) -> None:
        """Writes the record, so that an interrupted run keeps its measurements."""
        if path is None:
            return
        # A line for each cell, so that diffs of versions are readable.
        lines = ",\n".join(json.dumps(vars(one), ensure_ascii=False) for one in self.measured)
        new = path.with_name(path.name + ".new")
        new.write_text(
            f'{{"clusters": {json.dumps(self.clusters, indent=1)},\n"measured": [\n{lines}\n]}}\n'
        )
        new.replace(path)

    def has(self, place: str, work: str, algorithm: str) -> bool:
        """Returns whether a cell was measured."""
        wanted = (place, work, algorithm)
        return any((one.place, one.work, one.algorithm) == wanted for one in self.measured)

    def add(self, place: str, work: str, algorithm: str, seconds: float) -> None:
        """Adds a time to a cell, rounded to a tenth of a microsecond."""
        seconds = round(seconds, 7)
        for one in self.measured:
            if (one.place, one.work, one.algorithm) == (place, work, algorithm):
                one.times.append(seconds)
                return
        self.measured.append(Measured(place, work, algorithm, [seconds]))


# Seconds by work and algorithm.
Times = dict[tuple[str, str], float]


def cells(record: Record, simulated: dict[str, Times]) -> list[Cell]:
    """Returns the cells both measured and simulated, ordered by place and work."""
    found = []
    for one in record.measured:
        if (seconds := simulated.get(one.place, {}).get((one.work, one.algorithm))) is not None:
            typical = statistics.median(one.times)
            found.append(Cell(one.place, one.work, one.algorithm, typical, seconds))
    places = [place.name for place in PLACES]
    works = [work.name for job in (*JOBS, *QUICK_JOBS) for work in job.works]
    found.sort(key=lambda cell: (places.index(cell.place), works.index(cell.work)))
    return found


def share_right(found: Iterable[Cell]) -> float:
    """Returns the share of right cells; 1 if there are none."""
    right = [cell.is_right for cell in found]
    return sum(right) / len(right) if right else 1.0


def in_goal(found: list[Cell]) -> bool:
    """Returns whether enough cells are right."""
    return share_right(found) >= GOAL


def summary(found: list[Cell]) -> str:
    """Returns the numbers of right cells by place and work, and the worst cells."""
    works = list(dict.fromkeys(cell.work for cell in found))
    lines = [f"| links | {' | '.join(works)} | all |", "|---|" + "--:|" * (len(works) + 1)]

    def share(some: list[Cell]) -> str:
        if not some:
            return "–"
        error = statistics.median(cell.error for cell in some)
        return f"{sum(cell.is_right for cell in some)} of {len(some)}, {error:+.0%}"

    for place in [*dict.fromkeys(cell.place for cell in found), None]:
        own = [cell for cell in found if place in (None, cell.place)]
        parts = [share([cell for cell in own if cell.work == work]) for work in works]
        lines.append(f"| {place or 'all'} | {' | '.join([*parts, share(own)])} |")
    goal = "met" if in_goal(found) else "missed"
    right = sum(cell.is_right for cell in found)
    lines += ["", f"{right} of {len(found)} cells ({share_right(found):.0%}) are within"]
    lines[-1] += f" {BOUND:.0%}; the goal of {GOAL:.0%} is {goal}."
    return "\n".join(lines)


def table(some: list[Cell]) -> str:
    """Returns a table of cells."""
    lines = ["| links | work | algorithm | measured | simulated | error |"]
    lines.append("|---|---|---|--:|--:|--:|")
    for cell in some:
        times = f"{milliseconds(cell.measured)} | {milliseconds(cell.simulated)}"
        name = f"`{cell.algorithm}`"
        lines.append(f"| {cell.place} | {cell.work} | {name} | {times} | {cell.error:+.0%} |")
    return "\n".join(lines)


def grid(found: list[Cell]) -> str:
    """Returns all cells: a table for each place, with a row for each algorithm."""
    parts = []
    for place in dict.fromkeys(cell.place for cell in found):
        own = [cell for cell in found if cell.place == place]
        works = list(dict.fromkeys(cell.work for cell in own))
        lines = [f"## {place}", "", f"| algorithm | {' | '.join(works)} |"]
        lines.append("|---|" + "--:|" * len(works))
        for algorithm in dict.fromkeys(cell.algorithm for cell in own):
            by_work = {cell.work: cell for cell in own if cell.algorithm == algorithm}
            lines.append(f"| `{algorithm}` | {' | '.join(_entry(by_work.get(w)) for w in works)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _entry(cell: Cell | None) -> str:
    if cell is None:
        return "–"
    error = f"{cell.error:+.0%}"
    return f"{milliseconds(cell.measured)} {error if cell.is_right else f'**{error}**'}"


def worst(found: list[Cell]) -> list[Cell]:
    """Returns the cells with the largest errors."""
    return sorted(found, key=lambda cell: abs(cell.error), reverse=True)[:WORST]


def milliseconds(seconds: float) -> str:
    """Returns a time as text."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds * 1e3:.0f} ms"


def with_job(cluster: str, work: Work) -> str:
    """Returns the description of a cluster with the settings of a measurement of some work."""
    for key, value in (("lanes", work.lanes), ("chunk_bytes", work.chunk)):
        head, job, rest = cluster.partition("[job]\n")
        cluster = head + job + re.sub(rf"(?m)^{key} = \d+$", f"{key} = {value}", rest)
    return cluster


def simulate(gradwire: Path, cluster: str, works: list[Work], algorithms: list[str]) -> Times:
    """Returns the simulated seconds of works on a described cluster."""
    times: Times = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.toml"
        for work in works:
            file.write_text(with_job(cluster, work))
            words = [str(gradwire), "simulate", "run", str(file), "--out", folder]
            words += ["--calls", str(calls(work))]
            if work.is_model:
                words += ["--model", MODEL]
            else:
                words += ["--bytes", str(work.bytes), "--pieces", str(work.pieces)]
            # The coordinator's choice is always simulated with a model.
            named = [name for name in algorithms if name != AUTO]
            call([*words, *(f"--spec={name}" for name in named)], limit=600)
            for run in json.loads((Path(folder) / "result.json").read_text())["runs"]:
                if run["seconds"] is not None:
                    times[work.name, run["algorithm"]] = run["seconds"]
    return times


def measure(here: Site, place: Place, job: Job, algorithm: str, record: Record) -> None:
    """Measures the works of a job by an algorithm, and adds them to the record."""
    say(f"{place.name}: {', '.join(work.name for work in job.works)} by {algorithm}")
    rows = here.bench(*job.words(algorithm))
    for work, row in zip(job.works, rows, strict=True):
        if not work.is_model and row["bytes"] != work.total:
            raise Trouble(f"a call moved {row['bytes']} bytes instead of {work.total}")
        record.add(place.name, work.name, algorithm, row["median_us"] / 1e6)


def missing(
    record: Record, place: str, jobs: Iterable[Job], algorithms: list[str]
) -> list[tuple[Job, str]]:
    """Returns the missing measurements of a place, job by job. The coordinator's choice is compared
    only for the model."""
    return [
        (job, name)
        for job in jobs
        for name in algorithms
        if (name != AUTO or job.works[0].is_model)
        and not all(record.has(place, work.name, name) for work in job.works)
    ]


def too_long(job: Job, algorithm: str, expected: Times, longest: float) -> bool:
    """Returns whether a call of a job is simulated to take more than `longest` seconds."""
    times = [expected.get((work.name, algorithm), 0.0) for work in job.works]
    return max(times) > longest


def visit(place: Place, options: argparse.Namespace, record: Record, deadline: float) -> bool:
    """Makes the missing measurements of a place, until the deadline. Returns whether all exist."""
    gradwire = options.gradwire
    names = [*allreduces(gradwire, place.nodes), AUTO]
    names = [name for name in names if is_wanted(name, options.specs)]
    jobs = QUICK_JOBS if options.quick else JOBS
    jobs = tuple(job for job in jobs if max(w.total for w in job.works) <= options.largest * MIB)
    left = missing(record, place.name, jobs, names)
    if not left and place.name in record.clusters and not options.probe:
        return True
    with tempfile.TemporaryDirectory() as folder, site(place, gradwire, Path(folder)) as here:
        if place.name not in record.clusters or options.probe:
            say(f"{place.name}: probe")
            record.clusters[place.name] = here.probe().read_text()
            record.write(options.json)
        works = [work for job in {job for job, _ in left} for work in job.works]
        expected: Times = {}
        if works and options.longest < FOREVER:
            expected = simulate(gradwire, record.clusters[place.name], works, names)
        for job, name in left:
            if too_long(job, name, expected, options.longest):
                say(f"{place.name}: {job.works[-1].name} by {name} is left out: it takes too long")
                continue
            if time.monotonic() > deadline:
                return False
            measure(here, place, job, name, record)
            record.write(options.json)
    return True


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("gradwire", type=Path, help="the program")
    parser.add_argument("--quick", action="store_true", help="few places and sizes: five minutes")
    parser.add_argument(
        "--only",
        default="",
        help="measure only places whose name contains one of these texts, such as "
        "'4 nodes, 1;in 2 racks' [all]",
    )
    parser.add_argument(
        "--specs", default="", help="only algorithms whose name contains one of these texts [all]"
    )
    parser.add_argument(
        "--json",
        type=Path,
        help="a file for all times; those already in it are kept",
    )
    parser.add_argument("--markdown", type=Path, help="a file for a table of all cells")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after this time [never]")
    parser.add_argument("--largest", type=int, default=1 << 20, help="in MiB [all sizes]")
    parser.add_argument(
        "--longest",
        type=float,
        default=5.0,
        help="leave out calls with a longer simulated time, in seconds [%(default)s]",
    )
    parser.add_argument("--probe", action="store_true", help="measure the links again")
    parser.add_argument("--dry", action="store_true", help="only simulate the works in the file")
    options = parser.parse_args()
    places = QUICK_PLACES if options.quick else PLACES
    options.places = [place for place in places if is_wanted(place.name, options.only)]
    if not options.places:
        parser.error(f"--only: no place has a name that contains {options.only!r}")
    if not options.gradwire.is_file():
        parser.error(f"{options.gradwire} does not exist: build it with cargo build --release")
    if options.dry and not (options.json and options.json.exists()):
        parser.error("--dry needs the --json file of an earlier run")
    if min(options.minutes, options.largest, options.longest) <= 0:
        parser.error("--minutes, --largest and --longest must be more than 0")
    options.gradwire = options.gradwire.resolve()
    return options


def main() -> None:
    """Runs the benchmark."""
    options = arguments()
    deadline = time.monotonic() + 60 * options.minutes
    works = {work.name: work for job in (*JOBS, *QUICK_JOBS) for work in job.works}
    try:
        record = Record.read(options.json)
        for place in options.places:
            if not options.dry and not visit(place, options, record, deadline):
                say("the time is up; run the same command to continue")
                break
        simulated = {}
        for place in options.places:
            own = [one for one in record.measured if one.place == place.name]
            if not own:
                continue
            there = [works[name] for name in dict.fromkeys(one.work for one in own)]
            names = list(dict.fromkeys(one.algorithm for one in own))
            cluster = record.clusters[place.name]
            simulated[place.name] = simulate(options.gradwire, cluster, there, names)
    except Trouble as trouble:
        sys.exit(f"bench: {trouble}")
    found = cells(record, simulated)
    print(summary(found))
    print("\nThe worst:\n\n" + table(worst(found)))
    if options.markdown:
        options.markdown.write_text(f"{HEAD}\n{grid(found)}\n")
    if not in_goal(found):
        sys.exit(1)


if __name__ == "__main__":
    main()
