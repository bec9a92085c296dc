"""`claim`, `renew`, `release`, `next_due`, `take`, `beat`: who may do what, and when there is something to do.

**Where a claim starts.** The agenda is walked in the order of its places. While a long transaction keeps dead rows
from being removed, they pile up at the places of what has long been done; so every claim says where the next one of
its kind may start: at the oldest place that was alive, but never later than what may still be about to be committed.
Now and then one starts at the very beginning, so that what was committed later than anybody thought is found too.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, Raw, Struct

from holdfast.core.index_rows import ActivityRecord
from holdfast.core.instants import Instant
from holdfast.core.messages import Message
from holdfast.errors import StoreCorrupt
from holdfast.limits import MAILBOX_SIGNALS
from holdfast.store import port, sql, validation
from holdfast.store.postgres.address import Address
from holdfast.store.postgres.columns import askable, columns
from holdfast.store.postgres.dead_letters import bury_unreadable
from holdfast.store.postgres.faults import fault_of
from holdfast.store.postgres.pool import Db, Server, Session, connect, in_schema

HEAD = ", ".join(f"l.{name.strip().rpartition('.')[2]}" for name in sql.HEAD.split(","))
LOADED = (
    f"{HEAD}, l.messages, l.s_seq, l.s_name, l.s_signal, l.s_step, l.s_at, l.s_payload, l.s_received, l.s_by, "
    "l.is_whole, l.records, l.d_step, l.d_details"
)
CLAIM = f"""
SELECT c.o_now, c.o_from, {LOADED} FROM holdfast.claim_2($1, $2, $3, $4, $5) c
LEFT JOIN LATERAL holdfast.loaded_3(c.o_runs, c.o_now, {MAILBOX_SIGNALS}) l ON true
"""
LOAD = f"""
SELECT {LOADED} FROM holdfast.loaded_3(holdfast.numbers_1($2), holdfast.time_1($1), {MAILBOX_SIGNALS}) l
"""
RELEASE_JOBS = """
WITH locked AS (
    SELECT run_no, run_id FROM holdfast.runs WHERE run_id = ANY ($3::text[]) ORDER BY run_id FOR UPDATE
)
UPDATE holdfast.jobs j SET visible_at = holdfast.time_1($1), taken_by = NULL, next_attempt = t.attempt
FROM unnest($3::text[], $4::text[], $5::bigint[]) AS t (run_id, step_id, attempt) JOIN locked r ON r.run_id = t.run_id
WHERE j.run_no = r.run_no AND j.step_id = t.step_id AND j.taken_by = $2 AND j.next_attempt = t.attempt + 1
RETURNING j.run_no
"""
LOAD_ONE = f"SELECT {LOADED} FROM holdfast.loaded_3(ARRAY[$1::bigint], $2, {MAILBOX_SIGNALS}) l"
NEXT_DUE = "SELECT o_now, o_due FROM holdfast.next_due_2($1, $2, $3, $4, $5)"
RENEW = """
SELECT r.o_now, r.o_until FROM holdfast.renew_3($1, $2, $3, $4, $5, $6, $7) r
CROSS JOIN LATERAL holdfast.forget_growth_1(r.o_now)
"""
ALIVE = """
SELECT n.node, n.plans FROM holdfast.nodes n
CROSS JOIN holdfast.time_1($1) AS t (now)
WHERE n.plans IS NOT NULL AND holdfast.lease_end_1(n.lease_until, t.now) > t.now
ORDER BY n.node COLLATE "C"
"""
HAND_OVER = "SELECT o_given FROM holdfast.hand_over_2($1, $2, $3, $4)"
EXTEND = """
UPDATE holdfast.nodes n SET lease_until = greatest(n.lease_until, t.now + $3)
FROM (SELECT holdfast.time_1($1) AS now) t
WHERE n.node = $2 AND n.lease_until > t.now AND holdfast.lease_end_1(n.lease_until, t.now) > t.now
"""
MISSING = "SELECT o_plan, o_version, o_since FROM holdfast.missing_1($1, $2)"
RELEASE = "SELECT o_now, o_freed FROM holdfast.release_1($1, $2, $3)"
TAKE = "SELECT o_attempt, o_details, o_job FROM holdfast.take_1($1, $2, $3, $4, $5, $6)"
BEAT = "SELECT o_now, o_kept FROM holdfast.beat_1($1, $2, $3, $4, $5, $6, $7, $8)"

FIRST = -(2**62)
"""Before every place."""

EVERYWHERE = (FIRST,) * 4
AGAIN_AFTER = 30_000_000
"""How long claims start where something was alive, before one looks at everything again."""

ASIDE = 60_000_000
"""How long a run whose rows make no sense is left alone, so that it does not stand in the way of the others."""

Kind = tuple[str, tuple[str, ...] | None]


class Start(Struct, frozen=True):
    """Where claims of one kind start, and since when none has looked at everything."""

    places: Sequence[int]
    since: Instant


class Starts:
    """Where claims start: by the node that claims, and the plans that it knows."""

    def __init__(self) -> None:
        self._starts: dict[Kind, Start] = {}
        self._latest = 0

    def heard(self, now: Instant) -> None:
        """Take note of the time. If it was set back, places were entered behind every start: all are forgotten."""
        if now < self._latest:
            self._starts.clear()
        self._latest = now

    def of(self, kind: Kind) -> Sequence[int]:
        """Return the places to start at."""
        start = self._starts.get(kind)
        return EVERYWHERE if start is None else start.places

    def note(self, kind: Kind, places: Sequence[int], now: Instant) -> None:
        """Take note of where the next claim may start."""
        start = self._starts.get(kind)
        since = now if start is None or start.places is EVERYWHERE else start.since
        is_due = now - since >= AGAIN_AFTER
        self._starts[kind] = Start(EVERYWHERE if is_due else places, now if is_due else since)


def kind_of(node: str, plans: Sequence[port.Plan] | None) -> Kind:
    """Return what kind of claim this is."""
    return askable(node), None if plans is None else tuple(map(askable, sql.plan_keys(plans)))


async def claim(
    server: Server, starts: Starts, node: str, limit: int, plans: Sequence[port.Plan] | None, now: Instant | None
) -> list[port.LoadedRun]:
    """Take up to `limit` eligible runs and load them."""
    kind = kind_of(node, plans)
    found = await server.fetch(CLAIM, now, kind[0], limit, kind[1], starts.of(kind))
    heard, places = found[0][0], found[0][1]
    if places is None:
        raise validation.lease_expired(node)
    starts.heard(heard)
    starts.note(kind, places, heard)
    loaded = [await readable(server, tuple(row)[2:], node, heard) for row in found if row[2] is not None]
    return [run for run in loaded if run is not None]


async def load(server: Server, run_ids: Sequence[str], now: Instant | None) -> list[port.LoadedRun | None]:
    """Return the runs in the order asked for; None where missing."""
    found = await server.fetch(LOAD, now, [run_id for run_id in set(run_ids) if "\x00" not in run_id])
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


async def readable(server: Server, row: tuple[Any, ...], node: str, now: Instant) -> port.LoadedRun | None:
    """Return a run that was claimed, without what cannot be read. Poison in one run never stops another.

    A message or signal that makes no sense becomes a dead letter; a run of which anything else does is put aside.
    """
    try:
        return loaded_of(row)
    except StoreCorrupt:
        run_no = row[0]
        return await server.transact(lambda session: _repaired(session, run_no, node, now))


async def _repaired(session: Session, run_no: int, node: str, now: Instant) -> port.LoadedRun | None:
    await session.fetch("SELECT 1 FROM holdfast.runs WHERE run_no = $1 FOR UPDATE", run_no)
    await bury_unreadable(session, run_no, node, now)
    try:
        [row] = await session.fetch(LOAD_ONE, run_no, now)
        return loaded_of(row)
    except StoreCorrupt:
        await session.fetch(
            "UPDATE holdfast.runs SET lease_owner = NULL, ready_at = $2 WHERE run_no = $1", run_no, now + ASIDE
        )
        await session.fetch("SELECT holdfast.enter_1(ARRAY[$1::bigint], $2)", run_no, now)
        return None


async def next_due(
    server: Server,
    starts: Starts,
    node: str,
    plans: Sequence[port.Plan] | None,
    queues: Sequence[str],
    now: Instant | None,
) -> Instant | None:
    """Return the next instant at which a claim by this node, or a take from these queues, may find something."""
    kind = kind_of(node, plans)
    [row] = await server.fetch(NEXT_DUE, now, kind[0], kind[1], list(queues), starts.of(kind))
    starts.heard(row[0])
    due_at: Instant | None = row[1]
    return due_at


async def renew(
    server: Server,
    node: str,
    lease_ms: int,
    plans: Sequence[port.Plan] | None,
    is_start: bool,
    now: Instant | None,
) -> tuple[Instant, Instant]:
    """Give the node a lease; return the time, and the end of the lease."""
    known = None if plans is None else list(map(askable, sql.plan_keys(plans)))
    first, last = validation.lives_of(node) or (None, None)
    [[heard, until]] = await server.fetch(RENEW, now, node, lease_ms * 1_000, known, is_start, first, last)
    if until is None:
        raise validation.superseded(node)
    return heard, until


async def extend(address: Address, node: str, lease_ms: int, now: Instant | None) -> None:
    """Extend a lease that is current, on a connection of its own."""
    try:
        async with asyncio.timeout(lease_ms / 1_000):
            connection = await connect(address)
            try:
                await connection.execute(in_schema(EXTEND, address.schema), now, node, lease_ms * 1_000)
            finally:
                connection.terminate()
    except Exception as problem:
        fault = fault_of(problem, address.shown)
        if fault is None:
            raise
        raise fault.error from problem


async def find_orphaned(server: Server, late_ms: int, now: Instant | None) -> list[port.OrphanedDefinition]:
    """Return the definitions that no node alive has, of runs that have been eligible for so long."""
    found = await server.fetch(MISSING, now, late_ms * 1_000)
    return [port.OrphanedDefinition((plan_id, plan_version), since) for plan_id, plan_version, since in found]


async def release_jobs(server: Server, node: str, jobs: Sequence[port.Job], now: Instant | None) -> int:
    """Undo the take of jobs that were not begun."""
    asked = [(job.run_id, job.step_id, job.engine_attempt_id) for job in jobs]
    return len(await server.fetch(RELEASE_JOBS, now, node, *columns(asked, 3))) if asked else 0


async def take(
    server: Server,
    node: str,
    queues: Sequence[str],
    activities: Sequence[str],
    limit: int,
    visible_ms: int,
    now: Instant | None,
) -> list[port.Job]:
    """Take up to `limit` jobs: longest visible first, then in order of their runs' creation and of step ids."""
    found = await server.fetch(TAKE, now, node, list(queues), list(activities), limit, visible_ms * 1_000)
    taken = []
    for row in found:
        try:
            taken.append(sql.job_of(row))
        except StoreCorrupt:  # it stays invisible for as long as any: poison in one run never stops another
            continue
    return taken


async def beat(
    db: Db, node: str, beats: Sequence[port.Heartbeat], visible_ms: int, now: Instant | None
) -> tuple[Instant, list[bool]]:
    """Keep with the node what is still its to carry out."""
    [row] = await db.fetch(
        BEAT,
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
