#!/usr/bin/env python3
"""Compares the choice of algorithms with every algorithm, on the same links.

The nodes are network namespaces of this machine with one rank each. The rates are so low that the
lines are the limit, not the processors. The probe measures the links, as in every job.

1. Every algorithm runs once. Those that are near the fastest one of some size, and those from which
   `auto` chooses, are measured.
2. A job learns (`tuning.directory`), with as many calls as the time limit allows.
3. In several rounds all of them run in turn, as does `auto`, with and without the learned data. The
   median of the rounds counts.

Calls follow each other without a pause. `cells.py` evaluates the times.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cells import AUTO, CHOOSERS, LEARNED, Cell, Learning, as_markdown
from places import PLACES, Place, Site, allreduces, is_wanted, site
from shell import Trouble, call, say

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB)
# The algorithms compared for collectives in which each node has a share; the others send the same
# messages as one of these.
EXCHANGES = ("direct", "circulant", "circulant(radix=4)", "hierarchical", "ring")
COLLECTIVES = ("allreduce", "allgather", "reducescatter", "alltoall")


@dataclass(frozen=True)
class Often:
    """The number of calls, after some warm-up calls."""

    warmup: int
    calls: int


# For a first run and for a round. From LARGE on there are fewer: they take longer and vary less.
LOOK, ROUND = Often(10, 15), Often(10, 50)
LARGE, LARGE_LOOK, LARGE_ROUND = 16 * MIB, Often(1, 3), Often(1, 7)
# Algorithms that took longer than this multiple of the fastest time are not measured again.
NEAR = 1.3
# The calls of each size by which a job learns, and their time limit in seconds.
LEARN, LEARN_SECONDS = 8000, 25.0
NEVER = 1_000_000

# A row of `gradwire explain --json`.
Choice = dict[str, Any]


@dataclass
class Part:
    """A collective between some nodes: its cells, the measured rounds, and the files that a job has
    learned, by name."""

    cells: list[Cell]
    rounds: int = 0
    learned: dict[str, str] | None = None


@dataclass
class Record:
    """All measurements so far, by place and collective."""

    parts: dict[str, Part] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path | None) -> "Record":
        """Reads a record. A missing file is an empty record."""
        if path is None or not path.exists():
            return cls()
        try:
            return cls({key: _part(part) for key, part in json.loads(path.read_text()).items()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"{path} was not written by this program ({error!r}); remove it"
            raise Trouble(what) from error

    def write(self, path: Path | None) -> None:
        """Writes the record, so that an interrupted run keeps its measurements."""
        if path is not None:
            new = path.with_name(path.name + ".new")
            everything = {key: asdict(part) for key, part in self.parts.items()}
            new.write_text(json.dumps(everything, indent=1))
            new.replace(path)

    @property
    def cells(self) -> list[Cell]:
        """Returns all cells with a measured round."""
        return [cell for part in self.parts.values() if part.rounds for cell in part.cells]


def _part(found: dict[str, Any]) -> Part:
    cells = []
    for cell in found["cells"]:
        learning = cell.pop("learning")
        cells.append(Cell(**cell, learning=Learning(**learning) if learning else None))
    return Part(cells, found["rounds"], found["learned"])


def algorithms(gradwire: Path, collective: str, nodes: int) -> list[str]:
    """Returns the algorithms that run a collective differently between `nodes` nodes."""
    return list(EXCHANGES) if collective != "allreduce" else allreduces(gradwire, nodes)


@dataclass
class Bench:
    """Runs a collective in a place."""

    here: Site
    place: Place
    gradwire: Path
    collective: str
    part: Part
    near: float

    @property
    def cells(self) -> list[Cell]:
        """Returns a cell for each size."""
        return self.part.cells

    def piece(self, cell: Cell) -> int:
        """Returns the bytes of a piece. The size of a call is that of each rank's data, which in an
        alltoall is the rank's own part of the piece."""
        return cell.size * (self.place.nodes if self.collective == "alltoall" else 1)

    def run_all(
        self, name: str, small: Often, large: Often, *settings: str
    ) -> tuple[dict[int, float], dict[int, Choice]]:
        """Runs calls of all sizes, each large size by itself. Returns the same as `run`."""
        sizes = [cell.size for cell in self.cells]
        groups = [([size for size in sizes if size < LARGE], small)]
        groups += [([size], large) for size in sizes if size >= LARGE]
        times: dict[int, float] = {}
        known: dict[int, Choice] = {}
        for group, often in groups:
            if group:
                found = self.run(name, often, group, *settings)
                times.update(found[0])
                known.update(found[1])
        return times, known

    def run(
        self, name: str, often: Often, sizes: list[int], *settings: str
    ) -> tuple[dict[int, float], dict[int, Choice]]:
        """Runs calls of some sizes. Returns the seconds of each, and the coordinator's last
        descriptions of them."""
        words = [self.collective, "-b", str(sizes[0]), "-e", str(sizes[-1]), "-f", "16"]
        words += ["-w", str(often.warmup), "-i", str(often.calls), "-c", str(NEVER)]
        words += ["--set", f"negotiation.algorithm={name}"]
        for setting in settings:
            words += ["--set", setting]
        rows, choices = self.here.watched_bench(*words)
        times: dict[int, float] = {}
        for row in rows:
            times[min(sizes, key=lambda size: abs(size - row["bytes"]))] = row["median_us"] / 1e6
        known: dict[int, Choice] = {}
        for cell in self.cells:
            for choice in choices:
                # Lanes share the waiting work, so a call may be several pieces.
                bytes_of_all = choice["bytes"] * choice["pieces"]
                if choice["collective"] == self.collective and bytes_of_all == self.piece(cell):
                    before = known.get(cell.size)
                    if not before or choice["operations"] > before["operations"]:
                        known[cell.size] = choice
        return times, known

    def look(self, names: list[str]) -> None:
        """Runs every algorithm once."""
        for name in [*names, AUTO]:
            say(f"{self.place.name}: {self.collective}, first run of {name}")
            times, known = self.run_all(name, LOOK, LARGE_LOOK)
            for cell in self.cells:
                cell.looks[name] = times[cell.size]
                # The candidates of `auto` are measured in any case.
                if name == AUTO and cell.size in known:
                    for one in known[cell.size]["candidates"]:
                        cell.times.setdefault(one["algorithm"], [])

    def learn(self, calls: int, seconds: float, directory: Path) -> None:
        """Lets jobs learn, one for each size."""
        directory.mkdir()
        for cell in self.cells:
            most = max(LOOK.warmup, min(calls, int(seconds / cell.looks[AUTO])))
            what = f"{most} calls of {cell.size} bytes to learn"
            say(f"{self.place.name}: {self.collective}, {what}")
            often = Often(LARGE_LOOK.warmup, most)
            _, known = self.run(AUTO, often, [cell.size], *tuning(directory))
            if choice := known.get(cell.size):
                pieces = choice["pieces"]
                cell.expected = {
                    one["algorithm"]: one["expected_seconds"] * pieces
                    for one in choice["candidates"]
                }
                cell.learning = learning(choice)
        self.part.learned = {file.name: file.read_text() for file in directory.glob("*.json")}

    def names(self) -> list[str]:
        """Returns the algorithms and choosers to measure."""
        near = self.near
        wanted = {name for cell in self.cells for name in cell.contenders(near) | cell.times.keys()}
        wanted -= set(CHOOSERS)
        return [*(name for name in self.cells[0].looks if name in wanted), *CHOOSERS]

    def round(self, turn: int) -> None:
        """Runs all of them once."""
        cluster = self.here.probe()
        names = self.names()
        # No algorithm is always the first.
        start = turn * len(names) // 3 % len(names)
        for name in [*names[start:], *names[:start]]:
            with tempfile.TemporaryDirectory() as folder:
                settings: tuple[str, ...] = ()
                if name == LEARNED:
                    for file, text in (self.part.learned or {}).items():
                        Path(folder, file).write_text(text)
                    settings = tuning(Path(folder))
                own = AUTO if name in CHOOSERS else name
                times, known = self.run_all(own, ROUND, LARGE_ROUND, *settings)
            found = predictions(self.gradwire, cluster, self.collective, own)
            for cell in self.cells:
                cell.times.setdefault(name, []).append(times[cell.size])
                if choice := known.get(cell.size):
                    seconds = choice["expected_seconds"] * choice["pieces"]
                    cell.operations.setdefault(name, []).append(seconds)
                    if name in CHOOSERS:
                        cell.chosen.setdefault(name, []).append(choice["algorithm"])
                if seconds := found.get(self.piece(cell)):
                    cell.predicted.setdefault(name, []).append(seconds)
        self.part.rounds += 1


