"""Evaluates the times of choice.py: regret, its noise, errors of predictions, tables.

The *regret* of a chooser (`auto` from its start, and `auto` after learning) is how much longer it
takes than the fastest algorithm. It has two parts. The cost of the choice is how much longer the
chosen algorithm takes *when requested by name*. The rest is noise: the same algorithm took a
different time in another job. Two figures show the noise. The *floor* is the regret of algorithms
that send the same messages as the fastest one: among many equal ones, the fastest is so by luck.
The other figure is the difference between a chooser's time and that of the algorithm that it chose.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

AUTO = "auto"
LEARNED = "after learning"
CHOOSERS = (AUTO, LEARNED)
# Smaller differences between predictions mean that the messages are the same.
SAME = 1e-4


@dataclass
class Learning:
    """How a job learned one size: operations in total, and those of tries."""

    operations: int = 0
    tried: int = 0
    # The additional time of all calls caused by the tries, as a share.
    cost: float = 0.0
    # The algorithm at the end, and how often it had changed.
    spec: str = ""
    version: int = 0


@dataclass
class Cell:
    """One collective and size, with the seconds of each algorithm in each round."""

    place: str
    collective: str
    size: int
    # Seconds of calls.
    times: dict[str, list[float]] = field(default_factory=dict)
    # Seconds of operations, as the coordinator measures them. The cost model predicts these.
    operations: dict[str, list[float]] = field(default_factory=dict)
    predicted: dict[str, list[float]] = field(default_factory=dict)
    # The seconds of operations that a job has learned.
    expected: dict[str, float] = field(default_factory=dict)
    # The algorithms of each chooser.
    chosen: dict[str, list[str]] = field(default_factory=dict)
    learning: Learning | None = None
    # A first run of every algorithm, which decides which ones are measured.
    looks: dict[str, float] = field(default_factory=dict)

    def typical(self, name: str) -> float:
        """Returns the median of the rounds."""
        return statistics.median(self.times[name])

    @property
    def best(self) -> str:
        """Returns the fastest algorithm."""
        named = [name for name in self.times if name not in CHOOSERS]
        return min(named, key=self.typical)

    def regret(self, chooser: str = AUTO) -> float | None:
        """Returns how much longer a chooser takes than the best, as a share; never less than 0.

        If the choice was the fastest of all, the regret is 0.
        """
        if chooser not in self.times:
            return None
        return max(0.0, self.typical(chooser) / self.typical(self.best) - 1)

    def cost_of_choice(self, chooser: str = AUTO) -> float | None:
        """Returns how much longer the chosen algorithms take than the best, when requested by name,
        as a share."""
        chosen = self.chosen.get(chooser, [])
        if not chosen or any(name not in self.times for name in chosen):
            return None
        return statistics.fmean(self.typical(name) for name in chosen) / self.typical(self.best) - 1

    def noise(self) -> list[float]:
        """Returns how far choosers are from the algorithms they chose, as shares, if they always
        chose the same."""
        found = []
        for chooser, chosen in self.chosen.items():
            if len(set(chosen)) == 1 and chosen[0] in self.times and chooser in self.times:
                found.append(abs(self.typical(chooser) / self.typical(chosen[0]) - 1))
        return found

    def floor(self) -> float | None:
        """Returns how much longer than the fastest the algorithms with the same prediction take on
        average, because they send the same messages: a regret of noise alone."""
        said = {name: statistics.median(times) for name, times in self.predicted.items()}
        if (best := said.get(self.best)) is None:
            return None
        others = said.keys() & self.times.keys() - {self.best, *CHOOSERS}
        same = [name for name in others if abs(said[name] / best - 1) < SAME]
        return mean(self.typical(name) / self.typical(self.best) - 1 for name in same)

    def errors(self, of: str) -> list[float]:
        """Returns the differences between predictions and times, as shares: of "calls" or
        "operations" after the probe, or of operations "after learning". If a fixed algorithm runs a
        call as several pieces, the coordinator does not time them, and the time of the call counts.
        """
        measured = self.times if of == "calls" else {**self.times, **self.operations}
        if of == LEARNED:
            said = self.expected
        else:
            said = {name: statistics.median(times) for name, times in self.predicted.items()}
        both = (name for name in said if measured.get(name) and name not in CHOOSERS)
        return [abs(said[name] / statistics.median(measured[name]) - 1) for name in both]

    def contenders(self, near: float) -> set[str]:
        """Returns the algorithms that took at most `near` times as long as the fastest one."""
        least = min(self.looks.values())
        return {name for name, seconds in self.looks.items() if seconds <= near * least}


def mean(values: Iterable[float | None]) -> float | None:
    """Returns the mean of the known values, if any."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def as_markdown(cells: list[Cell]) -> str:
    """Returns a table of all cells, and figures for each place and collective."""
    lines = [
        "| links | collective | size | fastest | | `auto` | | regret | after learning | | regret |",
        "|---|---|---|---|--:|---|--:|--:|---|--:|--:|",
    ]
    for cell in cells:
        row = [cell.place, cell.collective, _size(cell.size), f"`{cell.best}`"]
        row.append(_time(cell.typical(cell.best)))
        for chooser in CHOOSERS:
            row += [_specs(cell, chooser)]
            known = chooser in cell.times
            row += [_time(cell.typical(chooser)) if known else "–", _share(cell.regret(chooser))]
        lines.append(f"| {' | '.join(row)} |")
    lines += ["", *summary(cells), "", *_errors(cells), "", *_learning(cells)]
    return "\n".join(lines)


