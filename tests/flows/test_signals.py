"""Signals of flows: every decision, every row of the status table, and every open question of the design of signals.

Tests are named after them. The order is that of the design.
"""

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

import holdfast as hf
from holdfast import errors
from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.state import CANCELLED
from tests.engine.harness import EngineVariant, store_with_virtual_time, wait_for_event, wait_for_status
from tests.flows.order_flow import Approval, Order, Shop

TWO_DAYS_MS = 2 * 86_400_000


def waiting(app: hf.App, name: str = "waits", **options: Any) -> hf.Flow[Order]:
    """Register a flow that waits for an approval."""

    def approve(order: Order, approval: Approval) -> Order:
        return replace(order, approved_by=approval.by)

    return app.flow(name, Order, hf.Signal("approval", Approval, **{"on_receive": approve, **options}))


def bodies(events: list[e.Event], kind: type[e.Body]) -> list[Any]:
    """Return the bodies of one type."""
    return [event.data for event in events if isinstance(event.data, kind)]


# --- decisions


@pytest.mark.contract("SIG-8", "WF-1")
async def test_signal_as_a_workflow_primitive(variant: EngineVariant) -> None:
    """It is an explicit pause point with a typed payload and a time limit of its own."""
    shop = Shop()
    async with variant.node(shop.app):
        run = await shop.app.start(shop.fulfil, Order(cents=500_00))
        await wait_for_event(run, "SignalWaiting")
        [wait] = [wait async for wait in shop.app.waits(run_id=run.run_id)]
        assert (wait.name, wait.step_id) == ("approval", "cue/approval")
        assert wait.until is not None
        assert wait.until - wait.since == TWO_DAYS_MS * 1_000
        await run.signal("approval", Approval("ann"))
        assert (await run.result()).approved_by == "ann"


@pytest.mark.contract("SIG-4", "SIG-8")
async def test_event_model(variant: EngineVariant) -> None:
    """Waiting, received with the payload and the state after, or timed out."""
    app = hf.App("events")
    flow = app.flow(
        "events",
        Order,
        hf.Scene(
            hf.Signal("one", Approval, on_receive=lambda order, given: replace(order, approved_by=given.by)),
            hf.Signal("two", timeout=0.001, on_timeout=lambda order: replace(order, approved=False)),
        ),
    )
    async with variant.node(app):
        run = await app.start(flow, Order())
        await run.signal("one", Approval("ann"))
        await run.result()
        events = await run.events()
    assert [body.name for body in bodies(events, e.SignalWaiting)] == ["one", "two"]
    [received] = bodies(events, e.SignalReceived)
    assert codec.decode(received.payload, Approval) == Approval("ann")
    assert codec.decode(received.state_after, Order) == Order(approved_by="ann")
    [timed_out] = bodies(events, e.SignalTimedOut)
    assert timed_out.name == "two"


@pytest.mark.contract("SIG-8", "TMR-1")
async def test_timeout_via_scheduled_jobs(variant: EngineVariant) -> None:
    """The time limit is a message that the store holds until it is due: exact, and without polling."""
    shop = Shop()
    async with store_with_virtual_time(variant) as (store, clock), variant.node(shop.app, store, safety_poll_s=0.01):
        run = await shop.app.start(shop.fulfil, Order(cents=500_00))
        waited = await wait_for_event(run, "SignalWaiting")
        clock.advance(ms=TWO_DAYS_MS - 1)
        await asyncio.sleep(0.05)
        assert not bodies(await run.events(), e.SignalTimedOut)
        clock.advance(ms=1)
        assert not (await run.result()).approved
        timed_out = await wait_for_event(run, "SignalTimedOut")
        assert timed_out.emitted_at - waited.emitted_at == TWO_DAYS_MS * 1_000
    assert shop.called.count("reject") == 1


@pytest.mark.contract("SIG-8")
async def test_timeout_job_idempotency(variant: EngineVariant) -> None:
    """A signal that came just in time is not overridden by the time limit."""
    shop = Shop()
    async with store_with_virtual_time(variant) as (store, clock):
        async with variant.node(shop.app, store):
            run = await shop.app.start(shop.fulfil, Order(cents=500_00))
            await wait_for_event(run, "SignalWaiting")
        clock.advance(ms=TWO_DAYS_MS - 1)
        async with shop.app.connect(store):
            await shop.app.run(run.run_id).signal("approval", Approval("ann"))
        clock.advance(ms=60_000)
        async with variant.node(shop.app, store):
            again = shop.app.run(run.run_id)
            assert (await again.result())["approved_by"] == "ann"
            assert not bodies(await again.events(), e.SignalTimedOut)
    assert "reject" not in shop.called


