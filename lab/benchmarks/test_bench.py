"""Tests of the pure parts: `python3 -m unittest discover lab/benchmarks`."""

import json
import subprocess
import sys
import unittest
from math import prod

from figures import Verdict, figure, ratio, time_text, verdict
from measure import Outcome, Result, Row, _read
from net import _round_trip, may_make_namespaces, network
from plan import (
    GBIT,
    MIB,
    WARMUP,
    Run,
    Scenario,
    bus_bytes,
    full,
    line_bits,
    quick,
    runs,
    size_text,
)
from report import as_json, as_markdown
from shapes import PARAMETERS, TENSORS, for_gradwire, for_peers, resnet50
from shell import Process, Trouble, call, run_job
from systems import OPEN_MPI, System

GRADWIRE = System("gradwire", "Gradwire", "gradwire", tuned=True)
GLOO = System("gloo", "Gloo", "gloo", tuned=False)


class Figures(unittest.TestCase):
    """Verdicts from rounds."""

    def test_a_range_is_wider_than_the_rounds(self) -> None:
        """Three rounds don't show the extremes."""
        found = figure([100.0, 120.0, 110.0])
        self.assertEqual((found.median, found.low, found.high), (110.0, 90.0, 130.0))

    def test_a_missing_or_zero_time_is_refused(self) -> None:
        """Otherwise the median of nothing would look like a result."""
        for rounds in ([], [0.0, 1.0, 2.0], [-1.0]):
            with self.assertRaises(ValueError):
                figure(rounds)

    def test_only_differences_beyond_noise_are_wins(self) -> None:
        """Ranges that touch give no verdict."""
        ours = figure([100.0, 101.0, 102.0])
        self.assertIs(verdict(ours, figure([110.0, 111.0, 112.0])), Verdict.FASTER)
        self.assertIs(verdict(figure([110.0, 111.0, 112.0]), ours), Verdict.SLOWER)
        # The medians are 12 % apart here, but so are the rounds of each system.
        self.assertIs(verdict(ours, figure([104.0, 113.0, 125.0])), Verdict.NOISE)
        self.assertAlmostEqual(ratio(ours, figure([202.0, 202.0, 202.0])), 2.0)

    def test_two_rounds_are_not_enough(self) -> None:
        """There is no verdict, whatever the figures are."""
        self.assertIs(verdict(figure([1.0, 1.0]), figure([9.0, 9.0, 9.0])), Verdict.NOISE)

    def test_times_have_three_digits(self) -> None:
        """Independent of the unit."""
        found = [time_text(us) for us in (4.256, 999.4, 1000.0, 38_123.0, 999_400.0, 1_234_000.0)]
        self.assertEqual(found, ["4.26 µs", "999 µs", "1 ms", "38.1 ms", "999 ms", "1.23 s"])


class Lines(unittest.TestCase):
    """The simulated links."""

    def test_a_line_has_its_delay_and_passes_bytes(self) -> None:
        """Packets go through the relay in bundles and without checksums."""
        refusal = may_make_namespaces()
        if refusal:
            self.skipTest(refusal)
        scenario = next(scenario for scenario in full() if scenario.name == "10g-1ms-2x1")
        here = "import socket; s = socket.create_server(('10.201.0.1', 29400)); "
        here += "print('ready', flush=True); c = s.accept()[0]; n = 0"
        here += "\nwhile d := c.recv(1 << 20): n += len(d)\nprint(n)"
        there = "import socket; s = socket.create_connection(('10.201.0.1', 29400)); "
        there += "s.sendall(bytes(50_000_000))"
        with network(scenario, namespaces=True) as net:
            words = net.nodes[0].inside([sys.executable, "-c", here])
            with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
                assert server.stdout is not None
                server.stdout.readline()
                call(net.nodes[1].inside([sys.executable, "-c", there]))
                self.assertEqual(server.stdout.readline(), "50000000\n")
            self.assertGreaterEqual(_round_trip(*net.nodes), 2.0)


