"""Schedules in the file: one row each, changed from a revision that was read."""

import sqlite3
from collections.abc import Sequence

from holdfast.core.instants import Instant
from holdfast.core.schedules import Schedule
from holdfast.store import decisions, port, validation
from holdfast.store.queries import Found, ScheduleQuery
from holdfast.store.sql import SCHEDULE_COLUMNS, schedule_conditions, schedule_of, schedule_row

_OF_PLACE = "tenant = ? AND project = ? AND environment = ? AND schedule_id = ?"


def commit(db: sqlite3.Connection, schedule: Schedule, expected: int, now: Instant) -> tuple[Schedule, bool]:
    """Store a schedule with the next revision; also return whether it was not stored before."""
    row = db.execute(f"SELECT body FROM schedules WHERE {_OF_PLACE}", schedule.place).fetchone()
    known = None if row is None else schedule_of(row[0])
    stored = decisions.next_schedule(schedule, expected, known, now)
    if stored is None:
        assert known is not None
        return known, False
    db.execute(
        f"INSERT OR REPLACE INTO schedules ({SCHEDULE_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        schedule_row(stored),
    )
    return stored, True


def started_before(db: sqlite3.Connection, starts: Sequence[port.NewRun]) -> list[port.Existing | port.Refused]:
    """Return the answers about the runs of a repeated commit."""

    def find(request_key: str) -> str | None:
        asked = (bytes.fromhex(request_key),)
        row = db.execute("SELECT run_id FROM runs WHERE request_key = ?", asked).fetchone()
        return None if row is None else str(row[0])

    return [validation.started_before(new, find) for new in starts]


def delete(db: sqlite3.Connection, place: tuple[str, str, str, str], expected: int) -> bool:
    """Delete a schedule, if it has this revision."""
    return db.execute(f"DELETE FROM schedules WHERE {_OF_PLACE} AND revision = ?", (*place, expected)).rowcount == 1


def find(db: sqlite3.Connection, query: ScheduleQuery, limit: int) -> Found[Schedule]:
    """Return the schedules that match the query."""
    where, order = schedule_conditions(query)
    rows = db.execute(f"SELECT body FROM schedules {where.text} ORDER BY {order} LIMIT ?", where.values(limit))
    return Found(schedule_of(body) for (body,) in rows)


def forget(db: sqlite3.Connection, tenant: str | None) -> None:
    """Delete all schedules of a tenant."""
    db.execute("DELETE FROM schedules WHERE tenant = ?", (tenant,))
