"""Numbers stay as they are written, however many digits they have: shown, edited, and sent back."""

from typing import Any

from playwright.async_api import Page, expect

from tests.web.browser import module
from tests.web.site import Site

LARGE = 2**53 + 1
TEXTS = ["9007199254740993", "-18446744073709551617", "1.0", "2.50", "1e3", "-0", "0.12345678901234567890", "7", "0.1"]


async def test_what_is_read_is_written_the_same(page: Page, site: Site) -> None:
    await page.goto("/runs")
    found = await page.evaluate(
        f"""async (texts) => {{
            const {{ parse }} = await {module("lib/exact.js")};
            const made = texts.map((text) => parse(`{{"n":[${{text}}],"s":"${{text}}"}}`));
            return made.map((value) => [JSON.stringify(value), value.n[0] + 0, typeof value.s]);
        }}""",
        TEXTS,
    )
    assert [text for text, _, _ in found] == [f'{{"n":[{text}],"s":"{text}"}}' for text in TEXTS]
    assert [float(number) for _, number, _ in found] == [float(text) for text in TEXTS]
    assert {kind for _, _, kind in found} == {"string"}


async def test_a_run_is_started_again_with_exactly_its_input(page: Page, site: Site) -> None:
    run_id = await site.start("order", order_id="o-1", cents=LARGE)
    await page.goto(f"/runs/{run_id}")
    await expect(page.get_by_role("group", name="Input")).to_contain_text(str(LARGE))
    await page.get_by_label("More actions").click()
    await page.get_by_role("button", name="Start again with another input").click()
    dialog = page.get_by_role("dialog")
    await expect(dialog.get_by_label("Cents")).to_have_value(str(LARGE))
    await dialog.get_by_label("Order id").fill("o-2")
    await dialog.get_by_role("button", name="Edit as JSON").click()
    await expect(dialog.get_by_label("Input as JSON")).to_have_value(
        f'{{\n  "order_id": "o-2",\n  "cents": {LARGE}\n}}'
    )
    await dialog.get_by_role("button", name="Edit as a form").click()
    await dialog.get_by_role("button", name="Start", exact=True).click()
    await page.wait_for_url(lambda url: "/runs/" in url and run_id not in url)
    assert await input_of(site, page) == {"order_id": "o-2", "cents": LARGE}


async def test_a_number_that_somebody_types_is_sent_as_typed(page: Page, site: Site) -> None:
    run_id = await site.start("patient")
    await page.goto(f"/runs/{run_id}")
    await page.locator(".need").get_by_role("button", name="Send it").click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_role("textbox", name="Payload").fill(f"[{LARGE}, 1.0]")
    await dialog.get_by_role("button", name="Send").click()
    await expect(page.get_by_text("The run took “go”")).to_be_visible()
    [received] = [event for event in await site.events(run_id) if event["event_type"] == "SignalReceived"]
    assert repr(received["data"]["payload"]) == f"[{LARGE}, 1.0]"


async def input_of(site: Site, page: Page) -> Any:
    """Return the input of the run that is shown."""
    [queued, *_] = await site.events(page.url.partition("/runs/")[2])
    return queued["data"]["input"]
