"""`purge`: what retention deletes, and what it must not touch."""

from typing import Any

from holdfast.core.audit import AuditEntry
from holdfast.core.instants import Instant
from holdfast.store import decisions
from holdfast.store.port import PurgePolicy, PurgeReport
from holdfast.store.postgres import audit, plans
from holdfast.store.postgres.columns import askable
from holdfast.store.postgres.pool import Db, Transaction

_NAMED = "($3::text IS NULL OR tenant = $3) AND ($4::text[] IS NULL OR run_id = ANY ($4))"
_GONE = f"""
SELECT run_no FROM holdfast.runs AS run WHERE finished_at <= $1 AND {_NAMED}
    AND NOT EXISTS (SELECT 1 FROM holdfast.runs p WHERE p.run_id = run.parent_run_id AND p.finished_at IS NULL)
    AND NOT EXISTS (SELECT 1 FROM holdfast.runs c WHERE c.parent_run_id = run.run_id AND c.finished_at IS NULL)
ORDER BY run_id LIMIT $2 FOR UPDATE OF run
"""
_TASKS = f"""
SELECT task_id FROM holdfast.tasks JOIN holdfast.runs USING (run_no)
WHERE finished_at <= $1 AND run_no <> ALL ($5) AND {_NAMED}
ORDER BY run_id, task_id LIMIT $2
"""
_STATES = f"""
SELECT run_no FROM holdfast.runs WHERE finished_at <= $1 AND snapshot IS NOT NULL AND run_no <> ALL ($5) AND {_NAMED}
ORDER BY run_id LIMIT $2 FOR UPDATE
"""
_EXPIRED = f"""
SELECT run_no, name, signal_id FROM holdfast.acceptance_records JOIN holdfast.runs USING (run_no)
WHERE expires_at <= $1 AND run_no <> ALL ($5) AND {_NAMED} ORDER BY run_id, name, signal_id LIMIT $2
"""
_BELONGING = (
    *("events", "signals", "acceptance_records", "tasks", "waits", "messages", "activity_records", "jobs"),
    *("dead_letters", "agenda", "plan_uses", "runs"),
)
_COUNTED = ("events", "signals", "acceptance_records", "tasks", "dead_letters")


async def purge(
    transaction: Transaction, policy: PurgePolicy, given: Instant | None, entry: AuditEntry | None = None
) -> PurgeReport:
    """Delete, or with `dry_run` only count, what the policy allows."""
    limit = policy.limit
    named = (askable(policy.tenant), None if policy.run_ids is None else list(map(askable, policy.run_ids)))
    [[now]] = await transaction.fetch("SELECT holdfast.time_1($1)", given)

    async def select(sql: str, window_ms: int | None, *doomed: list[int]) -> list[Any]:
        if window_ms is None:
            return []
        return await transaction.fetch(sql, now - window_ms * 1_000, limit + 1, *named, *doomed)

    gone = await select(_GONE, policy.finished_run_ms)
    doomed = [run_no for (run_no,) in gone[:limit]]
    tasks = await select(_TASKS, policy.task_ms, doomed)
    states = await select(_STATES, policy.runtime_state_ms, doomed)
    expired = await select(_EXPIRED, 0, doomed)
    entries = (
        []
        if policy.audit_ms is None
        else await audit.old(transaction, now - policy.audit_ms * 1_000, limit + 1, *named)
    )
    bodies = await plans.unused(transaction, policy, doomed, now)
    belonging = {table: await _count(transaction, table, doomed) for table in _COUNTED}
    report = PurgeReport(
        runs=len(doomed),
        events=belonging["events"],
        signals=belonging["signals"],
        tasks=belonging["tasks"] + len(tasks[:limit]),
        runtime_states=len(states[:limit]),
        acceptance_records=belonging["acceptance_records"] + len(expired[:limit]),
        dead_letters=belonging["dead_letters"],
        audit_entries=len(entries[:limit]),
        tokens=await _tokens(transaction, named[0]) if policy.tokens else 0,
        plans=len(bodies[:limit]),
        stale_runs=await _stale(transaction, policy.stale_run_ms, now, named),
        has_more=max(map(len, (gone, tasks, states, expired, entries, bodies))) > limit,
    )
    if not policy.dry_run:
        for table in _BELONGING:
            await transaction.fetch(f"DELETE FROM holdfast.{table} WHERE run_no = ANY ($1)", doomed)
        await transaction.fetch(
            "DELETE FROM holdfast.tasks WHERE task_id = ANY ($1)", [row[0] for row in tasks[:limit]]
        )
        await transaction.fetch(
            "UPDATE holdfast.runs SET snapshot = NULL WHERE run_no = ANY ($1)", [row[0] for row in states[:limit]]
        )
        await _forget(transaction, expired[:limit], now)
        await audit.forget(transaction, entries[:limit])
        await plans.forget(transaction, bodies[:limit], policy)
        if policy.tokens:
            await transaction.fetch("DELETE FROM holdfast.access_tokens WHERE tenant = $1", named[0])
        if entry is not None:
            await audit.append(transaction, [decisions.purge_entry(entry, report, now)])
    return report


async def _forget(transaction: Transaction, expired: list[Any], now: Instant) -> None:
    """Delete acceptance records, unless one has been renewed meanwhile."""
    await transaction.fetch(
        "DELETE FROM holdfast.acceptance_records a USING unnest($1::bigint[], $2::text[], $3::text[]) "
        "AS x (run_no, name, signal_id) WHERE a.run_no = x.run_no AND a.name = x.name AND a.signal_id = x.signal_id "
        "AND a.expires_at <= $4",
        [row[0] for row in expired],
        [row[1] for row in expired],
        [row[2] for row in expired],
        now,
    )


async def _count(db: Db, table: str, doomed: list[int]) -> int:
    [[count]] = await db.fetch(f"SELECT count(*) FROM holdfast.{table} WHERE run_no = ANY ($1)", doomed)
    return int(count)


async def _tokens(db: Db, tenant: str) -> int:
    [[count]] = await db.fetch("SELECT count(*) FROM holdfast.access_tokens WHERE tenant = $1", tenant)
    return int(count)


async def _stale(db: Db, window_ms: int | None, now: Instant, named: tuple[Any, Any]) -> int:
    if window_ms is None:
        return 0
    sql = f"SELECT count(*) FROM holdfast.runs WHERE finished_at IS NULL AND updated_at <= $1 AND $2 AND {_NAMED}"
    [[count]] = await db.fetch(sql, now - window_ms * 1_000, True, *named)
    return int(count)