@pytest.mark.contract("SIG-4", "SIG-5")
async def test_send_signal_api(variant: EngineVariant) -> None:
    """A signal is recorded once and the flow goes on; a repeated one is answered as the first."""
    app = hf.App("sent")
    flow = waiting(app)
    async with variant.node(app):
        run = await app.start(flow, Order())
        first = await run.signal("approval", Approval("ann"), signal_id="click-1")
        again = await run.signal("approval", Approval("ann"), signal_id="click-1")
        assert first.signal_storage_key == again.signal_storage_key
        assert (await run.result()).approved_by == "ann"
        assert len(bodies(await run.events(), e.SignalReceived)) == 1
        with pytest.raises(errors.RunTerminal):
            await run.signal("approval", Approval("bob"), signal_id="click-2")


@pytest.mark.contract("SIG-9")
async def test_signal_names_are_unique_within_workflow() -> None:
    """Two waits of one name are two steps: they need names of their own, so that each has an address."""
    app = hf.App("names")
    with pytest.raises(errors.InvalidInput, match="two steps have the path 'approval'"):
        app.flow("twice", Order, hf.Scene(hf.Signal("approval"), hf.Signal("approval")))
    flow = app.flow("named", Order, hf.Scene(hf.Signal("approval"), hf.Signal("approval", step="second")))
    assert list(flow.definition.nodes) == ["approval", "second"]


# --- open questions


@pytest.mark.contract("SIG-9")
async def test_question_1_multiple_waiters_for_same_signal(variant: EngineVariant) -> None:
    """The path addresses one of them; the name alone goes to the oldest."""
    app = hf.App("both")
    flow = app.flow(
        "both",
        Order,
        hf.Chorus(
            hf.Signal("approval", str, step="left", on_receive=lambda order, by: replace(order, payment=by)),
            hf.Signal("approval", str, step="right", on_receive=lambda order, by: replace(order, parcel=by)),
        ),
    )
    async with variant.node(app):
        run = await app.start(flow, Order())
        await wait_for_event(run, "SignalWaiting", 2)
        await run.signal("approval", "for the right one", step_id="chorus/right")
        await run.signal("approval", "for the oldest")
        assert await run.result() == Order(payment="for the oldest", parcel="for the right one")


@pytest.mark.contract("SIG-9")
async def test_question_2_signal_discovery(variant: EngineVariant) -> None:
    """Runs are found by what they wait for, and the waits of a run are listed."""
    app = hf.App("found")
    flow = waiting(app)
    async with variant.node(app):
        runs = [await app.start(flow, Order(), run_id=f"run-{number}") for number in range(3)]
        for run in runs:
            await wait_for_event(run, "SignalWaiting")
        found = [wait async for wait in app.waits(name="approval")]
        assert sorted(wait.run_id for wait in found) == ["run-0", "run-1", "run-2"]
        await runs[0].signal("approval", Approval("ann"))
        await runs[0].result()
        assert [wait async for wait in app.waits(run_id="run-0")] == []


@pytest.mark.contract("SIG-10")
async def test_question_3_signal_payload_validation(variant: EngineVariant) -> None:
    """The type is declared with the flow: a payload that does not fit is refused where it is sent, and so is a name."""
    app = hf.App("checked")
    flow = waiting(app)
    async with variant.node(app):
        run = await app.start(flow, Order())
        with pytest.raises(errors.InvalidInput, match="payload"):
            await run.signal("approval", {"by": 7})
        with pytest.raises(errors.NotFound, match="declares no signal 'aproval'"):
            await run.signal("aproval", Approval("ann"))
        await run.signal("approval", Approval("ann"))
        await run.result()


