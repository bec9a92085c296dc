"""`claim`, `renew`, `release`, `next_due`: which node owns which runs, and when there is work; also definitions.

**Where a claim starts.** A claim reads the agenda in the order of its positions. While a long transaction prevents the
removal of dead rows, they accumulate at the positions of finished work. So every claim returns where the next one of
its kind may start: at the oldest live position, but never after anything that may still be about to be committed. From
time to time a claim starts at the very beginning, so that it also finds what was committed later than expected.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from holdfast.core.codec import encode_text
from holdfast.core.declarations import WorkflowDeclaration
from holdfast.core.instants import Instant
from holdfast.errors import StoreCorrupt
from holdfast.limits import MAILBOX_SIGNALS
from holdfast.store import decisions, port, sql
from holdfast.store.postgres import host_locks, queries
from holdfast.store.postgres.address import Address
from holdfast.store.postgres.columns import askable
from holdfast.store.postgres.dead_letters import unreadable_to_dead_letters
from holdfast.store.postgres.faults import fault_of
from holdfast.store.postgres.pool import Db, Pool, Transaction, connect, in_schema

CLAIM = f"""
SELECT c.o_now, c.o_from, {queries.LOADED} FROM holdfast.claim_2($1, $2, $3, $4, $5) c
LEFT JOIN LATERAL holdfast.loaded_3(c.o_runs, c.o_now, {MAILBOX_SIGNALS}) l ON true
"""
LOAD_ONE = f"SELECT {queries.LOADED} FROM holdfast.loaded_3(ARRAY[$1::bigint], $2, {MAILBOX_SIGNALS}) l"
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
ORPHANED = "SELECT o_plan, o_version, o_since FROM holdfast.missing_2($1, $2)"
RELEASE = "SELECT o_now, o_freed FROM holdfast.release_1($1, $2, $3)"

FIRST = -(2**62)
"""Before every position."""

EVERYWHERE = (FIRST,) * 4
AGAIN_AFTER = 30_000_000
"""How long claims start at the oldest live position, before one reads everything again."""

ASIDE = 60_000_000
"""How long a run with unreadable rows is deferred, so that it does not hold up others."""

Kind = tuple[str, tuple[str, ...] | None]


class Start(Struct, frozen=True):
    """Where claims of one kind start, and since when none of them has read everything."""

    places: Sequence[int]
    since: Instant


class Starts:
    """Where claims start, by the claiming node and its definitions."""

    def __init__(self) -> None:
        self._starts: dict[Kind, Start] = {}
        self._latest = 0

    def heard(self, now: Instant) -> None:
        """Record the server's time. If it was set back, there are positions before every start: all are dropped."""
        if now < self._latest:
            self._starts.clear()
        self._latest = now

    def of(self, kind: Kind) -> Sequence[int]:
        """Return the positions to start at."""
        start = self._starts.get(kind)
        return EVERYWHERE if start is None else start.places

    def note(self, kind: Kind, places: Sequence[int], now: Instant) -> None:
        """Record where the next claim may start."""
        start = self._starts.get(kind)
        since = now if start is None or start.places is EVERYWHERE else start.since
        is_due = now - since >= AGAIN_AFTER
        self._starts[kind] = Start(EVERYWHERE if is_due else places, now if is_due else since)


def kind_of(node: str, plans: Sequence[port.Plan] | None) -> Kind:
    """Return the kind of this claim."""
    return askable(node), None if plans is None else tuple(map(askable, sql.plan_keys(plans)))


async def claim(
    pool: Pool, starts: Starts, node: str, limit: int, plans: Sequence[port.Plan] | None, now: Instant | None
) -> tuple[Instant, list[port.LoadedRun]]:
    """Claim and load up to `limit` eligible runs; also return the server's time."""
    kind = kind_of(node, plans)
    found = await pool.fetch(CLAIM, now, kind[0], limit, kind[1], starts.of(kind))
    heard, places = found[0][0], found[0][1]
    if places is None:
        raise decisions.lease_expired(node)
    starts.heard(heard)  # first: a time that was set back invalidates positions
    starts.note(kind, places, heard)
    loaded = [await readable(pool, tuple(row)[2:], node, heard) for row in found if row[2] is not None]
    return heard, [run for run in loaded if run is not None]


