"""Runs as they happen: started, signalled and helped from the page, and watched across an outage."""

import asyncio
import json
import re
from datetime import UTC, datetime, timedelta

import pytest
from playwright.async_api import Browser, Page, Request, Route, expect

from tests.web.browser import open_page
from tests.web.site import Site, serve_site


async def numbers_of(page: Page) -> list[int]:
    """Return the numbers of the lines in the log, as they are shown."""
    texts = await page.locator(".log-row .log-seq").all_inner_texts()
    return sorted(int(text) for text in texts)


@pytest.mark.contract("API-3")
async def test_a_run_is_started_by_form_and_watched_to_its_end(page: Page, site: Site) -> None:
    await page.goto("/runs")
    await page.get_by_role("button", name="Start the first").click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_label("Workflow").select_option("order")
    await dialog.get_by_label("Order id").fill("o-1")
    await dialog.get_by_label("Reference").fill("ORD-1")
    await dialog.get_by_role("button", name="Start", exact=True).click()
    await expect(page.get_by_role("heading", name="ORD-1", level=1)).to_be_visible()
    await expect(page.locator(".need")).to_contain_text("Waits for the signal approval")
    run_id = page.url.partition("/runs/")[2]
    await site.send(run_id, "approval", {"approved": True, "by": "ann"})
    await expect(page.locator(".head-marks")).to_contain_text("Completed")
    await expect(page.get_by_role("group", name="Result")).to_contain_text("approved by ann")
    assert await numbers_of(page) == [event["run_seq"] for event in await site.events(run_id)]
    await expect(page.get_by_role("button", name="charge, Activity, success")).to_be_visible()


@pytest.mark.contract("SIG-9", "SIG-12")
async def test_a_signal_is_sent_by_a_form_made_from_its_schema_and_followed(page: Page, site: Site) -> None:
    run_id = await site.start("order", order_id="o-1")
    await page.goto(f"/runs/{run_id}")
    await page.get_by_role("button", name="Send it").click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_role("button", name="Send", exact=True).click()
    await expect(dialog.get_by_text("Please choose.")).to_be_visible()
    await dialog.get_by_role("radio", name="Yes").check()
    await dialog.get_by_label("By").fill("ann")
    await expect(dialog.get_by_role("radio", name="desk")).to_be_checked()
    await dialog.get_by_role("button", name="Send", exact=True).click()
    received = next(e["run_seq"] for e in await site.events(run_id) if e["event_type"] == "SignalWaiting") + 1
    await expect(page.get_by_text(f"The run took “approval” at event {received}.")).to_be_visible()
    await expect(page.locator(".head-marks")).to_contain_text("Completed")


@pytest.mark.contract("SIG-13", "ATT-2")
async def test_a_failed_step_is_shown_with_its_cause_and_tried_again(page: Page, site: Site) -> None:
    run_id = await site.start("courier", order_id="c-1")
    await page.goto(f"/runs/{run_id}")
    await expect(page.locator(".head-marks")).to_contain_text("Paused")
    error = page.locator(".trouble .error-view")
    await expect(error).to_contain_text("no courier serves this zone")
    await expect(error).to_contain_text("caused by KeyError")
    await expect(error.locator("pre").first).to_contain_text("in book_courier")
    await error.get_by_text("Whole traceback").first.click()
    await expect(error.locator("pre").nth(1)).to_contain_text("ValueError: no courier serves this zone")
    site.orchard.is_zoned = True
    await page.locator(".need").get_by_role("button", name="Retry step").click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_label("Reason").fill("the zone was opened")
    await dialog.get_by_role("button", name="Retry step").click()
    await expect(page.locator(".head-marks")).to_contain_text("Completed")
    await expect(page.locator(".steps")).to_contain_text("Retry #1")
    [accepted] = [e["data"] for e in await site.events(run_id) if e["event_type"] == "SignalAccepted"]
    assert (accepted["name"], accepted["reason"]) == ("RETRY_STEP", "the zone was opened")


