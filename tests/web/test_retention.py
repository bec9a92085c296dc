"""Retention on the page: what is kept, what would go, what went; and the page of a run that was archived."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

import holdfast as hf
from holdfast.engine.retention import unsealed
from holdfast.store.archive import Archive
from tests.web.browser import open_page
from tests.web.inbox_site import InboxSite, serve_inbox
from tests.web.test_health import panel_of


@pytest_asyncio.fixture(loop_scope="session")
async def inbox() -> AsyncIterator[InboxSite]:
    """Return a desk that is open to everybody."""
    async with serve_inbox() as inbox:
        yield inbox


@pytest_asyncio.fixture(loop_scope="session")
async def screen(browser: Browser, inbox: InboxSite) -> AsyncIterator[Page]:
    """Return a page at that desk."""
    async with open_page(browser, inbox.address) as page:
        yield page


@pytest.mark.contract("FMT-2")
async def test_what_would_go_and_what_went_is_shown_and_the_run_from_the_archive(
    screen: Page, inbox: InboxSite, tmp_path: Path
) -> None:
    run_id = await inbox.start("picking", steps=3)
    await inbox.until("/v1/runs", lambda items: len(items) == 1, status="COMPLETED")
    runtime = inbox.orchard.app.runtime()
    duty = runtime.retention
    duty.policy = hf.Retention(rules=(hf.RetentionRule(workflow="picking", finished=0),), audit=30)
    duty.archive = Archive(tmp_path, unsealed(runtime.store))
    await screen.goto("/health")
    panel = panel_of(screen, "Retention")
    await expect(panel).to_contain_text("Finished runs of picking0 days")
    await expect(panel).to_contain_text("audit30 days")
    await expect(panel).to_contain_text("No node looks after it. Histories are archived before they go.")
    await panel.get_by_role("button", name="What would go now?").click()
    await expect(panel.get_by_role("status")).to_contain_text("Runs1")
    assert (await duty.sweep()).archived == 1
    await screen.reload()
    await expect(panel).to_contain_text("runs 1, events")
    await screen.goto(f"/runs/{run_id}")
    await expect(screen.get_by_text("This run has been deleted by retention.")).to_be_visible()
    await expect(screen.locator(".archived-events li")).to_contain_text(["RunQueued", "RunStarted"])
    await screen.locator(".archived-events summary").first.click()
    await expect(screen.locator(".archived-events details").first).to_contain_text("picking")


async def test_a_run_that_is_nowhere_is_said_to_be_nowhere(screen: Page, inbox: InboxSite) -> None:
    await screen.goto("/runs/nowhere")
    await expect(screen.get_by_text("There is nothing here")).to_be_visible()
