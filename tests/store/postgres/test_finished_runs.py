"""What operators and housekeeping ask reads no more rows because more runs have finished."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from bench import filled
from holdfast.clock import SystemClock
from holdfast.engine.observe.doctor import examine
from holdfast.store.health import Bounds
from holdfast.store.port import COUNTED_RUNS
from holdfast.store.postgres import PostgresStore, queries
from holdfast.store.postgres.address import parse_address
from holdfast.store.postgres.health import examine as examine_server
from holdfast.store.postgres.pool import Pool
from tests.store.postgres.tampering import behind

MANY = 3_000
READ_AT_MOST = 200
"""Rows of runs and of events for one statement; the model of the copies is one run, and 20 are the sample."""


class Analysed:
    """Executes statements as a pool does, and counts the rows of tables and indexes that each has read."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.read: dict[str, Counter[str]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    async def fetch(self, sql: str, *args: Any, **options: Any) -> list[Any]:
        if "holdfast." in sql:
            [[text]] = await self._pool.fetch(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}", *args)
            rows, pending = self.read.setdefault(sql, Counter()), [json.loads(text)[0]["Plan"]]
            while pending:
                node = pending.pop()
                pending += node.get("Plans", [])
                each = node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
                rows[node.get("Relation Name", "")[:6]] += each * node["Actual Loops"]
        return await self._pool.fetch(sql, *args, **options)


@pytest.mark.contract("STO-1")
async def test_what_is_asked_reads_no_more_with_many_finished_runs(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await PostgresStore.open(address)
    await store.migrate()
    model = await filled.finished_model(store)
    schema = parse_address(address).schema
    async with behind(address) as connection:
        await filled.fill_schema(connection, schema, model, filled.prefix_of(model), 1, MANY - 1)
    assert (await store.stats()).runs == {"COMPLETED": MANY}
    assert not (await store.stats()).completed_is_estimated

    monkeypatch.setattr(queries, "STATS", queries.STATS.replace(str(COUNTED_RUNS), "1000"))
    db: Any = Analysed(store._pool)
    estimated = await queries.stats(db, None)
    await examine_server(db, Bounds(sample_runs=20), None)
    await store.close()
    assert (estimated.runs, estimated.completed_is_estimated) == ({"COMPLETED": MANY}, True)
    much = {sql: rows for sql, rows in db.read.items() if rows["runs"] + rows["events"] > READ_AT_MOST}
    assert len(db.read) > 5
    assert much == {}


@pytest.mark.contract("STO-1")
async def test_copies_of_a_run_are_what_the_engine_would_have_written(address: str) -> None:
    """All of their histories are read in full, and their keys are those of their own ids."""
    store = await PostgresStore.open(address)
    await store.migrate()
    model = await filled.finished_model(store)
    async with behind(address) as connection:
        await filled.fill_schema(connection, parse_address(address).schema, model, filled.prefix_of(model), 1, 50)
    report = await examine(store, SystemClock(), bounds=Bounds(sample_runs=100))
    await store.close()
    assert report.runs_read == 51
    assert [finding for finding in report.findings if finding.subject == "runs" and finding.level != "fine"] == []
