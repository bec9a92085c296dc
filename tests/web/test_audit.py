"""The audit log on the page: what was changed, by whom, and for whom it is not."""

import pytest
from playwright.async_api import Browser, expect

from tests.web.browser import open_page
from tests.web.inbox_site import serve_inbox, sign_in


@pytest.mark.contract("API-4")
async def test_the_audit_log_shows_what_was_changed_and_finds_it(browser: Browser) -> None:
    async with serve_inbox() as inbox:
        run_id = await inbox.start("sync", customer="a")
        await inbox.http.post(f"/v1/runs/{run_id}/cancel", json={"reason": "<b>enough</b>"})
        async with open_page(browser, inbox.address) as page:
            await page.goto("/audit")
            rows = page.locator("table.audit tbody tr")
            await expect(rows.filter(has_text="runs.start")).to_have_count(1)
            await expect(rows.filter(has_text="<b>enough</b>")).to_have_count(1)
            await page.get_by_label("Operation").fill("runs.cancel")
            await expect(rows).to_have_count(1)
            assert "operation=runs.cancel" in page.url
            await rows.get_by_role("link", name=run_id).click()
            await expect(page).to_have_url(f"{inbox.address}/runs/{run_id}")


@pytest.mark.contract("API-4")
async def test_who_may_not_see_the_audit_log_is_not_shown_the_way(browser: Browser) -> None:
    async with serve_inbox(is_guarded=True) as inbox:
        viewer, admin = await inbox.token("vic", "viewer"), await inbox.token("ann", "admin")
        for token, count in ((viewer, 0), (admin, 1)):
            async with open_page(browser, inbox.address) as page:
                await sign_in(page, token, "/runs")
                await expect(page.get_by_role("link", name="Runs", exact=True)).to_be_visible()
                await expect(page.get_by_role("link", name="Audit", exact=True)).to_have_count(count)
                await page.goto("/audit")
                if count == 0:
                    await expect(page.get_by_text("audit:read")).to_be_visible()
