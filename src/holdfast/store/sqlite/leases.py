"""`claim`, `renew`, `release`, `next_due`: which node owns which runs, and when there is work; also definitions."""

import json
import sqlite3
from collections.abc import Sequence

from holdfast.core.codec import encode_text
from holdfast.core.declarations import WorkflowDeclaration
from holdfast.core.instants import Instant
from holdfast.core.plans import ANY_PLAN
from holdfast.errors import StoreCorrupt
from holdfast.limits import SUSPECT_LOSSES
from holdfast.store import decisions, port
from holdfast.store.sql import definition_of, plan_keys, plan_of
from holdfast.store.sqlite import host_locks, queries
from holdfast.store.sqlite.connection import check_unreadable
from holdfast.store.sqlite.dead_letters import unreadable_to_dead_letters
from holdfast.store.sqlite.queries import load_numbers

_IS_PLAN = "(plan_id >= 'plan:' AND plan_id < 'plan;')"
_LEVEL = """CASE WHEN instr(snapshot, '"needs":') THEN coalesce(char(10) || (snapshot ->> '$.needs'), '') ELSE '' END"""
CLAIMED_AS = (
    f"CASE WHEN {_IS_PLAN} THEN '{ANY_PLAN[0]}' ELSE plan_id END",
    f"CASE WHEN {_IS_PLAN} THEN '{ANY_PLAN[1]}' ELSE plan_version END || {_LEVEL}",
)
"""The definition by which a run is claimed: see `core.plans.claimed_as`."""

PLAN_KEY = (
    f"CASE WHEN {_IS_PLAN} THEN '{ANY_PLAN[0]}' || char(10) || '{ANY_PLAN[1]}' "
    f"ELSE plan_id || char(10) || plan_version END || {_LEVEL}"
)
"""The same as one text: see `sql.plan_keys`."""

# Each of these walks an index in order and, except for runs of other plans, reads no more rows than it returns.
FREE = """
SELECT ready_at, run_no FROM runs WHERE lease_owner IS NULL AND ready_at <= :now {known}
ORDER BY ready_at, run_no LIMIT :limit
"""
OWN = """
SELECT ready_at, run_no FROM runs WHERE lease_owner = :node AND ready_at <= :now {known}
ORDER BY ready_at, run_no LIMIT :limit
"""
EXPIRED = f"""
SELECT min(lease_until, :now) AS ended_at, node FROM nodes WHERE NOT ({queries.IS_CURRENT}) AND node <> :node
ORDER BY ended_at
"""
ORPHANED = "SELECT run_no FROM runs WHERE lease_owner = :owner {known} ORDER BY run_no LIMIT :limit"
KNOWN = f"AND ({PLAN_KEY}) IN (SELECT value FROM json_each(:plans))"

ASIDE = 60_000_000
"""How long a run with unreadable rows is deferred, so that it does not hold up others."""

NEXT_DUE = """
SELECT min(due_at) FROM (
    SELECT min(ready_at) AS due_at FROM runs WHERE lease_owner IS NULL AND ready_at IS NOT NULL {known}
    UNION ALL
    SELECT min(ready_at) FROM runs WHERE lease_owner = :node AND ready_at IS NOT NULL {known}
    UNION ALL
    SELECT min(iif({is_current}, lease_until, min(lease_until, :now))) FROM nodes
    WHERE node <> :node AND EXISTS (SELECT 1 FROM runs WHERE lease_owner = node {known})
)
"""
LOOKED_AT = 1_000
"""How many runs are examined to find those that no node can run: they are among those that have waited longest."""

# Nodes of versions that publish no definitions count as having all of them.
MISSING = f"""
SELECT plan_id, plan_version, since FROM (
    SELECT plan_id, plan_version, min(since) AS since FROM (
        SELECT * FROM (
            SELECT {CLAIMED_AS[0]} AS plan_id, {CLAIMED_AS[1]} AS plan_version, ready_at AS since FROM runs
            WHERE lease_owner IS NULL AND ready_at <= :late ORDER BY ready_at LIMIT {LOOKED_AT}
        ) UNION ALL SELECT * FROM (
            SELECT {CLAIMED_AS[0]}, {CLAIMED_AS[1]}, min(lease_until, :now)
            FROM nodes CROSS JOIN runs ON lease_owner = node
            WHERE NOT ({queries.IS_CURRENT}) AND min(lease_until, :now) <= :late LIMIT {LOOKED_AT}
        )
    ) GROUP BY 1, 2
) WHERE NOT EXISTS (  -- what a node has is compared without the level of a run
    SELECT 1 FROM nodes LEFT JOIN node_plans USING (node)
    WHERE {queries.IS_CURRENT} AND (plans IS NULL OR (
        plan_id || char(10) || substr(plan_version, 1, instr(plan_version || char(10), char(10)) - 1)
    ) IN (SELECT value FROM json_each(plans)))
) ORDER BY since, plan_id, plan_version
"""
EXTEND = f"UPDATE nodes SET lease_until = max(lease_until, :until) WHERE node = :node AND {queries.IS_CURRENT}"
END_LIVES = (
    "UPDATE nodes SET lease_until = min(lease_until, :now) WHERE node > :first AND node < :last AND node <> :node",
    """UPDATE jobs SET visible_at = :now
    WHERE taken_by > :first AND taken_by < :last AND taken_by <> :node AND visible_at > :now""",
)
IS_SUPERSEDED = f"""
SELECT 1 FROM nodes WHERE node > :first AND node < :last AND node <> :node AND {queries.IS_CURRENT}
    AND NOT EXISTS (SELECT 1 FROM (SELECT lease_until FROM nodes WHERE node = :node) WHERE {queries.IS_CURRENT})
"""
NEXT_VISIBLE = "SELECT min(visible_at) FROM jobs WHERE queue = ? AND visible_at IS NOT NULL"


