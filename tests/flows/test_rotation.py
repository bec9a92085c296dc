"""A flow rotates its history by itself, wherever it is: nothing that is open is lost."""

from dataclasses import replace

import pytest

import holdfast as hf
from holdfast import errors
from holdfast.core import events as e
from holdfast.core.state import CANCELLED
from tests.engine.harness import EngineVariant, wait_for_event, wait_for_status
from tests.flows.order_flow import Approval, Order

pytestmark = pytest.mark.contract("CAN-1")


def long_app(steps: int = 5) -> hf.App:
    """Return an app whose flows rotate after a few steps."""
    return hf.App("shop", limits=hf.Limits(rotation_steps=steps))


def counting(app: hf.App, done: list[str]) -> hf.Activity[[Order], Order]:
    """Register an activity that adds one cent."""

    @app.activity
    async def add(order: Order) -> Order:
        done.append("add")
        return replace(order, cents=order.cents + 1)

    return add


async def test_long_flow_rotates_between_its_steps(variant: EngineVariant) -> None:
    app, done = long_app(), list[str]()
    add = counting(app, done)
    flow = app.flow("long", Order, hf.Scene(*(hf.Act(add, step=f"add-{number}") for number in range(23))))
    async with variant.node(app):
        run = await app.start(flow, Order())
        assert (await run.result()).cents == 23
        events = await run.events()
    rotations = [event for event in events if isinstance(event.data, e.ContinuedAsNew)]
    assert len(rotations) == 4
    assert len(done) == 23


async def test_rotation_carries_open_waits_and_tasks(variant: EngineVariant) -> None:
    """CAN-1 without the author's help: the waits of a chorus are open while its other branch makes the history long."""
    app, done = long_app(), list[str]()
    add = counting(app, done)
    steps: list[hf.Act[Order]] = [hf.Act(add, step=f"add-{number}") for number in range(20)]
    flow = app.flow(
        "waiting",
        Order,
        hf.Chorus(
            hf.Scene(*steps, step="work"),
            hf.Signal("approval", Approval, on_receive=lambda order, given: replace(order, approved_by=given.by)),
            hf.Task("pack", str, on_answer=lambda order, answer: replace(order, parcel=answer)),
        ),
    )
    async with variant.node(app):
        run = await app.start(flow, Order())
        await wait_for_event(run, "ContinuedAsNew", 3)
        [asked] = await app.tasks.list()
        await app.tasks.complete(asked.task_id, "box 7", actor=hf.Actor("bob"))
        await run.signal("approval", Approval("ann"))
        assert await run.result() == Order(cents=20, approved_by="ann", parcel="box 7")
        events = await run.events()
    assert [event.step_id for event in events if isinstance(event.data, e.SignalWaiting)] == ["chorus/approval"]
    assert [event.step_id for event in events if isinstance(event.data, e.TaskCreated)] == ["chorus/pack"]


async def test_what_was_completed_before_a_rotation_is_undone_after_it(variant: EngineVariant) -> None:
    app, undone = long_app(), list[int]()

    @app.activity
    async def add(order: Order) -> Order:
        return replace(order, cents=order.cents + 1)

    @app.activity
    async def take(order: Order) -> None:
        undone.append(order.cents)

    @app.activity(retry=hf.Retry(max_attempts=1))
    async def fail(order: Order) -> None:
        raise hf.NonRetryable("no more")

    steps: list[hf.Act[Order]] = [hf.Act(add, step=f"add-{number}", compensate=take) for number in range(12)]
    flow = app.flow("undone", Order, hf.Scene(*steps, hf.Act(fail)))
    async with variant.node(app):
        run = await app.start(flow, Order())
        with pytest.raises(errors.RunFailed, match="no more"):
            await run.result()
        rotated = [event for event in await run.events() if isinstance(event.data, e.ContinuedAsNew)]
    assert len(rotated) > 2
    assert undone == list(range(12, 0, -1))


async def test_query_after_a_rotation_has_the_present_state(variant: EngineVariant) -> None:
    app, done = long_app(), list[str]()
    add = counting(app, done)
    steps: list[hf.Act[Order]] = [hf.Act(add, step=f"add-{number}") for number in range(12)]
    flow = app.flow("asked", Order, hf.Scene(*steps, hf.Scene(hf.Act(add), hf.Signal("go"), step="inner")))
    async with variant.node(app):
        run = await app.start(flow, Order())
        await wait_for_event(run, "SignalWaiting")
        assert await run.state() == Order(cents=13)
        assert (await run.query("state"))["cents"] == 13
        await run.signal("go")
        await run.result()


@pytest.mark.contract("CAN-1", "SIG-13")
async def test_flow_that_would_rotate_and_is_cancelled_in_one_turn_ends(variant: EngineVariant) -> None:
    """Both were recorded during a pause: the program gets them one after the other."""
    app, done = long_app(1), list[str]()
    add = counting(app, done)
    flow = app.flow("cancelled", Order, hf.Scene(hf.Signal("go"), hf.Act(add), hf.Signal("never")))
    async with variant.node(app):
        run = await app.start(flow, Order())
        await wait_for_event(run, "SignalWaiting")
        await run.pause(wait=True)
        await run.skip_step("go", wait=True)
        await run.cancel()
        await wait_for_status(run, CANCELLED)
    assert done == []


@pytest.mark.contract("CAN-1", "SIG-13")
async def test_flow_that_would_rotate_only_after_the_first_of_several_outcomes_goes_on(variant: EngineVariant) -> None:
    """The second one opens more than has ended; a rotation to where the flow was before it would lose that."""
    app = long_app(1)
    waits: hf.Chorus[Order] = hf.Chorus(*(hf.Signal(f"more-{number}") for number in range(9)), step="waits")
    way: hf.Scene[Order] = hf.Scene(hf.Signal("two"), waits, step="way")
    flow = app.flow("two", Order, hf.Chorus(hf.Signal("one"), way))
    async with variant.node(app):
        run = await app.start(flow, Order())
        await wait_for_event(run, "SignalWaiting")
        await run.pause(wait=True)
        await run.skip_step("chorus/one", wait=True)
        await run.skip_step("chorus/way/two", wait=True)
        await run.resume()
        for number in range(9):
            await run.signal(f"more-{number}")
        assert await run.result() == Order()