class Reports(unittest.TestCase):
    """The tables of the report."""

    def head(self, foreign: float) -> dict[str, object]:
        """Returns the head of a run with this foreign load."""
        noise = {
            "foreign_load_median": foreign,
            "foreign_load_max": foreign,
            "stolen": 0.0,
            "probe_ms": 5.0,
            "probe_spread": 0.1,
        }
        return {
            "machine": {},
            "versions": {},
            "missing": {"oneccl": "no luck"},
            "noise": noise,
            "rounds": 3,
        }

    def result(self) -> Result:
        """Gradwire is twice as fast as Gloo, without noise; Open MPI fails."""
        scenario = Scenario("s", "one node", 1, 2, (MIB,))
        ours = Outcome(
            GRADWIRE, {MIB: [100.0, 100.0, 101.0]}, {MIB: [50.0]}, {MIB: GRADWIRE.setups[0]}
        )
        theirs = Outcome(GLOO, {MIB: [200.0, 200.0, 202.0]}, {}, {MIB: GLOO.setups[0]})
        failed = Outcome(
            System("openmpi", "Open MPI", "openmpi", tuned=False), trouble="it crashed"
        )
        return Result(scenario, None, [ours, theirs, failed])

    def test_a_quiet_machine_has_a_verdict(self) -> None:
        """The report has the baseline, and what failed or is missing."""
        text = as_markdown(self.head(0.0), [self.result()])
        for reported in (
            "was quiet",
            "**2.00×** faster",
            "50% of the baseline",
            "Open MPI failed: it crashed",
            "no luck",
        ):
            self.assertIn(reported, text)

    def test_a_busy_machine_has_no_verdict(self) -> None:
        """Other programs may slow one system down more than another."""
        text = as_markdown(self.head(0.5), [self.result()])
        self.assertIn("NOT quiet", text)
        self.assertIn("| 2.00× |", text)
        self.assertNotIn("faster", text.replace("How many times as fast Gradwire is", ""))

    def test_an_unsteady_baseline_is_not_used(self) -> None:
        """A share of it would be noise."""
        steady = Outcome(GRADWIRE, {MIB: [100.0] * 3}, {MIB: [50.0, 55.0, 60.0]})
        wavering = Outcome(GRADWIRE, {MIB: [100.0] * 3}, {MIB: [3.0, 11.0, 22.0]})
        self.assertEqual((steady.baseline_share(MIB), wavering.baseline_share(MIB)), (0.55, None))

    def test_untuned_peers_are_listed(self) -> None:
        """A peer that was not tuned must not look like one at its best."""
        outcome = Outcome(
            System("openmpi-tuned", "Open MPI, tuned", "openmpi", True, OPEN_MPI), {MIB: [1.0] * 3}
        )
        scenario = Scenario("s", "one node", 1, 2, (MIB,))
        text = as_markdown(self.head(0.0), [Result(scenario, None, [outcome])])
        self.assertIn("Open MPI, tuned: only 'its own choice'", text)

    def test_json_has_every_round(self) -> None:
        """So that readers can judge for themselves."""
        scenario = json.loads(json.dumps(as_json(self.head(0.0), [self.result()])))["scenarios"][0]
        (row,) = scenario["systems"][0]["rows"]
        self.assertEqual((row["rounds_us"], row["baseline_share"]), ([100.0, 100.0, 101.0], 0.5))


