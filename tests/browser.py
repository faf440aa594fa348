"""A real browser without a screen: the system's Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

#: `make chromium` installs it.
CHROMIUM = shutil.which("chromium")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start Chromium; skip the test where there is none."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: make chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
