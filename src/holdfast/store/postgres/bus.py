"""The event bus on the server: sinks, the outbox, alerts, and dead letters of the bus.

The trigger that records growth writes the outbox (`functions.sql`). Everything here is for relays and operators.
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from msgspec.structs import replace

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
from holdfast.store.postgres import audit
from holdfast.store.postgres.columns import askable, columns
from holdfast.store.postgres.pool import Db, Transaction
from holdfast.store.queries import COUNTED_ENTRIES, AlertQuery, BusDeadLetterQuery, Found, OutboxQuery, SinkQuery
from holdfast.store.types import PurgePolicy, Refused

_SINK_TO_REPLACE = f"SELECT {sql.SINK} FROM holdfast.sinks WHERE name = $1 FOR UPDATE"
_NEW_SINK = """
INSERT INTO holdfast.sinks (name, tenant, workflows, alerts, sink) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT DO NOTHING RETURNING 1
"""
_PUT_ENTRIES = """
INSERT INTO holdfast.outbox AS o (sink_no, run_no, from_seq, to_seq, at, attempts, due_at)
SELECT $1, * FROM unnest($2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[])
ON CONFLICT (sink_no, run_no, from_seq) DO UPDATE SET to_seq = greatest(o.to_seq, excluded.to_seq), at = excluded.at,
    attempts = excluded.attempts, due_at = excluded.due_at
"""
_TAKE_ENTRIES = "SELECT * FROM holdfast.take_outbox_1($1, $2, $3, $4, $5)"
_PUT_LETTERS = """
INSERT INTO holdfast.bus_dead_letters (letter_id, sink_no, run_no, run_id, from_seq, to_seq, attempts, detail, died_at)
SELECT x.letter_id, $1, x.run_no, x.run_id, x.from_seq, x.to_seq, x.attempts, x.detail, x.died_at
FROM unnest($2::text[], $3::bigint[], $4::text[], $5::bigint[], $6::bigint[], $7::bigint[], $8::text[], $9::bigint[])
    AS x (letter_id, run_no, run_id, from_seq, to_seq, attempts, detail, died_at)
ON CONFLICT DO NOTHING
"""
_PROGRESS = """
UPDATE holdfast.sinks SET failures = $2::bigint, due_at = $3, error = $4, delivered = delivered + $5::bigint,
    failed_at = CASE WHEN $2::bigint > 0 THEN $6 ELSE failed_at END,
    delivered_at = CASE WHEN $5::bigint > 0 THEN $6 ELSE delivered_at END
WHERE sink_no = $1
"""
_REPLAYED = """
SELECT run_no, first, version FROM (
    SELECT r.run_no, r.version, (
        SELECT min(run_seq) FROM holdfast.events e
        WHERE e.run_no = r.run_no AND e.run_seq >= $3 AND e.persisted_at >= $2
    ) AS first
    FROM holdfast.runs r, holdfast.sinks s
    WHERE s.sink_no = $1 AND r.run_no > $4 AND r.run_no <= $5 AND r.updated_at >= $2
        AND (s.tenant IS NULL OR s.tenant = r.tenant) AND (s.workflows IS NULL OR r.plan_id = ANY (s.workflows))
) x WHERE first IS NOT NULL ORDER BY run_no LIMIT $6
"""
_COUNTED = f"""
SELECT {sql.SINK},
    (SELECT count(*) FROM (SELECT 1 FROM holdfast.outbox o WHERE o.sink_no = s.sink_no LIMIT {COUNTED_ENTRIES}) x),
    (SELECT min(at) FROM (SELECT at FROM holdfast.outbox o WHERE o.sink_no = s.sink_no LIMIT {COUNTED_ENTRIES}) x),
    (SELECT count(*) FROM holdfast.bus_dead_letters l WHERE l.sink_no = s.sink_no)
FROM holdfast.sinks s
"""
_LOST_SINKS = """
WITH RECURSIVE numbers AS (
    (SELECT sink_no FROM holdfast.outbox ORDER BY sink_no LIMIT 1)
    UNION ALL
    SELECT (SELECT o.sink_no FROM holdfast.outbox o WHERE o.sink_no > n.sink_no ORDER BY o.sink_no LIMIT 1)
    FROM numbers n WHERE n.sink_no IS NOT NULL
)
SELECT sink_no FROM numbers n
WHERE sink_no IS NOT NULL AND NOT EXISTS (SELECT FROM holdfast.sinks s WHERE s.sink_no = n.sink_no)
"""
_LETTERS = f"""
SELECT {sql.BUS_LETTER} FROM holdfast.bus_dead_letters l JOIN holdfast.sinks s ON s.sink_no = l.sink_no
"""


async def now_of(transaction: Transaction, given: Instant | None) -> Instant:
    """Return the server's time, or the given time if there is one."""
    [[now]] = await transaction.fetch("SELECT holdfast.time_1($1)", given)
    return int(now)


