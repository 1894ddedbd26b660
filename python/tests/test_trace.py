"""Traces of real jobs of two nodes with two ranks each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import LAUNCHER, LIMIT, running, until
from tracing import (
    FIRST_RANK,
    HOSTS,
    NAME,
    RANKS,
    RATE,
    STEPS,
    check,
    command,
    prepared,
    read,
)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A job that runs until the test ends; yields its launcher and the coordinator's address."""
    program, variables = prepared(tmp_path, 1 << 30)
    words = [LAUNCHER, "run", "-H", HOSTS, *RATE, "--", sys.executable, str(program)]
    with running(words, tmp_path / "job.log", **variables) as launcher:

        def address() -> str | None:
            assert launcher.poll() is None, (tmp_path / "job.log").read_text()
            file = tmp_path / "coordinator"
            return file.read_text() if file.exists() else None

        yield launcher, until("the job runs", address)
        (tmp_path / "end").touch()
        launcher.wait(60)


def test_a_whole_job(tmp_path: Path) -> None:
    program, variables = prepared(tmp_path, 30)
    file = tmp_path / "job.json"
    words = ["run", "-H", HOSTS, *RATE, "--timeline-filename", str(file), "--"]
    done = command(*words, sys.executable, str(program), **variables)
    assert done.returncode == 0, done.stderr
    assert f"{file}: " in done.stderr and "events of 2 hosts" in done.stderr, done.stderr
    text = file.read_text()
    events = json.loads(text)
    kinds = check(events)
    of_ranks = ["submit", "wait", "compute", "step"]
    of_nodes = ["gather", "negotiate", "queue", "send", "receive", "reduce", "publish"]
    for kind in of_ranks + of_nodes:
        assert kinds.get(kind, 0) >= 20, (kind, kinds)
    named = [one for one in events if one["name"] == f"submit allreduce.{NAME}"]
    assert {one["args"]["rank"] for one in named} == set(RANKS)
    steps = [one for one in events if one["ph"] == "X" and one["tid"] == STEPS]
    assert {one["pid"] - FIRST_RANK for one in steps} == set(RANKS)
    assert max(int(one["name"].split(" ")[1]) for one in steps) == 30
    end = events[-1]
    assert end["name"] == "gradwire_end" and end["args"]["lost_batches"] == 0, end
    # Every rank submitted each tensor in every step; events before the reader are missing.
    ranks = defaultdict(int)
    for one in events:
        if one["name"] == "submit allreduce.large":
            ranks[one["args"]["rank"]] += 1
    assert end["args"]["lost_events"] or min(ranks.values()) >= 25, (ranks, end)


def test_some_steps(tmp_path: Path, job: tuple[subprocess.Popen[bytes], str]) -> None:
    _, coordinator = job
    file = tmp_path / "steps.json"

    def step() -> int:
        status = json.loads(command("status", coordinator, "--json").stdout)
        reports = [node["report"] for node in status["nodes"] if node.get("report")]
        return max((rank["steps"] for report in reports for rank in report["ranks"]), default=0)

    first = until("a step is over", step) + 40
    steps = f"{first}..{first + 4}"
    done = command("trace", coordinator, "--steps", steps, "-o", str(file))
    assert done.returncode == 0, done.stderr
    events = read(file)
    check(events)
    numbers: dict[int, set[int]] = defaultdict(set)
    for one in events:
        if one["ph"] == "X" and one["tid"] == STEPS:
            numbers[one["pid"] - FIRST_RANK].add(int(one["name"].split(" ")[1]))
    assert set(numbers) == set(RANKS)
    for rank, seen in numbers.items():
        assert seen >= set(range(first, first + 5)), (rank, seen)
        assert max(seen) <= first + 6, (rank, seen)
    past = command("trace", coordinator, "--steps", "1..2", "-o", str(file))
    assert past.returncode == 1 and "step" in past.stderr, past.stderr


def test_invalid_arguments(tmp_path: Path, job: tuple[subprocess.Popen[bytes], str]) -> None:
    _, coordinator = job
    file = str(tmp_path / "t.json")
    for words, said in (
        (["--steps", "5..3"], "5..3"),
        (["--steps", "x"], "x"),
        (["--seconds", "0"], "more than 0"),
        (["--seconds", "nan"], "more than 0"),
        (["--seconds", "-1"], "more than 0"),
        (["--seconds", "1", "--steps", "1..2"], "cannot be used with"),
        (["--max-mib", "0"], "0"),
    ):
        done = command("trace", coordinator, "-o", file, *words)
        assert done.returncode == 2 and said in done.stderr, (words, done.stderr)
        assert "panicked" not in done.stderr
    nowhere = str(tmp_path / "no" / "t.json")
    for done in (
        command("trace", coordinator, "-o", nowhere),
        command("run", "-H", HOSTS, "--trace", nowhere, "--", "true"),
    ):
        assert done.returncode == 1 and nowhere in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) <= 2, done.stderr
    done = command("trace", "127.0.0.1:1", "-o", file, "--seconds", "1")
    assert done.returncode == 1 and "127.0.0.1:1" in done.stderr, done.stderr


