"""What the tests of the page share: one browser for each test, and a site that is up."""

from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser, Page

from tests.web.browser import browsing, looking
from tests.web.stage import Site, on_site


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    """Return a browser."""
    async with browsing() as browser:
        yield browser


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    """Return a site that is open to everybody."""
    async with on_site() as site, site.up():
        yield site


@pytest.fixture
async def page(browser: Browser, site: Site) -> AsyncIterator[Page]:
    """Return a page that shows nothing yet."""
    async with looking(browser, site.address) as page:
        yield page