async def put_sink(transaction: Transaction, sink: Sink, now: Instant) -> Sink:
    """Store a sink, or replace it."""
    workflows = list(sink.workflows) or None
    found = await transaction.fetch(_SINK_TO_REPLACE, sink.name)
    if not found:
        new = replace(sink, created_at=now)
        given = sink.name, sink.tenant, workflows, sink.alerts, encode_text(new)
        if await transaction.fetch(_NEW_SINK, *given):
            return new
        found = await transaction.fetch(_SINK_TO_REPLACE, sink.name)  # another process was faster
    [known] = found
    before = sql.sink_status_of(known).sink
    if before.tenant != sink.tenant:
        raise decisions.sink_of_another(sink.name)
    sink = replace(sink, created_at=before.created_at)
    await transaction.fetch(
        "UPDATE holdfast.sinks SET workflows = $2, alerts = $3, sink = $4, failures = 0, due_at = 0, error = '' "
        "WHERE name = $1",
        *(sink.name, workflows, sink.alerts, encode_text(sink)),
    )
    return sink


async def remove_sinks(transaction: Transaction, where: str, value: str | None) -> int:
    """Delete sinks with everything that belongs to them."""
    found = await transaction.fetch(f"DELETE FROM holdfast.sinks WHERE {where} = $1 RETURNING sink_no", value)
    gone = [row[0] for row in found]
    await transaction.fetch("DELETE FROM holdfast.bus_dead_letters WHERE sink_no = ANY ($1)", gone)
    await _drop_lost(transaction)
    return len(gone)


async def _drop_lost(transaction: Transaction) -> None:
    """Delete the entries of deleted sinks, including those written by turns that did not see the deletion yet.

    Any visible entry of an existing sink was written after the sink was stored, so the sink is visible too.
    """
    lost = [row[0] for row in await transaction.fetch(_LOST_SINKS)]
    if lost:
        await transaction.fetch("DELETE FROM holdfast.outbox WHERE sink_no = ANY ($1)", lost)


async def settle(
    transaction: Transaction, name: str, items: Sequence[OutboxSettlement], progress: SinkProgress, now: Instant
) -> list[bool]:
    """Settle entries of a sink."""
    sink_no = await _number_of(transaction, name)
    if sink_no is None or progress.number not in (None, sink_no):
        return [False] * len(items)
    keys = sorted((item.entry.number, item.entry.from_seq, item.entry.to_seq, item.entry.attempts) for item in items)
    taken = {(row[0], row[1]) for row in await transaction.fetch(_TAKE_ENTRIES, sink_no, *columns(keys, 4))}
    answers = [(item.entry.number, item.entry.from_seq) in taken for item in items]
    settled = [item for item, is_taken in zip(items, answers, strict=True) if is_taken]
    rests = sorted(_entry_row(item.rest) for item in settled if item.rest is not None)
    if rests:
        await transaction.fetch(_PUT_ENTRIES, sink_no, *columns(rests, 6))
    letters = [_letter_row(item.entry, item.letter) for item in settled if item.letter is not None]
    if letters:
        await transaction.fetch(_PUT_LETTERS, sink_no, *columns(letters, 8))
    await transaction.fetch(
        _PROGRESS, sink_no, progress.failures, progress.due_at, progress.error, progress.delivered, now
    )
    return answers


def _entry_row(entry: OutboxEntry) -> tuple[Any, ...]:
    return entry.number, entry.from_seq, entry.to_seq, entry.at, entry.attempts, entry.due_at


def _letter_row(entry: OutboxEntry, letter: BusDeadLetter) -> tuple[Any, ...]:
    return (
        letter.letter_id,
        entry.number,
        letter.run_id,
        letter.from_seq,
        letter.to_seq,
        letter.attempts,
        letter.detail,
        letter.died_at,
    )


async def _number_of(db: Db, name: str) -> int | None:
    found = await db.fetch("SELECT sink_no FROM holdfast.sinks WHERE name = $1", askable(name))
    return int(found[0][0]) if found else None


