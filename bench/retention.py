"""What commits of a working node take while retention deletes finished runs beside it.

Batches of turns are committed one after the other with short pauses, as by a node with some work: first alone, then
with a pass of retention in the same process. `ratio` is that of the 99th percentiles; the contract of the pass is 2.
The file is as large as before once as many new runs have ended as were deleted: SQLite reuses the pages.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from bench import postgres
from bench.effort import Effort
from bench.filled import fill_file, fill_schema, finished_model, prefix_of
from bench.report import Row, Rows, percentile, progress
from bench.stores import opened
from bench.workload import NODE, Sleepers, create_all, new_runs
from holdfast.clock import SystemIds
from holdfast.engine.retention import Retention, RetentionDuty
from holdfast.store.port import Store

BATCH = 20
RUNS = 2_000
PAUSE_S = 0.005


async def measure(effort: Effort, folder: Path) -> Rows:
    """Measure on a file, and on a server."""
    path = folder / "retention.db"
    rows: Rows = {}
    progress(f"retention: a file with {effort.retention_runs:,} finished runs")
    async with opened(path) as store:
        model = await finished_model(store)
    fill_file(path, model, prefix_of(model), 1, effort.retention_runs)
    async with opened(path) as store:
        rows["SQLite"] = await _both(store, effort, lambda: path.stat().st_size)
    with postgres.server() as dsn:
        async with postgres.opened(dsn) as (store, connection):
            progress(f"retention: a server with {effort.retention_runs:,} finished runs")
            model = await finished_model(store)
            await fill_schema(connection, postgres.SCHEMA, model, prefix_of(model), 1, effort.retention_runs)
            rows["PostgreSQL"] = await _both(store, effort, lambda: 0)
    return rows


async def _both(store: Store, effort: Effort, size: Callable[[], int]) -> Row:
    """Commit without and with retention, in turn."""
    runs = new_runs(RUNS)
    await create_all(store, runs)
    sleepers = Sleepers(runs, seed=None)
    duty = RetentionDuty(NODE, store, Retention(finished=0, rules=()), SystemIds(), None, _no_cancel)
    await _commits(store, sleepers, effort.retention_s / 4)  # warm
    alone, beside, deleted, took_s, before = list[float](), list[float](), 0, 0.0, size()
    for _ in range(2):
        alone += await _commits(store, sleepers, effort.retention_s / 2)
        began = time.perf_counter()
        sweeping = asyncio.create_task(duty.sweep(until_s=effort.retention_s / 2))
        beside += await _commits(store, sleepers, effort.retention_s / 2)
        deleted += (await sweeping).runs
        took_s += time.perf_counter() - began
    assert deleted > 0
    row: Row = {"runs deleted": deleted, "runs deleted/s": deleted / took_s, "commits": len(alone) + len(beside)}
    for name, times in (("alone", alone), ("beside", beside)):
        row[f"p50 ms {name}"] = percentile(times, 50) * 1_000
        row[f"p99 ms {name}"] = percentile(times, 99) * 1_000
    row["ratio"] = percentile(beside, 99) / percentile(alone, 99)
    if before:
        row["file growth"] = size() / before
    return row


async def _commits(store: Store, sleepers: Sleepers, seconds: float) -> list[float]:
    """Commit turns for so long, and return how long each commit took."""
    times, until = list[float](), time.perf_counter() + seconds
    while time.perf_counter() < until:
        [turns] = sleepers.next_turns(BATCH, 1)
        began = time.perf_counter()
        await store.commit(turns)
        times.append(time.perf_counter() - began)
        await asyncio.sleep(PAUSE_S)
    return times


async def _no_cancel(run_id: str, reason: str) -> None:
    raise AssertionError(f"{run_id}: {reason}")