@pytest.mark.contract("SIG-13")
async def test_of_a_run_that_a_failed_step_has_paused_the_retry_is_offered_and_the_error_only_by_its_name(
    page: Page, site: Site
) -> None:
    run_id = await site.start("courier", order_id="c-1")
    await page.goto(f"/runs/{run_id}")
    head = page.locator(".run-head-card")
    await expect(head.locator(".button.primary")).to_have_text("Retry step")
    await expect(head.get_by_role("button", name="Resume", exact=True)).to_have_count(0)
    await head.get_by_label("More actions").click()
    await head.get_by_role("button", name="Resume with the error").click()
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_contain_text("fails for good")
    await dialog.get_by_role("button", name="Back").click()
    site.orchard.is_zoned = True
    await head.get_by_role("button", name="Retry step").click()
    await dialog.get_by_role("button", name="Retry step").click()
    await expect(page.locator(".head-marks")).to_contain_text("Completed")


@pytest.mark.contract("SIG-13")
async def test_a_wait_is_skipped_without_a_result(page: Page, site: Site) -> None:
    run_id = await site.start("patient")
    await page.goto(f"/runs/{run_id}")
    await page.locator(".steps").get_by_role("button").first.click()
    await page.get_by_role("button", name="Skip step").click()
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_contain_text("the workflow gets null")
    await expect(dialog.get_by_label("Result for the workflow")).to_have_count(0)
    await dialog.get_by_role("button", name="Skip step").click()
    await expect(page.get_by_text("The step was skipped.")).to_be_visible()


@pytest.mark.contract("SIG-13")
async def test_a_run_is_paused_resumed_and_cancelled(page: Page, site: Site) -> None:
    run_id = await site.start("order", order_id="o-1")
    await page.goto(f"/runs/{run_id}")
    for word, status in (("Pause", "Paused"), ("Resume", "Running"), ("Pause", "Paused"), ("Cancel", "Cancelled")):
        await page.locator(".run-head-card").get_by_role("button", name=word).click()
        await page.get_by_role("dialog").get_by_role("button", name=word).click()
        await expect(page.locator(".head-marks")).to_contain_text(status)
    await expect(page.locator(".run-head-card").get_by_role("button", name="Retry")).to_be_visible()


@pytest.mark.contract("SIG-13")
async def test_a_run_that_waits_to_be_approved_says_so_and_is_approved_there(page: Page, site: Site) -> None:
    run_id = await site.start("weighty", cents=7)
    await page.goto(f"/runs/{run_id}")
    need = page.locator(".need")
    await expect(need).to_contain_text("Waits to be approved")
    await expect(page.locator(".head-marks")).to_contain_text("waits for approval")
    await expect(page.locator(".run-head-card .button.primary")).to_have_text("Approve")
    await need.get_by_role("button", name="Approve").click()
    await page.get_by_role("dialog").get_by_role("button", name="Approve").click()
    await expect(page.locator(".head-marks")).to_contain_text("Completed")
    await expect(need).to_have_count(0)
    await expect(page.locator(".run-head-card .button.primary")).to_have_count(0)  # nothing more needs to be done


@pytest.mark.contract("QUE-2")
async def test_a_queued_run_says_how_many_places_are_taken_and_which_one_it_is_in_line(page: Page, site: Site) -> None:
    runs = [await site.start("narrow", customer=name) for name in "abcd"]
    await page.goto(f"/runs/{runs[3]}")
    await expect(page.locator(".need")).to_contain_text("1 of 1 taken, 3rd in line")
    head = page.locator(".run-head-card")
    await expect(head.get_by_role("button", name="Signal")).to_be_visible()
    await expect(head.locator(".button.primary")).to_have_count(0)  # it waits for no signal
    await page.goto(f"/runs/{runs[0]}")
    await expect(head.locator(".button.primary")).to_have_text("Signal")
    await page.goto("/runs?status=PENDING")
    await expect(page.locator(".run-row").filter(has_text="Waits for a place, queued")).to_have_count(3)


@pytest.mark.contract("SIG-13")
async def test_a_run_that_is_resumed_and_paused_by_the_same_mistake_is_not_said_to_go_on(
    page: Page, site: Site
) -> None:
    run_id = await site.start("mistaken", shelf="A-17")
    await page.goto(f"/runs/{run_id}")
    await expect(page.locator(".error-view")).to_contain_text("KeyError")
    await page.locator(".run-head-card").get_by_role("button", name="Resume", exact=True).click()
    await page.get_by_role("dialog").get_by_role("button", name="Resume", exact=True).click()
    await expect(page.locator(".toast")).to_have_text("The run was resumed, and UnhandledError has paused it again.")