@pytest.mark.parametrize("victim", ["reader", "rank"])
def test_a_killed_process_leaves_a_file(
    victim: str, tmp_path: Path, job: tuple[subprocess.Popen[bytes], str]
) -> None:
    launcher, coordinator = job
    file = tmp_path / "t.json"
    with running([LAUNCHER, "trace", coordinator, "-o", str(file)], tmp_path / "log") as reader:
        until("the trace grows", lambda: file.exists() and file.stat().st_size > 100_000)
        if victim == "reader":
            reader.send_signal(signal.SIGKILL)
        else:
            os.kill(int((tmp_path / "3.pid").read_text()), signal.SIGKILL)
            until("the job has ended", lambda: launcher.poll() is not None)
        reader.wait(60)
    check(read(file))


def test_tracing_stops_with_its_reader(
    tmp_path: Path, job: tuple[subprocess.Popen[bytes], str]
) -> None:
    _, coordinator = job
    for turn in range(2):
        file = tmp_path / f"{turn}.json"
        done = command("trace", coordinator, "--seconds", "2", "-o", str(file))
        assert done.returncode == 0, done.stderr
        kinds = check(json.loads(file.read_text()))
        assert kinds["submit"] and kinds["send"], kinds
        # No earlier events are left for the next reader.
        time.sleep(3)
        times = [one["ts"] for one in json.loads(file.read_text()) if one["ph"] == "X"]
        assert max(times) - min(times) < 4e6


TIMELINE = """
    import os, signal, time
    from pathlib import Path
    import gradwire as gw, numpy as np
    from gradwire import InvalidRequest
    try:
        gw.start_timeline("early.json")
        raise SystemExit("it started before init()")
    except gw.NotInitialized:
        pass
    gw.init()
    folder = Path(os.environ["TEST_FOLDER"])
    ones = np.ones(1000, np.float32)

    def steps(count, name):
        for _ in range(count):
            gw.allreduce(ones, name=name)
            gw.mark_step()

    steps(5, "before")
    gw.barrier()
    gw.start_timeline(folder / "first.json", mark_cycles=True)
    gw.barrier()
    steps(20, "within")
    # Forked children, like DataLoader workers, inherit all pipes.
    forked = os.fork()
    if forked == 0:
        time.sleep(1000)
    gw.barrier()
    gw.stop_timeline()
    os.kill(forked, signal.SIGKILL)
    os.waitpid(forked, 0)
    gw.barrier()
    steps(5, "after")
    # Again, to the same file and to an unwritable one.
    gw.stop_timeline()
    gw.start_timeline(str(folder / "second.json"))
    if gw.rank() == 0:
        try:
            gw.start_timeline(folder / "third.json")
            raise SystemExit("it started twice")
        except InvalidRequest as error:
            assert "second.json is still being written" in str(error), error
        gw.stop_timeline()
        try:
            gw.start_timeline(folder / "no" / "such.json")
            raise SystemExit("it started without a folder")
        except InvalidRequest as error:
            assert "no/such.json" in str(error), error
        gw.start_timeline(str(folder / "second.json"))
    gw.barrier()
    steps(10, "second")
    gw.shutdown()  # stops it
"""


def names(events: list[dict[str, Any]]) -> set[str]:
    """The tensors submitted to an allreduce."""
    prefix = "submit allreduce."
    return {one["name"].removeprefix(prefix) for one in events if one["name"].startswith(prefix)}


@pytest.mark.parametrize("launcher", ["gradwire", "torchrun"])
def test_a_program_starts_and_stops_a_timeline(launcher: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(TIMELINE))
    variables = {"TEST_FOLDER": str(tmp_path)}
    if launcher == "gradwire":
        done = command("run", "-H", HOSTS, "--", sys.executable, str(program), **variables)
    else:
        pytest.importorskip("torch")
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        words += ["--master-port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
        done = subprocess.run(
            [*words, str(program)],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
            env={**os.environ, **variables},
        )
    assert done.returncode == 0, done.stdout + done.stderr
    first = json.loads((tmp_path / "first.json").read_text())
    assert "within" in names(first) and not {"before", "after"} & names(first), names(first)
    check(first, nodes=2 if launcher == "gradwire" else 1)
    assert names(json.loads((tmp_path / "second.json").read_text())) == {"second"}


@pytest.mark.parametrize("file", ["job.json", "DYNAMIC", "no/such.json"])
def test_horovods_variable(file: str, tmp_path: Path) -> None:
    program, variables = prepared(tmp_path, 20)
    variables["HOROVOD_TIMELINE"] = file if file == "DYNAMIC" else str(tmp_path / file)
    words = ["run", "-H", HOSTS, *RATE, "--", sys.executable, str(program)]
    done = command(*words, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "HOROVOD_TIMELINE" not in done.stderr, done.stderr
    warned = [one for one in (done.stdout + done.stderr).splitlines() if "RuntimeWarning" in one]
    match file:
        case "job.json":
            assert not warned, warned
            events = json.loads((tmp_path / file).read_text())
            check(events)
            assert names(events) >= {NAME, "large"}
        case "DYNAMIC":
            assert not warned and not list(tmp_path.glob("*.json")), warned
        case _:
            assert len(warned) == 1 and file in warned[0], done.stdout + done.stderr
