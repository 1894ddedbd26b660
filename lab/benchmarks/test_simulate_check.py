"""Tests how simulate_check.py evaluates its times."""

import contextlib
import io
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from places import PLACES, Place, hosts_text, is_wanted
from plan import MIB
from shell import Trouble
from simulate_check import (
    AUTO,
    CHUNK,
    JOBS,
    KIB,
    STEP,
    Cell,
    Job,
    Record,
    Work,
    arguments,
    cells,
    grid,
    in_goal,
    missing,
    share_right,
    summary,
    table,
    too_long,
    with_job,
    worst,
)

PLACE = PLACES[0].name


def cell(measured: float, simulated: float, work: str = "1 MiB", spec: str = "ring") -> Cell:
    """Returns a cell of the first place."""
    return Cell(PLACE, work, spec, measured, simulated)


class Errors(unittest.TestCase):
    """The cells that count as right."""

    def test_errors_are_shares_of_measured_times(self) -> None:
        """Checks both signs, and the bound."""
        self.assertAlmostEqual(cell(2.0, 2.3).error, 0.15)
        self.assertAlmostEqual(cell(2.0, 1.0).error, -0.5)
        self.assertTrue(cell(1.0, 1.19).is_right and cell(1.0, 0.81).is_right)
        self.assertFalse(cell(1.0, 1.21).is_right or cell(1.0, 0.79).is_right)

    def test_nine_of_ten_must_be_right(self) -> None:
        """Checks the goal on its border."""
        right, wrong = cell(1.0, 1.1), cell(1.0, 2.0)
        self.assertTrue(in_goal([right] * 9 + [wrong]))
        self.assertFalse(in_goal([right] * 8 + [wrong]))
        self.assertEqual(share_right([right, wrong]), 0.5)

    def test_the_worst_come_first(self) -> None:
        """Checks that too short times count like too long ones."""
        some = [cell(1.0, 1.1), cell(1.0, 0.2), cell(1.0, 1.5)]
        self.assertEqual([one.simulated for one in worst(some)], [0.2, 1.5, 1.1])


class Text(unittest.TestCase):
    """The printed text."""

    def test_the_summary_counts_by_place_and_work(self) -> None:
        """Checks the counts, the median error and the goal."""
        text = summary([cell(1.0, 1.1), cell(1.0, 1.5, spec="direct"), cell(1.0, 1.0, "64 KiB")])
        self.assertIn("| links | 1 MiB | 64 KiB | all |", text)
        self.assertIn(f"| {PLACE} | 1 of 2, +30% | 1 of 1, +0% | 2 of 3, +10% |", text)
        self.assertIn("2 of 3 cells (67%) are within 20%; the goal of 90% is missed.", text)

    def test_all_cells_are_in_the_grid(self) -> None:
        """Checks a row with a missing cell, and that wrong cells are bold."""
        text = grid([cell(0.001, 0.0015), cell(1.5, 1.5, "64 MiB", "direct")])
        self.assertIn(f"## {PLACE}\n\n| algorithm | 1 MiB | 64 MiB |\n|---|--:|--:|", text)
        self.assertIn("| `ring` | 1 ms **+50%** | – |", text)
        self.assertIn("| `direct` | – | 1500 ms +0% |", text)

    def test_a_table_has_both_times(self) -> None:
        """Checks the columns."""
        text = table([cell(2e-3, 3e-3)])
        self.assertIn(f"| {PLACE} | 1 MiB | `ring` | 2 ms | 3 ms | +50% |", text)


class Records(unittest.TestCase):
    """The record kept between runs."""

    def test_a_record_survives_writing_and_reading(self) -> None:
        """Checks that runs of one cell are combined by their median."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "times.json"
            self.assertEqual(Record.read(path), Record())
            record = Record({PLACE: "[network]\n"})
            for seconds in (1.0, 9.0, 2.0):
                record.add(PLACE, "1 MiB", "ring", seconds)
            record.write(path)
            self.assertEqual(Record.read(path), record)
            simulated = {PLACE: {("1 MiB", "ring"): 2.2, ("1 MiB", "direct"): 5.0}}
            self.assertEqual(cells(Record.read(path), simulated), [cell(2.0, 2.2)])

    def test_another_file_is_refused(self) -> None:
        """Checks that the error names the file."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "times.json"
            for text in ("[]", "{", '{"clusters": {}, "measured": [{"x": 1}]}'):
                path.write_text(text)
                with self.assertRaisesRegex(Trouble, r"times\.json was not written by"):
                    Record.read(path)

    def test_only_missing_cells_are_measured(self) -> None:
        """Checks that the coordinator's choice is measured only for the model."""
        record = Record()
        jobs = (Job((Work(KIB), Work(MIB)), 1, 1), Job((STEP,), 1, 1))
        everything = missing(record, PLACE, jobs, ["ring", AUTO])
        self.assertEqual(
            [(job.works[0].name, name) for job, name in everything],
            [("1 KiB", "ring"), ("resnet50", "ring"), ("resnet50", AUTO)],
        )
        record.add(PLACE, "1 KiB", "ring", 1.0)
        self.assertEqual(missing(record, PLACE, jobs, ["ring", AUTO]), everything)
        record.add(PLACE, "1 MiB", "ring", 1.0)
        self.assertEqual(missing(record, PLACE, jobs, ["ring", AUTO]), everything[1:])

    def test_long_calls_are_left_out(self) -> None:
        """Checks that the longest call of a job decides, and that unknown ones are not left out."""
        job = Job((Work(KIB), Work(MIB)), 1, 1)
        expected = {("1 KiB", "ring"): 1.0, ("1 MiB", "ring"): 7.0}
        self.assertTrue(too_long(job, "ring", expected, 5.0))
        self.assertFalse(too_long(job, "ring", expected, 8.0))
        self.assertFalse(too_long(job, "direct", expected, 5.0))