async def readable(pool: Pool, row: tuple[Any, ...], node: str, now: Instant) -> port.LoadedRun | None:
    """Return a claimed run, leaving out what cannot be read. A damaged run never stops others.

    An unreadable message or signal becomes a dead letter; a run with any other damage is deferred.
    """
    try:
        return queries.loaded_of(row)
    except StoreCorrupt:
        run_no = row[0]
        return await pool.transact(lambda transaction: _repaired(transaction, run_no, node, now))


async def _repaired(transaction: Transaction, run_no: int, node: str, now: Instant) -> port.LoadedRun | None:
    await transaction.fetch("SELECT 1 FROM holdfast.runs WHERE run_no = $1 FOR UPDATE", run_no)
    await unreadable_to_dead_letters(transaction, run_no, node, now)
    try:
        [row] = await transaction.fetch(LOAD_ONE, run_no, now)
        return queries.loaded_of(row)
    except StoreCorrupt:
        await transaction.fetch(
            "UPDATE holdfast.runs SET lease_owner = NULL, ready_at = $2 WHERE run_no = $1", run_no, now + ASIDE
        )
        await transaction.fetch("SELECT holdfast.enter_1(ARRAY[$1::bigint], $2)", run_no, now)
        return None


async def next_due(
    pool: Pool,
    starts: Starts,
    node: str,
    plans: Sequence[port.Plan] | None,
    queues: Sequence[str],
    now: Instant | None,
) -> tuple[Instant, Instant | None]:
    """Return the time, and the next instant at which a claim here, or `acquire_jobs`, may find something."""
    kind = kind_of(node, plans)
    [row] = await pool.fetch(NEXT_DUE, now, kind[0], kind[1], list(queues), starts.of(kind))
    return row[0], row[1]


async def renew(
    pool: Pool,
    node: str,
    lease_ms: int,
    plans: Sequence[port.Plan] | None,
    is_start: bool,
    now: Instant | None,
) -> tuple[Instant, Instant]:
    """Give the node a lease; return the time, and the end of the lease."""
    known = None if plans is None else list(map(askable, sql.plan_keys(plans)))
    first, last = decisions.lives_of(node) or (None, None)
    [[heard, until]] = await pool.fetch(RENEW, now, node, lease_ms * 1_000, known, is_start, first, last)
    if until is None:
        raise decisions.superseded(node)
    if is_start and first is not None:
        await host_locks.end_lives(pool, node, heard)
    return heard, until


async def extend(address: Address, node: str, lease_ms: int, now: Instant | None) -> None:
    """Extend a current lease, on a separate connection."""
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


async def find_orphaned(pool: Pool, late_ms: int, now: Instant | None) -> list[port.OrphanedDefinition]:
    """Return the definitions that no live node has although runs of them have been eligible this long."""
    found = await pool.fetch(ORPHANED, now, late_ms * 1_000)
    return [port.OrphanedDefinition((plan_id, plan_version), since) for plan_id, plan_version, since in found]


_PUBLISH_DEFINITIONS = """
INSERT INTO holdfast.definitions AS d (plan_id, plan_version, definition)
SELECT x.plan_id, x.plan_version, x.definition
FROM unnest($1::text[], $2::text[], $3::text[]) AS x (plan_id, plan_version, definition)
ORDER BY x.plan_id, x.plan_version
ON CONFLICT (plan_id, plan_version) DO UPDATE SET definition = excluded.definition
WHERE d.definition <> excluded.definition
"""
_FIND_DEFINITIONS = """
SELECT d.plan_id, d.plan_version, d.definition FROM unnest($1::text[], $2::text[]) AS x (plan_id, plan_version)
JOIN holdfast.definitions d ON d.plan_id = x.plan_id AND d.plan_version = x.plan_version
"""


async def publish_definitions(db: Db, definitions: Sequence[WorkflowDeclaration]) -> None:
    """Store definitions, replacing those of the same versions."""
    last = {(one.plan_id, one.plan_version): one for one in definitions}.values()
    given = [one.plan_id for one in last], [one.plan_version for one in last], [encode_text(one) for one in last]
    await db.fetch(_PUBLISH_DEFINITIONS, *given)


async def find_definitions(db: Db, plans: Sequence[port.Plan]) -> list[WorkflowDeclaration | None]:
    """Return the definitions in the requested order; None for those that do not exist."""
    asked = list(dict.fromkeys((askable(plan_id), askable(version)) for plan_id, version in plans))
    rows = await db.fetch(_FIND_DEFINITIONS, [plan_id for plan_id, _ in asked], [version for _, version in asked])
    found = {(row[0], row[1]): sql.definition_of(row[2]) for row in rows}
    return [found.get(plan) for plan in plans]