def summary(cells: list[Cell]) -> list[str]:
    """Returns a table of the mean regret of each place and collective."""
    lines = [
        "| links | collective | regret | of the choice | after learning | of the choice | floor "
        "| noise |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for place, collective in dict.fromkeys((cell.place, cell.collective) for cell in cells):
        own = [cell for cell in cells if (cell.place, cell.collective) == (place, collective)]
        row = []
        for chooser in CHOOSERS:
            row.append(_share(mean(cell.regret(chooser) for cell in own)))
            row.append(_share(mean(cell.cost_of_choice(chooser) for cell in own)))
        row.append(_share(mean(cell.floor() for cell in own)))
        noise = [share for cell in own for share in cell.noise()]
        row.append(_share(mean(noise)))
        lines.append(f"| {place} | {collective} | {' | '.join(row)} |")
    return lines


def _errors(cells: list[Cell]) -> list[str]:
    lines = [
        "| links | size | operations | calls | operations after learning |",
        "|---|---|--:|--:|--:|",
    ]
    for place, size in dict.fromkeys((cell.place, cell.size) for cell in cells):
        own = [cell for cell in cells if (cell.place, cell.size) == (place, size)]
        row = []
        for of in ("operations", "calls", LEARNED):
            found = [error for cell in own for error in cell.errors(of)]
            row.append(_share(statistics.median(found) if found else None))
        lines.append(f"| {place} | {_size(size)} | {' | '.join(row)} |")
    return lines


def _learning(cells: list[Cell]) -> list[str]:
    lines = [
        "| links | collective | size | operations | tries | cost | changes | chosen at the end |",
        "|---|---|---|--:|--:|--:|--:|---|",
    ]
    for cell in cells:
        if (learning := cell.learning) and learning.operations:
            share = learning.tried / learning.operations
            lines.append(
                f"| {cell.place} | {cell.collective} | {_size(cell.size)} | {learning.operations} "
                f"| {share:.1%} | {learning.cost:.1%} | {learning.version - 1} "
                f"| `{learning.spec}` |"
            )
    return lines


def _specs(cell: Cell, chooser: str) -> str:
    return ", ".join(f"`{name}`" for name in dict.fromkeys(cell.chosen.get(chooser, []))) or "–"


def _share(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
