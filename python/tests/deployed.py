"""Reads the queries and rules in deploy/, and the metrics that they may use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent.parent
PROMETHEUS = ROOT / "deploy" / "prometheus"
DASHBOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))

# Series created by Prometheus itself.
BUILT_IN = {"up", "ALERTS"}
# Labels of all targets, of alerts and of buckets.
COMMON_LABELS = {"gradwire_job", "host", "node", "instance", "job", "le", "alertstate"}

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_MATCHERS = re.compile(r"\{([^{}]*)\}")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^()]*)\)")
_RANGE = re.compile(r"\[[^\]]*\]")
_NAME = re.compile(r"(?<![\w:$.])[a-zA-Z_:][\w:]*(?!\s*\(|[\w:])")
_WORDS = {"and", "or", "unless", "bool", "offset", "by", "without"}


class Query(NamedTuple):
    """A query of a panel."""

    panel: str
    expr: str
    instant: bool


def declared() -> dict[str, set[str]]:
    """The names of all series in docs/metrics.md, with the labels of each."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    row = re.compile(r"^\| `((?:gradwire|process)_\w+)` \| (\w+) \| (.*?) \| ", re.MULTILINE)
    found: dict[str, set[str]] = {}
    for name, kind, labels in row.findall(text):
        ends = ["_bucket", "_sum", "_count"] if kind == "histogram" else [""]
        found.update({name + end: set(re.findall(r"`(\w+)`", labels)) for end in ends})
    return found


def names(expr: str) -> set[str]:
    """The metrics used in an expression."""
    text = _STRING.sub("", expr)
    for pattern in (_MATCHERS, _GROUPING, _RANGE):
        text = pattern.sub(" ", text)
    return set(_NAME.findall(text)) - _WORDS


def labels(expr: str) -> set[str]:
    """The labels used in an expression."""
    text = _STRING.sub("", expr)
    found = {
        word for match in _MATCHERS.findall(text) for word in re.findall(r"(\w+)\s*[=!]", match)
    }
    return found.union(*(re.findall(r"\w+", match) for match in _GROUPING.findall(text)))


def dashboard(path: Path) -> dict[str, Any]:
    """A dashboard."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def queries(path: Path) -> Iterator[Query]:
    """The queries of a dashboard's panels."""
    for panel in dashboard(path)["panels"]:
        for target in panel["targets"]:
            yield Query(f"{path.stem}: {panel['title']}", target["expr"], target["instant"])


def variables(path: Path) -> dict[str, tuple[str, str]]:
    """The series and the label that provide the values of a dashboard's variables."""
    found = {}
    for variable in dashboard(path)["templating"]["list"]:
        if variable["type"] == "query":
            query = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert query, variable
            found[variable["name"]] = (query[1], query[2])
    return found
