"""Photographs the page for the documentation: `make pictures`."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, Page, expect

from tests.web.browser import DESK, PHONE, open_browser, open_page
from tests.web.inbox_pictures import photograph_inbox
from tests.web.site import Site, document, serve_site

FOLDER = Path(__file__).parent.parent.parent / "docs" / "pictures"
SCHEMES = ("light", "dark")
SETTLE_MS = 600


@asynccontextmanager
async def _site_with_runs() -> AsyncIterator[tuple[Site, dict[str, str]]]:
    """Return a site on which enough has happened to be worth looking at."""
    async with serve_site() as site, site.up():
        runs: dict[str, str] = {}
        for number in range(14):
            run_id = await _start(site, "order", f"ORD-{1040 + number}", order_id=f"o-{number}")
            if number % 3:
                await site.send(run_id, "approval", {"approved": True, "by": "ann"})
        for number in range(3):
            runs["courier"] = await _start(site, "courier", f"CR-{7 + number}", order_id=f"c-{number}")
        await _start(site, "hostile", "IMP-12", text="the file has no header")
        await _start(site, "wide", "NIGHTLY-3", steps=40)
        runs["basket"] = await _start(site, "basket", "CART-8", limit=9)
        for item in ("pears", "plums"):
            await site.http.post(f"/v1/runs/{runs['basket']}/updates/add", json={"input": {"item": item}})
        runs["rounds"] = await _start(site, "rounds", "SYNC-1", left=4)
        purchase = {"customer": "Ada Lovelace", "cents": 250_00}
        runs["fulfil"] = await _start(site, "fulfil", "ORD-2000", state=purchase)
        runs["layers"] = await _start(site, "layers", "IMPORT-1", order_id="o-1")
        for version in "12":
            await site.orchard.app.plans.register(document(version))
        await _schedule(site)
        runs["story"] = await _start(site, "story", "ORD-2001", order_id="o-2001")
        await site.http.get(f"/v1/runs/{runs['story']}/result?wait_s=3")
        await site.send(runs["story"], "approval", {"approved": True, "by": "ann"})
        await site.http.get(f"/v1/runs/{runs['story']}/result?wait_s=20")
        yield site, runs


async def _start(site: Site, workflow: str, reference: str, **input: Any) -> str:
    asked = {"workflow": workflow, "input": input, "reference_key": reference, "tags": ["eu", "web"]}
    response = await site.http.post("/v1/runs", json=asked)
    return str(response.json()["run_id"])


async def _schedule(site: Site) -> None:
    await site.schedule("daily report", "wide", cron="0 9 * * MON-FRI", tz="Europe/Sofia", input={"steps": 12})
    await site.schedule("import", "plan:etl", every_s=5_400, overlap="queue", input={"order": "o-1"})
    await site.schedule("nightly", "courier", cron="30 2 * * *", tz="America/New_York", input={"order_id": "c-9"})
    await site.http.post("/v1/schedules/nightly/pause", json={"note": "until the new courier has signed"})
    await site.http.post("/v1/schedules/daily report/trigger", json={})


async def _schedules(browser: Browser, site: Site, folder: Path, scheme: str, settle_ms: int) -> None:
    async with open_page(browser, site.address, size=DESK, scheme=scheme) as page:
        await page.goto("/schedules")
        await expect(page.locator(".schedule")).to_have_count(3)
        await _photograph(page, folder / f"schedules-{scheme}.png", settle_ms)


WITHOUT_ROOT = """root => {
    for (const trace of document.querySelectorAll(".trace pre"))
        trace.textContent = trace.textContent.replaceAll(root, "/srv/orchard");
}"""
"""Tracebacks name where the repository is on this machine, which is of no interest."""

ROOT = str(Path(__file__).parents[2])


async def _photograph(page: Page, path: Path, settle_ms: int) -> None:
    await page.wait_for_timeout(settle_ms)
    await page.evaluate(WITHOUT_ROOT, ROOT)
    await page.screenshot(path=path)


async def _at_a_desk(
    browser: Browser, site: Site, runs: dict[str, str], folder: Path, scheme: str, settle_ms: int
) -> None:
    async with open_page(browser, site.address, size=DESK, scheme=scheme) as page:
        await page.goto("/runs")
        await expect(page.get_by_role("link", name="ORD-2001")).to_be_visible()
        await _photograph(page, folder / f"runs-{scheme}.png", settle_ms)
        await page.goto(f"/runs/{runs['story']}?step=charge")
        await expect(page.locator(".head-marks")).to_contain_text("Completed")
        await page.get_by_role("button", name="Squeeze waits").click()
        await _photograph(page, folder / f"run-{scheme}.png", settle_ms)
        await page.goto(f"/runs/{runs['story']}?at=14")
        await expect(page.locator(".past")).to_be_visible()
        await _photograph(page, folder / f"history-{scheme}.png", settle_ms)
        await page.goto(f"/runs/{runs['courier']}")
        await expect(page.locator(".need")).to_be_visible()
        await _photograph(page, folder / f"paused-{scheme}.png", settle_ms)
        await page.goto(f"/runs/{runs['basket']}")
        await page.get_by_role("button", name="Ask items").click()
        await expect(page.get_by_role("group", name="Answer to items")).to_contain_text("plums")
        await _photograph(page, folder / f"asking-{scheme}.png", settle_ms)
        await page.goto(f"/runs/{runs['rounds']}")
        await expect(page.locator(".chart-back .rotation")).to_have_count(3)
        await _photograph(page, folder / f"rotated-{scheme}.png", settle_ms)


async def _graphs(
    browser: Browser, site: Site, runs: dict[str, str], folder: Path, scheme: str, settle_ms: int
) -> None:
    async with open_page(browser, site.address, size=DESK, scheme=scheme) as page:
        await page.goto(f"/runs/{runs['fulfil']}")
        await expect(page.locator(".graph-node[data-status=WAITING]").first).to_be_visible()
        await expect(page.get_by_role("group", name="State")).to_contain_text("Ada")
        await _photograph(page, folder / f"graph-{scheme}.png", settle_ms)
        await page.goto(f"/runs/{runs['layers']}")
        await page.locator(".graph-node[data-kind=steps]").first.click()
        await expect(page.locator(".graph-node[data-id=check_stock]")).to_be_visible()
        await _photograph(page, folder / f"folded-{scheme}.png", settle_ms)
        await page.goto("/plans?plan=etl&before=1")
        await expect(page.locator(".changes > li")).to_have_count(3)
        await expect(page.locator(".graph-node[data-change=added]")).to_be_visible()
        await _photograph(page, folder / f"plans-{scheme}.png", settle_ms)


async def _on_a_phone(
    browser: Browser, site: Site, runs: dict[str, str], folder: Path, scheme: str, settle_ms: int
) -> None:
    async with open_page(browser, site.address, size=PHONE, scheme=scheme) as page:
        await page.goto("/runs")
        await expect(page.get_by_role("link", name="ORD-2001")).to_be_visible()
        await _photograph(page, folder / f"phone-runs-{scheme}.png", settle_ms)
        await page.goto(f"/runs/{runs['courier']}")
        await expect(page.locator(".need")).to_be_visible()
        await _photograph(page, folder / f"phone-run-{scheme}.png", settle_ms)


async def photograph_runs(browser: Browser, folder: Path, schemes: Sequence[str], settle_ms: int) -> None:
    """Photograph the pages about runs, plans and schedules, at a desk and on a phone."""
    async with _site_with_runs() as (site, runs):
        for scheme in schemes:
            await _at_a_desk(browser, site, runs, folder, scheme, settle_ms)
            await _graphs(browser, site, runs, folder, scheme, settle_ms)
            await _schedules(browser, site, folder, scheme, settle_ms)
            await _on_a_phone(browser, site, runs, folder, scheme, settle_ms)


async def main() -> None:
    """Photograph every page, light and dark, each when it has settled."""
    FOLDER.mkdir(exist_ok=True)
    for photograph in (photograph_runs, photograph_inbox):
        async with open_browser() as browser:
            await photograph(browser, FOLDER, SCHEMES, SETTLE_MS)


if __name__ == "__main__":
    asyncio.run(main())
