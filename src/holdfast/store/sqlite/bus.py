"""The event bus in the file: sinks, the outbox, alerts, and dead letters of the bus.

Triggers on `runs` write the outbox. They are created with the first sink and dropped with the last: without a sink, a
turn costs nothing more. Everything else here is for relays and operators.
"""

import sqlite3
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from msgspec.structs import asdict, replace

from holdfast.core.audit import AuditEntry, letter_entry
from holdfast.core.bus import (
    BusAlert,
    BusDeadLetter,
    OutboxEntry,
    OutboxReplay,
    OutboxSettlement,
    Replayed,
    Sink,
    SinkProgress,
    SinkStatus,
)
from holdfast.core.codec import encode_text
from holdfast.core.dead_letters import Settled, Settlement
from holdfast.core.instants import Instant
from holdfast.store import decisions, sql
from holdfast.store.queries import COUNTED_ENTRIES, AlertQuery, BusDeadLetterQuery, Found, OutboxQuery, SinkQuery
from holdfast.store.sqlite import audit
from holdfast.store.types import PurgePolicy, Refused

_MATCHING = """FROM sinks
    WHERE (tenant IS NULL OR tenant = NEW.tenant)
        AND (workflows IS NULL OR EXISTS (SELECT 1 FROM json_each(workflows) WHERE value = NEW.plan_id))
    ON CONFLICT DO UPDATE SET to_seq = max(to_seq, excluded.to_seq);
END
"""
_OUTBOX = "INSERT INTO outbox (sink_no, run_no, from_seq, to_seq, at, attempts, due_at)"
_MAKE_TRIGGERS = (
    f"""
CREATE TRIGGER IF NOT EXISTS outbox_turn AFTER UPDATE OF version ON runs WHEN NEW.version > OLD.version
BEGIN
    {_OUTBOX}
    SELECT sink_no, NEW.run_no, OLD.version + 1, NEW.version, NEW.updated_at, 0, NEW.updated_at {_MATCHING}""",
    f"""
CREATE TRIGGER IF NOT EXISTS outbox_run AFTER INSERT ON runs WHEN NEW.version > 0
BEGIN
    {_OUTBOX}
    SELECT sink_no, NEW.run_no, 1, NEW.version, NEW.updated_at, 0, NEW.updated_at {_MATCHING}""",
)
_DROP_TRIGGERS = ("DROP TRIGGER IF EXISTS outbox_turn", "DROP TRIGGER IF EXISTS outbox_run")
_PUT_ENTRY = """
INSERT INTO outbox (sink_no, run_no, from_seq, to_seq, at, attempts, due_at) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET to_seq = max(to_seq, excluded.to_seq), at = excluded.at, attempts = excluded.attempts,
    due_at = excluded.due_at
"""
_TAKE_ENTRY = "DELETE FROM outbox WHERE sink_no = ? AND run_no = ? AND from_seq = ? AND to_seq = ? AND attempts = ?"
_PUT_LETTER = "INSERT OR REPLACE INTO bus_dead_letters VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
_REPLAYED = """
SELECT run_no, first, version FROM (
    SELECT run_no, version, (
        SELECT min(run_seq) FROM events e WHERE e.run_no = r.run_no AND run_seq >= :from_seq AND persisted_at >= :since
    ) AS first
    FROM runs r, sinks s
    WHERE s.name = :sink AND r.run_no > :after AND r.run_no <= :until AND r.updated_at >= :since
        AND (s.tenant IS NULL OR s.tenant = r.tenant)
        AND (s.workflows IS NULL OR EXISTS (SELECT 1 FROM json_each(s.workflows) WHERE value = r.plan_id))
) WHERE first IS NOT NULL ORDER BY run_no LIMIT :limit + 1
"""
_COUNTED = f"""
SELECT {sql.SINK},
    (SELECT count(*) FROM (SELECT 1 FROM outbox o WHERE o.sink_no = s.sink_no LIMIT {COUNTED_ENTRIES})),
    (SELECT min(at) FROM (SELECT at FROM outbox o WHERE o.sink_no = s.sink_no LIMIT {COUNTED_ENTRIES})),
    (SELECT count(*) FROM bus_dead_letters l WHERE l.sink_no = s.sink_no)
FROM sinks s
"""
_LETTERS = f"SELECT {sql.BUS_LETTER} FROM bus_dead_letters l JOIN sinks s ON s.sink_no = l.sink_no"


