"""Tests what overhead.py makes of its runs."""

import unittest

from overhead import NEW, OLD, WATCHED, Rows, Use, as_markdown, judge

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
        """Checks that a machine that gets slower for both changes nothing."""
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

    def test_the_coordinator_has_a_goal_of_its_own(self) -> None:
        """Checks that only its processor time is told."""
        rows = Rows()
        rows.add("coordinator, 256 nodes", OLD, Use(10, 100))
        rows.add("coordinator, 256 nodes", NEW, Use(10, 101.5))
        text = as_markdown(rows, "v0", QUIET)
        row = "| coordinator, 256 nodes | new | +1.5% ± 0.0% | ≤ +2% | met | +0.0% |  |  |"
        self.assertIn(row, text)

    def test_what_noise_could_be_is_no_verdict(self) -> None:
        """Checks all three verdicts."""
        self.assertEqual(judge(-0.5, 0.0, 0.01), "met")
        self.assertEqual(judge(0.02, 0.02, 0.01), "within noise")
        self.assertEqual(judge(0.02, 0.005, 0.01), "NOT met")


if __name__ == "__main__":
    unittest.main()
