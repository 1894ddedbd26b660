#!/usr/bin/env python3
"""Checks the licence and the source of each crate against deny.toml, in a second.

    scripts/check_licences.py

`cargo deny` checks the same and more (`make deny`), but takes minutes to build; so `make lint` runs
this. Licences are SPDX expressions: each part of an AND must be allowed, and one part of an OR.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# In an older form of licence fields, a slash means OR.
TOKEN = re.compile(r"[()/]|[\w.+-]+")
LIST = r"^allow = \[(.*?)\]"


def allowed(expression: str, allow: set[str]) -> bool:
    """Whether a licence expression can be met with the licences in `allow`.

    Raises:
        ValueError: It is no expression.
    """
    tokens = TOKEN.findall(expression)

    def either() -> bool:
        met = both()
        while tokens and tokens[0] in ("OR", "/"):
            tokens.pop(0)
            met = both() or met
        return met

    def both() -> bool:
        met = one()
        while tokens and tokens[0] == "AND":
            tokens.pop(0)
            met = one() and met
        return met

    def one() -> bool:
        name = tokens.pop(0) if tokens else ""
        if name == "(":
            met = either()
            if not tokens or tokens.pop(0) != ")":
                raise ValueError(expression)
            return met
        if not name or name in (")", "/", "AND", "OR", "WITH"):
            raise ValueError(expression)
        if tokens and tokens[0] == "WITH":
            name += f" WITH {tokens[1]}"
            del tokens[:2]
        return name in allow

    met = either()
    if tokens:
        raise ValueError(expression)
    return met


def policy(text: str) -> tuple[set[str], dict[str, set[str]]]:
    """The licences that deny.toml allows for all crates, and those for single ones."""
    everywhere, *single = text.split("[[licenses.exceptions]]")
    names = re.search(LIST, everywhere.partition("[licenses]")[2], re.MULTILINE | re.DOTALL)
    if not names:
        raise ValueError("deny.toml has no list `allow` in [licenses]")
    exceptions = {}
    for part in single:
        crate = re.search(r'^crate = "(.+)"$', part, re.MULTILINE)
        more = re.search(LIST, part, re.MULTILINE | re.DOTALL)
        if not crate or not more:
            raise ValueError("an exception in deny.toml has no crate or no list `allow`")
        exceptions[crate[1]] = set(re.findall(r'"(.+?)"', more[1]))
    return set(re.findall(r'"(.+?)"', names[1])), exceptions


def findings(packages: list[dict[str, Any]], text: str) -> Iterator[str]:
    """One line for each crate that deny.toml, which is `text`, does not allow."""
    allow, exceptions = policy(text)
    for package in packages:
        crate = f"{package['name']} {package['version']}"
        licence, source = package["license"], package["source"]
        if source and not source.startswith("registry+"):
            yield f"{crate} comes from {source}, and deny.toml allows registries only"
        try:
            met = licence and allowed(licence, allow | exceptions.get(package["name"], set()))
        except ValueError:
            met = False
        if not met:
            yield f"{crate} has the licence {licence}, which deny.toml does not allow"


def main() -> int:
    """Prints the findings; returns 1 if there are any."""
    command = ["cargo", "metadata", "--locked", "--all-features", "--format-version", "1"]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    text = (ROOT / "deny.toml").read_text(encoding="utf-8")
    found = list(findings(json.loads(said)["packages"], text))
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
