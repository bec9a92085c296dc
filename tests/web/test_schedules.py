"""Schedules on the page: when they tick, what they have started, and what can be done with them."""

from typing import Any

import pytest
from playwright.async_api import Browser, Locator, Page, expect

from holdfast.service.auth.tokens import TokenAccess, make_token
from tests.web.browser import SCREENS, open_page
from tests.web.site import HOSTILE, Orchard, Site, serve_site
from tests.web.test_access import barriers

NIGHTLY: dict[str, Any] = {"cron": "30 2 * * *", "tz": "Europe/Sofia", "input": {"order_id": "o-1"}}


def card(page: Page, schedule_id: str) -> Locator:
    """Return what is shown of a schedule."""
    return page.locator(".schedule", has=page.get_by_role("heading", name=schedule_id, exact=True))


def fact(page: Page, schedule_id: str, term: str) -> Locator:
    """Return one of the facts about a schedule."""
    return card(page, schedule_id).locator("dl > div", has=page.get_by_text(term, exact=True)).locator("dd")


async def test_schedules_are_listed_with_their_next_ticks_in_their_time_zone(page: Page, site: Site) -> None:
    await site.schedule("nightly", "order", **NIGHTLY)
    await site.schedule("often", "wide", every_s=5_400, overlap="queue")
    await site.schedule("once", "wide", at="2199-01-02T03:04:05Z")
    await page.goto("/runs")
    await page.get_by_role("navigation", name="Places").get_by_role("link", name="Schedules").click()
    await expect(page.locator(".schedule h2")).to_have_text(["nightly", "often", "once"])
    await expect(fact(page, "nightly", "Workflow")).to_have_text("order")
    await expect(fact(page, "nightly", "When")).to_contain_text("30 2 * * * in Europe/Sofia")
    ticks = fact(page, "nightly", "Next ticks").locator("li")
    await expect(ticks).to_have_count(5)
    await expect(ticks.last).to_contain_text("02:30:00")
    await expect(ticks.first).to_contain_text("in ")
    await expect(fact(page, "nightly", "Last run")).to_have_text("none yet")
    await expect(card(page, "nightly")).to_contain_text("Active")
    await expect(fact(page, "often", "When")).to_contain_text("every 1 h 30 min")
    await expect(fact(page, "often", "When")).to_contain_text("waits")
    await expect(fact(page, "once", "When")).to_contain_text("2199-01-02 03:04:05 in UTC")
    await expect(fact(page, "once", "When")).to_contain_text("03:04:05 in UTC")
    await expect(fact(page, "once", "Next ticks").locator("li")).to_have_count(1)


async def test_a_schedule_is_paused_with_a_note_and_resumed(page: Page, site: Site) -> None:
    await site.schedule("nightly", "order", **NIGHTLY)
    await page.goto("/schedules")
    await page.get_by_role("button", name="Pause nightly").click()
    dialog = page.get_by_role("dialog", name="Pause nightly?")
    await dialog.get_by_label("Note").fill(HOSTILE[:60])
    await dialog.get_by_role("button", name="Pause").click()
    await expect(card(page, "nightly")).to_contain_text("Paused")
    await expect(fact(page, "nightly", "Note")).to_have_text(HOSTILE[:60])
    await expect(fact(page, "nightly", "Next ticks")).to_have_text("none while it is paused")
    resume = page.get_by_role("button", name="Resume nightly")
    await expect(resume).to_be_focused()  # it stands where the other one was
    await resume.click()
    await expect(card(page, "nightly")).to_contain_text("Active")
    await expect(fact(page, "nightly", "Next ticks").locator("li")).to_have_count(5)
    assert await page.evaluate("window.hit") is None


async def test_a_run_that_is_triggered_is_linked_and_counted_while_it_goes_on(page: Page, site: Site) -> None:
    await site.schedule("nightly", "order", **NIGHTLY)
    await page.goto("/schedules")
    await expect(fact(page, "nightly", "Running")).to_contain_text("0 started")
    await page.get_by_role("button", name="Trigger now nightly").click()
    await expect(page.get_by_role("link", name="See it")).to_be_visible()
    await expect(fact(page, "nightly", "Running")).to_contain_text("1 started")
    await expect(fact(page, "nightly", "Running").get_by_role("link").first).to_have_text("1")
    [run] = (await site.http.get("/v1/runs?tag=schedule:nightly")).json()["items"]
    await fact(page, "nightly", "Running").get_by_role("link").first.click()
    await expect(page.locator(f'main a[href="/runs/{run["run_id"]}"]').first).to_be_visible()
    await page.go_back()
    await fact(page, "nightly", "Last run").get_by_role("link").click()
    await expect(page.locator(".head-facts")).to_contain_text("order")
    assert page.url.endswith(run["run_id"])
    await site.send(run["run_id"], "approval", {"approved": True, "by": "ann"})
    await page.goto("/schedules")
    await expect(fact(page, "nightly", "Running").get_by_role("link").first).to_have_text("0")


