"""Rows of the tables: how to write them, and how `load`, `read_events`, `find` and `stats` read them.

What a row means is shared with the other SQL stores (`sql.py`).

The newest runs that match a query may be far down. If the query has no bound, they are searched in windows of a fixed
number of runs, one read each: no read keeps a thread of `readers.py` from others for long.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from itertools import chain
from math import nan
from operator import itemgetter
from typing import Any

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from holdfast.core.attributes import Attributes, rows_of
from holdfast.core.codec import encode_body, encode_ref, encode_text
from holdfast.core.events import NULL, Event, UnknownBody
from holdfast.core.index_rows import ActivityRecord, Task, Wait
from holdfast.core.instants import Instant
from holdfast.core.messages import ENGINE_SIGNALS, OUTCOME_SIGNAL, Message, Signal
from holdfast.limits import MAILBOX_SIGNALS
from holdfast.store import decisions, port, search, sql
from holdfast.store.port import Job
from holdfast.store.queries import within
from holdfast.store.sql import WAIT, Where, in_json, text_bytes, wait_name, wait_of, words_of

EVENTS_AT_ONCE = 25
"""How many events one execution of a statement inserts: starting and ending it takes as long as three rows."""

_INSERT_EVENT = f"INSERT INTO events (run_no, {sql.EVENT}) VALUES ({', '.join('?' * 16)})"
_INSERT_EVENTS = _INSERT_EVENT + f", ({', '.join('?' * 16)})" * (EVENTS_AT_ONCE - 1)

_to_json = msgspec.json.Encoder().encode

NULL_VALUE = nan
"""SQLite stores this as NULL. `sqlite3` binds numbers directly; None and bools go through its slow adapters."""

IS_CURRENT = f"lease_until > :now AND lease_until <= :now + {decisions.LEASE_HORIZON}"
"""A lease that ends later was granted by a clock that was ahead, and counts as expired (`decisions.lease_end`)."""

INSERT_MESSAGE = "INSERT OR REPLACE INTO messages VALUES (?, ?, ?, ?)"
INSERT_WAIT = "INSERT OR REPLACE INTO waits VALUES (?, ?, ?, ?, ?, ?)"
INSERT_TASK = (
    "INSERT INTO tasks VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (task_id) DO UPDATE SET run_no = excluded.run_no, "
    "step_id = excluded.step_id, status = excluded.status, assignee = excluded.assignee, roles = excluded.roles, "
    "task = excluded.task WHERE run_no = excluded.run_no"
)
INSERT_ATTRIBUTE = "INSERT INTO run_attributes VALUES (?, ?, ?, ?, ?)"
INSERT_RECORD = "INSERT OR REPLACE INTO activity_records VALUES (?, ?, ?, ?, ?, ?)"
INSERT_JOB = (
    "INSERT INTO jobs VALUES (?, ?, ?, ?, ?, NULL, ?, ?, ?) ON CONFLICT (run_no, step_id) DO UPDATE SET "
    "queue = excluded.queue, activity = excluded.activity, visible_at = excluded.visible_at, taken_by = NULL, "
    "next_attempt = excluded.next_attempt, details = coalesce(details, excluded.details), job = excluded.job"
)


def insert_events(db: sqlite3.Connection, rows: list[tuple[Any, ...]]) -> None:
    """Insert rows of events."""
    whole = len(rows) - len(rows) % EVENTS_AT_ONCE
    groups = [rows[start : start + EVENTS_AT_ONCE] for start in range(0, whole, EVENTS_AT_ONCE)]
    db.executemany(_INSERT_EVENTS, [list(chain.from_iterable(group)) for group in groups])
    db.executemany(_INSERT_EVENT, rows[whole:])


def event_rows(run_no: int, events: Iterable[Event], version: int, now: Instant) -> list[tuple[Any, ...]]:
    """Return the rows of new events, numbered from after `version`."""
    rows = []
    ref, ref_text = None, ""
    for run_seq, event in enumerate(events, version + 1):
        data = event.data
        if event.engine_run_ref is not ref:
            ref, ref_text = event.engine_run_ref, encode_ref(event.engine_run_ref)
        rows.append(
            (
                run_no,
                run_seq,
                event.event_id,
                event.event_type,
                event.step_id or NULL_VALUE,
                event.engine_attempt_id or NULL_VALUE,
                event.logical_attempt_id or NULL_VALUE,
                encode_body(data) if type(data) is UnknownBody else _to_json(data).decode(),
                bytearray.fromhex(event.idempotency_key),  # `sqlite3` binds it directly, unlike bytes
                event.emitted_at,
                now,
                event.adapter_version,
                ref_text,
                event.caused_by_signal_id or NULL_VALUE,
                event.parent_event_id or NULL_VALUE,
                event.schema_version,
            )
        )
    return rows


def message_row(run_no: int, message: Message, now: Instant) -> tuple[Any, ...]:
    """Return the row of a message; one without a due instant is due now."""
    return run_no, message.signal_id, now if message.due_at is None else message.due_at, encode_text(message)


def wait_row(run_no: int, wait: Wait) -> tuple[Any, ...]:
    """Return the row of an open wait."""
    until = NULL_VALUE if wait.until is None else wait.until
    return run_no, wait.step_id, wait.name, wait.token, wait.since, until


def task_row(run_no: int, task: Task) -> tuple[Any, ...]:
    """Return the row of a task."""
    return task.task_id, run_no, task.step_id, task.status, task.assignee, encode_text(task.roles), encode_text(task)


def record_row(run_no: int, record: ActivityRecord) -> tuple[Any, ...]:
    """Return the row of an activity record."""
    is_completed = record.status == "completed"
    return run_no, record.activity_name, record.step_id, record.idempotency_key, is_completed, encode_text(record)


def attribute_rows(run_no: int, attributes: Attributes) -> list[tuple[Any, ...]]:
    """Return the rows of a run's search attributes."""
    return [
        (run_no, name, kind, *((None, value) if kind == "s" else (value, None)))
        for name, kind, value in rows_of(attributes)
    ]


