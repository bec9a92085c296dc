"""Going through a run's history, and the drawing of it."""

import json
import re
from datetime import datetime
from typing import Any

import pytest
from playwright.async_api import Page, expect

import holdfast as hf
from tests.web.browser import PHONE, module
from tests.web.site import Site

FOLD = f"""async ([events, at]) => {{
    const {{ fold, snapshotOf }} = await {module("run/fold.js")};
    return snapshotOf(fold(events, at));
}}"""


async def test_dragging_through_history_shows_the_run_as_it_was(page: Page, site: Site) -> None:
    run_id = await site.start("order", order_id="o-1")
    await page.goto(f"/runs/{run_id}")
    await expect(page.locator(".need")).to_be_visible()
    await site.send(run_id, "approval", {"approved": True, "by": "ann"})
    await expect(page.locator(".head-marks")).to_contain_text("Completed")
    slider = page.get_by_label("History")
    box = await slider.bounding_box()
    assert box is not None
    await page.mouse.move(box["x"] + box["width"] - 4, box["y"] + box["height"] / 2)
    await page.mouse.down()
    await page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + box["height"] / 2, steps=8)
    await page.mouse.up()
    at = int(await slider.input_value())
    assert 1 < at < len(await site.events(run_id))
    await expect(page.locator(".head-marks")).to_contain_text(f"as it was at event {at}")
    await expect(page.locator(".head-marks")).to_contain_text("Running")
    await expect(page.get_by_role("button", name="charge, Activity")).to_have_count(0)
    await expect(page.locator(f".log-row[data-seq='{at}']")).to_have_attribute("data-here", "true")
    await expect(page.locator(f".log-row[data-seq='{at + 1}']")).to_have_attribute("data-later", "true")
    await page.reload()  # the place is in the address
    await expect(page.locator(".head-marks")).to_contain_text(f"as it was at event {at}")
    await page.get_by_role("button", name="Now").click()
    await expect(page.locator(".head-marks")).to_contain_text("Completed")
    await expect(page.get_by_role("button", name="charge, Activity")).to_have_count(1)


@pytest.mark.contract("PRJ-1", "PRJ-2")
async def test_the_page_folds_events_as_the_service_does(page: Page, site: Site) -> None:
    order = await site.start("order", order_id="o-1")
    courier = await site.start("courier", order_id="c-1")
    hostile = await site.start("hostile", text="x")
    await page.goto(f"/runs/{courier}")
    await expect(page.locator(".head-marks")).to_contain_text("Paused")
    await site.orchard.app.run(courier).skip_step("book_courier", "never mind", wait=True)
    await site.orchard.app.run(order).cancel("enough", wait=True)
    for run_id in (order, hostile):  # the courier's stays paused
        assert (await site.http.get(f"/v1/runs/{run_id}/result?wait_s=20")).json()["is_finished"]
    for run_id in (order, courier, hostile):
        snapshot = (await site.http.get(f"/v1/runs/{run_id}/snapshot")).json()
        events = await site.events(run_id)
        assert await page.evaluate(FOLD, [events, len(events)]) == as_folded(snapshot)


