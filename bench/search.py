"""Searches over many runs with attributes of a thousand tenants: what the first page takes, and the second, and counts.

The store writes the rows by itself, by one statement for each table (`fill`), with the columns that they get from the
engine.
`python -m bench.search --runs 1000000` names the runs; each figure is the median of some searches, in milliseconds.
"""

import argparse
import asyncio
import os
import sqlite3
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bench import postgres
from bench.disk import default_folder
from bench.effort import Effort
from bench.report import Row, Rows, progress, table
from bench.stores import opened
from holdfast.core.attributes import AttributeType
from holdfast.core.search import parse_conditions, parse_order
from holdfast.core.state import RunStatus
from holdfast.limits import COUNTED_ROWS
from holdfast.store.port import RunCountQuery, RunQuery, Store

TYPES: dict[str, AttributeType] = {"cents": "int", "region": "str", "customer": "str"}
PAGE = 50
REPEATS = 9
CHUNK = 50_000
CLOCK = time.process_time if os.environ.get("BENCH_CPU") else time.perf_counter
"""On a busy machine the time on a processor says more; it is known of this process, and so of SQLite."""

# One run in a hundred has failed, one in a thousand is paused or runs, and one in ten thousand is of a rare workflow.
RUNS = """
INSERT INTO {runs} (run_no, run_id, tenant, project, environment, plan_id, plan_version, run_request_id, request_key,
    input_sha256, tags, status, version, snapshot, created_at, updated_at, finished_at, lease_epoch)
SELECT n, 'filled-' || n, 'tenant-' || (n % 1000), 'default', 'default',
    CASE WHEN n % 9973 = 0 THEN 'rare' ELSE 'steps-' || (n % 7) END, '1', 'filled-' || n, {key}, {key}, '[]',
    CASE WHEN n % 997 = 0 THEN 'RUNNING' WHEN n % 991 = 0 THEN 'PAUSED' WHEN n % 101 = 0 THEN 'FAILED'
        ELSE 'COMPLETED' END,
    9, '{{"status":"COMPLETED","state_version":9,"last_executed_by":"bench","attributes":{{"cents":' || {cents} ||
    ',"region":"' || {region} || '","customer":"' || {customer} || '"}}}}', n, n,
    CASE WHEN n % 997 = 0 OR n % 991 = 0 THEN NULL ELSE n END, 1
FROM {numbers}
"""
ATTRIBUTES = """
INSERT INTO {attributes} (run_no, name, kind, number, word{tenant_column})
SELECT n, 'cents', 'n', {cents}, NULL{tenant} FROM {numbers} UNION ALL
SELECT n, 'region', 's', NULL, {region}{tenant} FROM {numbers} UNION ALL
SELECT n, 'customer', 's', NULL, {customer}{tenant} FROM {numbers}
"""
VALUES = {
    "cents": "((n * 7919) % 1000003)",
    "region": "(CASE (n * 31 / 7) % 4 WHEN 0 THEN 'eu' WHEN 1 THEN 'us' WHEN 2 THEN 'asia' ELSE 'africa' END)",
    "customer": "('customer-' || (n * 13 % 50021))",
}
SEARCHES: dict[str, RunQuery] = {
    "equality, few": RunQuery(where=parse_conditions("customer=customer-777", TYPES)),
    "equality, many": RunQuery(where=parse_conditions("region=eu", TYPES)),
    "range, few": RunQuery(where=parse_conditions("cents>=500 cents<600", TYPES)),
    "range, many": RunQuery(where=parse_conditions("cents>=500000", TYPES)),
    "prefix, few": RunQuery(where=parse_conditions("customer=customer-77*", TYPES)),
    "prefix, many": RunQuery(where=parse_conditions("customer=cust*", TYPES)),
    "ordered": RunQuery(order=parse_order("-cents", TYPES)),
    "range, ordered": RunQuery(where=parse_conditions("cents<500000", TYPES), order=parse_order("-cents", TYPES)),
    "few, ordered by another": RunQuery(
        where=parse_conditions("customer=customer-777", TYPES), order=parse_order("cents", TYPES)
    ),
    "many, ordered by another": RunQuery(where=parse_conditions("region=eu", TYPES), order=parse_order("cents", TYPES)),
    "status": RunQuery(status=RunStatus.PAUSED),
    "status and attribute": RunQuery(status=RunStatus.FAILED, where=parse_conditions("region=eu", TYPES)),
    "rare status and range": RunQuery(status=RunStatus.PAUSED, where=parse_conditions("cents<500000", TYPES)),
    "status, ordered": RunQuery(status=RunStatus.PAUSED, order=parse_order("cents", TYPES)),
    "rare workflow": RunQuery(workflow="rare"),
    "rare workflow, attribute": RunQuery(workflow="rare", where=parse_conditions("region=eu", TYPES)),
    "time of end": RunQuery(finished_from=400_000, finished_until=400_500),
    "ordered by time of end": RunQuery(order=parse_order("-finished_at", TYPES)),
    "all": RunQuery(),
}