def put_sink(db: sqlite3.Connection, sink: Sink, now: Instant) -> Sink:
    """Store a sink, or replace it."""
    known = db.execute(f"SELECT {sql.SINK} FROM sinks WHERE name = ?", (sink.name,)).fetchone()
    workflows = encode_text(sink.workflows) if sink.workflows else None
    for statement in _MAKE_TRIGGERS:
        db.execute(statement)
    if known is None:
        sink = replace(sink, created_at=now)
        row = (sink.name, sink.tenant, workflows, sink.alerts, encode_text(sink))
        db.execute("INSERT INTO sinks (name, tenant, workflows, alerts, sink) VALUES (?, ?, ?, ?, ?)", row)
        return sink
    before = sql.sink_status_of(known).sink
    if before.tenant != sink.tenant:
        raise decisions.sink_of_another(sink.name)
    sink = replace(sink, created_at=before.created_at)
    db.execute(
        "UPDATE sinks SET workflows = ?, alerts = ?, sink = ?, failures = 0, due_at = 0, error = '' WHERE name = ?",
        (workflows, sink.alerts, encode_text(sink), sink.name),
    )
    return sink


def remove_sink(db: sqlite3.Connection, name: str) -> bool:
    """Delete a sink; a trigger deletes what belongs to it."""
    is_removed = db.execute("DELETE FROM sinks WHERE name = ?", (name,)).rowcount > 0
    _drop_unused_triggers(db)
    return is_removed


def _drop_unused_triggers(db: sqlite3.Connection) -> None:
    if db.execute("SELECT 1 FROM sinks LIMIT 1").fetchone() is None:
        for statement in _DROP_TRIGGERS:
            db.execute(statement)


def settle(
    db: sqlite3.Connection, name: str, items: Sequence[OutboxSettlement], progress: SinkProgress, now: Instant
) -> list[bool]:
    """Settle entries of a sink."""
    sink_no = _number_of(db, name)
    if sink_no is None or progress.number not in (None, sink_no):
        return [False] * len(items)
    answers = [_settle(db, sink_no, item) for item in items]
    db.execute(
        "UPDATE sinks SET failures = ?, due_at = ?, error = ?, delivered = delivered + ?, "
        "failed_at = iif(?, ?, failed_at), delivered_at = iif(?, ?, delivered_at) WHERE sink_no = ?",
        (
            progress.failures,
            progress.due_at,
            progress.error,
            progress.delivered,
            progress.failures > 0,
            now,
            progress.delivered > 0,
            now,
            sink_no,
        ),
    )
    return answers


def _settle(db: sqlite3.Connection, sink_no: int, item: OutboxSettlement) -> bool:
    entry = item.entry
    key = (sink_no, entry.number, entry.from_seq, entry.to_seq, entry.attempts)
    if not db.execute(_TAKE_ENTRY, key).rowcount:
        return False
    if item.rest is not None:
        db.execute(_PUT_ENTRY, _entry_row(sink_no, item.rest))
    if item.letter is not None:
        letter = item.letter
        db.execute(
            _PUT_LETTER,
            (
                letter.letter_id,
                sink_no,
                entry.number,
                letter.run_id,
                letter.from_seq,
                letter.to_seq,
                letter.attempts,
                letter.detail,
                letter.died_at,
            ),
        )
    return True


def _entry_row(sink_no: int, entry: OutboxEntry) -> tuple[Any, ...]:
    return sink_no, entry.number, entry.from_seq, entry.to_seq, entry.at, entry.attempts, entry.due_at


def _number_of(db: sqlite3.Connection, name: str) -> int | None:
    found = db.execute("SELECT sink_no FROM sinks WHERE name = ?", (name,)).fetchone()
    return None if found is None else int(found[0])


