"""Queries and updates of a run: the page finds which there are, makes forms of them, and shows the answers."""

import pytest
from playwright.async_api import Browser, Locator, Page, expect

from holdfast.service.auth.tokens import TokenAccess, make_token
from tests.web.browser import open_page
from tests.web.inbox_site import sign_in
from tests.web.site import Orchard, Site, serve_site


def card_of(page: Page) -> Locator:
    """Return the place of queries and updates."""
    return page.locator(".card", has=page.get_by_role("heading", name="Queries and updates"))


@pytest.mark.contract("WF-6")
async def test_a_run_is_asked_and_updated_by_forms(page: Page, site: Site) -> None:
    run_id = await site.start("basket")
    await page.goto(f"/runs/{run_id}")
    card = card_of(page)
    await expect(card).to_be_visible()
    recorded = len(await site.events(run_id))
    await card.get_by_role("button", name="Ask items").click()
    await expect(card.get_by_role("group", name="Answer to items")).to_contain_text("[]")
    assert len(await site.events(run_id)) == recorded
    await card.get_by_role("button", name="Update add").click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_label("Item").fill("nothing")
    await dialog.get_by_role("button", name="Update").click()
    await expect(dialog.get_by_role("alert")).to_contain_text("nothing cannot be added")
    await dialog.get_by_label("Item").fill("pear")
    await dialog.get_by_label("Count").fill("2")
    await dialog.get_by_role("button", name="Update").click()
    await expect(card.get_by_role("group", name="Answer to add")).to_contain_text("2")
    await expect(page.get_by_role("button", name="update add, Update, success")).to_have_count(1)
    await card.get_by_role("button", name="Ask matching").click()
    await dialog.get_by_label("Part").fill('"ea"')
    await dialog.get_by_role("button", name="Ask").click()
    await expect(card.get_by_role("group", name="Answer to matching")).to_contain_text('"pear"')
    await card.get_by_role("button", name="Update add").click()
    await dialog.get_by_label("Item").fill("plum")
    await dialog.get_by_role("button", name="Update").click()
    await expect(page.locator(".head-marks")).to_contain_text("Completed")
    await expect(card.get_by_role("button", name="Update add")).to_have_count(0)
    await card.get_by_role("button", name="Ask items").click()
    await expect(card.get_by_role("group", name="Answer to items")).to_contain_text('"plum"')


@pytest.mark.contract("API-4")
async def test_only_what_the_token_allows_is_offered(browser: Browser) -> None:
    orchard = Orchard()
    async with serve_site(orchard=orchard, authenticate=TokenAccess(orchard.app, 0.0)) as site, site.up():
        viewer, _ = await make_token(orchard.app.runtime().store, "vera", role="viewer")
        basket = orchard.app.registry.workflow("basket", None)
        run = await orchard.app.runtime().start(basket, basket.signature.pack((), {}))
        async with open_page(browser, site.address) as page:
            await sign_in(page, viewer, f"/runs/{run.run_id}")
            await card_of(page).get_by_role("button", name="Ask items").click()
            await expect(page.get_by_role("group", name="Answer to items")).to_be_visible()
            await expect(card_of(page).get_by_role("button", name="Update add")).to_have_count(0)
