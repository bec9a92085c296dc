"""What a run writes to its streams, on its page: as it is written, with its new beginnings, and within bounds."""

import pytest
from playwright.async_api import Page, expect

from tests.web.site import HOSTILE, Site

SENTENCES = ["A run is durable.", "Its streams are too."]


@pytest.mark.contract("STR-1", "API-3")
async def test_streams_of_a_run_are_shown_as_they_are_written(page: Page, site: Site) -> None:
    run_id = await site.start("agent", sentences=SENTENCES)
    await page.goto(f"/runs/{run_id}")
    card = page.locator("section.card").filter(has=page.get_by_role("heading", name="Streams"))
    body = card.get_by_role("log")
    await expect(card.get_by_role("tab")).to_have_text(["answer", "progress"])
    await expect(body.locator(".stream-text").last).to_have_text("A run is durable. \nIts streams are too. \n")
    await expect(body.locator(".stream-mark")).to_contain_text("speak begins anew with attempt 2")
    await expect(body.locator("[data-void=true]")).to_have_text("A run is durable. \n")
    await site.send(run_id, "more")
    await expect(body.locator(".stream-text").last).to_have_text("One more thing.")
    await card.get_by_role("tab", name="progress").click()
    await expect(body.locator(".stream-row")).to_have_count(2)
    await expect(body.locator(".stream-row").first).to_contain_text('"asked":2')
    assert HOSTILE.replace('"', '\\"') in await body.inner_text()
    assert await page.evaluate("window.hit") is None
    await card.get_by_role("tab", name="progress").press("Shift+Tab")
    await site.send(run_id, "end")
    await expect(card.locator(".stream-state")).to_have_text("This is all.")


async def test_a_long_stream_is_shown_within_bounds_and_a_run_without_has_no_card(page: Page, site: Site) -> None:
    run_id = await site.start("lengthy", count=9_000)
    await page.goto(f"/runs/{run_id}")
    card = page.locator("section.card").filter(has=page.get_by_role("heading", name="Streams"))
    await expect(card.locator(".stream-row").last).to_have_text("8999")
    await expect(card.locator(".stream-state")).to_have_text("The first 7,000 chunks are left out. This is all.")
    assert await card.locator(".stream-row").count() == 2_000
    await page.goto(f"/runs/{await site.start('hostile', text='x')}")
    await expect(page.locator(".head-marks")).to_contain_text("Failed")
    await expect(page.get_by_role("heading", name="Streams")).to_have_count(0)
