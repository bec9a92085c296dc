"""A node that stops leaves nothing behind: no activity, no program, nobody who waits, no word of progress unsaid."""

import asyncio
from typing import Any, cast

import pytest

import holdfast as hf
from holdfast.engine import node as node_module
from holdfast.errors import EngineError
from holdfast.store.port import Store
from holdfast.store.proxy import StoreProxy
from tests.engine.harness import EngineVariant, wait_for_event


def working_app() -> tuple[hf.App, Any, asyncio.Event, list[Any]]:
    app = hf.App("shop")
    began, seen = asyncio.Event(), list[Any]()

    @app.activity
    async def pack() -> str:
        context = hf.activity_context()
        seen.append(context.details)
        if context.attempt > 1:
            return "packed"
        context.heartbeat({"boxes": 1})
        await asyncio.sleep(0)
        context.heartbeat({"boxes": 2})
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        return "never"

    @app.workflow
    async def order() -> str:
        return await pack()

    return app, order, began, seen


@pytest.mark.contract("MSG-4", "ACT-1")
async def test_what_is_under_way_is_cancelled_and_its_progress_is_kept_for_the_next_node(
    variant: EngineVariant,
) -> None:
    app, order, began, seen = working_app()
    async with variant.opened() as store:
        async with variant.node(app, store, drain_s=0.01):
            run_id = (await app.start(order)).run_id
            await began.wait()
        await asyncio.sleep(0)
        assert seen == [None, "cancelled"]
        async with variant.node(app, store):
            assert await app.run(run_id).result() == "packed"
    assert seen[2:] == [{"boxes": 2}]


@pytest.mark.contract("MSG-4", "API-2")
async def test_who_waits_is_told_and_no_program_is_left(variant: EngineVariant) -> None:
    app = hf.App("shop")

    @app.workflow
    async def order() -> str:
        return await hf.wait_signal("go", str)

    async with variant.node(app) as node:
        run = await app.start(order)
        await wait_for_event(run, "SignalWaiting")
        waiting = asyncio.create_task(run.result())
        while not node.completion_waiters._waiting:  # noqa: ASYNC110
            await asyncio.sleep(0)
        lives = list(node.run_cache._runs.values())
    async with asyncio.timeout(60):
        with pytest.raises(EngineError, match="stopped before the run had finished"):
            await waiting
        with pytest.raises(EngineError, match="no node is open"):
            await run.result()
    assert len(lives) == min(variant.cached_runs, 1)
    assert all(live.is_closed and live.replay.program is None for live in lives)


@pytest.mark.contract("API-2")
async def test_a_stopped_node_does_not_deny_that_a_run_has_finished(variant: EngineVariant) -> None:
    app = hf.App("shop")

    @app.workflow
    async def order(waits: bool) -> str:
        return await hf.wait_signal("go", str) if waits else "packed"

    async with variant.opened() as store:
        async with variant.node(app, store):
            finished, waiting = await app.start(order, False), await app.start(order, True)
            await finished.result()
        assert await finished.result() == "packed"
        with pytest.raises(EngineError, match="stopped before the run had finished"):
            await waiting.result()
    with pytest.raises(EngineError, match="no node is open"):
        await finished.result()


def parts_of_nodes() -> set[str]:
    """Return the names of the tasks of nodes that go on."""
    names = {
        "turns",
        "lease",
        "wake-ups",
        "completion waiters",
        "run queue",
        "heartbeats",
        "queues",
        "outcomes",
        "definitions",
    }
    return names & {task.get_name() for task in asyncio.all_tasks()}


@pytest.mark.contract("MSG-4", "OWN-1")
@pytest.mark.parametrize("cancellations", [1, 2])
async def test_a_node_that_is_cancelled_while_it_drains_gives_everything_back(
    variant: EngineVariant, cancellations: int
) -> None:
    app, order, began, _ = working_app()
    nodes, run_ids = [], []

    async def live(store: Store) -> None:
        async with variant.node(app, store, drain_s=60.0) as node:
            nodes.append(node)
            run_ids.append((await app.start(order)).run_id)
            await began.wait()

    async with variant.opened() as store:
        living = asyncio.create_task(live(store))
        await began.wait()
        while not nodes[0].owned_runs.is_stopping:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for _ in range(cancellations):
            living.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([living], timeout=60)
        assert living.cancelled()
        assert parts_of_nodes() == set()
        if cancellations == 1:
            assert (await store.stats()).leases == {}
        async with variant.node(app, store, lease_ms=1_000):
            async with asyncio.timeout(60):
                assert cancellations == 2 or await app.run(run_ids[0]).result() == "packed"


class Frozen(StoreProxy):
    """A store that never answers a release."""

    async def release(self, *asked: Any) -> int:
        """Wait for ever."""
        await asyncio.Event().wait()
        return 0


@pytest.mark.contract("MSG-4")
async def test_a_node_does_not_wait_for_ever_for_a_store_that_takes_nothing_back(
    variant: EngineVariant, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_module, "GIVE_BACK_S", 0.05)
    app = hf.App("shop")
    async with variant.opened() as store:
        frozen: Any = Frozen(store)
        async with variant.node(app, frozen):
            pass
    assert "could not release its runs" in caplog.text
    assert parts_of_nodes() == set()


# --- what never began


