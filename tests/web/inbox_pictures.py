"""Photographs Inbox and Health, with tasks worth answering and some work behind them."""

import math
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

from playwright.async_api import Browser, Page, Route, expect

from holdfast.core.snapshot import Alert
from tests.web.browser import DESK, PHONE, open_page
from tests.web.inbox_site import InboxSite, serve_inbox

SAMPLES = 50
SAMPLE_MS = 5_000
REFUNDS = (
    ("ORD-1042", "Ada Lovelace", "The box arrived open, and two jars were broken.", 0.05),
    ("ORD-1043", "Grace Hopper", "It came two weeks late.", 5_400),
    ("ORD-1044", "Edsger Dijkstra", "Considered harmful.", 9_000),
    ("ORD-1047", "Katherine Johnson", "Counted again: one is missing.", 90_000),
)


async def photograph_inbox(
    browser: Browser, folder: Path, schemes: Sequence[str], settle_ms: int, samples: int = SAMPLES
) -> None:
    """Photograph Inbox and Health, at a desk and on a phone; with so many samples in the charts of Health."""
    async with serve_inbox() as inbox:
        task_id = await _fill(inbox)
        for scheme in schemes:
            await _inbox(browser, inbox, folder, task_id, scheme, settle_ms)
        await _health(browser, inbox, folder, schemes, samples, settle_ms)


async def _fill(inbox: InboxSite) -> str:
    tasks = [
        await inbox.task("refund", order=order, customer=who, comment=comment, due_s=due_s, escalate_s=due_s + 0.05)
        for order, who, comment, due_s in REFUNDS
    ]
    contract = await inbox.task("contract", supplier="Nordwind AG")
    path = f"/v1/tasks/{tasks[1]['task_id']}"
    bob = {"actor": "bob", "actor_roles": ["clerk", "director"]}
    await inbox.ask("POST", f"{path}/claim", **bob)
    await inbox.ask("POST", f"{path}/comments", text="She is right, the carrier lost it for ten days.", **bob)
    await inbox.ask("POST", f"{path}/release", **bob)
    await inbox.ask("POST", f"/v1/tasks/{contract['task_id']}/complete", answer=True, **bob)
    for number in range(3):
        run_id = await inbox.start("order", reference=f"ORD-{1050 + number}", order_id=f"o-{number}")
        await inbox.until(f"/v1/runs/{run_id}/waits", lambda items: len(items) == 1)
    await inbox.send(run_id, "address_changed", {"city": "Bergen", "by": "customer"})
    await inbox.waiting("sync", customer="a")
    for customer in "bcd":
        await inbox.start("sync", customer=customer)
    await inbox.start("printing")
    await inbox.dead_letter()
    return str(tasks[1]["task_id"])


async def _inbox(browser: Browser, inbox: InboxSite, folder: Path, task_id: str, scheme: str, settle_ms: int) -> None:
    async with open_page(browser, inbox.address, size=DESK, scheme=scheme) as page:
        await page.goto(f"/inbox/{task_id}")
        await expect(page.locator(".happenings li")).to_have_count(4)
        await page.get_by_label("Acting as").fill("ann")
        await page.get_by_role("group", name="Approved").get_by_text("Yes").click()
        await _photograph(page, folder, f"inbox-{scheme}", settle_ms)
        await page.goto("/inbox/signals")
        await expect(page.locator(".wait")).to_have_count(5)
        await expect(page.locator(".mail .letters > li")).to_have_count(1)
        await _photograph(page, folder, f"signals-{scheme}", settle_ms)
        await page.goto("/inbox/letters")
        await page.locator(".letter-details summary").first.click()
        await expect(page.locator(".letter-message .json")).to_be_visible()
        await _photograph(page, folder, f"letters-{scheme}", settle_ms)
    async with open_page(browser, inbox.address, size=PHONE, scheme=scheme) as page:
        await page.goto("/inbox")
        await expect(page.locator(".task-row")).to_have_count(5)
        await _photograph(page, folder, f"phone-inbox-{scheme}", settle_ms)
        await page.goto(f"/inbox/{task_id}")
        await expect(page.locator(".happenings li")).to_have_count(4)
        await page.get_by_role("group", name="Approved").get_by_text("Yes").click()
        await page.get_by_text("late", exact=True).click()
        await _photograph(page, folder, f"phone-task-{scheme}", settle_ms)


async def _health(
    browser: Browser, inbox: InboxSite, folder: Path, schemes: Sequence[str], samples: int, settle_ms: int
) -> None:
    """Let minutes pass on the page's clock, with more work and less, and photograph what it has drawn."""
    async with open_page(browser, inbox.address, size={**DESK, "height": 1240}) as page:
        await page.route("**/v1/health", _earlier)
        await page.clock.install()
        await page.goto("/health?range=5")
        for sample in range(samples):
            for _ in range(round(8 + 6 * math.sin(sample / 6) + sample % 3)):
                await inbox.start("picking", steps=3 + sample % 4)
            async with page.expect_response(lambda response: "/v1/alerts" in response.url):
                await page.clock.run_for(SAMPLE_MS)
        now = await inbox.orchard.app.runtime().store.now()
        [waiting, *_] = (await inbox.ask("GET", "/v1/waits"))["items"]
        inbox.service.alerts.add([Alert("PROJECTOR_LAG_HIGH", 2, waiting["run_id"], "6.1 s behind")], now - 100_000_000)
        for _ in range(9):
            await inbox.start("picking", steps=4)
        async with page.expect_response(lambda response: "/v1/alerts" in response.url):
            await page.clock.run_for(SAMPLE_MS)
        await expect(page.locator(".alerts li")).to_have_count(1)
        await page.clock.resume()
        for scheme in schemes:
            await page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
            await _photograph(page, folder, f"health-{scheme}", settle_ms)


async def _earlier(route: Route) -> None:
    """Let the service's clock be behind by as much as the page's will go ahead."""
    response = await route.fetch()
    health = await response.json()
    at = datetime.fromisoformat(health["time"]) - timedelta(milliseconds=(SAMPLES + 1) * SAMPLE_MS)
    await route.fulfill(response=response, json={**health, "time": at.isoformat()})


async def _photograph(page: Page, folder: Path, name: str, settle_ms: int) -> None:
    await page.evaluate("document.activeElement?.blur()")
    await page.wait_for_timeout(settle_ms)
    await page.screenshot(path=folder / f"{name}.png")
