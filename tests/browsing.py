"""A real browser for the tests of pages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from playwright.sync_api import Browser, Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@contextlib.contextmanager
def visit(browser: Browser, url: str, **options: Any) -> Iterator[tuple[Page, list[str]]]:
    """A page, and what its console complained of."""
    page = browser.new_page(**options)
    page.set_default_timeout(120_000)  # a loaded machine draws slowly
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: (said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.goto(url)
    yield page, said
    page.close()
