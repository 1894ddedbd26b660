"""Tests how choice.py evaluates its times."""

import json
import tempfile
import unittest
from pathlib import Path
from typing import Any

from cells import AUTO, LEARNED, Cell, Learning, as_markdown, mean, summary
from choice import Part, Record, learning
from shell import Trouble


def cell(auto: list[float], ring: list[float], direct: list[float]) -> Cell:
    """Returns a cell with the times of two algorithms."""
    times = {"ring": ring, "direct": direct, AUTO: auto}
    return Cell("2 nodes", "alltoall", 1 << 20, times)


class Regret(unittest.TestCase):
    """The regret of choices."""

    def test_the_regret_is_against_the_fastest(self) -> None:
        """Checks that single slow rounds do not count."""
        own = cell([3.0, 3.0, 90.0], [2.0, 50.0, 2.0], [4.0, 4.0, 4.0])
        self.assertEqual((own.best, own.regret()), ("ring", 0.5))
        self.assertIsNone(own.regret(LEARNED))

    def test_the_regret_is_never_negative(self) -> None:
        """Checks that noise in favour of the choice does not hide another bad one."""
        lucky = cell([1.0], [2.0], [4.0])
        self.assertEqual(lucky.regret(), 0.0)
        cells = [lucky, cell([3.0], [2.0], [4.0])]
        self.assertEqual(mean(one.regret() for one in cells), 0.25)
        self.assertIsNone(mean([None]))

    def test_noise_is_separate_from_the_choices_cost(self) -> None:
        """Checks that the chosen algorithm counts with its time by name."""
        own = cell([5.0], [2.0], [4.0])
        own.times[LEARNED] = [2.2]
        own.chosen = {AUTO: ["direct"], LEARNED: ["ring"]}
        self.assertEqual((own.regret(AUTO), own.cost_of_choice(AUTO)), (1.5, 1.0))
        self.assertEqual(own.cost_of_choice(LEARNED), 0.0)
        self.assertEqual([round(share, 3) for share in own.noise()], [0.25, 0.1])
        # If choices differ by round there is no noise figure; the cost is a mean.
        own.chosen = {AUTO: ["direct", "ring"], LEARNED: ["chain"]}
        self.assertEqual((own.noise(), own.cost_of_choice(AUTO)), ([], 0.5))
        self.assertIsNone(own.cost_of_choice(LEARNED))

    def test_the_floor_is_for_equal_messages(self) -> None:
        """Checks that only equal predictions count."""
        own = cell([5.0], [2.0], [3.0])
        self.assertIsNone(own.floor())
        own.times["chain"] = [9.0]
        own.predicted = {"ring": [1.0], "direct": [1.0], "chain": [1.1], AUTO: [1.0]}
        self.assertEqual(own.floor(), 0.5)
        own.predicted["direct"] = [1.1]
        self.assertIsNone(own.floor())

    def test_algorithms_near_the_fastest_are_measured(self) -> None:
        """Checks which ones remain after the first run."""
        own = Cell("2 nodes", "alltoall", 4096, looks={"ring": 1.0, "direct": 1.2, "chain": 1.4})
        self.assertEqual(own.contenders(1.3), {"ring", "direct"})


class Errors(unittest.TestCase):
    """The errors of predictions."""

    def test_the_error_is_a_share_of_the_time(self) -> None:
        """Checks that only algorithms with predictions and measurements count."""
        own = cell([3.0], [2.0, 2.0, 9.0], [4.0])
        own.predicted = {"ring": [1.0, 1.5, 1.5], "direct": [5.0], AUTO: [9.0], "chain": [1.0]}
        own.operations = {"ring": [1.2, 1.2, 1.0]}
        own.expected = {"ring": 1.5}
        self.assertEqual(own.errors("calls"), [0.25, 0.25])
        self.assertEqual(own.errors("operations"), [0.25, 0.25], "one by its call")
        self.assertEqual(own.errors(LEARNED), [0.25])


class Learned(unittest.TestCase):
    """The evaluation of what jobs have learned."""

    def test_the_cost_of_tries_is_their_extra_time(self) -> None:
        """Checks shares of operations and of time."""

        def candidate(name: str, expected: float, tried: int) -> dict[str, Any]:
            return {"algorithm": name, "expected_seconds": expected, "tried": tried}

        choice = {
            "algorithm": "ring",
            "version": 2,
            "operations": 1000,
            "expected_seconds": 1e-3,
            "candidates": [
                candidate("direct", 3e-3, 10),
                candidate("ring", 1e-3, 10),
                candidate("linear", 0.9e-3, 0),
            ],
        }
        found = learning(choice)
        self.assertEqual((found.operations, found.tried), (1000, 20))
        self.assertAlmostEqual(found.cost, 0.02)
        self.assertEqual((found.spec, found.version), ("ring", 2))
        self.assertEqual(learning({**choice, "operations": 0}).cost, 0.0)


class Tables(unittest.TestCase):
    """The printed tables."""

    def test_all_cells_are_in_the_tables(self) -> None:
        """Checks the columns."""
        own = cell([0.003], [0.002], [0.004])
        own.chosen = {AUTO: ["direct"]}
        own.learning = Learning(1000, 20, 0.015, "ring", 2)
        text = as_markdown([own])
        row = "| 2 nodes | alltoall | 1 MiB | `ring` | 2 ms | `direct` | 3 ms | 50% | – | – | – |"
        self.assertIn(row, text)
        self.assertIn("| 2 nodes | alltoall | 50% | 100% | – | – | – | 25% |", text)
        self.assertIn("| 2 nodes | 1 MiB | – | – | – |", text)
        self.assertIn("| 2 nodes | alltoall | 1 MiB | 1000 | 2.0% | 1.5% | 1 | `ring` |", text)
        other = Cell("3 nodes", "alltoall", 4096, {"ring": [1.0], AUTO: [1.0]})
        self.assertEqual(len(summary([own, own, other])), 4)

    def test_a_record_survives_writing_and_reading(self) -> None:
        """Checks that measurements are kept."""
        own = cell([3.0], [2.0], [4.0])
        own.learning = Learning(1, 2, 3.0, "ring", 2)
        unmeasured = Part([Cell("3 nodes", "alltoall", 4096)])
        record = Record({"a": Part([own], 1, {"x.json": "{}"}), "b": unmeasured})
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "record.json")
            self.assertEqual(Record.read(file), Record())
            record.write(file)
            self.assertEqual(Record.read(file), record)
            self.assertEqual(Record.read(file).cells, [own])
            file.write_text(json.dumps([1]))
            with self.assertRaisesRegex(Trouble, "remove it"):
                Record.read(file)
        Record.read(None).write(None)


if __name__ == "__main__":
    unittest.main()