async def test_a_menu_stays_open_when_the_run_goes_on(page: Page, site: Site) -> None:
    run_id = await site.start("patient")
    await page.goto(f"/runs/{run_id}")
    await expect(page.locator(".run-head-card").get_by_role("button", name="Pause")).to_be_visible()
    await page.get_by_label("More actions").click()
    again = page.get_by_role("button", name="Start again with another input")
    await expect(again).to_be_visible()
    await site.orchard.app.run(run_id).pause(actor="ann")
    await expect(page.locator(".run-head-card").get_by_role("button", name="Resume")).to_be_visible()
    await expect(again).to_be_visible()


@pytest.mark.contract("API-3", "EVT-6")
async def test_the_service_goes_away_and_the_page_catches_up_without_gap_or_double_line(browser: Browser) -> None:
    async with serve_site() as site, open_page(browser, site.address) as page:
        async with site.up():
            run_id = await site.start("patient")
            await page.goto(f"/runs/{run_id}")
            await site.send(run_id, "go", 1)
            await expect(page.locator(".log-row[data-seq='5']")).to_be_visible()
        await expect(page.get_by_text("Connection lost, catching up")).to_be_visible()
        for number in range(5):
            await site.send(run_id, "go", number)
        async with site.up():
            await expect(page.locator(".banner")).to_be_hidden()
            await expect(page.locator(".log-row[data-seq='15']")).to_be_visible()
            assert await numbers_of(page) == list(range(1, len(await site.events(run_id)) + 1))


@pytest.mark.contract("EVT-6")
async def test_a_gap_marks_the_run_stale_until_it_closes(page: Page, site: Site) -> None:
    run_id = await site.start("patient")
    await site.send(run_id, "go", 1)
    await site.send(run_id, "go", 2)
    while len(events := await site.events(run_id)) < 7:
        pass
    asked: list[str] = []
    is_whole = asyncio.Event()

    async def with_a_gap(route: Route) -> None:
        asked.append(route.request.url)
        if len(asked) > 1:
            await is_whole.wait()
            await route.continue_()
            return
        lines = [f"id: {event['run_seq']}\ndata: {json.dumps(event)}\n\n" for event in events if event["run_seq"] != 3]
        await route.fulfill(content_type="text/event-stream", body="".join(lines))

    await page.route("**/stream?after=*", with_a_gap)
    await page.goto(f"/runs/{run_id}")
    await expect(page.locator(".head-marks .stale")).to_be_visible()
    await expect(page.locator(".log-state")).to_contain_text(f"missing behind 2; there are {len(events)}")
    assert await numbers_of(page) == [1, 2]
    is_whole.set()
    await expect(page.locator(".head-marks .stale")).to_have_count(0)
    await expect(page.locator(f".log-row[data-seq='{len(events)}']")).to_be_visible()
    assert await numbers_of(page) == [event["run_seq"] for event in events]
    assert asked[1].endswith("after=2")


async def test_a_run_is_started_again_with_another_input(page: Page, site: Site) -> None:
    run_id = await site.start("order", reference="ORD-1", order_id="o-1", cents=7)
    await page.goto(f"/runs/{run_id}")
    await page.get_by_label("More actions").click()
    await page.get_by_role("button", name="Start again with another input").click()
    dialog = page.get_by_role("dialog")
    await expect(dialog.get_by_label("Order id")).to_have_value("o-1")
    await expect(dialog.get_by_label("Cents")).to_have_value("7")
    await dialog.get_by_label("Cents").fill("seven")
    await dialog.get_by_role("button", name="Start", exact=True).click()
    await expect(dialog.get_by_text("Please give a number.")).to_be_visible()
    await dialog.get_by_label("Cents").fill("8")
    await dialog.get_by_role("button", name="Edit as JSON").click()
    await expect(dialog.get_by_label("Input as JSON")).to_have_value('{\n  "order_id": "o-1",\n  "cents": 8\n}')
    await dialog.get_by_role("button", name="Start", exact=True).click()
    await page.wait_for_url(lambda url: "/runs/" in url and run_id not in url)
    [queued, *_] = await site.events(page.url.partition("/runs/")[2])
    assert queued["data"]["input"] == {"order_id": "o-1", "cents": 8}


