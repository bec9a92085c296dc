"""A real browser for the tests: the system's Chromium, driven by Playwright, which is never asked to download one."""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright, expect

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""The first is Chromium without windows. Others draw a window around each new page, which takes four times as long."""

MISSING = f"the tests of the page need a browser: `apt-get install {NAMES[0]}`, or another of {', '.join(NAMES)}"
FLAGS = [
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

PATIENCE_MS = 20_000
expect.set_options(timeout=PATIENCE_MS)

DESK = {"width": 1440, "height": 900}
SMALL_DESK = {"width": 1280, "height": 720}
PHONE = {"width": 390, "height": 844}

SCREENS = [
    pytest.param(DESK, "dark", id="dark-desk"),
    pytest.param(PHONE, "light", id="light-phone"),
    pytest.param(DESK, "light", id="light-desk", marks=pytest.mark.soak),
    pytest.param(PHONE, "dark", id="dark-phone", marks=pytest.mark.soak),
]
"""Each size and each colour scheme once; `make soak` has every pair."""

EXPECTED = ("net::ERR_", "Failed to load resource")
"""What a browser logs about answers that are no success. The page handles those; everything else is a fault of it."""


def module(name: str) -> str:
    """Return the expression that imports a module of the page, in the page."""
    return f"""import(document.querySelector('script[src$="bundle.js"]').src.replace("bundle.js", "{name}"))"""


def chromium() -> str:
    """Return where the browser is. Without one the tests fail; they are not skipped in silence."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.fail(MISSING, pytrace=False)
    return found


@asynccontextmanager
async def open_browser() -> AsyncIterator[Browser]:
    """Run a browser."""
    flags = [*FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium(), args=flags)
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def open_page(
    browser: Browser, address: str, *, size: dict[str, int] = DESK, scheme: str = "light"
) -> AsyncIterator[Page]:
    """Open a page as somebody with a screen of this size. Whatever goes wrong in its scripts fails the test."""
    faults: list[str] = []

    def note(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not any(each in message.text for each in EXPECTED):
            faults.append(message.text)

    context = await browser.new_context(
        base_url=address,
        viewport={"width": size["width"], "height": size["height"]},
        color_scheme="dark" if scheme == "dark" else "light",
        has_touch=size is PHONE,
        locale="en-GB",
        timezone_id="UTC",
        reduced_motion="reduce",
    )
    page = await context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.on("console", note)
    page.on("pageerror", lambda error: faults.append(str(error)))
    try:
        yield page
    finally:
        await context.close()
    assert faults == [], faults
