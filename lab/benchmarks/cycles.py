#!/usr/bin/env python3
"""Measures the processor cycles per byte between nodes, by activity of the lanes.

Two nodes, as network namespaces of this machine, run allreduces back to back. Meanwhile a program
next to each daemon reads its metrics: the processor time of the lanes' threads, the lanes' own
record of their activities (`gradwire_daemon_lane_seconds_total`), and the bytes that are complete.
The processor time is divided in proportion to that record, because the record includes time in
which the other node, on the same cores, delays the lane. Cycles follow from the clock rate that the
system reports. Work of the system for connections on a lane's thread, such as forwarding packets,
counts for the lane's current activity.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from measure import TUNED_CONGESTION_CONTROL
from net import may_make_namespaces, network
from plan import GBIT, MIB, Scenario
from shell import Process, Trouble, end, run_job, say

SECONDS = 300
# The daemon's default, the first of its range: each namespace has its own ports.
METRICS = "http://127.0.0.1:9401/metrics"
PAUSE = 0.1
ACTIVITIES = ("reduce", "send", "receive", "publish")
SIZES = (16 * MIB, 64 * MIB)


@dataclass
class Sample:
    """A daemon's totals up to some moment: bytes that are complete, and seconds."""

    published: float = 0.0
    lanes: dict[str, float] = field(default_factory=dict)
    # Processor seconds of the lanes' threads, and of all threads.
    busy: float = 0.0
    process: float = 0.0


def parse(text: str) -> Sample:
    """Reads the metrics of a daemon."""
    found = Sample()
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("gradwire_daemon_published_bytes_total"):
            found.published = float(value)
        elif name.startswith("process_cpu_seconds_total"):
            found.process = float(value)
        elif name.startswith("gradwire_thread_cpu_seconds_total") and '"gw-lane' in name:
            found.busy += float(value)
        elif name.startswith("gradwire_daemon_lane_seconds_total"):
            matched = re.search(r'activity="(\w+)"', name)
            activity = matched[1] if matched else ""
            found.lanes[activity] = found.lanes.get(activity, 0.0) + float(value)
    return found


def watch() -> None:
    """Prints samples, one per line, until this process is ended."""
    while True:
        try:
            with urllib.request.urlopen(METRICS, timeout=5) as answer:
                print(json.dumps(vars(parse(answer.read().decode()))), flush=True)
        except OSError:
            pass  # not yet there, or no longer
        time.sleep(PAUSE)


def cycles(samples: list[Sample], rate: float) -> dict[str, float]:
    """Returns cycles per byte by activity, from the last sample and one after a tenth of its bytes,
    because the first calls are slower. `rate` is in cycles per second."""
    last = samples[-1]
    first = next(sample for sample in samples if sample.published >= last.published / 10)
    count = last.published - first.published
    if count <= 0:
        raise Trouble("the job was too short for two samples of its metrics: use --iterations")
    noted = {
        activity: last.lanes.get(activity, 0.0) - first.lanes.get(activity, 0.0)
        for activity in ACTIVITIES
    }
    share = (last.busy - first.busy) / (sum(noted.values()) or 1.0)
    per_byte = {activity: time * share * rate / count for activity, time in noted.items()}
    return per_byte | {"all of the daemon": (last.process - first.process) * rate / count}


def clock_rate() -> float:
    """Returns the cycles per second of a core, as the system reports it."""
    text = Path("/proc/cpuinfo").read_text()
    matched = re.search(r"^cpu MHz\s*:\s*([\d.]+)", text, re.MULTILINE)
    if matched is None:
        raise Trouble("/proc/cpuinfo does not contain the clock rate of this processor")
    return float(matched[1]) * 1e6


def measure(
    gradwire: Path, ranks: int, gbit: float, size: int, iterations: int
) -> tuple[float, dict[str, float]]:
    """Returns the median time of a call in seconds, and cycles per byte: the mean of both nodes."""
    rate = int(gbit * GBIT) or None
    scenario = Scenario("cycles", "", 2, ranks, (), rate=rate)
    with network(scenario, True) as net, tempfile.TemporaryDirectory() as folder:
        net.congestion_control(TUNED_CONGESTION_CONTROL)
        answer = Path(folder) / "answer.json"
        hosts = ",".join(f"{node.address}:{ranks}" for node in net.nodes)
        words = [str(gradwire), "bench", "allreduce", "-H", hosts, "--json", str(answer)]
        words += ["--set", f"launch.ssh={net.remote_shell}"]
        words += ["--set", f"launch.remote_gradwire={gradwire}"]
        words += ["-b", str(size), "-e", str(size), "-w", "3", "-i", str(iterations)]
        own = [sys.executable, __file__, "--watch"]
        watchers = [
            subprocess.Popen(
                node.inside(own), stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            for node in net.nodes
        ]
        try:
            run_job([Process(net.nodes[0].inside(words))], SECONDS)
        finally:
            end(watchers)
        written = [watcher.communicate()[0].splitlines() for watcher in watchers]
        [row] = json.loads(answer.read_text())["rows"]
    if not all(written):
        raise Trouble("a daemon's metrics could not be read")
    found = [
        cycles([Sample(**json.loads(line)) for line in lines], clock_rate()) for lines in written
    ]
    mean = {name: sum(one[name] for one in found) / len(found) for name in found[0]}
    return row["median_us"] / 1e6, mean


def as_row(name: str, seconds: float, per_byte: dict[str, float]) -> str:
    """Returns a line of the table."""
    cells = [name, f"{seconds * 1e3:.1f} ms", *(f"{value:.2f}" for value in per_byte.values())]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("gradwire", type=Path, nargs="?", help="the program")
    parser.add_argument("--iterations", type=int, default=60, help="[%(default)s]")
    parser.add_argument("--watch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.watch:
        watch()
    if options.gradwire is None or not options.gradwire.is_file():
        parser.error("give the path of the program `gradwire`")
    if options.iterations < 1:
        parser.error(f"--iterations must be at least 1, not {options.iterations}")
    if refusal := may_make_namespaces():
        sys.exit(f"bench: {refusal}")
    print(f"| nodes × ranks | time | {' | '.join(ACTIVITIES)} | all of the daemon |")
    print(f"|---|--:|{'--:|' * len(ACTIVITIES)}--:|")
    try:
        for gbit in (10.0, 0.0):
            for ranks in (1, 2):
                for size in SIZES:
                    line = f"{gbit:g} Gbit/s" if gbit else "unshaped"
                    name = f"2 × {ranks}, {line}, {size // MIB} MiB"
                    say(name)
                    # The same number of bytes for each size.
                    iterations = options.iterations * SIZES[-1] // size
                    found = measure(options.gradwire.resolve(), ranks, gbit, size, iterations)
                    print(as_row(name, *found), flush=True)
    except Trouble as trouble:
        sys.exit(f"bench: {trouble}")


if __name__ == "__main__":
    main()
