"""Finished runs with nine events each, as the engine leaves them, but written by the store itself: millions of them."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

RUNS = """
INSERT INTO {schema}runs (run_no, run_id, tenant, project, environment, plan_id, plan_version, run_request_id,
    request_key, input_sha256, tags, status, version, snapshot, created_at, updated_at, finished_at, lease_epoch)
SELECT {run_no}, 'filled-' || n, 'default', 'default', 'default', 'steps', '1', 'filled-' || n,
    {key}, {key}, '[]', 'COMPLETED', 9,
    '{{"status":"COMPLETED","state_version":9,"last_executed_by":"bench"}}', n, n, n, 1
FROM {numbers}
"""
EVENTS = """
INSERT INTO {schema}events
SELECT {run_no}, seq, {event_id}, 'StepCompleted', 'nothing#' || seq, 1, 1, '{{"result":' || n || '}}',
    {event_key}, n, n, 'holdfast/1', '{{"node":"bench","epoch":1}}', NULL, NULL, 1
FROM {numbers}, {seqs}
"""
COUNTED = """
WITH RECURSIVE counted ({name}) AS (SELECT {first} UNION ALL SELECT {name} + 1 FROM counted WHERE {name} < {last})
SELECT {name} FROM counted
"""
CHUNK = 20_000


def fill_file(path: Path, first: int, last: int) -> None:
    """Put runs with these numbers into a file. Nothing else may be in it that is not durable elsewhere."""
    numbers = {
        "schema": "",
        "run_no": "n + :offset",
        "numbers": "(" + COUNTED.format(name="n", first=":first", last=":last") + ")",
        "seqs": "(" + COUNTED.format(name="seq", first="1", last="9") + ")",
        "key": "randomblob(32)",
        "event_id": "lower(hex(randomblob(16)))",
        "event_key": "randomblob(32)",
    }
    with closing(sqlite3.connect(path, timeout=60)) as db:
        db.execute("PRAGMA cache_size = -500000")
        db.execute("PRAGMA synchronous = OFF")
        [[highest]] = db.execute("SELECT coalesce(max(run_no), 0) FROM runs")
        for start in range(first, last + 1, CHUNK):
            part = {"first": start, "last": min(start + CHUNK - 1, last), "offset": highest - first + 1}
            db.execute(RUNS.format(**numbers), part)
            db.execute(EVENTS.format(**numbers), part)
            db.commit()


async def fill_schema(connection: Any, schema: str, first: int, last: int) -> None:
    """Put runs with these numbers into a schema, and let the server look at them, as it would by itself."""
    numbers = {
        "schema": f"{schema}.",
        "run_no": "-n",
        "numbers": "generate_series($1::bigint, $2::bigint) n",
        "seqs": "generate_series(1, 9) seq",
        "key": "sha256(('key ' || n)::bytea)",
        "event_id": "gen_random_uuid()::text",
        "event_key": "sha256((n || '|' || seq)::bytea)",
    }
    for start in range(first, last + 1, CHUNK):
        for statement in (RUNS, EVENTS):
            await connection.execute(statement.format(**numbers), start, min(start + CHUNK - 1, last), timeout=600)
    if last >= first:  # else the server would begin to do so on its own, in the middle of the measurement
        for table in ("runs", "events"):
            await connection.execute(f"VACUUM ANALYZE {schema}.{table}", timeout=3_600)
    await connection.execute("CHECKPOINT", timeout=600)
