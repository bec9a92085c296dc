"""`acquire_jobs`, `release_jobs` and `heartbeat`: jobs in queues, and the progress of activities."""

from collections.abc import Mapping, Sequence

from msgspec import UNSET

from holdfast.core.call_limits import CallLimit
from holdfast.core.instants import Instant
from holdfast.errors import StoreCorrupt
from holdfast.store import port, sql
from holdfast.store.postgres.columns import askable, columns
from holdfast.store.postgres.pool import Db, Pool
from holdfast.store.queries import PLACES_COUNTED

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
PLACES = f"""
WITH t AS MATERIALIZED (SELECT holdfast.time_1($1) AS now), asked AS MATERIALIZED (
    SELECT run_no, run_id, gate_no FROM holdfast.runs WHERE run_id = ANY ($2) AND finished_at IS NULL
), calls AS (
    SELECT a.run_id, j.run_no, j.step_id, j.limit_name, j.limit_tenant, j.limit_key, j.visible_at, t.now,
        row_number() OVER (PARTITION BY j.run_no ORDER BY j.visible_at, j.step_id) AS place,
        count(*) OVER (PARTITION BY j.run_no) AS waiting
    FROM t, asked a JOIN holdfast.jobs j ON j.run_no = a.run_no
    WHERE j.limit_name IS NOT NULL AND j.visible_at <= t.now
        AND NOT EXISTS (SELECT FROM holdfast.gate_runs w WHERE w.number = a.gate_no AND NOT w.is_inside)
)
SELECT c.run_id, c.step_id, c.limit_name, c.limit_key, (
    SELECT count(*) FROM (
        SELECT FROM holdfast.jobs x
        WHERE x.limit_name = c.limit_name AND x.visible_at > c.now AND x.taken_by IS NOT NULL LIMIT {PLACES_COUNTED}
    ) n
), (
    SELECT count(*) FROM (
        SELECT FROM holdfast.jobs x
        WHERE x.limit_name = c.limit_name AND x.limit_tenant = c.limit_tenant AND x.limit_key = c.limit_key
            AND x.visible_at > c.now AND x.taken_by IS NOT NULL LIMIT {PLACES_COUNTED}
    ) n
), (
    SELECT count(*) FROM (
        SELECT FROM holdfast.jobs x
        WHERE x.limit_name = c.limit_name AND x.limit_tenant = c.limit_tenant AND x.limit_key = c.limit_key
            AND (x.visible_at, x.run_no, x.step_id) < (c.visible_at, c.run_no, c.step_id) LIMIT {PLACES_COUNTED}
    ) n
), c.waiting FROM calls c WHERE c.place = 1
UNION ALL
SELECT a.run_id, '', g.plan_id, g.key, q.inside - (
    SELECT count(*) FROM holdfast.gate_exits x JOIN holdfast.gate_runs r ON r.number = x.number
    WHERE x.plan_id = g.plan_id AND r.is_inside
), coalesce((
    SELECT l.inside FROM holdfast.gate_lines l WHERE l.plan_id = g.plan_id AND l.tenant = g.tenant AND l.key = g.key
), 0) - (
    SELECT count(*) FROM holdfast.gate_exits x JOIN holdfast.gate_runs r ON r.number = x.number
    WHERE x.plan_id = g.plan_id AND r.is_inside AND r.tenant = g.tenant AND r.key = g.key
), (
    SELECT count(*) FROM (
        SELECT FROM holdfast.gate_runs b
        WHERE b.plan_id = g.plan_id AND b.tenant = g.tenant AND b.key = g.key AND NOT b.is_inside
            AND (b.place, b.number) < (g.place, g.number)
            AND NOT EXISTS (SELECT FROM holdfast.gate_exits x WHERE x.plan_id = b.plan_id AND x.number = b.number)
        LIMIT {PLACES_COUNTED}
    ) n
), 1
FROM asked a JOIN holdfast.gate_runs g ON g.number = a.gate_no AND NOT g.is_inside
    JOIN holdfast.gates q ON q.plan_id = g.plan_id
ORDER BY 1 LIMIT $3
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
    """Acquire up to `limit` jobs: longest visible first, then ordered by their runs' creation and by step id."""
    found = await pool.fetch(ACQUIRE, now, node, list(queues), list(activities), limit, visible_ms * 1_000)
    acquired = []
    for row in found:
        try:
            acquired.append(sql.job_of(row))
        except StoreCorrupt:  # it stays invisible like any other: a damaged job never stops other runs
            continue
    return acquired


async def find_places(db: Db, query: port.PlaceQuery, limit: int, now: Instant | None) -> port.Found[port.PlaceInLine]:
    """Return what waits for a place in these runs: calls under their limits, and runs to be admitted."""
    rows = await db.fetch(PLACES, now, list(map(askable, query.run_ids)), limit)
    return port.Found(map(sql.place_of, rows))


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
    """Acquire up to `most` jobs that have room under their limits, ordered by the limits' names."""
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
    """Return jobs that were acquired but not started."""
    asked = [(job.run_id, job.step_id, job.engine_attempt_id) for job in jobs]
    return len(await pool.fetch(RELEASE, now, node, *columns(asked, 3))) if asked else 0


async def heartbeat(
    db: Db, node: str, beats: Sequence[port.Heartbeat], visible_ms: int, now: Instant | None
) -> tuple[Instant, list[bool]]:
    """Extend the jobs and steps that the node still has; store the details of their progress."""
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