class Works(unittest.TestCase):
    """The works that are measured and simulated."""

    def test_names_differ(self) -> None:
        """Checks that cells can't be confused."""
        names = [work.name for job in JOBS for work in job.works]
        self.assertEqual(len(set(names)), len(names))
        self.assertIn("16 × 64 KiB", names)

    def test_a_piece_stays_one(self) -> None:
        """Checks the settings of single pieces, and of many."""
        works = (Work(MIB), JOBS[2].works[0])
        one, many = (" ".join(Job((work,), 1, 2).words("ring")) for work in works)
        self.assertIn("allreduce -b 1048576 -e 1048576 -f 2 -w 1 -i 2 -c 1000000", one)
        self.assertIn("negotiation.piece_bytes=67108864 --set data.lanes=1", one)
        self.assertIn("-b 1048576 -e 1048576", many)
        self.assertIn("negotiation.piece_bytes=65536 --set data.lanes=2", many)
        self.assertIn("data.chunk_bytes=65536", many)
        self.assertEqual(Job((STEP,), 1, 2).words(AUTO)[:3], ["model", "--shapes", "resnet50"])

    def test_the_simulator_gets_the_settings(self) -> None:
        """Checks that only the job's chunk is replaced."""
        cluster = "[network]\nchunk_bytes = 131072\n\n[job]\nlanes = 2\nchunk_bytes = 262144\n"
        self.assertEqual(
            with_job(cluster, Work(64 * KIB, 16)),
            cluster.replace("262144", "65536"),
        )
        self.assertEqual(with_job(cluster, Work(MIB)), cluster.replace("lanes = 2", "lanes = 1"))
        self.assertEqual(Work(4 * MIB, 16).chunk, CHUNK)


class Places(unittest.TestCase):
    """The places of measurements."""

    def test_places_are_selected_by_name(self) -> None:
        """Checks several texts, and none."""
        picked = [place.name for place in PLACES if is_wanted(place.name, "4 nodes, 1; in 2 racks")]
        self.assertEqual(len(picked), 3)
        self.assertTrue(is_wanted(PLACE, ""))

    def test_hosts_are_in_their_racks(self) -> None:
        """Checks the hostfile."""
        nodes = [mock.Mock(address=f"10.0.0.{i}") for i in range(4)]
        text = hosts_text(Place(4, 1, racks=2), nodes)
        racks = [line.split("=")[-1] for line in text.split("\n")[:4]]
        self.assertEqual(racks, ["r0", "r0", "r1", "r1"])

    def test_wrong_arguments_are_refused(self) -> None:
        """Checks that each has one clear error."""
        here = str(Path(__file__))
        for words, said in (
            ([], "required: gradwire"),
            ([here, "--only", "3 nodes"], "no place has a name that contains '3 nodes'"),
            (["/nowhere/gradwire"], "does not exist: build it"),
            ([here, "--dry"], "--dry needs the --json file"),
            ([here, "--minutes", "0"], "must be more than 0"),
            ([here, "--minutes", "x"], "invalid float value: 'x'"),
            ([here, "--slow"], "unrecognized arguments: --slow"),
        ):
            error = io.StringIO()
            with (
                mock.patch.object(sys, "argv", ["simulate_check.py", *words]),
                contextlib.redirect_stderr(error),
                self.assertRaises(SystemExit) as raised,
            ):
                arguments()
            self.assertEqual(raised.exception.code, 2)
            self.assertIn(said, error.getvalue())


if __name__ == "__main__":
    unittest.main()
