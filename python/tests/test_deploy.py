"""The dashboards and rules of deploy/ are complete and use only existing metrics."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import deployed
import pytest
from deployed import DASHBOARDS, PROMETHEUS, ROOT
from launching import LIMIT

yaml = pytest.importorskip("yaml")

Rule = dict[str, Any]


def rules() -> list[Rule]:
    files = [yaml.safe_load(path.read_text()) for path in sorted(PROMETHEUS.glob("rules/*.yml"))]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def alerts() -> list[Rule]:
    return [rule for rule in rules() if "alert" in rule]


def recorded() -> set[str]:
    return {rule["record"] for rule in rules() if "record" in rule}


def unknown(expr: str) -> set[str]:
    """The undeclared metrics and labels in an expression."""
    declared = deployed.declared()
    names = deployed.names(expr)
    assert names, f"no metric in {expr}"
    labels = deployed.COMMON_LABELS.union(*(declared.get(name, set()) for name in names))
    for name in names & recorded():
        # Its name contains the remaining labels.
        labels |= {"rank"} if "rank" in name.split(":")[0] else set()
    allowed = declared.keys() | recorded() | deployed.BUILT_IN
    return (names - allowed) | (deployed.labels(expr) - labels)


def test_references_of_queries_are_found() -> None:
    expr = (
        'sum by (a, le) (rate(x_bucket{b="c", d=~"e{f}"}[5m])) / on (g) group_left () y:z:rate1m '
        "> 0.5 or vector(0) and topk(3, z{h!='i'} offset 5m)".replace("'", '"')
    )
    assert deployed.names(expr) == {"x_bucket", "y:z:rate1m", "z"}
    assert deployed.labels(expr) == {"a", "le", "b", "d", "g", "h"}
    assert unknown("sum(rate(gradwire_daemon_operations[5m]))") == {"gradwire_daemon_operations"}
    # A histogram has several series.
    assert unknown("gradwire_daemon_operation_seconds") and not unknown(
        "gradwire_daemon_operation_seconds_count"
    )
    assert unknown('gradwire_daemon_workers{rank="1"}') == {"rank"}


def test_there_are_four_dashboards() -> None:
    found = [path.stem for path in DASHBOARDS]
    assert found == ["network", "node", "overview", "stragglers"]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_are_complete(path: Path) -> None:
    content = deployed.dashboard(path)
    assert content["uid"] == f"gradwire-{path.stem}" and content["description"]
    panels = content["panels"]
    assert len({panel["id"] for panel in panels}) == len({p["title"] for p in panels}) >= 12
    for panel in panels:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"]["uid"] == "$datasource", panel["title"]
        assert panel["targets"], panel["title"]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_queries_use_metrics_of_the_selected_job(path: Path) -> None:
    for query in deployed.queries(path):
        assert not unknown(query.expr), query
        selected = query.expr.count("{"), query.expr.count('gradwire_job="$job"')
        assert selected[0] == selected[1] > 0, query


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_variables_are_chained(path: Path) -> None:
    variables = deployed.variables(path)
    assert list(variables) in (["job", "host"], ["job", "host", "rank"])
    for name, (series, label) in variables.items():
        assert not unknown(series) and label in ("gradwire_job", "host", "rank")
        assert ("$job" in series) == (name != "job"), series
    # An unused variable would be misleading.
    used = " ".join(query.expr for query in deployed.queries(path))
    assert all(f"${name}" in used for name in variables), variables.keys()


def test_the_dashboards_are_up_to_date() -> None:
    if importlib.util.find_spec("grafana_foundation_sdk") is None:
        assert sys.version_info < (3, 11), "grafana-foundation-sdk is not installed"
        pytest.skip("grafana-foundation-sdk needs Python 3.11")
    done = subprocess.run(
        [sys.executable, str(ROOT / "deploy" / "grafana" / "generate.py"), "--check"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout


def test_rules_refer_to_declared_metrics() -> None:
    assert len(alerts()) >= 8 and len(recorded()) >= 9
    for rule in rules():
        assert not unknown(rule["expr"]), rule


def test_every_alert_has_a_runbook() -> None:
    text = (ROOT / "docs" / "runbooks.md").read_text(encoding="utf-8")
    sections = dict(
        re.findall(r"^## (Gradwire\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    )
    assert sections.keys() == {rule["alert"] for rule in alerts()}
    for rule in alerts():
        name, notes = rule["alert"], rule["annotations"]
        assert notes.keys() == {"summary", "description", "runbook_url"}, name
        assert notes["runbook_url"] == f"docs/runbooks.md#{name.lower()}"
        assert rule["labels"]["severity"] in ("warning", "critical"), name
        for part in ("**Meaning.**", "**Confirm.**", "**Do.**"):
            assert part in sections[name], f"{name} has no {part}"
        for query in re.findall(r"```promql\n(.*?)```", sections[name], re.DOTALL):
            assert not unknown(query), f"{name}: {query}"


def test_every_rule_is_tested() -> None:
    """`make deploy-test` runs these tests."""
    files = [yaml.safe_load(path.read_text()) for path in PROMETHEUS.glob("tests/*.yml")]
    tests = [test for file in files for test in file["tests"]]
    cases = [case for test in tests for case in test.get("alert_rule_test", [])]
    for rule in alerts():
        outcomes = {bool(c["exp_alerts"]) for c in cases if c["alertname"] == rule["alert"]}
        assert outcomes == {True, False}, rule["alert"]
    checked = " ".join(case["expr"] for test in tests for case in test.get("promql_expr_test", []))
    used = checked + " ".join(rule["expr"] for rule in alerts())
    assert all(name in used for name in recorded())
