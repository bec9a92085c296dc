"""The list of runs: live, filtered by its address, long, and many at once."""

import asyncio
import re
from itertools import pairwise
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.async_api import Browser, Page, Route, expect

from holdfast.engine.start.requests import StartOptions
from tests.web.browser import PHONE, open_page
from tests.web.site import Site

MANY = 100_000


@pytest.mark.contract("API-3")
async def test_the_list_is_live_and_newest_first(page: Page, site: Site) -> None:
    first = await site.start("order", reference="ORD-1", order_id="o-1")
    await page.goto("/runs")
    await expect(page.get_by_role("link", name="ORD-1")).to_be_visible()
    await site.start("order", reference="ORD-2", order_id="o-2")
    await expect(page.locator("[data-main]").first).to_have_text("ORD-2")
    await site.send(first, "approval", {"approved": True, "by": "ann"})
    row = page.locator(".run-row", has=page.get_by_role("link", name="ORD-1"))
    await expect(row).to_contain_text("Completed")


@pytest.mark.contract("API-3", "PRJ-1")
async def test_what_a_run_publishes_is_drawn_as_progress_and_live(page: Page, site: Site) -> None:
    run_id = await site.start("packing", reference="BOX-1", items=5)
    await page.goto("/runs")
    row = page.locator(".run-row", has=page.get_by_role("link", name="BOX-1"))
    await expect(row.locator(".published")).to_have_text("0 %0 % · item 1")
    await site.send(run_id, "packed", None)
    await expect(row.get_by_role("progressbar")).to_have_attribute("value", "0.2")
    await expect(row.locator(".published > span")).to_have_text("20 % · item 2")
    await page.goto(f"/runs/{run_id}")
    await expect(page.locator(".published > span")).to_have_text("20 % · item 2")
    await expect(page.locator(".head-facts")).to_contain_text("So far")


async def test_a_row_is_one_line_and_gives_the_place_of_tags_that_nothing_has_to_what_goes_on(
    page: Page, site: Site
) -> None:
    await site.start("packing", reference="BOX-1", items=5)
    await page.goto("/runs")
    now = page.locator(".run-row .c-now").last
    places = [await now.locator(part).bounding_box() for part in (".row-waits", ".published")]
    waits, published = [place for place in places if place]
    assert abs(waits["y"] + waits["height"] / 2 - published["y"] - published["height"] / 2) <= 2
    assert published["x"] >= waits["x"] + waits["width"]
    await expect(page.get_by_role("columnheader", name="Tags")).to_be_hidden()
    before = await now.bounding_box()
    tagged = {"workflow": "order", "input": {"order_id": "o-1"}, "tags": ["eu"]}
    await site.http.post("/v1/runs", json=tagged)
    await expect(page.get_by_role("columnheader", name="Tags")).to_be_visible()
    after = await now.bounding_box()
    assert before is not None
    assert after is not None
    assert before["width"] > after["width"]


async def test_the_filter_is_in_the_address(page: Page, site: Site) -> None:
    await site.start("courier", reference="C-1", order_id="c-1")
    await site.start("order", reference="ORD-1", order_id="o-1")
    await page.goto("/runs?status=PAUSED")
    await expect(page.get_by_role("link", name="C-1")).to_be_visible()
    await expect(page.get_by_role("link", name="ORD-1")).to_have_count(0)
    await page.get_by_role("button", name="All", exact=True).click()
    await expect(page.get_by_role("link", name="ORD-1")).to_be_visible()
    await page.get_by_label("Search runs").fill("courier serves")
    await expect(page.get_by_role("link", name="ORD-1")).to_have_count(0)
    await expect(page.get_by_role("link", name="C-1")).to_be_visible()
    assert page.url.endswith("/runs?text=courier+serves")
    await page.get_by_label("Search runs").fill("nothing like this")
    await expect(page.get_by_text("No run matches")).to_be_visible()
    await page.get_by_role("button", name="Clear the filter").click()
    await page.get_by_role("combobox", name="Workflow").select_option("order")
    await expect(page.get_by_role("link", name="C-1")).to_have_count(0)
    assert page.url.endswith("/runs?workflow=order")
    await page.goto("/runs?time=1h&tag=none")
    await expect(page.get_by_text("No run matches")).to_be_visible()


