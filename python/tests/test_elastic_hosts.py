"""What Horovod promises of elastic jobs: hosts come and go, ranks fail, and there are limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import LAUNCHER, LIMIT

# Three rounds, in each of which the first rank writes a line. `PLAN` has, for some rounds, the
# ranks that fail in them, and how; after the rounds in `WAITS` the ranks wait for other hosts.
PROGRAM = """
import json
import os
import signal
import time

import numpy as np

import gradwire as gw
from gradwire import _world, elastic

gw.init()
first = gw.rank()
fails, how, waits = json.loads(os.environ["PLAN"])


@elastic.run
def train(state):
    while state.round < 3:
        if state.round == 1 and _world.session().epoch == 1 and gw.rank() in fails:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "agent":
                os.kill(os.getppid(), signal.SIGTERM)
                time.sleep(60)
            raise LookupError("this rank fails")
        assert gw.allreduce(np.ones(3), op=gw.Sum, name="sum")[0] == gw.size()
        if gw.rank() == 0:
            line = {"size": gw.size(), "host": os.environ["GRADWIRE_HOST"]}
            line |= {"first": first, "epoch": _world.session().epoch}
            with open(os.environ["LOG"], "a") as log:
                log.write(json.dumps(line) + "\\n")
        state.round += 1
        until = time.monotonic() + 60
        while state.round in waits and _world.session().pending_change() is None:
            assert time.monotonic() < until, "no host has come or gone"
            time.sleep(0.02)
        state.commit()


train(elastic.ObjectState(round=0))
"""

BOTH = "localhost:2,127.0.0.1:2"


def run(
    folder: Path, *options: str, fails: list[int], how: str = "kill", waits: tuple[int, ...] = ()
) -> tuple[int, str, list[Any]]:
    """Runs the job. Returns its exit code, its output, and the lines of its rounds."""
    (folder / "program.py").write_text(PROGRAM)
    log = folder / "log"
    plan = json.dumps([fails, how, waits])
    done = subprocess.run(
        [LAUNCHER, "run", *options, "--", sys.executable, str(folder / "program.py")],
        env={**os.environ, "PLAN": plan, "LOG": str(log)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    lines = log.read_text().splitlines() if log.exists() else []
    return done.returncode, done.stdout, [json.loads(line) for line in lines]


def moving(folder: Path) -> list[str]:
    """Options for a job that moves from one host to another: at first both are there."""
    script = folder / "hosts.sh"
    script.write_text(
        f"""#!/bin/sh
case "$(cat {folder}/log 2>/dev/null | wc -l)" in
0) echo localhost:2 ;;
1) echo localhost:2; echo 127.0.0.1:2 ;;
*) echo 127.0.0.1:2 ;;
esac
"""
    )
    script.chmod(0o755)
    return ["-np", "2", "--min-np", "2", "--max-np", "4", "--host-discovery-script", str(script)]


def test_a_job_moves_to_another_host(tmp_path: Path) -> None:
    code, said, rounds = run(tmp_path, *moving(tmp_path), fails=[], waits=(1, 2))
    assert code == 0, said
    assert [line["size"] for line in rounds] == [2, 4, 2], said
    assert [line["host"] for line in rounds] == ["localhost", "localhost", "127.0.0.1"], said
    # The first newcomer has the state now.
    assert [line["first"] for line in rounds] == [0, 0, 2], said
    assert rounds[2]["epoch"] == 3, said


@pytest.mark.parametrize("limit", [1, 2])
def test_the_limit_of_changes_holds(tmp_path: Path, limit: int) -> None:
    options = [*moving(tmp_path), "--reset-limit", str(limit)]
    code, said, rounds = run(tmp_path, *options, fails=[], waits=(1, 2)[:limit])
    if limit == 2:
        assert code == 0 and len(rounds) == 3, said
    else:
        # No change happens any more, so the job ends where it is.
        assert code == 0 and [line["size"] for line in rounds] == [2, 4, 4], said


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_a_job_goes_on_without_a_rank_that_fails(tmp_path: Path, how: str) -> None:
    options = ["-H", BOTH, "--min-np", "2", "--blacklist-cooldown-range", "600", "600"]
    code, said, rounds = run(tmp_path, *options, fails=[0], how=how)
    assert code == 0, said
    assert [line["size"] for line in rounds] == [4, 3, 3], said
    assert [line["epoch"] for line in rounds] == [1, 2, 2], said
    assert rounds[1]["first"] == 1, said


def test_a_job_goes_on_without_a_host(tmp_path: Path) -> None:
    # A host that shuts down asks its processes to end, and the helper of the launcher first.
    options = ["-H", BOTH, "--min-np", "2", "--blacklist-cooldown-range", "600", "600"]
    code, said, rounds = run(tmp_path, *options, fails=[2], how="agent")
    assert code == 0, said
    assert [line["size"] for line in rounds] == [4, 2, 2], said
    assert [line["host"] for line in rounds] == ["localhost"] * 3, said


def test_a_job_ends_if_all_ranks_fail(tmp_path: Path) -> None:
    options = ["-H", BOTH, "--min-np", "2"]
    code, said, rounds = run(tmp_path, *options, fails=[0, 1, 2, 3], how="raise")
    assert code == 1 and len(rounds) == 1 and "LookupError: this rank fails" in said, said


def test_a_job_ends_if_too_few_ranks_are_left(tmp_path: Path) -> None:
    options = ["-H", BOTH, "--min-np", "4", "--elastic-timeout", "1"]
    options += ["--blacklist-cooldown-range", "600", "600"]
    code, said, rounds = run(tmp_path, *options, fails=[0])
    assert code == 137 and len(rounds) == 1, said
    assert "the job needs 4 ranks (--min-np) and has 3" in said, said
