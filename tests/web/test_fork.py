"""Forks on the page: from an event, from the step that failed, and beside the run that they are from."""

from urllib.parse import quote, unquote

import pytest
from playwright.async_api import Browser, Page, expect

from tests.web.browser import PHONE, open_page
from tests.web.site import HOSTILE, Site
from tests.web.test_access import barriers


async def completed(page: Page, site: Site, run_id: str, by: str) -> None:
    """Approve a run in this name, and wait on its page for its end."""
    await site.send(run_id, "approval", {"approved": True, "by": by})
    await expect(page.locator(".head-marks")).to_contain_text("Completed")


async def forked(page: Page, site: Site) -> tuple[str, str]:
    """Fork an order on the page where it waited for its approval, and approve the fork in another name."""
    run_id = await site.start("order", order_id="o-1")
    await page.goto(f"/runs/{run_id}")
    await completed(page, site, run_id, "ann")
    [waiting] = [event for event in await site.events(run_id) if event["event_type"] == "SignalWaiting"]
    await page.locator(f'.log-row[data-seq="{waiting["run_seq"]}"] .log-line').click()
    await page.get_by_role("button", name="Fork from here").click()
    dialog = page.get_by_role("dialog", name=f"Fork at event {waiting['run_seq']}")
    await dialog.get_by_role("button", name="Fork").click()
    await expect(page.locator(".head-facts")).to_contain_text("Forked from")
    fork_id = unquote(page.url.rpartition("/")[2])
    assert fork_id != run_id
    await completed(page, site, fork_id, "bob")
    return run_id, fork_id


@pytest.mark.contract("WF-2")
async def test_a_run_is_forked_at_an_event_and_compared_with_the_one_it_is_from(page: Page, site: Site) -> None:
    run_id, fork_id = await forked(page, site)
    await page.get_by_role("link", name="Compare").click()
    difference = (await site.http.get(f"/v1/runs/{run_id}/diff?other_run_id={quote(fork_id, safe='')}")).json()
    parts_at = difference["parts_at"]
    await expect(page.locator(".compared-verdict")).to_contain_text(f"part at event {parts_at}")
    await expect(page.locator(".compared-mark")).to_have_count(1)
    row = page.locator(".compared-mark + .compared-row")
    for side, name in (("left", "ann"), ("right", "bob")):
        cell = row.locator(f'[data-side="{side}"]')
        await expect(cell.locator(".log-seq")).to_have_text(str(parts_at))
        await cell.locator("> summary").click()
        await expect(cell).to_contain_text(name)
    same = page.locator('.compared-row[data-parted="false"]')
    await expect(same).to_have_count(min(5, parts_at - 1))
    if parts_at > 6:
        await page.get_by_role("button", name="From the first event").click()
        await expect(same).to_have_count(parts_at - 1)
    assert await page.evaluate("window.hit") is None
    assert await barriers(page) == []
    names = page.locator(".compared-run h2 a")
    assert [await names.nth(n).get_attribute("title") for n in (0, 1)] == [run_id, fork_id]
    for n, side in enumerate(("left", "right")):  # each name stands above its history
        cells = await page.locator(f'.compared-row [data-side="{side}"]').first.bounding_box()
        title = await names.nth(n).bounding_box()
        assert cells is not None
        assert title is not None
        assert cells["x"] <= title["x"] < cells["x"] + cells["width"]
    await names.first.click()
    await expect(page.locator(".head-marks")).to_contain_text("Completed")


async def test_a_failed_run_goes_on_from_the_failed_step_by_one_click(page: Page, site: Site) -> None:
    run_id = await site.start("hostile", text=HOSTILE)
    await page.goto(f"/runs/{run_id}")
    primary = page.locator(".run-head-card .button.primary")
    await expect(primary).to_have_text("Retry from where it failed")  # no step has, but the workflow
    await expect(page.get_by_role("button", name="Retry from the start")).to_be_hidden()
    await primary.click()
    await expect(page.locator(".head-facts")).to_contain_text("Attempt 2, after")
    retry_id = unquote(page.url.rpartition("/")[2])
    [queued, *_] = await site.events(quote(retry_id, safe=""))
    assert queued["data"]["retry_of"]["run_id"] == run_id
    await page.get_by_role("link", name="Compare").click()
    await expect(page.locator(".compared-row").first).to_be_visible()
    assert await page.evaluate("window.hit") is None