@pytest.mark.contract("SIG-8")
async def test_question_3_on_receive_that_raises_fails_the_flow(variant: EngineVariant) -> None:
    app = hf.App("raising")

    def refuse(order: Order, approval: Approval) -> Order:
        raise ValueError(f"{approval.by} may not")

    flow = waiting(app, on_receive=refuse)
    async with variant.node(app):
        run = await app.start(flow, Order())
        await run.signal("approval", Approval("bob"))
        with pytest.raises(errors.RunFailed, match="bob may not"):
            await run.result()
        [received] = bodies(await run.events(), e.SignalReceived)
        assert received.error.code == "ValueError"


@pytest.mark.contract("SIG-8")
async def test_question_4_signal_expiry_vs_timeout(variant: EngineVariant) -> None:
    """There is no expiry beside the time limit: `on_receive` decides what an approval is still worth."""
    app = hf.App("expiry")

    def approve(order: Order, approval: Approval) -> Order:
        return replace(order, approved=approval.by != "stale")

    flow = waiting(app, on_receive=approve, timeout=timedelta(hours=48), on_timeout=lambda order: order)
    async with variant.node(app):
        run = await app.start(flow, Order())
        await run.signal("approval", Approval("stale"))
        assert not (await run.result()).approved


@pytest.mark.contract("SIG-12")
async def test_question_5_signal_acknowledgment(variant: EngineVariant) -> None:
    """The sender is answered when the signal is durable; its receipt shows what has become of it."""
    app = hf.App("acknowledged")
    flow = waiting(app)
    async with variant.node(app):
        run = await app.start(flow, Order())
        sent = await run.signal("approval", Approval("ann"))
        assert sent.accepted
        await run.result()
        receipt = await run.receipt(sent)
        assert receipt.status == "consumed"


@pytest.mark.contract("SIG-8", "WF-5")
async def test_question_6_conditional_signals(variant: EngineVariant) -> None:
    """The condition is evaluated at entry only, once, and recorded."""
    app, calls = hf.App("conditional"), list[int]()

    def is_large(order: Order) -> bool:
        calls.append(order.cents)
        return order.cents > 100

    flow = waiting(app, condition=is_large)
    async with variant.node(app):
        small = await app.start(flow, Order(1))
        assert await small.result() == Order(1)
        assert not bodies(await small.events(), e.SignalWaiting)
        large = await app.start(flow, Order(1_000))
        await wait_for_event(large, "SignalWaiting")
        await large.signal("approval", Approval("ann"))
        assert (await large.result()).approved_by == "ann"
        assert [body.value for body in bodies(await large.events(), e.MarkerRecorded)] == [codec.encode(True)]
    assert calls == [1, 1_000]


@pytest.mark.contract("SIG-8", "SIG-13")
async def test_question_7_signal_cancellation(variant: EngineVariant) -> None:
    """A cancelled run waits for nothing; its time limit comes to nothing when it is due."""
    shop = Shop()
    async with store_with_virtual_time(variant) as (store, clock), variant.node(shop.app, store, safety_poll_s=0.01):
        run = await shop.app.start(shop.fulfil, Order(cents=500_00))
        await wait_for_event(run, "SignalWaiting")
        await run.cancel(wait=True)
        await wait_for_status(run, CANCELLED)
        assert [wait async for wait in shop.app.waits(run_id=run.run_id)] == []
        before = len(await run.events())
        clock.advance(ms=TWO_DAYS_MS + 1)
        await asyncio.sleep(0.05)
        assert len(await run.events()) == before
    assert "reject" not in shop.called


@pytest.mark.contract("SIG-1")
async def test_question_8_signal_ordering(variant: EngineVariant) -> None:
    """Signals that are sent rapidly wait in the mailbox, each for its step; those of one name in their order."""
    app = hf.App("ordered")
    flow = app.flow(
        "ordered",
        Order,
        hf.Scene(
            hf.Signal("b", str, on_receive=lambda order, text: replace(order, payment=text)),
            hf.Signal("a", str, on_receive=lambda order, text: replace(order, parcel=text)),
            hf.Signal(
                "a", str, step="a-again", on_receive=lambda order, text: replace(order, parcel=order.parcel + text)
            ),
        ),
    )
    async with variant.node(app):
        run = await app.start(flow, Order())
        await asyncio.gather(*(run.signal("a", text) for text in "xy"), run.signal("b", "z"))
        result = await run.result()
    assert result.payment == "z"
    assert sorted(result.parcel) == ["x", "y"]


