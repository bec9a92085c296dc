"""`purge`: what retention deletes, and what it must not touch. Also the archive locations of deleted runs."""

import sqlite3
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from holdfast.core.audit import AuditEntry
from holdfast.core.codec import encode_text
from holdfast.core.instants import Instant
from holdfast.store import decisions, sql
from holdfast.store.port import (
    ArchivedRun,
    ArchivedRunQuery,
    FinishedRunQuery,
    Found,
    PurgePolicy,
    PurgeReport,
    RunHead,
)
from holdfast.store.sql import Where
from holdfast.store.sqlite import audit, bus, plans, queries

# A purge deletes the oldest first, in the order of an index: the cost of a batch does not depend on how much is left.
_FAMILY_HAS_ENDED = """
NOT EXISTS (SELECT 1 FROM runs AS parent WHERE parent.run_id = runs.parent_run_id AND parent.finished_at IS NULL)
    AND NOT EXISTS (SELECT 1 FROM runs AS child WHERE child.parent_run_id = runs.run_id AND child.finished_at IS NULL)
"""
_GONE = "SELECT run_no, run_id, created_at FROM runs {where} ORDER BY finished_at, run_id LIMIT ?"
_TASKS = """
SELECT task_id FROM runs {join} JOIN tasks USING (run_no) {where} ORDER BY finished_at, run_id, task_id LIMIT ?
"""
_STATES = "SELECT run_no FROM runs {where} AND snapshot IS NOT NULL ORDER BY finished_at, run_id LIMIT ?"
_EXPIRED = """
SELECT run_no, name, signal_id FROM acceptance_records {join} JOIN runs USING (run_no) {where}
ORDER BY expires_at, run_id, name, signal_id LIMIT ?
"""
_LETTERS = """
SELECT letter_id FROM dead_letters {join} JOIN runs USING (run_no) {where} ORDER BY settled_at, letter_id LIMIT ?
"""
_INDEX = "SELECT run_id, created_at FROM archived_runs AS runs {where} ORDER BY archived_at, run_id, created_at LIMIT ?"
# Triggers delete jobs, dead letters and streams.
_BELONGING = (
    "events",
    "signals",
    "acceptance_records",
    "tasks",
    "waits",
    "messages",
    "activity_records",
    "plan_uses",
    "run_attributes",
    "runs",
)

_SIZES = """
SELECT run_no, sum(length(CAST(data AS BLOB)))
    + coalesce((SELECT sum(size) FROM streams s WHERE s.run_no = e.run_no), 0)
FROM events e WHERE run_no IN (SELECT value FROM json_each(?)) GROUP BY run_no
"""
_COUNTED = ("events", "signals", "acceptance_records", "tasks", "dead_letters")
_LONG = """
SELECT run_no FROM runs WHERE run_no IN (SELECT value FROM json_each(?1)) AND version > ?2
    AND version - (SELECT min(run_seq) FROM events WHERE events.run_no = runs.run_no) >= ?2
"""
_DELETE_PART = """
DELETE FROM events WHERE run_no = ?1 AND run_seq < (SELECT min(run_seq) + ?2 FROM events WHERE run_no = ?1)
"""


class _Selection:
    """The rows that one purge covers: at most `limit` of each kind, and one more that shows there are others."""

    def __init__(self, db: sqlite3.Connection, policy: PurgePolicy, now: Instant) -> None:
        self._db = db
        self._policy = policy
        self._now = now
        self.doomed = "[]"
        self.gone = 0

    @property
    def _all_go(self) -> bool:
        """Whether all named runs are deleted completely: then nothing is left of them to search for."""
        return self._policy.run_ids is not None and 0 < len(self._policy.run_ids) <= self.gone

    def rows(self, select: str, column: str, window_ms: int | None, *conditions: str) -> list[Any]:
        """Return the rows whose instant in this column is past the window, oldest first."""
        if window_ms is None or (select is not _INDEX and self._all_go):
            return []
        policy, where = self._policy, Where()
        is_named = policy.run_ids is not None  # then use the index of their ids, and not that of the column
        where.add(f"{'+' if is_named else ''}{column} <= ?", self._now - window_ms * 1_000)
        where.add_given("runs.tenant = ?", policy.tenant)
        if policy.run_ids is not None:
            where.add("runs.run_id IN (SELECT value FROM json_each(?))", encode_text(policy.run_ids))
        if self.doomed != "[]" and select is not _INDEX:
            where.add("runs.run_no NOT IN (SELECT value FROM json_each(?))", self.doomed)
        for condition in conditions:
            where.add(condition)
        text = select.format(where=where.text, join="" if is_named else "CROSS")
        return self._db.execute(text, where.values(policy.limit + 1)).fetchall()


