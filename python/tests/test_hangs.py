"""`gradwire why` and reports of long waits: they name the missing rank, its state and its place."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import LAUNCHER, LIMIT, running, until

TENSOR = "allreduce.step.2"
PROGRAM = str(Path(__file__).parent / "hanging.py")
HOSTS = {"one node": "127.0.0.1:3", "two nodes": "127.0.0.1:1,127.0.0.2:2"}

# How the last rank hangs, what the report says about it, and the function in its stack.
WAYS = {
    "loop": (r"is running, \d+ % of a core", "loop"),
    "sleep": (r"sleeps: it waits for a timer|sleeps", "sleep"),
    "hold_gil": (r"sleeps: it waits for a timer|sleeps", "hold_gil"),
    "lock": (r"sleeps: it waits for a lock or another thread|sleeps", "lock"),
    "pipe": (r"sleeps: it waits for data from a pipe|sleeps", "pipe"),
}

# A rank that is stopped is not lost.
PATIENT = ("--set", "heartbeat.timeout_ms=60000", "--set", "job.timeout_ms=90000")

Why = Callable[..., str]


@pytest.fixture
def why(tmp_path: Path) -> Iterator[Why]:
    """Runs `gradwire why` for the only job in a folder of its own."""
    (tmp_path / "run").mkdir(mode=0o700)

    def run(*words: str) -> str:
        done = subprocess.run(
            [LAUNCHER, "why", *words],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path / "run")},
            check=False,
        )
        return done.stdout

    yield run


def job(tmp_path: Path, way: str, hosts: str, *settings: str) -> Any:
    words = [
        LAUNCHER,
        "run",
        "-np",
        "3",
        "-H",
        hosts,
        *settings,
        "--",
        sys.executable,
        PROGRAM,
        way,
    ]
    return running(words, tmp_path / "log", XDG_RUNTIME_DIR=str(tmp_path / "run"))


def explained(why: Why, is_there: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The explanation, once ranks 0 and 1 wait for the tensor and rank 2 is where it hangs."""

    def see() -> dict[str, Any] | None:
        text = why("--json")
        seen: dict[str, Any] = json.loads(text) if text else {"waits": []}
        waits = [wait for wait in seen["waits"] if wait["tensor"] == TENSOR]
        is_complete = waits and waits[0]["waiting_ranks"] == [0, 1] and len(seen["ranks"]) == 3
        return seen if is_complete and is_there(seen["ranks"][2]) else None

    seen: dict[str, Any] = until("both ranks wait", see)
    return seen


def is_in(function: str) -> Callable[[dict[str, Any]], bool]:
    """Whether the main thread of a rank is in a function of the program."""
    place = re.compile(rf"hanging.py:\d+ in {function}$")

    def look(rank: dict[str, Any]) -> bool:
        frames = rank["threads"][0]["frames"] if rank["answered"] else []
        return any(place.search(frame) for frame in frames)

    return look


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("hosts", HOSTS)
def test_the_report_names_rank_and_place(way: str, hosts: str, tmp_path: Path, why: Why) -> None:
    state, function = WAYS[way]
    settings = ("--set", "negotiation.stall_warning_ms=1000")
    with job(tmp_path, way, HOSTS[hosts], *settings):
        seen = explained(why, is_in(function))
        (wait,) = (wait for wait in seen["waits"] if wait["tensor"] == TENSOR)
        assert wait["missing_ranks"] == [2], wait
        rank = seen["ranks"][2]
        assert rank["answered"] and rank["rank"] == 2, rank
        last = rank["last_operations"][0]
        assert (last["tensor"], last["outcome"]) == ("allreduce.step.1", "done"), rank
        assert re.search(r"hanging.py:\d+ in reduce$", last["called_at"]), rank
        main = rank["threads"][0]
        assert main["name"] == "main thread", rank
        assert re.search(rf"hanging.py:\d+ in {function}$", main["frames"][0]), main
        # The same as text: the log of the coordinator, and the output of a rank that waits.
        text = until("a longer wait", lambda: (t := why()) and "has waited" in t and t)
        line = r"ranks 0-1 have submitted it at .*hanging.py:\d+ in reduce\n"
        for part in (state, line, rf"in {function}\n", "2 ranks in .*hanging.py"):
            assert re.search(part, text), text

        def reported() -> bool:
            log = (tmp_path / "log").read_text()
            line = r"tensor 'allreduce.step.2' has waited \d\.\d s for rank 2 on host 127"
            by_coordinator = re.search(rf"daemon 127.0.0.1\].*{line}", log)
            by_ranks = re.search(rf"\[0-1\] gradwire: {line}", log)
            others = re.search(r"\[2\] gradwire: ", log)
            assert not others, log
            return bool(by_coordinator and by_ranks and f"in {function}" in log)

        until("a report", reported)


def test_a_stopped_rank_is_seen_from_outside(tmp_path: Path, why: Why) -> None:
    with job(tmp_path, "stop", HOSTS["two nodes"], *PATIENT):
        # A rank that stops between its answer and the look at its state shows both, once.
        seen = explained(why, lambda rank: rank["state"] == "stopped" and not rank["answered"])
        rank = seen["ranks"][2]
        assert "is stopped, by a signal or a debugger" in why()
        os.kill(rank["pid"], 9)


