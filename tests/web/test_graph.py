"""The graph of a run on the page: drawn, live, folded, and to be used by hand and by keyboard."""

import re
from itertools import pairwise
from typing import Any

import pytest
from msgspec import Struct
from playwright.async_api import Browser, Locator, Page, expect

from tests.web.browser import PHONE, module, open_page
from tests.web.site import HOSTILE, Site

LAYOUT = f"""async ([nodes, options]) => {{
    const {{ layout }} = await {module("run/layout.js")};
    const before = performance.now();
    const found = layout(nodes, () => [120, 46], options);
    const took = performance.now() - before;
    return {{ boxes: [...found.boxes.values()], edges: found.edges, took }};
}}"""


def node(page: Page, id: str) -> Locator:
    """Return the node of a step or a group."""
    return page.locator(f'.graph-node[data-id="{id}"]')


async def statuses(page: Page) -> dict[str, str]:
    """Return how each node is drawn."""
    found: dict[str, str] = await page.evaluate(
        """() => Object.fromEntries(
            [...document.querySelectorAll(".graph-node")].map((each) => [each.dataset.id, each.dataset.status]))"""
    )
    return found


async def opened(page: Page, site: Site, workflow: str = "drawn") -> str:
    """Open a run that waits for its approval."""
    run_id = await site.start(workflow, order_id="o-1")
    await page.goto(f"/runs/{run_id}")
    await expect(page.locator(".need")).to_be_visible()
    await expect(page.locator(".graph-node[data-status=WAITING]").first).to_be_visible()
    return run_id


async def test_nodes_change_as_the_run_goes_on_and_only_those(page: Page, site: Site) -> None:
    run_id = await opened(page, site)
    await expect(node(page, "approval")).to_have_attribute("data-status", "WAITING")
    assert await statuses(page) == {
        "check_stock": "SUCCESS",
        "over": "WAITING",
        "approval": "WAITING",
        "remind": "SKIPPED",
        "checks": "PENDING",
        "check_fraud": "PENDING",
        "check_address": "PENDING",
        "charge": "PENDING",
        "papers": "PENDING",
        "label": "PENDING",
        "invoice": "PENDING",
        "hostile": "PENDING",
        "book_courier": "PENDING",
        "ship": "PENDING",
    }
    await page.evaluate(
        """() => {
            window.drawnAnew = [];
            const seen = new MutationObserver((changes) => {
                for (const { target, type } of changes)
                    if (type === "childList") window.drawnAnew.push(target.closest(".graph-node")?.dataset.id);
            });
            seen.observe(document.querySelector(".run-graph-svg"), { childList: true, subtree: true });
            for (const each of document.querySelectorAll(".graph-node")) each.isTheSame = true;
        }"""
    )
    await site.send(run_id, "approval", {"approved": True, "by": "ann"})
    await expect(node(page, "ship")).to_have_attribute("data-status", "SUCCESS")
    await expect(page.locator(".head-marks")).to_contain_text("Completed")
    await expect(node(page, "book_courier")).to_have_attribute("data-status", "SKIPPED")
    await expect(node(page, "charge")).to_contain_text("×2")
    assert await page.evaluate("() => [...document.querySelectorAll('.graph-node')].every((each) => each.isTheSame)")
    drawn_anew = await page.evaluate("() => window.drawnAnew")
    assert "check_stock" not in drawn_anew
    assert "remind" not in drawn_anew


async def test_a_label_is_text_whatever_is_in_it(page: Page, site: Site) -> None:
    await opened(page, site)
    await expect(node(page, "hostile").locator("title")).to_contain_text(HOSTILE)
    await expect(node(page, "hostile").locator(".graph-label")).to_contain_text("<img src=x")
    await node(page, "hostile").click()
    await expect(page.locator(".detail")).to_contain_text(HOSTILE)
    assert await page.evaluate("() => window.hit") is None
    assert await page.locator(".run-graph :is(img, script), .detail :is(img, script)").count() == 0