@pytest.mark.contract("ACT-1", "ATT-1", "MSG-4")
async def test_a_graceful_stop_uses_up_no_attempt_of_what_never_began(variant: EngineVariant) -> None:
    """Some wait for a place, some are scheduled while the node stops; none may be dispatched twice."""
    app, began = hf.App("shop"), list[tuple[str, int]]()
    gate, is_there = asyncio.Event(), asyncio.Event()

    @app.activity(retry=hf.Retry(max_attempts=1))
    async def pack(box: str) -> str:
        began.append((box, hf.activity_context().attempt))
        is_there.set()
        await gate.wait()
        return box

    @app.workflow
    async def order() -> list[str]:
        packed = list(await asyncio.gather(*(pack(f"box {number}") for number in range(4))))
        return [*packed, await pack("lid")]

    async with variant.opened() as store:
        for _ in range(3):
            is_there.clear()
            async with variant.node(app, store, activities_at_once=1) as node:
                if not began:
                    run_id = (await app.start(order)).run_id
                await is_there.wait()
                stopping = asyncio.create_task(node.stop())
                await asyncio.sleep(0)
                gate.set()
                await stopping
            gate.clear()
        gate.set()
        async with variant.node(app, store):
            assert await app.run(run_id).result() == [*(f"box {number}" for number in range(4)), "lid"]
            events = await app.run(run_id).events()
    assert sorted(began) == [*((f"box {number}", 1) for number in range(4)), ("lid", 1)]
    attempts = [event.engine_attempt_id for event in events if event.event_type == "StepRetried"]
    assert attempts, "every activity began at once: the test misses what it is aimed at"


@pytest.mark.contract("ACT-1")
@pytest.mark.parametrize(("most", "ends"), [(1, "NodeLost"), (2, "NodeLost"), (0, "packed")])
async def test_an_attempt_that_began_and_was_lost_counts_and_the_bound_is_the_bound(
    variant: EngineVariant, most: int, ends: str
) -> None:
    app, began = hf.App("shop"), list[int]()
    arrived = asyncio.Event()

    @app.activity(retry=hf.Retry(max_attempts=most))
    async def pack() -> str:
        began.append(hf.activity_context().attempt)
        arrived.set()
        if len(began) == 23:
            return "packed"
        await asyncio.Event().wait()
        return "never"

    @app.workflow
    async def order() -> str:
        try:
            return await pack()
        except hf.errors.ActivityFailed as failure:
            return str(failure.info.code)

    async with variant.opened() as store:
        async with app.connect(store):
            run_id = (await app.start(order)).run_id
        for _ in range(22 if most == 0 else most):
            arrived.clear()
            async with variant.node(app, store, drain_s=0):
                await arrived.wait()
        async with variant.node(app, store):
            assert await app.run(run_id).result() == ends
    assert began == list(range(1, 24 if most == 0 else most + 1))


class SlowTake(StoreProxy):
    """A store whose answer to a take is under way until it is let go."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.has_taken, self.gate = asyncio.Event(), asyncio.Event()

    async def acquire_jobs(self, *arguments: Any) -> Any:
        jobs = await self.inner.acquire_jobs(*arguments)
        if jobs:
            self.has_taken.set()
            await self.gate.wait()
        return jobs


@pytest.mark.contract("ACT-1", "MSG-4")
@pytest.mark.parametrize("drain_s", [0.0, 2.0])
async def test_a_worker_that_stops_while_its_take_is_under_way_gives_the_jobs_back(
    variant: EngineVariant, drain_s: float
) -> None:
    app, began = hf.App("shop"), list[int]()

    @app.activity(queue="far", retry=hf.Retry(max_attempts=1))
    async def pack() -> str:
        began.append(hf.activity_context().attempt)
        return "packed"

    @app.workflow
    async def order() -> str:
        return await pack()

    async with variant.opened() as inner, variant.node(app, inner):
        run = await app.start(order)
        slow = SlowTake(inner)
        async with app.node(cast(Store, slow), options=hf.NodeOptions(queues=("far",), drain_s=drain_s)) as node:
            async with asyncio.timeout(60):
                await slow.has_taken.wait()
                stopping = asyncio.create_task(node.stop())
                await asyncio.sleep(0.02)
                slow.gate.set()
                await stopping
        async with variant.node(app, inner, queues=("far",)):  # at once: nobody waits until the job is visible again
            assert await app.run(run.run_id).result() == "packed"
    assert began == [1]


@pytest.mark.contract("ACT-1", "MSG-4")
async def test_jobs_that_wait_for_a_place_are_given_back_when_their_worker_stops(variant: EngineVariant) -> None:
    app, began = hf.App("shop"), list[tuple[str, int]]()
    arrived, gate = asyncio.Event(), asyncio.Event()

    @app.activity(queue="far", retry=hf.Retry(max_attempts=1))
    async def pack(box: str) -> str:
        began.append((box, hf.activity_context().attempt))
        arrived.set()
        await gate.wait()
        return box

    @app.workflow
    async def order() -> list[str]:
        return list(await asyncio.gather(*(pack(f"{number}") for number in range(3))))

    async with variant.opened() as store, variant.node(app, store):
        run = await app.start(order)
        async with variant.node(app, store, queues=("far",), takes_runs=False, activities_at_once=1) as node:
            await arrived.wait()
            stopping = asyncio.create_task(node.stop())
            await asyncio.sleep(0)
            gate.set()
            await stopping
        async with variant.node(app, store, queues=("far",)):
            assert await app.run(run.run_id).result() == ["0", "1", "2"]
    assert sorted(began) == [("0", 1), ("1", 1), ("2", 1)]