def job_row(run_no: int, job: Job, now: Instant) -> tuple[Any, ...]:
    """Return the row of a job; one without a due instant is visible now. Details have a separate column."""
    visible_at = now if job.due_at is None else job.due_at
    details = None if job.details == NULL else sql.text_of(job.details)
    plain = replace(job, details=NULL)
    return run_no, job.step_id, job.queue, job.activity, visible_at, job.engine_attempt_id, details, encode_text(plain)


def listing(values: Iterable[int | str]) -> str:
    """Return values as a JSON array for `json_each(?)`: one statement for any number of them."""
    return encode_text(list(values))


# --- reading


def check_node(db: sqlite3.Connection, node: str, now: Instant) -> None:
    """Refuse a node without a current lease."""
    current = f"SELECT 1 FROM nodes WHERE node = :node AND {IS_CURRENT}"
    if not db.execute(current, {"node": node, "now": now}).fetchone():
        raise decisions.lease_expired(node)


def load(db: sqlite3.Connection, run_ids: Sequence[str], now: Instant) -> list[port.LoadedRun | None]:
    """Return the runs in the requested order; None for missing ones."""
    numbers = dict(
        db.execute(
            "SELECT run_id, run_no FROM runs WHERE run_id IN (SELECT value FROM json_each(?))",
            (listing(run_ids),),
        )
    )
    loaded = load_numbers(db, list(numbers.values()), now)
    return [loaded[numbers[run_id]] if run_id in numbers else None for run_id in run_ids]


