"""Tests of the targets and their verdicts: `python3 -m unittest discover lab/benchmarks`."""

import unittest

import resources
import verdicts
from figures import figure
from measure import Outcome, Result
from net import Line
from plan import GBIT, MIB, Scenario, for_targets, full
from shell import Trouble
from systems import System
from targets import BASELINE, BEST_PEER, LINE, LINE_BOTH, TARGETS, Target, Verdict, judge, verdict

OURS = System("gradwire", "Gradwire", "gradwire", tuned=True)
SHORT = System("gradwire-bf16", "Gradwire, bf16", "gradwire", tuned=True)
GLOO = System("gloo-tuned", "Gloo, tuned", "gloo", tuned=True)
MPI = System("openmpi-tuned", "Open MPI, tuned", "openmpi", tuned=True)
QUIET = {
    "foreign_load_median": 0.0,
    "foreign_load_max": 0.0,
    "stolen": 0.0,
    "probe_ms": 5.0,
    "probe_spread": 0.1,
}


def steady(us: float) -> list[float]:
    """Returns rounds without noise."""
    return [us, us, us]


def row(process: str, idle: float, private: dict[str, int]) -> dict[str, object]:
    """Returns a row of `gradwire bench resources`."""
    growth = list(private.values())[-1] - next(iter(private.values()))
    counts = dict.fromkeys(("cpu_us", "waits", "preemptions", "faults"), 1.0)
    names = {
        "host": "a",
        "process": process,
        "idle_share": idle,
        "private_bytes": private,
        "growth_bytes": growth,
    }
    return {**names, **counts, "calls": None, "uncounted": "no perf"}


