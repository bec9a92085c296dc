"""The audit log in the file: entries clustered by time, with columns for the fields that are searched."""

import sqlite3
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any

from holdfast.core.audit import AuditEntry, audit_row
from holdfast.core.codec import encode_text
from holdfast.core.instants import Instant
from holdfast.store import sql
from holdfast.store.port import PurgePolicy
from holdfast.store.queries import AuditQuery, Found
from holdfast.store.sql import Where, audit_conditions

INSERT = f"INSERT OR IGNORE INTO audit_log ({sql.AUDIT}) VALUES ({', '.join('?' * 10)})"


def append(db: sqlite3.Connection, entries: Iterable[AuditEntry]) -> None:
    """Append entries that already have their time."""
    db.executemany(INSERT, [audit_row(entry) for entry in entries])


def places_of(db: sqlite3.Connection, run_ids: Iterable[str]) -> Mapping[str, tuple[str, str, str]]:
    """Return the tenants, projects and environments of these runs."""
    found = db.execute(
        "SELECT run_id, tenant, project, environment FROM runs WHERE run_id IN (SELECT value FROM json_each(?))",
        (encode_text(list(run_ids)),),
    )
    return {run_id: (tenant, project, environment) for run_id, tenant, project, environment in found}


def find(db: sqlite3.Connection, query: AuditQuery, limit: int) -> Found[AuditEntry]:
    """Return the entries that match the query."""
    where, order = audit_conditions(query), "DESC" if query.newest else "ASC"
    found = db.execute(
        f"SELECT {sql.AUDIT} FROM audit_log {where.text} ORDER BY at {order}, entry_id {order} LIMIT ?",
        where.values(limit),
    )
    return sql.found_of(found.fetchall(), sql.audit_of, itemgetter(1), itemgetter(0, 1))


def old(db: sqlite3.Connection, policy: PurgePolicy, until: Instant) -> list[Any]:
    """Return the positions of the entries up to an instant to which a policy applies, oldest first, and one more."""
    where = Where()
    where.add("at <= ?", until)
    where.add_given("tenant = ?", policy.tenant)
    if policy.run_ids is not None:
        where.add("run_id IN (SELECT value FROM json_each(?))", encode_text(policy.run_ids))
    select = f"SELECT at, entry_id FROM audit_log {where.text} ORDER BY at, entry_id LIMIT ?"
    return db.execute(select, where.values(policy.limit + 1)).fetchall()


def forget(db: sqlite3.Connection, places: list[Any]) -> None:
    """Delete entries."""
    db.executemany("DELETE FROM audit_log WHERE at = ? AND entry_id = ?", places)
