"""The time for all attempts of an activity holds whatever its step waits for, by the store's clock."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import holdfast as hf
from holdfast.app import App
from holdfast.core.state import RunState, RunStatus
from holdfast.errors import ActivityFailed
from holdfast.store.port import Store
from holdfast.store.proxy import StoreProxy
from holdfast.testing import VirtualClock
from tests.engine.harness import (
    EngineVariant,
    event_types,
    store_with_virtual_time,
    wait_for_event,
    wait_for_status,
)

MINUTE_S = 60
LATE = "TimeoutError: activity 'work' was not done within 60000 ms of being scheduled"


def orders(work: Callable[..., Any] | None, **options: Any) -> tuple[App, Any]:
    """Return an app with a workflow that says how its activity ended; without `work`, it does not know the activity."""
    app = hf.App("shop")

    async def unknown() -> str:
        raise AssertionError("nobody calls this")

    bounded = {"schedule_to_close": MINUTE_S, **options}
    registry = app if work is not None else hf.App("elsewhere")
    activity = registry.activity(name="work", **bounded)(work or unknown)

    @app.workflow
    async def order() -> str:
        try:
            result: str = await activity()
        except ActivityFailed as failure:
            return f"{failure.info.code}: {failure.info.message}"
        return result

    return app, order


async def for_ever() -> str:
    """Never return."""
    await asyncio.Event().wait()
    return "never"


def pass_a_minute(store: Store, clock: VirtualClock) -> None:
    """Let the time of the step be over, and wake the node as its own clock would."""
    clock.advance(ms=MINUTE_S * 1_000)
    store.wakeups.notify()


@pytest.mark.contract("ACT-1")
async def test_an_attempt_that_would_come_too_late_is_not_waited_for(variant: EngineVariant) -> None:
    async def work() -> str:
        raise ValueError("the last error")

    app, order = orders(work, retry=hf.Retry(max_attempts=5, initial_ms=90_000, most_ms=90_000, jitter=0.0))
    async with store_with_virtual_time(variant) as (store, _), variant.node(app, store):
        run = await app.start(order)
        assert await run.result() == "ValueError: the last error"
        assert "StepRetried" not in await event_types(run)


@pytest.mark.contract("ACT-1", "TMR-1")
async def test_an_activity_in_a_queue_that_nobody_consumes_ends_in_time(variant: EngineVariant) -> None:
    app, order = orders(for_ever, queue="nobody")
    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store):
        run = await app.start(order)
        await wait_for_event(run, "StepStarted")
        assert (await store.stats()).jobs == 1
        pass_a_minute(store, clock)
        assert await run.result() == LATE
        assert (await store.stats()).jobs == 0


@pytest.mark.contract("ACT-1", "TMR-1")
async def test_an_activity_that_has_no_place_ends_in_time(variant: EngineVariant) -> None:
    called: list[str] = []

    async def work() -> str:
        called.append("work")
        return "done"

    app, order = orders(work)
    is_busy, goes_on = asyncio.Event(), asyncio.Event()

    @app.activity
    async def block() -> None:
        is_busy.set()
        await goes_on.wait()

    @app.workflow
    async def blocks() -> None:
        await block()

    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store, activities_at_once=1):
        other = await app.start(blocks)
        await is_busy.wait()
        run = await app.start(order)
        await wait_for_event(run, "StepStarted")
        pass_a_minute(store, clock)
        assert await run.result() == LATE
        goes_on.set()
        await other.result()
    assert called == []


@pytest.mark.contract("ACT-1", "TMR-1")
async def test_an_activity_that_no_node_knows_ends_in_time(variant: EngineVariant) -> None:
    app, order = orders(None)
    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store):
        run = await app.start(order)
        await wait_for_event(run, "StepStarted")
        pass_a_minute(store, clock)
        assert await run.result() == LATE


@pytest.mark.contract("ACT-1", "TMR-1")
@pytest.mark.parametrize("queue", ["", "nobody"])
async def test_the_time_goes_on_while_no_node_is_there(variant: EngineVariant, queue: str) -> None:
    called: list[str] = []

    async def work() -> str:
        called.append("work")
        return await for_ever()

    app, order = orders(work, queue=queue)
    async with store_with_virtual_time(variant) as (store, clock):
        async with variant.node(app, store, drain_s=0.01):
            run_id = (await app.start(order)).run_id
            await wait_for_event(app.run(run_id), "StepStarted")
            while not queue and not called:  # noqa: ASYNC110 - what has not begun when its node stops is no attempt
                await asyncio.sleep(0)
        clock.advance(ms=MINUTE_S * 1_000)
        async with variant.node(app, store):
            assert await app.run(run_id).result() == LATE
    assert len(called) == (0 if queue else 1)


@pytest.mark.contract("ACT-1", "TMR-1")
async def test_what_has_failed_before_is_named_when_its_node_was_gone_for_too_long(variant: EngineVariant) -> None:
    async def work() -> str:
        raise ValueError("the last error")

    app, order = orders(work, retry=hf.Retry(max_attempts=5, initial_ms=30_000, jitter=0.0))
    async with store_with_virtual_time(variant) as (store, clock):
        async with variant.node(app, store):
            run_id = (await app.start(order)).run_id
            await wait_for_event(app.run(run_id), "StepRetried")
        clock.advance(ms=MINUTE_S * 1_000)
        async with variant.node(app, store):
            assert await app.run(run_id).result() == f"{LATE}; its last error was ValueError: the last error"


@pytest.mark.contract("ACT-1")
async def test_an_attempt_that_is_under_way_is_stopped(variant: EngineVariant) -> None:
    stopped, has_begun = asyncio.Event(), asyncio.Event()

    async def work() -> str:
        has_begun.set()
        try:
            return await for_ever()
        except asyncio.CancelledError:
            stopped.set()
            raise

    app, order = orders(work)
    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store):
        run = await app.start(order)
        await has_begun.wait()
        pass_a_minute(store, clock)
        assert await run.result() == LATE
        await stopped.wait()


class Hesitant(StoreProxy):
    """A store that lets a node wait for due runs, once, until it is told to go on."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.is_asked: asyncio.Event | None = None
        self.goes_on = asyncio.Event()
        self.claims = 0

    async def claim(self, *args: Any, **kwargs: Any) -> Any:
        """Claim, when it is time."""
        self.claims += 1
        try:
            if self.is_asked is not None:
                self.is_asked.set()
                await self.goes_on.wait()
            return await self.inner.claim(*args, **kwargs)
        finally:
            self.claims -= 1