def tuning(directory: Path) -> tuple[str, str]:
    """Returns the settings of a job that learns."""
    return "tuning.enabled=true", f"tuning.directory={directory}"


def learning(choice: Choice) -> Learning:
    """Returns how a job learned a size, from its description of the size."""
    usual, operations = choice["expected_seconds"], choice["operations"]
    candidates = choice["candidates"]
    longer = sum(one["tried"] * max(0.0, one["expected_seconds"] - usual) for one in candidates)
    return Learning(
        operations,
        sum(one["tried"] for one in candidates),
        longer / (operations * usual) if operations and usual else 0.0,
        choice["algorithm"],
        choice["version"],
    )


def predictions(gradwire: Path, cluster: Path, collective: str, name: str) -> dict[int, float]:
    """Returns the predicted seconds of a single piece, by size."""
    words = [str(gradwire), "explain", "--cluster", str(cluster), "--json"]
    rows = json.loads(call([*words, "--set", f"negotiation.algorithm={name}"]))["choices"]
    alone = (row for row in rows if row["collective"] == collective and row["pieces"] == 1)
    return {row["bytes"]: row["predicted_seconds"] for row in alone}


@contextmanager
def empty_folder() -> Iterator[Path]:
    """Returns the name of a folder that does not exist yet."""
    folder = Path(tempfile.mkdtemp())
    try:
        yield folder / "tuning"
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("gradwire", type=Path, help="the program")
    parser.add_argument("--quick", action="store_true", help="only 4 and 8 nodes at 1 Gbit/s")
    parser.add_argument(
        "--only",
        default="",
        help="measure only places whose name contains one of these texts, such as "
        "'4 nodes, 1;in 2 racks' [all]",
    )
    parser.add_argument("--rounds", type=int, default=3, help="[%(default)s]")
    parser.add_argument("--smallest", type=int, default=4, help="in KiB [%(default)s]")
    parser.add_argument("--largest", type=int, default=1024, help="in KiB [%(default)s]")
    parser.add_argument("--collectives", default=",".join(COLLECTIVES), help="[%(default)s]")
    parser.add_argument(
        "--learn", type=int, default=LEARN, help="calls of each size to learn from [%(default)s]"
    )
    parser.add_argument(
        "--learn-seconds", type=float, default=LEARN_SECONDS, help="at most [%(default)s]"
    )
    parser.add_argument(
        "--near",
        type=float,
        default=NEAR,
        help="measure algorithms up to this multiple of the fastest time [%(default)s]",
    )
    parser.add_argument(
        "--json", type=Path, help="a file for all times; those already in it are kept"
    )
    options = parser.parse_args()
    sizes = [size for size in SIZES if options.smallest <= size // KIB <= options.largest]
    if not sizes:
        sys.exit("bench: no size is between --smallest and --largest")
    places = [Place(4, 1), Place(8, 1)] if options.quick else list(PLACES)
    places = [place for place in places if is_wanted(place.name, options.only)]
    if not places:
        sys.exit(f"bench: no place has a name that contains {options.only!r}")
    try:
        record = Record.read(options.json)
        for place in places:
            for collective in options.collectives.split(","):
                measure(place, collective, sizes, record, options)
    except Trouble as trouble:
        sys.exit(f"bench: {trouble}")
    print(as_markdown(record.cells))


def measure(
    place: Place, collective: str, sizes: list[int], record: Record, options: argparse.Namespace
) -> None:
    """Measures a collective in a place, unless this was done already."""
    gradwire = options.gradwire.resolve()
    empty = Part([Cell(place.name, collective, size) for size in sizes])
    part = record.parts.setdefault(f"{place.name}; {collective}", empty)
    if part.rounds >= options.rounds:
        return
    with tempfile.TemporaryDirectory() as folder, site(place, gradwire, Path(folder)) as here:
        bench = Bench(here, place, gradwire, collective, part, options.near)
        if not part.cells[0].looks:
            bench.look(algorithms(gradwire, collective, place.nodes))
            record.write(options.json)
        if part.learned is None:
            with empty_folder() as directory:
                bench.learn(options.learn, options.learn_seconds, directory)
            record.write(options.json)
        while part.rounds < options.rounds:
            say(f"{place.name}: {collective}, round {part.rounds + 1} of {options.rounds}")
            bench.round(part.rounds)
            record.write(options.json)


if __name__ == "__main__":
    main()
