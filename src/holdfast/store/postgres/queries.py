"""`load`, `read_events`, `find` and `stats`."""

from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any

from msgspec import Raw, json

from holdfast.core.events import Event
from holdfast.core.index_rows import ActivityRecord, Task, Wait
from holdfast.core.instants import Instant
from holdfast.core.messages import Message, Signal
from holdfast.limits import MAILBOX_SIGNALS
from holdfast.store import port, search, sql
from holdfast.store.postgres.columns import askable
from holdfast.store.postgres.pool import Db
from holdfast.store.queries import within
from holdfast.store.sql import Where, in_json, words_of

PREFIX = "holdfast."
HEAD = ", ".join(f"l.{name.strip().rpartition('.')[2]}" for name in sql.HEAD.split(","))
LOADED = (
    f"{HEAD}, l.messages, l.s_seq, l.s_name, l.s_signal, l.s_step, l.s_at, l.s_payload, l.s_received, l.s_by, "
    "l.is_whole, l.records, l.d_step, l.d_details"
)
LOAD = f"""
SELECT {LOADED} FROM holdfast.loaded_3(holdfast.numbers_1($2), holdfast.time_1($1), {MAILBOX_SIGNALS}) l
"""
EVENTS = f"""
SELECT {sql.EVENT} FROM holdfast.events
WHERE run_no = (SELECT run_no FROM holdfast.runs WHERE run_id = $1) AND run_seq > $2 ORDER BY run_seq LIMIT $3
"""
EVENTS_OF_RUNS = f"""
SELECT runs.run_id, {sql.EVENT} FROM unnest($1::text[], $2::bigint[]) AS places (place_id, place_seq)
JOIN holdfast.runs ON runs.run_id = place_id JOIN holdfast.events ON events.run_no = runs.run_no AND run_seq > place_seq
ORDER BY runs.run_id, run_seq LIMIT $3
"""
ENDS_OF_RUNS = f"""
SELECT place_id, r.run_no IS NOT NULL, {", ".join(f"e.{each.strip()}" for each in sql.EVENT.split(","))}
FROM unnest($1::text[], $2::bigint[]) AS places (place_id, place_seq)
LEFT JOIN LATERAL (
    SELECT run_no, version, finished_at FROM holdfast.runs WHERE runs.run_id = place_id LIMIT 1
) r ON true
LEFT JOIN LATERAL (
    SELECT * FROM holdfast.events x WHERE x.run_no = r.run_no AND x.run_seq = r.version LIMIT 1
) e ON r.finished_at IS NOT NULL AND r.version > place_seq
WHERE e.run_seq IS NOT NULL OR r.run_no IS NULL ORDER BY place_id COLLATE "C"
"""
EVENTS_WITHIN = f"""
SELECT {", ".join(["run_id", *(f"e.{each.strip()}" for each in sql.EVENT.split(","))])} FROM (
    SELECT place_id AS run_id, x.*,
        sum(octet_length(x.data)) OVER (ORDER BY place_id COLLATE "C", x.run_seq) - octet_length(x.data) AS before_bytes
    FROM unnest($1::text[], $2::bigint[]) AS places (place_id, place_seq)
    CROSS JOIN LATERAL (SELECT run_no FROM holdfast.runs WHERE runs.run_id = place_id LIMIT 1) r
    CROSS JOIN LATERAL (
        SELECT {sql.EVENT} FROM holdfast.events
        WHERE events.run_no = r.run_no AND run_seq > place_seq ORDER BY run_seq LIMIT $3
    ) x
    ORDER BY place_id COLLATE "C", x.run_seq LIMIT $3
) e WHERE before_bytes < $4 ORDER BY run_id COLLATE "C", run_seq
"""
"""This looks each run up by the keys, whatever the server's statistics say about the tables."""

