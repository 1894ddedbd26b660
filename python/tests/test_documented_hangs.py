"""What docs/hangs.md shows is what the commands print.

Numbers differ from run to run, and a line of the page may end with an ellipsis. To change the page,
take the lines that a failed test prints.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from launching import LAUNCHER, LIMIT, running, until

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "hangs.md"
HOSTS = {"a": "127.0.0.1", "b": "127.0.0.2"}


def shown(command: str) -> list[str]:
    """The lines of the page after this command, to the end of the block."""
    (found,) = re.findall(rf"^\$ {re.escape(command)}\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    return str(found).splitlines()


def plain(line: str) -> str:
    """A line without what differs from run to run."""
    line = re.sub(r"\bgw[0-9a-f]+", "JOB", line)
    return re.sub(r"\d+(\.\d+)?", "N", line)


def is_shown(page: list[str], printed: str) -> bool:
    """Whether the lines of the page are lines of this text, in this order.

    A line that is only an ellipsis stands for any number of lines.
    """
    for name, address in HOSTS.items():
        printed = printed.replace(f"host {address}", f"host {name}")
    lines, at, may_skip = printed.splitlines(), 0, False
    for wanted in page:
        if wanted == "…":
            may_skip = True
            continue
        start, cut, _ = wanted.partition("…")
        fits = [
            number
            for number, line in enumerate(lines[at:], at)
            if (plain(line).startswith(plain(start)) if cut else plain(line) == plain(wanted))
        ]
        if not fits or (fits[0] > at and not may_skip):
            return False
        at, may_skip = fits[0] + 1, False
    return may_skip or at == len(lines)


def test_the_page_shows_what_the_commands_print(tmp_path: Path) -> None:
    recordings, run = tmp_path / "recordings", tmp_path / "run"
    run.mkdir(mode=0o700)
    settings = [f"recorder.directory={recordings}", "negotiation.deadlock=warn"]
    command = [LAUNCHER, "run", "-H", ",".join(f"{host}:2" for host in HOSTS.values())]
    command += [word for setting in settings for word in ("--set", setting)]
    command += ["--", sys.executable, str(HERE / "train.py")]

    def printed(*words: str) -> str:
        done = subprocess.run(
            [LAUNCHER, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
            env={**os.environ, "XDG_RUNTIME_DIR": str(run)},
            check=False,
        )
        return done.stdout

    with running(command, tmp_path / "log", XDG_RUNTIME_DIR=str(run)) as job:
        seen = [""]

        def why() -> bool:
            seen[0] = printed("why")
            return is_shown(shown("gradwire why"), seen[0])

        try:
            until("the explanation on the page", why, LIMIT, job)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{seen[0]}") from None
        (pid,) = re.findall(r"^rank 3 on .*\(pid (\d+)\)", seen[0], re.M)
        os.kill(int(pid), signal.SIGKILL)
        job.wait(LIMIT)
    report = printed("report", str(recordings))
    assert is_shown(shown("gradwire report /shared/recordings"), report), report
