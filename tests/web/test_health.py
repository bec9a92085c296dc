"""Health: what the page says about nodes, queues, throughput, lag, limits and alerts, and to whom it says nothing."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from msgspec import Raw
from playwright.async_api import Browser, Locator, Page, expect

from holdfast.app import App
from holdfast.core.snapshot import Alert
from holdfast.engine.observe.samples import NodeLoad, Sample
from holdfast.engine.options import NodeOptions
from tests.web.browser import module as the_module
from tests.web.browser import open_page
from tests.web.inbox_site import InboxSite, serve_inbox, sign_in

SAMPLE_MS = 5_000
RUN_ID = "01890000-0000-7000-8000-000000000001"


@pytest_asyncio.fixture(loop_scope="session")
async def inbox() -> AsyncIterator[InboxSite]:
    """Return a desk that is open to everybody."""
    async with serve_inbox() as inbox:
        yield inbox


@pytest_asyncio.fixture(loop_scope="session")
async def screen(browser: Browser, inbox: InboxSite) -> AsyncIterator[Page]:
    """Return a page at that desk whose time passes only when a test says so."""
    async with open_page(browser, inbox.address) as page:
        await page.clock.install()
        yield page


def panel_of(page: Page, title: str) -> Locator:
    """Return the panel with a title."""
    return page.locator(".panel", has=page.get_by_role("heading", name=title, exact=True))


def graph_of(page: Page, title: str) -> Locator:
    """Return the chart with a title."""
    return page.locator(".graph", has=page.get_by_role("heading", name=title, exact=True))


async def next_sample(page: Page) -> None:
    """Let the time of one sample pass, and wait for it."""
    async with page.expect_response(lambda response: "/v1/alerts" in response.url):
        await page.clock.run_for(SAMPLE_MS)


async def module(page: Page, path: str, script: str) -> Any:
    """Return what a script makes of a module of the page, which it has as `m`."""
    return await page.evaluate(f"async () => {{ const m = await {the_module(path)}; {script} }}")


async def test_what_is_there_is_counted_and_linked(screen: Page, inbox: InboxSite) -> None:
    await inbox.start("printing")
    await inbox.waiting("sync", customer="a")
    await inbox.start("sync", customer="b")
    await inbox.task("refund", order="o-1", customer="Ada")
    await inbox.until("/v1/queues", lambda items: [each["jobs"] for each in items] == [2])
    await inbox.orchard.app.runtime().store.acquire_lock("retention", "node-7#5f2a", 60_000)
    await screen.goto("/health")
    await expect(screen.get_by_text("All is well.")).to_be_visible()
    await expect(panel_of(screen, "Nodes").locator("li")).to_have_count(1)
    await expect(panel_of(screen, "Nodes")).to_contain_text("answers here")
    await expect(panel_of(screen, "Locks").locator("li")).to_contain_text(["retention node-7held since"])
    await expect(panel_of(screen, "Queues").locator("li")).to_have_text(["labels2"])
    await expect(panel_of(screen, "Limits")).to_contain_text("1 run waits for a place.")
    await expect(panel_of(screen, "Limits")).to_contain_text("sync1 at once; beyond that: queue")
    await expect(panel_of(screen, "Runs").get_by_role("link")).to_have_text(["Running3", "Pending1"])
    await panel_of(screen, "Work").get_by_role("link", name="Open tasks").click()
    await expect(screen.locator(".task-row")).to_have_count(1)


async def test_throughput_and_latency_are_drawn_from_samples(screen: Page, inbox: InboxSite) -> None:
    await screen.goto("/health")
    throughput = graph_of(screen, "Throughput")
    await expect(throughput).to_contain_text("collecting the first samples")
    for _ in range(10):
        await inbox.start("picking", steps=3)
    await inbox.until("/v1/runs", lambda items: len(items) == 10, status="COMPLETED")
    await next_sample(screen)
    rates = await throughput.locator(".reading b").all_inner_texts()
    assert [float(text.removesuffix("/s")) > 0 for text in rates] == [True, True], rates
    latency = await graph_of(screen, "Commit latency").locator(".reading b").all_inner_texts()
    assert all(text.endswith(" ms") for text in latency), latency
    await next_sample(screen)
    await expect(throughput.locator(".reading b")).to_have_text(["0/s", "0/s"])
    await throughput.locator(".graph-frame").focus()
    await screen.keyboard.press("ArrowLeft")
    await screen.keyboard.press("ArrowLeft")
    assert await throughput.locator(".reading b").all_inner_texts() == rates
    await screen.get_by_role("link", name="Inbox").click()
    await expect(screen.get_by_role("heading", name="Inbox")).to_be_visible()
    await screen.get_by_role("link", name="Health").click()
    path = await throughput.locator("path.a").get_attribute("d")
    assert path is not None
    assert path.count("L") >= 1  # what was sampled before is still there


async def test_what_was_sampled_before_anybody_looked_is_drawn(screen: Page, inbox: InboxSite) -> None:
    """Failures over time, lag and load over all nodes, and which node has taken over from which."""
    store = inbox.orchard.app.runtime().store
    sample = Sample(
        runs={"RUNNING": 7, "PAUSED": 3},
        failed=12,
        retrying=5,
        overdue=9,
        lag_ms=4_000,
        nodes=2,
        load={"a": NodeLoad(7, 4)},
    )
    stored = json.dumps({"every_s": 60.0, "sample": json.loads(msgspec.json.encode(sample))}).encode()
    await store.put_bulletins("sample", {"1": Raw(stored)}, 3_600_000)
    await store.put_bulletins("takeover", {"b 1": Raw(b'{"node":"b","taken_from":"a","runs":3}')}, 3_600_000)
    await screen.goto("/health?range=1440")
    await expect(graph_of(screen, "Failures").locator(".reading")).to_have_text(["12/min failed"])
    await expect(graph_of(screen, "Load").locator(".reading").nth(1)).to_have_text("4 activities")
    await next_sample(screen)
    trouble = graph_of(screen, "Trouble")
    await expect(trouble.locator(".reading").first).to_have_text("0 retrying")  # as it is now
    await expect(trouble.locator(".reading").nth(2)).to_have_text("0 overdue")  # for no task is open
    await trouble.locator(".graph-frame").focus()
    await screen.keyboard.press("Home")
    await expect(trouble.locator(".reading").first).to_have_text("5 retrying")  # as it was
    await expect(panel_of(screen, "Takeovers").locator("li")).to_contain_text(["b has taken over 3 runs of a"])
    await expect(screen.locator(".verdict")).to_contain_text("b has taken over 3 runs of a")
    await store.put_bulletins("takeover", {"b 2": Raw(b'{"node":"b","taken_from":"a","runs":4}')}, 3_600_000)
    await next_sample(screen)
    await expect(panel_of(screen, "Takeovers").locator("li")).to_contain_text(["b has taken over 7 runs of a"])
    await store.put_bulletins("takeover", {"c 1": Raw(b'{"node":"c","taken_from":"b","runs":2}')}, 3_600_000)
    await next_sample(screen)
    await expect(screen.locator(".verdict")).to_contain_text(
        "2 nodes ended without stopping, and others have taken over 9 runs in the last quarter of an hour"
    )


async def test_how_far_back_is_in_the_address(screen: Page, inbox: InboxSite) -> None:
    await screen.goto("/health?range=60")
    await expect(screen.get_by_role("button", name="1 h")).to_have_attribute("aria-pressed", "true")
    await screen.get_by_role("button", name="5 min", exact=True).click()
    assert screen.url.endswith("/health?range=5")


@pytest.mark.contract("PRJ-3")
async def test_alerts_are_shown_as_they_are_raised_with_their_run(screen: Page, inbox: InboxSite) -> None:
    now = await inbox.orchard.app.runtime().store.now()
    await screen.goto("/health")
    await expect(panel_of(screen, "Alerts")).to_contain_text("None since this process began.")
    inbox.service.alerts.add([Alert("PROJECTOR_LAG_HIGH", 2, RUN_ID, "7.2 s behind")], now)
    await next_sample(screen)
    inbox.service.alerts.add([Alert("PROJECTOR_GAP_DETECTED", 1, RUN_ID, "<b>events 3 to 5 are missing</b>")], now)
    await next_sample(screen)
    lines = panel_of(screen, "Alerts").locator("li")
    await expect(lines).to_have_count(2)
    await expect(lines.first).to_contain_text("P1")
    await expect(lines.first).to_contain_text("PROJECTOR_GAP_DETECTED")
    await expect(lines.first).to_contain_text("<b>events 3 to 5 are missing</b>")
    await expect(lines.last).to_contain_text("PROJECTOR_LAG_HIGH")
    await expect(lines.last.get_by_role("link")).to_have_attribute("href", f"/runs/{RUN_ID}")
    await expect(screen.locator(".verdict")).to_contain_text("2 alerts in the last quarter of an hour.")


async def test_a_node_that_has_gone_is_missed_and_a_dead_letter_is_named(screen: Page, inbox: InboxSite) -> None:
    second, store = App("second"), inbox.orchard.app.runtime().store
    gone = panel_of(screen, "Nodes").locator("li.gone")
    async with second.node(store, name="second"):
        await store.renew("third#1", 3_000)
        await screen.goto("/health")
        await expect(panel_of(screen, "Nodes").locator("li")).to_have_count(3)
    await inbox.dead_letter()
    while await gone.count() < 2:
        await next_sample(screen)
    await expect(gone.filter(has_text="second")).to_contain_text("stopped, last seen")
    await expect(gone.filter(has_text="third")).to_contain_text("gone, lease ended")
    verdict = screen.locator(".verdict")
    await expect(verdict).to_contain_text("A node is gone: third")  # the other one has stopped in an orderly way
    await screen.clock.run_for(15_000)  # the doctor comes less often
    await expect(verdict).to_contain_text("1 dead letter is not settled")
    await expect(verdict.locator("code").last).to_have_text("holdfast dead-letter bulk requeue")
    await screen.set_viewport_size({"width": 240, "height": 800})
    lines = await verdict.locator("code .word").evaluate_all("words => words.map((word) => word.offsetHeight)")
    assert max(lines) == min(lines), "no word of a command is broken"
    await verdict.get_by_role("link", name="Look").click()
    await expect(screen.locator(".dead-letter")).to_have_count(1)


@pytest.mark.parametrize(
    ("looks_s", "lease_s", "has_stopped"),
    [
        ([0, 5], 10, True),  # its lease was ended before its time
        ([0, 5, 9, 11], 10, False),  # it was seen until its lease was nearly over
        ([0, 11], 10, True),  # nobody could look while the server was started again: nothing is claimed
        ([0, 600], 4, True),
    ],
)
async def test_only_a_node_that_was_seen_until_its_lease_was_over_is_said_to_be_gone(
    screen: Page, looks_s: list[int], lease_s: int, has_stopped: bool
) -> None:
    """The last look does not find it any more."""
    await screen.goto("/health")
    script = f"""
        const at = Date.now(), looks = {looks_s}, samples = new m.Samples();
        const node = {{ name: "second", lease_until: new Date(at + {lease_s} * 1000).toISOString() }};
        const real = Date.now;
        for (const [place, second] of looks.entries()) {{
            Date.now = () => at + second * 1000;
            samples.see(place < looks.length - 1 ? [node] : []);
        }}
        Date.now = real;
        const seen = samples.nodes.get("second");
        return [seen.isGone, seen.hasStopped];"""
    assert await module(screen, "health/samples.js", script) == [True, has_stopped]


async def test_a_node_is_shown_with_its_version_workflows_queues_and_load(screen: Page, inbox: InboxSite) -> None:
    second, store = App("second"), inbox.orchard.app.runtime().store

    @second.workflow
    async def greet() -> None: ...

    @second.workflow
    async def thank() -> None: ...

    options = NodeOptions(queues=("labels", "parcels"), lease_ms=1_000)
    async with second.node(store, name="second", options=options):
        await screen.goto("/health")
        shown = panel_of(screen, "Nodes").locator("li", has_text="second")
        while not re.search(r"0 runs, 0 activities", await shown.inner_text()):
            await next_sample(screen)  # what it does is said when its lease is renewed
        words = await shown.inner_text()
        assert re.search(r"\b\d+\.\d+\S* · 2 workflows · queue labels, parcels · 0 runs, 0 activities", words), words
        await expect(shown.locator("[title*=greet]")).to_have_attribute("title", "greet, thank")


@pytest.mark.contract("API-4")
async def test_who_may_not_see_it_is_told_why(browser: Browser) -> None:
    async with serve_inbox(is_guarded=True) as inbox:
        tenants = await inbox.token("tom", "admin", tenant="acme")
        narrow = await inbox.token("sue", "", scopes=["runs:read"])
        for token, words in ((tenants, "it needs a token without a tenant"), (narrow, "system:read")):
            async with open_page(browser, inbox.address) as page:
                asked: list[str] = []
                page.on("request", lambda request: asked.append(request.url))  # noqa: B023
                await sign_in(page, token, "/health")
                await expect(page.get_by_role("heading", name="Not for this token")).to_be_visible()
                await expect(page.get_by_text(words)).to_be_visible()
                assert not [url for url in asked if url.endswith("/metrics")]


async def test_the_last_sample_stays_while_the_service_is_away(browser: Browser) -> None:
    async with serve_inbox(is_up=False) as inbox, open_page(browser, inbox.address) as page:
        await page.clock.install()
        async with inbox.up():
            await page.goto("/health")
            await expect(panel_of(page, "Nodes").locator("li")).to_have_count(1)
        await page.clock.run_for(SAMPLE_MS)
        await expect(page.get_by_text("Connection lost, catching up")).to_be_visible()
        await expect(panel_of(page, "Nodes").locator("li")).to_have_count(1)
        async with inbox.up():
            await page.clock.run_for(SAMPLE_MS)
            await expect(page.locator(".banner")).to_be_hidden()
            await expect(page.get_by_text("All is well.")).to_be_visible()


async def test_metrics_are_read_as_they_are_written(screen: Page, inbox: InboxSite) -> None:
    await screen.goto("/health")
    text = 'holdfast_queue_jobs{queue="a\\"b\\\\c\\nd"} 3\n# HELP x\nholdfast_nodes 2\nother_thing 1'
    script = (
        f"const f = m.parse({json.dumps(text)}); return [m.by(f, 'queue_jobs', 'queue'), m.one(f, 'nodes'), f.size];"
    )
    assert await module(screen, "health/metrics.js", script) == [{'a"b\\c\nd': 3}, 2, 2]
    script = """
        const before = [[0.01, 5], [0.1, 5], [Infinity, 5]], after = [[0.01, 5], [0.1, 15], [Infinity, 15]];
        return [m.quantile(before, after, 0.5), m.quantile(after, after, 0.5), m.quantile([], after, 0.1)];"""
    half, nothing, low = await module(screen, "health/metrics.js", script)
    assert (round(half, 4), nothing) == (0.055, None)
    assert 0 < low < 0.01
    tops = "return [0, 0.3, 1, 3, 5, 7.5, 9, 11, 950].map(m.niceTop);"
    assert await module(screen, "health/chart.js", tops) == pytest.approx([1, 0.4, 1, 4, 6, 8, 10, 20, 1000])
