"""Plans in the file: their bodies by hash, and the registered versions."""

import sqlite3
from typing import Any

from msgspec.structs import replace

from holdfast.core.instants import Instant
from holdfast.core.plans import RegisteredPlan
from holdfast.store import decisions
from holdfast.store.queries import Found, PlanQuery
from holdfast.store.sql import Where, plan_order, registered_plan_of
from holdfast.store.sqlite import schedules
from holdfast.store.types import PurgePolicy

COLUMNS = "tenant, plan_id, plan_version, sha256, uri, registered_by, registered_at"

_UNUSED = """
SELECT tenant, sha256 FROM plan_bodies AS b WHERE put_at <= :until AND (:tenant IS NULL OR tenant = :tenant)
    AND (:plans OR NOT EXISTS (SELECT 1 FROM plans AS p WHERE p.tenant = b.tenant AND p.sha256 = b.sha256))
    AND NOT EXISTS (
        SELECT 1 FROM plan_uses AS u WHERE u.tenant = b.tenant AND u.sha256 = b.sha256
            AND u.run_no NOT IN (SELECT value FROM json_each(:gone)))
ORDER BY tenant, sha256 LIMIT :limit + 1
"""


def put(db: sqlite3.Connection, tenant: str, sha256: str, body: bytes, now: Instant) -> None:
    """Store a body; if it is known, only update when it was last put."""
    db.execute(
        "INSERT INTO plan_bodies VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET put_at = excluded.put_at",
        (tenant, bytes.fromhex(sha256), body, now),
    )


def get(db: sqlite3.Connection, tenant: str, sha256: str) -> bytes | None:
    """Return a body, or None."""
    found = db.execute(
        "SELECT body FROM plan_bodies WHERE tenant = ? AND sha256 = ?", (tenant, bytes.fromhex(sha256))
    ).fetchone()
    return None if found is None else bytes(found[0])


def register(db: sqlite3.Connection, plan: RegisteredPlan, now: Instant) -> RegisteredPlan:
    """Register a version, or return it as it was registered."""
    known = db.execute(
        f"SELECT {COLUMNS} FROM plans WHERE tenant = ? AND plan_id = ? AND plan_version = ?",
        (plan.tenant, plan.plan_id, plan.plan_version),
    ).fetchone()
    if known is not None:
        stored = registered_plan_of(known)
        if stored.sha256 != plan.sha256:
            raise decisions.plan_conflict(stored)
        return stored
    if get(db, plan.tenant, plan.sha256) is None:
        raise decisions.no_such_plan_body(plan)
    row = (plan.tenant, plan.plan_id, plan.plan_version, bytes.fromhex(plan.sha256), plan.uri, plan.registered_by, now)
    db.execute("INSERT INTO plans VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    return replace(plan, registered_at=now)


def find(db: sqlite3.Connection, query: PlanQuery, limit: int) -> Found[RegisteredPlan]:
    """Return the versions that match the query."""
    where = _where(query)
    sql = f"SELECT {COLUMNS} FROM plans {where.text} ORDER BY {plan_order(query)} LIMIT ?"
    return Found(registered_plan_of(row) for row in db.execute(sql, where.values(limit)))


def _where(query: PlanQuery) -> Where:
    where = Where()
    where.add("(tenant, plan_id, plan_version) > (?, ?, ?)", *query.after)
    where.add_given("tenant = ?", query.tenant)
    where.add_given("plan_id = ?", query.plan_id)
    where.add_given("plan_version = ?", query.plan_version)
    return where


def unused(db: sqlite3.Connection, policy: PurgePolicy, gone: str, now: Instant) -> list[Any]:
    """Return the bodies that a purge deletes, up to one more than its limit."""
    until = decisions.unused_until(policy, now)
    if until is None:
        return []
    asked = {"until": until, "tenant": policy.tenant, "plans": policy.plans, "gone": gone, "limit": policy.limit}
    return db.execute(_UNUSED, asked).fetchall()


def forget(db: sqlite3.Connection, bodies: list[Any], policy: PurgePolicy) -> None:
    """Delete bodies; if a tenant is deleted, also the versions that it has registered."""
    db.executemany("DELETE FROM plan_bodies WHERE tenant = ? AND sha256 = ?", bodies)
    if policy.plans:
        db.execute("DELETE FROM plans WHERE tenant = ?", (policy.tenant,))
        schedules.forget(db, policy.tenant)
