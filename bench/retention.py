"""What commits of a working node take while retention deletes finished runs beside it.

Batches of turns are committed one after the other with short pauses, as by a node with some work: first alone, then
with a pass of retention in the same process. `ratio` is that of the 99th percentiles; the contract of the pass is 2.
The file is as large as before once as many new runs have ended as were deleted: SQLite reuses the pages.
"""

import asyncio
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from bench import postgres
from bench.effort import Effort
from bench.report import Row, Rows, percentile, progress
from bench.stores import opened
from bench.workload import NODE, Sleepers, create_all, new_runs
from holdfast.clock import SystemIds
from holdfast.engine.retention import Retention, RetentionDuty
from holdfast.store.port import Store

BATCH = 20
RUNS = 2_000
PAUSE_S = 0.005
CHUNK = 20_000

# Finished runs with nine events each, as the engine leaves them.
FILL = """
WITH RECURSIVE numbers (n) AS (SELECT ? UNION ALL SELECT n + 1 FROM numbers WHERE n < ?)
INSERT INTO runs (run_no, run_id, tenant, project, environment, plan_id, plan_version, run_request_id, request_key,
    input_sha256, tags, status, version, snapshot, created_at, updated_at, finished_at, lease_epoch)
SELECT n, 'filled-' || n, 'default', 'default', 'default', 'steps', '1', 'filled-' || n, randomblob(32), x'00', '[]',
    'COMPLETED', 9, '{"status":"COMPLETED","state_version":9,"last_executed_by":"bench"}', n, n, n, 1 FROM numbers
"""
FILL_EVENTS = """
WITH RECURSIVE numbers (n) AS (SELECT ? UNION ALL SELECT n + 1 FROM numbers WHERE n < ?),
    seqs (seq) AS (SELECT 1 UNION ALL SELECT seq + 1 FROM seqs WHERE seq < 9)
INSERT INTO events SELECT n, seq, lower(hex(randomblob(16))), 'StepCompleted', 'nothing#' || seq, 1, 1,
    '{"result":' || n || '}', randomblob(32), n, n, 'holdfast/1', '{"node":"bench","epoch":1}', NULL, NULL, 1
FROM numbers, seqs
"""


async def measure(effort: Effort, folder: Path) -> Rows:
    """Measure on a file, and on a server."""
    path = folder / "retention.db"
    rows: Rows = {}
    async with opened(path) as store:
        progress(f"retention: a file with {effort.retention_runs:,} finished runs")
        fill(path, 0, effort.retention_runs)
        rows["SQLite"] = await _both(store, effort, lambda: path.stat().st_size)
    with postgres.server() as dsn:
        async with postgres.opened(dsn) as (store, connection):
            progress(f"retention: a server with {effort.retention_runs:,} finished runs")
            await postgres.fill(connection, 0, effort.retention_runs)
            rows["PostgreSQL"] = await _both(store, effort, lambda: 0)
    return rows


def fill(path: Path, start: int, end: int) -> None:
    """Put finished runs into a file."""
    with closing(sqlite3.connect(path, timeout=60)) as db:
        for first in range(start, end, CHUNK):
            numbers = (first + 1, min(first + CHUNK, end))
            db.execute(FILL, numbers)
            db.execute(FILL_EVENTS, numbers)
            db.commit()


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
