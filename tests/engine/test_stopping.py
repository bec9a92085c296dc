"""A node that stops leaves nothing behind: no activity, no program, nobody who waits, no word of progress unsaid."""

import asyncio
from typing import Any

import pytest

import holdfast as hf
from holdfast.engine import node as node_module
from holdfast.errors import EngineError
from holdfast.store.port import Store
from tests.engine.place import Around, Place, until_event


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
async def test_what_is_under_way_is_cancelled_and_its_progress_is_kept_for_the_next_node(place: Place) -> None:
    app, order, began, seen = working_app()
    async with place.opened() as store:
        async with place.node(app, store, drain_s=0.01):
            run_id = (await app.start(order)).run_id
            await began.wait()
        await asyncio.sleep(0)
        assert seen == [None, "cancelled"]
        async with place.node(app, store):
            assert await app.run(run_id).result() == "packed"
    assert seen[2:] == [{"boxes": 2}]


@pytest.mark.contract("MSG-4", "API-2")
async def test_who_waits_is_told_and_no_program_is_left(place: Place) -> None:
    app = hf.App("shop")

    @app.workflow
    async def order() -> str:
        return await hf.wait_signal("go", str)

    async with place.node(app) as node:
        run = await app.start(order)
        await until_event(run, "SignalWaiting")
        waiting = asyncio.create_task(run.result())
        while not node.finishes._waiting:  # noqa: ASYNC110
            await asyncio.sleep(0)
        lives = list(node.lives._runs.values())
    async with asyncio.timeout(5):
        with pytest.raises(EngineError, match="stopped before the run had finished"):
            await waiting
        with pytest.raises(EngineError, match="no node is open"):
            await run.result()
    assert len(lives) == min(place.live_runs, 1)
    assert all(live.is_closed and live.replay.program is None for live in lives)


@pytest.mark.contract("API-2")
async def test_a_stopped_node_does_not_deny_that_a_run_has_finished(place: Place) -> None:
    app = hf.App("shop")

    @app.workflow
    async def order(waits: bool) -> str:
        return await hf.wait_signal("go", str) if waits else "packed"

    async with place.opened() as store:
        async with place.node(app, store):
            finished, waiting = await app.start(order, False), await app.start(order, True)
            await finished.result()
        assert await finished.result() == "packed"
        with pytest.raises(EngineError, match="stopped before the run had finished"):
            await waiting.result()
    with pytest.raises(EngineError, match="no node is open"):
        await finished.result()


def parts_of_nodes() -> set[str]:
    """Return the names of the tasks of nodes that go on."""
    names = {"pump", "lease", "wake-ups", "finishes", "run queue", "beats", "queues", "outcomes", "definitions"}
    return names & {task.get_name() for task in asyncio.all_tasks()}


@pytest.mark.contract("MSG-4", "OWN-1")
@pytest.mark.parametrize("cancellations", [1, 2])
async def test_a_node_that_is_cancelled_while_it_drains_gives_everything_back(place: Place, cancellations: int) -> None:
    app, order, began, _ = working_app()
    nodes, run_ids = [], []

    async def live(store: Store) -> None:
        async with place.node(app, store, drain_s=60.0) as node:
            nodes.append(node)
            run_ids.append((await app.start(order)).run_id)
            await began.wait()

    async with place.opened() as store:
        living = asyncio.create_task(live(store))
        await began.wait()
        while not nodes[0]._is_stopping:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for _ in range(cancellations):
            living.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([living], timeout=5)
        assert living.cancelled()
        assert parts_of_nodes() == set()
        if cancellations == 1:
            assert (await store.stats()).leases == {}
        async with place.node(app, store, lease_ms=1_000):
            async with asyncio.timeout(5):
                assert cancellations == 2 or await app.run(run_ids[0]).result() == "packed"


class Frozen(Around):
    """A store that never answers a release."""

    async def release(self, *asked: Any) -> int:
        """Wait for ever."""
        await asyncio.Event().wait()
        return 0


@pytest.mark.contract("MSG-4")
async def test_a_node_does_not_wait_for_ever_for_a_store_that_takes_nothing_back(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_module, "GIVE_BACK_S", 0.05)
    app = hf.App("shop")
    async with place.opened() as store:
        frozen: Any = Frozen(store)
        async with place.node(app, frozen):
            pass
    assert "could not give its runs back" in caplog.text
    assert parts_of_nodes() == set()
