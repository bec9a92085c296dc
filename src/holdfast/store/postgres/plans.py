"""Plans on the server: their bodies by hash, and the registered versions."""

from typing import Any

from holdfast.core.instants import Instant
from holdfast.core.plans import RegisteredPlan
from holdfast.store import decisions
from holdfast.store.postgres import schedules
from holdfast.store.postgres.columns import askable
from holdfast.store.postgres.pool import Db, Transaction
from holdfast.store.queries import Found, PlanQuery
from holdfast.store.sql import Where, plan_order, registered_plan_of
from holdfast.store.types import PurgePolicy

_COLUMNS = "tenant, plan_id, plan_version, sha256, uri, registered_by, registered_at"

_PUT = """
INSERT INTO holdfast.plan_bodies AS b VALUES ($1, $2, $3, holdfast.time_1($4))
ON CONFLICT (tenant, sha256) DO UPDATE SET put_at = excluded.put_at
"""
_REGISTER = f"""
INSERT INTO holdfast.plans ({_COLUMNS}) SELECT $1, $2, $3, b.sha256, $5, $6, holdfast.time_1($7)
FROM holdfast.plan_bodies b WHERE b.tenant = $1 AND b.sha256 = $4 FOR KEY SHARE
ON CONFLICT DO NOTHING
"""
# Bodies that are just being put or registered are skipped until a later purge.
_UNUSED = """
SELECT b.tenant, b.sha256 FROM holdfast.plan_bodies b WHERE b.put_at <= $1 AND ($2::text IS NULL OR b.tenant = $2)
    AND ($3 OR NOT EXISTS (SELECT 1 FROM holdfast.plans p WHERE p.tenant = b.tenant AND p.sha256 = b.sha256))
    AND NOT EXISTS (
        SELECT 1 FROM holdfast.plan_uses u
        WHERE u.tenant = b.tenant AND u.sha256 = b.sha256 AND u.run_no <> ALL ($4))
ORDER BY b.tenant, b.sha256 LIMIT $5 FOR UPDATE OF b SKIP LOCKED
"""


async def put(db: Db, tenant: str, sha256: str, body: bytes, now: Instant | None) -> None:
    """Store a body; if it is known, only update when it was last put."""
    await db.fetch(_PUT, tenant, bytes.fromhex(sha256), body, now)


async def get(db: Db, tenant: str, sha256: str) -> bytes | None:
    """Return a body, or None."""
    select = "SELECT body FROM holdfast.plan_bodies WHERE tenant = $1 AND sha256 = $2"
    found = await db.fetch(select, askable(tenant), bytes.fromhex(sha256))
    return bytes(found[0][0]) if found else None


async def register(transaction: Transaction, plan: RegisteredPlan, now: Instant | None) -> RegisteredPlan:
    """Register a version, or return it as it was registered."""
    key = (plan.tenant, plan.plan_id, plan.plan_version)
    await transaction.fetch(_REGISTER, *key, bytes.fromhex(plan.sha256), plan.uri, plan.registered_by, now)
    select = f"SELECT {_COLUMNS} FROM holdfast.plans WHERE tenant = $1 AND plan_id = $2 AND plan_version = $3"
    found = await transaction.fetch(select, *key)
    if not found:
        raise decisions.no_such_plan_body(plan)
    stored = registered_plan_of(found[0])
    if stored.sha256 != plan.sha256:
        raise decisions.plan_conflict(stored)
    return stored


async def find(db: Db, query: PlanQuery, limit: int) -> Found[RegisteredPlan]:
    """Return the versions that match the query."""
    where = Where()
    where.add("(tenant, plan_id, plan_version) > (?, ?, ?)", *map(askable, query.after))
    where.add_given("tenant = ?", askable(query.tenant))
    where.add_given("plan_id = ?", askable(query.plan_id))
    where.add_given("plan_version = ?", askable(query.plan_version))
    order = f"ORDER BY {plan_order(query)} LIMIT {where.limit_parameter}"
    found = await db.fetch(f"SELECT {_COLUMNS} FROM holdfast.plans {where.numbered} {order}", *where.values(limit))
    return Found(map(registered_plan_of, found))


async def unused(db: Db, policy: PurgePolicy, gone: list[int], now: Instant) -> list[Any]:
    """Return the bodies that a purge deletes, up to one more than its limit."""
    until = decisions.unused_until(policy, now)
    if until is None:
        return []
    return await db.fetch(_UNUSED, until, askable(policy.tenant), policy.plans, gone, policy.limit + 1)


async def forget(db: Db, bodies: list[Any], policy: PurgePolicy) -> None:
    """Delete bodies; if a tenant is deleted, also the versions that it has registered."""
    await db.fetch(
        "DELETE FROM holdfast.plan_bodies b USING unnest($1::text[], $2::bytea[]) AS x (tenant, sha256) "
        "WHERE b.tenant = x.tenant AND b.sha256 = x.sha256",
        [row[0] for row in bodies],
        [row[1] for row in bodies],
    )
    if policy.plans:
        await db.fetch("DELETE FROM holdfast.plans WHERE tenant = $1", askable(policy.tenant))
        await schedules.forget(db, policy.tenant)
