"""`acquire_jobs`, `release_jobs` and `heartbeat`: jobs in queues, and the progress of activities."""

from collections.abc import Mapping, Sequence

from msgspec import UNSET

from holdfast.core.call_limits import CallLimit
from holdfast.core.instants import Instant
from holdfast.errors import StoreCorrupt
from holdfast.store import port, sql
from holdfast.store.postgres.columns import columns
from holdfast.store.postgres.pool import Db, Pool

ACQUIRE = "SELECT o_attempt, o_details, o_job FROM holdfast.take_1($1, $2, $3, $4, $5, $6)"
ACQUIRE_LIMITED = """
SELECT o_now, o_next, o_attempt, o_details, o_job
FROM holdfast.take_limited_1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)
"""
RELEASE = """
WITH locked AS (
    SELECT run_no, run_id FROM holdfast.runs WHERE run_id = ANY ($3::text[]) ORDER BY run_id FOR UPDATE
)
UPDATE holdfast.jobs j SET visible_at = holdfast.time_1($1), taken_by = NULL, next_attempt = t.attempt
FROM unnest($3::text[], $4::text[], $5::bigint[]) AS t (run_id, step_id, attempt) JOIN locked r ON r.run_id = t.run_id
WHERE j.run_no = r.run_no AND j.step_id = t.step_id AND j.taken_by = $2 AND j.next_attempt = t.attempt + 1
RETURNING j.run_no
"""
HEARTBEAT = "SELECT o_now, o_kept FROM holdfast.beat_1($1, $2, $3, $4, $5, $6, $7, $8)"


async def acquire(
    pool: Pool,
    node: str,
    queues: Sequence[str],
    activities: Sequence[str],
    limit: int,
    visible_ms: int,
    now: Instant | None,
) -> list[port.Job]:
    """Acquire up to `limit` jobs: longest visible first, then in order of their runs' creation and of step ids."""
    found = await pool.fetch(ACQUIRE, now, node, list(queues), list(activities), limit, visible_ms * 1_000)
    acquired = []
    for row in found:
        try:
            acquired.append(sql.job_of(row))
        except StoreCorrupt:  # it stays invisible like any other: a damaged job never stops other runs
            continue
    return acquired


async def acquire_limited(
    pool: Pool,
    node: str,
    queues: Sequence[str],
    activities: Sequence[str],
    limits: Mapping[str, CallLimit],
    most: int,
    visible_ms: int,
    now: Instant | None,
) -> tuple[list[port.Job], Instant | None]:
    """Acquire up to `most` jobs that have room under their limits, in order of the limits' names."""
    rows = [(name, *_numbers(limit)) for name, limit in limits.items()]
    *found, last = await pool.fetch(
        ACQUIRE_LIMITED, now, node, list(queues), list(activities), most, visible_ms * 1_000, *columns(rows, 7)
    )
    acquired = []
    for row in found:
        try:
            acquired.append(sql.job_of(tuple(row)[2:]))
        except StoreCorrupt:  # its place is free when it is visible again
            continue
    return acquired, last[1]


def _numbers(limit: CallLimit) -> tuple[int | None, ...]:
    return (
        *(limit.at_once, limit.per_key, limit.calls, limit.period_ms * 1_000),
        *(limit.key_calls, limit.key_period_ms * 1_000),
    )


async def release(pool: Pool, node: str, jobs: Sequence[port.Job], now: Instant | None) -> int:
    """Give back jobs that were acquired and not begun."""
    asked = [(job.run_id, job.step_id, job.engine_attempt_id) for job in jobs]
    return len(await pool.fetch(RELEASE, now, node, *columns(asked, 3))) if asked else 0


async def heartbeat(
    db: Db, node: str, beats: Sequence[port.Heartbeat], visible_ms: int, now: Instant | None
) -> tuple[Instant, list[bool]]:
    """Keep the jobs and steps that the node still has; store the details of their progress."""
    [row] = await db.fetch(
        HEARTBEAT,
        now,
        node,
        visible_ms * 1_000,
        [one.run_id for one in beats],
        [one.step_id for one in beats],
        [one.queue for one in beats],
        [one.engine_attempt_id for one in beats],
        [None if one.details is UNSET else sql.text_of(one.details) for one in beats],
    )
    return row[0], list(row[1])
