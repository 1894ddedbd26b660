"""Jobs that stand still as a whole are reported or ended, but not while a rank is paused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import LAUNCHER, LIMIT, running, until

PROGRAM = str(Path(__file__).with_name("standing.py"))
SOON = ("--set", "watchdog.min_ms=1500", "--set", "watchdog.factor=3")
REPORT = "no rank has made a step for"
HOSTS = {"one node": "127.0.0.1:2", "two nodes": "127.0.0.1:1,127.0.0.2:1"}


def job(
    tmp_path: Path, *words: str, hosts: str = "one node", settings: tuple[str, ...] = ()
) -> Any:
    (tmp_path / "run").mkdir(mode=0o700)
    program = [sys.executable, PROGRAM]
    command = [LAUNCHER, "run", "-H", HOSTS[hosts], *SOON, *settings, "--", *program]
    return running([*command, *words], tmp_path / "log", XDG_RUNTIME_DIR=str(tmp_path / "run"))


def asked(tmp_path: Path, *words: str) -> str:
    done = subprocess.run(
        [LAUNCHER, *words],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env={"XDG_RUNTIME_DIR": str(tmp_path / "run"), "PATH": "/usr/bin:/bin"},
        check=False,
    )
    return done.stdout


@pytest.mark.parametrize("hosts", HOSTS)
def test_a_standstill_is_reported_by_all_ranks(hosts: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with job(tmp_path, "stand", hosts=hosts):
        shown = rf"\[0-1\] gradwire: {REPORT} \d+\.\d s; the median of the last steps is 0\.\d+ s"
        until("a report", lambda: re.search(shown, log.read_text()))
        text = until("the stacks", lambda: (t := log.read_text()) and "in stand" in t and t)
        assert re.search(r"ranks 0-1 are in the same place; rank 0 sleeps", text), text
        assert re.search(r"submitted \d+\.\d s ago at .*standing.py:\d+ in step", text), text
        status = json.loads(asked(tmp_path, "status", "--json"))
        assert any(REPORT in event["text"] for event in status["events"]), status["events"]


def test_a_standstill_ends_the_job_if_wanted(tmp_path: Path) -> None:
    settings = ("--set", "watchdog.abort_ms=2000")
    with job(tmp_path, "stand", settings=settings) as process:
        assert process.wait(LIMIT) != 0
    text = (tmp_path / "log").read_text()
    assert REPORT in text and "in stand" in text and "watchdog.abort_ms" in text, text


def test_a_pause_is_not_a_standstill(tmp_path: Path) -> None:
    settings = (
        "--set",
        "watchdog.abort_ms=2000",
        "--set",
        "negotiation.stall_shutdown_ms=2500",
    )
    with job(tmp_path, "pause", "7", settings=settings) as process:
        paused = r"paused: evaluation since \d+\.\d s \(rank 0\)"
        until("the pause", lambda: re.search(paused, asked(tmp_path, "why")))
        assert process.wait(LIMIT) == 0, (tmp_path / "log").read_text()
    text = (tmp_path / "log").read_text()
    assert "goes on" in text and REPORT not in text, text


def test_a_long_first_step_is_not_a_standstill(tmp_path: Path) -> None:
    settings = ("--set", "watchdog.abort_ms=1500")
    with job(tmp_path, "first_step", "5", settings=settings) as process:
        assert process.wait(LIMIT) == 0, (tmp_path / "log").read_text()
    text = (tmp_path / "log").read_text()
    assert "goes on" in text and REPORT not in text, text
