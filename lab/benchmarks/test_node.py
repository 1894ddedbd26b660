"""Tests of what `bench_node` runs and prints."""

import unittest

from node import Cell, fitting, rank_counts, table

MIB = 1 << 20


class Node(unittest.TestCase):
    """The plan and the table."""

    def test_ranks_double_up_to_the_cores(self) -> None:
        """There are always two."""
        self.assertEqual([rank_counts(cores) for cores in (1, 2, 3)], [[2]] * 3)
        self.assertEqual(rank_counts(16), [2, 4, 8, 16])
        self.assertEqual(rank_counts(24), [2, 4, 8, 16])

    def test_arrays_fit_the_memory(self) -> None:
        """The largest sizes are left out on a small machine."""
        self.assertEqual(fitting([4, 64 * MIB, 256 * MIB], 16, 8192 * MIB), [4, 64 * MIB])

    def test_the_fastest_system_is_bold(self) -> None:
        """The plain program is not one of them, and a failed job has no times."""
        cells = [
            Cell("cpu", 2, "gradwire", {4: 20.0, MIB: 300.0}),
            Cell("cpu", 2, "gloo", {4: 30.0, MIB: 200.0}),
            Cell("cpu", 2, "plain", {MIB: 100.0}),
            Cell("cpu", 4, "gloo", {}, "it hung"),
            Cell("cuda", 2, "gloo", {4: 1.0}),
        ]
        self.assertEqual(
            table(cells, "cpu"),
            [
                "| ranks | bytes | Gradwire | Gloo | plain program |",
                "| --: | --: | --: | --: | --: |",
                "| 2 | 4 B | **20 µs** | 30 µs | – |",
                "| 2 | 1 MiB | 300 µs | **200 µs** | 100 µs |",
            ],
        )


if __name__ == "__main__":
    unittest.main()