async def test_a_node_opens_the_step_and_the_step_marks_its_node(page: Page, site: Site) -> None:
    await opened(page, site)
    await node(page, "check_stock").click()
    await expect(page.locator(".detail")).to_contain_text("Step completed")
    await expect(node(page, "check_stock")).to_have_attribute("aria-pressed", "true")
    await expect(page.get_by_role("button", name="check_stock, Activity, success")).to_have_attribute(
        "aria-pressed", "true"
    )
    await node(page, "charge").click()
    await expect(page.locator(".detail")).to_contain_text("It has not begun.")
    await expect(page.locator(".detail")).to_contain_text("checks")
    await page.get_by_role("button", name="approval, Wait, running").click()
    await expect(node(page, "approval")).to_have_attribute("aria-pressed", "true")
    await page.keyboard.press("Escape")
    await expect(page.locator(".detail")).to_be_hidden()
    await expect(page.locator(".graph-node[aria-pressed=true]")).to_have_count(0)


async def test_the_graph_is_used_by_keyboard_and_read_out(page: Page, site: Site) -> None:
    await opened(page, site)
    assert await page.locator(".graph-node[tabindex='0']").count() == 1
    await node(page, "check_stock").focus()
    await page.keyboard.press("ArrowRight")
    focused = "() => document.activeElement.dataset.id"
    seen = [await page.evaluate(focused)]
    for _ in range(12):
        await page.keyboard.press("ArrowRight")
        seen.append(await page.evaluate(focused))
    assert seen[0] != "check_stock"
    assert seen[-1] == "ship"
    await page.keyboard.press("Enter")
    await expect(page.locator(".detail")).to_contain_text("It has not begun.")
    await page.keyboard.press("Escape")
    assert await page.evaluate(focused) == "ship", "the focus comes back"
    spoken = await node(page, "charge").get_attribute("aria-label")
    assert spoken == "charge, Activity, pending, after checks"
    spoken = await node(page, "approval").get_attribute("aria-label")
    assert spoken is not None
    assert spoken.startswith("then: approval, Wait, waiting")
    assert "on the critical path" in spoken
    assert spoken.endswith("in over 100.00")
    scale = "() => document.querySelector('.run-graph-svg > g').getAttribute('transform')"
    before = await page.evaluate(scale)
    await page.keyboard.press("+")
    assert await page.evaluate(scale) != before


async def test_groups_fold_and_unfold_in_place(page: Page, site: Site) -> None:
    await opened(page, site)
    checks = node(page, "checks")
    await expect(checks).to_have_attribute("aria-expanded", "true")
    await checks.locator(".graph-grip").click()
    await expect(checks).to_have_attribute("aria-expanded", "false")
    await expect(node(page, "check_fraud")).to_have_count(0)
    await expect(checks).to_contain_text("0 of 2")
    await checks.focus()
    await page.keyboard.press("Enter")
    await expect(node(page, "check_fraud")).to_have_count(1)
    assert await page.evaluate("() => document.activeElement.dataset.id") == "checks"


async def test_the_critical_path_is_marked_and_can_be_left_out(page: Page, site: Site) -> None:
    await opened(page, site)
    critical = page.locator(".graph-edge[data-critical=true]")
    await expect(critical).to_have_count(1)
    widths = "all => all.map((each) => getComputedStyle(each).strokeWidth)"
    assert await critical.evaluate_all(widths) == ["2.6px"]
    await page.get_by_role("button", name="Mark the critical path").click()
    assert await critical.evaluate_all(widths) == ["1.3px"]


