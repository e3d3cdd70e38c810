"""The browser in which pages are tested."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, which check.py installs where it may. There is no skipping: a page that nobody looked at is not tested."""
    from playwright.sync_api import sync_playwright

    from tests.browsing import BROWSERS

    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert path, "pages are tested in a browser: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
