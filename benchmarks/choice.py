#!/usr/bin/env python3
"""How good the choice of algorithms is: every algorithm, and what `auto` takes, on the same links.

The nodes are network namespaces of this machine with one rank each. The rates are so low that the
lines are the limit and not the processors. The links are measured by the probe, as in every job.
The regret of a size is how much longer `auto` takes than the fastest algorithm. The error of a
prediction is by how much the time of a call differs from what the cost model predicts for it after
the probe. Every system is measured in several rounds, all algorithms in turn, and the median of the
rounds counts.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from places import PLACES, Place, allreduces, is_wanted, site
from shell import Trouble, call, say

AUTO = "auto"
KIB = 1 << 10
# What is different for collectives of which each node has a share: others have the same messages.
EXCHANGES = ("direct", "circulant", "circulant(radix=4)", "hierarchical", "ring")
COLLECTIVES = ("allreduce", "allgather", "reducescatter", "alltoall")


@dataclass
class Cell:
    """The times of one collective and size in seconds: by algorithm, and of each round."""

    place: str
    collective: str
    size: int
    times: dict[str, list[float]] = field(default_factory=dict)
    predicted: dict[str, list[float]] = field(default_factory=dict)

    def typical(self, algorithm: str) -> float:
        """Returns the median of the rounds."""
        return statistics.median(self.times[algorithm])

    def error(self, algorithm: str) -> float:
        """Returns by how much the prediction differs from the time, as a share of the time."""
        return abs(statistics.median(self.predicted[algorithm]) / self.typical(algorithm) - 1)

    @property
    def best(self) -> str:
        """Returns the fastest algorithm."""
        named = [name for name in self.times if name != AUTO]
        return min(named, key=self.typical)

    @property
    def regret(self) -> float:
        """Returns how much longer the choice takes than the best, as a share; never less than 0.

        A choice that was measured to be faster than all others is one of them.
        """
        return max(0.0, self.typical(AUTO) / self.typical(self.best) - 1)


def mean_regret(cells: list[Cell]) -> float:
    """Returns the mean of all cells."""
    return statistics.fmean(cell.regret for cell in cells)


def errors(cells: list[Cell]) -> list[float]:
    """Returns the errors of all predictions."""
    return [cell.error(name) for cell in cells for name in cell.predicted]


def as_markdown(cells: list[Cell]) -> str:
    """Returns a table of all cells, and the mean regret of each collective."""
    lines = [
        "| links | collective | size | `auto` | fastest | | regret |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        lines.append(
            f"| {cell.place} | {cell.collective} | {_size(cell.size)} "
            f"| {_time(cell.typical(AUTO))} | `{cell.best}` | {_time(cell.typical(cell.best))} "
            f"| {cell.regret:.0%} |"
        )
    lines.append("")
    for collective in dict.fromkeys(cell.collective for cell in cells):
        own = [cell for cell in cells if cell.collective == collective]
        worst = max(cell.regret for cell in own)
        line = f"- {collective}: mean regret {mean_regret(own):.1%}, worst {worst:.0%}"
        if wrong := errors(own):
            line += f"; predictions: median error {statistics.median(wrong):.0%}"
        lines.append(line)
    return "\n".join(lines)


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def algorithms(gradwire: Path, collective: str, nodes: int) -> list[str]:
    """Returns what runs a collective differently between so many nodes."""
    if collective != "allreduce":
        return [*EXCHANGES, AUTO]
    return [*allreduces(gradwire, nodes), AUTO]


def measure(
    place: Place, collectives: list[str], sizes: list[int], rounds: int, gradwire: Path
) -> Iterator[Cell]:
    """Measures all algorithms between some nodes, in turn."""
    with (
        tempfile.TemporaryDirectory() as folder,
        site(place, gradwire, Path(folder)) as here,
    ):
        for collective in collectives:
            cells = {size: Cell(place.name, collective, size) for size in sizes}
            names = algorithms(gradwire, collective, place.nodes)
            for turn in range(rounds):
                say(f"{place.name}: {collective}, round {turn + 1} of {rounds}")
                cluster = here.probe()
                for name in names:
                    words = [collective, "-b", str(sizes[0]), "-e", str(sizes[-1]), "-f", "16"]
                    words += ["-w", "3", "-i", "15", "--set", f"negotiation.algorithm={name}"]
                    for row in here.bench(*words):
                        cell = min(cells.values(), key=lambda cell: abs(cell.size - row["bytes"]))
                        cell.times.setdefault(name, []).append(row["median_us"] / 1e6)
                    # A call gives the size of what each rank has. In an alltoall that is its own
                    # part of the piece.
                    ranks = place.nodes if collective == "alltoall" else 1
                    found = predictions(gradwire, cluster, collective, name)
                    for cell in cells.values():
                        if seconds := found.get(cell.size * ranks):
                            cell.predicted.setdefault(name, []).append(seconds)
            yield from cells.values()


def predictions(gradwire: Path, cluster: Path, collective: str, name: str) -> dict[int, float]:
    """Returns the seconds that are predicted for a piece by itself, by size."""
    words = [str(gradwire), "explain", "--cluster", str(cluster), "--json"]
    rows = json.loads(call([*words, "--set", f"negotiation.algorithm={name}"]))["choices"]
    alone = (row for row in rows if row["collective"] == collective and row["pieces"] == 1)
    return {row["bytes"]: row["predicted_seconds"] for row in alone}


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("gradwire", type=Path, help="the program")
    parser.add_argument("--quick", action="store_true", help="4 and 8 nodes at 1 Gbit/s alone")
    parser.add_argument(
        "--only",
        default="",
        help="the places whose names contain one of these texts, such as "
        "'4 nodes, 1;in 2 racks' [all]",
    )
    parser.add_argument("--rounds", type=int, default=3, help="[%(default)s]")
    parser.add_argument("--largest", type=int, default=4096, help="in KiB [%(default)s]")
    parser.add_argument("--collectives", default=",".join(COLLECTIVES), help="[%(default)s]")
    parser.add_argument("--json", type=Path, help="a file for all times")
    options = parser.parse_args()
    sizes = [size for size in (4 * KIB << shift for shift in range(0, 20, 4))]
    sizes = [size for size in sizes if size <= options.largest * KIB]
    places = [Place(4, 1), Place(8, 1)] if options.quick else list(PLACES)
    places = [place for place in places if is_wanted(place.name, options.only)]
    if not places:
        sys.exit(f"bench: no place's name contains {options.only!r}")
    cells: list[Cell] = []
    try:
        for place in places:
            collectives = options.collectives.split(",")
            cells += measure(place, collectives, sizes, options.rounds, options.gradwire.resolve())
            # After each place, so that an interrupted run keeps what it has measured.
            if options.json:
                options.json.write_text(json.dumps([vars(cell) for cell in cells], indent=1))
    except Trouble as trouble:
        sys.exit(f"bench: {trouble}")
    print(as_markdown(cells))


if __name__ == "__main__":
    main()
