"""Turns rounds into figures, and decides which differences count. Pure.

A system runs once in each round, and the figure of a run is the median of its iterations. The
report shows the median of the rounds. Its noise is the range of the rounds, extended by half of it
on either side, because a few rounds don't show the extremes. Two systems whose ranges touch are
considered equal.
"""

from dataclasses import dataclass
from enum import Enum
from statistics import median

# With fewer rounds, a range has no meaning.
MIN_ROUNDS = 3


class Verdict(Enum):
    """How Gradwire's time compares with a peer's."""

    FASTER = "faster"
    SLOWER = "slower"
    NOISE = "within noise"


@dataclass(frozen=True)
class Figure:
    """A time in microseconds, with the range of its noise."""

    median: float
    low: float
    high: float
    rounds: int

    @property
    def spread(self) -> float:
        """The width of the range, as a share of the median."""
        return (self.high - self.low) / self.median


def figure(rounds: list[float]) -> Figure:
    """The figure of a system's rounds; each is a time in microseconds."""
    if not rounds or min(rounds) <= 0:
        raise ValueError(f"times must exist and be more than 0: {rounds}")
    half = (max(rounds) - min(rounds)) / 2
    return Figure(median(rounds), max(0.0, min(rounds) - half), max(rounds) + half, len(rounds))


def verdict(ours: Figure, theirs: Figure) -> Verdict:
    """Returns which one is faster, if the difference exceeds the noise."""
    if min(ours.rounds, theirs.rounds) < MIN_ROUNDS:
        return Verdict.NOISE
    if ours.high < theirs.low:
        return Verdict.FASTER
    if ours.low > theirs.high:
        return Verdict.SLOWER
    return Verdict.NOISE


def ratio(ours: Figure, theirs: Figure) -> float:
    """Returns their time divided by ours."""
    return theirs.median / ours.median


def time_text(us: float) -> str:
    """A time with three digits and a unit."""
    for unit, name in ((1e6, "s"), (1e3, "ms")):
        if us >= unit:
            return f"{us / unit:.3g} {name}" if us < 1000 * unit else f"{us / unit:.0f} {name}"
    return f"{us:.3g} µs"
