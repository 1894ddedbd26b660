"""Debian's Prometheus scrapes a real job of two nodes, and every query of deploy/ returns data."""

from __future__ import annotations

import contextlib
import json
import math
import re
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import deployed
import pytest
from deployed import DASHBOARDS, PROMETHEUS, ROOT
from launching import LAUNCHER, LIMIT, running, until

yaml = pytest.importorskip("yaml")

HOSTS = ["127.0.0.1", "127.0.0.2"]
# Grafana's values for the queries if metrics are scraped every second.
INTERVALS = {"$__rate_interval": "5s", "$__range": "30s"}
# Panels that may be empty in this job, with reasons; none so far.
MAY_BE_EMPTY: dict[str, str] = {}

# Rank 1 is late with every tensor, so there are series of waits. The program also ends by itself.
PROGRAM = """
    import os, time
    from pathlib import Path
    import gradwire as gw, numpy as np
    gw.init()
    folder = Path(os.environ["TEST_FOLDER"])
    if gw.rank() == 0:
        (folder / "new").write_text(os.environ["GRADWIRE_COORDINATOR_METRICS"])
        (folder / "new").rename(folder / "coordinator")
    end = time.monotonic() + float(os.environ["TEST_SECONDS"])
    while True:
        time.sleep(0.01 + 0.04 * gw.rank())
        gw.allreduce(np.ones(100_000, np.float32), name="gradient")
        gw.mark_step()
        ends = (folder / "end").exists() or time.monotonic() > end
        if gw.allreduce(np.array([float(ends)]), name="ends")[0] > 0:
            break
    gw.shutdown()
"""


@contextlib.contextmanager
def job(folder: Path) -> Iterator[tuple[str, str]]:
    """A job of two nodes with one rank each; yields its id and the metrics address."""
    program = folder / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    words = [LAUNCHER, "run", "-H", ",".join(f"{host}:1" for host in HOSTS)]
    words += ["--set", "metrics.listen=127.0.0.1:0", "--metrics-sd", str(folder / "jobs")]
    # The loopback interface has no line rate.
    words += ["--set", "network.rate_mbit=10000"]
    words += ["--", sys.executable, str(program)]
    variables = {"TEST_FOLDER": str(folder), "TEST_SECONDS": str(LIMIT)}
    with running(words, folder / "job.log", **variables) as launcher:

        def address() -> str | None:
            assert launcher.poll() is None, (folder / "job.log").read_text()
            file = folder / "coordinator"
            return file.read_text() if file.exists() else None

        coordinator = until("the job runs", address)
        [file] = (folder / "jobs").glob("gradwire-*.json")
        yield file.stem.removeprefix("gradwire-"), coordinator
        (folder / "end").touch()
        assert launcher.wait(60) == 0, (folder / "job.log").read_text()
    assert not file.exists()


