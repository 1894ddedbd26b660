"""Tests what choice.py makes of its times."""

import unittest

from choice import AUTO, Cell, as_markdown, errors, mean_regret


def cell(auto: list[float], ring: list[float], direct: list[float]) -> Cell:
    """Returns a cell with the times of two algorithms."""
    return Cell("2 nodes", "alltoall", 1 << 20, {"ring": ring, "direct": direct, AUTO: auto})


class Choice(unittest.TestCase):
    """The regret of choices."""

    def test_the_regret_is_against_the_fastest(self) -> None:
        """Checks that single slow rounds do not count."""
        own = cell([3.0, 3.0, 90.0], [2.0, 50.0, 2.0], [4.0, 4.0, 4.0])
        self.assertEqual((own.best, own.regret), ("ring", 0.5))

    def test_there_is_no_negative_regret(self) -> None:
        """Checks that noise in favour of the choice does not hide a bad one."""
        lucky = cell([1.0], [2.0], [4.0])
        self.assertEqual(lucky.regret, 0.0)
        self.assertEqual(mean_regret([lucky, cell([3.0], [2.0], [4.0])]), 0.25)

    def test_all_cells_are_in_the_table(self) -> None:
        """Checks the columns."""
        text = as_markdown([cell([0.003], [0.002], [0.004])])
        self.assertIn("| 2 nodes | alltoall | 1 MiB | 3 ms | `ring` | 2 ms | 50% |", text)
        self.assertIn("- alltoall: mean regret 50.0%, worst 50%", text)

    def test_the_error_is_a_share_of_the_time(self) -> None:
        """Checks that only what was predicted counts."""
        own = cell([3.0], [2.0, 2.0, 9.0], [4.0])
        own.predicted = {"ring": [1.0, 1.5, 1.5], "direct": [5.0]}
        self.assertEqual(errors([own]), [0.25, 0.25])
        self.assertIn("predictions: median error 25%", as_markdown([own]))


if __name__ == "__main__":
    unittest.main()
