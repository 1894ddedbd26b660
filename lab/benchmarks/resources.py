"""The resources of a job, by `gradwire bench resources`, with verdicts.

The job has two daemons with a rank each on this machine's loopback addresses, so that bytes also
cross sockets.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from install import Tools
from shell import Process, Trouble, run_job

NAME = "resources"
HOSTS = "127.0.0.1:1,127.0.0.2:1"
SECONDS = 600
# The limits of the targets: processor time as a share of one core, memory without arenas and
# pieces, and growth. Allocators and the system move some pages in any program.
IDLE = 0.005
MEMORY = 64 << 20
FLAT = 1 << 20


@dataclass(frozen=True)
class Fact:
    """A target that is not a ratio."""

    work: str
    target: str
    reached: str
    met: bool


def watch(tools: Tools, folder: Path) -> dict[str, object]:
    """Runs the job; returns its output."""
    answer = folder / "resources.json"
    words = [str(tools.gradwire), "bench", "resources", "--hosts", HOSTS, "--json", str(answer)]
    run_job([Process(words)], SECONDS)
    try:
        found = json.loads(answer.read_text())
        assert isinstance(found, dict)
        return found
    except (OSError, ValueError, AssertionError) as error:
        raise Trouble(f"invalid output of gradwire bench resources ({error!r})") from error


def judge(watched: dict[str, object]) -> list[Fact]:
    """Compares the worst of the daemons with the targets."""
    rows = watched.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise Trouble(f"invalid output of gradwire bench resources: {str(watched)[:200]}")
    try:
        daemons = [row for row in rows if row["process"] == "daemon"]
        idle = max(row["idle_share"] for row in daemons)
        memory = max(max(row["private_bytes"].values()) for row in daemons)
        growth = max(row["growth_bytes"] for row in daemons)
        steps = watched["steps"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Trouble(f"invalid output of gradwire bench resources ({error!r})") from error
    mib = 1 << 20
    return [
        Fact("an idle job, of a core per daemon", f"≤ {IDLE:.1%}", f"{idle:.2%}", idle <= IDLE),
        Fact(
            "a daemon's memory, arenas aside",
            f"≤ {MEMORY // mib} MiB",
            f"{memory / mib:.1f} MiB",
            memory <= MEMORY,
        ),
        Fact(f"its growth over {steps} steps", "flat", f"{growth / 1024:+.0f} KiB", growth <= FLAT),
    ]


def as_markdown(watched: dict[str, object]) -> list[str]:
    """Returns the resources of each process. Counts have no target and are only reported."""
    rows = watched["rows"]
    assert isinstance(rows, list)
    lines = [
        f"A step is an allreduce of {watched['bytes']} bytes, {watched['ranks']} ranks on two "
        "nodes of this machine; "
        "all but the first two columns are per step.",
        "",
        "| process | idle, of a core | own memory | processor | waits | preemptions | page faults "
        "| system calls |",
        "| --- | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for row in rows:
        memory = max(row["private_bytes"].values()) / (1 << 20)
        calls = "–" if row["calls"] is None else f"{row['calls']:.1f}"
        cells = [
            f"{row['process']} on {row['host']}",
            f"{row['idle_share']:.2%}",
            f"{memory:.1f} MiB",
        ]
        cells += [f"{row['cpu_us']:.0f} µs", f"{row['waits']:.1f}", f"{row['preemptions']:.2f}"]
        cells += [f"{row['faults']:.2f}", calls]
        lines.append(f"| {' | '.join(cells)} |")
    why = {row["uncounted"] for row in rows if row.get("uncounted")}
    return [*lines, *(f"\nSystem calls were not counted: {reason}" for reason in sorted(why))]
