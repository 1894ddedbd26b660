#!/usr/bin/env python3
"""Prints how large the project is: programs, crates, files, lines, documents, words, test names.

    scripts/figures.py           # seconds; the sizes are those of what is built
    scripts/figures.py --times   # also minutes of make demo, make test and .ci/run in fresh clones

A Markdown table on standard output, to be compared with that of another commit.
"""

import argparse
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from check_text import MOST_NAME, test_names

ROOT = Path(__file__).resolve().parents[1]
TREES = ("gradwire-worker", "gradwire-daemon", "gradwire-cli")
TIMED = (["make", "demo"], ["make", "test"], ["bash", ".ci/run"])

Row = tuple[str, str]


def output(*words: str | Path, cwd: Path = ROOT) -> str:
    """What a command prints."""
    done = subprocess.run(words, cwd=cwd, check=True, capture_output=True, text=True)
    return done.stdout


def files(*patterns: str) -> list[Path]:
    """The files in git with these names, without generated code."""
    names = output("git", "ls-files", *patterns).split("\n")
    return [ROOT / name for name in names if name and "/generated/" not in name]


def is_test(path: Path) -> bool:
    """Whether a file has tests only."""
    parts = path.relative_to(ROOT).parts
    return "tests" in parts or path.stem == "tests" or path.name.startswith("test_")


def is_lab(path: Path) -> bool:
    """Whether a file belongs to the laboratory."""
    return path.relative_to(ROOT).parts[0] == "lab"


def lines(paths: list[Path]) -> int:
    """How many lines they have."""
    return sum(path.read_bytes().count(b"\n") for path in paths)


def sizes() -> Iterator[Row]:
    """The programs and the wheel, as far as they are built."""
    scripts = ROOT / "python" / "gradwire.data" / "scripts"
    wheels = sorted((ROOT / "python" / "dist").glob("gradwire-*.whl"))
    for path in (scripts / "gradwire", scripts / "gradwired", *wheels):
        size = f"{path.stat().st_size / 1e6:.1f} MB" if path.exists() else "not built"
        yield ("wheel" if path.suffix == ".whl" else f"`{path.name}`, stripped"), size


def crates() -> Iterator[Row]:
    """How many crates each tree has."""
    for name in TREES:
        tree = output("cargo", "tree", "-e", "normal", "--prefix", "none", "-p", name)
        yield f"crates of {name}", str(len({line.split(" (")[0] for line in tree.splitlines()}))


def code() -> Iterator[Row]:
    """Files and lines."""
    yield "files", str(len(files()))
    for language, pattern in (("Rust", "*.rs"), ("Python", "*.py")):
        every = files(pattern)
        product = [path for path in every if not is_test(path) and not is_lab(path)]
        yield f"lines of {language}", str(lines(every))
        yield f"lines of {language} outside lab/ and test files", str(lines(product))
    documents = [path for path in files("*.md") if not is_lab(path)]
    size = sum(path.stat().st_size for path in documents)
    yield "Markdown outside lab/", f"{size / 1e3:.0f} KB"


def words() -> Iterator[Row]:
    """Constructions that are hard to read, and names of tests that are too long."""
    counted = output("python3", "scripts/plain_words.py")
    total = next(line for line in counted.splitlines() if line.endswith("in all"))
    yield "places that `plain_words` finds", total.split()[0]
    tests = [
        name
        for path in files("*.rs", "*.py")
        for _, name in test_names(path, path.read_text(encoding="utf-8"))
    ]
    long = sum(len(name) > MOST_NAME for name in tests)
    yield f"test names of more than {MOST_NAME} characters", f"{long} of {len(tests)}"


def times() -> Iterator[Row]:
    """Minutes of the commands, each in a fresh clone."""
    for command in TIMED:
        with tempfile.TemporaryDirectory() as folder:
            clone = Path(folder) / "clone"
            output("git", "clone", "--quiet", ROOT, clone)
            start = time.monotonic()
            done = subprocess.run(command, cwd=clone, stdout=subprocess.DEVNULL)
            minutes = (time.monotonic() - start) / 60
            failed = "" if done.returncode == 0 else f", exit code {done.returncode}"
            yield f"minutes of `{' '.join(command)}`", f"{minutes:.1f}{failed}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--times", action="store_true", help="time the commands in fresh clones")
    parts: list[Callable[[], Iterator[Row]]] = [sizes, crates, code, words]
    if parser.parse_args().times:
        parts.append(times)
    print("| what | figure |\n|---|--:|")
    for part in parts:
        for name, figure in part():
            print(f"| {name} | {figure} |", flush=True)


if __name__ == "__main__":
    main()