class Plans(unittest.TestCase):
    """The plans of measurements."""

    def test_names_are_unique(self) -> None:
        """They are keys in the results."""
        for planned in (quick(), full()):
            names = [scenario.name for scenario in planned]
            self.assertEqual(len(names), len(set(names)))

    def test_every_size_has_enough_iterations(self) -> None:
        """Also the largest size on the slowest line."""
        for scenario in full():
            for run in runs(scenario, 1.0, thrift=10):
                self.assertGreaterEqual(run.iterations, 3, (scenario.name, run))
                self.assertGreaterEqual(run.warmup, WARMUP)

    def test_bandwidth_counts_the_necessary_bytes(self) -> None:
        """2(N-1)/N of the size, for ranks on the bus and for nodes on the line."""
        scenario = Scenario("s", "s", 2, 2, (MIB,), rate=GBIT)
        self.assertEqual(bus_bytes(scenario, MIB), 1.5 * MIB)
        self.assertEqual(line_bits(scenario, MIB), 8 * MIB)

    def test_a_plan_has_the_form_of_the_programs(self) -> None:
        """The form is `BYTES:WARMUP:ITERATIONS[:barrier]`."""
        self.assertEqual(
            (str(Run(4, 2, 9, False)), str(Run(MIB, 1, 3, True))), ("4:2:9", "1048576:1:3:barrier")
        )
        self.assertEqual(
            [size_text(s) for s in (4, 65536, MIB, 256 * MIB)],
            ["4 B", "64 KiB", "1 MiB", "256 MiB"],
        )


class Shapes(unittest.TestCase):
    """The gradients of the model."""

    def test_resnet50_has_its_published_size(self) -> None:
        """161 tensors with 25,557,032 parameters, last layer first for the peers."""
        shapes = resnet50()
        self.assertEqual(
            (len(shapes), sum(prod(dims) for _, dims in shapes)), (TENSORS, PARAMETERS)
        )
        peers = for_peers(shapes).splitlines()
        self.assertEqual((peers[0], peers[-1], len(peers)), ("1000", str(64 * 3 * 49), TENSORS))
        self.assertEqual(for_gradwire(shapes).splitlines()[0], "conv1.weight 64 3 7 7")
        self.assertEqual(len({name for name, _ in shapes}), TENSORS)


class Answers(unittest.TestCase):
    """The output of systems."""

    def test_both_kinds_are_read(self) -> None:
        """A document of Gradwire, and lines of the peers."""
        ours = '{"rows": [{"bytes": 4, "times_us": [3, 1, 2], "baseline_us": 1.5}]}'
        self.assertEqual(_read(ours, GRADWIRE), {4: Row(2, 1.5)})
        theirs = 'a greeting\n{"bytes": 4, "times_us": [1, 2]}\n'
        theirs += '[0]<stdout>:{"bytes": 8, "times_us": [5]}\n'
        self.assertEqual(_read(theirs, GLOO), {4: Row(1.5), 8: Row(5)})

    def test_invalid_output_is_refused(self) -> None:
        """The error contains the output."""
        for text in (
            "",
            "{",
            '{"rows": 3}',
            '{"rows": [{"bytes": 4}]}',
            '{"rows": [{"bytes": 4, "times_us": []}]}',
        ):
            with self.assertRaisesRegex(Trouble, "invalid output"):
                _read(text, GRADWIRE)


class Jobs(unittest.TestCase):
    """Processes side by side."""

    def test_the_output_of_the_first_is_returned(self) -> None:
        """The output of the others is dropped."""
        found = run_job([Process(["echo", "a"]), Process(["echo", "b"])], 30)
        self.assertEqual(found, "a\n")

    def test_a_failing_process_ends_all_others(self) -> None:
        """The error has its last lines, and does not wait for the others (WAIT)."""
        failing = Process(["sh", "-c", "echo no luck >&2; exit 3"])
        with self.assertRaisesRegex(Trouble, "(?s)ended with 3:.*no luck"):
            run_job([Process(["sleep", "600"]), failing], 60)

    def test_a_job_that_hangs_is_ended(self) -> None:
        """When its time is up (WAIT)."""
        with self.assertRaisesRegex(Trouble, "took more than"):
            run_job([Process(["sleep", "600"])], 0.1)


if __name__ == "__main__":
    unittest.main()
