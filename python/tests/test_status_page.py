"""The status page of real jobs in Debian's Chromium, including its accessibility."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browsing
import pytest
from browsing import PATIENCE, Browser
from deployed import ROOT
from launching import LAUNCHER, LIMIT, free_ports, running, until
from slow_job import NAME, job

playwright = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.base")

# Screenshots of the last run are kept here.
SHOTS = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "status-page"


@pytest.fixture
def browser() -> Iterator[Browser]:
    with browsing.browser() as found:
        yield found


def violations(page: Any) -> list[str]:
    """The accessibility violations that axe finds on the current page."""
    # The page's policy forbids external scripts, so the debugger runs this one.
    session = page.context.new_cdp_session(page)
    script = Path(axe.AXE_FILE_PATH).read_text()
    session.send("Runtime.evaluate", {"expression": script + "\n;0"})
    words = {"expression": "axe.run()", "awaitPromise": True, "returnByValue": True}
    answer = session.send("Runtime.evaluate", words)
    assert "exceptionDetails" not in answer, answer
    found = answer["result"]["value"]
    assert len(found["passes"]) > 30, found["passes"]
    return [f"{one['id']}: {one['nodes'][0]['html']}" for one in found["violations"]]


def shows(page: Any, selector: str, text: str | re.Pattern[str]) -> None:
    playwright.expect(page.locator(selector)).to_contain_text(text, timeout=PATIENCE)


def test_the_page_names_straggler_and_failure(browser: Browser, tmp_path: Path) -> None:
    with job(tmp_path) as (launcher, port):
        url = f"http://127.0.0.1:{port}/"
        pages = {}
        for theme, width in [("light", 1200), ("dark", 1200), ("light", 400), ("dark", 400)]:
            page = browser.open(url, theme, width)
            shows(page, "#summary", re.compile(r"Straggler\s*rank 3"))
            shows(page, "#summary", "running")
            shows(page, "#stragglers tbody tr.slow", "3 (straggler)")
            shows(page, "#busiest", "127.0.0.2")
            shows(page, "#map td.heat >> nth=1", "%")
            shows(page, "#decisions", "predicted")
            shows(page, "#choices summary >> nth=0", re.compile(r"^[a-z-]+$"))
            shows(page, "#bars button >> nth=0", re.compile(r"rank 3.*computes"))
            shows(page, "#bars button >> nth=1", re.compile(r"rank 0.*waits for other ranks"))
            shows(page, "#charts", "slowest rank: ")
            shows(page, "#charts", "127.0.0.1 to 127.0.0.2")
            shows(page, "#events", "the world is complete")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert violations(page) == [], (theme, width)
            page.screenshot(path=SHOTS / f"{theme}-{width}.png", full_page=True)
            pages[theme, width] = page

        # With the keyboard: the first host, the one to its right, and its ranks.
        page = pages["light", 1200]
        page.locator("#hosts button").first.focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        shows(page, "#host h3", "Host 127.0.0.2")
        shows(page, "#host tbody tr.slow th", "3")
        assert page.evaluate("document.activeElement.textContent").startswith("127.0.0.2")
        assert violations(page) == []

        # What a rank does now. Everybody on this host can see the page, so it has no stacks.
        page.locator("#bars button").first.press("Enter")
        shows(page, "#rank-title", "Rank 3 on 127.0.0.2")
        shows(page, "#rank-state", re.compile(r"Process \d+ is .*It has submitted \d+ operations"))
        shows(page, "#rank-operations", NAME)
        shows(page, "#rank-no-stacks", "set metrics.token_file")
        assert page.locator("#rank-stacks li").count() == 0
        page.keyboard.press("Escape")

        # Names are never interpreted as markup.
        for selector in ("#pending", "#operations"):
            with contextlib.suppress(playwright.TimeoutError):
                page.locator(selector, has_text=NAME).wait_for(timeout=5000)
                break
        else:
            raise AssertionError("the tensor was never seen")
        assert page.locator("#markup").count() == 0

        os.kill(int((tmp_path / "pid2").read_text()), signal.SIGKILL)
        for (theme, width), page in pages.items():
            shows(page, "[role=alert]", "The job failed (rank 2, host 127.0.0.2")
            shows(page, "[role=alert]", "was killed by SIGKILL")
            assert page.locator("body").inner_text().count("was killed by SIGKILL") == 1
            shows(page, "#hosts button.failed", "127.0.0.2")
            assert page.locator(".rank.failed").count() == 1
            shows(page, "#connection", re.compile("the job is over"))
            assert violations(page) == [], (theme, width)
            page.screenshot(path=SHOTS / f"failed-{theme}-{width}.png", full_page=True)
        assert launcher.wait(LIMIT) != 0


def test_the_page_is_readable_with_256_nodes(browser: Browser, tmp_path: Path) -> None:
    [port] = free_ports(1)
    words = [LAUNCHER, "bench", "negotiation", "--nodes", "256", "--iters", "1000000"]
    words += ["--set", f"coordinator.metrics_listen=127.0.0.1:{port}"]
    with running(words, tmp_path / "log") as bench:

        def is_there() -> bool:
            assert bench.poll() is None, (tmp_path / "log").read_text()
            url = f"http://127.0.0.1:{port}/"
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=LIMIT) as answer:
                return bool(answer.status == 200)
            return False

        until("the coordinator shows its page", is_there)
        for theme, width in [("light", 1200), ("dark", 400)]:
            page = browser.open(f"http://127.0.0.1:{port}/", theme, width)
            shows(page, "#summary", re.compile(r"Hosts\s*256"))
            shows(page, "#busiest", "node")
            shows(page, "#decisions", "the world is complete: 256 nodes")
            assert page.locator("#hosts button").count() == 256
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            page.screenshot(path=SHOTS / f"256-{theme}-{width}.png", full_page=True)
            # No list grows with the size of the job.
            assert page.evaluate("document.documentElement.scrollHeight") < 10_000
            assert violations(page) == [], (theme, width)


def test_the_page_asks_for_the_token(browser: Browser, tmp_path: Path) -> None:
    token = "f" * 32
    (tmp_path / "token").write_text(token)
    words = ["--set", "metrics.listen=0.0.0.0:0"]
    words += ["--set", f"metrics.token_file={tmp_path / 'token'}"]
    with job(tmp_path, *words) as (launcher, port):
        page = browser.open(f"http://127.0.0.1:{port}/")
        shows(page, "#connection", "a token is required")
        assert not page.locator("#content").is_visible()
        assert violations(page) == []
        page.get_by_label("Token").fill("e" * 32)
        page.keyboard.press("Enter")
        shows(page, "#connection", "this is not the token of the job")
        page.get_by_label("Token").fill(token)
        page.get_by_role("button", name="Show the job").click()
        shows(page, "#summary", "rank 3")
        assert not page.locator("#sign-in").is_visible()
        assert token not in page.url
        # With a token the page also has stacks.
        page.locator("#bars button").first.press("Enter")
        shows(page, "#rank-stacks", "program.py:")
        shows(page, "#rank-output", re.compile(r"rank \d trains"))

        # The job ends successfully, and the page says so.
        (tmp_path / "end").touch()
        shows(page, "#connection", re.compile("the job is over"))
        shows(page, "#summary", "finished")
        assert launcher.wait(LIMIT) == 0, (tmp_path / "job.log").read_text()