async def test_a_run_leaves_a_filtered_list(page: Page, site: Site) -> None:
    run_id = await site.start("order", reference="ORD-1", order_id="o-1")
    await page.goto("/runs?status=RUNNING")
    await expect(page.get_by_role("link", name="ORD-1")).to_be_visible()
    await site.send(run_id, "approval", {"approved": True, "by": "ann"})
    await expect(page.get_by_role("link", name="ORD-1")).to_have_count(0)


@pytest.mark.contract("SIG-9", "SIG-13")
async def test_many_runs_are_signalled_and_cancelled_after_a_preview(page: Page, site: Site) -> None:
    for number in range(3):
        await site.start("order", reference=f"ORD-{number}", order_id=f"o-{number}")
    done = await site.start("wide", reference="DONE", steps=1)
    await site.http.get(f"/v1/runs/{done}/result?wait_s=20")
    await page.goto("/runs")
    for name in ("ORD-0", "ORD-1", "DONE"):
        await page.get_by_label(f"Select {name}").check()
    await page.get_by_role("button", name="Cancel…").click()
    dialog = page.get_by_role("dialog")
    await expect(dialog.locator(".preview")).to_contain_text("2 of 3 runs are concerned; 1 not: it has finished.")
    await dialog.get_by_label("Reason").fill("a test")
    await dialog.get_by_role("button", name="Cancel: 2 runs").click()
    await expect(page.locator(".status[data-status='CANCELLED']")).to_have_count(2)
    await page.get_by_label("Select ORD-2").check()
    await page.get_by_role("button", name="Signal…").click()
    await dialog.get_by_role("radio", name="Yes").check()
    await dialog.get_by_label("By").fill("ann")
    await dialog.get_by_role("button", name="Signal 1").click()
    await expect(page.locator(".status[data-status='COMPLETED']")).to_have_count(2)
    await page.get_by_label("Select DONE").check()
    await page.get_by_role("button", name="Retry from the start…").click()
    await dialog.get_by_role("button", name="Retry from the start: 1 run").click()
    await expect(page.locator(".status[data-status='COMPLETED']")).to_have_count(3)


async def test_a_long_list_is_a_screen_of_rows(page: Page, site: Site) -> None:
    run = site.orchard.app
    workflow = run.registry.workflow("wide", None)
    for number in range(1_200):
        options = StartOptions(reference_key=f"R-{number:05}")
        await run.runtime().start(workflow, workflow.signature.pack((), {"steps": 0}), options)
    await page.goto("/runs")
    await expect(page.get_by_role("link", name="R-01199")).to_be_visible()
    assert await page.locator(".rows-body .run-row").count() < 60
    await page.get_by_role("link", name="R-01199").focus()
    await page.keyboard.press("End")
    await page.keyboard.press("End")
    await expect(page.locator(".rows-body .run-row").first).to_be_visible()
    await page.get_by_label("Select all that are loaded").check()
    await page.get_by_role("button", name="Select all 1,200 that match").click()
    await expect(page.get_by_role("region", name="Selected runs")).to_contain_text("1,200 selected")
    await page.get_by_label("More for the selected runs").click()
    await page.get_by_role("button", name="Cancel…").click()
    await expect(page.locator(".preview")).to_contain_text("0 of 1,200 runs are concerned; 1,200 not: it has finished.")
    await page.keyboard.press("Escape")
    await page.get_by_label("Search runs").fill("r-00007 WIDE")
    await expect(page.get_by_role("link", name="R-00007")).to_be_visible()


async def test_of_very_many_runs_only_what_is_looked_at_is_read(page: Page, site: Site) -> None:
    """A service that lists the newest first is played here, with 100,000 runs."""
    model = (await site.http.get(f"/v1/runs/{await site.start('patient')}")).json()
    asked: list[int] = []

    async def some(route: Route) -> None:
        query = parse_qs(urlsplit(route.request.url).query)
        assert query["order"] == ["newest"]
        first, limit = int(query.get("cursor", ["0"])[0]), int(query["limit"][0])
        asked.append(first)
        items = [
            {**model, "run_id": f"r-{MANY - n:06}", "created_at": f"2026-01-01T00:00:00.{MANY - n:06}Z"}
            for n in range(first, min(first + limit, MANY))
        ]
        await route.fulfill(json={"items": items, "next": str(first + limit) if first + limit < MANY else None})

    await page.route("**/v1/runs?*", some)
    await page.goto("/runs")
    await expect(page.get_by_role("link", name=f"r-{MANY:06}")).to_be_visible()
    await expect(page.locator(".list-note")).to_have_text("200+ shown")
    assert asked == [0]
    await page.get_by_role("link", name=f"r-{MANY:06}").focus()
    for shown in (400, 600):
        await page.keyboard.press("End")
        await expect(page.locator(".list-note")).to_have_text(f"{shown}+ shown")
    assert asked == [0, 200, 400]
    assert await page.locator(".rows-body .run-row").count() < 60
    await expect(page.get_by_role("link", name=f"r-{MANY - 399:06}")).to_be_focused()


