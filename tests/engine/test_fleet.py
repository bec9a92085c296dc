"""Runs that one process starts and another executes: what the store is asked for grows with batches, not with runs."""

import asyncio
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.store.proxy import StoreProxy
from holdfast.store.types import Found, Query, Row

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