class Verdicts(unittest.TestCase):
    """When a target is met."""

    def test_a_target_must_hold_in_the_whole_range(self) -> None:
        """A target is missed only if it fails in the whole range."""
        theirs = figure([100.0, 100.0, 100.0])
        self.assertIs(verdict(figure(steady(50.0)), theirs, 1 / 2), Verdict.MET)
        self.assertIs(verdict(figure(steady(51.0)), theirs, 1 / 2), Verdict.MISSED)
        self.assertIs(verdict(figure([48.0, 49.0, 52.0]), theirs, 1 / 2), Verdict.NOISE)
        self.assertIs(
            verdict(figure(steady(50.0)), figure([99.0, 100.0, 101.0]), 1 / 2), Verdict.NOISE
        )

    def test_the_best_peer_is_the_fastest_that_ran(self) -> None:
        """It may differ by size, and a system that failed does not count."""
        scenario = Scenario("node-4", "one node", 1, 4, (MIB,))
        failed = Outcome(
            System("oneccl-tuned", "oneCCL", "oneccl", tuned=True), trouble="it crashed"
        )
        outcomes = [
            Outcome(OURS, {MIB: steady(10.0)}, {MIB: [5.0, 5.0, 5.0]}),
            Outcome(GLOO, {MIB: steady(100.0)}),
            Outcome(MPI, {MIB: steady(30.0)}),
            failed,
        ]
        targets = [
            Target("node-4", (MIB,), BEST_PEER, 1 / 4, "≤ 1/4"),
            Target("node-4", (MIB, 4 * MIB), "gloo", 1 / 6, "≤ 1/6"),
            Target("node-4", (MIB,), BASELINE, 1 / 0.6, "≥ 60 %"),
            Target("node-4", (MIB,), "horovod", 1 / 6, "≤ 1/6"),
            Target("node-2", (MIB,), "gloo", 1 / 6, "≤ 1/6"),
        ]
        found = judge([Result(scenario, None, outcomes)], targets)
        reported = [(each.against, each.reached, each.verdict) for each in found]
        self.assertEqual(
            reported,
            [
                ("Open MPI, tuned", "1/3", Verdict.MISSED),
                ("Gloo, tuned", "1/10", Verdict.MET),
                ("the baseline", "50%", Verdict.MISSED),
                ("Horovod", "–", Verdict.UNKNOWN),
            ],
        )

    def test_a_line_has_the_rate_of_a_plain_stream(self) -> None:
        """In one direction or in both, as the target says; a setting is compared with its
        default."""
        scenario = Scenario("1g-2x1", "two nodes", 2, 1, (MIB,), rate=GBIT)
        least = MIB * 8 / 1000
        outcomes = [
            Outcome(OURS, {MIB: steady(least / 0.9)}),
            Outcome(SHORT, {MIB: steady(least / 0.9 / 1.95)}),
        ]
        targets = [
            Target("1g-2x1", (MIB,), LINE, 1 / 0.97, "≥ 97 %"),
            Target("1g-2x1", (MIB,), LINE_BOTH, 1 / 0.97, "≥ 97 %"),
            Target("1g-2x1", (MIB,), "the same uncompressed", 1 / 1.9, "≥ 1.9×", "gradwire-bf16"),
        ]
        found = judge([Result(scenario, Line(1e9, 0.9e9, 0.1), outcomes)], targets)
        reported = [(each.reached, each.verdict) for each in found]
        self.assertEqual(
            reported, [("90%", Verdict.MISSED), ("100%", Verdict.MET), ("1.95×", Verdict.MET)]
        )

    def test_every_target_has_a_scenario(self) -> None:
        """The scenario has at least one of its sizes, its system, and what it is compared with."""
        planned = {scenario.name: scenario for scenario in for_targets()}
        self.assertLessEqual(set(planned), {scenario.name for scenario in full()})
        for target in TARGETS:
            scenario = planned[target.scenario]
            self.assertTrue(scenario.model or set(target.sizes) & set(scenario.sizes), target)
            self.assertIn(target.system, scenario.systems)
            families = {name.split("-")[0] for name in scenario.systems} - {"gradwire"}
            if target.against == BEST_PEER:
                self.assertTrue(families, target)
            elif target.against.islower() and " " not in target.against:
                self.assertIn(target.against, families)

    def test_the_table_has_a_line_for_each_target(self) -> None:
        """On a busy machine it has a warning."""
        scenario = Scenario("node-4", "one node", 1, 4, (MIB,))
        outcomes = [Outcome(OURS, {MIB: steady(10.0)}), Outcome(MPI, {MIB: steady(10.0)})]
        found = judge([Result(scenario, None, outcomes)])
        watched: dict[str, object] = {
            "steps": 100,
            "bytes": 4,
            "ranks": 2,
            "rows": [row("daemon", 0.006, {"100": 1 << 20, "1000": 1 << 20})],
        }
        text = verdicts.as_markdown(found, watched, QUIET)
        self.assertIn(
            "| one node | 1 MiB |  | Open MPI, tuned | ≤ 1 | 1× | 10 µs : 10 µs | met |", text
        )
        self.assertIn("| ≤ 0.5% | 0.60% |  | **NOT met** |", text)
        self.assertIn("System calls were not counted: no perf", text)
        self.assertNotIn("NOT quiet", text)
        self.assertIn(
            "NOT quiet", verdicts.as_markdown(found, None, QUIET | {"foreign_load_median": 0.5})
        )


class Resources(unittest.TestCase):
    """Targets that are not ratios."""

    def test_the_worst_daemon_decides(self) -> None:
        """Other processes do not count."""
        quiet, growing = {"100": 8 << 20, "1000": 8 << 20}, {"100": 8 << 20, "1000": 10 << 20}
        rows = [
            row("daemon", 0.001, quiet),
            row("daemon", 0.004, growing),
            row("rank 0", 0.9, {"100": 1, "1000": 9}),
        ]
        found = resources.judge({"steps": 1000, "rows": rows})
        self.assertEqual([fact.met for fact in found], [True, True, False])
        self.assertEqual([fact.reached for fact in found], ["0.40%", "10.0 MiB", "+2048 KiB"])

    def test_invalid_output_is_refused(self) -> None:
        """The error contains the output."""
        for rows in (None, 3, [], [{"process": "daemon"}]):
            with self.assertRaisesRegex(Trouble, "invalid output"):
                resources.judge({"rows": rows, "steps": 1})


if __name__ == "__main__":
    unittest.main()
