"""Plans on the page: their versions, drawn and compared, and runs of them started with a form."""

from playwright.async_api import Locator, Page, expect

from tests.web.site import Site, document


def node(page: Page, id: str) -> Locator:
    """Return the node of a step."""
    return page.locator(f'.graph-node[data-id="{id}"]')


async def registered(site: Site) -> None:
    """Register two versions of a plan, and another plan."""
    for version in "12":
        await site.orchard.app.plans.register(document(version))
    await site.orchard.app.plans.register({**document("1"), "plan": "another"})


async def test_versions_of_a_plan_are_drawn_and_compared(page: Page, site: Site) -> None:
    await registered(site)
    await page.goto("/plans?plan=etl")
    await expect(page.get_by_role("navigation", name="Plans that are registered")).to_contain_text("2 versions")
    await expect(page.get_by_label("Version", exact=True)).to_have_value("2")
    await expect(page.locator(".graph-node")).to_have_count(3)
    await page.get_by_label("Compared with").select_option("1")
    await expect(node(page, "check")).to_have_attribute("data-change", "added")
    await expect(node(page, "report")).to_have_attribute("data-change", "removed")
    await expect(node(page, "load")).to_have_attribute("data-change", "changed")
    await expect(node(page, "fetch")).to_have_attribute("data-change", "")
    await expect(node(page, "load")).to_have_attribute("aria-label", "load, Activity, changed, after fetch")
    changes = page.locator(".changes > li")
    await expect(changes).to_have_count(3)
    await expect(changes.filter(has_text="load")).to_contain_text("v1")
    await expect(changes.filter(has_text="load")).to_contain_text("v2")
    await page.reload()  # what is compared is in the address
    await expect(changes).to_have_count(3)
    await page.get_by_label("Version", exact=True).select_option("1")
    await expect(page.locator(".graph-node[data-change=added]")).to_have_count(0)
    assert await page.evaluate("() => window.hit") is None
    await page.get_by_role("button", name="another").click()
    await expect(page.get_by_label("Compared with")).to_have_count(0)
    await expect(page.locator(".graph-node")).to_have_count(3)


async def test_a_run_of_a_plan_is_started_with_a_form_that_checks_its_inputs(page: Page, site: Site) -> None:
    await registered(site)
    await page.goto("/plans?plan=etl&version=1")
    await page.get_by_role("button", name="Start a run").click()
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_contain_text("Version 1. Move rows from there to here.")
    await expect(dialog.get_by_label("Workflow")).to_have_value("plan:etl")
    await expect(dialog.get_by_label("Rows")).to_have_value("3")
    await dialog.get_by_label("Order").fill("o-1")
    await dialog.get_by_label("Rows").fill("many")
    await dialog.get_by_role("button", name="Start", exact=True).click()
    await expect(dialog.locator("[data-name=rows] .error")).to_be_visible()
    await dialog.get_by_label("Rows").fill("4")
    await dialog.get_by_role("button", name="Start", exact=True).click()
    await expect(page.locator(".head-marks")).to_contain_text("Completed")
    await expect(page.locator(".head-facts")).to_contain_text("plan:etl version 1")
    await expect(node(page, "report")).to_have_attribute("data-status", "SUCCESS")


async def test_what_the_service_refuses_stands_beside_its_input(page: Page, site: Site) -> None:
    await registered(site)
    await page.goto("/runs")
    await page.get_by_role("button", name="Start a run").click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_label("Workflow").select_option(label="Plan etl")
    await expect(dialog).to_contain_text("Version 2.")
    await dialog.get_by_label("Order").fill("o-1")
    await page.route(
        "**/v1/plans/etl/runs",
        lambda route: route.fulfill(
            status=422,
            json={
                "code": "InvalidInput",
                "status": 422,
                "detail": "input 'rows' of plan 'etl' is integer, not string",
                "details": {"field": "rows"},
            },
        ),
    )
    await dialog.get_by_role("button", name="Start", exact=True).click()
    await expect(dialog.locator("[data-name=rows] .error")).to_contain_text("integer, not string")


async def test_the_newest_version_comes_first_also_of_those_of_one_moment(page: Page, site: Site) -> None:
    at = ["2026-01-28T12:00:00.000001Z", "2026-01-28T12:00:00.000002Z", "2026-01-28T12:00:00.000002Z"]
    items = [
        {
            "plan_id": "etl",
            "plan_version": version,
            "sha256": "",
            "uri": "",
            "registered_by": "",
            "registered_at": moment,
        }
        for version, moment in zip(["30", "9", "10"], at, strict=True)
    ]
    await page.route("**/v1/plans?*", lambda route: route.fulfill(json={"items": items, "next": None}))
    await page.goto("/plans")
    options = page.get_by_label("Version", exact=True).locator("option")
    await expect(options).to_have_text(["10", "9", "30"])


async def test_without_plans_the_page_says_how_to_register_one(page: Page, site: Site) -> None:
    await page.goto("/plans")
    await expect(page.locator(".state")).to_contain_text("holdfast plan register")