async def test_failed_runs_go_on_from_their_failed_steps_in_bulk(page: Page, site: Site) -> None:
    """One that has not failed is left out, and the page says so."""
    failed = [await site.start("hostile", reference=f"F-{number}", text=HOSTILE) for number in range(2)]
    done = await site.start("wide", reference="DONE", steps=2)
    await page.goto("/runs")
    await page.get_by_role("checkbox", name="Select DONE").check()
    await page.get_by_label("More for the selected runs").click()
    heights = [await item.bounding_box() for item in await page.locator(".bulk .menu-item").all()]
    assert len({round(box["height"]) for box in heights if box}) == 1, "a command is one line"
    await page.keyboard.press("Escape")
    for name in ("F-0", "F-1"):
        await page.get_by_role("checkbox", name=f"Select {name}").check()
    await page.get_by_role("button", name="Retry from the failed step…").click()
    dialog = page.get_by_role("dialog", name="Continue failed runs")
    await expect(dialog.locator(".preview")).to_contain_text("2 of 3 runs are concerned; 1 not: it has not failed.")
    await dialog.get_by_role("button", name="Retry from the failed step: 2 runs").click()
    await expect(page.get_by_text("2 continued as new runs; 1 left alone: it has not failed.")).to_be_visible()
    for run_id, count in ((failed[0], 1), (failed[1], 1), (done, 0)):
        found = (await site.http.get(f"/v1/runs?tag=retry_of:{run_id}")).json()["items"]
        assert len(found) == count, run_id
    await page.goto("/runs?status=FAILED")
    for name in ("F-0", "F-1"):  # somebody else finds them as failed as before
        await page.locator(f'.run-row:has([href="/runs/{failed[int(name[-1])]}"])').get_by_role("checkbox").check()
    await page.get_by_role("button", name="Retry from the failed step…").click()
    again = "0 of 2 runs are concerned; 2 not: it was done again already."
    await expect(dialog.locator(".preview")).to_contain_text(again)
    await expect(dialog.get_by_role("button", name="Retry from the failed step: 0 runs")).to_be_disabled()


async def test_a_failed_run_that_was_done_again_says_by_which_and_is_not_done_a_second_time(
    browser: Browser, site: Site
) -> None:
    run_id = await site.start("hostile", text=HOSTILE)
    async with open_page(browser, site.address) as early, open_page(browser, site.address) as late:
        primary = early.locator(".run-head-card .button.primary")
        for page in (early, late):
            async with page.expect_response("**/mailbox*"):  # the last that it looks at by itself
                await page.goto(f"/runs/{run_id}")
            await expect(page.locator(".run-head-card .button.primary")).to_have_text("Retry from where it failed")
        await primary.click()
        await expect(early.locator(".head-facts")).to_contain_text("Attempt 2, after")
        made = unquote(early.url.rpartition("/")[2])
        await late.locator(".run-head-card .button.primary").click()
        await expect(late.get_by_text("It was done again meanwhile.")).to_be_visible()
        await expect(late.locator(".head-facts")).to_contain_text("Done again by")
        await expect(late.locator(".run-head-card .button.primary")).to_have_count(0)
        found = (await site.http.get(f"/v1/runs?tag=retry_of:{run_id}")).json()["items"]
        assert [run["run_id"] for run in found] == [made]
        await late.get_by_role("link", name=f"{run_id[:8]}…{run_id[-6:]}/{made.rpartition('/')[2][:10]}…").click()
        await expect(late.locator(".head-facts")).to_contain_text("Attempt 2, after")


async def test_runs_that_cannot_be_compared_say_why(browser: Browser, site: Site) -> None:
    run_id = await site.start("wide", steps=2)
    async with open_page(browser, site.address, size=PHONE) as page:
        await page.goto(f"/runs/{run_id}/compare/{run_id}")
        await expect(page.locator(".compared-verdict")).to_contain_text("the same")
        assert await page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        await page.goto(f"/runs/{run_id}/compare/nothing")
        await expect(page.locator(".state")).to_contain_text("nothing")