def replay(db: sqlite3.Connection, asked: OutboxReplay, now: Instant) -> Replayed:
    """Put entries for events that a sink gets again."""
    sink_no, limit = _number_of(db, asked.sink), asked.limit
    if sink_no is None:
        raise decisions.no_such_sink(asked.sink)
    after, until = asked.after, decisions.LAST_RUN
    if asked.run_id is not None:
        row = db.execute("SELECT run_no FROM runs WHERE run_id = ?", (asked.run_id,)).fetchone()
        if row is None:
            raise decisions.no_such_run(asked.run_id)
        after, until = max(after, row[0] - 1), row[0]
    else:
        examined = "SELECT run_no FROM runs WHERE run_no > ? ORDER BY run_no LIMIT 1 OFFSET ?"
        row = db.execute(examined, (after, asked.look - 1)).fetchone()
        until = until if row is None else row[0]
    found = db.execute(_REPLAYED, {**asdict(asked), "after": after, "until": until}).fetchall()
    chosen = found[:limit]
    db.executemany(_PUT_ENTRY, [(sink_no, run_no, first, last, now, 0, now) for run_no, first, last in chosen])
    return Replayed(len(chosen), chosen[-1][0] if len(found) > limit else decisions.after_replay(asked, until))


def raise_alerts(db: sqlite3.Connection, alerts: Sequence[BusAlert], now: Instant) -> int:
    """Put alerts on the bus, if a sink gets alerts."""
    takers = db.execute("SELECT sink_no, name FROM sinks WHERE alerts").fetchall()
    new = 0
    for alert in alerts if takers else ():
        put = db.execute(
            "INSERT INTO alerts (alert_id, raised_at, alert) "
            "SELECT ?1, ?2, ?3 WHERE NOT EXISTS (SELECT 1 FROM alerts WHERE alert_id = ?1)",  # no number is skipped
            (alert.alert_id, now, encode_text(alert)),
        )
        if put.rowcount:
            new += 1
            rows = [
                (sink_no, 0, put.lastrowid, put.lastrowid, now, 0, now)
                for sink_no, name in takers
                if name != alert.sink
            ]
            db.executemany(_PUT_ENTRY, rows)
    return new


def settle_letters(
    db: sqlite3.Connection, ids: Sequence[str], action: Settlement, now: Instant, entry: AuditEntry | None
) -> list[Settled | Refused]:
    """Settle dead letters of the bus."""
    answers: list[Settled | Refused] = []
    for id_ in ids:
        row = db.execute(
            "SELECT sink_no, run_no, run_id, from_seq, to_seq FROM bus_dead_letters WHERE letter_id = ?", (id_,)
        ).fetchone()
        if row is None:
            answers.append(Refused(decisions.no_such_letter(id_)))
            continue
        sink_no, run_no, _, from_seq, to_seq = row  # letters of a deleted run are deleted too
        db.execute("DELETE FROM bus_dead_letters WHERE letter_id = ?", (id_,))
        if action == "requeue":
            db.execute(_PUT_ENTRY, (sink_no, run_no, from_seq, to_seq, now, 0, now))
        if entry is not None:
            audit.append(db, [replace(letter_entry(entry, id_), at=now)])
        answers.append(Settled(id_, action))
    return answers


# --- searches


def find_sinks(db: sqlite3.Connection, query: SinkQuery, limit: int) -> Found[SinkStatus]:
    """Return the sinks that match the query."""
    where = sql.sink_conditions(query)
    select = _COUNTED if query.counted else f"SELECT {sql.SINK} FROM sinks"
    found = db.execute(f"{select} {where.text} ORDER BY name LIMIT ?", where.values(limit))
    return sql.found_of(found.fetchall(), sql.sink_status_of, itemgetter(1), itemgetter(1))


def find_outbox(db: sqlite3.Connection, query: OutboxQuery, limit: int) -> Found[OutboxEntry]:
    """Return entries of a sink."""
    found = db.execute(
        f"SELECT {sql.ENTRY} FROM outbox o LEFT JOIN runs r ON r.run_no = o.run_no "
        "WHERE o.sink_no = (SELECT sink_no FROM sinks WHERE name = ?) "
        "AND (o.run_no, o.from_seq) > (?, ?) ORDER BY o.run_no, o.from_seq LIMIT ?",
        (query.sink, *query.after, limit),
    )
    return sql.found_of(found.fetchall(), sql.outbox_entry_of, itemgetter(0), itemgetter(0, 2))