def claim(
    db: sqlite3.Connection, node: str, limit: int, plans: Sequence[port.Plan] | None, now: Instant
) -> list[port.LoadedRun]:
    """Claim and load up to `limit` eligible runs."""
    queries.check_node(db, node, now)
    chosen = _eligible(db, node, limit, plans, now)
    loaded = take_over(db, chosen, node, now)
    return [loaded[run_no] for run_no in chosen if run_no in loaded]


def take_over(db: sqlite3.Connection, chosen: list[int], node: str, now: Instant) -> dict[int, port.LoadedRun]:
    """Make the node the owner of these runs, and load them. Unreadable runs are deferred."""
    db.executemany(
        "UPDATE runs SET lease_epoch = lease_epoch + (lease_owner IS NOT ?1), lease_owner = ?1, "
        f"losses = losses + (losses < {SUSPECT_LOSSES} AND lease_owner <> ?1 AND lease_owner IS NOT NULL), "
        "ready_at = min(?2, coalesce(ready_at, ?2)) WHERE run_no = ?3",
        [(node, now, run_no) for run_no in chosen],
    )
    try:
        return load_numbers(db, chosen, now)
    except (StoreCorrupt, sqlite3.OperationalError) as problem:
        check_unreadable(problem)
        return _load_each(db, chosen, node, now)


def _eligible(
    db: sqlite3.Connection, node: str, limit: int, plans: Sequence[port.Plan] | None, now: Instant
) -> list[int]:
    """Return the runs to claim: longest eligible first, then in order of creation."""
    known = "" if plans is None else KNOWN
    asked = {"now": now, "node": node, "limit": limit, "plans": queries.listing(plan_keys(plans or ()))}
    found = (
        db.execute(FREE.format(known=known), asked).fetchall() + db.execute(OWN.format(known=known), asked).fetchall()
    )
    orphans: list[tuple[Instant, int]] = []
    for lease_until, owner in db.execute(EXPIRED, {"now": now, "node": node}).fetchall():
        if len(orphans) >= limit and orphans[-1][0] < lease_until:
            break  # later nodes expired later
        left = db.execute(ORPHANED.format(known=known), {**asked, "owner": owner})
        orphans += [(lease_until, run_no) for (run_no,) in left]
    found += orphans
    return [run_no for _, run_no in sorted(found)[:limit]]


def _load_each(db: sqlite3.Connection, chosen: list[int], node: str, now: Instant) -> dict[int, port.LoadedRun]:
    """Load run by run, leaving out what cannot be read. A damaged run never stops others.

    An unreadable message or signal becomes a dead letter; a run with any other damage is deferred.
    """
    loaded: dict[int, port.LoadedRun] = {}
    for run_no in chosen:
        try:
            loaded |= _load_one(db, run_no, node, now)
        except (StoreCorrupt, sqlite3.OperationalError) as problem:
            check_unreadable(problem)
            db.execute("UPDATE runs SET lease_owner = NULL, ready_at = ? WHERE run_no = ?", (now + ASIDE, run_no))
    return loaded


def _load_one(db: sqlite3.Connection, run_no: int, node: str, now: Instant) -> dict[int, port.LoadedRun]:
    try:
        return load_numbers(db, [run_no], now)
    except (StoreCorrupt, sqlite3.OperationalError) as problem:
        check_unreadable(problem)
        unreadable_to_dead_letters(db, run_no, node, now)
        return load_numbers(db, [run_no], now)