SIZES = """
SELECT octet_length(data) FROM holdfast.events
WHERE run_no = (SELECT run_no FROM holdfast.runs WHERE run_id = $1) AND run_seq > $2 ORDER BY run_seq LIMIT $3
"""
# For many runs the number is the planner's estimate: rows per page at the last analysis, times pages.
STATS = f"""
SELECT (SELECT count(*) FROM holdfast.agenda WHERE ready_at <= t.now),
    (SELECT count(*) FROM holdfast.agenda WHERE owner <> ''),
    (SELECT count(*) FROM holdfast.messages),
    (SELECT count(*) FROM holdfast.signals WHERE consumed_seq IS NULL),
    (SELECT count(*) FROM holdfast.tasks WHERE status = 'OPEN'),
    (SELECT count(*) FROM holdfast.jobs WHERE queue <> ''),
    (SELECT count(*) FROM holdfast.dead_letters WHERE settled IS NULL),
    (SELECT count(*) FROM holdfast.nodes WHERE holdfast.lease_end_1(lease_until, t.now) > t.now),
    (SELECT min(ready_at) FROM holdfast.agenda WHERE ready_at <= t.now),
    (SELECT jsonb_object_agg(x.status, x.count)::text
        FROM (SELECT status, count(*) FROM holdfast.runs WHERE status <> 'COMPLETED' GROUP BY status) x),
    CASE WHEN every.runs >= {port.COUNTED_RUNS} THEN every.runs::bigint ELSE (SELECT count(*) FROM holdfast.runs) END,
    (SELECT jsonb_object_agg(x.queue, x.count)::text
        FROM (SELECT queue, count(*) FROM holdfast.jobs WHERE queue <> '' GROUP BY queue) x),
    (SELECT jsonb_object_agg(node, lease_until)::text FROM holdfast.nodes
        WHERE holdfast.lease_end_1(lease_until, t.now) > t.now),
    (SELECT count(*) FROM holdfast.gate_runs g WHERE NOT g.is_inside
        AND NOT EXISTS (SELECT 1 FROM holdfast.gate_exits e WHERE e.plan_id = g.plan_id AND e.number = g.number)),
    every.runs >= {port.COUNTED_RUNS}
FROM (SELECT holdfast.time_1($1) AS now OFFSET 0) t, (
    SELECT reltuples / greatest(relpages, 1) * (pg_relation_size(oid) / current_setting('block_size')::int) AS runs
    FROM pg_class WHERE oid = 'holdfast.runs'::regclass
) every
"""


async def load(db: Db, run_ids: Sequence[str], now: Instant | None) -> list[port.LoadedRun | None]:
    """Return the runs in the requested order; None for missing ones."""
    found = await db.fetch(LOAD, now, [run_id for run_id in set(run_ids) if "\x00" not in run_id])
    loaded = {row[1]: loaded_of(row) for row in found}
    return [loaded.get(run_id) for run_id in run_ids]


def loaded_of(row: Any) -> port.LoadedRun:
    """Return the run that a row of LOADED describes."""
    head = sql.head_of(row)
    messages, seqs, names, signals, steps, ats, payloads, receiveds, bys, is_whole, *rest = tuple(row)[23:]
    records, d_steps, details = rest
    return port.LoadedRun(
        head=head,
        messages=tuple(map(_message, messages)) if messages else (),
        signals=tuple(
            sql.signal_of(head.run_id, (seq, name, signal_id, step_id, at, None, payload, received_at, by))
            for seq, name, signal_id, step_id, at, payload, received_at, by in zip(
                seqs, names, signals, steps, ats, payloads, receiveds, bys, strict=True
            )
        )
        if seqs
        else (),
        records=tuple(map(_record, records)) if records else (),
        details=_details(d_steps, details) if d_steps else {},
        is_whole=is_whole,
    )


def _message(text: str) -> Message:
    return sql.message_of(text)


def _record(text: str) -> ActivityRecord:
    return sql.record_of(text)


def _details(steps: Sequence[str], details: Sequence[str]) -> dict[str, Raw]:
    return {step_id: sql.raw_of(text) for step_id, text in zip(steps, details, strict=True)}


async def read_events(db: Db, run_id: str, after: int, limit: int, most_bytes: int | None = None) -> list[Event]:
    """Return a page of the run's history."""
    if most_bytes is not None:
        sizes = await db.fetch(SIZES, askable(run_id), after, limit)
        limit = _fitting(sizes, most_bytes) or limit
    return sql.events_of(run_id, await db.fetch(EVENTS, askable(run_id), after, limit))


