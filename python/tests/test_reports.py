"""What the user of a failed job reads: the first cause, once, on a screen."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from launching import AT_NIGHT, LAUNCHER, LIMIT, Job

# Rank 1 goes first, in some way; the others need it.
PROGRAM = """
    import os, sys, time
    import gradwire as gw, numpy as np
    gw.init()
    gw.barrier()
    if gw.rank() == 1:
        {first}
    {others}
    """
CALL = 'gw.allreduce(np.ones(3), name="needed")'
HANDLED = f"""
    try:
        {CALL}
    except gw.PeerLost:
        sys.exit(7)
    """
WRAPPED = f"""
    try:
        {CALL}
    except gw.PeerLost as error:
        raise RuntimeError("training failed") from error
    """
LEFT = (
    r"gradwire: the job failed: rank 1 on host \S+, tensor 'allreduce.needed': it has left the job"
)
ITS_END = r"gradwire: rank 1 on host \S+ \(pid \d+\) ended with exit code 1"
FIRST = {
    "returns": ("sys.exit()", LEFT),
    "leaves": ("gw.shutdown(); sys.exit()", LEFT),
    "leaves and fails": ("gw.shutdown(); time.sleep(0.3); raise ValueError('a hole')", ITS_END),
    "fails": ("raise ValueError('a hole')", ITS_END),
    "fails in many lines": ("raise ValueError('a hole\\n  x  y\\n  1  2')", ITS_END),
}


HOSTS = {"one": "127.0.0.1:3", "two": "127.0.0.1:1,127.0.0.2:2"}
OTHERS = {"fail": CALL, "exit": HANDLED, "wrap": WRAPPED}
# By day, one way of the others for each way of the first, on one or two nodes in turn.
CASES = [
    (how, other, nodes)
    for at, how in enumerate(FIRST)
    for turn, other in enumerate(OTHERS)
    for place, nodes in enumerate(HOSTS)
    if AT_NIGHT or ((at + turn) % 3 == 0 and (at + place) % 2 == 0)
]


@pytest.mark.parametrize(("how", "others", "nodes"), CASES)
def test_the_rank_that_went_first_is_named(job: Job, how: str, others: str, nodes: str) -> None:
    first, headline = FIRST[how]
    done = job(PROGRAM.format(first=first, others=OTHERS[others]), hosts=HOSTS[nodes])
    lines = done.stdout.splitlines()
    reports = [at for at, line in enumerate(lines) if line.startswith("gradwire: ")]
    assert reports and re.match(headline, lines[reports[0]]), done.stdout
    # The traceback of the first cause comes before, and again in the report.
    if "fail" in how:
        hole = [at for at, line in enumerate(lines) if "ValueError: a hole" in line]
        own = [at for at in hole if lines[at].startswith("[1] ")]
        assert own and own[0] < reports[0] < hole[-1], done.stdout


def test_equal_errors_are_shown_once(job: Job) -> None:
    program = PROGRAM.format(first="raise ValueError('a hole')", others=CALL)
    done = job(program, hosts="127.0.0.1:5,127.0.0.2:3")
    told = [line for line in done.stdout.splitlines() if "PeerLost: rank 1" in line]
    assert [line.split(" ")[0] for line in told] == ["[0,2-7]"], done.stdout
    assert done.stdout.count("Traceback") == 3, done.stdout


def test_errors_with_a_prefix_are_shown_once(job: Job) -> None:
    pytest.importorskip("torch")
    done = job(
        """
        import torch, torch.distributed as dist
        import gradwire.torch
        dist.init_process_group("gradwire")
        dist.all_reduce(torch.ones(3 + dist.get_rank() % 2))
        """,
        ranks=4,
    )
    assert done.returncode == 1
    assert re.findall(r"^\[(.*?)\] Traceback", done.stdout, re.MULTILINE) == ["0-3"], done.stdout


def test_files_have_the_errors_of_all(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    text = PROGRAM.format(first="raise ValueError('a hole')", others=CALL)
    program.write_text(textwrap.dedent(text))
    words = [LAUNCHER, "run", "-np", "3", "--output-dir", str(tmp_path / "out"), "--"]
    done = subprocess.run(
        [*words, sys.executable, str(program)], capture_output=True, text=True, timeout=LIMIT
    )
    assert "[0,2] gradwire.PeerLost" in done.stderr and "\x1e" not in done.stderr, done.stderr
    for rank in (0, 2):
        said = (tmp_path / "out" / f"rank.0{rank}" / "stderr").read_text()
        assert said.startswith("Traceback") and "gradwire.PeerLost: rank 1" in said, said


def test_an_error_written_elsewhere_has_no_mark(job: Job, tmp_path: Path) -> None:
    log = tmp_path / "log"
    done = job(
        f"""
        import os
        import gradwire as gw
        gw.init()
        log = f"{log}.{{gw.rank()}}"
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        raise ValueError("a hole")
        """
    )
    assert done.returncode == 1
    for rank in range(2):
        said = Path(f"{log}.{rank}").read_text()
        assert said.count("ValueError: a hole") == 1 and "\x1e" not in said, said


def test_a_report_fits_on_a_screen(job: Job) -> None:
    text = "'\\n'.join(f'{at}' * 300 for at in range(200))"
    done = job(PROGRAM.format(first=f"raise ValueError({text})", others=CALL), ranks=3)
    lines = done.stdout.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("gradwire: rank 1"))
    rows = sum(max(1, -(-len(line) // 80)) for line in lines[start:])
    assert rows <= 24, "\n".join(lines[start:])