@pytest.mark.contract("SIG-9")
async def test_question_9_bulk_signal_operations(variant: EngineVariant) -> None:
    """Many signals go in one call, and each is answered by itself."""
    app = hf.App("many")
    flow = waiting(app)
    async with variant.node(app):
        runs = [await app.start(flow, Order()) for _ in range(3)]
        sent = [{"run_id": run.run_id, "name": "approval", "payload": Approval("ann")} for run in runs]
        answers = await app.signal_many([*sent, {"run_id": "nobody", "name": "approval"}])  # type: ignore[list-item]
        assert isinstance(answers[-1], errors.NotFound)
        assert {(await run.result()).approved_by for run in runs} == {"ann"}


@pytest.mark.contract("SIG-4", "WF-2")
async def test_question_10_signal_replay_behavior(variant: EngineVariant) -> None:
    """A replay restores the state that was recorded, and calls no `on_receive`, even one that draws a number."""
    app, drawn = hf.App("replayed"), list[str]()

    def approve(order: Order, approval: Approval) -> Order:
        drawn.append(f"{approval.by}-{len(drawn)}-{object.__hash__(order)}")
        return replace(order, approved_by=drawn[-1])

    flow = app.flow("replayed", Order, hf.Scene(hf.Signal("approval", Approval, on_receive=approve), hf.Signal("go")))
    async with variant.opened() as store:
        async with variant.node(app, store):
            run = await app.start(flow, Order())
            await run.signal("approval", Approval("ann"))
            await wait_for_event(run, "SignalWaiting", 2)
        async with variant.node(app, store):
            again = app.run(run.run_id)
            assert (await again.query("state"))["approved_by"] == drawn[0]
            await again.signal("go")
            assert (await again.result())["approved_by"] == drawn[0]
    assert len(drawn) == 1


# --- the table of the implementation's state


STATUS_ROWS = {
    "Signal primitive": test_signal_as_a_workflow_primitive,
    "Event types": test_event_model,
    "signal.waiting replay": test_question_10_signal_replay_behavior,
    "signal.received replay": test_question_10_signal_replay_behavior,
    "SendSignal API": test_send_signal_api,
    "Timeout scheduling": test_timeout_via_scheduled_jobs,
    "SignalTimeoutJob": test_timeout_job_idempotency,
    "ListWaitingSignals": test_question_2_signal_discovery,
}
"""Which test shows each row; the one that is left has its own below."""


@pytest.mark.contract("SIG-8", "WF-2")
async def test_status_signal_timeout_replay(variant: EngineVariant) -> None:
    """A time-out is replayed from its record: `on_timeout` is not called again."""
    app, calls = hf.App("late"), list[str]()

    def late(order: Order) -> Order:
        calls.append("late")
        return replace(order, approved=False, approved_by=f"call {len(calls)}")

    flow = app.flow("late", Order, hf.Scene(hf.Signal("approval", timeout=0.001, on_timeout=late), hf.Signal("go")))
    async with variant.opened() as store:
        async with variant.node(app, store):
            run = await app.start(flow, Order())
            await wait_for_event(run, "SignalWaiting", 2)
        async with variant.node(app, store):
            again = app.run(run.run_id)
            await again.signal("go")
            assert (await again.result())["approved_by"] == "call 1"
    assert calls == ["late"]


async def test_timeout_without_on_timeout_fails_the_flow(variant: EngineVariant) -> None:
    app = hf.App("late")
    flow = waiting(app, timeout=0.001)
    async with variant.node(app):
        run = await app.start(flow, Order())
        with pytest.raises(errors.RunFailed, match="TimeoutError: no signal 'approval' came in time"):
            await run.result()


@pytest.mark.contract("SIG-13")
async def test_skipped_wait_goes_on_as_if_its_time_were_over(variant: EngineVariant) -> None:
    app = hf.App("skipped")
    patient = waiting(app, "patient")
    bounded = waiting(
        app, "bounded", timeout=timedelta(days=1), on_timeout=lambda order: replace(order, approved=False)
    )
    async with variant.node(app):
        for flow, expected in ((patient, Order()), (bounded, Order(approved=False))):
            run = await app.start(flow, Order())
            await wait_for_event(run, "SignalWaiting")
            await run.skip_step("approval", wait=True)
            assert await run.result() == expected
