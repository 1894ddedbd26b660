#!/usr/bin/env python3
"""Checks the files in git for long lines and test names, and Markdown for broken links and paths.

    scripts/check_text.py            # all files in git
    scripts/check_text.py README.md  # only these files

It prints one line per finding, as `file:line: what`, and exits with 1 if there are any.

- Line lengths are checked in files that end in one of `SUFFIXES`. Table rows in Markdown and in
  Rust doc comments are exempt, and so are Markdown lines that are long only because of a URL. A
  file with `@generated` in one of its first five lines is exempt, and so are the copied protocol
  of OpenTelemetry and the code generated from protocols.
- Names of tests have at most 45 characters, in Rust and in Python.
- Relative links in Markdown must point to a file or folder in the repository. Anchors must match a
  heading, in GitHub's form.
- A path of a source file in a code span, such as `scripts/check_text.py`, must exist if its first
  folder does. It is relative to the repository or to the Markdown file.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

COLUMNS = 100
MOST_NAME = 45
SUFFIXES = {".md", ".proto", ".py", ".rs", ".sh", ".toml"}
GENERATED = "@generated"
NOT_OURS = ("proto/generated/", "proto/services/generated/", "proto/services/opentelemetry/")

ROW = {".md": re.compile(r"\s*\|"), ".rs": re.compile(r"\s*//[/!] *\|")}
FENCE = re.compile(r" {0,3}(```+|~~~+)")
HEADING = re.compile(r" {0,3}#{1,6} +(.*?)(?: +#+)? *$")
URL = re.compile(r"\S*\w+://\S+")
CODE = re.compile(r"(`+).+?\1")
PATH = re.compile(r"(?<!`)`([\w.-]+(?:/[\w.-]+)+)`(?!`)")
# [text](target) and ![text](target "title"); [label]: target
LINK = re.compile(r"\]\(\s*<?([^()\s<>]*(?:\([^()\s]*\)[^()\s<>]*)*)>?(?:\s+\"[^\"]*\")?\s*\)")
DEFINITION = re.compile(r" {0,3}\[[^\]]+\]:\s*<?(\S+?)>?\s*(?:\"[^\"]*\")?$")

TEST = {
    ".py": re.compile(r"def (test_\w+)"),
    ".rs": re.compile(
        r"#\[(?:tokio::)?test[^\]]*\](?:\s*#\[[^\]]*\]|\s*//[^\n]*)*\s*(?:pub )?(?:async )?fn (\w+)"
    ),
}

Finding = tuple[Path, int, str]


def is_generated(lines: list[str]) -> bool:
    """Whether the file is marked as generated."""
    return any(GENERATED in line for line in lines[:5])


def long_lines(path: Path, lines: list[str]) -> Iterator[Finding]:
    """Lines that exceed the maximum width."""
    if is_generated(lines):
        return
    row = ROW.get(path.suffix)
    for number, line in enumerate(lines, 1):
        if len(line) <= COLUMNS or (row and row.match(line)):
            continue
        if path.suffix == ".md" and len(URL.sub("", line)) <= COLUMNS:
            continue
        yield path, number, f"{len(line)} columns, but the maximum is {COLUMNS}"


def test_names(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """The names of the tests in a file, with their line numbers."""
    if pattern := TEST.get(path.suffix):
        for test in pattern.finditer(text):
            yield text.count("\n", 0, test.start(1)) + 1, test[1]


def long_names(path: Path, text: str) -> Iterator[Finding]:
    """Tests with names that exceed the maximum length."""
    for number, name in test_names(path, text):
        if len(name) > MOST_NAME:
            what = f"the test name {name} has {len(name)} characters"
            yield path, number, f"{what}, but the maximum is {MOST_NAME}"


def prose(lines: list[str]) -> Iterator[tuple[int, str]]:
    """The lines outside of code blocks, with line numbers from 1."""
    fence = ""
    for number, line in enumerate(lines, 1):
        mark = FENCE.match(line)
        if fence:
            if mark and mark[1].startswith(fence):
                fence = ""
        elif mark:
            fence = mark[1]
        else:
            yield number, line


def anchor(heading: str) -> str:
    """GitHub's anchor for a heading."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def anchors(path: Path) -> frozenset[str]:
    """The anchors of a Markdown file."""
    found: dict[str, int] = {}
    result = set()
    for _, line in prose(path.read_text(encoding="utf-8").splitlines()):
        if heading := HEADING.match(line):
            name = anchor(heading[1])
            count = found.get(name, 0)
            found[name] = count + 1
            result.add(f"{name}-{count}" if count else name)
    return frozenset(result)


def links(lines: list[str]) -> Iterator[tuple[int, str]]:
    """The link targets of a Markdown file, with their line numbers."""
    for number, line in prose(lines):
        text = CODE.sub("", line)
        for link in LINK.finditer(text):
            yield number, link[1]
        if definition := DEFINITION.match(text):
            yield number, definition[1]


def broken_links(path: Path, lines: list[str], root: Path) -> Iterator[Finding]:
    """Broken relative links of a Markdown file."""
    for number, target in links(lines):
        if re.match(r"[a-z][a-z0-9+.-]*:", target, re.IGNORECASE):
            continue
        name, _, wanted = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        if not there.is_relative_to(root):
            yield path, number, f"the link {target} points outside the repository"
        elif not there.exists():
            yield path, number, f"the link {target} points to a missing file"
        elif wanted and there.suffix == ".md" and wanted not in anchors(there):
            yield path, number, f"the link {target} points to a missing heading"


def broken_paths(path: Path, lines: list[str], root: Path) -> Iterator[Finding]:
    """Missing source files mentioned in a Markdown file."""
    for number, line in prose(lines):
        for span in PATH.finditer(line):
            name = Path(span[1])
            for folder in (root, path.parent):
                if (folder / name).exists():
                    break
            else:
                if name.suffix in SUFFIXES and (root / name.parts[0]).is_dir():
                    yield path, number, f"the file {name} does not exist"


def check(path: Path, root: Path) -> list[Finding]:
    """All findings for one file."""
    if path.suffix not in SUFFIXES:
        return []
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    findings = [*long_lines(path, lines), *long_names(path, text)]
    if path.suffix == ".md":
        findings += broken_links(path, lines, root)
        findings += broken_paths(path, lines, root)
    return findings


def main(arguments: list[str]) -> int:
    """Checks the given files, or all files in git."""
    root = Path(__file__).resolve().parent.parent
    if arguments:
        files = [Path(name).resolve() for name in arguments]
    else:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True
        )
        names = [name for name in listed.stdout.decode().split("\0") if name]
        files = [root / name for name in names if not name.startswith(NOT_OURS)]
    findings = [finding for file in files if file.is_file() for finding in check(file, root)]
    for path, number, what in findings:
        print(f"{path.relative_to(root)}:{number}: {what}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