def find_alerts(db: sqlite3.Connection, query: AlertQuery, limit: int) -> Found[BusAlert]:
    """Return alerts in the order of their numbers."""
    found = db.execute(
        "SELECT alert_no, raised_at, alert FROM alerts WHERE alert_no > ? ORDER BY alert_no LIMIT ?",
        (query.after, limit),
    )
    return sql.found_of(found.fetchall(), sql.alert_of, itemgetter(0), itemgetter(0))


def find_letters(db: sqlite3.Connection, query: BusDeadLetterQuery, limit: int) -> Found[BusDeadLetter]:
    """Return the dead letters of the bus that match the query."""
    where = sql.bus_letter_conditions(query)
    found = db.execute(f"{_LETTERS} {where.text} ORDER BY l.died_at, l.letter_id LIMIT ?", where.values(limit))
    return sql.found_of(found.fetchall(), sql.bus_letter_of, itemgetter(0), itemgetter(7, 0))


# --- retention


def held(after: Instant) -> str:
    """Return the condition that a sink has not received events of a run, put into the outbox after an instant."""
    return (
        "EXISTS (SELECT 1 FROM sinks s CROSS JOIN outbox o "
        f"WHERE o.sink_no = s.sink_no AND o.run_no = runs.run_no AND o.at > {after:d})"
    )


_OF_RUNS = ("outbox", "bus_dead_letters")
"""The tables whose rows are deleted with their run."""

_OF_A_SINK = "sink_no IN (SELECT sink_no FROM sinks)"
_MINE = "sink_no IN (SELECT sink_no FROM sinks WHERE :tenant IS NULL OR tenant = :tenant)"


def delete_of(db: sqlite3.Connection, run_no: int) -> int:
    """Delete what the bus has of a run that is being deleted; return the number of rows."""
    return sum(
        db.execute(f"DELETE FROM {table} WHERE {_OF_A_SINK} AND run_no = ?", (run_no,)).rowcount for table in _OF_RUNS
    )


def purge(db: sqlite3.Connection, policy: PurgePolicy, doomed: str, now: Instant) -> tuple[int, bool]:
    """Delete what a policy names, or with `dry_run` only count it; return the count, and whether there is more."""
    of_runs = f"run_no IN (SELECT value FROM json_each('{doomed}'))"
    count = 0  # they are deleted with their runs
    for table in _OF_RUNS:
        count += db.execute(f"SELECT count(*) FROM {table} WHERE {_OF_A_SINK} AND {of_runs}").fetchone()[0]
    has_more, until = False, decisions.outbox_until(policy, now)
    if until is not None:
        asked = {"tenant": policy.tenant, "until": until, "limit": policy.limit}
        entries = db.execute(
            f"SELECT sink_no, run_no, from_seq FROM outbox WHERE at <= :until AND {_MINE} AND NOT {of_runs} "
            "LIMIT :limit + 1",
            asked,
        ).fetchall()
        has_more = len(entries) > policy.limit
        count += len(entries[: policy.limit])
        if not policy.dry_run:
            db.executemany(
                "DELETE FROM outbox WHERE sink_no = ? AND run_no = ? AND from_seq = ?", entries[: policy.limit]
            )
        old = [f"bus_dead_letters WHERE died_at <= :until AND {_MINE} AND NOT {of_runs}"]
        old += ["alerts WHERE raised_at <= :until"] if policy.tenant is None else []
        for rows in old:
            count += db.execute(f"SELECT count(*) FROM {rows}", asked).fetchone()[0]
            if not policy.dry_run:
                db.execute(f"DELETE FROM {rows}", asked)
    if policy.sinks:
        count += db.execute("SELECT count(*) FROM sinks WHERE tenant = ?", (policy.tenant,)).fetchone()[0]
        if not policy.dry_run:
            db.execute("DELETE FROM sinks WHERE tenant = ?", (policy.tenant,))
            _drop_unused_triggers(db)
    return count, has_more
