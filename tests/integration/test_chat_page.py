"""The chat page in a real browser, over the real API and a made-up chain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from blocktrain.errors import ServingError
from blocktrain.serving.engine import Engine
from tests.browsing import visit
from tests.serving_net import Script, serve, wait_until

expect.set_options(timeout=20_000)
PHONE = {"width": 360, "height": 740}
EVIL = "<img src=x onerror=alert(1)>"
ASKED = len("User: hello\nAssistant:")


def say(page: Page, text: str) -> None:
    page.get_by_label("Your message").fill(text)
    page.get_by_role("button", name="Send").click()


def test_a_conversation_streams_and_shows_its_figures(browser: Browser, tmp_path: Path):
    script = Script(f" Good day 😀, {EVIL}\nUser:".encode(), prompt=ASKED)
    with serve(Engine(script, "first")) as served, visit(browser, served.url, viewport={"width": 1100, "height": 800}) as (page, said):
        expect(page.get_by_role("heading", level=1)).to_have_text("first")
        expect(page.locator("#state")).to_have_text("3 blocks up")
        assert page.locator("#mode option").all_text_contents() == ["exact", "sweep"]
        assert page.locator("#key-row").is_hidden()
        page.get_by_text("Settings").click()
        page.get_by_label("Mode").select_option("sweep")
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Seed").fill("7")
        say(page, "hello")
        expect(page.locator(".turn.assistant")).to_have_text(f"Good day 😀, {EVIL}")
        assert 6 < float(page.locator("#traversal").inner_text()) <= 8
        assert float(page.locator("#rate").inner_text()) > 0
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
        page.screenshot(path=tmp_path / "desktop.png")
        assert page.locator("img, script:not([src])").count() == 0
        assert said == []


def test_stop_frees_the_stream(browser: Browser):
    script = Script(b"abcdefghij" * 100, step_s=0.02)
    engine = Engine(script, "first")
    with serve(engine) as served, visit(browser, served.url) as (page, said):
        say(page, "hello")
        expect(page.locator(".turn.assistant")).to_contain_text("abcdef")
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_role("button", name="Stop")).to_be_disabled()
        assert wait_until(lambda: engine.streams == 0) < 1 and script.closed == 1
        expect(page.locator(".turn.assistant:not(.busy)")).to_have_count(1)
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".turn")).to_have_count(0)
        say(page, "again")
        expect(page.locator(".turn.assistant")).to_contain_text("abc")
        assert said == []


def test_it_asks_for_a_key_where_one_is_needed(browser: Browser):
    with serve(Engine(Script(prompt=ASKED), "first"), key="k" * 20) as served, visit(browser, served.url) as (page, _):
        expect(page.locator("#state")).to_have_text("key needed")
        page.get_by_label("Key").fill("wrong-wrong-wrong-wrong")
        say(page, "hello")
        expect(page.get_by_role("alert")).to_contain_text("Bearer KEY")
        expect(page.get_by_label("Your message")).to_have_value("hello")
        page.get_by_label("Key").fill("k" * 20)
        say(page, "hello")
        expect(page.locator(".turn.assistant")).to_contain_text("abcdefghij")
        expect(page.get_by_role("heading", level=1)).to_have_text("first")


def test_errors_are_told_and_long_chats_lose_their_beginning(browser: Browser):
    script = Script(b"abcdefg\nUser:" * 10)
    with serve(Engine(script, "first")) as served, visit(browser, served.url) as (page, said):
        for turn in range(4):
            say(page, f"number {turn}, of about thirty")
            expect(page.locator(".turn.assistant")).to_have_count(turn + 1)
            expect(page.get_by_role("button", name="Send")).to_be_enabled()
        expect(page.locator("#note")).to_contain_text("left out")
        say(page, "x" * 100)
        expect(page.get_by_role("alert")).to_contain_text("64 positions")
        said.clear()
        script.error, script.error_at = ServingError("the stage of block 2 is gone"), 2
        page.get_by_label("Your message").fill("")
        say(page, "once more")
        expect(page.get_by_role("alert")).to_contain_text("the stage of block 2 is gone")
        script.missing, script.error = (2,), None
        page.reload()
        expect(page.locator("#state")).to_contain_text("block 2 missing")
        assert said == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scroll(browser: Browser, scheme: Any, tmp_path: Path):
    script = Script(b"a-word-without-an-end-" * 20, prompt=ASKED)
    name = "a_run_with_a_name_that_goes_on_" * 3
    with serve(Engine(script, name)) as served, visit(browser, served.url, viewport=PHONE, color_scheme=scheme, has_touch=True) as (page, said):
        say(page, "hello")
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
        expect(page.locator(".turn.assistant")).to_contain_text("a-word")
        page.get_by_text("Settings").click()
        page.screenshot(path=tmp_path / "phone.png")
        for width in (360, 320, 700):
            page.set_viewport_size({"width": width, "height": 740})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("main").bounding_box()["height"] > 150, "the answer can be read beside the settings"  # type: ignore[index]
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 20, 24)"
        assert dark == (scheme == "dark")
        assert said == []
