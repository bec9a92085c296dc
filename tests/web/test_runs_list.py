"""The list of runs: live, filtered by its address, long, and many at once."""

from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.async_api import Page, Route, expect

from holdfast.engine.start.runtime import StartOptions
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
    await page.get_by_label("Workflow").select_option("order")
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
    await expect(dialog.locator(".preview")).to_contain_text("2 of 3 will be hit; 1 not, because they have finished.")
    await dialog.get_by_label("Reason").fill("a test")
    await dialog.get_by_role("button", name="Cancel 2").click()
    await expect(page.locator(".status[data-status='CANCELLED']")).to_have_count(2)
    await page.get_by_label("Select ORD-2").check()
    await page.get_by_role("button", name="Signal…").click()
    await dialog.get_by_role("radio", name="Yes").check()
    await dialog.get_by_label("By").fill("ann")
    await dialog.get_by_role("button", name="Signal 1").click()
    await expect(page.locator(".status[data-status='COMPLETED']")).to_have_count(2)
    await page.get_by_label("Select DONE").check()
    await page.get_by_role("button", name="Retry…").click()
    await dialog.get_by_role("button", name="Retry 1").click()
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
    await page.get_by_role("button", name="Select all that match").click()
    await expect(page.get_by_role("region", name="Selected runs")).to_contain_text("1,200 selected")
    await page.get_by_role("button", name="Cancel…").click()
    await expect(page.locator(".preview")).to_contain_text("0 of 1200 will be hit; 1200 not")
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
