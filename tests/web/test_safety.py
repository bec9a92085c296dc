"""What the page must never do: run what it shows, offer what is not allowed, or lose a session in silence."""

import pytest
from playwright.async_api import Browser, Page, expect

from holdfast.engine.start.requests import StartOptions
from holdfast.service.auth.tokens import TokenAccess, make_token
from tests.web.browser import module, open_page
from tests.web.site import HOSTILE, Orchard, Site, serve_site


async def test_what_looks_like_markup_is_shown_as_text(page: Page, site: Site) -> None:
    run_id = await site.start("hostile", reference=HOSTILE[:60], text=HOSTILE)
    await page.goto("/runs")
    await expect(page.locator(".row-error")).to_contain_text(HOSTILE)
    await page.goto(f"/runs/{run_id}")
    await expect(page.locator(".trouble .error-view")).to_contain_text(HOSTILE)
    await expect(page.get_by_role("group", name="Input")).to_contain_text("onerror")
    await page.get_by_role("button", name="reserve, Activity").click()
    await expect(page.locator(".detail")).to_contain_text("onerror")
    await expect(page.locator(".log-line").first).to_be_visible()
    for row in await page.locator(".log-line").all():
        await row.click()
    assert await page.evaluate("window.hit") is None
    assert await page.locator("main img, main script").count() == 0


async def test_an_address_that_is_none_of_ours_is_not_followed(page: Page, site: Site) -> None:
    await page.goto("/runs")
    given = ["javascript:alert(1)", " javascript:x", "data:text/html,x", "/runs", "https://a.b"]
    found = await page.evaluate(
        f"""async (given) => {{
            const {{ h }} = await {module("lib/dom.js")};
            return given.map((href) => h("a", {{ href }}).getAttribute("href"));
        }}""",
        given,
    )
    assert found == ["#", "#", "#", "/runs", "https://a.b"]


@pytest.mark.contract("API-4")
async def test_one_signs_in_with_a_token_and_is_offered_what_it_allows(browser: Browser) -> None:
    orchard = Orchard()
    async with serve_site(orchard=orchard, authenticate=TokenAccess(orchard.app, 0.0)) as site, site.up():
        store = orchard.app.runtime().store
        viewer, _ = await make_token(store, "vera", role="viewer")
        operator, record = await make_token(store, "otto", role="operator")
        order = orchard.app.registry.workflow("order", None)
        run = await orchard.app.runtime().start(
            order, order.signature.pack(("o-1",), {}), StartOptions(reference_key="ORD-1")
        )
        async with open_page(browser, site.address) as page:
            await page.goto(f"/runs/{run.run_id}")
            await page.get_by_label("Token").fill("holdfast_0000000000000000_no")
            await page.get_by_role("button", name="Sign in").click()
            await expect(page.get_by_role("alert")).to_contain_text("not known")
            await page.get_by_label("Token").fill(viewer)
            await page.get_by_role("button", name="Sign in").click()
            await expect(page.locator(".need")).to_contain_text("Waits for the signal")
            assert await page.locator(".run-head-card .button").count() == 0
            assert await page.locator(".need .button").count() == 0
            assert viewer not in await page.evaluate("document.cookie + JSON.stringify(localStorage)")
            await page.locator(".who summary").click()
            await page.get_by_role("button", name="Sign out").click()
            await page.get_by_label("Token").fill(operator)
            await page.get_by_role("button", name="Sign in").click()
            await expect(page.get_by_role("link", name="ORD-1")).to_be_visible()
            assert await page.get_by_role("button", name="Start a run").count() == 0
            await page.get_by_role("link", name="ORD-1").click()
            await page.locator(".run-head-card").get_by_role("button", name="Pause").click()
            await page.get_by_role("dialog").get_by_role("button", name="Pause").click()
            await expect(page.locator(".head-marks")).to_contain_text("Paused")
            await page.locator(".run-head-card").get_by_role("button", name="Resume").click()
            resume = page.locator("dialog button", has_text="Resume")
            await expect(resume).to_be_visible()
            await page.context.clear_cookies()
            await resume.dispatch_event("click")  # the page may have noticed by itself
            await expect(page.get_by_text("Your session has ended")).to_be_visible()
            await page.get_by_label("Token").fill(operator)
            await page.get_by_role("button", name="Sign in").click()
            await expect(page.locator(".head-marks")).to_contain_text("Paused")
        events = await store.read_events(run.run_id)
        assert [e.data.actor for e in events if e.event_type == "SignalAccepted"] == ["otto"]  # type: ignore[attr-defined]
        assert record.name == "otto"