async def find_events(db: Db, query: port.EventQuery, limit: int) -> port.Found[Event]:
    """Return the events that match the query."""
    places = {askable(run_id): after for run_id, after in query.after}
    asked = (list(places), list(places.values()), limit)
    if query.only_ends:
        rows = await db.fetch(ENDS_OF_RUNS, *asked[:2])
        ends = [(run_id, *event) for run_id, is_there, *event in rows if is_there][:limit]
        missing = [run_id for run_id, is_there, *_ in rows if not is_there]
        return sql.found_events(within(ends, query.most_bytes, sql.text_bytes), missing)
    if query.most_bytes is None:
        return sql.found_events(await db.fetch(EVENTS_OF_RUNS, *asked))
    return sql.found_events(await db.fetch(EVENTS_WITHIN, *asked, query.most_bytes))


# Runs that were created before one; if it was deleted meanwhile, those that were created by its time.
_BEFORE = (
    "run_no < coalesce((SELECT run_no FROM holdfast.runs WHERE run_id = ?), "
    "(SELECT run_no + 1 FROM holdfast.runs WHERE created_at <= ? ORDER BY run_no DESC LIMIT 1), 0)"
)

# PostgreSQL has no text with a NUL: an error that contains one is not searched.
_ERROR = "snapshot::json #>> '{last_error,code}' || E'\\n' || (snapshot::json #>> '{last_error,message}')"
_SAYS = (
    """(strpos(lower((run_id || E'\\n' || plan_id || E'\\n' || coalesce(reference_key, '')) COLLATE "C"), ?) > 0 """
    "OR (tags <> '[]' AND EXISTS (SELECT 1 FROM jsonb_array_elements_text(tags::jsonb) AS tag "
    """WHERE strpos(lower(tag COLLATE "C"), ?) > 0)) """
    "OR CASE WHEN strpos(snapshot, '\"last_error\":') > 0 AND strpos(snapshot, '\\u0000') = 0 "
    "THEN strpos(lower((" + _ERROR + ') COLLATE "C"), ?) > 0 END)'
)

_RETRYING = (  # quotes are escaped in a text inside JSON, so most rows are not parsed
    "finished_at IS NULL AND CASE WHEN strpos(snapshot, '\"retrying\":{') > 0 "
    "THEN snapshot::json #>> '{retrying,step_id}' IS NOT NULL ELSE false END"
)


async def find_runs(db: Db, query: port.RunQuery, limit: int) -> port.Found[port.RunHead]:
    """Return the runs that match the query."""
    if search.is_driven(query):
        driven = await _search_runs(db, query, limit)
        if driven is not None:
            return driven
    where = Where()
    if query.newest:
        where.add(_BEFORE, query.before[1], query.before[0])
    else:
        where.add("run_id > ?", query.after)
    place = None
    if query.look is not None:
        last = "run_no DESC" if query.newest else "run_id"
        ends = await read_page(
            db, "SELECT created_at, run_id, run_no FROM holdfast.runs", where, last, 1, query.look - 1
        )
        for created_at, run_id, run_no in ends:
            where.add(*(("run_no >= ?", run_no) if query.newest else ("run_id <= ?", run_id)))
            place = (created_at, run_id) if query.newest else run_id
    _add_run_conditions(where, query)
    order = "run_no DESC" if query.newest else "run_id"
    most = await most_rows(db, "octet_length(snapshot) FROM holdfast.runs", where, order, limit, query.most_bytes)
    found = await read_page(db, f"SELECT {sql.HEAD} FROM holdfast.runs", where, order, most)
    is_whole = len(found) < most == limit
    place_of = itemgetter(14, 1) if query.newest else itemgetter(1)
    return sql.found_of(found, sql.head_of, itemgetter(1), place_of, place if is_whole else None)


def _add_run_conditions(where: Where, query: port.RunQuery) -> None:
    sql.add_run_conditions(where, query, "tags <> '[]' AND tags::jsonb @> to_jsonb(ARRAY[?::text])")
    search.add_attribute_conditions(where, query, PREFIX)
    if query.retrying:
        where.add(_RETRYING)
    if query.run_ids is not None:
        where.add("run_id = ANY (?)", list(map(askable, query.run_ids)))
    for word in words_of(query.text):
        where.add(_SAYS, word, word, word)