async def test_a_schedule_is_created_and_what_is_wrong_stands_beside_its_field(page: Page, site: Site) -> None:
    await page.goto("/schedules")
    await expect(page.locator(".state")).to_contain_text("No schedules yet")
    await page.get_by_role("button", name="Create a schedule").click()
    dialog = page.get_by_role("dialog", name="Create a schedule")
    await dialog.get_by_label("Workflow").select_option("order")
    await dialog.get_by_label("Order id").fill("o-7")
    create = dialog.get_by_role("button", name="Create")
    await create.click()
    await expect(dialog.locator("[data-name=schedule_id] .error")).to_have_text("Please fill this in.")
    await dialog.get_by_label("Id", exact=True).fill("morning")
    await dialog.get_by_label("Cron expression").fill("61 9 * * *")
    await create.click()
    await expect(dialog.locator("[data-name=cron] .error")).to_be_visible()
    await dialog.get_by_label("Cron expression").fill("0 9 * * MON-FRI")
    await dialog.get_by_label("Time zone").fill("Europe/Atlantis")
    await create.click()
    await expect(dialog.locator("[data-name=tz] .error")).to_contain_text("Atlantis")
    await dialog.get_by_label("Time zone").fill("Asia/Tokyo")
    await dialog.get_by_label("If a run still goes on").select_option("queue")
    await create.click()
    await expect(fact(page, "morning", "When")).to_contain_text("0 9 * * MON-FRI in Asia/Tokyo")
    await expect(dialog).to_have_count(0)
    await page.get_by_role("button", name="Create a schedule").click()
    await dialog.get_by_label("Id", exact=True).fill("morning")
    await dialog.get_by_label("Workflow").select_option("wide")
    await dialog.get_by_label("Interval").check()
    await dialog.get_by_label("Every").fill("2")
    await dialog.get_by_role("button", name="Edit as JSON").click()
    await dialog.get_by_label("Input as JSON").fill('{"steps": 4}')
    await create.click()
    await expect(dialog.get_by_role("alert").filter(has_text="morning")).to_be_visible()
    await dialog.get_by_label("Id", exact=True).fill("often")
    await create.click()
    await expect(fact(page, "often", "When")).to_contain_text("every 2 h")
    stored = {each["schedule_id"]: each for each in (await site.http.get("/v1/schedules")).json()["items"]}
    assert (stored["morning"]["overlap"], stored["often"]["every_s"]) == ("queue", 7_200)
    started = (await site.http.post("/v1/schedules/often/trigger", json={})).json()["run_id"]
    assert (await site.http.get(f"/v1/runs/{started}/result?wait_s=20")).json()["result"] == 4


async def test_when_a_schedule_ticks_is_changed_and_its_input_stays(page: Page, site: Site) -> None:
    await site.schedule("nightly", "wide", cron="30 2 * * *", tz="Europe/Sofia", input={"steps": 3}, catch_up_s=60)
    await page.goto("/schedules")
    await page.get_by_role("button", name="Change nightly").click()
    dialog = page.get_by_role("dialog", name="Change nightly")
    await expect(dialog.get_by_label("Cron expression")).to_have_value("30 2 * * *")
    await expect(dialog.get_by_label("Time zone")).to_have_value("Europe/Sofia")
    await dialog.get_by_label("Cron expression").fill("61 2 * * *")
    change = dialog.get_by_role("button", name="Change", exact=True)
    await change.click()
    await expect(dialog.locator("[data-name=cron] .error")).to_be_visible()
    await dialog.get_by_label("Interval").check()
    await dialog.get_by_label("Every").fill("90")
    await dialog.get_by_label("Unit").select_option("minutes")
    await dialog.get_by_label("If a run still goes on").select_option("allow")
    await change.click()
    await expect(fact(page, "nightly", "When")).to_contain_text("every 1 h 30 min")
    [stored] = (await site.http.get("/v1/schedules")).json()["items"]
    assert (stored["every_s"], stored["overlap"], stored["catch_up_s"], stored["cron"]) == (5_400, "allow", 60, "")
    started = (await site.http.post("/v1/schedules/nightly/trigger", json={})).json()["run_id"]
    assert (await site.http.get(f"/v1/runs/{started}/result?wait_s=20")).json()["result"] == 3
    await page.get_by_role("button", name="Change nightly").click()
    await expect(dialog.get_by_label("Every")).to_have_value("90")
    await expect(dialog.get_by_label("Unit")).to_have_value("60")


