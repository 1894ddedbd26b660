"""The line of progress of `gradwire run`, in tmux and on a pipe."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

from launching import LAUNCHER, LIMIT, until
from test_top import Terminal, terminal

__all__ = ["terminal"]

# Rank 1 is slow. Rank 0 writes lines, and parts of lines.
PROGRAM = f"""
    import sys, time
    from pathlib import Path
    import gradwire as gw, numpy as np
    gw.init()
    end = time.monotonic() + {LIMIT}
    step = 0
    while True:
        time.sleep(0.05 if gw.rank() == 1 else 0)
        gw.allreduce(np.ones(1000, np.float32), name="gradient")
        gw.mark_step()
        step += 1
        if gw.rank() == 0 and step % 10 == 0:
            sys.stdout.write(f"half a line {{step}}")
            sys.stdout.flush()
            time.sleep(0.3)
            print(" and its end", flush=True)
            print(f"an error {{step}}", file=sys.stderr, flush=True)
        ends = Path(sys.argv[1]).exists() or time.monotonic() > end
        if gw.allreduce(np.array([float(ends)]), name="ends")[0] > 0:
            break
    gw.shutdown()
"""

PROGRESS = re.compile(
    r"gradwire: step \d+  \d+ ms/step  exchange \d+ %  slowest: rank 1, waited for \d+ %"
)
OUTPUT = re.compile(r"\[0\] half a line \d+( and its end)?|\[0\] an error \d+")


def words(folder: Path) -> list[str]:
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM))
    program = [sys.executable, str(folder / "program.py"), str(folder / "end")]
    return [LAUNCHER, "run", "-np", "2", "--", *program]


def test_one_line_is_rewritten_below_the_output(terminal: Terminal, tmp_path: Path) -> None:
    command = " ".join(words(tmp_path))
    terminal.tmux("send-keys", f"{command}; echo ended $?", "Enter")
    seen = set()

    def has_moved_on() -> bool:
        lines = [line.rstrip() for line in terminal.text().splitlines() if line.strip()]
        lines = [line for line in lines if command[:20] not in line and str(tmp_path) not in line]
        for line in lines[:-1]:
            assert OUTPUT.fullmatch(line), lines
        seen.update(line for line in lines[-1:] if PROGRESS.fullmatch(line))
        return len(seen) >= 3 and len(lines) > 8

    until("the line has been rewritten", has_moved_on)
    (tmp_path / "end").touch()
    terminal.shows("ended 0")
    assert "gradwire: step" not in terminal.text(), terminal.text()


def test_a_pipe_gets_no_line(tmp_path: Path) -> None:
    job = subprocess.Popen(words(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert job.stdout is not None
    lines = [job.stdout.readline().decode() for _ in range(6)]
    (tmp_path / "end").touch()
    lines += job.communicate(timeout=LIMIT)[0].decode().splitlines(keepends=True)
    assert job.returncode == 0, lines
    assert all(OUTPUT.fullmatch(line.rstrip("\n")) for line in lines), lines