def load_numbers(db: sqlite3.Connection, run_nos: Sequence[int], now: Instant) -> dict[int, port.LoadedRun]:
    """Return the runs with their pending work: a few statements, however many runs."""
    if not run_nos:
        return {}
    numbers = listing(run_nos)
    among = "run_no IN (SELECT value FROM json_each(?))"
    heads = {row[0]: sql.head_of(row) for row in db.execute(f"SELECT {sql.HEAD} FROM runs WHERE {among}", (numbers,))}
    messages: dict[int, list[Message]] = {}
    for run_no, text in db.execute(
        f"SELECT run_no, message FROM messages WHERE {among} AND due_at <= ? ORDER BY run_no, due_at, signal_id",
        (numbers, now),
    ):
        messages.setdefault(run_no, []).append(sql.message_of(text))
    full = _full_mailboxes(db, heads)
    signals = _signals(db, heads, full)
    records: dict[int, list[ActivityRecord]] = {}
    for run_no, text in db.execute(
        "SELECT run_no, record FROM activity_records INDEXED BY activity_records_open "
        f"WHERE {among} AND NOT is_completed "
        "ORDER BY run_no, activity_name, step_id, idempotency_key",
        (numbers,),
    ):
        records.setdefault(run_no, []).append(sql.record_of(text))
    details: dict[int, dict[str, Raw]] = {}
    for run_no, step_id, text in db.execute(
        f"SELECT run_no, step_id, details FROM jobs WHERE {among} AND details IS NOT NULL", (numbers,)
    ):
        details.setdefault(run_no, {})[step_id] = sql.raw_of(text)
    return {
        run_no: port.LoadedRun(
            head=head,
            messages=tuple(messages.get(run_no, ())),
            signals=tuple(signals.get(run_no, ())),
            records=tuple(records.get(run_no, ())),
            details=details.get(run_no, {}),
            is_whole=run_no not in full,
        )
        for run_no, head in heads.items()
    }


_FULL = """
SELECT value FROM json_each(?) WHERE EXISTS (
    SELECT 1 FROM signals INDEXED BY signals_unconsumed WHERE run_no = value AND consumed_seq IS NULL LIMIT 1 OFFSET ?
)
"""
_ALL = f"""
SELECT run_no, {sql.SIGNAL} FROM signals INDEXED BY signals_unconsumed
WHERE run_no IN (SELECT value FROM json_each(?)) AND consumed_seq IS NULL ORDER BY run_no, inbox_seq
"""
_OUTCOMES = f"""
SELECT run_no, {sql.SIGNAL} FROM signals INDEXED BY signals_unconsumed
WHERE run_no IN (SELECT value FROM json_each(?)) AND name = ? AND consumed_seq IS NULL
"""
_WANTED = f"""
SELECT s.run_no, {", ".join(f"s.{column}" for column in sql.SIGNAL.split(", "))} FROM (
    SELECT run_no, name FROM waits WHERE run_no IN (SELECT value FROM json_each(?1))
    UNION SELECT r.value, n.value FROM json_each(?1) AS r, json_each(?2) AS n
) AS w CROSS JOIN signals AS s ON s.run_no = w.run_no AND s.inbox_seq IN (
    SELECT x.inbox_seq FROM signals AS x INDEXED BY signals_unconsumed
    WHERE x.run_no = w.run_no AND x.name = w.name AND x.consumed_seq IS NULL AND (x.step_id IS NULL OR EXISTS (
        SELECT 1 FROM waits WHERE waits.run_no = x.run_no AND waits.step_id = x.step_id AND waits.name = x.name
    )) ORDER BY x.inbox_seq LIMIT ?3
) ORDER BY s.run_no, s.inbox_seq
"""


def _full_mailboxes(db: sqlite3.Connection, heads: dict[int, port.RunHead]) -> set[int]:
    """Return the runs with more unconsumed signals than are loaded regardless of their names; they are few."""
    much = [run_no for run_no, head in heads.items() if head.inbox_seq > MAILBOX_SIGNALS]
    return {run_no for (run_no,) in db.execute(_FULL, (listing(much), MAILBOX_SIGNALS))} if much else set()


def _signals(db: sqlite3.Connection, heads: dict[int, port.RunHead], full: set[int]) -> dict[int, list[Signal]]:
    """Return the signals to load with runs."""
    found = db.execute(_ALL, (listing(run_no for run_no in heads if run_no not in full),)).fetchall()
    if full:
        wanted = (listing(full), listing(sorted(ENGINE_SIGNALS - {OUTCOME_SIGNAL})), MAILBOX_SIGNALS)
        found += db.execute(_WANTED, wanted).fetchall()
        found += db.execute(_OUTCOMES, (listing(full), OUTCOME_SIGNAL)).fetchall()
        found.sort(key=lambda row: (row[0], row[1]))
    signals: dict[int, list[Signal]] = {}
    for row in found:
        signals.setdefault(row[0], []).append(sql.signal_of(heads[row[0]].run_id, row[1:]))
    return signals


