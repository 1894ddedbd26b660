#!/usr/bin/env python3
"""Counts constructions that make English hard to read, in documents, comments and texts of code.

    scripts/plain_words.py                  # the number of each construction, and the worst files
    scripts/plain_words.py --list           # every place
    scripts/plain_words.py --change BASE    # the lines that the change since BASE adds
    scripts/plain_words.py --most 40        # also fails if there are more places than that

Run it in the repository. A hit is a place to look at, not a verdict.
"""

import argparse
import collections
import re
import subprocess
import sys
from collections.abc import Iterator

START = r"(?:^|[.:;] )"
PATTERNS = {
    "sentence starts with Whose/Who/Of/Those/That of/What no": START
    + r"(?:Whose|Who|Of (?!course)|Those|That of|What no|What does no)\b(?![^.]*\?)",
    "so many / so much (a count or amount)": r"\b[Ss]o (?:many|much|long|few)\b(?! (?:that|as))",
    "is no / does no / has no part": r"\b(?:is|are|was) no "
    r"(?!longer|more|less|different|way|need|t\b)\w+",
    "who for anyone who / a rank that": r"\b(?:[Ww]ho|[Ww]hoever) "
    r"(?:can|waits|reads|asks|looks|sends|has|wants|is to|needs)\b(?![^.]*\?)",
    "to be had, as they come, leads nowhere": r"\bto be had\b|\bas (?:they|it) comes?\b"
    r"|\bleads? nowhere\b|\bat its? word\b",
    "takes X for, told by, say of": r"\btakes? \w+ for (?:a|an|the|what)\b"
    r"|\bare told\b|\bis told\b|\b[Ss]ay of\b",
    "the one that / the ones that": r"\b[Tt]he ones? that\b",
    "in which no, of which no, for which no": r"\b(?:in|of|for|to) (?:which|whom) no\b",
    "first the object, then the subject": r"^(?:From|With|Without|Of|To) [^,.]{3,50} "
    r"(?:does|is|are|comes|goes) (?:a|an|the|what|no)\b",
    "names as their projects write them": r"\b(?:horovod's|gloo's|pytorch's)\b",
}
FILES = ["*.rs", "*.py", "*.md", "*.proto", "*.js"]
# This file names the constructions, the protocol of OpenTelemetry is not ours, and generated code
# repeats the protocols.
SKIP = re.compile(
    r"(^|/)CHANGELOG\.md$|^scripts/plain_words\.py$|^proto/(services/)?(opentelemetry|generated)/"
)
COMMENT = re.compile(r"^\s*(?://[/!]?|#(?!\[|!)|\*)\s?(.*)$")
STRING = re.compile(r'"((?:[^"\\]|\\.){12,})"')
DOCSTRING = re.compile(r'^\s*[A-Z"][\w ,\'`-]{20,}')

Line = tuple[str, int, str]


def git(*words: str) -> str:
    """What a git command prints."""
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout


def texts(path: str, line: str) -> list[str]:
    """The English in a line: a comment, strings with several words, or all of it in Markdown."""
    if path.endswith(".md"):
        return [line.strip(" -*>|#")]
    if comment := COMMENT.match(line):
        return [comment[1]]
    strings = [text for text in STRING.findall(line) if " " in text]
    is_prose = path.endswith(".py") and DOCSTRING.match(line)
    if not strings and is_prose and "=" not in line and "(" not in line[:12]:
        return [line.strip(' "')]
    return strings


def all_lines() -> Iterator[Line]:
    """Every line of the files in git."""
    for path in git("ls-files", *FILES).split():
        with open(path, encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                yield path, number, line.rstrip("\n")


def added_lines(base: str) -> Iterator[Line]:
    """The lines that are not in `base`."""
    path, number = "", 0
    for line in git("diff", "-U0", base, "--", *FILES).splitlines():
        if line.startswith("+++ "):
            path = line[6:]
        elif match := re.match(r"@@ .* \+(\d+)", line):
            number = int(match[1]) - 1
        elif line.startswith("+"):
            number += 1
            yield path, number, line[1:]


def main() -> int:
    """Prints the counts; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--list", action="store_true", help="print every place")
    parser.add_argument("--change", metavar="BASE", help="only what the change since BASE adds")
    parser.add_argument("--most", type=int, metavar="N", help="fail if there are more than N")
    options = parser.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    files: collections.Counter[str] = collections.Counter()
    places: dict[tuple[str, int], str] = {}
    for path, number, line in added_lines(options.change) if options.change else all_lines():
        if SKIP.search(path):
            continue
        for text in texts(path, line):
            for name, pattern in PATTERNS.items():
                if re.search(pattern, text):
                    counts[name] += 1
                    files[path] += 1
                    places[path, number] = text.strip()
    for name in PATTERNS:
        print(f"{counts[name]:6}  {name}")
    total = sum(counts.values())
    print(f"{total:6}  in all")
    if options.change or options.list:
        for (path, number), text in places.items():
            print(f"  {path}:{number}: {text[:110]}")
    else:
        for path, count in files.most_common(10):
            print(f"        {count:4} {path}")
    if options.most is not None and total > options.most:
        print(f"more than {options.most}: see scripts/plain_words.py --list", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