async def replay(transaction: Transaction, asked: OutboxReplay, now: Instant) -> Replayed:
    """Put entries for events that a sink gets again."""
    sink_no = await _number_of(transaction, asked.sink)
    if sink_no is None:
        raise decisions.no_such_sink(asked.sink)
    after, until, limit = asked.after, decisions.LAST_RUN, asked.limit
    if asked.run_id is not None:
        known = "SELECT run_no FROM holdfast.runs WHERE run_id = $1"
        rows = await transaction.fetch(known, askable(asked.run_id))
        if not rows:
            raise decisions.no_such_run(asked.run_id)
        after, until = max(after, rows[0][0] - 1), rows[0][0]
    else:
        examined = "SELECT run_no FROM holdfast.runs WHERE run_no > $1 ORDER BY run_no LIMIT 1 OFFSET $2"
        rows = await transaction.fetch(examined, after, asked.look - 1)
        until = rows[0][0] if rows else until
    found = await transaction.fetch(_REPLAYED, sink_no, asked.since, asked.from_seq, after, until, limit + 1)
    chosen = [(run_no, first, last, now, 0, now) for run_no, first, last in found[:limit]]
    if chosen:
        await transaction.fetch(_PUT_ENTRIES, sink_no, *columns(chosen, 6))
    return Replayed(len(chosen), chosen[-1][0] if len(found) > limit else decisions.after_replay(asked, until))


async def raise_alerts(transaction: Transaction, alerts: Sequence[BusAlert], now: Instant) -> int:
    """Put alerts on the bus, if a sink gets alerts. The lock makes them visible in the order of their numbers."""
    takers = await transaction.fetch("SELECT sink_no, name FROM holdfast.sinks WHERE alerts ORDER BY sink_no")
    if not takers:
        return 0
    await transaction.script("LOCK TABLE holdfast.alerts IN SHARE ROW EXCLUSIVE MODE")
    new = 0
    for alert in alerts:
        put = await transaction.fetch(
            "INSERT INTO holdfast.alerts (alert_id, raised_at, alert) "
            "SELECT $1, $2, $3 WHERE NOT EXISTS (SELECT FROM holdfast.alerts WHERE alert_id = $1) RETURNING alert_no",
            *(alert.alert_id, now, encode_text(alert)),
        )
        for (number,) in put:
            new += 1
            for sink_no, name in takers:
                if name != alert.sink:
                    await transaction.fetch(_PUT_ENTRIES, sink_no, *columns([(0, number, number, now, 0, now)], 6))
    return new


async def settle_letters(
    transaction: Transaction, ids: Sequence[str], action: Settlement, now: Instant, entry: AuditEntry | None
) -> list[Settled | Refused]:
    """Settle dead letters of the bus."""
    answers: list[Settled | Refused] = []
    for id_ in ids:
        found = await transaction.fetch(
            "DELETE FROM holdfast.bus_dead_letters WHERE letter_id = $1 RETURNING sink_no, run_no, from_seq, to_seq",
            askable(id_),
        )
        if not found:
            answers.append(Refused(decisions.no_such_letter(id_)))
            continue
        sink_no, run_no, from_seq, to_seq = found[0]  # letters of a deleted run are deleted too
        if action == "requeue":
            row = (run_no, from_seq, to_seq, now, 0, now)
            await transaction.fetch(_PUT_ENTRIES, sink_no, *columns([row], 6))
        if entry is not None:
            await audit.append(transaction, [replace(letter_entry(entry, id_), at=now)])
        answers.append(Settled(id_, action))
    return answers


# --- searches


async def find_sinks(db: Db, query: SinkQuery, limit: int) -> Found[SinkStatus]:
    """Return the sinks that match the query."""
    where = sql.sink_conditions(query)
    select = _COUNTED if query.counted else f"SELECT {sql.SINK} FROM holdfast.sinks"
    found = await db.fetch(
        f"{select} {where.numbered} ORDER BY name LIMIT {where.limit_parameter}", *map(askable, where.values(limit))
    )
    return sql.found_of(found, sql.sink_status_of, itemgetter(1), itemgetter(1))


async def find_outbox(db: Db, query: OutboxQuery, limit: int) -> Found[OutboxEntry]:
    """Return entries of a sink."""
    asked = (askable(query.sink), *query.after, limit)
    found = await db.fetch("SELECT * FROM holdfast.outbox_1($1, $2, $3, $4)", *asked)
    return sql.found_of(found, sql.outbox_entry_of, itemgetter(0), itemgetter(0, 2))


