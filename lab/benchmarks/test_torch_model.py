"""Tests of the pure parts of `torch_model.py`."""

import unittest

from torch_model import Result, Table, against, overlap


def table(**rounds: list[float]) -> Table:
    """Returns a table with the rounds of these ways."""
    made = Table()
    for at in range(len(next(iter(rounds.values())))):
        times = {
            name.replace("_", "-"): [[rows[at], rows[at], rows[at] * 9]]
            for name, rows in rounds.items()
        }
        made.add({"times_us": times, "cpu_us": dict.fromkeys(times, 7000.0)})
    return made


BARE = table(
    compute=[10e3, 12e3, 11e3],
    gloo=[110e3, 112e3, 111e3],
    gloo_copied=[120e3, 121e3, 122e3],
    hook=[30e3, 32e3, 31e3],
)
HIDDEN = table(
    compute=[500e3, 520e3, 510e3],
    gloo=[560e3, 580e3, 570e3],
    gloo_copied=[580e3] * 3,
    hook=[505e3, 526e3, 515e3],
)


class Steps(unittest.TestCase):
    """The cost of an exchange, computed from steps."""

    def test_an_exchange_is_its_rounds_extra_time(self) -> None:
        """The rounds differ by 2 ms, the exchange does not."""
        found = BARE.exchange("hook")
        self.assertEqual((found.median, found.low, found.high, found.rounds), (20e3, 20e3, 20e3, 3))

    def test_the_faster_way_of_a_peer_counts(self) -> None:
        """A user could choose the way without copies."""
        self.assertEqual(BARE.best_peer(), "gloo")
        self.assertIsNone(table(compute=[1.0], hook=[2.0]).best_peer())

    def test_the_overlap_with_a_backward_pass(self) -> None:
        """A quarter of the exchange is not hidden."""
        self.assertAlmostEqual(overlap(HIDDEN, BARE, "hook"), 0.75)
        self.assertLess(overlap(BARE, HIDDEN, "gloo"), 0)

    def test_only_a_quiet_machine_has_verdicts(self) -> None:
        """And only if the ranges don't touch."""
        ours, theirs = BARE.exchange("hook"), BARE.exchange("gloo")
        self.assertEqual(against(ours, theirs, quiet=True), "**0.20** faster")
        self.assertEqual(against(ours, theirs, quiet=False), "0.20")

    def test_an_exchange_without_cost_is_accepted(self) -> None:
        """Noise can make a step with an exchange the shorter one."""
        self.assertEqual(
            table(compute=[9.0, 9.0, 9.0], hook=[8.0, 7.0, 9.0]).exchange("hook").median, 1.0
        )

    def test_the_report_has_a_line_for_each_way(self) -> None:
        """Only the real network has a hidden part."""
        lines = Result("one node", {"none": BARE, "resnet50": HIDDEN}).lines(quiet=True)
        hooks = [line for line in lines if line.startswith("| DDP with `ddp_hook`")]
        self.assertEqual(len(hooks), 2)
        self.assertTrue(hooks[1].endswith("| 75% |"), hooks[1])


if __name__ == "__main__":
    unittest.main()
