"""The whole engine on a PostgreSQL server: short runs, one run step by step, signals, and the same when much is stored.

`BENCH_POSTGRES` may name the server, such as `postgresql://postgres@127.0.0.1/postgres`: a schema is made there for the
measurement, and dropped at the end. Otherwise a server is started as for the tests, with fsync on, and removed again.
"""

import asyncio
import gc
import os
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import asyncpg

import holdfast as hf
from bench.effort import Effort
from bench.engine import STARTS_AT_ONCE, app, steps
from bench.filled import fill_schema, finished_model, prefix_of
from bench.report import Row, Rows, percentile, progress
from bench.stores import as_the_command
from bench.workload import LIMITS
from holdfast.store.port import WaitQuery
from holdfast.store.postgres import PostgresStore
from tests.postgres_server import Installation

SCHEMA = "holdfast_bench"
WARM_RUNS = 500


@app.workflow
async def signalled() -> bool:
    """Wait for a signal, and complete."""
    return await hf.wait_signal("go", bool)


async def measure(effort: Effort, folder: Path) -> Rows:
    """Measure on an empty schema, and on one that is full of finished runs."""
    del folder  # the server keeps its files elsewhere
    count = effort.engine_runs[-1]
    rows: Rows = {}
    with server() as dsn:
        async with opened(dsn) as (store, connection):
            filled = 0
            for finished in (0, effort.postgres_finished):
                progress(f"postgres: filling up to {finished:,} finished runs")
                model = await finished_model(store)
                await fill_schema(connection, SCHEMA, model, prefix_of(model), filled + 1, finished)
                filled = finished
                progress(f"postgres: {finished:,} finished runs")
                rows[f"{finished:,} finished runs"] = await _all(store, count, effort)
    return rows


@contextmanager
def server() -> Iterator[str]:
    """Give the address of a server: the one that was named, or a new one."""
    named = os.environ.get("BENCH_POSTGRES")
    if named:
        yield named
        return
    installation = Installation()
    try:
        yield installation.server().dsn
    finally:
        installation.remove()


@asynccontextmanager
async def opened(dsn: str) -> AsyncIterator[tuple[PostgresStore, Any]]:
    """Open a store in a schema of its own there, and a connection beside it."""
    connection = await asyncpg.connect(dsn)
    await connection.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")
    store = await PostgresStore.open(f"{dsn}{'&' if '?' in dsn else '?'}schema={SCHEMA}", limits=LIMITS)
    try:
        await store.migrate()
        yield store, connection
    finally:
        await store.close()
        await connection.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")
        await connection.close()


async def _all(store: Any, count: int, effort: Effort) -> Row:
    rates, step_ms, signal_ms = [], [], []
    async with app.node(store, options=as_the_command()):
        await _short_runs(WARM_RUNS)
        for _ in range(effort.engine_rounds):
            gc.collect()
            rates.append(count / await _short_runs(count))
        for _ in range(effort.engine_sequential):
            began = time.perf_counter()
            await (await app.start(steps, 10)).result()
            step_ms.append((time.perf_counter() - began) * 100)
        signal_ms = [await _signal_ms(store) for _ in range(effort.engine_sequential)]
    return {
        "runs/s": statistics.median(rates),
        "median ms/step": statistics.median(step_ms),
        "signal to completion, median ms": statistics.median(signal_ms),
        "p99 ms": percentile(signal_ms, 99),
    }


async def _short_runs(count: int) -> float:
    began = time.perf_counter()
    for first in range(0, count, STARTS_AT_ONCE):
        runs = await asyncio.gather(*(app.start(steps, 3) for _ in range(min(STARTS_AT_ONCE, count - first))))
        await asyncio.gather(*(run.result() for run in runs))
    return time.perf_counter() - began


async def _signal_ms(store: Any) -> float:
    run = await app.start(signalled)
    listener = store.wakeups.listen()
    while not await store.find(WaitQuery(run_id=run.run_id)):
        await listener.wait(1.0)
    listener.close()
    began = time.perf_counter()
    await run.signal("go", True)
    await run.result()
    return (time.perf_counter() - began) * 1e3
