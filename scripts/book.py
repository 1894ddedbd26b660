#!/usr/bin/env python3
"""Copies the pages of the book for mdBook, and checks the links of the built book.

    scripts/book.py prepare target/book-source   # before mdBook
    scripts/book.py check target/book            # afterwards, with LinkChecker in PATH

Pages lie in `docs/` and, where they are about one folder, in that folder. A book of mdBook has one
folder of sources. So `prepare` copies all pages of `docs/SUMMARY.md`, and each file to which they
link, to the places that they have in the repository: then every relative link leads to the same
file in the book as in the repository, also to an example or a script. A link to a folder leads to a
page that lists its files.

`check` reads every page of the built book and fails if a link leads to a missing file or heading,
or if a page needs anything from the network.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from check_text import LINK, prose

ROOT = Path(__file__).resolve().parent.parent
SUMMARY = ROOT / "docs" / "SUMMARY.md"
ENTRY = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")


def pages() -> list[Path]:
    """The pages that SUMMARY.md lists, in its order."""
    found = (SUMMARY.parent / target for _, target in ENTRY.findall(SUMMARY.read_text("utf-8")))
    return [Path(os.path.normpath(path)) for path in found]


def targets(page: Path) -> list[Path]:
    """The files and folders of this repository to which a page links."""
    found = []
    for _, line in prose(page.read_text("utf-8").splitlines()):
        for target in LINK.findall(re.sub(r"`[^`]*`", "", line)):
            path = target.partition("#")[0]
            if path and ":" not in path:
                found.append(Path(os.path.normpath(page.parent / path)))
    return found


def prepare(folder: Path) -> None:
    """Fills the folder with the sources of the book."""
    shutil.rmtree(folder, ignore_errors=True)
    every = pages()
    files = {target for page in every for target in targets(page) if target.is_file()}
    missing = sorted(path for path in files if path.suffix == ".md" and path not in every)
    if missing:
        names = ", ".join(str(path.relative_to(ROOT)) for path in missing)
        raise SystemExit(f"book.py: pages link to {names}, which docs/SUMMARY.md lacks")
    for path in [*every, *files]:
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)

    def moved(match: re.Match[str]) -> str:
        path = os.path.normpath(SUMMARY.parent / match[2])
        return f"[{match[1]}]({Path(path).relative_to(ROOT)})"

    (folder / "SUMMARY.md").write_text(ENTRY.sub(moved, SUMMARY.read_text("utf-8")), "utf-8")


def check(folder: Path) -> None:
    """Fails if a link of the built book is dead, or leads to something that must be loaded."""
    # LinkChecker has a mode for local files; `--check-extern` is off, so it never uses the network.
    words = ["linkchecker", "--no-status", "--no-robots", "--config", str(ROOT / "docs" / "links.ini")]
    subprocess.run([*words, (folder / "index.html").as_uri()], check=True)
    for page in sorted(folder.rglob("*.html")):
        for tag in re.findall(r"<(?:script|link|img|source)\b[^>]*>", page.read_text("utf-8")):
            if re.search(r"(?:src|href)=\"(?:https?:)?//", tag):
                raise SystemExit(f"book.py: {page}: needs the network: {tag}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["prepare", "check"])
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    {"prepare": prepare, "check": check}[given.what](given.folder.resolve())


if __name__ == "__main__":
    sys.exit(main())
