"""The event bus on the page: how sinks do, and what was given up."""

import pytest
from playwright.async_api import Browser, Page, expect

from holdfast.core.bus import OutboxSettlement, Sink, SinkProgress, letter_of
from holdfast.service.auth.tokens import TokenAccess, make_token
from holdfast.store.queries import BusDeadLetterQuery, OutboxQuery
from holdfast.testing.samples import new_run
from tests.web.browser import open_page
from tests.web.site import HOSTILE, Orchard, Site, serve_site
from tests.web.test_access import barriers
from tests.web.test_health import panel_of

HOOK = Sink(name="hook", kind="webhook", address="https://example.com", secret="x", is_paused=True)


async def given_up(site: Site) -> None:
    """Let a paused sink have failed: events of two runs are given up, those of a third wait. The runs do nothing."""
    store = site.orchard.app.runtime().store
    await store.put_sink(HOOK)
    now = await store.now()
    await store.create([new_run(f"run-{number}", now=now, requires_approval=True) for number in (1, 2, 3)])
    entries = sorted(await store.find(OutboxQuery(sink="hook")), key=lambda entry: entry.run_id)
    for number, entry in enumerate(entries[:2]):
        letter = letter_of(HOOK, entry, HOSTILE, await store.now())
        progress = SinkProgress(failures=number + 2, error=HOSTILE, delivered=7)
        await store.settle_outbox("hook", [OutboxSettlement(entry=entry, letter=letter)], progress)


@pytest.mark.contract("BUS-1")
async def test_sinks_are_shown_and_what_was_given_up_is_requeued_or_dropped(page: Page, site: Site) -> None:
    store = site.orchard.app.runtime().store
    await page.goto("/health")
    panel = panel_of(page, "Event bus")
    await expect(panel).to_contain_text("There are no sinks.")
    await given_up(site)
    await page.reload()
    await expect(panel.locator(".nodes")).to_contain_text("hookwebhookpaused")
    await expect(panel.locator(".nodes")).to_contain_text("2 given up")
    await expect(panel.locator(".nodes")).to_contain_text("Failed 3 times in a row: <img")
    letters = panel.locator(".bus-letters li")
    await expect(letters).to_have_count(2)
    assert await barriers(page) == []
    await letters.filter(has_text="run-1").get_by_role("button", name="Requeue").click()
    await page.get_by_role("dialog").get_by_role("button", name="Requeue").click()
    await expect(letters).to_have_count(1)
    assert {entry.run_id for entry in await store.find(OutboxQuery(sink="hook"))} >= {"run-1", "run-3"}
    await letters.filter(has_text="run-2").get_by_role("button", name="Drop").click()
    await page.get_by_role("dialog").get_by_role("button", name="Back").click()
    await expect(letters).to_have_count(1)
    await letters.get_by_role("button", name="Drop").click()
    await page.get_by_role("dialog").get_by_role("button", name="Drop").click()
    await expect(letters).to_have_count(0)
    assert await store.find(BusDeadLetterQuery()) == []
    assert await page.evaluate("window.hit") is None


@pytest.mark.contract("API-4")
async def test_a_viewer_sees_what_was_given_up_and_no_buttons(browser: Browser) -> None:
    orchard = Orchard()
    async with serve_site(orchard=orchard, authenticate=TokenAccess(orchard.app, 0.0)) as site, site.up():
        await given_up(site)
        viewer, _ = await make_token(orchard.app.runtime().store, "vera", role="viewer")
        async with open_page(browser, site.address) as page:
            await page.goto("/health")
            await page.get_by_label("Token").fill(viewer)
            await page.get_by_role("button", name="Sign in").click()
            panel = panel_of(page, "Event bus")
            await expect(panel.locator(".bus-letters li")).to_have_count(2)
            assert await panel.get_by_role("button").count() == 0
