"""Runs that are held, by an approval or until their time, of workflows with limits."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from msgspec import Raw

import holdfast as hf
from holdfast.core import events as e
from holdfast.core.decide import decide
from holdfast.core.event_writer import Decision, start_message
from holdfast.core.events import EngineRunRef
from holdfast.core.messages import MAILBOX, Message
from holdfast.core.state import APPROVED, PENDING
from holdfast.errors import InvalidInput, Overloaded
from holdfast.store.port import RunQuery, Store
from tests.core.driver import Driver
from tests.engine.harness import EngineVariant, event_types, store_with_virtual_time, wait_for_event

HOUR = timedelta(hours=1)


def by_customer(customer: str) -> str:
    return customer


def crowd(app: hf.App | None = None, **options: Any) -> tuple[hf.App, Any, list[str]]:
    """Return an app with a limited workflow that waits for `go`, and a list of who has begun, in order."""
    app = app or hf.App("crowd")
    begun: list[str] = []

    @app.workflow(**options)
    async def visit(customer: str) -> str:
        begun.append(customer)
        await hf.wait_signal("go", str)
        return customer

    return app, visit, begun


async def until(condition: Callable[..., Awaitable[bool]], *arguments: Any) -> None:
    """Wait until it is so."""
    while not await condition(*arguments):  # noqa: ASYNC110 - a store has no event for it
        await asyncio.sleep(0.005)


async def is_queued(store: Store, run: hf.RunHandle[Any]) -> bool:
    """Return whether a run is queued for admission."""
    [head] = await store.find(RunQuery(run_ids=(run.run_id,)))
    return head.queued_at is not None


async def leave(run: hf.RunHandle[Any]) -> None:
    """Let a run finish that is under way."""
    await wait_for_event(run, "SignalWaiting")
    await run.signal("go", "x")
    await run.result()


@pytest.mark.contract("QUE-2", "TMR-1")
async def test_a_delayed_run_takes_no_place_and_is_queued_when_it_is_due(variant: EngineVariant) -> None:
    """Also on another node than the one that took it; it starts by the limits of that moment."""
    app, visit, begun = crowd(at_once=1)
    async with store_with_virtual_time(variant) as (store, clock):
        async with variant.node(app, store, safety_poll_s=0.01):
            delayed = await app.start(visit, "later", after=HOUR)
            first = await app.start(visit, "first")
            await wait_for_event(first, "SignalWaiting")
            assert not await is_queued(store, delayed)
        async with variant.node(app, store, safety_poll_s=0.01):
            first, delayed = app.run(first.run_id), app.run(delayed.run_id)
            clock.advance(ms=3_600_000)
            await until(is_queued, store, delayed)
            assert (await delayed.snapshot()).status is PENDING
            assert await event_types(delayed) == ["RunQueued"]
            second = await app.start(visit, "second")
            await leave(first)
            await leave(delayed)
            await leave(second)
    assert list(dict.fromkeys(begun)) == ["first", "later", "second"]


@pytest.mark.contract("QUE-2", "SIG-13")
async def test_an_approved_run_is_queued_and_one_that_is_not_takes_no_place(variant: EngineVariant) -> None:
    app, visit, begun = crowd(at_once=1, requires_approval=True)
    async with variant.opened() as store, variant.node(app, store, safety_poll_s=0.05):
        runs = [await app.start(visit, name, priority=number) for number, name in enumerate(("a", "b", "c"))]
        await runs[0].approve(actor="ann", wait=True)
        await wait_for_event(runs[0], "SignalWaiting")
        for run in runs[1:]:
            await run.approve(actor="ann", wait=True)
            await until(is_queued, store, run)
            assert (await run.snapshot()).status is APPROVED
        await leave(runs[0])
        await leave(runs[2])
        await leave(runs[1])
    assert list(dict.fromkeys(begun)) == ["a", "c", "b"], "the priority of the start counts"


@pytest.mark.contract("QUE-2")
async def test_what_was_acknowledged_is_queued_where_a_start_is_rejected(variant: EngineVariant) -> None:
    app, visit, _ = crowd(at_once=1, overload="reject")
    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store, safety_poll_s=0.01):
        delayed = [await app.start(visit, "later", after=HOUR) for _ in range(2)]
        first = await app.start(visit, "first")
        with pytest.raises(Overloaded):
            await app.start(visit, "too many")
        clock.advance(ms=3_600_000)
        for run in delayed:
            await until(is_queued, store, run)
        await leave(first)
        for run in sorted(delayed, key=lambda run: run.run_id):
            await run.signal("go", "x")
        assert [await run.result() for run in delayed] == ["later", "later"]


@pytest.mark.contract("QUE-2", "SIG-13")
async def test_both_holds_and_a_key_together(variant: EngineVariant) -> None:
    """Approved before it is due, it is queued when it is due; runs of other keys go ahead; a cancelled one leaves."""
    app, visit, _ = crowd(per_key=1, key=by_customer, requires_approval=True)
    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store, safety_poll_s=0.01):
        first = await app.start(visit, "ann")
        await first.approve(actor="boss", wait=True)
        await wait_for_event(first, "SignalWaiting")
        same, other = [await app.start(visit, name, after=HOUR) for name in ("ann", "bob")]
        for run in (same, other):
            await run.approve(actor="boss", wait=True)
        assert not await is_queued(store, same)
        clock.advance(ms=3_600_000)
        await until(is_queued, store, same)
        await leave(other)
        await same.cancel()
        await until(has_status, store, same, "CANCELLED")
        assert not await is_queued(store, same)
        again = await app.start(visit, "ann", after=HOUR)
        await again.approve(actor="boss", wait=True)
        await leave(first)
        clock.advance(ms=3_600_000)
        await leave(again)


async def has_status(store: Store, run: hf.RunHandle[Any], status: str) -> bool:
    """Return whether a run has this status."""
    [head] = await store.find(RunQuery(run_ids=(run.run_id,)))
    return str(head.status) == status


@pytest.mark.contract("QUE-2", "WF-4", "TMR-2")
async def test_children_and_ticks_that_require_approval_are_queued_when_they_have_it(variant: EngineVariant) -> None:
    app, visit, _ = crowd(at_once=1, requires_approval=True)

    @app.workflow
    async def parent() -> str:
        return str(await visit("child"))

    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store, safety_poll_s=0.01):
        await app.schedules.create("hourly", workflow="visit", every=HOUR, input={"customer": "tick"})
        above = await app.start(parent)
        started = await wait_for_event(above, "ChildStarted")
        assert isinstance(started.data, e.ChildStarted)
        child = app.run(started.data.child_run_id)
        clock.advance(ms=3_600_000)
        await until(has_runs, store, "hourly")
        [tick] = [app.run(head.run_id) for head in await store.find(RunQuery(tag="schedule:hourly"))]
        for run in (child, tick):
            await until(has_status, store, run, "PENDING")
            assert not await is_queued(store, run)
        await child.approve(actor="ann", wait=True)
        await wait_for_event(child, "SignalWaiting")
        await tick.approve(actor="ann", wait=True)
        await until(is_queued, store, tick)
        await leave(child)
        assert await above.result() == "child"
        await leave(tick)


async def has_runs(store: Store, schedule: str) -> bool:
    """Return whether a schedule has started a run."""
    return bool(await store.find(RunQuery(tag=f"schedule:{schedule}")))


@pytest.mark.contract("QUE-2", "WF-3")
async def test_limits_that_came_after_the_start_apply_when_a_run_is_released(variant: EngineVariant) -> None:
    """And limits that are gone do not."""
    free_app, free_visit, _ = crowd()
    limited_app, limited_visit, _ = crowd(at_once=1)
    async with store_with_virtual_time(variant) as (store, clock):
        async with variant.node(free_app, store):
            early = [await free_app.start(free_visit, "early", after=HOUR) for _ in range(2)]
        async with variant.node(limited_app, store, safety_poll_s=0.01):
            first = await limited_app.start(limited_visit, "first")
            clock.advance(ms=3_600_000)
            for run in early:
                await until(is_queued, store, limited_app.run(run.run_id))
            late = await limited_app.start(limited_visit, "late", after=HOUR)
            await wait_for_event(first, "SignalWaiting")
        async with variant.node(free_app, store, safety_poll_s=0.01):
            clock.advance(ms=3_600_000)
            for run in (*early, late):
                await wait_for_event(free_app.run(run.run_id), "SignalWaiting")


@pytest.mark.contract("QUE-2")
async def test_a_rate_spreads_runs_that_are_due_together(variant: EngineVariant) -> None:
    app = hf.App("crowd")

    @app.workflow(rate=(2, timedelta(seconds=1)), overload="delay")
    async def ping() -> None: ...

    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store, safety_poll_s=0.005):
        runs = [await app.start(ping, after=HOUR) for _ in range(6)]
        clock.advance(ms=3_600_000)
        while (await store.stats()).runs.get("COMPLETED", 0) < 6:
            clock.advance(ms=50)
            await asyncio.sleep(0.005)
        started = sorted([(await wait_for_event(run, "RunStarted")).persisted_at for run in runs])
    assert all(later - earlier >= 1_000_000 for earlier, later in zip(started, started[2:], strict=False)), started


async def test_a_key_that_cannot_be_computed_is_refused_at_the_start(variant: EngineVariant) -> None:
    """A held start is checked like any other: nothing is stored that could not be queued."""

    def key(customer: str) -> str:
        raise ValueError(customer)

    app, visit, _ = crowd(per_key=1, key=key)
    async with variant.opened() as store, variant.node(app, store):
        with pytest.raises(InvalidInput):
            await app.start(visit, "ann", after=HOUR)
        assert await store.find(RunQuery()) == []


@pytest.mark.contract("QUE-2", "TMR-1")
async def test_a_fork_of_a_held_run_is_held_and_queued_like_it(variant: EngineVariant) -> None:
    app, visit, _ = crowd(at_once=1)
    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store, safety_poll_s=0.01):
        delayed = await app.start(visit, "later", after=HOUR)
        fork = await delayed.fork()
        assert not await is_queued(store, fork)
        first = await app.start(visit, "first")
        await wait_for_event(first, "SignalWaiting")
        clock.advance(ms=3_600_000)
        for run in (delayed, fork):
            await until(is_queued, store, run)
            assert await event_types(run) == ["RunQueued"]
        await leave(first)
        for run in (delayed, fork):
            await run.signal("go", "x")
            await run.result()


@pytest.mark.contract("QUE-2", "SIG-13")
async def test_a_fork_of_an_approved_run_takes_one_place(variant: EngineVariant) -> None:
    """Its history begins with the approval; it is admitted by the same rule, and starts once."""
    app, visit, _ = crowd(at_once=1, requires_approval=True)
    async with variant.opened() as store, variant.node(app, store, safety_poll_s=0.02):
        first = await app.start(visit, "first")
        await first.approve(actor="ann", wait=True)
        await wait_for_event(first, "SignalWaiting")
        queued = await app.start(visit, "second")
        await queued.approve(actor="ann", wait=True)
        await until(is_queued, store, queued)
        fork = await queued.fork()
        await leave(first)
        await leave(queued)
        if (await fork.snapshot()).status is PENDING:  # a fork does not get round its approval
            await fork.approve(actor="ann", wait=True)
        await leave(fork)
        assert (await event_types(fork)).count("RunStarted") == 1


@pytest.mark.contract("TMR-1", "QUE-2")
def test_word_about_its_mailbox_does_not_start_a_run() -> None:
    """A run that is held, or queued, may have read a part of a large mailbox."""
    run = Driver("run-1", e.RunQueued("order", "1", input=Raw(b"{}"), start_at=10**15))
    by = EngineRunRef("node-a")
    word = Message(signal_id=MAILBOX, run_id="run-1", type="InternalContinue", occurred_at=1)
    answer = decide(run.state, word, 1, by)
    assert isinstance(answer, Decision)
    assert answer.events == ()
    begun = decide(run.state, start_message("run-1", 1), 1, by)
    assert isinstance(begun, Decision)
    assert [event.event_type for event in begun.events] == ["RunStarted"]