async def test_the_ticks_of_a_past_period_are_run(page: Page, site: Site) -> None:
    await site.schedule("often", "wide", every_s=3_600, input={"steps": 1}, overlap="allow")
    await page.goto("/schedules")
    await page.get_by_role("button", name="Backfill often").click()
    dialog = page.get_by_role("dialog", name="Backfill often")
    run = dialog.get_by_role("button", name="Run these ticks")
    await run.click()
    await expect(dialog.locator("[data-name=since] .error")).to_have_text("Please fill this in.")
    await dialog.get_by_label("From").fill("2026-01-05T09:30:00")
    await dialog.get_by_label("Until").fill("2026-01-05T12:30:00")
    await dialog.get_by_label("How").select_option("allow")
    await run.click()
    await expect(page.get_by_text("3 ticks are run.")).to_be_visible()
    await expect(fact(page, "often", "Running")).to_contain_text("3 started")
    await page.get_by_role("button", name="Backfill often").click()
    await dialog.get_by_label("From").fill("1990-01-05T09:30:00")
    await run.click()
    await expect(dialog.locator("[data-name=until] .error")).to_contain_text("at most 1000 ticks")


async def test_a_schedule_is_deleted_once_that_is_confirmed(page: Page, site: Site) -> None:
    await site.schedule("nightly", "order", **NIGHTLY)
    await site.schedule("a/b c", "wide", every_s=60)
    await page.goto("/schedules")
    await page.get_by_role("button", name="Delete a/b c").click()
    await page.get_by_role("dialog").get_by_role("button", name="Back").click()
    await expect(page.locator(".schedule")).to_have_count(2)
    await page.get_by_role("button", name="Delete a/b c").click()
    await page.get_by_role("dialog", name="Delete a/b c?").get_by_role("button", name="Delete").click()
    await expect(page.locator(".schedule h2")).to_have_text(["nightly"])
    await page.get_by_role("button", name="Delete nightly").click()
    assert (await site.http.post("/v1/schedules/nightly/delete", json={})).status_code == 200
    await page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    await expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("nightly")


async def test_what_fails_is_shown_until_it_works_again(page: Page, site: Site) -> None:
    await site.schedule("nightly", "order", **NIGHTLY)
    [shown] = (await site.http.get("/v1/schedules")).json()["items"]
    hurt = {**shown, "last_error": HOSTILE, "missed": 3, "skipped": 2, "next_ticks": []}
    await page.route("**/v1/schedules?*", lambda route: route.fulfill(json={"items": [hurt], "next": None}))
    await page.goto("/schedules")
    await expect(card(page, "nightly").locator(".problem")).to_contain_text(HOSTILE)
    await expect(fact(page, "nightly", "Missed")).to_contain_text("3")
    await expect(fact(page, "nightly", "Missed")).to_contain_text("2 skipped")
    await expect(card(page, "nightly")).to_contain_text("Ended")
    assert await page.evaluate("window.hit") is None
    await page.unroute("**/v1/schedules?*")
    refusal = {"code": "Internal", "status": 500, "detail": "the store is away"}
    await page.route("**/v1/schedules?*", lambda route: route.fulfill(status=500, json=refusal))
    await page.reload()
    await expect(page.locator(".state")).to_contain_text("the store is away")
    await page.unroute("**/v1/schedules?*")
    await expect(card(page, "nightly")).to_be_visible()


@pytest.mark.contract("API-4")
async def test_one_is_offered_what_the_token_allows(browser: Browser) -> None:
    orchard = Orchard()
    async with serve_site(orchard=orchard, authenticate=TokenAccess(orchard.app, 0.0)) as site, site.up():
        store = orchard.app.runtime().store
        tokens = {role: (await make_token(store, role, role=role))[0] for role in ("viewer", "operator", "engineer")}
        site.http.headers["authorization"] = f"Bearer {tokens['engineer']}"
        await site.schedule("nightly", "order", **NIGHTLY)
        offered: dict[str, list[str]] = {
            "viewer": [],
            "operator": ["Pause"],
            "engineer": ["Create a schedule", "Pause", "Trigger now", "Change", "Backfill", "Delete"],
        }
        for role in tokens:
            async with open_page(browser, site.address) as page:
                await page.goto("/schedules")
                await page.get_by_label("Token").fill(tokens[role])
                await page.get_by_role("button", name="Sign in").click()
                await expect(card(page, "nightly")).to_be_visible()
                await expect(page.locator("main .view button")).to_have_text(offered[role])


@pytest.mark.parametrize(("size", "scheme"), SCREENS)
async def test_it_has_no_barrier_and_fits(browser: Browser, site: Site, scheme: str, size: dict[str, int]) -> None:
    await site.schedule("nightly-" + "x" * 80, "order", **NIGHTLY)
    await site.schedule("paused", "wide", every_s=60)
    await site.http.post("/v1/schedules/paused/pause", json={"note": "until the audit is over"})
    async with open_page(browser, site.address, size=size, scheme=scheme) as page:
        await page.goto("/schedules")
        await expect(card(page, "paused")).to_be_visible()
        wide = await page.evaluate("document.documentElement.scrollWidth")
        assert wide <= size["width"], f"{wide} wide"
        assert await barriers(page) == []
        await page.get_by_role("button", name="Create a schedule").click()
        await expect(page.get_by_role("dialog").get_by_role("button", name="Edit as JSON")).to_be_visible()
        assert await barriers(page) == []