async def test_it_is_moved_zoomed_and_turned(page: Page, site: Site) -> None:
    await opened(page, site)
    graph = page.locator(".run-graph")
    box = await graph.bounding_box()
    assert box is not None
    place = (
        "() => { const b = document.querySelector('.graph-node').getBoundingClientRect(); return [b.x, b.y, b.width]; }"
    )
    x, y, width = await page.evaluate(place)
    await page.mouse.move(box["x"] + 5, box["y"] + 5)
    await page.mouse.down()
    await page.mouse.move(box["x"] + 65, box["y"] + 35, steps=4)
    await page.mouse.up()
    moved = await page.evaluate(place)
    assert moved == [pytest.approx(x + 60, abs=1.5), pytest.approx(y + 30, abs=1.5), pytest.approx(width)]
    await expect(page.locator(".detail")).to_be_hidden()
    await page.get_by_role("button", name="Zoom into the graph").click()
    assert (await page.evaluate(place))[2] > width * 1.3
    await page.get_by_role("button", name="Show the whole graph").click()
    frame = await graph.evaluate(
        "e => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; }"
    )
    boxes = await page.locator(".graph-node").evaluate_all(
        "all => all.map((e) => e.getBoundingClientRect()).map((b) => [b.left, b.top, b.right, b.bottom])"
    )
    assert all(b[0] >= frame[0] and b[1] >= frame[1] and b[2] <= frame[2] and b[3] <= frame[3] for b in boxes)
    first = (
        "() => ['check_stock', 'ship'].map((id) => document.querySelector(`[data-id=${id}]`).getBoundingClientRect().y)"
    )
    before = await page.evaluate(first)
    await page.get_by_role("button", name="Turn the graph").click()
    after = await page.evaluate(first)
    assert after[1] - after[0] > 2 * abs(before[1] - before[0])


async def test_the_graph_says_that_it_is_as_it_is_now(page: Page, site: Site) -> None:
    await opened(page, site)
    await expect(page.locator(".graph-tools .quiet")).to_have_text("1 waiting, 1 done, 1 skipped, 8 pending")
    await page.get_by_label("History").fill("2")
    await expect(page.locator(".graph-tools .quiet")).to_have_text(
        "As it is now: 1 waiting, 1 done, 1 skipped, 8 pending"
    )


async def test_code_has_no_graph(page: Page, site: Site) -> None:
    run_id = await site.start("order", order_id="o-1")
    await page.goto(f"/runs/{run_id}")
    await expect(page.locator(".need")).to_be_visible()
    await expect(page.locator(".graph-panel")).to_be_hidden()
    assert await page.locator(".graph-node").count() == 0


async def test_the_graph_fits_a_phone(browser: Browser, site: Site) -> None:
    async with open_page(browser, site.address, size=PHONE) as page:
        await opened(page, site)
        wide = await page.evaluate("() => document.documentElement.scrollWidth")
        assert wide <= PHONE["width"]
        box = await node(page, "approval").bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= PHONE["width"]


async def test_a_flow_is_drawn_with_its_state_and_its_compensation(page: Page, site: Site) -> None:
    purchase = {"customer": "Mallory", "cents": 500_00}
    run_id = await site.start("fulfil", state=purchase)
    await page.goto(f"/runs/{run_id}")
    await expect(node(page, "over 100.00/approval")).to_have_attribute("data-status", "WAITING")
    await expect(node(page, "over 100.00/wait a little")).to_have_attribute("data-status", "SKIPPED")
    state = page.get_by_role("group", name="State")
    await expect(state).to_contain_text("Mallory")
    await expect(state).not_to_contain_text("ann")
    await site.send(run_id, "approval", {"approved": True, "by": "ann"})
    await expect(state).to_contain_text("ann")
    await expect(page.locator(".head-marks")).to_contain_text("Failed")
    await expect(node(page, "both/pay")).to_have_attribute("data-status", "FAILED")
    await expect(node(page, "both/reserve_shelf:compensate")).to_have_attribute("data-status", "SUCCESS")
    await expect(node(page, "dispatch")).to_have_attribute("data-status", "PENDING")
    await node(page, "both/pay").click()
    await expect(page.locator(".detail")).to_contain_text("the card was stolen")


async def test_a_flow_is_started_with_a_form_that_checks_its_state(page: Page, site: Site) -> None:
    await page.goto("/runs")
    await page.get_by_role("button", name="Start a run").click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_label("Workflow").select_option("fulfil")
    await expect(dialog).to_contain_text("Take a purchase from its check to the parcel.")
    await dialog.get_by_label("Customer").fill("Ada")
    await dialog.get_by_role("button", name="Start", exact=True).click()
    await expect(dialog.locator("[data-name=cents] .error")).to_be_visible()
    await dialog.get_by_label("Cents").fill("a lot")
    await dialog.get_by_role("button", name="Start", exact=True).click()
    await expect(dialog.locator("[data-name=cents] .error")).to_be_visible()
    await dialog.get_by_label("Cents").fill("4200")
    await dialog.get_by_role("button", name="Start", exact=True).click()
    await expect(page.locator(".head-marks")).to_contain_text("Completed")
    await expect(page.get_by_role("group", name="State")).to_contain_text("R-4200")
    await expect(node(page, "gift card")).to_have_attribute("data-status", "SKIPPED")