@pytest.mark.parametrize("hosts", HOSTS)
def test_different_names_are_recognised(hosts: str, tmp_path: Path, why: Why) -> None:
    settings = ("--set", "negotiation.deadlock=warn")
    with job(tmp_path, "other_name", HOSTS[hosts], *settings):
        explained(why, is_in("other_name"))
        text = until("a wait", lambda: (t := why()) and "wait for each other" in t and t)
        assert "ranks 0-1 for 'allreduce.step.2', rank 2 for 'allreduce.other'" in text or (
            "rank 2 for 'allreduce.other', ranks 0-1 for 'allreduce.step.2'" in text
        ), text
        assert "ranks 0-1 are at 'allreduce.step.2'; rank 2 at 'allreduce.other'" in text, text


@pytest.mark.parametrize("way", ["other_name", "other_shape"])
def test_tables_show_the_lines_of_programs(way: str, tmp_path: Path) -> None:
    with job(tmp_path, way, HOSTS["two nodes"]) as process:
        assert process.wait(LIMIT) != 0
    log = (tmp_path / "log").read_text()
    if way == "other_name":
        for name in ("step.2", "other"):
            row = rf"allreduce 'allreduce.{name}' at .*hanging.py:\d+ in reduce"
            assert re.search(row, log), log
    else:
        for row in (r"0-1 .*\[4\] .* in reduce", r"2 .*\[5\] .* in other_shape"):
            assert re.search(rf"{row}\n", log), log
        assert "called at" in log, log


CALLS = Path(__file__).with_name("calling.py")


@pytest.mark.parametrize(
    "way", re.findall(r"def ((?:plain|in_|of_)\w*)\(", CALLS.read_text(encoding="utf-8"))
)
def test_the_line_of_a_call_is_known(way: str, tmp_path: Path, why: Why) -> None:
    words = [LAUNCHER, "run", "-np", "2", "--", sys.executable, str(CALLS), way]
    lines = CALLS.read_text(encoding="utf-8").split("\n")
    function = "plain" if way == "in_a_thread" else way
    begin = lines.index(f"def {function}() -> None:")
    line = next(at for at in range(begin, len(lines)) if lines[at].endswith("# here")) + 1

    wanted = re.compile(rf"calling.py:{line} in {function}$")

    def is_called_there() -> bool:
        text = why("--json")
        ranks = json.loads(text)["ranks"] if text else []
        last = ranks[0]["last_operations"] if ranks else []
        return any(wanted.search(operation["called_at"] or "") for operation in last)

    with running(words, tmp_path / "log", XDG_RUNTIME_DIR=str(tmp_path / "run")):
        until(f"an operation at {wanted.pattern}", is_called_there)


def test_only_the_secret_opens_the_stacks(tmp_path: Path, why: Why) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)

    def asked(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        # Without the run file of the job.
        variables = {**os.environ, "XDG_RUNTIME_DIR": str(elsewhere), **variables}
        words = (LAUNCHER, *words)
        return subprocess.run(
            words, capture_output=True, text=True, timeout=LIMIT, env=variables, check=False
        )

    with job(tmp_path, "sleep", HOSTS["one node"]):
        seen = explained(why, is_in("sleep"))
        here = asked("status", "--json", XDG_RUNTIME_DIR=str(tmp_path / "run"))
        address = json.loads(here.stdout)["page"]
        refused = asked("why", address, GRADWIRE_SECRET="0" * 64)
        assert refused.returncode == 1 and not refused.stdout, refused
        assert "does not know the job's secret\nhint: GRADWIRE_SECRET must be" in refused.stderr
        # A process of the job on this host has it.
        answer = json.loads(asked("why", address, "--json").stdout)
        assert answer["job"] == seen["job"] and len(answer["ranks"]) == 3, answer
        assert asked("status", address, GRADWIRE_SECRET="0" * 64).returncode == 0


@pytest.mark.parametrize("hosts", HOSTS)
def test_other_process_sets_have_own_waits(hosts: str, tmp_path: Path, why: Why) -> None:
    with job(tmp_path, "other_set", HOSTS[hosts]):
        seen = explained(why, is_in("other_set"))
        waits = {wait["tensor"]: wait for wait in seen["waits"]}
        alone = waits["allreduce.alone"]
        assert (alone["waiting_ranks"], alone["missing_ranks"]) == ([2], [0]), seen
        assert alone["process_set"] != 0, seen


def test_all_stacks_are_shown_if_asked(tmp_path: Path, why: Why) -> None:
    with job(tmp_path, "sleep", HOSTS["one node"]):
        explained(why, is_in("sleep"))
        text = why("--stacks")
        assert len(re.findall("main thread:", text)) == 3, text
        assert re.search(r"rank 0 on host 127.0.0.1 \(pid \d+\) ", text), text


def test_the_programs_logging_shows_reports(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import logging, time, numpy as np, gradwire as gw\n"
        "logging.basicConfig(format='LOG %(levelname)s %(message)s')\n"
        "gw.init()\n"
        "time.sleep(3 * gw.rank())\n"
        "gw.allreduce(np.ones(1), name='x')\n"
    )
    words = [LAUNCHER, "run", "-np", "2", "--set", "negotiation.stall_warning_ms=500"]
    done = subprocess.run(
        [*words, "--", sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "[0] LOG WARNING tensor 'allreduce.x' has waited " in said, said
    assert "gradwire: tensor" not in said, "once"
