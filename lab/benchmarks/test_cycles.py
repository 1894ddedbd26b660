"""Tests of cycles per byte: `python3 -m unittest discover lab/benchmarks`."""

import unittest

from cycles import Sample, as_row, cycles, parse
from shell import Trouble

TEXT = """# HELP gradwire_daemon_published_bytes_total Bytes of these operations.
gradwire_daemon_published_bytes_total{gradwire_job="j",host="a"} 1000
gradwire_daemon_lane_seconds_total{gradwire_job="j",host="a",lane="0",activity="send"} 1.5
gradwire_daemon_lane_seconds_total{gradwire_job="j",host="a",lane="1",activity="send"} 0.5
gradwire_daemon_lane_seconds_total{gradwire_job="j",host="a",lane="1",activity="idle"} 9
gradwire_thread_cpu_seconds_total{gradwire_job="j",host="a",thread="gw-lane-0"} 1
gradwire_thread_cpu_seconds_total{gradwire_job="j",host="a",thread="gw-lane-1"} 1.25
gradwire_thread_cpu_seconds_total{gradwire_job="j",host="a",thread="gw-control"} 7
process_cpu_seconds_total{gradwire_job="j",host="a"} 3
"""


class Cycles(unittest.TestCase):
    """From metrics to a table."""

    def test_lanes_are_added(self) -> None:
        """There is one figure for each activity."""
        self.assertEqual(parse(TEXT), Sample(1000.0, {"send": 2.0, "idle": 9.0}, 2.25, 3.0))

    def test_the_first_calls_do_not_count(self) -> None:
        """The figures are between a sample with a tenth of the bytes and the last one."""
        samples = [
            Sample(0.0, {}, 0.0, 0.0),
            Sample(100.0, {"send": 5.0, "idle": 2.0}, 2.0, 8.0),
            # Half of the recorded time was processor time.
            Sample(1000.0, {"send": 23.0, "reduce": 18.0, "idle": 90.0}, 20.0, 44.0),
        ]
        found = cycles(samples, 10.0)
        self.assertAlmostEqual(found["send"], 0.1)
        self.assertAlmostEqual(found["reduce"], 0.1)
        self.assertAlmostEqual(found["publish"], 0.0)
        self.assertAlmostEqual(found["all of the daemon"], 0.4)
        self.assertEqual(as_row("x", 0.0123, {"send": 0.1}), "| x | 12.3 ms | 0.10 |")

    def test_one_sample_is_not_enough(self) -> None:
        """A job that is too short is an error, not a division by zero."""
        with self.assertRaisesRegex(Trouble, "too short"):
            cycles([Sample(100.0, {}, 1.0, 1.0)], 1.0)
