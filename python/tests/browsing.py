"""Debian's Chromium, for the tests of web pages."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from deployed import ROOT
from launching import LIMIT

# The time limit for something to appear, in milliseconds.
PATIENCE = LIMIT * 1000


@functools.cache
def chromium() -> str:
    """The path of Chromium; skips the test if it can't be installed."""
    done = subprocess.run(
        [str(ROOT / "scripts" / "chromium.sh")], capture_output=True, text=True, timeout=LIMIT * 4
    )
    if done.returncode == 3:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class Browser:
    """Pages in Chromium, which must load nothing from other hosts and have no errors."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser
        self.faults: list[str] = []

    def open(self, url: str, theme: str = "light", width: int = 1200) -> Any:
        """A separate page, with this colour scheme and width."""
        context = self.browser.new_context(
            color_scheme=theme, viewport={"width": width, "height": 900}
        )
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        page.on("pageerror", lambda error: self.faults.append(f"{url}: {error}"))

        def requested(request: Any) -> None:
            if urlsplit(request.url).netloc != urlsplit(url).netloc:
                self.faults.append(f"{url} loads {request.url}")

        page.on("request", requested)
        page.goto(url)
        return page


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A browser, which is closed afterwards."""
    playwright = pytest.importorskip("playwright.sync_api")
    program = chromium()
    # Its sandbox does not work for root.
    words = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=program, args=words)
        try:
            found = Browser(started)
            yield found
            assert found.faults == []
        finally:
            started.close()
