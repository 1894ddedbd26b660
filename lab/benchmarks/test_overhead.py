"""Tests how overhead.py evaluates its runs."""

import json
import tempfile
import unittest
from pathlib import Path

from overhead import (
    DATA,
    NEW,
    OLD,
    TRACED,
    WATCHED,
    Rows,
    Use,
    as_markdown,
    before,
    judge,
    resources_as_markdown,
)
from shell import Trouble

QUIET = {
    "foreign_load_median": 0.0,
    "foreign_load_max": 0.0,
    "stolen": 0.0,
    "probe_ms": 5.0,
    "probe_spread": 0.1,
}


class Overhead(unittest.TestCase):
    """Ratios of rounds, and verdicts."""

    def test_rounds_are_compared_in_pairs(self) -> None:
        """Checks that a machine that slows both down changes nothing."""
        rows = Rows()
        for factor in (1.0, 3.0, 2.0):
            rows.add("4 B", OLD, Use(10 * factor, 100 * factor, 4.0, 1.0))
            rows.add("4 B", NEW, Use(11 * factor, 103 * factor, 4.5, 1.0))
            rows.add("4 B", WATCHED, Use(10 * factor, 101 * factor, 4.0, 3.0))
        self.assertEqual(rows.ratios("4 B", NEW, lambda use: use.cpu_us), [1.03] * 3)
        text = as_markdown(rows, "v0", QUIET)
        self.assertIn(
            "| 4 B | new | +3.0% ± 0.0% | ≤ +1% | NOT met | +10.0% | +0.50 | +0.00 |", text
        )
        self.assertIn(
            "| 4 B | watched | +1.0% ± 0.0% | ≤ +2% | met | +0.0% | +0.00 | +2.00 |", text
        )

    def test_the_coordinator_has_its_own_goal(self) -> None:
        """Checks that only its processor time is reported."""
        rows = Rows()
        rows.add("coordinator, 256 nodes", OLD, Use(10, 100))
        rows.add("coordinator, 256 nodes", NEW, Use(10, 101.5))
        text = as_markdown(rows, "v0", QUIET)
        row = "| coordinator, 256 nodes | new | +1.5% ± 0.0% | ≤ +2% | met | +0.0% |  |  |"
        self.assertIn(row, text)

    def test_a_trace_of_small_tensors_has_no_goal(self) -> None:
        """Checks that others have one."""
        rows = Rows()
        for load in ("4 B", "1 MiB"):
            rows.add(load, OLD, Use(10, 100))
            rows.add(load, TRACED, Use(10, 104))
        text = as_markdown(rows, "v0", QUIET)
        self.assertIn("| 4 B | traced | +4.0% ± 0.0% | – | – | +0.0% |", text)
        self.assertIn("| 1 MiB | traced | +4.0% ± 0.0% | ≤ +5% | met | +0.0% |", text)

    def test_rounds_are_added_to_earlier_ones(self) -> None:
        """Checks that they are read as written, and refused for another base."""
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder) / DATA
            self.assertEqual(before(data, "v0"), (Rows(), {}))
            use = Use(1.0, 2.0, 3.0, 4.0)
            runs = [{"work": "4 B", "variant": OLD, "runs": [vars(use)]}]
            data.write_text(json.dumps({"base": "v0", "rows": runs, "resources": {}}))
            rows, _ = before(data, "v0")
            self.assertEqual(rows.uses, {("4 B", OLD): [use]})
            with self.assertRaisesRegex(Trouble, "is about v0, not v1"):
                before(data, "v1")

    def test_resources_of_both_releases_are_reported(self) -> None:
        """Checks a row of each."""
        row = {"process": "daemon", "host": "a", "idle_share": 0.001, "private_bytes": {"end": 0}}
        row |= {"cpu_us": 80.0, "waits": 1.0, "faults": 0.0, "calls": None}
        text = resources_as_markdown({OLD: [row], NEW: [row | {"calls": 7.0}]})
        expected = "| daemon on a | new | 0.10% | 0.0 MiB | 80 µs | 1.00 | 0.00 | 7.0 |"
        self.assertIn(expected, text)

    def test_differences_within_noise_have_no_verdict(self) -> None:
        """Checks all three verdicts."""
        self.assertEqual(judge(-0.5, 0.0, 0.01), "met")
        self.assertEqual(judge(0.02, 0.02, 0.01), "within noise")
        self.assertEqual(judge(0.02, 0.005, 0.01), "NOT met")


if __name__ == "__main__":
    unittest.main()