def read_events(
    db: sqlite3.Connection, run_id: str, after: int, limit: int, most_bytes: int | None = None
) -> list[Event]:
    """Return a page of the run's history."""
    found = db.execute(
        f"SELECT {sql.EVENT} FROM events WHERE run_no = (SELECT run_no FROM runs WHERE run_id = ?) AND run_seq > ? "
        "ORDER BY run_seq LIMIT ?",
        (run_id, after, limit),
    )
    return sql.events_of(run_id, within(found, most_bytes, text_bytes))


def find_events(db: sqlite3.Connection, query: port.EventQuery, limit: int) -> port.Found[Event]:
    """Return the events that match the query."""
    places = encode_text(list(dict(query.after).items()))
    ends = "AND runs.finished_at IS NOT NULL AND run_seq = runs.version " if query.only_ends else ""
    found = db.execute(
        f"SELECT runs.run_id, {sql.EVENT} FROM json_each(?) AS places "
        "CROSS JOIN runs ON runs.run_id = json_extract(places.value, '$[0]') "
        f"CROSS JOIN events ON events.run_no = runs.run_no AND run_seq > json_extract(places.value, '$[1]') {ends}"
        "ORDER BY runs.run_id, run_seq LIMIT ?",
        (places, limit),
    )
    missing = [run_id for (run_id,) in db.execute(_MISSING, (places,))] if query.only_ends else ()
    return sql.found_events(within(found, query.most_bytes, text_bytes), missing)


_MISSING = (
    "SELECT json_extract(value, '$[0]') AS run_id FROM json_each(?) AS places "
    "WHERE NOT EXISTS (SELECT 1 FROM runs WHERE runs.run_id = json_extract(places.value, '$[0]')) ORDER BY run_id"
)

WINDOW = 20_000
"""How many runs one read of the newest runs examines: about ten milliseconds, if none of them matches."""

# The number of a run; if it was deleted meanwhile, the number after those of the runs created by its time.
_NUMBER_BEFORE = (
    "SELECT coalesce((SELECT run_no FROM runs WHERE run_id = ?), "
    "(SELECT run_no + 1 FROM runs WHERE created_at <= ? ORDER BY run_no DESC LIMIT 1), 0)"
)

# LIKE ignores case for A to Z only. For texts in an array or an error, the whole JSON text is searched first, because
# parsing takes longer.
_SAYS = (
    "(run_id LIKE ? ESCAPE '|' OR plan_id LIKE ? ESCAPE '|' OR reference_key LIKE ? ESCAPE '|' "
    "OR (tags LIKE ? ESCAPE '|' AND EXISTS (SELECT 1 FROM json_each(tags) WHERE value LIKE ? ESCAPE '|')) "
    "OR (snapshot LIKE ? ESCAPE '|' AND instr(snapshot, '\"last_error\":') AND json_valid(snapshot) "
    "AND (json_extract(snapshot, '$.last_error.code') LIKE ? ESCAPE '|' "
    "OR json_extract(snapshot, '$.last_error.message') LIKE ? ESCAPE '|')))"
)
_RETRYING = (  # quotes are escaped in a text inside JSON, so most rows are not parsed
    "(finished_at IS NULL AND instr(snapshot, '\"retrying\":{') AND json_valid(snapshot) "
    "AND json_extract(snapshot, '$.retrying.step_id') IS NOT NULL)"
)
_LITERAL = str.maketrans({"|": "||", "%": "|%", "_": "|_"})


def find_runs(db: sqlite3.Connection, query: port.RunQuery, limit: int) -> port.Found[port.RunHead]:
    """Return the runs that match the query: by their ids, or the newest first."""
    if query.newest:
        return _look_at_newest(db, query, limit)
    where = _run_conditions(query)
    where.add("run_id > ?", query.after)
    place = None
    if query.look is not None:
        last = "SELECT run_id FROM runs WHERE run_id > ? ORDER BY run_id LIMIT 1 OFFSET ?"
        place = next((run_id for (run_id,) in db.execute(last, (query.after, query.look - 1))), None)
        where.add_given("run_id <= ?", place)
    return _heads(db, where, "run_id", query, limit, place)