@pytest.mark.contract("ACT-1")
async def test_an_outcome_that_is_at_hand_when_the_time_is_over_counts(variant: EngineVariant) -> None:
    async with store_with_virtual_time(variant) as (inner, clock):
        store = Hesitant(inner)

        async def work() -> str:
            while store.claims:  # noqa: ASYNC110 - one that is under way would see the time that is over
                await asyncio.sleep(0.001)
            store.is_asked = asyncio.Event()
            clock.advance(ms=5_000)  # less than the node's lease
            inner.wakeups.notify()
            await store.is_asked.wait()
            asyncio.get_running_loop().call_soon(store.goes_on.set)  # after this attempt has ended
            return "done"

        app, order = orders(work, schedule_to_close=5)
        async with variant.node(app, store):
            assert await (await app.start(order)).result() == "done"


@pytest.mark.contract("ACT-1", "SIG-13")
async def test_a_step_that_an_operator_has_tried_again_has_its_time_again(variant: EngineVariant) -> None:
    attempts: list[int] = []
    may_return = asyncio.Event()

    async def work() -> str:
        attempts.append(hf.activity_context().attempt)
        await may_return.wait()
        return "done"

    app, order = orders(work, on_failure="pause")
    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store):
        run = await app.start(order)
        await wait_for_event(run, "StepStarted")
        for times in (1, 2):
            pass_a_minute(store, clock)
            await wait_for_event(run, "StepFailed", times)
            await wait_for_status(run, RunStatus.PAUSED)
            await run.retry_step("work", wait=True)
            await wait_for_event(run, "StepStarted", times + 1)
        clock.advance(ms=MINUTE_S * 1_000 - 1)
        store.wakeups.notify()
        may_return.set()
        assert await run.result() == "done"
        assert (await event_types(run)).count("StepFailed") == 2


@pytest.mark.contract("ACT-1", "TMR-1")
@pytest.mark.parametrize("limit_s", [None, MINUTE_S])
async def test_a_run_is_woken_only_for_an_activity_whose_time_is_bounded(
    variant: EngineVariant, limit_s: int | None
) -> None:
    has_begun = asyncio.Event()

    async def work() -> str:
        has_begun.set()
        return await for_ever()

    app, order = orders(work, schedule_to_close=limit_s, timeout=2 * MINUTE_S)
    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store, drain_s=0.01):
        run = await app.start(order)
        await has_begun.wait()
        [loaded] = await store.load([run.run_id])
        assert loaded is not None
        assert loaded.head.ready_at == (None if limit_s is None else clock.now() + limit_s * 1_000_000)


async def test_a_run_is_let_go_if_its_turn_has_closed_what_it_would_begin() -> None:
    """An attempt is due and the step's time is over, both in one turn: nobody works on it."""
    async with hf.App("shop").node(hf.MemoryStore()) as node:
        draft: Any = SimpleNamespace(dispatch=["charge"], state=RunState(run_id="r-1"))
        assert not node.owned_runs.is_busy(draft)
