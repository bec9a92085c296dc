"""`purge`: what retention deletes, and what it must not touch. Also the archive locations of deleted runs."""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from holdfast.core.audit import AuditEntry
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
from holdfast.store.postgres import audit, bus, plans
from holdfast.store.postgres.columns import askable, columns
from holdfast.store.postgres.pool import Db, Transaction
from holdfast.store.postgres.queries import read_page
from holdfast.store.sql import Where

# A purge deletes the oldest first, in the order of an index: the cost of a batch does not depend on how much is left.
_FAMILY_HAS_ENDED = """
NOT EXISTS (SELECT 1 FROM holdfast.runs p WHERE p.run_id = runs.parent_run_id AND p.finished_at IS NULL)
    AND NOT EXISTS (SELECT 1 FROM holdfast.runs c WHERE c.parent_run_id = runs.run_id AND c.finished_at IS NULL)
"""
_GONE = (
    "SELECT run_no, run_id, created_at FROM holdfast.runs {where} ORDER BY finished_at, run_id LIMIT {limit} "
    "FOR UPDATE OF runs"
)
_TASKS = (
    "SELECT task_id FROM holdfast.tasks JOIN holdfast.runs USING (run_no) {where} "
    "ORDER BY finished_at, run_id, task_id LIMIT {limit}"
)
_STATES = (
    "SELECT run_no FROM holdfast.runs {where} AND snapshot IS NOT NULL ORDER BY finished_at, run_id LIMIT {limit} "
    "FOR UPDATE"
)
_EXPIRED = (
    "SELECT run_no, name, signal_id FROM holdfast.acceptance_records JOIN holdfast.runs USING (run_no) {where} "
    "ORDER BY expires_at, run_id, name, signal_id LIMIT {limit}"
)
_LETTERS = (
    "SELECT letter_id FROM holdfast.dead_letters JOIN holdfast.runs USING (run_no) {where} "
    "ORDER BY settled_at, letter_id LIMIT {limit}"
)
_INDEX = (
    "SELECT run_id, created_at FROM holdfast.archived_runs AS runs {where} "
    "ORDER BY archived_at, run_id, created_at LIMIT {limit}"
)
_BELONGING = (
    *("events", "signals", "acceptance_records", "tasks", "waits", "messages", "activity_records", "jobs"),
    *("dead_letters", "agenda", "plan_uses", "run_attributes", "streams", "stream_writers", "stream_segments", "runs"),
)
# One round trip, because others wait for the locks of a purge. No table refers to another.
_DELETE = (
    "WITH "
    + ", ".join(f"of_{table} AS (DELETE FROM holdfast.{table} WHERE run_no = ANY ($1))" for table in _BELONGING)
    + " SELECT 1"
)
_REMEMBER = (
    f"INSERT INTO holdfast.archived_runs ({sql.ARCHIVED}) SELECT * FROM unnest($1::text[], $2::text[], $3::text[], "
    "$4::text[], $5::text[], $6::text[], $7::text[], $8::bigint[], $9::bigint[], $10::bigint[], $11::text[], "
    "$12::bigint[], $13::bigint[], $14::bigint[]) ON CONFLICT (run_id, created_at) DO UPDATE SET "
    'object_key = excluded.object_key, "offset" = excluded."offset", size_bytes = excluded.size_bytes, '
    "archived_at = excluded.archived_at"
)
_SIZES = (
    "SELECT run_no, sum(octet_length(data)) + coalesce((SELECT sum(size) FROM holdfast.streams s "
    "WHERE s.run_no = e.run_no), 0) FROM holdfast.events e WHERE run_no = ANY ($1) GROUP BY run_no"
)
_LONG = """
SELECT run_no FROM holdfast.runs WHERE run_no = ANY ($1) AND version > $2
    AND version - (SELECT min(run_seq) FROM holdfast.events e WHERE e.run_no = runs.run_no) >= $2
"""
# This walks the first entries of the primary key: its cost does not depend on the length of the history.
_DELETE_PART = """
DELETE FROM holdfast.events WHERE run_no = $1
    AND run_seq < (SELECT min(run_seq) FROM holdfast.events WHERE run_no = $1) + $2
"""
_COUNTED = ("events", "signals", "acceptance_records", "tasks", "dead_letters")