class Prometheus:
    """A running Prometheus."""

    def __init__(self, address: str) -> None:
        self.address = address

    def ask(self, path: str, **words: str) -> Any:
        """The data of an API response."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(words)}"
        try:
            with urllib.request.urlopen(url, timeout=20) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{words}: {error.read().decode()}") from error

    def is_ready(self) -> bool:
        """Whether it is ready. Until it has opened its data, it rejects requests."""
        try:
            with urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=20):
                return True
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            return False

    def up(self) -> set[tuple[str, str, str]]:
        """Job, host and node of the reachable targets."""
        targets = self.ask("targets")["activeTargets"]
        found = [target["labels"] for target in targets if target["health"] == "up"]
        labels = ("gradwire_job", "host", "node")
        together = {tuple(target[label] for label in labels) for target in found}
        assert len(together) == len(found), f"a target is there twice: {found}"
        return together

    def has_data(self, expr: str, instant: bool) -> bool:
        """Whether a query returns a number."""
        now = time.time()
        if instant:
            series = self.ask("query", query=expr)["result"]
            values = [one["value"] for one in series]
        else:
            words = {"start": str(now - 20), "end": str(now), "step": "1"}
            series = self.ask("query_range", query=expr, **words)["result"]
            values = [value for one in series for value in one["values"]]
        return any(math.isfinite(float(value)) for _, value in values)


@contextlib.contextmanager
def prometheus(folder: Path, programs: Path, coordinator: str, *ways: str) -> Iterator[Prometheus]:
    """Prometheus with the configuration of deploy/, reduced to these ways to find targets.

    It scrapes every second, and finds this job's coordinator and file.
    """
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = dict.fromkeys(("scrape_interval", "evaluation_interval"), "1s")
    config["rule_files"] = [str(PROMETHEUS / name) for name in config["rule_files"]]
    [scrape] = config["scrape_configs"]
    for way in {"http_sd_configs", "file_sd_configs"}.difference(ways):
        del scrape[way]
    for found in scrape.get("http_sd_configs", []):
        assert found["url"].endswith("/sd")
        found["url"] = f"http://{coordinator}/sd"
    for found in scrape.get("file_sd_configs", []):
        found["files"] = [str(folder / name) for name in found["files"]]
    own = folder / "-".join(ways)
    own.mkdir()
    (own / "prometheus.yml").write_text(yaml.safe_dump(config))
    words = [str(programs / "prometheus"), f"--config.file={own / 'prometheus.yml'}"]
    words += [f"--storage.tsdb.path={own / 'data'}", "--web.listen-address=127.0.0.1:0"]
    with running(words, own / "log") as process:

        def address() -> str | None:
            log = (own / "log").read_text()
            assert process.poll() is None, log
            found = re.search(r'msg="Listening on" address=(\S+)', log)
            return found and found[1]

        server = Prometheus(until("Prometheus listens", address))
        until("Prometheus is ready", server.is_ready)
        yield server


def filled(expr: str, job: str) -> str:
    """A query with all values selected."""
    for name, value in {"$job": job, "$host": ".*", "$rank": ".*", **INTERVALS}.items():
        expr = expr.replace(name, value)
    assert "$" not in expr, expr
    return expr


def programs() -> Path:
    done = subprocess.run(
        [str(ROOT / "scripts" / "prometheus.sh")], capture_output=True, text=True, timeout=LIMIT * 3
    )
    if done.returncode == 3:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def check_queries(server: Prometheus, job: str) -> None:
    """Every query of panels, variables and recording rules returns data."""
    left = {
        (query.panel, filled(query.expr, job), query.instant)
        for path in DASHBOARDS
        for query in deployed.queries(path)
        if query.panel not in MAY_BE_EMPTY
    }
    assert len(left) > 50
    recording = yaml.safe_load((PROMETHEUS / "rules" / "recording.yml").read_text())
    names = {rule["record"] for group in recording["groups"] for rule in group["rules"]}
    left |= {("recording.yml", f'{name}{{gradwire_job="{job}"}}', True) for name in names}
    end = time.monotonic() + 90
    while left:
        left = {one for one in left if not server.has_data(one[1], one[2])}
        assert not left or time.monotonic() < end, "no data:\n" + "\n".join(map(str, left))
        time.sleep(0.5)


def check_variables(server: Prometheus, job: str) -> None:
    """The job, its hosts and the late rank can be selected."""
    for path in DASHBOARDS:
        for name, (series, label) in deployed.variables(path).items():
            words = {"match[]": filled(series, job)}
            values = server.ask(f"label/{label}/values", **words)
            expected = {"job": {job}, "host": set(HOSTS), "rank": {"1"}}[name]
            assert expected <= set(values), (path.stem, name, values)


def check_rules(server: Prometheus, job: str) -> None:
    """All rules work, and the alerts are about rank 1."""
    groups = server.ask("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}, rules

    def straggler() -> set[tuple[str, str]]:
        alerts = [alert["labels"] for alert in server.ask("alerts")["alerts"]]
        named = [alert for alert in alerts if alert["alertname"] == "GradwireStraggler"]
        return {(alert["gradwire_job"], alert["rank"]) for alert in named}

    assert until("an alert, at least pending", straggler) == {(job, "1")}


def test_every_query_returns_data(tmp_path: Path) -> None:
    where = programs()
    file, http = "file_sd_configs", "http_sd_configs"
    with job(tmp_path) as (name, coordinator):
        expected = {(name, host, str(node)) for node, host in enumerate(HOSTS)}
        # As in deploy/: targets found in both ways appear once.
        with prometheus(tmp_path, where, coordinator, file, http) as server:
            until("both targets are read", lambda: server.up() == expected)
        with prometheus(tmp_path, where, coordinator, file) as server:
            until("both targets are read", lambda: server.up() == expected)
        with prometheus(tmp_path, where, coordinator, http) as server:
            until("both targets are read", lambda: server.up() == expected)
            check_queries(server, name)
            check_variables(server, name)
            check_rules(server, name)
