"""The pictures of the status page in Debian's Chromium, with an invented job of 256 ranks.

With GRADWIRE_PICTURES=1 the test of the pictures for the documentation writes them to `docs/`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browsing
import invented_job
import pytest
from browsing import PATIENCE, Browser
from deployed import ROOT
from invented_job import FAILURE, STRAGGLER, serving
from test_status_page import SHOTS, shows, violations

playwright = pytest.importorskip("playwright.sync_api")

FEW, MANY = 2, 32
SIZES = [(theme, width) for theme in ("light", "dark") for width in (1440, 390)]


@pytest.fixture
def browser() -> Iterator[Browser]:
    with browsing.browser() as found:
        yield found


def drawn(page: Any) -> list[int]:
    """How many pixels of each chart are not transparent."""
    script = """() => [...document.querySelectorAll('.uplot canvas')].map((canvas) => {
        const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        return data.filter((value, at) => at % 4 === 3 && value > 0).length;
    })"""
    counts: list[int] = page.evaluate(script)
    return counts


def settled(page: Any) -> None:
    """Waits until the charts are drawn."""
    shows(page, "#connection", "live")
    playwright.expect(page.locator(".uplot canvas")).to_have_count(6, timeout=PATIENCE)
    page.wait_for_function("document.querySelectorAll('#charts li').length >= 6")


def fits(value: Any, schema: dict[str, Any], defs: dict[str, Any]) -> None:
    """Checks that objects have exactly the keys of their schema."""
    if value is None:
        return
    schema = next(it for it in schema.get("oneOf", [schema]) if it != {"type": "null"})
    if "$ref" in schema:
        schema = defs[schema["$ref"].rpartition("/")[2]]
    if isinstance(value, list):
        for item in value:
            fits(item, schema["items"], defs)
    if isinstance(value, dict):
        assert set(value) == set(schema["required"]), value
        for key, item in value.items():
            fits(item, schema["properties"][key], defs)


def test_the_invented_job_looks_like_a_real_one() -> None:
    schema = json.loads((ROOT / "docs" / "status.schema.json").read_text())
    for failed in (False, True):
        fits(invented_job.status(FEW, failed=failed), schema, schema["$defs"])


def test_a_large_job_fits_every_screen(browser: Browser) -> None:
    with serving(MANY) as job:
        for theme, width in SIZES:
            page = browser.open(job.url, theme, width)
            settled(page)
            assert min(drawn(page)) > 1000, drawn(page)
            shows(page, "#charts", f"rank {STRAGGLER}: ")
            shows(page, "#charts", "node00 to node01: ")
            label = page.locator(".plot").first.get_attribute("aria-label")
            assert re.match(r"Time per step. slowest rank: \d+ ms now, ", label), label
            bars = page.locator("#bars button")
            assert bars.count() == 64
            # The rank that the others wait for is the first one, and computes.
            assert bars.first.get_attribute("aria-label").startswith(
                f"rank {STRAGGLER} on node00, slow: computes 96 %"
            )
            shows(page, "#bars-legend", "64 of 256 ranks")
            shows(page, "#bars li >> nth=1", "waits for other ranks")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate("document.documentElement.scrollHeight") < 10_000
            assert violations(page) == [], (theme, width)
            page.screenshot(path=SHOTS / f"large-{theme}-{width}.png", full_page=True)


def test_the_parts_of_a_bar_are_its_times(browser: Browser) -> None:
    with serving(FEW) as job:
        page = browser.open(job.url, "light", 1440)
        settled(page)
        script = "(bar) => [...bar.children].map((part) => part.clientWidth / bar.clientWidth)"
        for at, number in [(0, STRAGGLER), (1, 0)]:
            parts = page.locator(".bar").nth(at).evaluate(script)
            times = invented_job.rank(number)["time"]
            names = ["compute", "ranks", "negotiation", "transfer", "copies"]
            assert parts == pytest.approx([times[name] for name in names], abs=0.01), number


def test_the_keyboard_reaches_every_picture(browser: Browser) -> None:
    with serving(MANY) as job:
        page = browser.open(job.url, "light", 1440)
        settled(page)
        bar = page.locator("#bars button").first
        bar.focus()
        page.keyboard.press("Enter")
        shows(page, "#rank-title", f"Rank {STRAGGLER} on node00")
        assert page.evaluate("document.activeElement.id") == "rank-title"
        shows(page, "#rank-state", "Process 40005 is running, 97 % of a core.")
        shows(page, "#rank-operations", "in flight")
        shows(page, "#rank-stacks", "train.py:81 in augment")
        assert violations(page) == []
        page.screenshot(path=SHOTS / "rank.png", full_page=True)
        page.keyboard.press("Tab")
        page.keyboard.press("Escape")
        assert not page.locator("#rank").is_visible()
        assert page.evaluate("document.activeElement.className") == "slow"
        # The same from the table of a host.
        page.locator("#hosts button").nth(1).focus()
        page.keyboard.press("Enter")
        page.locator("#host tbody button").first.focus()
        page.keyboard.press("Enter")
        shows(page, "#rank-title", "Rank 8 on node01")
        # The sentence behind an algorithm.
        reason = page.locator("#choices details p").first
        assert not reason.is_visible()
        page.locator("#choices summary").first.focus()
        page.keyboard.press("Enter")
        assert reason.is_visible()
        shows(page, "#choices tbody tr >> nth=0", re.compile(r"ring.*9\.8 ms\s*10 ms"))


def test_a_failure_is_red_and_told_once(browser: Browser) -> None:
    with serving(MANY) as job:
        pages = {size: browser.open(job.url, *size) for size in SIZES}
        for page in pages.values():
            settled(page)
        job.failed.set()
        for (theme, width), page in pages.items():
            shows(page, "[role=alert]", "The job failed (rank 9, host node01")
            text = page.locator("body").inner_text()
            assert text.count(FAILURE["what"]) == 1, text
            host = page.locator("#hosts button").nth(1)
            shows(page, "#hosts button.failed", "failed")
            assert page.locator("#hosts button.failed").count() == 1
            red = host.evaluate("(it) => getComputedStyle(it).backgroundColor")
            channels = [int(it) for it in re.findall(r"\d+", red)]
            assert channels[0] > 150 > 60 > max(channels[1:]), red
            assert page.locator(".rank.failed").count() == 1
            assert page.locator("#bars button").first.get_attribute("class") == "failed"
            # The charts stay.
            assert min(drawn(page)) > 1000
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert violations(page) == [], (theme, width)
            page.screenshot(path=SHOTS / f"large-failed-{theme}-{width}.png", full_page=True)


def test_the_pictures_of_the_docs_are_made(browser: Browser) -> None:
    folder = ROOT / "docs" if os.environ.get("GRADWIRE_PICTURES") else SHOTS
    with serving(FEW) as job:
        page = browser.open(job.url, "light", 1200)
        settled(page)
        page.locator("#bars-title").scroll_into_view_if_needed()
        small(page, folder / "status-page.png", 1290)
        job.failed.set()
        shows(page, "[role=alert]", "The job failed")
        small(page, folder / "status-page-failed.png", 640)


def small(page: Any, path: Path, height: int) -> None:
    """Writes the top of a page as a picture that is small enough for the repository."""
    clip = {"x": 0, "y": 0, "width": 1200, "height": height}
    page.screenshot(path=path, clip=clip, full_page=True, animations="disabled")
    assert path.stat().st_size < 200_000, path