PLAN = {
    "plan": "import",
    "version": "1",
    "inputs": {"rows": {"type": "array"}, "note": {"type": "string", "default": ""}},
    "steps": [
        {"id": "stock", "activity": "reserve", "input": {"order_id": "x"}},
        {
            "id": "load",
            "activity": "reserve",
            "for_each": "${inputs.rows}",
            "input": {"order_id": "${item}"},
            "depends_on": ["stock"],
        },
        {"id": "ask", "signal": "approval", "depends_on": ["load"]},
        {"id": "never", "activity": "reserve", "when": "${inputs.note == 'x'}", "input": {"order_id": "x"}},
        {"id": "end", "activity": "reserve", "input": {"order_id": "x"}, "depends_on": ["ask", "never"]},
    ],
}


async def test_a_plan_is_drawn_with_the_items_of_its_for_each(page: Page, site: Site) -> None:
    run = await site.orchard.app.plans.start(PLAN, {"rows": [f"r{number}" for number in range(100)]})
    await page.goto(f"/runs/{run.run_id}")
    await expect(node(page, "ask")).to_have_attribute("data-status", "WAITING")
    await expect(node(page, "never")).to_have_attribute("data-status", "SKIPPED")
    await expect(node(page, "load")).to_contain_text("100 of 100")
    await node(page, "load").click()
    await node(page, "load[0-59]").click()
    await node(page, "load[7]").click()
    await expect(page.locator(".detail")).to_contain_text("r7")
    await run.signal("approval", {})
    await expect(node(page, "end")).to_have_attribute("data-status", "SUCCESS")
    await expect(page.locator(".head-marks")).to_contain_text("Completed")


@pytest.mark.contract("SIG-13")
async def test_a_plan_is_operated_while_it_goes_on(page: Page, site: Site) -> None:
    """A step is approved, and one that has failed beside others is retried or skipped, where it is drawn."""
    steps = [
        {"id": "bad", "activity": "book_courier", "input": {"order_id": "x"}, "on_failure": "continue"},
        {"id": "after", "signal": "go", "depends_on": ["bad"]},
        {"id": "gate", "activity": "reserve", "input": {"order_id": "x"}, "requires_approval": True},
        {"id": "closed", "signal": "go", "requires_approval": {"roles": ["boss"]}},
    ]
    run = await site.orchard.app.plans.start({"plan": "operated", "version": "1", "steps": steps})
    await page.goto(f"/runs/{run.run_id}")
    await expect(node(page, "bad")).to_have_attribute("data-status", "FAILED")
    await expect(node(page, "after")).to_have_attribute("data-status", "SKIPPED")
    await node(page, "closed").click()
    detail = page.locator(".detail")
    await expect(detail).to_contain_text("closed:approval")
    await expect(detail.get_by_role("button", name="Approve")).to_have_count(0)
    await node(page, "gate").click()
    await detail.get_by_role("button", name="Approve").click()
    await page.get_by_role("dialog").get_by_role("button", name="Approve").click()
    await expect(node(page, "gate")).to_have_attribute("data-status", "SUCCESS")
    await node(page, "bad").click()
    await expect(detail.get_by_role("button", name="Retry step")).to_be_visible()
    await detail.get_by_role("button", name="Skip step").click()
    await page.get_by_role("dialog").get_by_role("button", name="Skip").click()
    await expect(node(page, "after")).to_have_attribute("data-status", "WAITING")


# --- 10,000 steps


class CostOfOpening(Struct, frozen=True):
    """What a run's page costs until its graph is drawn."""

    drawn_ms: float
    cpu_ms: float
    requests: int
    answered_bytes: int
    elements: int


