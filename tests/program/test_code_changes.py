"""Kinds of changes to a workflow's code: each is noticed, or does no harm, as `docs/changing-code.md` says."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.state import COMPLETED
from holdfast.engine.check_histories import check_histories
from holdfast.errors import NondeterminismError
from tests.program.core_run import CoreRun

PAGE = Path(__file__).parents[2] / "docs" / "changing-code.md"

Order = Callable[..., Any]


class Shop:
    """The activities; their names can be changed."""

    def __init__(self, app: hf.App, charge: str = "charge") -> None:
        async def act(what: str) -> str:
            return what

        self.charge = app.activity(name=charge)(act)
        self.ship = app.activity(name="ship")(act)
        self.post = app.activity(name="post")(act)


def original(shop: Shop) -> Order:
    async def order() -> str:
        await shop.charge("a")
        await shop.charge("b")
        await shop.ship("a")
        await asyncio.gather(shop.charge("x"), shop.ship("y"))
        await hf.sleep(60)
        await hf.wait_signal("go", str)
        await hf.wait_signal("end", str)
        return "done"

    return order


def change(
    *,
    first: str = "charge",
    names: tuple[str, ...] = ("a", "b"),
    before_ship: str = "",
    steps: tuple[str, ...] = ("ship",),
    gathers: Callable[[Shop], Any] | None = None,
    sleeps: Callable[[], Any] = lambda: hf.sleep(60),
    signal: str = "go",
    ends_early: bool = False,
    at_the_end: str = "",
    patches: bool = False,
    wraps: bool = False,
    publishes: bool = False,
    answer: str = "done",
) -> Callable[[Shop], Order]:
    """Return the original with something changed."""

    def changed(shop: Shop) -> Order:
        async def order() -> str:
            for name in names:
                await shop.charge(name)
            if patches and hf.patched("greeting"):
                await shop.post("hello")
            if publishes:
                hf.publish(done=0.5)
            if before_ship:
                await getattr(shop, before_ship)("new")
            for step in steps:
                await (asyncio.create_task(getattr(shop, step)("a")) if wraps else getattr(shop, step)("a"))
            if ends_early:
                return "early"
            await (gathers(shop) if gathers else asyncio.gather(shop.charge("x"), shop.ship("y")))
            await sleeps()
            await hf.wait_signal(signal, str)
            if at_the_end:
                await getattr(shop, at_the_end)("late")
            await hf.wait_signal("end", str)
            return answer

        return order

    return changed


async def one_by_one(shop: Shop) -> None:
    await shop.charge("x")
    await shop.ship("y")


def swapped(shop: Shop) -> Order:
    async def order() -> str:
        await shop.ship("a")
        await shop.charge("a")
        return "done"

    return order


CHANGES: dict[str, Callable[[Shop], Order]] = {
    "add a step": change(before_ship="post"),
    "add a step after everything that was recorded": change(at_the_end="post"),
    "remove a step": change(steps=()),
    "replace a step by another one": change(steps=("post",)),
    "reorder two different steps": swapped,
    "reorder two calls of the same activity": change(names=("b", "a")),
    "change an activity's name": change(),
    "rename an activity's function and keep its registered name": change(),
    "change a step's arguments": change(names=("z", "z")),
    "add a branch that the run would have taken": change(steps=("ship", "post")),
    "add a branch that the run would not have taken": change(before_ship=""),
    "swap two different activities in a gather": change(gathers=lambda s: asyncio.gather(s.ship("y"), s.charge("x"))),
    "await one after the other what was gathered": change(gathers=one_by_one),
    "add a call of hf.publish": change(publishes=True),
    "change how long a sleep takes": change(sleeps=lambda: hf.sleep(5)),
    "replace hf.sleep by asyncio.sleep": change(sleeps=lambda: asyncio.sleep(60)),
    "choose the new code by patched()": change(patches=True),
    "change the name of a signal": change(signal="start"),
    "wrap a step in a task and await it there": change(wraps=True),
    "return earlier": change(ends_early=True),
    "return something else": change(answer="finished"),
}


def documented() -> dict[str, str]:
    """Return what the page says about each change."""
    rows = [line.split("|") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return {row[1].strip(): row[2].strip() for row in rows[1:]}


def app_with(make: Callable[[Shop], Order], charge: str = "charge") -> tuple[hf.App, Any]:
    app = hf.App("changes")
    return app, app.workflow(name="order")(make(Shop(app, charge)))


def recorded() -> CoreRun:
    """Return a run of the original that waits for its first signal."""
    run = CoreRun(*app_with(original)).start()
    for step_id in ("charge", "charge#2", "ship", "charge#3", "ship#2"):
        run.complete(step_id, step_id)
    run.fire("sleep")
    assert run.open == ["go"]
    return run


def test_the_page_has_every_change() -> None:
    assert list(documented()) == list(CHANGES)
    assert {verdict.split(",")[0] for verdict in documented().values()} == {"paused", "continues"}
    assert len(CHANGES) >= 12


@pytest.mark.contract("WF-2", "WF-3")
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed_or_does_no_harm_as_documented(name: str) -> None:
    run = recorded()
    app, _ = app_with(CHANGES[name], "charge_card" if name == "change an activity's name" else "charge")
    problems = check_histories(app.registry, [run.events])
    if documented()[name] == "paused":
        with pytest.raises(NondeterminismError) as caught:
            run.replayed(app)
        details = caught.value.details
        assert details["run_seq"] > 0
        assert details["expected"] != details["found"]
        assert f"event {details['run_seq']}" in caught.value.message
        assert f"{__file__}:" in caught.value.message
        [problem] = problems
        assert (problem.run_id, problem.code, problem.run_seq) == ("run-1", "NondeterminismError", details["run_seq"])
        assert (problem.expected, problem.found) == (details["expected"], details["found"])
        return
    assert problems == []
    changed = run.replayed(app)
    changed.send("go", "")
    if "post" in changed.open:
        changed.complete("post", "")
    changed.send("end", "")
    assert changed.state.status is COMPLETED
    assert changed.replayed().state == changed.state


@pytest.mark.contract("WF-3")
def test_new_runs_take_the_patched_way_and_replay_it() -> None:
    run = CoreRun(*app_with(CHANGES["choose the new code by patched()"])).start()
    for step_id in ("charge", "charge#2", "post"):
        run.complete(step_id, "")
    assert run.replayed().open == ["ship"]
    assert check_histories(run.app.registry, [run.events]) == []