def purge(db: sqlite3.Connection, policy: PurgePolicy, now: Instant, entry: AuditEntry | None = None) -> PurgeReport:
    """Delete, or with `dry_run` only count, what the policy allows."""
    limit, selection = policy.limit, _Selection(db, policy, now)
    held = bus.held(now - policy.sink_hold_ms * 1_000)
    gone = selection.rows(_GONE, "runs.finished_at", policy.finished_run_ms, _FAMILY_HAS_ENDED, f"NOT {held}")
    long = set[int]() if policy.most_bytes is None or policy.dry_run else _long(db, gone[:limit])
    if gone and gone[0][0] in long:
        return _delete_part(db, policy, gone[0], now, entry)
    fit = next((place for place, row in enumerate(gone[:limit]) if row[0] in long), limit)
    fit = fit if policy.most_bytes is None else min(fit, _within_bytes(db, gone[:fit], policy.most_bytes))
    has_larger, gone = fit < len(gone), gone[:fit]
    doomed = selection.doomed = queries.listing(run_no for run_no, _, _ in gone[:limit])
    selection.gone = len(gone[:limit])
    tasks = selection.rows(_TASKS, "runs.finished_at", policy.task_ms)
    states = selection.rows(_STATES, "runs.finished_at", policy.runtime_state_ms)
    expired = selection.rows(_EXPIRED, "expires_at", 0)
    letters = selection.rows(_LETTERS, "settled_at", policy.dead_letter_ms, "settled IS NOT NULL")
    archived = selection.rows(_INDEX, "runs.archived_at", policy.archived_run_ms)
    entries = [] if policy.audit_ms is None else audit.old(db, policy, now - policy.audit_ms * 1_000)
    bodies = plans.unused(db, policy, doomed, now)
    belonging = {table: _count(db, table, doomed) for table in _COUNTED}
    outbox, has_more_entries = bus.purge(db, policy, doomed, now)
    report = PurgeReport(
        runs=len(gone[:limit]),
        events=belonging["events"],
        signals=belonging["signals"],
        tasks=belonging["tasks"] + len(tasks[:limit]),
        runtime_states=len(states[:limit]),
        acceptance_records=belonging["acceptance_records"] + len(expired[:limit]),
        dead_letters=belonging["dead_letters"] + len(letters[:limit]),
        audit_entries=len(entries[:limit]),
        tokens=_tokens(db, policy) if policy.tokens else 0,
        plans=len(bodies[:limit]),
        archived_runs=len(archived[:limit]),
        outbox=outbox,
        stale_runs=_stale(db, policy, now),
        has_more=has_more_entries
        or has_larger
        or max(map(len, (gone, tasks, states, expired, letters, archived, entries, bodies))) > limit,
    )
    if policy.dry_run:
        return report
    for table in _BELONGING if gone else ():
        db.execute(f"DELETE FROM {table} WHERE run_no IN (SELECT value FROM json_each(?))", (doomed,))
    db.executemany("DELETE FROM tasks WHERE task_id = ?", tasks[:limit])
    db.executemany("UPDATE runs SET snapshot = NULL WHERE run_no = ?", states[:limit])
    db.executemany("DELETE FROM acceptance_records WHERE run_no = ? AND name = ? AND signal_id = ?", expired[:limit])
    db.executemany("DELETE FROM dead_letters WHERE letter_id = ?", letters[:limit])
    db.executemany("DELETE FROM archived_runs WHERE run_id = ? AND created_at = ?", archived[:limit])
    note_archived(db, decisions.archived_of(policy, {run_id: at for _, run_id, at in gone[:limit]}, now))
    audit.forget(db, entries[:limit])
    plans.forget(db, bodies[:limit], policy)
    if policy.tokens:
        db.execute("DELETE FROM access_tokens WHERE tenant = ?", (policy.tenant,))
    if entry is not None:
        audit.append(db, [decisions.purge_entry(entry, report, now)])
    return report


def _long(db: sqlite3.Connection, gone: list[Any]) -> set[int]:
    """Return those of these runs that have more events than one commit deletes."""
    asked = (queries.listing(run_no for run_no, _, _ in gone), decisions.PART_EVENTS)
    return {run_no for (run_no,) in db.execute(_LONG, asked)}


def _delete_part(
    db: sqlite3.Connection, policy: PurgePolicy, row: Any, now: Instant, entry: AuditEntry | None
) -> PurgeReport:
    """Delete only the oldest events of a run that is to be deleted. Its archive location is stored immediately."""
    run_no, run_id, created_at = row
    outbox = bus.delete_of(db, run_no)  # as with their run: no sink needs them any more
    events = db.execute(_DELETE_PART, (run_no, decisions.PART_EVENTS)).rowcount
    note_archived(db, decisions.archived_of(policy, {run_id: created_at}, now))
    report = PurgeReport(events=events, outbox=outbox, has_more=True)
    if entry is not None:
        audit.append(db, [decisions.purge_entry(entry, report, now)])
    return report


