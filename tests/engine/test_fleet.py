"""Runs that one process starts and another executes: what the store is asked for grows with batches, not with runs."""

import asyncio
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.errors import NotFound
from holdfast.store.proxy import StoreProxy
from holdfast.store.queries import EventQuery, Found, Query, Row
from holdfast.store.sqlite import SqliteStore
from holdfast.store.types import PurgePolicy
from holdfast.store.wakeups import Ended, LocalWakeups, SocketWakeups, Topic

RUNS = 250
STARTER = hf.NodeOptions(takes_runs=False)


class Counted(StoreProxy):
    """A store that counts what is read."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.reads: Counter[str] = Counter()

    async def read_events(self, run_id: str, *bounds: Any, **more: Any) -> Any:
        """Count, and read."""
        self.reads["read_events"] += 1
        return await self.inner.read_events(run_id, *bounds, **more)

    async def load(self, run_ids: Any) -> Any:
        """Count, and load."""
        self.reads["load"] += 1
        return await self.inner.load(run_ids)

    async def find(self, query: Query[Row]) -> Found[Row]:
        """Count, and find."""
        self.reads[type(query).__name__] += 1
        return await self.inner.find(query)


def doubling_app() -> tuple[hf.App, Any]:
    app = hf.App("fleet")

    @app.activity
    async def double(number: int) -> int:
        return 2 * number

    @app.workflow
    async def twice(number: int) -> int:
        return await double(number)

    return app, twice


@pytest.mark.contract("OWN-3", "WF-2")
async def test_histories_and_results_of_many_runs_are_read_together() -> None:
    store = hf.MemoryStore()
    starter, twice = doubling_app()
    there = Counted(store)
    async with starter.node(there, options=STARTER):
        runs = await asyncio.gather(*(starter.start(twice, number) for number in range(RUNS)))
        here = Counted(store)
        async with doubling_app()[0].node(here):
            results = await asyncio.gather(*(run.result() for run in runs))
            assert results == [2 * number for number in range(RUNS)]
            assert here.reads["read_events"] == 0
            assert here.reads["EventQuery"] <= 4, "the histories of 200 runs are one query"
        there.reads.clear()
        assert await asyncio.gather(*(starter.run(run.run_id).result() for run in runs)) == results
        assert there.reads["EventQuery"] >= 1
        assert there.reads["load"] == 0, "of runs that have finished only the ends are read"
        assert there.reads.total() <= 6, "a look for finished runs may come in between"


@pytest.mark.contract("WF-2", "MSG-3")
async def test_a_damaged_history_among_many_holds_up_no_other(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    starter, twice = doubling_app()
    async with starter.node(f"sqlite:///{path}", options=STARTER):
        runs = await asyncio.gather(*(starter.start(twice, number) for number in range(5)))
    with closing(sqlite3.connect(path)) as file:
        file.execute(
            "UPDATE events SET data = '{' WHERE run_no = (SELECT run_no FROM runs WHERE run_id = ?)", (runs[2].run_id,)
        )
        file.commit()
    app, _ = doubling_app()
    async with app.node(f"sqlite:///{path}"):
        others = [runs[number] for number in (0, 1, 3, 4)]
        assert await asyncio.gather(*(app.run(run.run_id).result() for run in others)) == [0, 2, 6, 8]
        assert await app.run(runs[2].run_id).status() == "PENDING"


class Asked(StoreProxy):
    """A store that counts how often the end of each run is asked for."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.ends: Counter[str] = Counter()

    async def find(self, query: Query[Row]) -> Found[Row]:
        """Count, and find."""
        if isinstance(query, EventQuery) and query.only_ends:
            self.ends.update(run_id for run_id, _ in query.after)
        return await self.inner.find(query)


def mixed_app() -> tuple[hf.App, Any, Any]:
    app, twice = doubling_app()

    @app.workflow
    async def patient() -> str:
        return await hf.wait_signal("go", str)

    return app, twice, patient


class Deaf(LocalWakeups):
    """Wake-ups of which every one is lost."""

    def notify(self, topic: Topic = "runs", ended: Ended = None) -> None:
        """Lose it."""


class Earlier(SocketWakeups):
    """Wake-ups as earlier releases send them: they do not say which runs have ended."""

    def notify(self, topic: Topic = "runs", ended: Ended = None) -> None:
        """Say that something has happened to runs."""
        super().notify("runs", None)


@pytest.mark.contract("MSG-4", "OWN-3")
async def test_ends_elsewhere_are_heard_of_and_what_waits_on_is_not_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    app, twice, patient = mixed_app()
    there = Asked(await SqliteStore.open(path))
    await there.migrate()
    options = hf.NodeOptions(takes_runs=False, safety_poll_s=600.0)
    async with app.node(there, options=options), mixed_app()[0].node(f"sqlite:///{path}"):
        parked = [await app.start(patient) for _ in range(20)]
        waiting = [asyncio.create_task(run.result()) for run in parked]
        await asyncio.sleep(0.1)
        for number in range(30):
            run = await app.start(twice, number)
            assert await run.result() == 2 * number
        assert max(there.ends[run.run_id] for run in parked) <= 2, "as they were asked for, and as the watch began"
        for run in parked:
            await run.signal("go", "now")
        assert await asyncio.gather(*waiting) == ["now"] * 20
    await there.close()


@pytest.mark.contract("API-2")
async def test_who_asks_for_a_run_that_was_started_here_and_is_deleted_is_told_at_once(tmp_path: Path) -> None:
    """Also one who waits for others of its node, which are there."""
    path = tmp_path / "runs.db"
    app, twice, patient = mixed_app()
    there, *_ = mixed_app()
    options = hf.NodeOptions(takes_runs=False, safety_poll_s=600.0)
    async with app.node(f"sqlite:///{path}", options=options), there.node(f"sqlite:///{path}"):
        waiting = asyncio.create_task((await app.start(patient)).result())
        run = await app.start(twice, 1)
        assert await there.run(run.run_id).result() == 2
        assert (await there.runtime().store.purge(PurgePolicy(finished_run_ms=0, run_ids=(run.run_id,)))).runs == 1
        async with asyncio.timeout(60):
            with pytest.raises(NotFound):
                await run.result()
        assert not waiting.done()
        waiting.cancel()


@pytest.mark.contract("MSG-4", "OWN-3", "FMT-1")
@pytest.mark.parametrize("kind", [Deaf, Earlier])
async def test_results_arrive_when_notifications_are_lost_or_do_not_say_what_ended(tmp_path: Path, kind: Any) -> None:
    path = tmp_path / "runs.db"
    stores = [await SqliteStore.open(path) for _ in range(2)]
    await stores[0].migrate()
    stores[1]._is_migrated = True
    for store in stores:
        store.wakeups = kind() if kind is Deaf else kind(path)
    app, twice, patient = mixed_app()
    poll_s = 0.05 if kind is Deaf else 600.0
    here, there = (hf.NodeOptions(takes_runs=takes, safety_poll_s=poll_s) for takes in (False, True))
    async with app.node(stores[0], options=here), mixed_app()[0].node(stores[1], options=there):
        parked = await app.start(patient)
        runs = [await app.start(twice, number) for number in range(10)]
        async with asyncio.timeout(60):
            assert await asyncio.gather(*(run.result() for run in runs)) == [2 * number for number in range(10)]
            await parked.signal("go", "at last")
            assert await parked.result() == "at last"
    for store in stores:
        await store.close()
