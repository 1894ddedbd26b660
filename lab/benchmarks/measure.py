"""Measures the systems of a scenario: first each setup once, then round by round.

In a round every system runs once. Each round begins with a different system, so that other activity
on the machine affects all of them.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from figures import Figure, figure
from install import Tools
from machine import Noise
from net import Line, Network, line_text, machine_congestion_control, measure_line, network
from plan import Run, Scenario, runs
from shapes import PARAMETERS, TENSORS, for_gradwire, for_peers, resnet50
from shell import Trouble, run_job, say
from systems import TUNED_CONGESTION_CONTROL, Job, Model, Setup, System, processes, systems

# A job that takes longer counts as hung.
JOB_SECONDS = 240
# A baseline whose largest and smallest measurements differ by more than this factor is not used.
STEADY = 1.25


@dataclass
class Outcome:
    """The results of a system in a scenario."""

    system: System
    # For each size in bytes, the median of each round in microseconds.
    rounds: dict[int, list[float]] = field(default_factory=dict)
    # For each size, the times of the same work without Gradwire, if the system reports them.
    baselines: dict[int, list[float]] = field(default_factory=dict)
    # For each size, the setup that was used.
    chosen: dict[int, Setup] = field(default_factory=dict)
    tried: dict[str, dict[int, float]] = field(default_factory=dict)
    trouble: str | None = None

    def baseline_share(self, size: int) -> float | None:
        """Returns the baseline's time as a share of the measured one, if the baseline is steady."""
        times, baselines = self.rounds.get(size), self.baselines.get(size)
        if not times or not baselines or max(baselines) > STEADY * min(baselines):
            return None
        return median(baselines) / median(times)

    def figure(self, size: int) -> Figure | None:
        """Returns the figure of a size, if any."""
        times = self.rounds.get(size)
        return figure(times) if times else None


@dataclass
class Result:
    """A scenario with its results."""

    scenario: Scenario
    line: Line | None
    outcomes: list[Outcome]

    @property
    def sizes(self) -> list[int]:
        """Returns the sizes with any measurement."""
        return sorted({size for outcome in self.outcomes for size in outcome.rounds})


