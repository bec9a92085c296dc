"""`claim`, `renew`, `release`, `next_due`: who may run what, and when there is something to run."""

import sqlite3
from collections.abc import Sequence

from holdfast.core.instants import Instant
from holdfast.store import guards, port
from holdfast.store.sqlite import rows
from holdfast.store.sqlite.reading import load_numbers

# Free and ready; ready and the claimer's own; of a node whose lease has run out. Each part walks an index in order,
# so a claim reads no more rows than it takes.
ELIGIBLE = """
SELECT run_no FROM (
    SELECT * FROM (SELECT run_no, ready_at AS since FROM runs
                   WHERE lease_owner IS NULL AND ready_at <= :now ORDER BY ready_at, run_no LIMIT :limit)
    UNION ALL
    SELECT * FROM (SELECT run_no, ready_at AS since FROM runs
                   WHERE lease_owner = :node AND ready_at <= :now ORDER BY ready_at, run_no LIMIT :limit)
    UNION ALL
    SELECT * FROM (SELECT run_no, lease_until AS since FROM nodes JOIN runs ON lease_owner = node
                   WHERE lease_until <= :now AND node <> :node ORDER BY lease_until, run_no LIMIT :limit)
) ORDER BY since, run_no LIMIT :limit
"""

NEXT_DUE = """
SELECT min(due_at) FROM (
    SELECT min(ready_at) AS due_at FROM runs WHERE lease_owner IS NULL AND ready_at IS NOT NULL
    UNION ALL
    SELECT min(ready_at) FROM runs WHERE lease_owner = :node
    UNION ALL
    SELECT min(lease_until) FROM nodes WHERE node <> :node AND EXISTS (SELECT 1 FROM runs WHERE lease_owner = node)
)
"""


def check_node(db: sqlite3.Connection, node: str, now: Instant) -> None:
    """Refuse a node without a current lease."""
    if not db.execute("SELECT 1 FROM nodes WHERE node = ? AND lease_until > ?", (node, now)).fetchone():
        raise guards.lease_expired(node)


def claim(db: sqlite3.Connection, node: str, limit: int, now: Instant) -> list[port.LoadedRun]:
    """Take up to `limit` eligible runs and load them."""
    check_node(db, node, now)
    chosen = [run_no for (run_no,) in db.execute(ELIGIBLE, {"now": now, "node": node, "limit": limit})]
    db.executemany(
        "UPDATE runs SET lease_epoch = lease_epoch + (lease_owner IS NOT ?1), lease_owner = ?1 WHERE run_no = ?2",
        [(node, run_no) for run_no in chosen],
    )
    loaded = load_numbers(db, chosen, now)
    return [loaded[run_no] for run_no in chosen]


def renew(db: sqlite3.Connection, node: str, lease_ms: int, now: Instant) -> Instant:
    """Give the node a lease, or lengthen it."""
    lease_until = now + lease_ms * 1_000
    db.execute("INSERT OR REPLACE INTO nodes VALUES (?, ?)", (node, lease_until))
    return lease_until


def release(db: sqlite3.Connection, node: str, run_ids: Sequence[str] | None, now: Instant) -> int:
    """Free these runs of the node, or all of them and its lease."""
    named = "" if run_ids is None else "AND run_id IN (SELECT value FROM json_each(:run_ids))"
    freed = db.execute(
        f"UPDATE runs SET lease_owner = NULL, ready_at = min(:now, coalesce(ready_at, :now)) "
        f"WHERE lease_owner = :node {named}",
        {"now": now, "node": node, "run_ids": rows.listing(run_ids or ())},
    ).rowcount
    if run_ids is None:
        db.execute("DELETE FROM nodes WHERE node = ?", (node,))
    return freed


def next_due(db: sqlite3.Connection, node: str) -> Instant | None:
    """Return the next instant at which a claim by this node may find something."""
    due_at: Instant | None = db.execute(NEXT_DUE, {"node": node}).fetchone()[0]
    return due_at
