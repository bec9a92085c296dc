"""Schedules on the server: one row each, changed from a revision that was read."""

from collections.abc import Sequence

from holdfast.core.instants import Instant
from holdfast.core.schedules import Schedule
from holdfast.limits import Limits
from holdfast.store import decisions, port, validation
from holdfast.store.postgres import admission
from holdfast.store.postgres.columns import askable
from holdfast.store.postgres.create import create
from holdfast.store.postgres.pool import Db, Transaction
from holdfast.store.queries import Found, ScheduleQuery
from holdfast.store.sql import SCHEDULE_COLUMNS, schedule_conditions, schedule_of, schedule_row

_OF_PLACE = "tenant = $1 AND project = $2 AND environment = $3 AND schedule_id = $4"
_PUT = f"""
INSERT INTO holdfast.schedules ({SCHEDULE_COLUMNS}) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
ON CONFLICT (tenant, project, environment, schedule_id) DO UPDATE SET app = excluded.app, workflow = excluded.workflow,
    next_due = excluded.next_due, is_waiting = excluded.is_waiting, revision = excluded.revision, body = excluded.body
WHERE schedules.revision = excluded.revision - 1
RETURNING 1
"""


async def commit(
    transaction: Transaction,
    schedule: Schedule,
    expected: int,
    starts: Sequence[port.NewRun],
    limits: Limits,
    now: Instant | None,
) -> tuple[Schedule, list[port.Created | port.Existing | port.Refused], Instant | None]:
    """Store a schedule with the next revision, and create runs; also return the time, None if it was stored before."""
    select = f"SELECT body FROM holdfast.schedules WHERE {_OF_PLACE} FOR UPDATE"
    rows = await transaction.fetch(select, *schedule.place)
    known = schedule_of(rows[0][0]) if rows else None
    [[at]] = await transaction.fetch("SELECT holdfast.time_1($1)", now)
    stored = decisions.next_schedule(schedule, expected, known, at)
    if stored is None:
        assert known is not None
        return known, await _started_before(transaction, starts), None
    if not await transaction.fetch(_PUT, *schedule_row(stored)):  # another process inserted one meanwhile
        raise decisions.schedule_conflict(stored, stored)
    answers: list[port.Created | port.Existing | port.Refused] = []
    if starts:
        await admission.lock(transaction, starts)
        answers = await create(transaction, starts, None, limits, now)
    return stored, answers, at


async def _started_before(
    transaction: Transaction, starts: Sequence[port.NewRun]
) -> list[port.Created | port.Existing | port.Refused]:
    """Return the answers about the runs of a repeated commit."""
    keys = [bytes.fromhex(new.request_key) for new in starts if validation.check_new_run(new) is None]
    select = "SELECT request_key, run_id FROM holdfast.runs WHERE request_key = ANY ($1)"
    found = {key.hex(): run_id for key, run_id in await transaction.fetch(select, keys)} if keys else {}
    return [validation.started_before(new, found.get) for new in starts]


async def delete(db: Db, place: tuple[str, str, str, str], expected: int) -> bool:
    """Delete a schedule, if it has this revision."""
    deleted = f"DELETE FROM holdfast.schedules WHERE {_OF_PLACE} AND revision = $5 RETURNING 1"
    return bool(await db.fetch(deleted, *place, expected))


async def find(db: Db, query: ScheduleQuery, limit: int) -> Found[Schedule]:
    """Return the schedules that match the query."""
    where, order = schedule_conditions(query)
    select = f"SELECT body FROM holdfast.schedules {where.numbered} ORDER BY {order} LIMIT {where.limit_parameter}"
    values = [askable(value) if isinstance(value, str) else value for value in where.values(limit)]
    return Found(schedule_of(row[0]) for row in await db.fetch(select, *values))


async def forget(db: Db, tenant: str | None) -> None:
    """Delete all schedules of a tenant."""
    await db.fetch("DELETE FROM holdfast.schedules WHERE tenant = $1", askable(tenant))
