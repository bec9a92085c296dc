"""What the tests of the page share: one browser for all tests of a process, and for each a site that is up."""

import inspect
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page

from tests.web.browser import open_browser, open_page
from tests.web.site import Site, serve_site

HERE = "tests/web/"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests that use the browser run in its loop, which is one for all of them."""
    for item in items:
        if item.nodeid.startswith(HERE) and isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    """Return a browser. What a test does in it is in a context of its own, and goes with that."""
    async with open_browser() as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="session")
async def site() -> AsyncIterator[Site]:
    """Return a site that is open to everybody."""
    async with serve_site() as site, site.up():
        yield site


@pytest_asyncio.fixture(loop_scope="session")
async def page(browser: Browser, site: Site) -> AsyncIterator[Page]:
    """Return a page that shows nothing yet."""
    async with open_page(browser, site.address) as page:
        yield page