def _look_at_newest(db: sqlite3.Connection, query: port.RunQuery, limit: int) -> port.Found[port.RunHead]:
    """Return the matching runs among a limited number of the next newest runs, newest first."""
    before = number_before(db, query)
    where = _run_conditions(query)
    where.add("run_no < ?", before)
    last = "SELECT created_at, run_id, run_no FROM runs WHERE run_no < ? ORDER BY run_no DESC LIMIT 1 OFFSET ?"
    found = db.execute(last, (before, (query.look or 1) - 1)).fetchone()
    where.add_given("run_no >= ?", found and found[2])
    return _heads(db, where, "run_no DESC", query, limit, found and found[:2])


def number_before(db: sqlite3.Connection, query: port.RunQuery) -> int:
    """Return the number before which to search for the newest runs."""
    created_at, run_id = query.before
    return int(db.execute(_NUMBER_BEFORE, (run_id, created_at)).fetchone()[0])


def newest_runs(
    query: port.RunQuery, before: int, down_to: int, db: sqlite3.Connection, _now: Instant
) -> port.Found[port.RunHead]:
    """Return the matching runs with numbers from `down_to` up to but not including `before`, newest first."""
    where = _run_conditions(query)
    where.add("run_no < ? AND run_no >= ?", before, down_to)
    return _heads(db, where, "run_no DESC", query, query.limit)


def search_runs(
    query: port.RunQuery, limit: int, db: sqlite3.Connection, _now: Instant
) -> port.Found[port.RunHead] | None:
    """Return the runs that match a query that an index can drive; None if no index should. See `store/search.py`."""
    look = query.look or max(search.LOOK, limit)
    driver = _driver(db, query)
    if driver is None:
        return None
    rows = db.execute(*search.heads_query(driver, look, _run_conditions(query), limit, "")).fetchall()
    end = None
    if len(rows) < limit and not driver.is_gathered:
        end = db.execute(*search.end_query(driver, look, "")).fetchone()
    return search.found_runs(query, rows, limit, end, text_bytes)


def _driver(db: sqlite3.Connection, query: port.RunQuery) -> search.Driver | None:
    order, number = query.order, 0
    if order is None:
        number = number_before(db, query)
    elif query.behind is not None:
        text = search.number_query("", descending=order.descending)
        [number] = db.execute(text, (query.behind[2], query.behind[1])).fetchone()
    sources = search.sources(query, "", search.beyond_number(query, number))
    counts = [db.execute(*search.count_query(each)).fetchone()[0] for each in sources]
    if order is None:
        return search.newest_driver(sources, counts)
    return search.ordered_driver(query, order, number, sources, counts, "")


def count_runs(db: sqlite3.Connection, query: port.RunCountQuery, limit: int) -> port.Found[port.RunCount]:
    """Return how many runs match a query, by workflow and status."""
    runs = search.counted(query)
    rows, is_cut = list[Any](), False
    for part in search.count_parts(runs, _driver(db, runs), query.look, ""):
        where = _run_conditions(runs)
        where.add(*part.condition)
        rows += db.execute(*search.counts_query(part, where)).fetchall()
        is_cut = is_cut or (part.end is not None and db.execute(*part.end).fetchone() is not None)
    return search.found_counts(rows, limit, is_cut=is_cut)


def is_looked_up(query: port.RunQuery) -> bool:
    """Return whether an index leads to the few runs that match the query, wherever they are."""
    return any(given is not None for given in (query.run_ids, query.reference_key, query.parent_run_id))


def _heads(
    db: sqlite3.Connection, where: Where, order: str, query: port.RunQuery, limit: int, place: Any = None
) -> port.Found[port.RunHead]:
    found = db.execute(f"SELECT {sql.HEAD} FROM runs {where.text} ORDER BY {order} LIMIT ?", where.values(limit))
    taken = list(within(found, query.most_bytes, text_bytes))
    is_whole = len(taken) < limit and next(found, None) is None
    place_of = itemgetter(14, 1) if query.newest else itemgetter(1)
    return sql.found_of(taken, sql.head_of, itemgetter(1), place_of, place if is_whole else None)


