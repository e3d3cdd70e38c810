"""The status page in a real browser, served by uvicorn from a status that changes.

Wants Chromium, which check.py installs where it may. There is no skipping: a page that nobody looked at is not tested.
"""

from __future__ import annotations

import contextlib
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests import browsing
from tests.swarm_status import EVIL, Swarm, make_block, make_status, make_worker

expect.set_options(timeout=60_000)  # a loaded machine draws slowly
PHONE = {"width": 375, "height": 812}


@contextlib.contextmanager
def visit(browser: Browser, swarm: Swarm, **options: Any) -> Iterator[tuple[Page, list[str]]]:
    """The page, live, and what its console complained of."""
    with browsing.visit(browser, swarm.url, **options) as (page, said):
        expect(page.locator("#f-uptime")).not_to_have_text("–")
        yield page, said


def test_it_shows_the_figures_and_stays_live(browser: Browser):
    swarm = Swarm(make_status())
    with swarm.serve(), visit(browser, swarm) as (page, said):
        expect(page.get_by_role("heading", level=1)).to_have_text("first")
        expect(page.locator("#ce")).to_have_text("1.612")
        expect(page.locator("#beside")).to_contain_text("2.430")
        expect(page.locator("#state")).to_have_text("training")
        expect(page.get_by_role("article")).to_have_count(3)
        expect(page.locator("#rows tr")).to_have_count(5)
        expect(page.locator("#kinds")).to_contain_text("790 MB")
        expect(page.locator("#headline-chart .scatterlayer path.js-line").first).to_be_attached()
        expect(page.locator(".card .scatterlayer path.js-line")).to_have_count(6)  # loss and composed headline of three blocks
        assert "0.93" not in page.inner_text("body") and "93 %" in page.inner_text("body")

        page.evaluate("window.unbroken = true")
        swarm.said = make_status() | {
            "headline_ce": 1.377,
            "state": "waiting",
            "blocks": [make_block(0, 13), make_block(1), make_block(2, 12, "starved")],
        }
        expect(page.locator("#ce")).to_have_text("1.377")
        expect(page.locator("#state")).to_have_text("waiting")
        expect(page.get_by_role("article").nth(0)).to_contain_text("13")
        expect(page.get_by_role("article").nth(2)).to_contain_text("starved")
        assert page.evaluate("window.unbroken"), "the page was loaded anew"
        assert said == []


def test_the_countdown_counts_also_between_messages(browser: Browser):
    swarm = Swarm(make_status())
    with swarm.serve(interval_s=60), visit(browser, swarm) as (page, _):
        shown = page.locator(".card [data-f=deadline]").first
        first = shown.inner_text()
        assert re.fullmatch(r"0:[0-4]\d", first)
        expect(shown).not_to_have_text(first, timeout=30_000)
        assert shown.inner_text() < first


def test_what_a_worker_says_is_text(browser: Browser):
    status = make_status()
    status["workers"].append(make_worker(0, EVIL))
    status["blocks"][0]["reason"] = status["reason"] = status["run"] = EVIL
    status["log"].insert(0, {"s_ago": 0.0, "text": f"</script><script>alert(2)</script>{EVIL}"})
    swarm = Swarm(status)
    with swarm.serve(), visit(browser, swarm) as (page, said):
        expect(page.locator("#rows")).to_contain_text(EVIL)
        for place in ("#refusals", "#log", "#run", "#reason", ".card"):
            expect(page.locator(place).first).to_contain_text(EVIL)
        assert page.locator("img, script:not([src])").count() == 0
        assert said == []
        html = urllib.request.urlopen(swarm.url).read().decode()
        assert EVIL not in html and "&lt;img" in html


def test_it_comes_back_when_the_coordinator_does(browser: Browser):
    swarm = Swarm(make_status())
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(contextlib.ExitStack())
        first.enter_context(swarm.serve())
        page, said = stack.enter_context(visit(browser, swarm))
        assert said == []
        first.close()
        expect(page.locator("#link")).to_contain_text("Connection lost, trying again")
        expect(page.locator("#ce")).to_have_text("1.612")
        swarm.said = make_status() | {"headline_ce": 1.299}
        stack.enter_context(swarm.serve())
        expect(page.locator("#ce")).to_have_text("1.299", timeout=60_000)
        expect(page.locator("#link")).to_be_hidden()
        assert all("net::ERR" in line for line in said), said  # the browser's own notes of the broken connection


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scroll(browser: Browser, scheme: Any, tmp_path: Path):
    status = make_status(workers=12)
    status["workers"].append(make_worker(0, "a-very-long-name-without-a-single-space-" * 4, "suspended"))
    status["run"] = "a_run_with_a_name_that_goes_on_" * 4
    swarm = Swarm(status)
    with swarm.serve(), visit(browser, swarm, viewport=PHONE, color_scheme=scheme, device_scale_factor=2, has_touch=True) as (page, said):
        expect(page.locator("#headline-chart path.js-line").first).to_be_attached()
        page.screenshot(path=tmp_path / "phone.png", full_page=True)
        for width in (PHONE["width"], 320, 703):
            page.set_viewport_size({"width": width, "height": 812})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 20, 24)"
        assert dark == (scheme == "dark")
        assert said == []


def test_a_large_swarm_stays_small_in_the_document(browser: Browser):
    status = make_status(blocks=64, workers=500)
    swarm = Swarm(status)
    with swarm.serve(), visit(browser, swarm) as (page, said):
        expect(page.locator("#rows tr")).to_have_count(100)
        expect(page.locator("#workers-shown")).to_contain_text("100 of 500")
        expect(page.locator(".tile")).to_have_count(64)
        page.get_by_label("Search workers").fill("lab-477")
        expect(page.locator("#rows tr")).to_have_count(1)
        page.get_by_label("Search workers").fill("block 2")
        expect(page.locator("#workers-shown")).to_contain_text("100 of 166")
        page.get_by_label("Block 63, training").click()
        expect(page.get_by_role("article", name="Block 63")).to_be_in_viewport()
        assert said == []


def test_a_run_that_has_just_begun(browser: Browser):
    nothing = dict.fromkeys(make_status()) | {"run": "first", "state": "waiting", "uptime_s": 0.0, "blocks": [], "workers": []}
    swarm = Swarm(nothing)
    with swarm.serve(), visit(browser, swarm) as (page, said):
        expect(page.locator("#blocks-empty")).to_be_visible()
        expect(page.locator("#workers-empty")).to_have_text("No worker has joined yet.")
        expect(page.locator("#ce")).to_have_text("–")
        assert "null" not in page.inner_text("body") and "NaN" not in page.inner_text("body") and "undefined" not in page.inner_text("body")
        swarm.said = make_status()
        expect(page.locator("#ce")).to_have_text("1.612")
        expect(page.locator("#rows tr")).to_have_count(5)
        assert said == []
