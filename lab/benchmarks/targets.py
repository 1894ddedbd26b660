"""The targets of Gradwire, and whether it met them. Pure.

A target limits Gradwire's time by another measurement of the same run: a share of a peer's time, of
the baseline, of the time on the line, or of Gradwire's own time without a setting. Both sides have
ranges. A target is met only if it is met for all values in these ranges, and missed only if it is
missed for all of them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from figures import Figure, figure, time_text
from measure import Outcome, Result
from plan import MIB, line_bits, size_text


class Verdict(Enum):
    """Whether a target is met."""

    MET = "met"
    MISSED = "NOT met"
    NOISE = "within noise"
    UNKNOWN = "not measured"


# What a time is compared with, besides peers.
BEST_PEER = "the best peer"
BASELINE = "the baseline"
LINE = "the line, one stream"
LINE_BOTH = "the line, both ways at once"
UNCOMPRESSED = "the same uncompressed"
FAMILIES = {"gloo": "Gloo", "openmpi": "Open MPI", "horovod": "Horovod"}


@dataclass(frozen=True)
class Target:
    """`system` takes at most `most` times as long as `against`, in a scenario and at some sizes."""

    scenario: str
    sizes: tuple[int, ...]
    against: str
    most: float
    # The text of the bound in the report.
    text: str
    system: str = "gradwire"


def _node(
    ranks: int, memory: str, sizes: tuple[int, ...], *bounds: tuple[str, float, str]
) -> list[Target]:
    systems = {
        "arena": ["gradwire"],
        "ordinary": ["gradwire-ordinary"],
        "python": ["gradwire-dist", "gradwire-hvd"],
    }
    return [
        Target(f"node-{ranks}", sizes, against, most, text, system)
        for system in systems[memory]
        for against, most, text in bounds
    ]


LARGE = (64 * MIB, 256 * MIB)
WIRE = (16 * MIB, 64 * MIB)
SMALL = (1 << 10, 4 << 10, 16 << 10, 64 << 10)
SIXTY = (BASELINE, 1 / 0.6, "≥ 60 %")

TARGETS = (
    *_node(4, "arena", LARGE, ("gloo", 1 / 6, "≤ 1/6"), (BEST_PEER, 1 / 4, "≤ 1/4"), SIXTY),
    *_node(2, "arena", LARGE, ("gloo", 1 / 5, "≤ 1/5"), (BEST_PEER, 1 / 3, "≤ 1/3"), SIXTY),
    *_node(4, "ordinary", LARGE, ("gloo", 1 / 3, "≤ 1/3"), (BEST_PEER, 2 / 3, "≤ 2/3"), SIXTY),
    *_node(2, "ordinary", LARGE, (BEST_PEER, 3 / 4, "≤ 3/4"), SIXTY),
    *_node(4, "python", (64 * MIB,), ("gloo", 1 / 6, "≤ 1/6"), (BEST_PEER, 1 / 4, "≤ 1/4")),
    *_node(4, "python", (MIB,), ("gloo", 1 / 12, "≤ 1/12")),
    *_node(4, "python", (1 << 10,), ("gloo", 1 / 20, "≤ 1/20")),
    *_node(2, "python", (MIB,), ("gloo", 1 / 5, "≤ 1/5")),
    *_node(2, "python", (1 << 10,), ("gloo", 1 / 6, "≤ 1/6")),
    *_node(4, "arena", (16 * MIB,), (BEST_PEER, 1 / 3, "≤ 1/3")),
    *_node(2, "arena", (16 * MIB,), (BEST_PEER, 1 / 2, "≤ 1/2")),
    *_node(4, "arena", (MIB,), ("openmpi", 1.0, "≤ 1"), ("gloo", 1 / 15, "≤ 1/15")),
    *_node(4, "arena", (4,), ("gloo", 1 / 8, "≤ 1/8"), ("horovod", 1 / 15, "≤ 1/15")),
    *_node(4, "arena", SMALL, ("gloo", 1 / 25, "≤ 1/25")),
    Target("1g-2x2", WIRE, "gloo", 1 / 1.45, "≥ 1.45×"),
    Target("10g-2x2", WIRE, "gloo", 1 / 1.7, "≥ 1.7×"),
    Target("1g-2x1", WIRE, LINE, 1 / 0.97, "≥ 97 %"),
    Target("1g-2x1", WIRE, BEST_PEER, 1.0, "never behind"),
    Target("10g-2x1", WIRE, LINE, 1 / 0.97, "≥ 97 %"),
    Target("10g-2x1", WIRE, BEST_PEER, 1.0, "never behind"),
    Target("10g-1ms-2x1", WIRE, LINE_BOTH, 1 / 0.9, "≥ 90 %"),
    Target("1g-2x1", WIRE, UNCOMPRESSED, 1 / 1.9, "≥ 1.9×", "gradwire-bf16"),
    Target("free-2x1", LARGE, BEST_PEER, 1.0, "ahead of"),
    Target("1g-4x1", WIRE, LINE, 1 / 0.95, "≥ 95 %"),
    Target("resnet50", (), "gloo", 1 / 6, "≤ 1/6"),
    Target("resnet50", (), "horovod", 1 / 12, "≤ 1/12"),
    Target("resnet50", (), BEST_PEER, 1 / 2, "≤ 1/2"),
)


@dataclass(frozen=True)
class Judgement:
    """The result of a target at one size."""

    target: Target
    title: str
    size: str
    # What exactly it was compared with.
    against: str
    ours: Figure | None
    theirs: Figure | None
    verdict: Verdict

    @property
    def reached(self) -> str:
        """Returns the result, in the form of the target."""
        if self.ours is None or self.theirs is None:
            return "–"
        faster = self.theirs.median / self.ours.median
        if "%" in self.target.text:
            return f"{faster:.0%}"
        return f"1/{faster:.3g}" if "/" in self.target.text else f"{faster:.3g}×"

    @property
    def times(self) -> str:
        """Returns the two times."""
        if self.ours is None or self.theirs is None:
            return "–"
        return f"{time_text(self.ours.median)} : {time_text(self.theirs.median)}"


def judge(results: list[Result], targets: Iterable[Target] = TARGETS) -> list[Judgement]:
    """Judges each target in the measured scenarios, at each measured size."""
    found: list[Judgement] = []
    by_name = {result.scenario.name: result for result in results}
    for target in targets:
        result = by_name.get(target.scenario)
        if result is None:
            continue
        sizes = (
            result.sizes
            if result.scenario.model
            else [size for size in target.sizes if size in result.sizes]
        )
        found += [_judge(result, target, size) for size in sizes]
        if not sizes:
            found.append(_unknown(result, target, "–"))
    return found


def verdict(ours: Figure, theirs: Figure, most: float) -> Verdict:
    """Whether our time is at most `most` times theirs."""
    if ours.high <= most * theirs.low:
        return Verdict.MET
    if ours.low > most * theirs.high:
        return Verdict.MISSED
    return Verdict.NOISE


def _judge(result: Result, target: Target, size: int) -> Judgement:
    outcomes = {outcome.system.name: outcome for outcome in result.outcomes}
    name = f"{size / MIB:.1f} MiB" if result.scenario.model else size_text(size)
    ours = _figure(outcomes.get(target.system), size)
    against, theirs = _against(result, outcomes, target, size)
    if ours is None or theirs is None:
        return _unknown(result, target, name)
    return Judgement(
        target,
        result.scenario.title,
        name,
        against,
        ours,
        theirs,
        verdict(ours, theirs, target.most),
    )


def _unknown(result: Result, target: Target, size: str) -> Judgement:
    against = FAMILIES.get(target.against, target.against)
    return Judgement(target, result.scenario.title, size, against, None, None, Verdict.UNKNOWN)


def _figure(outcome: Outcome | None, size: int) -> Figure | None:
    return None if outcome is None else outcome.figure(size)


def _against(
    result: Result, outcomes: dict[str, Outcome], target: Target, size: int
) -> tuple[str, Figure | None]:
    """Returns what a target is compared with, and its name."""
    if target.against in (LINE, LINE_BOTH):
        line = result.line
        if line is None:
            return target.against, None
        # The better of its measurements, without a range, because other load can only slow a line
        # down.
        rate = line.one_way if target.against == LINE else line.both_ways
        return target.against, figure([line_bits(result.scenario, size) / rate * 1e6])
    if target.against == BASELINE:
        outcome = outcomes.get(target.system)
        baselines = outcome.baselines.get(size) if outcome else None
        return BASELINE, figure(baselines) if baselines else None
    if target.against == UNCOMPRESSED:
        return UNCOMPRESSED, _figure(outcomes.get("gradwire"), size)
    peers = [outcome for outcome in outcomes.values() if not outcome.system.ours]
    if target.against != BEST_PEER:
        peers = [outcome for outcome in peers if outcome.system.family == target.against]
    timed = [(found, outcome.system.title) for outcome in peers if (found := outcome.figure(size))]
    if not timed:
        return FAMILIES.get(target.against, target.against), None
    best, title = min(timed, key=lambda pair: pair[0].median)
    return title, best