# --- retrying


@pytest.mark.contract("SIG-13")
async def test_a_run_that_is_retried_says_so_is_found_and_is_tried_now(page: Page, site: Site) -> None:
    for number in range(2):
        await site.start("payment", reference=f"PAY-{number}", order_id="o")
    await site.start("order", reference="ORD-1", order_id="o-1")
    await page.goto("/runs")
    row = page.locator(".run-row", has=page.get_by_role("link", name="PAY-1"))
    await expect(row).to_contain_text("transfer failed once, ConnectionError, again in 1 min: no answer from the bank")
    await page.get_by_role("button", name="Retrying 2").click()
    await expect(page.get_by_role("link", name="ORD-1")).to_have_count(0)
    await expect(page.locator("[data-main]")).to_have_count(2)
    await row.get_by_role("link", name="PAY-1").click()
    card = page.locator(".need")
    await expect(card).to_contain_text("transfer failed once, ConnectionError no answer from the bank, again in 1 min")
    site.orchard.is_zoned = True
    await card.get_by_role("button", name="Try now").click()
    await expect(page.locator(".head-marks")).to_contain_text("Completed")
    await page.goto("/runs?text=status%3Aretrying")
    await page.get_by_label("Select all that are loaded").check()
    await page.get_by_role("button", name="Try now…").click()
    await page.get_by_role("dialog").get_by_role("button", name="Try now: 1 run").click()
    await expect(page.get_by_text("No run matches")).to_be_visible()


async def test_a_run_says_what_it_waits_for_and_who_has_paused_it(page: Page, site: Site) -> None:
    await site.start("order", reference="ORD-1", order_id="o-1")
    held = await site.start("order", reference="ORD-2", order_id="o-2")
    beside = await site.start("paying", reference="PAY-1", order_id="o-3")
    await site.orchard.app.run(held).pause("the shelf burns", actor="ann")
    await page.goto("/runs")
    rows = page.locator(".run-row")
    await expect(rows.filter(has_text="ORD-1")).to_contain_text("Waits for the signal approval")
    await expect(rows.filter(has_text="ORD-2")).to_contain_text("Paused by ann: the shelf burns")
    await expect(rows.filter(has_text="PAY-1")).to_contain_text("Waits for the child sturdy")
    await expect(rows.filter(has_text="PAY-1")).to_contain_text("after ValueError no van is free")
    await page.goto(f"/runs/{held}")
    await expect(page.locator(".need", has_text="Paused by ann")).to_contain_text("the shelf burns")
    await page.goto(f"/runs/{beside}")
    card = page.locator(".need", has_text="has failed")
    await expect(card).to_contain_text("book_badly has failed: ValueError no van is free.")
    await expect(card).to_contain_text("it waits for the child sturdy")


@pytest.mark.contract("QUE-6")
async def test_a_debounced_run_says_when_it_starts_and_with_which_input(page: Page, site: Site) -> None:
    """The last one, as soon as that is there."""
    asked = {"workflow": "order", "debounce_key": "doc-7", "debounce_quiet_s": 600, "debounce_at_most_s": 3_600}
    for number in range(2):
        answer = await site.http.post("/v1/runs", json={**asked, "input": {"order_id": f"draft-{number}"}})
    assert answer.json()["is_reused"]
    await page.goto("/runs")
    row = page.locator(".run-row", has_text="doc-7-")
    await expect(row).to_contain_text("Starts at")
    await row.get_by_role("link").click()
    await expect(page.locator(".card", has=page.get_by_role("heading", name="Input", exact=True))).to_contain_text(
        "draft-1"
    )
    await expect(page.get_by_text("Starts at")).to_be_visible()
    await expect(page.get_by_text("Input replaced").first).to_be_visible()
    await site.http.post("/v1/runs", json={**asked, "input": {"order_id": "draft-2"}})
    await expect(page.locator(".card", has=page.get_by_role("heading", name="Input", exact=True))).to_contain_text(
        "draft-2"
    )