def _run_conditions(query: port.RunQuery) -> Where:
    where = Where()
    sql.add_run_conditions(where, query, "EXISTS (SELECT 1 FROM json_each(tags) WHERE value = ?)")
    search.add_attribute_conditions(where, query, "")
    if query.retrying:
        where.add(_RETRYING)
    if query.run_ids is not None:
        where.add("run_id IN (SELECT value FROM json_each(?))", listing(query.run_ids))
    for word in words_of(query.text):
        _add_word(where, word)
    return where


def _patterns_of(word: str) -> tuple[str, str]:
    """Return the LIKE patterns that find a word in a text, and in a JSON text."""
    return f"%{word.translate(_LITERAL)}%", f"%{in_json(word).translate(_LITERAL)}%"


def _add_word(where: Where, word: str) -> None:
    plain, quoted = _patterns_of(word)
    if "\0" in word:
        where.add("FALSE")  # SQLite reads no such pattern, and no stored text contains it
    else:
        where.add(_SAYS, plain, plain, plain, quoted, plain, quoted, plain, plain)


def find_waits(db: sqlite3.Connection, query: port.WaitQuery, limit: int) -> port.Found[Wait]:
    """Return the open waits that match the query."""
    where = sql.wait_conditions(query)
    found = db.execute(
        f"SELECT {WAIT} FROM waits JOIN runs USING (run_no) {where.text} ORDER BY run_id, step_id LIMIT ?",
        where.values(limit),
    )
    return sql.found_of(found.fetchall(), wait_of, wait_name, itemgetter(0, 1))


# Signals after one of a run; if that run was deleted meanwhile, those of runs created after the run before it.
_BEHIND = (
    "(run_no, inbox_seq) > (coalesce((SELECT run_no FROM runs WHERE run_id <= ? ORDER BY run_id DESC LIMIT 1), 0), "
    "iif(EXISTS (SELECT 1 FROM runs WHERE run_id = ?), ?, 1 << 62))"
)


def find_mailbox(db: sqlite3.Connection, query: port.MailboxQuery, limit: int) -> port.Found[Signal]:
    """Return the signals that match the query."""
    where = sql.mailbox_conditions(query, "runs", _BEHIND)
    index = "" if query.consumed or query.run_id is not None else "INDEXED BY signals_unconsumed"
    found = db.execute(
        f"SELECT (SELECT run_id FROM runs WHERE runs.run_no = signals.run_no), {sql.SIGNAL} "
        f"FROM signals {index} {where.text} ORDER BY run_no, inbox_seq LIMIT ?",
        where.values(limit),
    )
    taken = list(within(found, query.most_bytes, text_bytes))
    place_of = itemgetter(1) if query.run_id is not None else sql.mail_place
    return sql.found_of(taken, sql.mail_of, sql.mail_name, place_of)


_CONCERNS = (
    "task_id IN (SELECT task_id FROM task_roles WHERE role IN (SELECT value FROM json_each(?)){of_status} "
    "UNION ALL SELECT task_id FROM tasks WHERE assignee = ?{of_status}) "
    "AND (roles <> '[]' OR assignee IS NULL OR assignee = ?)"
)


# The whole text is searched first, because parsing the JSON takes longer.
_MENTIONS = (
    "(task LIKE ? ESCAPE '|' AND (json_extract(task, '$.name') LIKE ? ESCAPE '|' "
    "OR json_quote(json_extract(task, '$.payload')) LIKE ? ESCAPE '|'))"
)


