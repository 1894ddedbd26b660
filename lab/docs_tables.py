#!/usr/bin/env python3
"""Updates the simulator's output in the documents.

    lab/docs_tables.py target/debug/gradwire-lab
    lab/docs_tables.py --check --without rat target/debug/gradwire-lab

It runs the commands named by the marks in lab/docs/simulator.md, formulas.md and rat.md, and
replaces the text between the marks:

- `<!-- table: PAPER NAME -->`: the table NAME of `gradwire-lab simulate paper PAPER`
- `<!-- output: WORDS -->`: the output of `gradwire-lab WORDS`, without critical paths

The output is deterministic. With `--check`, nothing is written, and the exit code is 1 if a
document differs. `--without` skips a paper that takes long.
"""

import argparse
import difflib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = [ROOT / "lab" / "docs" / name for name in ("simulator.md", "formulas.md", "rat.md")]
MARK = re.compile(r"(<!-- (table|output): (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
MOST_BYTES = 200_000


def markdown(table: dict) -> str:
    """A table of a paper as Markdown."""
    rows = [table["head"], ["---"] * len(table["head"]), *table["rows"]]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


class Gradwire:
    """The program and its cached output."""

    def __init__(self, program: Path) -> None:
        """Stores the program's path."""
        self.program = program
        self.papers: dict[str, dict[str, str]] = {}

    def table(self, paper: str, name: str) -> str:
        """A table of a paper. All results of the paper must be within their bounds."""
        if paper not in self.papers:
            with tempfile.TemporaryDirectory() as out:
                command = [self.program, "simulate", "paper", paper, "--out", out]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                result = json.loads((Path(out) / "result.json").read_text(encoding="utf-8"))
            self.papers[paper] = {table["title"]: markdown(table) for table in result["tables"]}
        return self.papers[paper][name]

    def output(self, words: str) -> str:
        """A command's output, as a code block."""
        command = [self.program, *words.split()]
        done = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        text = done.stdout.split("\nCritical path")[0].rstrip()
        return f"```\n$ gradwire {words}\n{text}\n```\n"


def generated(text: str, gradwire: Gradwire, without: list[str]) -> str:
    """A document with the current output between its marks."""

    def replaced(match: re.Match[str]) -> str:
        begin, kind, words, end = match.groups()
        if kind == "output":
            return f"{begin}{gradwire.output(words)}{end}"
        paper, name = words.split()
        if paper in without:
            return match.group()
        return f"{begin}{gradwire.table(paper, name)}{end}"

    return MARK.sub(replaced, text)


def main() -> int:
    """Writes or compares all documents."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program", type=Path, help="path of gradwire-lab")
    parser.add_argument("--check", action="store_true", help="compare without writing")
    parser.add_argument("--without", action="append", default=[], help="paper to skip")
    options = parser.parse_args()
    gradwire = Gradwire(options.program.resolve())
    differ = 0
    for doc in DOCS:
        name = doc.relative_to(ROOT)
        old = doc.read_text(encoding="utf-8")
        new = generated(old, gradwire, options.without)
        if len(new.encode()) > MOST_BYTES:
            print(f"{name} would have more than {MOST_BYTES} bytes", file=sys.stderr)
            return 1
        if not options.check:
            doc.write_text(new, encoding="utf-8")
        elif old != new:
            differ = 1
            lines = difflib.unified_diff(
                old.splitlines(), new.splitlines(), str(name), "generated", lineterm="", n=0
            )
            print("\n".join(lines))
    if differ:
        print("run make simulator-docs", file=sys.stderr)
    return differ


if __name__ == "__main__":
    sys.exit(main())
