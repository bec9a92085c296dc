"""`purge`: what retention deletes, and what it must not touch."""

import sqlite3
from typing import Any

from holdfast.core.audit import AuditEntry
from holdfast.core.codec import encode_text
from holdfast.core.instants import Instant
from holdfast.store import decisions
from holdfast.store.port import PurgePolicy, PurgeReport
from holdfast.store.sqlite import audit, plans, queries

_NAMED = """
(:tenant IS NULL OR tenant = :tenant) AND (:run_ids IS NULL OR run_id IN (SELECT value FROM json_each(:run_ids)))
"""
_GONE = f"""
SELECT run_no FROM runs AS run WHERE finished_at <= :until AND {_NAMED}
    AND NOT EXISTS (SELECT 1 FROM runs WHERE run_id = run.parent_run_id AND finished_at IS NULL)
    AND NOT EXISTS (SELECT 1 FROM runs WHERE parent_run_id = run.run_id AND finished_at IS NULL)
ORDER BY run_id LIMIT :limit + 1
"""
_KEPT = f"run_no NOT IN (SELECT value FROM json_each(:gone)) AND {_NAMED}"
_TASKS = f"""
SELECT task_id FROM tasks JOIN runs USING (run_no) WHERE finished_at <= :until AND {_KEPT}
ORDER BY run_id, task_id LIMIT :limit + 1
"""
_STATES = f"""
SELECT run_no FROM runs WHERE finished_at <= :until AND snapshot IS NOT NULL AND {_KEPT}
ORDER BY run_id LIMIT :limit + 1
"""
_EXPIRED = f"""
SELECT run_no, name, signal_id FROM acceptance_records JOIN runs USING (run_no) WHERE expires_at <= :until AND {_KEPT}
ORDER BY run_id, name, signal_id LIMIT :limit + 1
"""
# Jobs and dead letters go by triggers.
_BELONGING = (
    "events",
    "signals",
    "acceptance_records",
    "tasks",
    "waits",
    "messages",
    "activity_records",
    "plan_uses",
    "runs",
)

_COUNTED = ("events", "signals", "acceptance_records", "tasks", "dead_letters")


def purge(db: sqlite3.Connection, policy: PurgePolicy, now: Instant, entry: AuditEntry | None = None) -> PurgeReport:
    """Delete, or with `dry_run` only count, what the policy allows."""
    limit = policy.limit
    run_ids = None if policy.run_ids is None else encode_text(policy.run_ids)
    named = {"tenant": policy.tenant, "run_ids": run_ids}

    def select(sql: str, window_ms: int | None, gone: str = "[]") -> list[Any]:
        if window_ms is None:
            return []
        return db.execute(sql, {**named, "until": now - window_ms * 1_000, "limit": limit, "gone": gone}).fetchall()

    gone = select(_GONE, policy.finished_run_ms)
    doomed = queries.listing(run_no for (run_no,) in gone[:limit])
    tasks = select(_TASKS, policy.task_ms, doomed)
    states = select(_STATES, policy.runtime_state_ms, doomed)
    expired = select(_EXPIRED, 0, doomed)
    entries = [] if policy.audit_ms is None else audit.old(db, policy, now - policy.audit_ms * 1_000)
    bodies = plans.unused(db, policy, doomed, now)
    belonging = {table: _count(db, table, doomed) for table in _COUNTED}
    report = PurgeReport(
        runs=len(gone[:limit]),
        events=belonging["events"],
        signals=belonging["signals"],
        tasks=belonging["tasks"] + len(tasks[:limit]),
        runtime_states=len(states[:limit]),
        acceptance_records=belonging["acceptance_records"] + len(expired[:limit]),
        dead_letters=belonging["dead_letters"],
        audit_entries=len(entries[:limit]),
        tokens=_tokens(db, policy) if policy.tokens else 0,
        plans=len(bodies[:limit]),
        stale_runs=_stale(db, policy.stale_run_ms, now, named),
        has_more=max(map(len, (gone, tasks, states, expired, entries, bodies))) > limit,
    )
    if not policy.dry_run:
        for table in _BELONGING:
            db.execute(f"DELETE FROM {table} WHERE run_no IN (SELECT value FROM json_each(?))", (doomed,))
        db.executemany("DELETE FROM tasks WHERE task_id = ?", tasks[:limit])
        db.executemany("UPDATE runs SET snapshot = NULL WHERE run_no = ?", states[:limit])
        db.executemany(
            "DELETE FROM acceptance_records WHERE run_no = ? AND name = ? AND signal_id = ?", expired[:limit]
        )
        audit.forget(db, entries[:limit])
        plans.forget(db, bodies[:limit], policy)
        if policy.tokens:
            db.execute("DELETE FROM access_tokens WHERE tenant = ?", (policy.tenant,))
        if entry is not None:
            audit.append(db, [decisions.purge_entry(entry, report, now)])
    return report


def _count(db: sqlite3.Connection, table: str, doomed: str) -> int:
    sql = f"SELECT count(*) FROM {table} WHERE run_no IN (SELECT value FROM json_each(?))"
    count: int = db.execute(sql, (doomed,)).fetchone()[0]
    return count


def _tokens(db: sqlite3.Connection, policy: PurgePolicy) -> int:
    count: int = db.execute("SELECT count(*) FROM access_tokens WHERE tenant = ?", (policy.tenant,)).fetchone()[0]
    return count


def _stale(db: sqlite3.Connection, window_ms: int | None, now: Instant, named: dict[str, Any]) -> int:
    if window_ms is None:
        return 0
    sql = f"SELECT count(*) FROM runs WHERE finished_at IS NULL AND updated_at <= :until AND {_NAMED}"
    count: int = db.execute(sql, {**named, "until": now - window_ms * 1_000}).fetchone()[0]
    return count