# --- the list as one likes it


async def test_only_roots_are_listed_until_children_are_asked_for(page: Page, site: Site) -> None:
    await site.start("paying", reference="PAY-1", order_id="o")
    await page.goto("/runs")
    await expect(page.locator("[data-main]")).to_have_text(["PAY-1"])
    await page.get_by_label("Children").check()
    await expect(page.locator("[data-main]")).to_have_text(["\u2026/sturdy", "PAY-1"])
    assert page.url.endswith("/runs?children=1")
    await page.goto("/runs?workflow=sturdy")
    await page.get_by_role("button", name="Look among children too").click()
    await expect(page.locator("[data-main]")).to_have_text(["\u2026/sturdy"])


async def test_what_is_typed_is_completed_and_finds_runs_by_what_is_known_of_them(page: Page, site: Site) -> None:
    await site.start("courier", reference="C-1", order_id="c-1")
    await site.start("order", reference="ORD-1", order_id="o-1")
    await page.goto("/runs")
    await expect(page.get_by_role("button", name="Paused 1")).to_be_visible()
    box = page.get_by_label("Search runs")
    await box.press_sequentially("sta")
    await expect(page.locator(".completions li")).to_have_text(["status:"])
    await page.keyboard.press("Tab")
    await box.press_sequentially("pau")
    await page.keyboard.press("ArrowDown")
    await expect(page.get_by_role("option", name="status:paused")).to_have_attribute("aria-selected", "true")
    await page.keyboard.press("Enter")
    await expect(box).to_have_value("status:paused ")
    await expect(page.locator("[data-main]")).to_have_text(["C-1"])
    await box.fill("workflow:order status:running")
    await expect(page.locator("[data-main]")).to_have_text(["ORD-1"])
    await box.fill("workflow:order status:failed")
    await expect(page.get_by_text("No run matches")).to_be_visible()


@pytest.mark.contract("QUE-4")
async def test_runs_are_found_by_status_workflow_and_attribute_at_once(page: Page, site: Site) -> None:
    for workflow, text, cents in (("hostile", "a", 5_000), ("hostile", "b", 500), ("order", "c", 5_000)):
        asked = {"workflow": workflow, "attributes": {"cents": cents}, "reference_key": f"{workflow}-{cents}"}
        given = {"order_id": text} if workflow == "order" else {"text": text}
        assert (await site.http.post("/v1/runs", json={**asked, "input": given})).status_code == 201
    await page.goto("/runs")
    await expect(page.get_by_role("button", name="Failed 2")).to_be_visible()
    box = page.get_by_label("Search runs")
    for typed, found in (
        ("status:failed workflow:hostile cents>1000", ["hostile-5000"]),
        ("cents>1000", ["order-5000", "hostile-5000"]),
        ("finished_at>=2020-01-01 created_at<2999-01-01", ["hostile-500", "hostile-5000"]),
        ("reference:order-5000", ["order-5000"]),
        ("status:failed cents<=500", ["hostile-500"]),
    ):
        await box.fill(typed)
        await expect(page.locator("[data-main]")).to_have_text(found)
    await page.reload()  # what is looked for is in the address
    await expect(page.locator("[data-main]")).to_have_text(["hostile-500"])


@pytest.mark.contract("QUE-4")
async def test_runs_are_found_by_their_attributes_and_words_together(page: Page, site: Site) -> None:
    for reference, cents in (("CHEAP", 5), ("DEAR", 1_500), ("DEAREST", 9_000)):
        asked = {"workflow": "order", "input": {"order_id": reference}, "reference_key": reference}
        await site.http.post("/v1/runs", json={**asked, "attributes": {"cents": cents}})
    await site.start("order", reference="FREE", order_id="o-1")
    await page.goto("/runs")
    box = page.get_by_label("Search runs")
    for typed, expected in (
        ("cents>1000", ["DEAREST", "DEAR"]),
        ("cents>=5 cents<2000", ["DEAR", "CHEAP"]),
        ("cents!=* free", ["FREE"]),
        ("dearest cents>1000", ["DEAREST"]),
        ("dearest cents<1000", []),
    ):
        await box.fill(typed)
        await expect(page.locator("[data-main]")).to_have_text(expected)


