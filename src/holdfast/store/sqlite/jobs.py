"""`acquire_jobs`, `release_jobs` and `heartbeat`: jobs in queues, and the progress of activities.

The commits of their runs create and delete jobs (`commit.py`); deleting a run deletes the rest.
"""

import sqlite3
from collections.abc import Sequence

from msgspec import UNSET

from holdfast.core.instants import Instant
from holdfast.errors import StoreCorrupt
from holdfast.store import port, sql
from holdfast.store.sqlite import queries
from holdfast.store.sqlite.leases import ASIDE

# Walks the index in order, and reads nothing else.
VISIBLE = """
SELECT visible_at, run_no, step_id FROM jobs
WHERE queue = :queue AND visible_at <= :now AND activity IN (SELECT value FROM json_each(:activities))
ORDER BY visible_at, run_no, step_id LIMIT :limit
"""
READ = f"SELECT finished_at IS NOT NULL, {sql.JOB} FROM jobs JOIN runs USING (run_no) WHERE run_no = ? AND step_id = ?"
ACQUIRE = """
UPDATE jobs SET visible_at = ?, taken_by = ?, next_attempt = next_attempt + 1 WHERE run_no = ? AND step_id = ?
"""
HEARTBEAT = """
UPDATE jobs SET visible_at = :visible_until, details = coalesce(:details, details)
WHERE run_no = (SELECT run_no FROM runs WHERE run_id = :run_id) AND step_id = :step_id
    AND taken_by = :node AND next_attempt = :engine_attempt_id + 1
    AND (limit_name IS NULL OR visible_at > :now)
"""
RELEASE = """
UPDATE jobs SET visible_at = ?, taken_by = NULL, next_attempt = ?
WHERE run_no = (SELECT run_no FROM runs WHERE run_id = ?) AND step_id = ? AND taken_by = ? AND next_attempt = ? + 1
"""
OWNED = """
SELECT run_no FROM runs WHERE run_id = :run_id AND lease_owner = :node
    AND NOT EXISTS (SELECT 1 FROM jobs WHERE jobs.run_no = runs.run_no AND step_id = :step_id AND queue <> '')
"""
KEEP_DETAILS = """
INSERT INTO jobs (run_no, step_id, queue, activity, next_attempt, details) VALUES (?, ?, '', '', 0, ?)
ON CONFLICT (run_no, step_id) DO UPDATE SET details = excluded.details
"""


def acquire(
    db: sqlite3.Connection,
    node: str,
    queues: Sequence[str],
    activities: Sequence[str],
    limit: int,
    visible_ms: int,
    now: Instant,
) -> list[port.Job]:
    """Acquire up to `limit` jobs: longest visible first, then ordered by their runs' creation and by step id."""
    asked = {"now": now, "limit": limit, "activities": queries.listing(activities)}
    found: list[tuple[Instant, int, str]] = []
    for queue in set(queues):
        found += db.execute(VISIBLE, {**asked, "queue": queue})
    taken = [
        acquire_one(db, node, run_no, step_id, now + visible_ms * 1_000, now)
        for _, run_no, step_id in sorted(found)[:limit]
    ]
    return [job for job in taken if job is not None]


def acquire_one(
    db: sqlite3.Connection, node: str, run_no: int, step_id: str, visible_until: Instant, now: Instant
) -> port.Job | None:
    """Acquire a job; None if its row is damaged, or if a node of an older version finished its run."""
    is_finished, *row = db.execute(READ, (run_no, step_id)).fetchone()
    if is_finished:
        db.execute("DELETE FROM jobs WHERE run_no = ? AND step_id = ?", (run_no, step_id))
        return None
    try:
        job = sql.job_of(row)
    except StoreCorrupt:  # deferred: a damaged job never stops other runs
        db.execute("UPDATE jobs SET visible_at = ? WHERE run_no = ? AND step_id = ?", (now + ASIDE, run_no, step_id))
        return None
    db.execute(ACQUIRE, (visible_until, node, run_no, step_id))
    return job


def release(db: sqlite3.Connection, node: str, jobs: Sequence[port.Job], now: Instant) -> int:
    """Return jobs that were acquired but not started."""
    asked = [(now, job.engine_attempt_id, job.run_id, job.step_id, node, job.engine_attempt_id) for job in jobs]
    return db.executemany(RELEASE, asked).rowcount if asked else 0


def heartbeat(
    db: sqlite3.Connection, node: str, beats: Sequence[port.Heartbeat], visible_ms: int, now: Instant
) -> list[bool]:
    """Extend the jobs and steps that the node still has; store the details of their progress."""
    visible_until = now + visible_ms * 1_000
    return [
        _beat_taken(db, node, beat, visible_until, now) if beat.queue else _beat_owned(db, node, beat) for beat in beats
    ]


def _beat_taken(db: sqlite3.Connection, node: str, beat: port.Heartbeat, visible_until: Instant, now: Instant) -> bool:
    changed = db.execute(
        HEARTBEAT,
        {
            "now": now,
            "visible_until": visible_until,
            "details": None if beat.details is UNSET else sql.text_of(beat.details),
            "run_id": beat.run_id,
            "step_id": beat.step_id,
            "node": node,
            "engine_attempt_id": beat.engine_attempt_id,
        },
    )
    return changed.rowcount == 1


def _beat_owned(db: sqlite3.Connection, node: str, beat: port.Heartbeat) -> bool:
    asked = {"run_id": beat.run_id, "node": node, "step_id": beat.step_id}
    owned = db.execute(OWNED, asked).fetchone()
    if owned is not None and beat.details is not UNSET:
        db.execute(KEEP_DETAILS, (owned[0], beat.step_id, sql.text_of(beat.details)))
    return owned is not None