class _Selection:
    """The rows that one purge covers: at most `limit` of each kind, and one more that shows there are others."""

    def __init__(self, db: Transaction, policy: PurgePolicy, now: Instant) -> None:
        self._db = db
        self._policy = policy
        self._now = now
        self.doomed: list[int] = []

    @property
    def _all_go(self) -> bool:
        """Whether all named runs are deleted completely: then nothing is left of them to search for."""
        return self._policy.run_ids is not None and 0 < len(self._policy.run_ids) <= len(self.doomed)

    async def rows(self, select: str, column: str, window_ms: int | None, *conditions: str) -> list[Any]:
        """Return the rows whose instant in this column is past the window, oldest first."""
        if window_ms is None or (select is not _INDEX and self._all_go):
            return []
        policy, where = self._policy, Where()
        where.add(f"{column} <= ?", self._now - window_ms * 1_000)
        where.add_given("runs.tenant = ?", askable(policy.tenant))
        if policy.run_ids is not None:
            where.add("runs.run_id = ANY (?)", list(map(askable, policy.run_ids)))
        if self.doomed and select is not _INDEX:
            where.add("runs.run_no <> ALL (?)", self.doomed)
        for condition in conditions:
            where.add(condition)
        text = select.format(where=where.numbered, limit=where.limit_parameter)
        return await self._db.fetch(text, *where.values(policy.limit + 1))


async def purge(
    transaction: Transaction, policy: PurgePolicy, given: Instant | None, entry: AuditEntry | None = None
) -> PurgeReport:
    """Delete, or with `dry_run` only count, what the policy allows."""
    limit, tenant = policy.limit, askable(policy.tenant)
    [[now]] = await transaction.fetch("SELECT holdfast.time_1($1)", given)
    selection = _Selection(transaction, policy, now)
    held = bus.held(now - policy.sink_hold_ms * 1_000)
    gone = await selection.rows(_GONE, "runs.finished_at", policy.finished_run_ms, _FAMILY_HAS_ENDED, f"NOT {held}")
    fit = limit
    if policy.most_bytes is not None:
        long = set[int]() if policy.dry_run else await _long(transaction, gone[:limit])
        if gone and gone[0][0] in long:
            return await _delete_part(transaction, policy, gone[0], now, entry)
        fit = next((place for place, row in enumerate(gone[:limit]) if row[0] in long), limit)
        fit = await _within_bytes(transaction, gone[:fit], policy.most_bytes)
    has_larger, gone = fit < len(gone), gone[:fit]
    doomed = selection.doomed = [run_no for run_no, _, _ in gone]
    tasks = await selection.rows(_TASKS, "runs.finished_at", policy.task_ms)
    states = await selection.rows(_STATES, "runs.finished_at", policy.runtime_state_ms)
    expired = await selection.rows(_EXPIRED, "expires_at", 0)
    letters = await selection.rows(_LETTERS, "settled_at", policy.dead_letter_ms, "settled IS NOT NULL")
    archived = await selection.rows(_INDEX, "runs.archived_at", policy.archived_run_ms)
    entries = (
        []
        if policy.audit_ms is None
        else await audit.old(
            transaction,
            now - policy.audit_ms * 1_000,
            limit + 1,
            tenant,
            None if policy.run_ids is None else list(map(askable, policy.run_ids)),
        )
    )
    bodies = await plans.unused(transaction, policy, doomed, now)
    belonging = await _count(transaction, doomed)
    outbox, has_more_entries = await bus.purge(transaction, policy, doomed, now)
    report = PurgeReport(
        runs=len(doomed),
        events=belonging["events"],
        signals=belonging["signals"],
        tasks=belonging["tasks"] + len(tasks[:limit]),
        runtime_states=len(states[:limit]),
        acceptance_records=belonging["acceptance_records"] + len(expired[:limit]),
        dead_letters=belonging["dead_letters"] + len(letters[:limit]),
        audit_entries=len(entries[:limit]),
        tokens=await _tokens(transaction, tenant) if policy.tokens and tenant is not None else 0,
        plans=len(bodies[:limit]),
        archived_runs=len(archived[:limit]),
        outbox=outbox,
        stale_runs=await _stale(transaction, policy, now),
        has_more=has_more_entries
        or has_larger
        or max(map(len, (gone, tasks, states, expired, letters, archived, entries, bodies))) > limit,
    )
    if policy.dry_run:
        return report
    await _delete_runs(transaction, policy, gone[:limit], now)
    await _delete_parts(transaction, tasks[:limit], states[:limit], letters[:limit], archived[:limit])
    if expired:
        await _forget(transaction, expired[:limit], now)
    if entries:
        await audit.forget(transaction, entries[:limit])
    if bodies or policy.plans:
        await plans.forget(transaction, bodies[:limit], policy)
    if policy.tokens:
        await transaction.fetch("DELETE FROM holdfast.access_tokens WHERE tenant = $1", tenant)
    if entry is not None:
        await audit.append(transaction, [decisions.purge_entry(entry, report, now)])
    return report


