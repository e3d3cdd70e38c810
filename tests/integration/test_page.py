"""The status page in a real browser, served by uvicorn from a status that changes; then its routes without one.

Wants Chromium, which check.py installs where it may. There is no skipping: a page that nobody looked at is not tested.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import shutil
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from playwright.sync_api import Browser, Page, expect, sync_playwright

from blocktrain.swarm.dashboard import add_page, stream
from blocktrain.swarm.dashboard.metrics import prometheus_text

EVIL = "<img src=x onerror=alert(1)>"
PHONE = {"width": 375, "height": 812}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def decay(tokens: float, lowest: float, seed: int = 0) -> float:
    """A loss curve that looks like one."""
    return round(lowest + 3.2 * math.exp(-tokens / 9000) + 0.03 * math.sin(tokens / 900 + seed), 4)


def make_block(block: int, version: int = 12, state: str = "training") -> dict[str, Any]:
    curve = [[at, at * 3400, decay(at * 3400, 1.4 + 0.03 * (block % 7), block)] for at in range(version + 1)]
    return {
        "block": block,
        "version": version,
        "state": state,
        "participation": 0.93 if state == "training" else 0.4,
        "loss": curve[-1][2],
        "losses": curve,
        "participations": [[at, 0.5 + 0.5 * ((at * 7 + block) % 5) / 4] for at in range(version + 1)],
        "assigned": 2,
        "reported": 1,
        "pending": 0,
        "deadline_in_s": 42.0 if state == "training" else None,
        "tokens": version * 3400,
        "target_tokens": 81920,
        "reason": "waits for the last of 2 assigned workers" if state == "training" else "no live worker has room for this block",
        "bytes_down": 48_200_000,
        "bytes_up": 12_100_000,
    }


def make_worker(number: int, name: str | None = None, state: str = "live") -> dict[str, Any]:
    return {
        "worker": name or f"lab-{number}",
        "state": state,
        "blocks": [number % 3],
        "version": 12,
        "tokens_per_s": 5300.0 + 37 * number if state == "live" else None,
        "bytes_down": 48_200_000 + number,
        "bytes_up": 12_100_000,
        "updates": 7 + number % 4,
        "refusals": 0 if state == "live" else 3,
        "seen_s_ago": 1.2 if state == "live" else 340.0,
        "last": "block 0 at version 12: trained 100 steps, the update was taken" if state == "live" else "three refusals in a row: wait 600 s",
    }


def make_status(blocks: int = 3, workers: int = 5) -> dict[str, Any]:
    refusal = {"s_ago": 3.0, "worker": EVIL, "block": 0, "reason": f"norm 84.1 is more than 3 times the median 6.2 of 5 updates {EVIL}"}
    return {
        "run": "first",
        "run_id": "9f3c51aa07d24e0c",
        "config_digest": "4be1d0a9c2f7",
        "state": "training",
        "reason": "3 of 3 blocks have workers; the next headline is measured at version 32",
        "uptime_s": 4980.0,
        "tokens": 122_400,
        "target_tokens": 245_760,
        "headline_ce": 1.612,
        "headline_tokens": 122_400,
        "reference_ce": 1.41,
        "ngram_ce": 2.43,
        "headline": [[at * 12_240, decay(at * 4080, 1.55)] for at in range(11)],
        "blocks": [make_block(number) for number in range(blocks)],
        "interface": {"version": 31, "mode": "averaged"},
        "workers": [make_worker(number) for number in range(workers)],
        "refusals": [refusal, {"s_ago": 75.0, "worker": "lab-3", "block": 1, "reason": "the update is 4 versions behind, 3 are allowed"}],
        "log": [
            {"s_ago": 1.0 + 20 * at, "text": f"block {at % 3} is at version {12 - at // 3}: every live assignee has reported: 2 of 2 assigned"}
            for at in range(9)
        ],
        "updates": {"fresh": 20, "late": 2, "refused": 1, "too_old": 0},
        "bytes": {
            "down": 812_000_000,
            "up": 203_000_000,
            "by_kind": {"weights": 790_000_000, "updates": 201_000_000, "text": 21_000_000, "control": 3_000_000},
        },
    }


class Swarm:
    """What a coordinator would say, and the server that says it. Seconds to a deadline run; everything else changes when a test changes it."""

    def __init__(self, status: dict[str, Any]) -> None:
        self.said, self.began, self.calls = status, time.monotonic(), 0
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def status(self) -> dict[str, Any]:
        self.calls += 1
        passed = time.monotonic() - self.began
        blocks = [block | {"deadline_in_s": block["deadline_in_s"] and max(0.0, block["deadline_in_s"] - passed)} for block in self.said["blocks"]]
        return self.said | {"uptime_s": self.said["uptime_s"] + passed, "blocks": blocks}

    @contextlib.contextmanager
    def serve(self, interval_s: float = 0.1) -> Iterator[None]:
        app = FastAPI()
        add_page(app, self.status, interval_s=interval_s)
        server = uvicorn.Server(uvicorn.Config(app, port=self.port, log_level="critical", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield
        finally:
            server.should_exit = True
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert path, "the status page is tested in a browser: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextlib.contextmanager
def visit(browser: Browser, swarm: Swarm, **options: Any) -> Iterator[tuple[Page, list[str]]]:
    """The page, live, and what its console complained of."""
    page = browser.new_page(**options)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: (said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.goto(swarm.url)
    expect(page.locator("#f-uptime")).not_to_have_text("–")
    yield page, said
    page.close()


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
        assert re.fullmatch(r"0:[34]\d", first)
        expect(shown).not_to_have_text(first, timeout=3000)
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
        expect(page.locator("#ce")).to_have_text("1.299", timeout=15_000)
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
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
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


def read_events(swarm: Swarm, count: int) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{swarm.url}/v1/events", timeout=10) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        found: list[dict[str, Any]] = []
        while len(found) < count:
            line = response.readline().decode()
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
        return found


def test_the_status_is_made_once_for_all_listeners():
    swarm = Swarm(make_status())
    with swarm.serve(interval_s=0.25):
        began = time.monotonic()
        threads = [threading.Thread(target=read_events, args=(swarm, 4)) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert swarm.calls <= (time.monotonic() - began) / 0.25 + 2


def test_the_sixty_fifth_listener_is_turned_away_and_a_place_comes_free(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream, "MAX_LISTENERS", 2)
    swarm = Swarm(make_status())
    with swarm.serve():
        first, second = (urllib.request.urlopen(f"{swarm.url}/v1/events", timeout=10) for _ in range(2))
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{swarm.url}/v1/events", timeout=10)
        assert refused.value.code == 503 and "2 readers" in json.loads(refused.value.read())["error"]
        first.close()
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            with contextlib.suppress(urllib.error.HTTPError):
                urllib.request.urlopen(f"{swarm.url}/v1/events", timeout=10).close()
                break
            time.sleep(0.05)
        else:
            pytest.fail("the place of a listener who left was not given to another")
        second.close()


def test_a_status_that_fails_is_told_and_passes():
    swarm = Swarm({})
    with swarm.serve(), urllib.request.urlopen(f"{swarm.url}/v1/events", timeout=10) as response:
        lines = [response.readline().decode().strip() for _ in range(4)]
        assert "event: trouble" in lines and not any("KeyError" in line for line in lines)
        swarm.said = make_status()
        while not (line := response.readline()).startswith(b'data: {"run'):
            assert line


def test_a_quiet_stream_says_that_it_is_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream, "KEEP_ALIVE_S", 0.0)

    async def first_three() -> list[bytes]:
        events = stream.Watch(lambda: {"run": "first"}, 0.01).events()
        return [await anext(events) for _ in range(3)]

    retry, data, comment = asyncio.run(first_three())
    assert retry.startswith(b"retry: ") and comment.startswith(b": ")
    assert json.loads(data.removeprefix(b"data: ")) == {"run": "first", "blocks": [], "headline": []}


def test_long_curves_are_thinned_and_infinities_are_null():
    look = stream.take_look(lambda: {"headline_ce": math.inf, "headline": [[at, 1.0] for at in range(5001)]})
    assert look.status is not None and look.status["headline_ce"] is None
    curve = look.status["headline"]
    assert len(curve) <= stream.CURVE_POINTS + 1 and curve[0][0] == 0 and curve[-1][0] == 5000
    longer = stream.thin_curve([[at, 1.0] for at in range(5002)])
    assert curve[:-1] == longer[:-1], "a curve that grows keeps its points"


def test_headers_and_files():
    swarm = Swarm(make_status())
    with swarm.serve():
        for path in ("/", "/metrics", "/static/page.js", "/static/plotly.min.js"):
            with urllib.request.urlopen(swarm.url + path) as response:
                policy = response.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
                assert response.headers["X-Content-Type-Options"] == "nosniff"
        request = urllib.request.Request(f"{swarm.url}/static/plotly.min.js", headers={"Accept-Encoding": "gzip"})
        with urllib.request.urlopen(request) as response:
            assert "immutable" in response.headers["Cache-Control"] and response.headers["Content-Encoding"] == "gzip"
            tag = response.headers["ETag"]
        with pytest.raises(urllib.error.HTTPError, match="304"):
            urllib.request.urlopen(urllib.request.Request(f"{swarm.url}/static/page.js", headers={"If-None-Match": read_tag(swarm)}))
        assert tag != read_tag(swarm)
        for name in ("page.html", "..%2f__init__.py", "nothing.js"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"{swarm.url}/static/{name}")


def read_tag(swarm: Swarm) -> str:
    with urllib.request.urlopen(f"{swarm.url}/static/page.js") as response:
        return response.headers["ETag"]


def test_metrics():
    status = make_status()
    status["blocks"][1]["loss"] = math.nan
    status["workers"].append(make_worker(9, EVIL, "suspended"))
    text = prometheus_text(status).decode()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines['blocktrain_block_version{block="0"}']) == 12
    assert float(lines['blocktrain_workers{state="live"}']) == 5 and float(lines['blocktrain_workers{state="suspended"}']) == 1
    assert float(lines['blocktrain_bytes_total{direction="down",kind="all"}']) == 812_000_000
    assert float(lines['blocktrain_updates_total{result="late"}']) == 2
    assert float(lines["blocktrain_refusals_total"]) == 3 and float(lines["blocktrain_headline_ce"]) == 1.612
    assert 'blocktrain_block_loss{block="1"}' not in lines and EVIL not in text
    assert "# TYPE blocktrain_updates_total counter" in text
