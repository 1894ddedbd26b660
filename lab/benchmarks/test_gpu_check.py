"""Tests of `gpu_check.py` without a wheel and without PyTorch.

python/tests/test_gpu_check.py runs it.
"""

import os
import subprocess
import tempfile
import unittest
from pathlib import Path

import gpu_check
from gpu_check import HERE, INSTALL_SECONDS, PARTS, Here, Outcome, Part, attempt, report, reported
from shell import Process, run_job

SCRIPT = HERE.parents[1] / "scripts" / "gpu_check.sh"
# The time that a job takes to end after its limit.
ENDING_SECONDS = 7


class Refusals(unittest.TestCase):
    """Missing requirements are reported in one line."""

    def setUp(self) -> None:
        """Makes a folder with a file that could be a wheel."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.wheel = self.folder / "gradwire.whl"
        self.wheel.touch()

    def refusal(self, *words: str | Path, torch: str = "", **variables: str) -> str:
        """Runs the script with this text as PyTorch; returns its one line."""
        (self.folder / "torch.py").write_text(torch)
        done = subprocess.run(
            [SCRIPT, *words, "--out", self.folder / "out"],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": str(self.folder), **variables},
        )
        self.assertEqual((done.returncode, done.stdout), (1, ""), done.stderr)
        lines = done.stderr.splitlines()
        self.assertEqual(len(lines), 1, done.stderr)
        return lines[0]

    def test_a_missing_wheel(self) -> None:
        """The message says how to build one."""
        said = self.refusal(self.folder / "none.whl")
        self.assertRegex(said, "^gpu_check: wheel .*none.whl not found: build one with `make")

    def test_an_old_torch(self) -> None:
        """Versions are compared as numbers."""
        for version in ("2.2.0", "2.10.1+cu128", "1.13.1"):
            said = self.refusal(self.wheel, torch=f"__version__ = {version!r}\n{CUDA}")
            self.assertEqual(
                said, f"gpu_check: PyTorch {version} is too old: 2.11 or newer is needed"
            )

    def test_no_torch(self) -> None:
        """The message names the Python."""
        said = self.refusal(self.wheel, torch="raise ImportError('no module')")
        self.assertRegex(said, "^gpu_check: .*can't import torch.*PYTHON=")

    def test_no_gpu(self) -> None:
        """The message says how to rehearse."""
        said = self.refusal(self.wheel, torch="__version__ = '2.11.0'\n" + CUDA)
        self.assertRegex(said, "finds no GPU.*built without CUDA.*--device cpu")

    def test_no_python(self) -> None:
        """The message says how to select another one."""
        said = self.refusal(self.wheel, PYTHON="/none/python3")
        self.assertRegex(said, "/none/python3 not found; select another one with PYTHON=")

    def test_a_file_that_is_not_a_wheel(self) -> None:
        """The message of pip is shown."""
        (self.folder / "torch.py").write_text("__version__ = '2.11.0'\n" + CUDA)
        done = subprocess.run(
            [SCRIPT, self.wheel, "--device", "cpu", "--out", self.folder / "out"],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": str(self.folder)},
        )
        self.assertEqual(done.returncode, 1)
        self.assertIn("gradwire.whl", done.stderr)
        self.assertNotIn("Traceback", done.stderr)


CUDA = """
from types import SimpleNamespace
cuda = SimpleNamespace(is_available=lambda: False)
version = SimpleNamespace(cuda=None)
"""


class Parts(unittest.TestCase):
    """Running parts."""

    here = Here("cuda", Path("/none"), Path("/none"))

    def test_all_parts_take_at_most_8_minutes(self) -> None:
        """Including the installation, and if each part has to be ended."""
        whole = INSTALL_SECONDS + sum(part.limit + ENDING_SECONDS for part in PARTS)
        self.assertLessEqual(whole, 8 * 60)

    def test_a_slow_part_is_ended_with_its_output(self) -> None:
        """The output shows how far it came."""

        def run(here: Here, limit: float, outcome: Outcome) -> None:
            run_job([Process(["sh", "-c", "echo begun; sleep 600"])], limit)

        outcome, output = attempt(Part("slow", 0.5, run), self.here)
        self.assertRegex(str(outcome.failure), "took more than")
        self.assertEqual(output, "begun\n")

    def test_a_failing_part_does_not_stop_the_others(self) -> None:
        """Whatever its output is."""

        def ends(here: Here, limit: float, outcome: Outcome) -> None:
            run_job([Process(["sh", "-c", "echo out; echo err >&2; exit 3"])], limit)

        def nonsense(here: Here, limit: float, outcome: Outcome) -> None:
            gpu_check.allreduce_lines(reported('{"bytes": 4}'))

        outcome, output = attempt(Part("ends", 30, ends), self.here)
        self.assertRegex(str(outcome.failure), "(?s)ended with 3:.*err")
        self.assertEqual(output, "out\nerr\n")
        outcome, _ = attempt(Part("nonsense", 30, nonsense), self.here)
        self.assertRegex(str(outcome.failure), "invalid output: KeyError")

    def test_the_report_has_results_and_failures(self) -> None:
        """A table for successful parts, and the reason of failures."""
        times = {"copies": [2.0], "copies-both": [1.0], "gloo": [8.0], "backend": [4.0]}
        lines = gpu_check.allreduce_lines(
            [{"bytes": 4096, "times_us": {**times, "allreduce_": [3.0]}}]
        )
        self.assertEqual(lines[-1], "| 4 KiB | 2 µs | 1 µs | 8 µs | 4 µs | 3 µs | 0.50 | 2.00 |")
        text = report(
            {"device": "cuda", "machine": {}},
            [Outcome("first", lines=lines), Outcome("second", failure="no luck", seconds=2)],
        )
        self.assertIn("| second | **failed** | 2 |", text)
        self.assertIn("```\nno luck\n```", text)
        self.assertIn(lines[-1], text)


if __name__ == "__main__":
    unittest.main()
