#!/usr/bin/env python3
"""Copies the pages of the book for mdBook, and checks the links of the built book.

    scripts/book.py prepare target/book-source   # before mdBook
    scripts/book.py check target/book            # afterwards, with lxml

Pages lie in `docs/` and, where they are about one folder, in that folder. A book of mdBook has one
folder of sources. So `prepare` copies all pages of `docs/SUMMARY.md`, and each file to which they
link, to the places that they have in the repository: then every relative link leads to the same
file in the book as in the repository, also to an example or a script.

`check` reads every page of the built book and fails if a link leads to a missing file or heading,
or if a page needs anything from the network.
"""

import argparse
import os
import re
import shutil
from pathlib import Path
from urllib.parse import unquote, urlsplit

from check_text import LINK, prose

ROOT = Path(__file__).resolve().parent.parent
SUMMARY = ROOT / "docs" / "SUMMARY.md"
ENTRY = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")


def summary() -> str:
    """SUMMARY.md, with an entry for each decision below that of their folder."""
    text = SUMMARY.read_text("utf-8")
    for line in re.findall(r"- \[.*\]\(decisions/README\.md\)\n", text):
        decisions = sorted((SUMMARY.parent / "decisions").glob("[0-9]*.md"))
        entries = []
        for page in decisions:
            title = page.read_text("utf-8").partition("\n")[0].removeprefix("# ")
            entries.append(f"  - [{title}](decisions/{page.name})\n")
        text = text.replace(line, line + "".join(entries))
    return text


def pages() -> list[Path]:
    """The pages of the book, in its order."""
    found = (SUMMARY.parent / target for _, target in ENTRY.findall(summary()))
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
        copy = folder / as_index(str(path.relative_to(ROOT)))
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path in every:
            text = LINK.sub(lambda link: as_index(link[0]), path.read_text("utf-8"))
            copy.write_text(text, "utf-8")
        else:
            shutil.copyfile(path, copy)

    def moved(entry: re.Match[str]) -> str:
        path = Path(os.path.normpath(SUMMARY.parent / entry[2]))
        return f"[{entry[1]}]({as_index(str(path.relative_to(ROOT)))})"

    (folder / "SUMMARY.md").write_text(ENTRY.sub(moved, summary()), "utf-8")


def as_index(text: str) -> str:
    """A path or link with the name that mdBook gives to a README.md: that of a folder's index."""
    return re.sub(r"\bREADME\.md\b", "index.md", text)


def check(folder: Path) -> list[str]:
    """The links of the built book that are dead, or lead to something that must be loaded."""
    from lxml import html

    # What a page has, by its file: the names of its headings, and its links.
    names: dict[Path, set[str]] = {}
    links: list[tuple[Path, str]] = []
    found = []
    for page in sorted(folder.rglob("*.html")):
        root = html.parse(page).getroot()
        names[page] = set(root.xpath("//@id | //@name"))
        for element, _, link, _ in root.iterlinks():
            if re.match(r"(https?:)?//", link) and element.tag != "a":
                found.append(f"{page.relative_to(folder)}: needs the network: {link}")
            # The page of 404 has absolute links, and the one to print repeats the others.
            elif page.name not in ("404.html", "print.html"):
                links.append((page, link))
    for page, link in links:
        place = urlsplit(link)
        if place.scheme or place.netloc:
            continue
        path = page.parent / unquote(place.path) if place.path else page
        target = Path(os.path.normpath(path))
        name = unquote(place.fragment)
        if not target.is_file() or (name and name not in names.get(target, ())):
            found.append(f"{page.relative_to(folder)}: dead link: {link}")
    return found


def main() -> None:
    """Does what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["prepare", "check"])
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    if given.what == "prepare":
        prepare(given.folder.resolve())
    elif found := check(given.folder.resolve()):
        raise SystemExit("\n".join(sorted(set(found))))


if __name__ == "__main__":
    main()