async def find_alerts(db: Db, query: AlertQuery, limit: int) -> Found[BusAlert]:
    """Return alerts in the order of their numbers."""
    found = await db.fetch(
        "SELECT alert_no, raised_at, alert FROM holdfast.alerts WHERE alert_no > $1 ORDER BY alert_no LIMIT $2",
        *(query.after, limit),
    )
    return sql.found_of(found, sql.alert_of, itemgetter(0), itemgetter(0))


async def find_letters(db: Db, query: BusDeadLetterQuery, limit: int) -> Found[BusDeadLetter]:
    """Return the dead letters of the bus that match the query."""
    where = sql.bus_letter_conditions(query)
    found = await db.fetch(
        f"{_LETTERS} {where.numbered} ORDER BY l.died_at, l.letter_id LIMIT {where.limit_parameter}",
        *map(askable, where.values(limit)),
    )
    return sql.found_of(found, sql.bus_letter_of, itemgetter(0), itemgetter(7, 0))


# --- retention


def held(after: Instant) -> str:
    """Return the condition that a sink has not received events of a run, put into the outbox after an instant."""
    return (
        "EXISTS (SELECT FROM holdfast.sinks s JOIN holdfast.outbox o ON o.sink_no = s.sink_no "
        f"WHERE o.run_no = runs.run_no AND o.at > {after:d})"
    )


_MINE = "sink_no IN (SELECT sink_no FROM holdfast.sinks WHERE $1::text IS NULL OR tenant = $1)"


async def purge_of(transaction: Transaction, policy: PurgePolicy, doomed: list[int]) -> int:
    """Delete what the bus has of runs that are being deleted, or with `dry_run` only count it; return the count."""
    letters = await _drop(transaction, policy, "bus_dead_letters WHERE run_no = ANY ($1)", doomed)
    of_runs = "outbox WHERE sink_no IN (SELECT sink_no FROM holdfast.sinks) AND run_no = ANY ($1)"
    return letters + await _drop(transaction, policy, of_runs, doomed)


async def purge(transaction: Transaction, policy: PurgePolicy, doomed: list[int], now: Instant) -> tuple[int, bool]:
    """Delete what a policy names, or with `dry_run` only count it; return the count, and whether there is more."""
    count = await purge_of(transaction, policy, doomed)
    has_more, until = False, decisions.outbox_until(policy, now)
    if until is not None:
        asked = (askable(policy.tenant), until)
        entries = await transaction.fetch(
            "SELECT sink_no, run_no, from_seq FROM holdfast.outbox "
            f"WHERE at <= $2 AND {_MINE} AND run_no <> ALL ($3) LIMIT $4",
            *(*asked, doomed, policy.limit + 1),
        )
        has_more = len(entries) > policy.limit
        count += len(entries[: policy.limit])
        if not policy.dry_run:
            await transaction.fetch(
                "DELETE FROM holdfast.outbox o USING unnest($1::bigint[], $2::bigint[], $3::bigint[]) "
                "AS x (sink_no, run_no, from_seq) "
                "WHERE o.sink_no = x.sink_no AND o.run_no = x.run_no AND o.from_seq = x.from_seq",
                *columns([tuple(row) for row in entries[: policy.limit]], 3),
            )
        old = f"bus_dead_letters WHERE died_at <= $2 AND {_MINE} AND run_no <> ALL ($3)"
        count += await _drop(transaction, policy, old, *asked, doomed)
        if policy.tenant is None:
            count += await _drop(transaction, policy, "alerts WHERE raised_at <= $1", asked[1])
    if policy.sinks:
        if policy.dry_run:
            count += await _drop(transaction, policy, "sinks WHERE tenant = $1", askable(policy.tenant))
        else:
            count += await remove_sinks(transaction, "tenant", askable(policy.tenant))
    if not policy.dry_run and policy.tenant is None:
        await _drop_lost(transaction)
    return count, has_more


async def _drop(transaction: Transaction, policy: PurgePolicy, rows: str, *values: Any) -> int:
    """Delete rows, or with `dry_run` only count them."""
    [[count]] = await transaction.fetch(f"SELECT count(*) FROM holdfast.{rows}", *values)
    if count and not policy.dry_run:
        await transaction.fetch(f"DELETE FROM holdfast.{rows}", *values)
    return int(count)
