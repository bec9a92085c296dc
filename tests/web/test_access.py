"""For everybody: by keyboard, by screen reader, on a phone, in the light and in the dark."""

from typing import Any

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, expect

from tests.web.browser import PHONE, SCREENS, SMALL_DESK, open_page
from tests.web.site import Site

PLACES = ("/runs", "/runs/{courier}", "/runs/{order}", "/inbox", "/health", "/audit")


async def two_runs(site: Site) -> dict[str, str]:
    """Start a run that needs a hand, and one that waits."""
    found = {
        "courier": await site.start("courier", reference="C-1", order_id="c-1"),
        "order": await site.start("order", reference="ORD-1", order_id="o-1"),
    }
    for run_id in found.values():
        while (await site.http.get(f"/v1/runs/{run_id}")).json()["last_event_seq"] < 5:
            pass
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("size", "scheme"), SCREENS)
async def test_no_page_has_a_barrier(browser: Browser, site: Site, scheme: str, size: dict[str, int]) -> None:
    runs = await two_runs(site)
    problems: list[str] = []
    async with open_page(browser, site.address, size=size, scheme=scheme) as page:
        for place in PLACES:
            await page.goto(place.format(**runs))
            await expect(page.locator("main .view > *").first).to_be_visible()
            await page.wait_for_load_state("load")
            await page.wait_for_timeout(300)
            problems += [f"{place}: {each}" for each in await barriers(page)]
        await page.goto("/runs")
        await page.get_by_role("button", name="Start a run").click()
        await expect(page.get_by_role("dialog").get_by_label("Reference")).to_be_visible()
        problems += [f"start: {each}" for each in await barriers(page)]
    assert not problems, "\n".join(problems)


async def barriers(page: Page) -> list[str]:
    """Return what axe finds, in a line each."""
    found: dict[str, Any] = (await Axe().run(page)).response
    return [
        f"{violation['id']}: {node['html'][:160]} {node.get('failureSummary', '')[:200]}"
        for violation in found["violations"]
        for node in violation["nodes"]
    ]


CUT_RING = """() => {
    const cuts = (element) => {
        const style = getComputedStyle(element);
        const ring = parseFloat(style.outlineWidth) + parseFloat(style.outlineOffset);
        if (style.outlineStyle === "none" || ring <= 0) return false;
        const box = element.getBoundingClientRect();
        for (let around = element.parentElement; around && around.tagName !== "BODY"; around = around.parentElement) {
            const { overflowX, overflowY } = getComputedStyle(around);
            const edge = around.getBoundingClientRect();
            const isOver = box.top - ring < edge.top - 0.5 || box.bottom + ring > edge.bottom + 0.5;
            const isBeside = box.left - ring < edge.left - 0.5 || box.right + ring > edge.right + 0.5;
            if ((overflowY !== "visible" && isOver) || (overflowX !== "visible" && isBeside)) return true;
        }
        return false;
    };
    const element = document.activeElement;
    if (element === document.body || !cuts(element)) return null;
    return `${element.tagName} ${element.className} ${element.textContent.slice(0, 30)}`;
}"""
"""Which element has the focus, if something around it cuts its ring."""


async def test_the_ring_around_what_has_the_focus_is_whole(page: Page, site: Site) -> None:
    runs = await two_runs(site)
    for place in PLACES:
        await page.goto(place.format(**runs))
        await expect(page.locator("main h1, main h2").first).to_be_visible()
        for _ in range(30):
            await page.keyboard.press("Tab")
            assert await page.evaluate(CUT_RING) is None, place


async def test_everything_can_be_done_by_keyboard(page: Page, site: Site) -> None:
    await two_runs(site)
    await page.goto("/runs")
    await expect(page.get_by_role("link", name="C-1")).to_be_visible()
    await page.keyboard.press("Tab")
    await expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    await page.keyboard.press("/")
    await expect(page.get_by_label("Search runs")).to_be_focused()
    await page.keyboard.press("ArrowDown")
    await expect(page.get_by_role("link", name="ORD-1")).to_be_focused()
    await page.keyboard.press("ArrowDown")
    await expect(page.get_by_role("link", name="C-1")).to_be_focused()
    await page.keyboard.press("Space")
    await expect(page.get_by_label("Select C-1")).to_be_checked()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="C-1")).to_be_visible()
    site.orchard.is_zoned = True
    await page.locator(".need").get_by_role("button", name="Retry step").focus()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("dialog").get_by_label("Reason")).to_be_focused()
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("dialog")).to_have_count(0)
    await expect(page.locator(".need").get_by_role("button", name="Retry step")).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("dialog").get_by_label("Reason")).to_be_focused()
    await page.keyboard.type("by keyboard")
    await page.keyboard.press("Tab")
    await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")
    await expect(page.locator(".head-marks")).to_contain_text("Completed")
    await expect(page.get_by_role("dialog")).to_have_count(0)
    await page.get_by_role("button", name="reserve, Activity").focus()
    await page.keyboard.press("ArrowDown")
    await expect(page.get_by_role("button", name="book_courier, Activity")).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.locator(".detail")).to_be_focused()
    await page.keyboard.press("Escape")
    await page.get_by_label("History").focus()
    await page.keyboard.press("Home")
    await expect(page.locator(".head-marks")).to_contain_text("as it was at event 1")