async def _search_runs(db: Db, query: port.RunQuery, limit: int) -> port.Found[port.RunHead] | None:
    """Return the runs that match a query that an index can drive; None if no index should. See `store/search.py`."""
    found = port.Found[port.RunHead]()
    while True:
        more = await _search_part(db, search.part_of(query, found.cursor), limit - len(found))
        if more is None:
            return None if found.cursor is None else found
        found = search.joined(found, more)
        if not search.goes_on(query, found, limit):
            return found


async def _search_part(db: Db, query: port.RunQuery, limit: int) -> port.Found[port.RunHead] | None:
    look = query.look or max(search.LOOK, limit)
    driver = await _driver(db, query)
    if driver is None:
        return None
    where = Where()
    _add_run_conditions(where, query)
    rows = await _ask(db, search.heads_query(driver, look, where, limit, PREFIX))
    is_all = len(rows) == limit or driver.is_gathered
    ends = [] if is_all else await _ask(db, search.end_query(driver, look, PREFIX))
    return search.found_runs(query, rows, limit, ends[0] if ends else None, sql.text_bytes)


async def _driver(db: Db, query: port.RunQuery) -> search.Driver | None:
    order, number = query.order, 0
    if order is None:
        [[number]] = await _ask(db, (search.number_query(PREFIX, descending=True), [query.before[1], query.before[0]]))
    elif query.behind is not None:
        text = search.number_query(PREFIX, descending=order.descending)
        [[number]] = await _ask(db, (text, [query.behind[2], query.behind[1]]))
    sources = search.sources(query, PREFIX, search.beyond_number(query, number))
    counts = [(await _ask(db, search.count_query(each)))[0][0] for each in sources]
    if order is None:
        return search.newest_driver(sources, counts)
    return search.ordered_driver(query, order, number, sources, counts, PREFIX)


async def count_runs(db: Db, query: port.RunCountQuery, limit: int) -> port.Found[port.RunCount]:
    """Return how many runs match a query, by workflow and status."""
    runs = search.counted(query)
    rows, is_cut = list[Any](), False
    for part in search.count_parts(runs, await _driver(db, runs), query.look, PREFIX):
        where = Where()
        _add_run_conditions(where, runs)
        where.add(*part.condition)
        rows += await _ask(db, search.counts_query(part, where))
        is_cut = is_cut or (part.end is not None and bool(await _ask(db, part.end)))
    return search.found_counts(rows, limit, is_cut=is_cut)


async def _ask(db: Db, statement: tuple[str, list[Any]]) -> list[Any]:
    return await db.fetch(sql.numbered(statement[0]), *map(askable, statement[1]))


async def find_waits(db: Db, query: port.WaitQuery, limit: int) -> port.Found[Wait]:
    """Return the open waits that match the query."""
    where = sql.wait_conditions(query)
    select = f"SELECT {sql.WAIT} FROM holdfast.waits JOIN holdfast.runs USING (run_no)"
    found = await read_page(db, select, where, "run_id, step_id", limit)
    return sql.found_of(found, sql.wait_of, sql.wait_name, itemgetter(0, 1))


# Signals after one of a run; if that run was deleted meanwhile, those of runs created after the run before it.
_BEHIND = (
    "(run_no, inbox_seq) > "
    "(coalesce((SELECT run_no FROM holdfast.runs WHERE run_id <= ? ORDER BY run_id DESC LIMIT 1), 0), "
    "CASE WHEN EXISTS (SELECT 1 FROM holdfast.runs WHERE run_id = ?) THEN ?::bigint ELSE 1::bigint << 62 END)"
)


async def find_mailbox(db: Db, query: port.MailboxQuery, limit: int) -> port.Found[Signal]:
    """Return the signals that match the query."""
    if query.signal_id is not None and "\x00" in query.signal_id:
        return port.Found()
    where = sql.mailbox_conditions(query, "holdfast.runs", _BEHIND)
    run = "(SELECT run_id FROM holdfast.runs WHERE runs.run_no = signals.run_no)"
    size = "octet_length(payload) FROM holdfast.signals"
    limit = await most_rows(db, size, where, "run_no, inbox_seq", limit, query.most_bytes)
    found = await read_page(db, f"SELECT {run}, {sql.SIGNAL} FROM holdfast.signals", where, "run_no, inbox_seq", limit)
    place_of = itemgetter(1) if query.run_id is not None else sql.mail_place
    return sql.found_of(found, sql.mail_of, sql.mail_name, place_of)