async def _long(db: Db, gone: list[Any]) -> set[int]:
    """Return those of these runs that have more events than one commit deletes."""
    asked = [run_no for run_no, _, _ in gone]
    return {row[0] for row in await db.fetch(_LONG, asked, decisions.PART_EVENTS)} if asked else set()


async def _delete_part(
    transaction: Transaction, policy: PurgePolicy, row: Any, now: Instant, entry: AuditEntry | None
) -> PurgeReport:
    """Delete only the oldest events of a run that is to be deleted. Its archive location is stored immediately."""
    run_no, run_id, created_at = row
    outbox = await bus.purge_of(transaction, policy, [run_no])  # as with their run: no sink needs them
    deleted = await transaction.fetch(f"{_DELETE_PART} RETURNING 1", run_no, decisions.PART_EVENTS)
    await note_archived(transaction, decisions.archived_of(policy, {run_id: created_at}, now))
    report = PurgeReport(events=len(deleted), outbox=outbox, has_more=True)
    if entry is not None:
        await audit.append(transaction, [decisions.purge_entry(entry, report, now)])
    return report


async def _within_bytes(db: Transaction, gone: list[Any], most: int) -> int:
    """Return how many of these runs have no more than this many bytes of events together."""
    sizes = {row[0]: int(row[1]) for row in await db.fetch(_SIZES, [run_no for run_no, _, _ in gone])}
    return decisions.within_bytes((sizes.get(run_no, 0) for run_no, _, _ in gone), most)


async def _delete_runs(transaction: Transaction, policy: PurgePolicy, gone: list[Any], now: Instant) -> None:
    """Delete runs with everything that belongs to them, and store their archive locations."""
    if not gone:
        return
    doomed = [run_no for run_no, _, _ in gone]
    await transaction.fetch(_DELETE, doomed)
    runs = decisions.archived_of(policy, {run_id: created_at for _, run_id, created_at in gone}, now)
    await note_archived(transaction, runs)


async def note_archived(transaction: Transaction, runs: Sequence[ArchivedRun]) -> None:
    """Store the archive locations of deleted runs."""
    if runs:
        await transaction.fetch(_REMEMBER, *columns([sql.archived_row(run) for run in runs], 14))


async def _delete_parts(
    transaction: Transaction, tasks: list[Any], states: list[Any], letters: list[Any], archived: list[Any]
) -> None:
    """Delete tasks, snapshots, dead letters, and archive locations."""
    for statement, rows in (
        ("DELETE FROM holdfast.tasks WHERE task_id = ANY ($1)", tasks),
        ("UPDATE holdfast.runs SET snapshot = NULL WHERE run_no = ANY ($1)", states),
        ("DELETE FROM holdfast.dead_letters WHERE letter_id = ANY ($1)", letters),
    ):
        if rows:
            await transaction.fetch(statement, [row[0] for row in rows])
    if archived:
        await transaction.fetch(
            "DELETE FROM holdfast.archived_runs a USING unnest($1::text[], $2::bigint[]) AS x (run_id, created_at) "
            "WHERE a.run_id = x.run_id AND a.created_at = x.created_at",
            [row[0] for row in archived],
            [row[1] for row in archived],
        )