async def test_a_phone_shows_everything_in_its_width_and_large_enough_to_touch(browser: Browser, site: Site) -> None:
    runs = await two_runs(site)
    async with open_page(browser, site.address, size=PHONE) as page:
        for place in PLACES:
            await page.goto(place.format(**runs))
            await expect(page.locator("main .view > *").first).to_be_visible()
            await page.wait_for_timeout(300)
            wide = await page.evaluate("document.documentElement.scrollWidth")
            assert wide <= PHONE["width"], f"{place} is {wide} wide"
            cut = await page.locator(".filter-more > *").evaluate_all(
                "all => all.map((each) => each.getBoundingClientRect().right)"
            )
            assert all(right <= PHONE["width"] for right in cut), f"a filter of {place} ends at {max(cut)}"
            words = await page.locator(".audit td code").evaluate_all(
                "all => all.map((each) => each.getClientRects().length)"
            )
            assert set(words) <= {1}, f"an operation of {place} is broken over several lines"
        await page.goto(f"/runs/{runs['courier']}")
        button = page.locator(".need").get_by_role("button", name="Retry step")
        box = await button.bounding_box()
        assert box is not None
        assert box["height"] >= 40
        site.orchard.is_zoned = True
        await button.tap()
        await page.get_by_role("dialog").get_by_role("button", name="Retry step").tap()
        await expect(page.locator(".head-marks")).to_contain_text("Completed")


async def test_a_small_desk_shows_everything_in_its_width_and_rows_are_one_line(browser: Browser, site: Site) -> None:
    runs = await two_runs(site)
    lines = """all => all.map((each) => each.getBoundingClientRect().height
        / parseFloat(getComputedStyle(each).lineHeight))"""
    async with open_page(browser, site.address, size=SMALL_DESK) as page:
        for place in PLACES:
            await page.goto(place.format(**runs))
            await expect(page.locator("main .view > *").first).to_be_visible()
            await page.wait_for_timeout(300)
            wide = await page.evaluate("document.documentElement.scrollWidth")
            assert wide <= SMALL_DESK["width"], f"{place} is {wide} wide"
        await page.goto("/runs")
        rows = page.locator(".rows-body .run-row")
        await expect(rows).to_have_count(2)
        heights = await rows.evaluate_all("all => all.map((each) => each.offsetHeight)")
        assert max(heights) <= 40, heights
        for words in (".top a", ".rows-body [data-main]", ".rows-body .status", "main .view button"):
            found = await page.locator(words).evaluate_all(lines)
            assert found, words
            assert max(found) < 2.9, (words, found)


async def test_colours_follow_the_system_until_somebody_chooses(browser: Browser, site: Site) -> None:
    shade = "getComputedStyle(document.documentElement).backgroundColor"
    async with open_page(browser, site.address, scheme="dark") as page:
        await page.goto("/runs")
        switch = page.get_by_role("button", name="Colours: system")
        await expect(switch).to_be_visible()
        dark = await page.evaluate(shade)
        await switch.click()
        light = await page.evaluate(shade)
        assert dark != light
        await page.reload()
        await expect(page.get_by_role("button", name="Colours: light")).to_be_visible()
        assert await page.evaluate(shade) == light


WHAT = "(each) => `${each.tagName} ${each.getAttribute('aria-label') ?? each.textContent.slice(0, 40)}`"
"""What a control is called. A panel that is drawn anew has other elements, and the same controls."""
CONTROLS = """() => {
  const wanted = "a[href], button:not([disabled]), input:not([disabled]), select:not([disabled]), textarea, summary";
  const isSeen = (each) => each.checkVisibility({ visibilityProperty: true }) && each.getClientRects().length > 0;
  return [...document.querySelectorAll(wanted)].filter((each) => isSeen(each) && each.tabIndex >= 0).map(WHAT);
}""".replace("WHAT", WHAT)
FOCUSED = """() => {
  const each = document.activeElement;
  if (each === null || each === document.body) return null;
  const isOutlined = (of) => of.outlineStyle !== "none" && parseFloat(of.outlineWidth) > 0;
  const style = getComputedStyle(each);
  const around = each.closest("label, .search, .segment") ?? each;
  const box = each.getBoundingClientRect();
  return {
    what: (WHAT)(each),
    isShown: isOutlined(style) || style.boxShadow !== "none" || isOutlined(getComputedStyle(around)),
    isOnScreen: box.bottom > 0 && box.top < innerHeight,
  };
}""".replace("WHAT", WHAT)


