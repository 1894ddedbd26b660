"""A traced job, and checks that hold for every trace file."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import Any

from launching import LAUNCHER, LIMIT

HOSTS = "127.0.0.1:2,127.0.0.2:2"
# The loopback interface has no line rate.
RATE = ["--set", "network.rate_mbit=10000"]
RANKS, STEPS = range(4), 1000
FIRST_RANK = 100_000

# A name with all characters that JSON escapes, a tensor of several pieces, and a small one.
NAME = 'say "hello"\\ é'
PROGRAM = """
    import os, time
    from pathlib import Path
    import gradwire as gw, numpy as np
    from gradwire import _world
    gw.init()
    folder = Path(os.environ["TEST_FOLDER"])
    (folder / f"{gw.rank()}.pid").write_text(str(os.getpid()))
    gw.barrier()
    if gw.rank() == 0:
        (folder / "new").write_text(_world.session().coordinator)
        (folder / "new").rename(folder / "coordinator")
    large, small = np.ones(3 << 20, np.float32), np.ones(10)
    end = time.monotonic() + float(os.environ["TEST_SECONDS"])
    step = 0
    while True:
        step += 1
        time.sleep(0.005)
        handle = gw.allreduce_async(large, name="large")
        gw.allreduce(small, name=os.environ["TEST_NAME"])
        gw.synchronize(handle)
        gw.mark_step()
        ends = step == int(os.environ["TEST_STEPS"]) or (folder / "end").exists()
        ends = ends or time.monotonic() > end
        if gw.allreduce(np.array([float(ends)]), name="ends")[0] > 0:
            break
    gw.shutdown()
"""


def prepared(folder: Path, steps: int) -> tuple[Path, dict[str, str]]:
    """The program and its environment."""
    program = folder / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    variables = {"TEST_FOLDER": str(folder), "TEST_SECONDS": str(LIMIT / 2)}
    return program, {**variables, "TEST_NAME": NAME, "TEST_STEPS": str(steps)}


def command(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a gradwire command and returns its result."""
    env = {**os.environ, **variables}
    return subprocess.run(
        [LAUNCHER, *words], capture_output=True, text=True, timeout=LIMIT, check=False, env=env
    )


def read(file: Path) -> list[dict[str, Any]]:
    """The events of a file as viewers read it; the end may be missing."""
    text = file.read_text()
    if not text.endswith("]\n"):
        text = text.rstrip().rstrip(",") + "]"
    events: list[dict[str, Any]] = json.loads(text)
    return events


def check(events: list[dict[str, Any]], nodes: int = 2) -> dict[str, int]:
    """Checks the properties of every trace. Returns the number of slices of each kind."""
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    open_spans: dict[str, str] = {}
    kinds: dict[str, int] = defaultdict(int)
    for event in events:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int), event
        match event["ph"]:
            case "M":
                assert isinstance(event["args"], dict)
            case "X":
                assert event["dur"] >= 0, event
                tracks[event["pid"], event["tid"]].append((event["ts"], event["dur"]))
                kinds[event["name"].split(" ")[0]] += 1
            case "b":
                open_spans[event["id2"]["local"]] = event["name"]
                kinds[event["name"].split(" ")[0]] += 1
            case "e":
                assert open_spans.pop(event["id2"]["local"]) == event["name"]
            case "s" | "f" | "i":
                assert isinstance(event["ts"], float), event
            case _:
                raise AssertionError(event)
    assert not open_spans
    # Slices of a track are nested or consecutive. Times are rounded to nanoseconds; here they are
    # floating-point microseconds.
    for track, slices in tracks.items():
        ends: list[float] = []
        for begin, took in sorted(slices, key=lambda one: (one[0], -one[1])):
            while ends and ends[-1] <= begin + 0.002:
                ends.pop()
            assert not ends or begin + took <= ends[-1] + 0.002, (track, begin, took, ends)
            ends.append(begin + took)
    arrows(events, nodes)
    return dict(kinds)


def arrows(events: list[dict[str, Any]], nodes: int) -> None:
    """Checks that nothing arrives before it left, within the error of the clocks."""
    clocks = [one["args"] for one in events if one["name"] == "gradwire_clock"]
    assert {one["pid"] for one in events if one["name"] == "gradwire_clock"} <= {1, 2}
    error = 2 * max(one["error_us"] for one in clocks)
    lost = [one["args"] for one in events if one["name"] == "gradwire_end"]
    left = {(one["name"], one["id"]): one["ts"] for one in events if one["ph"] == "s"}
    arrived = [one for one in events if one["ph"] == "f"]
    for arrow in arrived:
        since = left.get((arrow["name"], arrow["id"]))
        assert since is None or arrow["ts"] >= since - error, (arrow, since, clocks, lost)
    together = [one for one in arrived if (one["name"], one["id"]) in left]
    expected = {"submitted", "message"} if nodes > 1 else {"submitted"}
    assert {one["name"] for one in together} == expected