async def cost_of_opening(page: Page, run_id: str) -> CostOfOpening:
    """Open a run's page in a tab that has its scripts, and measure."""
    await page.goto("about:blank")
    session = await page.context.new_cdp_session(page)
    await session.send("Performance.enable", {"timeDomain": "threadTicks"})
    await page.goto(f"/runs/{run_id}", wait_until="commit")
    await expect(page.locator(".graph-node").first).to_be_visible()
    metrics = {each["name"]: each["value"] for each in (await session.send("Performance.getMetrics"))["metrics"]}
    await session.detach()
    drawn, requests, answered, elements = await page.evaluate(
        """() => {
            const drawn = performance.getEntriesByName("graph-drawn")[0].startTime;
            const asked = performance.getEntriesByType("resource").filter((each) => each.startTime < drawn);
            const graph = asked.find((each) => each.name.endsWith("/graph"));
            return [drawn, asked.length, graph.decodedBodySize, document.querySelectorAll("*").length];
        }"""
    )
    return CostOfOpening(drawn, 1_000 * metrics["TaskDuration"], requests, answered, elements)


@pytest.mark.parametrize(
    "workflow", [pytest.param("chain", marks=pytest.mark.soak), pytest.param("fan", marks=pytest.mark.soak), "layers"]
)
async def test_ten_thousand_steps_open_fast_and_stay_usable(page: Page, site: Site, workflow: str) -> None:
    small, vast = [await site.start(each, order_id="o-1") for each in ("drawn", workflow)]
    few = await cost_of_opening(page, small)
    found = [await cost_of_opening(page, vast)]
    while min(each.drawn_ms for each in found) >= 1_000 and len(found) < 12:  # a machine that is busy has a free moment
        found.append(await cost_of_opening(page, vast))
    print(workflow, few, *found, sep="\n")
    assert min(each.drawn_ms for each in found) < 1_000, f"the graph was drawn after {found}"
    best = min(found, key=lambda each: each.cpu_ms)
    assert best.cpu_ms < 800, f"the page worked for {best}"
    assert best.requests <= 12, f"{best} for 10,000 steps, {few} for 14"
    assert best.answered_bytes < 16_000, f"{best}: it grows with the number of steps"
    assert best.elements < few.elements + 1_000, f"{best}: it grows with the number of steps"
    await expect(page.locator(".graph-tools .quiet")).to_contain_text(re.compile(r"\b\d+,\d{3} pending"))
    assert 2 < await page.locator(".graph-node").count() <= 70
    folds = page.locator(".graph-node[data-kind=steps][aria-expanded=false]")
    for _ in range(4):
        if not await folds.count():
            break
        before = await page.locator(".graph-node").count()
        await folds.first.focus()
        await page.keyboard.press("Enter")
        await expect(page.locator(".graph-node")).not_to_have_count(before)
    assert await page.locator(".graph-node").count() < 300
    frame_ms = await page.evaluate(
        """async () => {
            const buttons = ["Zoom into the graph", "Zoom out of the graph"]
                .map((name) => document.querySelector(`[aria-label="${name}"]`));
            const frames = [];
            for (let n = 0; n < 20; n += 1) {
                const before = performance.now();
                buttons[n % 2].click();
                await new Promise(requestAnimationFrame);
                await new Promise(requestAnimationFrame);
                frames.push(performance.now() - before);
            }
            return frames.sort((a, b) => a - b)[10];
        }"""
    )
    assert frame_ms < 250, f"the median of two frames took {frame_ms} ms"


async def test_a_step_that_is_folded_away_is_shown_when_it_is_chosen(page: Page, site: Site) -> None:
    await opened(page, site, "chain")
    await expect(node(page, "check_stock")).to_have_count(0)
    await page.get_by_role("button", name="check_stock, Activity, success").click()
    await expect(node(page, "check_stock")).to_have_attribute("aria-pressed", "true")
    await page.locator(".run-graph").scroll_into_view_if_needed()
    await expect(node(page, "check_stock")).to_be_in_viewport()


# --- the layout itself