def as_folded(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Return what a fold on the page says of the same run."""
    names = ("step_id", "status", "kind", "logical_attempt_id", "engine_attempt_id")
    steps = [
        {name: step[name] for name in names} | {"error_code": (step["error"] or {}).get("code")}
        for step in snapshot["steps"]
    ]
    return {name: snapshot[name] for name in ("status", "substatus", "last_event_seq", "is_cancelling")} | {
        "steps": steps
    }


async def test_thousands_of_steps_are_drawn_a_screen_at_a_time(page: Page, site: Site) -> None:
    run_id = await site.start("wide", steps=2_000)
    await page.goto(f"/runs/{run_id}")
    await expect(page.locator(".head-marks")).to_contain_text("Completed", timeout=60_000)
    await expect(page.locator(".step-row")).to_have_count(1)
    await expect(page.locator(".step-name")).to_have_text("reserve ×2000")
    await expect(page.locator(".opens")).to_have_text("▸")  # one sees that it opens
    arrow = await page.locator(".opens").bounding_box()
    assert arrow is not None
    await page.mouse.click(arrow["x"] + arrow["width"] / 2, arrow["y"] + arrow["height"] / 2)
    await expect(page.locator(".opens").first).to_have_text("▾")
    await expect(page.locator(".step-row").nth(1)).to_be_visible()
    assert await page.locator(".step-row").count() < 60
    assert await page.locator(".log-row").count() < 60
    await page.locator(".step-label").first.focus()
    await page.keyboard.press("End")
    await expect(page.locator(".step-row[data-index='2000']")).to_be_visible()
    took = await page.evaluate(
        """async () => {
            const box = document.querySelector(".steps");
            const frames = [];
            for (let n = 0; n < 20; n += 1) {
                const before = performance.now();
                box.scrollTop = n * 2500;
                await new Promise(requestAnimationFrame);
                await new Promise(requestAnimationFrame);
                frames.push(performance.now() - before);
            }
            return frames.sort((a, b) => a - b)[10];
        }"""
    )
    assert took < 250, f"the median of two frames took {took} ms"


async def test_the_timeline_zooms_and_its_bars_are_to_scale(page: Page, site: Site) -> None:
    run_id = await site.start("order", order_id="o-1")
    await page.goto(f"/runs/{run_id}")
    await expect(page.locator(".need")).to_be_visible()
    await site.send(run_id, "approval", {"approved": True, "by": "ann"})
    await expect(page.locator(".head-marks")).to_contain_text("Completed")
    before = await widths(page)
    events = await site.events(run_id)
    spans = {step: span_ms(events, step) for step in ("approval", "sleep")}
    assert before["approval"] / before["sleep"] == pytest.approx(spans["approval"] / spans["sleep"], rel=0.25)
    await page.get_by_role("button", name="Zoom in").click()
    await expect(page.locator(".timeline-tools .quiet")).not_to_have_text("")
    await page.get_by_role("button", name="Show the whole run").click()
    await page.get_by_role("button", name="approval, Wait").click()
    await expect(page.locator(".detail")).to_contain_text("approved")
    await page.keyboard.press("Escape")
    await expect(page.locator(".detail")).to_be_hidden()


@pytest.mark.contract("CAN-1")
async def test_where_the_history_rotated_is_marked_to_scale(page: Page, site: Site) -> None:
    run_id = await site.start("rounds", left=3)
    await page.goto(f"/runs/{run_id}")
    await expect(page.locator(".head-marks")).to_contain_text("Completed")
    await expect(page.locator(".chart-back .rotation")).to_have_count(2)
    events = await site.events(run_id)
    at = {e["run_seq"]: datetime.fromisoformat(e["persisted_at"]).timestamp() for e in events}
    rotated = [e["run_seq"] for e in events if e["event_type"] == "ContinuedAsNew"]
    lines = await page.locator(".chart-back .rotation").evaluate_all(
        "all => all.map((e) => Number(e.getAttribute('x1')))"
    )
    bars = await page.locator(".bar-timer").evaluate_all("all => all.map((e) => Number(e.getAttribute('x')))")
    begun = [at[e["run_seq"]] for e in events if e["event_type"] == "TimerStarted"]
    per_second = (bars[-1] - bars[0]) / (begun[-1] - begun[0])
    for line, seq in zip(lines, rotated, strict=True):
        assert line == pytest.approx(bars[0] + (at[seq] - begun[0]) * per_second, abs=3)
    await page.get_by_label("History").fill(str(rotated[0]))
    await expect(page.locator(".chart-back .rotation")).to_have_count(1)
    await expect(page.locator(".travel-words")).to_contain_text("Continued as new")
    snapshot = (await site.http.get(f"/v1/runs/{run_id}/snapshot")).json()
    assert await page.evaluate(FOLD, [events, len(events)]) == as_folded(snapshot)


async def widths(page: Page) -> dict[str, float]:
    """Return how wide the first bar of each step is."""
    found = await page.evaluate(
        """() => JSON.stringify(Object.fromEntries([...document.querySelectorAll(".step-row")].map((row) => [
            row.querySelector(".step-name").textContent, Number(row.querySelector(".bar").getAttribute("width"))])))"""
    )
    widths: dict[str, float] = json.loads(found)
    return widths


def span_ms(events: list[dict[str, Any]], step_id: str) -> float:
    """Return how long a step took, as its events say."""
    times = [datetime.fromisoformat(e["persisted_at"]).timestamp() for e in events if e["step_id"] == step_id]
    return (times[-1] - times[0]) * 1_000


async def test_what_is_wrong_is_on_top_with_the_authors_frames_first(page: Page, site: Site) -> None:
    run_id = await site.start("hostile", text="no such shelf")
    await page.goto(f"/runs/{run_id}")
    await expect(page.locator(".trouble .error-head").first).to_contain_text("ValueError")
    found = await page.evaluate(
        f"""async () => {{
            const {{ ownFrames }} = await {module("run/errors.js")};
            return ownFrames([
                "Traceback (most recent call last):",
                '  File "/x/site-packages/holdfast/program/loop.py", line 3, in step',
                "    go()",
                '  File "/app/shop.py", line 7, in order',
                "    raise ValueError(text)",
                "ValueError: no such shelf",
            ].join("\\n"));
        }}"""
    )
    assert found == '  File "/app/shop.py", line 7, in order\n    raise ValueError(text)'
    await page.set_viewport_size({"width": PHONE["width"], "height": PHONE["height"]})
    frames = page.locator(".trace[open] pre").first  # all of them are the author's, and so they are open
    assert await frames.evaluate("pre => pre.scrollWidth <= pre.clientWidth"), (
        "the line of a frame can be read on a phone"
    )


async def test_large_values_are_cut_until_they_are_asked_for(page: Page, site: Site) -> None:
    run_id = await site.start("hostile", text="x" * 5_000)
    await page.goto(f"/runs/{run_id}")
    shown = page.get_by_role("group", name="Input").locator(".json-text")
    await expect(shown).to_contain_text("show all 5,000 characters")
    assert len(await shown.inner_text()) < 1_200
    await shown.get_by_role("button").click()
    await expect(shown).to_contain_text("x" * 5_000)


async def test_the_steps_of_a_child_open_in_place(page: Page, site: Site) -> None:
    """By mouse and by keyboard, drawn at their own times, and each leads to its run."""
    run_id = await site.start("story", order_id="o-1")
    await page.goto(f"/runs/{run_id}")
    child = page.locator(".step-row", has_text="wide").first
    await expect(child.locator(".opens")).to_have_attribute("aria-expanded", "false", timeout=30_000)
    inner = page.locator(".step-row[data-depth='1']")
    await expect(inner).to_have_count(0)
    await child.locator(".opens").click()
    await expect(inner.locator(".step-name")).to_have_text(["reserve", "reserve#2"])
    await expect(inner.locator(".bar").first).to_have_attribute("data-status", "SUCCESS")
    await child.locator(".opens").click()
    await expect(inner).to_have_count(0)
    await child.locator(".step-label").focus()
    await page.keyboard.press("ArrowRight")
    await expect(inner).to_have_count(2)
    await page.keyboard.press("ArrowLeft")
    await expect(inner).to_have_count(0)
    await page.keyboard.press("ArrowRight")
    await inner.locator(".step-label").nth(1).click()
    await expect(page.get_by_role("heading", name="reserve#2")).to_be_visible()
    assert page.url.endswith("?step=reserve%232")


async def test_labels_of_bars_stay_within_the_drawing(page: Page, site: Site) -> None:
    """Beside their bars where there is room, and inside of a bar that goes from one edge to the other."""
    run_id = await site.start("order", order_id="o-1")
    await page.goto(f"/runs/{run_id}")
    inside = page.locator(".step-row", has_text="approval").locator("text.took.inside")
    await expect(inside).to_be_visible()  # once the wait is the most of the run
    is_within = """() => {
        const labels = [...document.querySelectorAll(".step-row text.took")];
        return labels.length > 0 && labels.every((each) => {
            const [text, drawing] = [each.getBoundingClientRect(), each.ownerSVGElement.getBoundingClientRect()];
            return Math.max(drawing.left - text.left, text.right - drawing.right) <= 1;
        });
    }"""
    for size in (page.viewport_size, PHONE):
        assert size is not None
        await page.set_viewport_size(size)  # type: ignore[arg-type]
        await page.wait_for_function(is_within)  # what was drawn for another size is drawn again
        await expect(inside).to_be_visible()


async def test_an_event_does_not_repeat_the_name_of_its_step(page: Page, site: Site) -> None:
    run_id = await site.start("order", order_id="o-1")
    await page.goto(f"/runs/{run_id}")
    waiting = page.locator(".log-line", has_text="Signal waiting")
    await expect(waiting.locator(".log-gist")).to_have_text(re.compile(r"^\s*approval\s*$"))


async def test_ticks_of_the_timeline_are_written_as_durations_are(page: Page, site: Site) -> None:
    await page.goto("/runs")
    words = await page.evaluate(
        f"async () => {{ const {{ tickWord }} = await {module('run/scale.js')};"
        "return [[60_000, 15_000], [75_000, 15_000], [30_000, 15_000], [0, 15_000]].map((of) => tickWord(...of)); }"
    )
    assert words == ["1 min", "1 min 15 s", "30 s", "0"]


async def test_ids_and_values_are_copied_by_a_button(page: Page, site: Site) -> None:
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    run_id = await site.start("order", order_id="o-1")
    await page.goto(f"/runs/{run_id}")
    copied = "navigator.clipboard.readText()"
    await page.get_by_title("Copy the id").click()
    await expect(page.get_by_text("The id was copied.")).to_be_visible()
    assert await page.evaluate(copied) == run_id
    await page.get_by_role("group", name="Input").get_by_role("button", name="Copy").click()
    await expect(page.get_by_text("Copied.", exact=True)).to_be_visible()
    assert json.loads(await page.evaluate(copied)) == {"order_id": "o-1"}


async def test_scopes_stand_in_the_names_of_steps(page: Page, site: Site) -> None:
    app = site.orchard.app

    @app.workflow
    async def scoped() -> None:
        async with hf.scope("item 17"):
            await hf.sleep(0.001, name="cool down")

    run_id = await site.start("scoped")
    await page.goto(f"/runs/{run_id}")
    await expect(page.locator(".step-name")).to_have_text(["item 17/cool down"])
    await expect(page.locator(".log-row", has_text="item 17/cool down").first).to_be_visible()