@pytest.mark.parametrize("place", [*PLACES, "/schedules", "/plans"])
async def test_every_control_is_reached_by_tab_and_shows_that_it_has_the_focus(
    place: str, page: Page, site: Site
) -> None:
    runs = await two_runs(site)
    await site.schedule("nightly", "wide", cron="0 3 * * *", tz="UTC", input={"steps": 1})
    await page.goto(place.format(**runs))
    await expect(page.locator("main .view > *").first).to_be_visible()
    await page.wait_for_timeout(500)
    found: list[str] = []
    for _ in range(len(await page.evaluate(CONTROLS)) + 20):
        await page.keyboard.press("Tab")
        focused = await page.evaluate(FOCUSED)
        if focused is None:
            continue
        if found and focused["what"] == found[0]:
            break
        found.append(focused["what"])
        assert focused["isShown"], f"{focused['what']} on {place} does not show that it has the focus"
        assert focused["isOnScreen"], f"{focused['what']} on {place} has the focus and is not on the screen"
    missed = set(await page.evaluate(CONTROLS)) - set(found)
    assert not missed, f"Tab does not come to these on {place}, only to {found}"


@pytest.mark.parametrize(
    ("place", "button"),
    [
        ("/runs", "Start a run"),
        ("/schedules", "Create a schedule"),
        ("/schedules", "Backfill nightly"),
        ("/schedules", "Delete nightly"),
        ("/runs/{courier}", "Cancel"),
    ],
)
async def test_escape_closes_a_dialog_and_gives_the_focus_back(place: str, button: str, page: Page, site: Site) -> None:
    runs = await two_runs(site)
    await site.schedule("nightly", "wide", cron="0 3 * * *", tz="UTC", input={"steps": 1})
    await page.goto(place.format(**runs))
    opener = page.get_by_role("button", name=button, exact=True).first
    await opener.focus()
    await page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_be_visible()
    assert await dialog.evaluate("(each) => each.contains(document.activeElement)")
    await page.keyboard.press("Escape")
    await expect(dialog).to_have_count(0)
    await expect(opener).to_be_focused()


async def test_a_button_keeps_the_focus_when_the_run_goes_on(page: Page, site: Site) -> None:
    """Whoever is about to press it must not miss it."""
    run_id = await site.start("order", order_id="o-1")
    await page.goto(f"/runs/{run_id}")
    await expect(page.locator(".log-line", has_text="Signal waiting")).to_be_visible()
    cancel = page.get_by_role("button", name="Cancel", exact=True)
    await cancel.focus()
    await site.orchard.app.run(run_id).pause("the shelf burns", actor="ann")
    await expect(page.get_by_role("button", name="Resume", exact=True).first).to_be_visible()
    await expect(cancel).to_be_focused()


# --- two at once


async def test_the_second_of_two_operators_is_told_what_the_first_has_done(browser: Browser, site: Site) -> None:
    """To the same run, and to the same runs in bulk: what was refused is named, and why."""
    runs = await two_runs(site)
    async with open_page(browser, site.address) as ann, open_page(browser, site.address) as bob:
        for page in (ann, bob):
            await page.goto(f"/runs/{runs['courier']}")
            await page.get_by_role("button", name="Cancel", exact=True).click()
            await page.get_by_role("dialog").get_by_label("Reason").fill("lost")
        await ann.get_by_role("dialog").get_by_role("button", name="Cancel").last.click()
        await expect(ann.locator(".head-marks")).to_contain_text("Cancelled")
        await bob.get_by_role("dialog").get_by_role("button", name="Cancel").last.click()
        await expect(bob.get_by_text("is CANCELLED").first).to_be_visible()
        for number in range(3):
            await site.start("order", reference=f"BULK-{number}", order_id=f"b-{number}")
        for page in (ann, bob):
            await page.goto("/runs")
            for number in range(3):
                await page.get_by_label(f"Select BULK-{number}").check()
            await page.get_by_role("button", name="Cancel…").click()
            await expect(page.get_by_role("dialog")).to_contain_text("3 of 3 runs")
        await ann.get_by_role("dialog").get_by_role("button", name="Cancel: 3 runs").click()
        await expect(ann.get_by_role("dialog")).to_have_count(0)
        await expect(ann.locator(".run-row", has_text="Cancelled")).to_have_count(4)
        await bob.get_by_role("dialog").get_by_role("button", name="Cancel: 3 runs").click()
        await expect(bob.locator(".toast")).to_contain_text("0 asked to cancel; 3 left alone: it has finished")