def a_graph(seed: int) -> list[dict[str, Any]]:
    """Return nodes with dependencies, in groups; the same for the same seed."""
    value = seed * 7919 + 13
    nodes: list[dict[str, Any]] = []

    def draw(most: int) -> int:
        nonlocal value
        value = (value * 1_103_515_245 + 12_345) % 2**31
        return (value >> 8) % most

    groups: list[str | None] = [None]
    for number in range(8 + draw(50)):
        parent = groups[draw(len(groups))]
        siblings = [each["id"] for each in nodes if each["parent"] == parent]
        before = {siblings[draw(len(siblings))] for _ in range(draw(4))} if siblings else set()
        nodes.append({"id": f"n{number}", "parent": parent, "depends_on": sorted(before)})
        if draw(6) == 0 and len(groups) < 6:
            groups.append(f"n{number}")
    return nodes


@pytest.mark.parametrize("is_down", [False, True], ids=["right", "down"])
async def test_no_box_overlaps_and_no_edge_goes_through_a_node(page: Page, site: Site, is_down: bool) -> None:
    await page.goto("/runs")
    for seed in range(40):
        nodes = a_graph(seed)
        found = await page.evaluate(LAYOUT, [nodes, {"isDown": is_down, "most": 700}])
        boxes = {box["id"]: box for box in found["boxes"]}
        parents = {each["id"]: each["parent"] for each in nodes}
        assert boxes.keys() == parents.keys()
        for one in boxes.values():
            parent = parents[one["id"]]
            if parent is not None:
                assert is_within(one, boxes[parent]), (seed, one["id"])
            for other in boxes.values():
                if one["id"] < other["id"] and parents[other["id"]] == parent:
                    assert are_apart(one, other), (seed, one["id"], other["id"])
        assert len(found["edges"]) == sum(len(each["depends_on"]) for each in nodes)
        for edge in found["edges"]:
            siblings = [box for box in boxes.values() if parents[box["id"]] == parents[edge["from"]]]
            for box in siblings:
                if box["id"] not in (edge["from"], edge["to"]):
                    assert not any(is_inside(point, box) for point in along(edge["points"])), (seed, edge, box)


def is_within(inner: dict[str, float], outer: dict[str, float]) -> bool:
    return (
        inner["x"] >= outer["x"]
        and inner["y"] >= outer["y"] + 30
        and inner["x"] + inner["w"] <= outer["x"] + outer["w"]
        and inner["y"] + inner["h"] <= outer["y"] + outer["h"]
    )


def are_apart(one: dict[str, float], other: dict[str, float]) -> bool:
    return (
        one["x"] + one["w"] <= other["x"]
        or other["x"] + other["w"] <= one["x"]
        or one["y"] + one["h"] <= other["y"]
        or other["y"] + other["h"] <= one["y"]
    )


def is_inside(point: tuple[float, float], box: dict[str, float]) -> bool:
    x, y = point
    return box["x"] + 1 < x < box["x"] + box["w"] - 1 and box["y"] + 1 < y < box["y"] + box["h"] - 1


def along(points: list[list[float]]) -> list[tuple[float, float]]:
    """Return points of an edge, close to each other. Its curves stay in the rectangles of their ends."""
    found = []
    for (ax, ay), (bx, by) in pairwise(points):
        found += [(ax + (bx - ax) * n / 20, ay + (by - ay) * n / 20) for n in range(21)]
    return found


async def test_a_thousand_nodes_are_laid_out_at_once(page: Page, site: Site) -> None:
    await page.goto("/runs")
    nodes: list[dict[str, Any]] = [{"id": f"g{group}", "parent": None, "depends_on": []} for group in range(20)]
    nodes += [
        {"id": f"g{group}.{number}", "parent": f"g{group}", "depends_on": [f"g{group}.{number // 2}"] if number else []}
        for group in range(20)
        for number in range(50)
    ]
    found = await page.evaluate(LAYOUT, [nodes, {}])
    assert len(found["boxes"]) == 1_020
    assert found["took"] < 1_000, f"{found['took']} ms"
    print(f"{found['took']:.0f} ms")
