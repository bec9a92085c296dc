"""Time-outs of runs: the whole run over rotations, and one stretch; what becomes of the program, children and forks."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.plans import TIMEOUT_LEVEL
from holdfast.core.state import RunStatus
from holdfast.errors import ChildFailed, InvalidInput, RunCancelled, RunFailed, RunTerminal, RunTimedOut
from holdfast.store.memory import MemoryStore
from holdfast.store.port import RunQuery, Store
from holdfast.testing import TestNode, VirtualClock
from tests.engine.harness import EngineVariant, event_types, store_with_virtual_time, wait_for_event, wait_for_status

pytestmark = pytest.mark.contract("WF-8")

MINUTE_S = 60


def pass_time(store: Store, clock: VirtualClock, seconds: float) -> None:
    """Let time pass, and wake the node as its own clock would."""
    clock.advance(ms=round(seconds * 1_000))
    store.wakeups.notify()


def waiting_app() -> tuple[hf.App, Any, list[str]]:
    """Return an app with a workflow that waits for a signal, and what it undoes."""
    app, undone = hf.App("shop"), list[str]()

    @app.activity
    async def undo(what: str) -> None:
        undone.append(what)

    @app.workflow
    async def order(cleans_up_s: float = 0) -> str:
        async with hf.Saga() as saga:
            if cleans_up_s:
                saga.undo(hf.sleep, cleans_up_s)
            saga.undo(undo, "booking")
            return await hf.wait_signal("paid", str)

    return app, order, undone


async def test_a_run_past_its_execution_timeout_cleans_up_and_has_failed(variant: EngineVariant) -> None:
    app, order, undone = waiting_app()
    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store):
        run = await app.start(order, execution_timeout=MINUTE_S)
        await wait_for_event(run, "SignalWaiting")
        pass_time(store, clock, MINUTE_S - 0.001)
        paid = await app.start(order, execution_timeout=timedelta(minutes=1))
        await paid.signal("paid", "yes")
        assert await paid.result() == "yes"
        assert "RunTimedOut" not in await event_types(run)
        pass_time(store, clock, 0.001)
        with pytest.raises(RunTimedOut, match="the run took longer than 60 s, its execution time-out") as raised:
            await run.result()
        assert isinstance(raised.value, RunFailed)
        assert raised.value.info.code == "RunTimedOut"
        assert await run.status() == RunStatus.FAILED
    assert undone == ["booking"]


async def test_a_timeout_counts_while_no_node_is_there(variant: EngineVariant) -> None:
    app, order, undone = waiting_app()
    async with store_with_virtual_time(variant) as (store, clock):
        async with variant.node(app, store):
            run = await app.start(order, execution_timeout=MINUTE_S)
            await wait_for_event(run, "SignalWaiting")
        clock.advance(ms=MINUTE_S * 1_000)
        async with variant.node(app, store):
            with pytest.raises(RunTimedOut):
                await app.run(run.run_id).result()
    assert undone == ["booking"]


async def test_cleaning_up_has_a_bound_of_its_own(variant: EngineVariant) -> None:
    app, order, undone = waiting_app()
    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store):
        run = await app.start(order, 100, execution_timeout=MINUTE_S, cleanup_timeout=30)
        await wait_for_event(run, "SignalWaiting")
        pass_time(store, clock, MINUTE_S)
        await wait_for_event(run, "TimerStarted")
        pass_time(store, clock, 30)
        with pytest.raises(RunTimedOut, match="and had not cleaned up 30 s later"):
            await run.result()
    assert undone == ["booking"]


@pytest.mark.contract("WF-6", "WF-8")
async def test_who_updates_a_run_that_is_ended_while_it_cleans_up_is_told(variant: EngineVariant) -> None:
    app = hf.App("shop")

    @app.workflow
    async def order() -> None:
        async def wait_long() -> None:
            await hf.sleep(3_600)

        hf.on_update("wait", wait_long)
        async with hf.Saga() as saga:
            saga.undo(hf.sleep, 3_600)
            await hf.wait_signal("paid", str)

    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store):
        run = await app.start(order, execution_timeout=MINUTE_S, cleanup_timeout=30)
        update = asyncio.ensure_future(run.update("wait", update_id="u-1"))
        await wait_for_event(run, "UpdateAccepted")
        pass_time(store, clock, MINUTE_S)
        await wait_for_event(run, "RunTimedOut")
        pass_time(store, clock, 30)
        with pytest.raises(RunTimedOut, match="had not cleaned up"):
            await run.result()
        assert "UpdateCompleted" not in await event_types(run)  # it is ended as it stands
        for told in (update, run.update("wait", update_id="u-1")):
            with pytest.raises(RunTerminal, match="ended before it had answered"):
                await told


async def test_the_run_timeout_counts_anew_from_each_rotation(variant: EngineVariant) -> None:
    app = hf.App("shop")

    @app.workflow
    async def count(number: int) -> None:
        await hf.wait_signal("next")
        hf.continue_as_new(number + 1)

    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store):
        run = await app.start(count, 0, run_timeout=MINUTE_S)
        for number in range(3):
            await wait_for_event(run, "SignalWaiting", number + 1)
            pass_time(store, clock, 40)
            await run.signal("next")
        await wait_for_event(run, "SignalWaiting", 4)
        pass_time(store, clock, 59)
        assert "RunTimedOut" not in await event_types(run)
        pass_time(store, clock, 1)
        with pytest.raises(RunTimedOut, match="this stretch of the run took longer than 60 s, its run time-out"):
            await run.result()


async def test_the_execution_timeout_counts_over_rotations() -> None:
    app = hf.App("shop")

    @app.workflow
    async def count(number: int) -> None:
        await hf.sleep(40)
        hf.continue_as_new(number + 1)

    async with TestNode(app):
        run = await app.start(count, 0, execution_timeout=100, run_timeout=MINUTE_S)
        with pytest.raises(RunTimedOut, match="its execution time-out"):
            await run.result()
        assert (await event_types(run)).count("ContinuedAsNew") == 2


async def test_a_program_that_returns_after_all_has_completed() -> None:
    app = hf.App("shop")

    @app.workflow
    async def order() -> str:
        try:
            await hf.sleep(3600)
        except asyncio.CancelledError as late:
            return str(late)
        return "in time"

    async with TestNode(app):
        run = await app.start(order, execution_timeout=MINUTE_S)
        assert "took longer than 60 s" in await run.result()


async def test_a_paused_run_times_out_and_cleans_up(variant: EngineVariant) -> None:
    app, order, undone = waiting_app()
    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store):
        run = await app.start(order, execution_timeout=MINUTE_S)
        await wait_for_event(run, "SignalWaiting")
        await run.pause()
        await wait_for_status(run, RunStatus.PAUSED)
        pass_time(store, clock, MINUTE_S)
        with pytest.raises(RunTimedOut):
            await run.result()
    assert undone == ["booking"]


async def test_a_run_without_its_code_is_ended(variant: EngineVariant) -> None:
    app, order, undone = waiting_app()
    async with store_with_virtual_time(variant) as (store, clock):
        async with variant.node(app, store):
            run = await app.start(order, execution_timeout=MINUTE_S, cleanup_timeout=1)
            await wait_for_event(run, "SignalWaiting")
        other = hf.App("shop")

        @other.workflow(name="order")
        async def changed(cleans_up_s: float = 0) -> None:
            await hf.sleep(1)

        async with variant.node(other, store):
            pass_time(store, clock, MINUTE_S)
            await wait_for_event(other.run(run.run_id), "RunTimedOut")
            pass_time(store, clock, 1)
            with pytest.raises(RunTimedOut):
                await other.run(run.run_id).result()
    assert undone == []


async def test_a_run_that_was_being_cancelled_stays_so_and_is_bounded() -> None:
    app, order, _ = waiting_app()
    async with TestNode(app) as node:
        quick = await app.start(order, 30, execution_timeout=MINUTE_S)
        slow = await app.start(order, 3600, execution_timeout=MINUTE_S, cleanup_timeout=30)
        await node.advance(seconds=50)
        await quick.cancel("no longer wanted")
        await slow.cancel("no longer wanted")
        with pytest.raises(RunCancelled, match="no longer wanted"):
            await quick.result()
        assert "RunTimedOut" in await event_types(quick)
        with pytest.raises(RunTimedOut, match="had not cleaned up"):
            await slow.result()


async def test_a_run_that_has_not_started_never_starts() -> None:
    app = hf.App("shop")
    began: list[str] = []

    @app.workflow(requires_approval=True)
    async def approved() -> None:
        began.append("approved")

    @app.workflow(at_once=1)
    async def limited(seconds: float) -> None:
        began.append("limited")
        await hf.sleep(seconds)

    async with TestNode(app) as node:
        waits = await app.start(approved, execution_timeout=MINUTE_S)
        first = await app.start(limited, 100)
        queued = await app.start(limited, 0, execution_timeout=MINUTE_S)
        await node.advance(seconds=200)
        for run in (waits, queued):
            with pytest.raises(RunTimedOut):
                await run.result()
            assert await event_types(run) == ["RunQueued", "RunTimedOut", "RunFailed"]
        await first.result()
    assert began == ["limited"]


async def test_the_time_of_a_run_that_starts_later_begins_then() -> None:
    app, order, _ = waiting_app()
    async with TestNode(app) as node:
        run = await app.start(order, after=timedelta(hours=1), execution_timeout=MINUTE_S)
        await node.advance(minutes=60)
        assert await run.status() == RunStatus.RUNNING
        await node.advance(seconds=59)
        await run.signal("paid", "yes")
        assert await run.result() == "yes"


async def test_children_have_timeouts_and_are_cancelled_with_their_parent() -> None:
    app, order, undone = waiting_app()

    @app.workflow
    async def shop(waits: bool) -> Any:
        try:
            return await order.options(execution_timeout=30 if waits else 1000)()
        except ChildFailed as problem:
            return problem.info.code

    @app.workflow
    async def careless() -> None:
        try:
            await hf.sleep(10_000)
        finally:
            await hf.sleep(10_000)

    @app.workflow
    async def parent() -> None:
        child = careless.child()
        await order()
        await child

    async with TestNode(app) as node:
        assert await (await app.start(shop, True)).result() == "RunTimedOut"
        run = await app.start(shop, False, run_id="p-1", execution_timeout=MINUTE_S)
        with pytest.raises(RunTimedOut):
            await run.result()
        with pytest.raises(RunCancelled):
            await app.run("p-1/order").result()
        cut = await app.start(parent, run_id="p-2", execution_timeout=MINUTE_S, cleanup_timeout=1)
        with pytest.raises(RunTimedOut):
            await cut.result()
        await node.advance(hours=4)
        for child in ("p-2/order", "p-2/careless"):
            with pytest.raises(RunCancelled):
                await app.run(child).result()
    assert len(undone) == 3


async def test_a_fork_and_a_retry_have_their_own_time(variant: EngineVariant) -> None:
    app, order, _ = waiting_app()
    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store):
        run = await app.start(order, execution_timeout=MINUTE_S, run_timeout=50)
        waiting = await wait_for_event(run, "SignalWaiting")
        pass_time(store, clock, 50)
        with pytest.raises(RunTimedOut):
            await run.result()
        pass_time(store, clock, 1000)
        forks = [await run.fork(at=waiting.run_seq, request_id=name) for name in ("a", "b")]
        again = await run.retry_run()
        pass_time(store, clock, 49)
        for each in (forks[0], again):
            await each.signal("paid", "yes")
            assert await each.result() == "yes"
        pass_time(store, clock, 1)
        with pytest.raises(RunTimedOut):
            await forks[1].result()


async def test_a_timed_out_run_answers_queries_and_its_history_is_whole(variant: EngineVariant) -> None:
    app = hf.App("shop")

    @app.workflow
    async def order() -> None:
        hf.on_query("stage", lambda: "waiting")
        await hf.wait_signal("paid")

    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store):
        run = await app.start(order, execution_timeout=MINUTE_S)
        await wait_for_event(run, "SignalWaiting")
        pass_time(store, clock, MINUTE_S)
        with pytest.raises(RunTimedOut):
            await run.result()
        assert await run.query("stage") == "waiting"


async def test_a_run_whose_time_is_bounded_is_left_to_nodes_that_know_it(variant: EngineVariant) -> None:
    app = hf.App("shop")

    @app.workflow
    async def count(number: int) -> None:
        await hf.wait_signal("next")
        hf.continue_as_new(number + 1)

    async with variant.opened() as store, variant.node(app, store):
        run = await app.start(count, 0, execution_timeout=MINUTE_S)
        held = await app.start(count, 0, run_timeout=MINUTE_S, after=timedelta(hours=1))
        plain = await app.start(count, 0)
        await wait_for_event(run, "SignalWaiting")
        await run.signal("next")
        await wait_for_event(run, "SignalWaiting", 2)
        heads = {head.run_id: head.needs for head in await store.find(RunQuery())}
        assert heads == {run.run_id: TIMEOUT_LEVEL, held.run_id: TIMEOUT_LEVEL, plain.run_id: 0}


async def test_bad_timeouts_are_refused_and_nothing_is_stored() -> None:
    app, order, _ = waiting_app()
    store = MemoryStore()
    bad: list[dict[str, Any]] = [
        {"execution_timeout": 0},
        {"run_timeout": -1},
        {"execution_timeout": "1 h"},
        {"cleanup_timeout": 5},
        {"execution_timeout": 1, "cleanup_timeout": 0},
    ]
    async with app.node(store):
        for options in bad:
            with pytest.raises(InvalidInput):
                await app.start(order, **options)
            with pytest.raises(InvalidInput):
                order.options(**options)
        assert (await store.stats()).runs == {}