async def measure(effort: Effort, folder: Path) -> Rows:
    """Measure on a file, and on a server."""
    runs = effort.search_runs
    return {**await on_sqlite(folder / "search.db", runs), **await on_postgres(runs)}


async def on_sqlite(path: Path, runs: int) -> Rows:
    """Fill a file, and search it."""
    async with opened(path) as store:
        if not await store.find(RunQuery(limit=1)):
            progress(f"search: a file with {runs:,} runs")
            fill(path, runs)
        return {f"SQLite {label}": row for label, row in (await searched(store)).items()}


async def on_postgres(runs: int) -> Rows:
    """Fill a schema on a server, and search it."""
    with postgres.server() as dsn:
        async with postgres.opened(dsn) as (store, connection):
            progress(f"search: a server with {runs:,} runs")
            await fill_server(connection, postgres.SCHEMA, runs)
            return {f"PostgreSQL {label}": row for label, row in (await searched(store)).items()}


def fill(path: Path, runs: int, first: int = 1) -> None:
    """Put runs with attributes into a file."""
    numbers = "(WITH RECURSIVE x (n) AS (SELECT :first UNION ALL SELECT n + 1 FROM x WHERE n < :last) SELECT n FROM x)"
    names = {**VALUES, "numbers": numbers, "runs": "runs", "attributes": "run_attributes", "key": "randomblob(32)"}
    names |= {"tenant_column": "", "tenant": ""}  # triggers write it
    with closing(sqlite3.connect(path, timeout=60)) as db:
        db.execute("PRAGMA cache_size = -500000")
        db.execute("PRAGMA synchronous = OFF")
        for start in range(first, first + runs, CHUNK):
            part = {"first": start, "last": min(start + CHUNK, first + runs) - 1}
            db.execute(RUNS.format(**names), part)
            db.execute(ATTRIBUTES.format(**names), part)
            db.commit()


async def fill_server(connection: Any, schema: str, runs: int) -> None:
    """Put runs with attributes into a schema, and let the server look at them, as it would by itself."""
    names = {
        **VALUES,
        "numbers": "generate_series($1::bigint, $2::bigint) n",
        "runs": f"{schema}.runs",
        "attributes": f"{schema}.run_attributes",
        "key": "sha256(('key ' || n)::bytea)",
        "tenant_column": ", tenant",
        "tenant": ", 'tenant-' || (n % 1000)",
    }
    for start in range(1, runs + 1, CHUNK):
        for statement in (RUNS, ATTRIBUTES):
            await connection.execute(statement.format(**names), start, min(start + CHUNK - 1, runs), timeout=600)
    for name in ("runs", "run_attributes"):
        await connection.execute(f"VACUUM ANALYZE {schema}.{name}", timeout=600)


async def searched(store: Store) -> Rows:
    """Search in every way, for all tenants and for one."""
    rows: Rows = {}
    for label, query in SEARCHES.items():
        asked = replace(query, newest=query.order is None, limit=PAGE)
        of_tenant = await _pages(store, replace(asked, tenant="tenant-7"), " of a tenant")
        rows[label] = {**await _pages(store, asked, ""), **of_tenant}
    return rows


async def _pages(store: Store, query: RunQuery, suffix: str) -> Row:
    """Return the medians for a first page, the one behind it, and the counts."""
    first, found = await _median(store, query)
    second = 0.0
    if found and len(found) == PAGE:
        last = found[-1]
        behind = found.cursor or (last.created_at, last.run_id)
        second, _ = await _median(store, replace(query, **{"behind" if query.order else "before": behind}))
    look = COUNTED_ROWS // 4 if query.where else COUNTED_ROWS  # as the service does
    counted, _ = await _median(store, RunCountQuery(runs=query, look=look, limit=500))
    return {f"found{suffix}": len(found), f"ms{suffix}": first, f"2nd{suffix}": second, f"count{suffix}": counted}


async def _median(store: Store, query: Any) -> tuple[float, Any]:
    times = []
    for _ in range(REPEATS):
        began = CLOCK()
        found = await store.find(query)
        times.append((CLOCK() - began) * 1_000)
    return statistics.median(times), found


def main() -> None:
    """Measure with as many runs as are asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench.search", description=__doc__)
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--store", choices=["sqlite", "postgres"], action="append")
    parser.add_argument("--dir", dest="folder", type=Path, default=default_folder(), help="where the file is made")
    options = parser.parse_args()
    stores = options.store or ["sqlite", "postgres"]
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=options.folder) as folder:
        path = Path(os.environ.get("BENCH_SEARCH_FILE", f"{folder}/search.db"))
        rows: Rows = {}
        if "sqlite" in stores:
            rows |= asyncio.run(on_sqlite(path, options.runs))
        if "postgres" in stores:
            rows |= asyncio.run(on_postgres(options.runs))
    print(table(f"search: {options.runs:,} runs, 1,000 tenants", rows))


if __name__ == "__main__":
    main()