def renew(
    db: sqlite3.Connection,
    node: str,
    lease_ms: int,
    plans: Sequence[port.Plan] | None,
    is_start: bool,
    now: Instant,
) -> Instant:
    """Give the node a lease, and delete expired nodes that own nothing."""
    lease_until = now + lease_ms * 1_000
    first, last = decisions.lives_of(node) or ("", "")
    lives = {"node": node, "first": first, "last": last, "now": now}
    if first and is_start:
        for end_others in (*END_LIVES, host_locks.END_LIVES):
            db.execute(end_others, lives)
    elif first and db.execute(IS_SUPERSEDED, lives).fetchone():
        raise decisions.superseded(node)
    db.execute("INSERT OR REPLACE INTO nodes VALUES (?, ?)", (node, lease_until))
    if plans is not None:
        db.execute(
            "INSERT INTO node_plans VALUES (?, ?) "
            "ON CONFLICT DO UPDATE SET plans = excluded.plans WHERE plans <> excluded.plans",
            (node, queries.listing(plan_keys(plans))),
        )
    db.execute(
        f"DELETE FROM nodes WHERE NOT ({queries.IS_CURRENT}) "
        "AND NOT EXISTS (SELECT 1 FROM runs WHERE lease_owner = node)",
        {"now": now},
    )
    return lease_until


def release(db: sqlite3.Connection, node: str, run_ids: Sequence[str] | None, now: Instant) -> int:
    """Release these runs of the node, or all of them and its lease."""
    named = "" if run_ids is None else "AND run_id IN (SELECT value FROM json_each(:run_ids))"
    freed = db.execute(
        f"UPDATE runs SET lease_owner = NULL, lease_epoch = lease_epoch + 1, "
        f"ready_at = min(:now, coalesce(ready_at, :now)) WHERE lease_owner = :node {named}",
        {"now": now, "node": node, "run_ids": queries.listing(run_ids or ())},
    ).rowcount
    if run_ids is None:
        db.execute("DELETE FROM nodes WHERE node = ?", (node,))
    return freed


def hand_over(db: sqlite3.Connection, node: str, run_ids: Sequence[str], to: str, now: Instant) -> list[str]:
    """Give these runs of the node to another node, if that has a lease; return those that were given."""
    given = db.execute(
        "UPDATE runs SET lease_owner = :to, lease_epoch = lease_epoch + 1, "
        "ready_at = min(:now, coalesce(ready_at, :now)) "
        "WHERE run_id IN (SELECT value FROM json_each(:run_ids)) AND lease_owner = :node AND :node <> :to "
        f"AND EXISTS (SELECT 1 FROM nodes WHERE nodes.node = :to AND {queries.IS_CURRENT}) RETURNING run_id",
        {"to": to, "now": now, "run_ids": queries.listing(run_ids), "node": node},
    )
    return sorted(run_id for (run_id,) in given.fetchall())


def find_nodes(db: sqlite3.Connection, now: Instant) -> list[port.NodePlans]:
    """Return what the nodes with a current lease have published."""
    said = db.execute(
        f"SELECT node, plans FROM nodes JOIN node_plans USING (node) WHERE {queries.IS_CURRENT} ORDER BY node",
        {"now": now},
    )
    return [port.NodePlans(node, frozenset(map(plan_of, json.loads(plans)))) for node, plans in said]


def next_due(
    db: sqlite3.Connection, node: str, plans: Sequence[port.Plan] | None, queues: Sequence[str], now: Instant
) -> Instant | None:
    """Return the next instant at which a claim by this node, or `acquire_jobs` from the queues, may find something."""
    known = "" if plans is None else KNOWN
    asked = {"node": node, "plans": queries.listing(plan_keys(plans or ())), "now": now}
    found = [db.execute(NEXT_DUE.format(known=known, is_current=queries.IS_CURRENT), asked).fetchone()[0]]
    found += [db.execute(NEXT_VISIBLE, (queue,)).fetchone()[0] for queue in queues]
    return min((due_at for due_at in found if due_at is not None), default=None)


def find_orphaned(db: sqlite3.Connection, late_ms: int, now: Instant) -> list[port.OrphanedDefinition]:
    """Return the definitions that no live node has although runs of them have been eligible this long."""
    found = db.execute(MISSING, {"now": now, "late": now - late_ms * 1_000})
    return [port.OrphanedDefinition((plan_id, plan_version), since) for plan_id, plan_version, since in found]


_PUBLISH_DEFINITION = (
    "INSERT INTO definitions (plan_id, plan_version, definition) VALUES (?, ?, ?) ON CONFLICT DO UPDATE "
    "SET definition = excluded.definition WHERE definition <> excluded.definition"
)
_FIND_DEFINITIONS = (
    "SELECT plan_id, plan_version, definition FROM definitions "
    "WHERE plan_id || char(10) || plan_version IN (SELECT value FROM json_each(?))"
)


def publish_definitions(db: sqlite3.Connection, definitions: Sequence[WorkflowDeclaration]) -> None:
    """Store definitions, replacing those of the same versions."""
    db.executemany(_PUBLISH_DEFINITION, [(one.plan_id, one.plan_version, encode_text(one)) for one in definitions])


def find_definitions(db: sqlite3.Connection, plans: Sequence[port.Plan]) -> list[WorkflowDeclaration | None]:
    """Return the definitions in the requested order; None for those that do not exist."""
    found = {
        (row[0], row[1]): definition_of(row[2])
        for row in db.execute(_FIND_DEFINITIONS, (queries.listing(plan_keys(plans)),))
    }
    return [found.get(plan) for plan in plans]
