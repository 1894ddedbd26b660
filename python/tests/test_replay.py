"""``gradwire run --record`` and ``gradwire replay``: one rank alone, with the same results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import launching
import pytest

PROGRAM = str(Path(__file__).with_name("replayed.py"))
Done = subprocess.CompletedProcess[str]


def ran(folder: Path, words: list[str], **variables: str) -> Done:
    """Runs a command; the program writes its results to ``folder``."""
    folder.mkdir(exist_ok=True)
    keep = {name: text for name, text in os.environ.items() if not name.startswith("GRADWIRE_")}
    environment = {**keep, "GWTEST_OUT": str(folder), **variables}
    return subprocess.run(
        [launching.LAUNCHER, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=launching.LIMIT,
        env=environment,
        stdin=subprocess.DEVNULL,
    )


def record(folder: Path, program: list[str], *options: str, **variables: str) -> Done:
    """Records a job of two ranks in ``folder/record``."""
    words = ["run", "-np", "2", "--record", str(folder / "record"), *options, "--"]
    return ran(folder / "recorded", [*words, sys.executable, PROGRAM, *program], **variables)


def replay(folder: Path, rank: int, program: list[str], **variables: str) -> Done:
    """Replays a rank from ``folder/record``."""
    words = ["replay", str(folder / "record"), "--rank", str(rank), "--"]
    return ran(folder / "replayed", [*words, sys.executable, *program], **variables)


def same(folder: Path, rank: int) -> bool:
    """Returns whether a replayed rank has received the same."""
    one, two = (folder / kind / f"rank.{rank}" for kind in ("recorded", "replayed"))
    return one.read_text() == two.read_text()


@pytest.mark.parametrize("program", ["arrays", "optimizer", "groups"])
def test_a_rank_alone_gets_the_same_bits(program: str, tmp_path: Path) -> None:
    if program != "arrays":
        pytest.importorskip("torch")
    done = record(tmp_path, [program])
    assert done.returncode == 0, done.stderr
    for rank in (0, 1, 1) if program == "arrays" else (0, 1):  # as often as one likes
        done = replay(tmp_path, rank, [PROGRAM, program])
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"recorded calls of rank {rank}" in done.stderr and "made all" in done.stderr
        assert same(tmp_path, rank)


def test_a_debugger_runs_the_rank(tmp_path: Path) -> None:
    done = record(tmp_path, ["steps"], "--record-ranks", "1")
    assert done.returncode == 0 and not (tmp_path / "record" / "rank.0").exists(), done.stderr
    lines = Path(PROGRAM).read_text().splitlines()
    stop = next(i for i, line in enumerate(lines, start=1) if 'text = "' in line)
    words = ["-m", "pdb", "-c", f"b {PROGRAM}:{stop}", "-c", "c", "-c", "p rank", "-c", "c"]
    done = replay(tmp_path, 1, [*words, "-c", "q", PROGRAM, "steps"])
    assert f"Breakpoint 1 at {PROGRAM}:{stop}\n1\n" in done.stdout, done.stdout + done.stderr
    assert same(tmp_path, 1) and "made all 11 recorded calls" in done.stderr, done.stderr
    done = replay(tmp_path, 0, [PROGRAM, "steps"])
    assert done.returncode == 2 and "no record of rank 0: it has that of rank 1" in done.stderr


@pytest.mark.parametrize(
    "change, recorded, now",
    [
        (
            "name=4",
            "call 6, allreduce (average) of f64 [4] 'allreduce.step.1'",
            "[4] 'allreduce.another'",
        ),
        ("shape=4", "[4] 'allreduce.step.1'", "[5] 'allreduce.step.1'"),
        ("skip=4", "[4] 'allreduce.step.1'", "[4] 'allreduce.step.2'"),
    ],
)
def test_a_call_that_differs_is_shown(change: str, recorded: str, now: str, tmp_path: Path) -> None:
    assert record(tmp_path, ["steps"]).returncode == 0
    done = replay(tmp_path, 0, [PROGRAM, "steps", change])
    assert done.returncode == 1, done.stderr
    text = done.stderr
    assert "Disagreement" in text and "call 6 differs from the recorded one" in text, text
    assert f"recorded: {recorded}" in text or ("recorded: call 6" in text and recorded in text)
    assert now in text and "replayed.py:" in text and " in steps" in text, text


def test_fewer_and_more_calls_are_counted(tmp_path: Path) -> None:
    assert record(tmp_path, ["steps"]).returncode == 0
    done = replay(tmp_path, 0, [PROGRAM, "steps"], GWTEST_STEPS="7")
    assert done.returncode == 0 and "made only 8 of the 11 recorded calls" in done.stderr
    done = replay(tmp_path, 0, [PROGRAM, "steps"], GWTEST_STEPS="12")
    assert done.returncode == 1 and "left the job after 11 calls" in done.stderr, done.stderr


def test_a_full_record_says_where_it_ends(tmp_path: Path) -> None:
    large = {"GWTEST_ELEMENTS": "40000"}
    done = record(tmp_path, ["steps"], "--record-bytes", "1M", **large)
    assert done.returncode == 0, done.stderr
    told = "has reached its limit of 1048576 bytes after 4 calls"
    assert done.stderr.count(told) == 2, done.stderr
    assert (tmp_path / "record" / "rank.0" / "calls").stat().st_size <= 1 << 20
    done = replay(tmp_path, 0, [PROGRAM, "steps"], **large)
    assert done.returncode == 1, done.stderr
    assert "the record ends after 4 calls: it had reached its limit" in done.stderr


def test_the_failure_of_a_job_is_replayed(tmp_path: Path) -> None:
    done = record(tmp_path, ["steps", "die=5"])
    assert done.returncode != 0
    done = replay(tmp_path, 1, [PROGRAM, "steps"])
    assert done.returncode == 1 and "PeerLost: rank 0" in done.stderr, done.stderr
    assert "SIGKILL" in done.stderr
    # The killed rank has a record up to that moment.
    done = replay(tmp_path, 0, [PROGRAM, "steps"])
    assert done.returncode == 1 and "the process was killed, or the file is" in done.stderr
    # The last calls may not be in the file yet.
    assert re.search(r"after [1-7] complete calls", done.stderr), done.stderr


def test_a_changed_record_is_refused(tmp_path: Path) -> None:
    assert record(tmp_path, ["steps"]).returncode == 0
    path = tmp_path / "record" / "rank.0" / "calls"
    good = path.read_bytes()
    ends = {
        len(good) - 200: "the file is cut off",
        30: "has no beginning: the rank ended before it had joined",
        0: "has no beginning",
        7: "is not a record",
    }
    for length, expected in ends.items():
        path.write_bytes(good[:length])
        done = replay(tmp_path, 0, [PROGRAM, "steps"])
        assert done.returncode != 0 and expected in done.stderr, (length, done.stderr)
    for at, expected in {len(good) - 300: "is damaged at byte", 8: "another release"}.items():
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x55]) + good[at + 1 :])
        done = replay(tmp_path, 0, [PROGRAM, "steps"])
        assert done.returncode != 0 and expected in done.stderr, (at, done.stderr)
    path.write_bytes(good)
    path.parent.rename(path.parent.with_name("rank.1_"))
    (tmp_path / "record" / "rank.1").rename(tmp_path / "record" / "rank.0")
    done = replay(tmp_path, 0, [PROGRAM, "steps"])
    assert done.returncode == 2 and "it is the record of rank 1 of 2" in done.stderr


def test_a_wrong_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "record").mkdir()
    (tmp_path / "record" / "mine").write_text("")
    cases = [
        ([], "exists and is not an empty folder"),
        (["--record-ranks", "9"], "no rank 9, only 0 to 1"),
        (["--record-ranks", "a"], "expected ranks such as 3,5-7"),
        (["--min-np", "1"], "an elastic job can't be recorded"),
    ]
    for options, expected in cases:
        done = record(tmp_path, ["steps"], *options)
        assert done.returncode == 2 and expected in done.stderr, done.stderr
    done = replay(tmp_path, 0, [PROGRAM, "steps"])
    assert done.returncode == 2 and "no record of rank 0" in done.stderr, done.stderr
