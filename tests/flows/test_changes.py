"""A changed tree is compared with the history by path: before it is deployed, and where it runs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.state import PAUSED
from holdfast.engine.check_histories import check_store
from holdfast.program.flow.steps import Step
from tests.engine.harness import EngineVariant, wait_for_event, wait_for_status
from tests.flows.order_flow import Order

pytestmark = pytest.mark.contract("WF-2", "WF-3")

Steps = Callable[[dict[str, Any]], list[Step[Order]]]


def shop(steps: Steps, limits: hf.Limits | None = None) -> tuple[hf.App, hf.Flow[Order]]:
    """Return an app with a flow of these steps; they are made of its activities."""
    app = hf.App("shop", limits=limits)
    acts: dict[str, Any] = {}
    for field in ("payment", "reservation", "parcel", "approved_by"):
        acts[field] = _setting(app, field)
    return app, app.flow("order", Order, hf.Scene(*steps(acts)))


def _setting(app: hf.App, field: str) -> Any:
    @app.activity(name=field)
    async def act(order: Order) -> Order:
        changes: dict[str, Any] = {field: "done"}
        return replace(order, **changes)

    return act


def before(acts: dict[str, Any]) -> list[Step[Order]]:
    """The steps that the run has begun with: it waits for `go`, within a chorus."""
    return [
        hf.Act(acts["payment"], condition=lambda order: True),
        hf.Cue(lambda order: True, then=hf.Act(acts["reservation"])),
        hf.Chorus(hf.Signal("go"), hf.Sleep(1_000_000)),
        hf.Act(acts["parcel"]),
    ]


def with_more_behind(acts: dict[str, Any]) -> list[Step[Order]]:
    return [*before(acts), hf.Act(acts["approved_by"])]


def with_more_elsewhere(acts: dict[str, Any]) -> list[Step[Order]]:
    """More in a way of the cue that was not taken, and a group around what is behind."""
    payment, _, chorus, parcel = before(acts)
    cue: hf.Cue[Order] = hf.Cue(
        lambda order: True, then=hf.Act(acts["reservation"]), otherwise=hf.Act(acts["approved_by"])
    )
    return [hf.Scene(payment, cue), chorus, hf.Scene(parcel, step="delivery")]


def with_another_function(acts: dict[str, Any]) -> list[Step[Order]]:
    """Conditions and choices that were made stay as they were."""
    _, _, chorus, parcel = before(acts)
    cue: hf.Cue[Order] = hf.Cue(lambda order: False, then=hf.Act(acts["reservation"]))
    return [hf.Act(acts["payment"], condition=lambda order: False), cue, chorus, parcel]


@pytest.mark.parametrize("steps", [with_more_behind, with_more_elsewhere, with_another_function])
@pytest.mark.parametrize("rotation_steps", [1, 1_000])
async def test_change_elsewhere_breaks_nothing(variant: EngineVariant, steps: Steps, rotation_steps: int) -> None:
    limits = hf.Limits(rotation_steps=rotation_steps)
    old, flow = shop(before, limits)
    new, _ = shop(steps, limits)
    async with variant.opened() as store:
        async with variant.node(old, store):
            run = await old.start(flow, Order(), run_id="run-1")
            await wait_for_event(run, "TimerStarted")
        assert await check_store(new.registry, store) == []
        async with variant.node(new, store):
            again = new.run("run-1")
            await again.signal("go")
            await again.skip_step("chorus/sleep", wait=True)
            assert (await again.result())["parcel"] == "done"


def inserted_before(acts: dict[str, Any]) -> list[Step[Order]]:
    return [hf.Act(acts["approved_by"]), *before(acts)]


def removed(acts: dict[str, Any]) -> list[Step[Order]]:
    return before(acts)[1:]


def renamed(acts: dict[str, Any]) -> list[Step[Order]]:
    _, *rest = before(acts)
    return [hf.Act(acts["payment"], condition=lambda order: True, step="pay"), *rest]


def another_activity(acts: dict[str, Any]) -> list[Step[Order]]:
    _, *rest = before(acts)
    return [hf.Act(acts["parcel"], condition=lambda order: True, step="payment"), *rest[:-1]]


def with_a_condition(acts: dict[str, Any]) -> list[Step[Order]]:
    payment, _, *rest = before(acts)
    cue: hf.Cue[Order] = hf.Cue(lambda order: True, then=hf.Act(acts["reservation"], condition=lambda order: True))
    return [payment, cue, *rest]


def without_the_way(acts: dict[str, Any]) -> list[Step[Order]]:
    payment, _, *rest = before(acts)
    cue: hf.Cue[Order] = hf.Cue(lambda order: "a", cases={"a": hf.Act(acts["approved_by"])})
    return [payment, cue, *rest]


def with_a_new_branch(acts: dict[str, Any]) -> list[Step[Order]]:
    payment, cue, _, parcel = before(acts)
    return [payment, cue, hf.Chorus(hf.Signal("go"), hf.Sleep(1_000_000), hf.Act(acts["approved_by"])), parcel]


DIFFERENCES: dict[str, tuple[Steps, str]] = {
    "a step before": (inserted_before, "'approved_by' before 'payment', which the run has passed"),
    "a step is gone": (removed, "the flow has no step 'payment' any more"),
    "a step has another name": (renamed, "the history has no condition of step 'pay'"),
    "another activity": (another_activity, "StepStarted of step 'payment' (payment); the code asks for RunActivity"),
    "a condition": (with_a_condition, "the history has no condition of step 'cue/reservation'"),
    "a way is gone": (without_the_way, "the choice 'then' of step 'cue'"),
    "a new branch": (with_a_new_branch, "'chorus/approved_by'"),
}


@pytest.mark.parametrize("case", DIFFERENCES)
async def test_difference_is_named_and_pauses_the_run(variant: EngineVariant, case: str) -> None:
    steps, words = DIFFERENCES[case]
    old, flow = shop(before)
    new, _ = shop(steps)
    async with variant.opened() as store:
        async with variant.node(old, store):
            run = await old.start(flow, Order(), run_id="run-1")
            await wait_for_event(run, "TimerStarted")
        [problem] = await check_store(new.registry, store)
        assert problem.code == "NondeterminismError"
        assert words in problem.message, problem.message
        assert "order" in problem.source
        async with variant.node(new, store):
            again = new.run("run-1")
            await again.signal("go")
            await wait_for_status(again, PAUSED)
            assert (await again.snapshot()).substatus == "NondeterminismError"
        async with variant.node(old, store):  # with the former code it goes on
            again = old.run("run-1")
            await again.skip_step("chorus/sleep")
            assert (await again.result())["parcel"] == "done"


def in_a_chorus(acts: dict[str, Any]) -> list[Step[Order]]:
    """Steps that rotate while the branches of a chorus are open."""
    work: list[hf.Act[Order]] = [hf.Act(acts["payment"], step=f"work-{number}") for number in range(4)]
    return [hf.Chorus(hf.Signal("go"), hf.Scene(*work, hf.Sleep(1_000_000), step="work"))]


ROTATED: dict[str, tuple[Steps, str]] = {
    "a step is gone": (before, "the run is at step 'chorus/work', which the flow has no more"),
    "the group is gone": (lambda acts: [hf.Act(acts["payment"])], "the run is at step 'chorus'"),
    "a new branch": (
        lambda acts: [hf.Chorus(*in_a_chorus(acts)[0].branches, hf.Sleep(1))],  # type: ignore[attr-defined]
        "step 'chorus/sleep' is a new branch",
    ),
    "an open step is gone": (
        lambda acts: [hf.Chorus(hf.Scene(hf.Signal("other"), step="work"))],
        "which is not in 'chorus/work' now",
    ),
}


@pytest.mark.contract("CAN-1")
@pytest.mark.parametrize("case", ROTATED)
async def test_difference_is_named_after_a_rotation(variant: EngineVariant, case: str) -> None:
    steps, words = ROTATED[case]
    limits = hf.Limits(rotation_steps=1)
    old, flow = shop(in_a_chorus, limits)
    new, _ = shop(steps, limits)
    async with variant.opened() as store:
        async with variant.node(old, store):
            run = await old.start(flow, Order(), run_id="run-1")
            await wait_for_event(run, "TimerStarted")
            await wait_for_event(run, "ContinuedAsNew", 2)
        [problem] = await check_store(new.registry, store)
        assert problem.code == "NondeterminismError"
        assert words in problem.message, problem.message


async def test_same_version_with_other_code_goes_to_nodes_that_have_it(variant: EngineVariant) -> None:
    """A run whose history does not fit a node's tree waits for a node where it does, and goes on by itself."""
    old, flow = shop(before)
    new, _ = shop(inserted_before)
    async with variant.opened() as store:
        async with variant.node(old, store):
            run = await old.start(flow, Order(), run_id="run-1")
            await wait_for_event(run, "TimerStarted")
        async with variant.node(new, store):
            again = new.run("run-1")
            await again.signal("go")
            await wait_for_status(again, PAUSED)
        async with variant.node(old, store):
            again = old.run("run-1")
            await wait_for_event(again, "RunResumed")