async def test_a_run_is_shown_among_its_family(page: Page, site: Site) -> None:
    parent = await site.start("story", reference="ORD-1", order_id="o-1")
    await page.goto(f"/runs/{parent}")
    child = page.locator(".tree").get_by_role("link").first
    await expect(child).to_be_visible()
    await child.click()
    await expect(page.locator(".head-facts")).to_contain_text("Parent")
    await page.locator(".tree").get_by_role("link", name="ORD-1").click()
    await expect(page.get_by_role("heading", name="ORD-1")).to_be_visible()


async def test_ending_a_run_at_once_needs_a_reason(page: Page, site: Site) -> None:
    run_id = await site.start("order", order_id="o-1")
    await page.goto(f"/runs/{run_id}")
    await page.get_by_label("More actions").click()
    await page.get_by_role("button", name="Terminate").click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_role("button", name="Terminate").click()
    await expect(dialog.get_by_label("Reason")).to_have_attribute("aria-invalid", "true")
    await dialog.get_by_label("Reason").fill("it is the wrong order")
    await dialog.get_by_role("button", name="Terminate").click()
    await expect(page.locator(".head-marks")).to_contain_text("Cancelled")


@pytest.mark.contract("API-3")
async def test_a_page_that_nobody_looks_at_rests_and_catches_up(page: Page, site: Site) -> None:
    run_id = await site.start("patient")
    streams: set[Request] = set()
    page.on("request", lambda request: streams.update([request] if "/stream?" in request.url else []))
    page.on("requestfailed", lambda request: streams.discard(request))
    page.on("requestfinished", lambda request: streams.discard(request))
    await page.clock.install()
    await page.goto(f"/runs/{run_id}")
    await page.clock.run_for(1_000)
    await expect(page.locator(".log-row")).to_have_count(3)
    await hide(page, True)
    await page.clock.run_for(35_000)
    assert len(streams) == 1, "somebody may come back soon"
    await page.route("**/stream?*", lambda route: route.abort())  # it is silent, is given up, and cannot come back
    for _ in range(30):
        await page.clock.run_for(1_000)
    await page.unroute("**/stream?*")
    for number in (1, 2, 3):
        await site.send(run_id, "go", number)
    while len(events := await site.events(run_id)) < 9:
        pass
    await page.clock.run_for(60_000)
    assert not streams, "after a minute the connection is given back, whatever else happens"
    assert await page.locator(".log-row").count() == 3
    await hide(page, False)
    await page.clock.run_for(1_000)
    await expect(page.locator(f".log-row[data-seq='{len(events)}']")).to_be_visible()
    assert len(streams) == 1
    assert await numbers_of(page) == list(range(1, len(events) + 1))


async def hide(page: Page, is_hidden: bool) -> None:
    """Let the page be in a tab that nobody looks at, or no longer."""
    await page.evaluate(
        """(hidden) => {
            Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        }""",
        is_hidden,
    )


async def test_times_are_those_of_the_service_if_the_clock_here_is_wrong(page: Page, site: Site) -> None:
    run_id = await site.start("patient", reference="NEW")
    await page.clock.install(time=datetime.now(UTC) + timedelta(days=3))
    await page.goto("/runs?time=1h")
    await page.clock.run_for(2_000)
    row = page.locator(".run-row", has=page.get_by_role("link", name="NEW"))
    await expect(row.locator("time")).to_have_text(re.compile(r"^(now|\d+ s ago)$"))
    await page.goto(f"/runs/{run_id}")
    await page.clock.run_for(2_000)
    await expect(page.locator(".head-facts")).to_contain_text(re.compile(r"Started(now|\d+ s ago)"))
    width = await page.locator(".bar.open").evaluate("(bar) => Number(bar.getAttribute('width'))")
    assert width > 100, "the wait goes from its beginning to now, and not to three days ahead"