async def test_columns_views_and_what_is_found_can_be_kept(page: Page, site: Site) -> None:
    asked = {"workflow": "courier", "input": {"order_id": "c-1"}, "reference_key": "C-1", "tags": ["eu"]}
    await site.http.post("/v1/runs", json=asked)
    await site.start("order", reference="=ORD", order_id="o-1")
    await page.goto("/runs?workflow=courier")
    await expect(page.locator(".c-node").first).to_be_hidden()
    await expect(page.locator(".c-tags").last).to_have_text("eu")
    menu = page.get_by_label("View", exact=True)
    await menu.click()
    await page.get_by_label("Node").check()
    await page.get_by_label("Tags").uncheck()
    await page.get_by_role("button", name="Save this view").click()
    await page.get_by_label("Name").fill("couriers")
    await page.get_by_role("button", name="Save", exact=True).click()
    await page.goto("/runs")
    await expect(page.locator("[data-main]")).to_have_count(2)
    await expect(page.locator(".c-node").first).to_be_visible()
    await expect(page.locator(".c-tags").first).to_be_hidden()
    await menu.click()
    async with page.expect_download() as download:
        await page.get_by_role("button", name="CSV").click()
    lines = Path(await (await download.value).path()).read_text().splitlines()
    assert lines[0].startswith("run_id,workflow,workflow_version,status")
    assert [line.split(",")[6] for line in lines[1:]] == ["'=ORD", "C-1"]
    await menu.click()
    await page.get_by_role("button", name="couriers", exact=True).click()
    await expect(page.locator("[data-main]")).to_have_text(["C-1"])


# --- many at once


@pytest.mark.contract("SIG-13")
async def test_to_approve_is_offered_where_a_run_waits_for_it(page: Page, site: Site) -> None:
    await site.start("order", reference="ORD-1", order_id="o-1")
    await site.start("weighty", reference="HEAVY", cents=7)
    await page.goto("/runs")
    bar = page.get_by_role("region", name="Selected runs")
    approve = bar.get_by_role("button", name="Approve…")
    await page.get_by_label("Select ORD-1").check()
    await bar.get_by_label("More for the selected runs").click()
    await expect(bar.get_by_role("button", name="Terminate…")).to_be_visible()
    await expect(approve).to_have_count(0)
    await page.get_by_label("Select HEAVY").check()
    await expect(bar.locator(".bulk-buttons button").first).to_have_text("Approve…")
    await approve.click()
    dialog = page.get_by_role("dialog")
    await expect(dialog.locator(".preview")).to_contain_text("1 of 2 runs are concerned")
    await dialog.get_by_role("button", name="Approve: 1 run").click()
    await expect(page.locator(".run-row", has_text="HEAVY")).to_contain_text("Completed")


@pytest.mark.contract("SIG-13")
async def test_all_that_a_filter_finds_are_retried_whether_they_are_loaded_or_not(page: Page, site: Site) -> None:
    app = site.orchard.app
    workflow = app.registry.workflow("courier", None)
    for number in range(230):
        options = StartOptions(reference_key=f"C-{number}")
        await app.runtime().start(workflow, workflow.signature.pack((), {"order_id": "x"}), options)
    await page.goto("/runs?status=PAUSED")
    await expect(page.get_by_role("button", name="Paused 230")).to_be_visible()
    site.orchard.is_zoned = True
    await page.get_by_label("Select all that are loaded").check()
    await expect(page.locator(".run-row .row-error").first).to_contain_text("failed: ")
    await page.get_by_role("button", name="Select all 230 that match").click()
    await expect(page.get_by_role("region", name="Selected runs")).to_contain_text("230 selected")
    await page.get_by_role("button", name="Retry step…").click()
    dialog = page.get_by_role("dialog")
    await expect(dialog.locator(".preview")).to_contain_text("230 of 230 runs are concerned.")
    await dialog.get_by_label("Reason").fill("the zone is back")
    go = asyncio.Event()

    async def hold(route: Route) -> None:
        """Let only the first hundred through."""
        if (route.request.post_data_json or {}).get("cursor"):
            await go.wait()
        await route.continue_()

    await page.route("**/v1/run-commands", hold)
    await dialog.get_by_role("button", name="Retry step: 230 runs").click()
    await expect(dialog.get_by_role("progressbar")).to_have_attribute("value", re.compile(r"^0\.43"))
    go.set()
    await expect(page.get_by_text("230 tried again.")).to_be_visible()
    log = (await site.http.get("/v1/audit?operation=runs.command_many&limit=500")).json()["items"]
    assert len({entry["run_id"] for entry in log}) == 230, "what was done to each is on record"
    accepted = [event for event in await site.events(log[0]["run_id"]) if event["event_type"] == "SignalAccepted"]
    assert "the zone is back" in str(accepted)
    await expect(page.get_by_role("button", name="Completed 230")).to_be_visible()