# The whole text is searched first, because parsing the JSON takes longer.
_TASK = r"replace(task, '\u0000', '\u0001')::json"  # user text may contain a NUL, which JSON functions refuse
_MENTIONS = (
    f"""(strpos(lower(task COLLATE "C"), ?) > 0 AND (strpos(lower(({_TASK} ->> 'name') COLLATE "C"), ?) > 0 """
    f"""OR strpos(lower(({_TASK} -> 'payload')::text COLLATE "C"), ?) > 0))"""
)


async def find_tasks(db: Db, query: port.TaskQuery, limit: int) -> port.Found[Task]:
    """Return the tasks that match the query."""
    where = Where()
    where.add("task_id > ?", query.after)
    place = None
    if query.look is not None:
        ends = await read_page(db, "SELECT task_id FROM holdfast.tasks", where, "task_id", 1, query.look - 1)
        place = ends[0][0] if ends else None
        where.add_given("task_id <= ?", place)
    for word in words_of(query.text):
        where.add(_MENTIONS, in_json(word), word, in_json(word))
    sql.add_task_conditions(where, query, "holdfast.runs")
    if query.step_ids is not None:
        where.add("step_id = ANY (?)", list(map(askable, query.step_ids)))
    where.add_given("roles @> ARRAY[?::text]", query.role)
    where.add_given("due_at < ?", query.due_before)
    if query.actor is not None:
        where.add(
            "(assignee = ? OR roles && ?::text[] OR (roles = '{}' AND assignee IS NULL))",
            query.actor,
            [askable(role) for role in query.actor_roles],
        )
    most = await most_rows(db, "octet_length(task) FROM holdfast.tasks", where, "task_id", limit, query.most_bytes)
    found = await read_page(db, "SELECT task, task_id FROM holdfast.tasks", where, "task_id", most)
    is_whole = len(found) < most == limit
    place = place if is_whole else None
    return sql.found_of(found, lambda row: sql.task_of(row[0]), itemgetter(1), itemgetter(1), place)


async def stats(db: Db, now: Instant | None) -> port.Stats:
    """Return counts for operators."""
    [row] = await db.fetch(STATS, now)
    return port.Stats(
        runs=sql.with_completed(json.decode(row[9] or "{}", type=dict[str, int]), row[10]),
        completed_is_estimated=row[14],
        ready=row[0],
        leased=row[1],
        messages=row[2],
        signals=row[3],
        open_tasks=row[4],
        jobs=row[5],
        queued=row[13],
        dead_letters=row[6],
        nodes=row[7],
        oldest_ready_at=row[8],
        queues=json.decode(row[11] or "{}", type=dict[str, int]),
        leases=json.decode(row[12] or "{}", type=dict[str, int]),
    )


async def most_rows(db: Db, size: str, where: Where, order: str, limit: int, most_bytes: int | None) -> int:
    """Return how many rows fit into this many bytes together. Sizes are known without reading the values."""
    if most_bytes is None:
        return limit
    fitting = _fitting(await read_page(db, f"SELECT {size}", where, order, limit), most_bytes)
    return limit if fitting is None else fitting


def _fitting(sizes: list[Any], most_bytes: int) -> int | None:
    """Return the number of rows at which they reach this total size, or None if they do not."""
    totals = accumulate(row[0] or 0 for row in sizes)
    return next((number for number, total in enumerate(totals, 1) if total >= most_bytes), None)


async def read_page(db: Db, select: str, where: Where, order: str, limit: int, skip: int = 0) -> list[Any]:
    """Return up to `limit` rows in this order, after skipping some."""
    sql = f"{select} {where.numbered} ORDER BY {order} LIMIT {where.limit_parameter} OFFSET {skip:d}"
    return await db.fetch(sql, *(askable(value) for value in where.values(limit)))
