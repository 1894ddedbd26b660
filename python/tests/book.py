"""The blocks of the book that a reader can run, and how they are run.

The first word of a block's info string is its language, and the others say how it is run:

| words | the block |
|---|---|
| none | each command of it runs in the page's folder and ends without an error |
| `file=NAME` | a program, written to the page's folder for later commands |
| `dry` | `gradwire run` gets the option `--dry-run`; other commands run as usual |
| `quick` | `gradwire bench` measures one small size once |
| `job` | runs beside a job of four ranks on two hosts |
| `needs=MODULE` | is left out where Python lacks this module; `make frameworks` has it |
| `tested-by: FILE` | is run by this other test, perhaps with other sizes |
| `no-run: REASON` | is not run |

In a `console` block a line that begins with `$ ` is a command, and the lines up to the next one are
what it prints: in these `…` stands for any text, and a line that is only `…` for any lines. Without
such lines, as in a `sh` block, only its exit code is checked. Hosts such as `node1` become
addresses of this machine.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launching import LIMIT

ROOT = Path(__file__).resolve().parents[2]
ENTRY = re.compile(r"\]\(([^)]+)\)")
LANGUAGES = ("console", "sh", "python")
HOSTS = ["node1", "node2", "node3", "node4", "cpu1", "cpu2", "a", "b", "c", "d"]


@dataclass
class Block:
    """A block of a page."""

    page: Path
    line: int
    language: str
    words: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def word(self, name: str) -> str | None:
        """What follows `name` in the info string: to the next word, or after a colon to the end."""
        long = re.search(rf"(?:^| ){name}: (.+)$", self.words)
        short = re.search(rf"(?:^| ){name}=(\S+)", self.words)
        found = long or short
        return found[1] if found else None

    def has(self, name: str) -> bool:
        return name in self.words.split(" ")


def pages() -> list[Path]:
    """The pages of the book, without the appendix and the decisions."""
    summary = (ROOT / "docs" / "SUMMARY.md").read_text(encoding="utf-8")
    every = [(ROOT / "docs" / target).resolve() for target in ENTRY.findall(summary)]
    left_out = (ROOT / "lab", ROOT / "docs" / "decisions")
    return [page for page in every if not any(page.is_relative_to(folder) for folder in left_out)]


def blocks(page: Path) -> Iterator[Block]:
    """All blocks of a page, of any language."""
    lines = page.read_text(encoding="utf-8").splitlines()
    start = None
    for number, line in enumerate(lines, 1):
        fence = re.match(r" *```(\S*) ?(.*)$", line)
        if not fence:
            continue
        if start is None:
            start, language, words = number, fence[1], fence[2]
        else:
            text = "\n".join(lines[start : number - 1]) + "\n"
            yield Block(page, start, language, words, text)
            start = None


def commands(block: Block) -> list[tuple[str, list[str] | None]]:
    """The commands of a block, and what each prints if the block shows it."""
    if block.language == "sh":
        joined = re.sub(r"\\\n *", "", block.text)
        return [(line, None) for line in joined.splitlines() if not line.startswith("#")]
    found: list[tuple[str, list[str] | None]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            shown = found[-1][1]
            assert shown is not None
            shown.append(line)
    return found


def addressed(text: str) -> str:
    """A command with addresses of this machine in place of the hosts of the book."""

    def hosts(match: re.Match[str]) -> str:
        names = r"\b(" + "|".join(HOSTS) + r")\b"
        return re.sub(names, lambda host: f"127.0.0.{HOSTS.index(host[1]) + 1}", match[0])

    return re.sub(r"(?:(?:-H|--servers) \S+|http://\w+:)", hosts, text)


def named(text: str) -> str:
    """A text with the hosts of the book in place of addresses of this machine."""
    return re.sub(r"host 127\.0\.0\.(\d)", lambda at: f"host {HOSTS[int(at[1]) - 1]}", text)


def quick(measurement: re.Match[str]) -> str:
    """A measurement with one iteration, of at most 64 KiB."""
    words = re.sub(r" -[bef] \S+", "", measurement[2])
    sizes = "" if re.search("model|barrier", measurement[1]) else " -b 64K -e 64K"
    return f"{measurement[1]}{words} --iters 1 --warmup 0{sizes}"


def is_shown(page: list[str], printed: str) -> bool:
    """Whether these lines of a page show what was printed."""
    pattern = ""
    for line in page:
        words = ".*".join(re.escape(part) for part in line.split("…"))
        pattern += r"(?:.*\n)*" if line == "…" else words + r"\n"
    return re.fullmatch(pattern, printed if printed.endswith("\n") else printed + "\n") is not None


class Folder:
    """A folder in which the commands of a page run, with the environment of a user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runtime = folder.parent / "runtime"
        self.runtime.mkdir(mode=0o700)
        for name in ("examples", "python", "deploy"):
            (folder / name).symlink_to(ROOT / name)
        self.variables = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "XDG_RUNTIME_DIR": str(self.runtime),
            "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        # The exit code of the command before, for `echo $?`.
        self.code = 0
        # The port of the status page of the job beside it.
        self.port = 9401

    def run(self, command: str, how: str = "") -> tuple[int, str]:
        """Runs one command as a shell does; returns its exit code and what it has printed."""
        line = addressed(command).replace(":9401/", f":{self.port}/")
        if command.startswith("gradwire top"):
            # It needs a terminal, and ends by a key.
            line = "printf q | script --quiet --return --command 'gradwire top' /dev/null"
        if how == "dry":
            line = line.replace("gradwire run ", "gradwire run --dry-run ", 1)
        if how == "quick":
            line = re.sub(r"(bench \w+)(.*?)(?= #|$)", quick, line)
        done = subprocess.run(
            ["bash", "-c", f"(exit {self.code}); {line}"],
            cwd=self.folder,
            env=self.variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
        self.code = done.returncode
        return done.returncode, named(done.stdout)