def _within_bytes(db: sqlite3.Connection, gone: list[Any], most: int) -> int:
    """Return how many of these runs have no more than this many bytes of events together."""
    sizes = dict(db.execute(_SIZES, (queries.listing(run_no for run_no, _, _ in gone),)).fetchall())
    return decisions.within_bytes((sizes.get(run_no, 0) for run_no, _, _ in gone), most)


def warm(db: sqlite3.Connection, policy: PurgePolicy) -> None:
    """Read what a purge of named runs is about to change, so that it is in memory by then.

    A purge delays the turns that wait for the file; this does not: it runs in a thread with a separate connection.
    """
    among = "IN (SELECT value FROM json_each(?))"
    runs = db.execute(
        f"SELECT run_no, request_key, length(snapshot) FROM runs WHERE run_id {among}", (encode_text(policy.run_ids),)
    ).fetchall()
    for _, request_key, _ in runs:
        db.execute("SELECT 1 FROM runs WHERE request_key = ?", (request_key,)).fetchone()
    numbers = queries.listing(run_no for run_no, _, _ in runs)
    events = f"SELECT data FROM events WHERE run_no {among} ORDER BY run_no, run_seq LIMIT {2 * decisions.PART_EVENTS}"
    db.execute(f"SELECT sum(length(data)) FROM ({events})", (numbers,)).fetchone()
    keys = "SELECT count(idempotency_key) FROM events INDEXED BY sqlite_autoindex_events_2"
    db.execute(f"{keys} WHERE run_no {among}", (numbers,)).fetchone()
    for table in _COUNTED:
        _count(db, table, numbers)


def find_finished(db: sqlite3.Connection, query: FinishedRunQuery, limit: int) -> Found[RunHead]:
    """Return the finished runs that could be deleted."""
    window = Where()
    window.add("finished_at <= ?", query.until)
    window.add("(finished_at > ? OR (finished_at = ? AND run_id > ?))", query.after[0], *query.after)
    window.add("finished_at >= ?", query.after[0])
    place = None
    if query.look is not None:
        last = f"SELECT finished_at, run_id FROM runs {window.text} ORDER BY finished_at, run_id LIMIT 1 OFFSET ?"
        place = db.execute(last, window.values(query.look - 1)).fetchone()
    where = window
    if place is not None:
        where.add("(finished_at < ? OR (finished_at = ? AND run_id <= ?))", place[0], *place)
    where.add_given("tenant = ?", query.tenant)
    where.add_given("plan_id = ?", query.workflow)
    where.add_given("status = ?", query.status)
    where.add(_FAMILY_HAS_ENDED)
    if query.held_after is not None:
        where.add(f"NOT {bus.held(query.held_after)}")
    order = "ORDER BY finished_at, run_id LIMIT ?"
    found = db.execute(f"SELECT {sql.HEAD} FROM runs {where.text} {order}", where.values(limit)).fetchall()
    return sql.found_of(found, sql.head_of, itemgetter(1), itemgetter(16, 1), place if len(found) < limit else None)


def find_archived(db: sqlite3.Connection, query: ArchivedRunQuery, limit: int) -> Found[ArchivedRun]:
    """Return the archived runs that match the query, last to end first."""
    where = sql.archived_conditions(query)
    order = "ORDER BY finished_at DESC, run_id DESC LIMIT ?"
    found = db.execute(f"SELECT {sql.ARCHIVED} FROM archived_runs {where.text} {order}", where.values(limit)).fetchall()
    return sql.found_of(found, sql.archived_run_of, itemgetter(0), itemgetter(9, 0))


def note_archived(db: sqlite3.Connection, runs: Sequence[ArchivedRun]) -> None:
    """Store the archive locations of deleted runs."""
    db.executemany(
        f"INSERT OR REPLACE INTO archived_runs ({sql.ARCHIVED}) VALUES ({', '.join('?' * 14)})",
        [sql.archived_row(run) for run in runs],
    )


def _count(db: sqlite3.Connection, table: str, doomed: str) -> int:
    sql = f"SELECT count(*) FROM {table} WHERE run_no IN (SELECT value FROM json_each(?))"
    count: int = db.execute(sql, (doomed,)).fetchone()[0]
    return count


def _tokens(db: sqlite3.Connection, policy: PurgePolicy) -> int:
    count: int = db.execute("SELECT count(*) FROM access_tokens WHERE tenant = ?", (policy.tenant,)).fetchone()[0]
    return count


def _stale(db: sqlite3.Connection, policy: PurgePolicy, now: Instant) -> int:
    if policy.stale_run_ms is None:
        return 0
    where = Where()
    where.add("finished_at IS NULL AND updated_at <= ?", now - policy.stale_run_ms * 1_000)
    where.add_given("tenant = ?", policy.tenant)
    if policy.run_ids is not None:
        where.add("run_id IN (SELECT value FROM json_each(?))", encode_text(policy.run_ids))
    count: int = db.execute(f"SELECT count(*) FROM runs {where.text} LIMIT ?", where.values(1)).fetchone()[0]
    return count