def find_tasks(db: sqlite3.Connection, query: port.TaskQuery, limit: int) -> port.Found[Task]:
    """Return the tasks that match the query."""
    of_status, status = ("", ()) if query.status is None else (" AND status = ?", (query.status,))
    where = Where()
    where.add("task_id > ?", query.after)
    sql.add_task_conditions(where, query, "runs")
    if query.step_ids is not None:
        where.add("step_id IN (SELECT value FROM json_each(?))", listing(query.step_ids))
    if query.role is not None:
        where.add(f"task_id IN (SELECT task_id FROM task_roles WHERE role = ?{of_status})", query.role, *status)
    where.add_given("json_extract(task, '$.due_at') < ?", query.due_before)
    if query.actor is not None:
        roles = listing([0, *query.actor_roles])
        where.add(_CONCERNS.format(of_status=of_status), roles, *status, query.actor, *status, query.actor)
    for word in words_of(query.text):
        plain, quoted = _patterns_of(word)
        where.add(_MENTIONS if "\0" not in word else "FALSE", *((quoted, plain, quoted) if "\0" not in word else ()))
    place = None
    if query.look is not None:
        last = "SELECT task_id FROM tasks WHERE task_id > ? ORDER BY task_id LIMIT 1 OFFSET ?"
        place = next((task_id for (task_id,) in db.execute(last, (query.after, query.look - 1))), None)
        where.add_given("task_id <= ?", place)
    found = db.execute(f"SELECT task, task_id FROM tasks {where.text} ORDER BY task_id LIMIT ?", where.values(limit))
    taken = list(within(found, query.most_bytes, text_bytes))
    is_whole = len(taken) < limit and next(found, None) is None
    place = place if is_whole else None
    return sql.found_of(taken, lambda row: sql.task_of(row[0]), itemgetter(1), itemgetter(1), place)


_READY = """
SELECT count(*), min(ready_at) FROM (
    SELECT ready_at FROM runs WHERE lease_owner IS NULL AND ready_at <= :now
    UNION ALL SELECT ready_at FROM runs WHERE lease_owner IS NOT NULL AND ready_at <= :now
)
"""
_SAMPLED = """
SELECT count(*) FROM json_each(?) AS place CROSS JOIN runs ON run_no >= place.value AND run_no < place.value + ?
"""
PLACES = 200
AT_A_PLACE = 100


def _all_runs(db: sqlite3.Connection) -> tuple[int, bool]:
    """Return the number of runs, and whether it is an estimate, based on how many of their numbers are in use.

    Numbers are assigned in order, so an estimate is exact as long as no run was deleted.
    """
    first, last = db.execute("SELECT (SELECT min(run_no) FROM runs), (SELECT max(run_no) FROM runs)").fetchone()
    numbers = 0 if first is None else last - first + 1
    if numbers < port.COUNTED_RUNS:
        return db.execute("SELECT count(*) FROM runs").fetchone()[0], False
    places = [first + (numbers - AT_A_PLACE) * place // (PLACES - 1) for place in range(PLACES)]
    [found] = db.execute(_SAMPLED, (listing(places), AT_A_PLACE)).fetchone()
    return numbers * found // (PLACES * AT_A_PLACE), True


def stats(db: sqlite3.Connection, now: Instant) -> port.Stats:
    """Return counts for operators."""

    def one(sql: str) -> Any:
        return db.execute(sql, {"now": now} if ":now" in sql else ()).fetchone()[0]

    counts = dict(db.execute("SELECT status, count(*) FROM runs WHERE status <> 'COMPLETED' GROUP BY status"))
    every, is_estimated = _all_runs(db)
    ready, oldest_ready_at = db.execute(_READY, {"now": now}).fetchone()
    return port.Stats(
        runs=sql.with_completed(counts, every),
        completed_is_estimated=is_estimated,
        ready=ready,
        leased=one("SELECT count(*) FROM runs WHERE lease_owner IS NOT NULL"),
        messages=one("SELECT count(*) FROM messages"),
        signals=one("SELECT count(*) FROM signals WHERE consumed_seq IS NULL"),
        open_tasks=one("SELECT count(*) FROM tasks WHERE status = 'OPEN'"),
        jobs=one("SELECT count(*) FROM jobs WHERE queue <> ''"),
        dead_letters=one("SELECT count(*) FROM dead_letters WHERE settled IS NULL"),
        queued=one("SELECT count(*) FROM gate_runs WHERE NOT is_inside"),
        nodes=one(f"SELECT count(*) FROM nodes WHERE {IS_CURRENT}"),
        oldest_ready_at=oldest_ready_at,
        queues=dict(db.execute("SELECT queue, count(*) FROM jobs WHERE queue <> '' GROUP BY queue")),
        leases=dict(db.execute(f"SELECT node, lease_until FROM nodes WHERE {IS_CURRENT}", {"now": now})),
    )