@dataclass
class Bench:
    """The common parts of all measurements."""

    tools: Tools
    rounds: int
    seconds: float
    namespaces: bool
    # Whether to compare setups of the peers; otherwise the first setup of each is used.
    try_setups: bool
    folder: Path
    noise: Noise

    def scenario(self, scenario: Scenario) -> Result:
        """Measures all systems in a scenario."""
        with network(scenario, self.namespaces) as net:
            line = self._line(net, None)
            outcomes = [
                Outcome(system) for system in systems(scenario, self.tools, self.namespaces)
            ]
            for outcome in outcomes:
                self._guard(self._choose, net, scenario, outcome)
            for number in range(self.rounds):
                say(f"{scenario.title}: round {number + 1} of {self.rounds}")
                turn = number % len(outcomes)
                for outcome in outcomes[turn:] + outcomes[:turn]:
                    self._guard(self._round, net, scenario, outcome)
            line = self._line(net, line)
            if line:
                say(f"{scenario.title}: {line_text(line)}")
            return Result(scenario, line, outcomes)

    def _line(self, net: Network, before: Line | None) -> Line | None:
        """Returns the rate of the plain link: the better of the measurements before and after."""
        if len(net.nodes) == 1 or not self.tools.has("iperf3"):
            return None
        net.congestion_control(TUNED_CONGESTION_CONTROL)
        now = measure_line(net)
        return now if before is None else now.best(before)

    def _guard(
        self,
        step: Callable[[Network, Scenario, Outcome], None],
        net: Network,
        scenario: Scenario,
        outcome: Outcome,
    ) -> None:
        """Runs a step. A system that fails is left out of the rest of the scenario."""
        if outcome.trouble is not None:
            return
        try:
            step(net, scenario, outcome)
        except Trouble as trouble:
            outcome.trouble = str(trouble)
            say(f"{outcome.system.title} failed: {trouble}")

    def _choose(self, net: Network, scenario: Scenario, outcome: Outcome) -> None:
        setups = outcome.system.setups if self.try_setups else outcome.system.setups[:1]
        sizes = scenario.sizes or (4 * PARAMETERS,)
        if len(setups) == 1:
            outcome.chosen = dict.fromkeys(sizes, setups[0])
            return
        for setup in setups:
            try:
                outcome.tried[setup.label] = self._medians(
                    net, scenario, outcome, setup, set(sizes), 1 / 4
                )
            except Trouble as trouble:
                say(f"{outcome.system.title} can't be set up with '{setup.label}': {trouble}")
        if not outcome.tried:
            raise Trouble("all of its setups failed")
        for size in sizes:
            best = min(outcome.tried, key=lambda label: outcome.tried[label][size])
            outcome.chosen[size] = next(setup for setup in setups if setup.label == best)

    def _round(self, net: Network, scenario: Scenario, outcome: Outcome) -> None:
        for setup in dict.fromkeys(outcome.chosen.values()):
            sizes = {size for size, chosen in outcome.chosen.items() if chosen == setup}
            for size, time in self._medians(net, scenario, outcome, setup, sizes, 1.0).items():
                outcome.rounds.setdefault(size, []).append(time)

    def _medians(
        self,
        net: Network,
        scenario: Scenario,
        outcome: Outcome,
        setup: Setup,
        sizes: set[int],
        share: float,
    ) -> dict[int, float]:
        """Runs a system once, with a part of the usual iterations."""
        system = outcome.system
        self.noise.probe()
        net.congestion_control(
            TUNED_CONGESTION_CONTROL if system.tuned else machine_congestion_control()
        )
        times: dict[int, float] = {}
        for work in self._jobs(scenario, system, sizes, share):
            job = Job(self.tools, net, scenario, work)
            answer = self.folder / "answer.json"
            answer.unlink(missing_ok=True)
            said = run_job(processes(job, system, setup, answer), JOB_SECONDS)
            answered = _read(answer.read_text() if system.answers_in_file else said, system)
            times.update({size: row.median for size, row in answered.items()})
            for size, row in answered.items():
                if row.baseline is not None:
                    outcome.baselines.setdefault(size, []).append(row.baseline)
        if set(times) != sizes:
            raise Trouble(f"it measured {sorted(times)} bytes instead of {sorted(sizes)}")
        return times

    def _jobs(
        self, scenario: Scenario, system: System, sizes: set[int], share: float
    ) -> Iterator[list[Run] | Model]:
        if scenario.model:
            yield self._model(share)
            return
        work = [
            run for run in runs(scenario, self.seconds * share, system.thrift) if run.size in sizes
        ]
        if system.answers_in_file:
            yield from ([run] for run in work)
        else:
            yield work

    def _model(self, share: float) -> Model:
        shapes = resnet50()
        if len(shapes) != TENSORS:
            raise ValueError(f"ResNet-50 has {TENSORS} tensors, not {len(shapes)}")
        ours, theirs = self.folder / "resnet50.shapes", self.folder / "resnet50.counts"
        ours.write_text(for_gradwire(shapes))
        theirs.write_text(for_peers(shapes))
        iterations = max(3, round(8 * self.seconds * share))
        return Model(ours, theirs, max(1, iterations // 4), iterations)


@dataclass(frozen=True)
class Row:
    """The times of a system for one size, in microseconds."""

    median: float
    # The time of the same work without Gradwire.
    baseline: float | None = None


def _read(text: str, system: System) -> dict[int, Row]:
    """Returns the output of a system, for each size."""
    try:
        if system.answers_in_file:
            rows = json.loads(text)["rows"]
        else:
            # Some launchers prefix each line with its rank.
            rows = [
                json.loads("{" + line.partition("{")[2])
                for line in text.splitlines()
                if '"times_us"' in line
            ]
        return {
            int(row["bytes"]): Row(median(row["times_us"]), row.get("baseline_us")) for row in rows
        }
    except (ValueError, KeyError, TypeError) as error:
        raise Trouble(f"invalid output ({error!r}): {text[:200]}") from error