async def test_a_click_beside_the_words_opens_a_run_and_one_beside_its_box_selects_it(page: Page, site: Site) -> None:
    run_id = await site.start("order", reference="ORD-1", order_id="o-1")
    await page.goto("/runs")
    row = page.locator(".rows-body .run-row")
    await row.locator(".c-box").click(position={"x": 1, "y": 1})
    await expect(page.get_by_label("Select ORD-1")).to_be_checked()
    await row.locator(".c-box").click(position={"x": 1, "y": 1})
    await expect(page.get_by_label("Select ORD-1")).not_to_be_checked()
    await row.locator(".c-age").click()
    await expect(page.locator(".head-marks")).to_be_visible()
    assert page.url.endswith(f"/runs/{run_id}")


async def test_no_row_moves_when_one_is_selected(page: Page, site: Site) -> None:
    for number in range(3):
        await site.start("order", reference=f"ORD-{number}", order_id=f"o-{number}")
    await page.goto("/runs")
    last = page.get_by_label("Select ORD-0")
    before = await last.bounding_box()
    await page.get_by_label("Select ORD-2").check()
    bar = page.get_by_role("region", name="Selected runs")
    await expect(bar).to_contain_text("1 selected")
    assert await last.bounding_box() == before
    await bar.get_by_text("More").click()
    await expect(bar.get_by_role("button", name="Terminate…")).to_be_visible()
    await page.get_by_label("Select all that are loaded").check()  # the bar does not lie on it
    await expect(bar).to_contain_text("3 selected")


@pytest.mark.contract("SIG-13")
async def test_somebody_with_a_phone_tries_all_that_are_retried_again(browser: Browser, site: Site) -> None:
    for number in range(2):
        await site.start("payment", reference=f"PAY-{number}", order_id="o")
    async with open_page(browser, site.address, size=PHONE) as page:
        await page.goto("/runs?status=RETRYING&children=1")
        await expect(page.locator("[data-main]")).to_have_count(2)
        await expect(page.get_by_role("button", name="Retrying 2")).to_be_in_viewport(ratio=1)
        view, note = [await page.locator(part).bounding_box() for part in (".list-head .actions", "p.list-note")]
        assert view is not None
        assert note is not None
        assert (view["x"] + view["width"], note["y"] >= view["y"] + view["height"]) == (PHONE["width"] - 16, True)
        children = page.get_by_role("checkbox", name="Children")
        await expect(children).to_be_hidden()
        narrow = page.get_by_role("button", name="Filter")
        await expect(narrow).to_have_text("Filter1")
        await narrow.click()
        await expect(children).to_be_checked()
        await children.uncheck()
        await expect(narrow).to_have_text("Filter")
        await narrow.click()
        await expect(children).to_be_hidden()
        chips = [await chip.bounding_box() for chip in await page.locator(".chip").all()]
        places = [chip for chip in chips if chip]
        assert all(one["x"] + one["width"] <= other["x"] for one, other in pairwise(places)), "none lies on another"
        await page.get_by_role("button", name="Select all 2").click()
        site.orchard.is_zoned = True
        await page.get_by_role("button", name="Try now…").click()
        await page.get_by_role("dialog").get_by_role("button", name="Try now: 2 runs").click()
        await expect(page.get_by_text("No run is retrying")).to_be_visible()