async def find_finished(db: Db, query: FinishedRunQuery, limit: int) -> Found[RunHead]:
    """Return the finished runs that could be deleted."""
    where = Where()
    where.add("finished_at <= ?", query.until)
    where.add("finished_at >= ?", query.after[0])
    where.add("(finished_at, run_id) > (?, ?)", *query.after)
    place, order = None, "finished_at, run_id"
    if query.look is not None:
        select = "SELECT finished_at, run_id FROM holdfast.runs"
        ends = await read_page(db, select, where, order, 1, query.look - 1)
        place = (ends[0][0], ends[0][1]) if ends else None
    if place is not None:
        where.add("finished_at <= ?", place[0])
        where.add("(finished_at, run_id) <= (?, ?)", *place)
    where.add_given("tenant = ?", query.tenant)
    where.add_given("plan_id = ?", query.workflow)
    where.add_given("status = ?", query.status)
    where.add(_FAMILY_HAS_ENDED)
    if query.held_after is not None:
        where.add(f"NOT {bus.held(query.held_after)}")
    found = await read_page(db, f"SELECT {sql.HEAD} FROM holdfast.runs", where, order, limit)
    return sql.found_of(found, sql.head_of, itemgetter(1), itemgetter(16, 1), place if len(found) < limit else None)


async def find_archived(db: Db, query: ArchivedRunQuery, limit: int) -> Found[ArchivedRun]:
    """Return the archived runs that match the query, last to end first."""
    select = f"SELECT {sql.ARCHIVED} FROM holdfast.archived_runs"
    found = await read_page(db, select, sql.archived_conditions(query), "finished_at DESC, run_id DESC", limit)
    return sql.found_of(found, sql.archived_run_of, itemgetter(0), itemgetter(9, 0))


async def _forget(transaction: Transaction, expired: list[Any], now: Instant) -> None:
    """Delete acceptance records, except those that were renewed meanwhile."""
    await transaction.fetch(
        "DELETE FROM holdfast.acceptance_records a USING unnest($1::bigint[], $2::text[], $3::text[]) "
        "AS x (run_no, name, signal_id) WHERE a.run_no = x.run_no AND a.name = x.name AND a.signal_id = x.signal_id "
        "AND a.expires_at <= $4",
        [row[0] for row in expired],
        [row[1] for row in expired],
        [row[2] for row in expired],
        now,
    )


async def _count(db: Db, doomed: list[int]) -> dict[str, int]:
    """Return how many rows of each kind these runs have."""
    if not doomed:
        return dict.fromkeys(_COUNTED, 0)
    counts = ", ".join(f"(SELECT count(*) FROM holdfast.{table} WHERE run_no = ANY ($1))" for table in _COUNTED)
    [row] = await db.fetch(f"SELECT {counts}", doomed)
    return dict(zip(_COUNTED, map(int, row), strict=True))


async def _tokens(db: Db, tenant: str) -> int:
    [[count]] = await db.fetch("SELECT count(*) FROM holdfast.access_tokens WHERE tenant = $1", tenant)
    return int(count)


async def _stale(db: Db, policy: PurgePolicy, now: Instant) -> int:
    if policy.stale_run_ms is None:
        return 0
    where = Where()
    where.add("finished_at IS NULL AND updated_at <= ?", now - policy.stale_run_ms * 1_000)
    where.add_given("tenant = ?", askable(policy.tenant))
    if policy.run_ids is not None:
        where.add("run_id = ANY (?)", list(map(askable, policy.run_ids)))
    [[count]] = await db.fetch(f"SELECT count(*) FROM holdfast.runs {where.numbered}", *where.values(0)[:-1])
    return int(count)
