"""The audit log on the server. The statement of a verb appends the entries about that verb."""

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

from msgspec.structs import replace

from holdfast.core.audit import AuditEntry, audit_row
from holdfast.core.instants import Instant
from holdfast.store import sql
from holdfast.store.postgres.columns import askable, columns
from holdfast.store.postgres.pool import Db, Transaction
from holdfast.store.queries import AuditQuery, Found
from holdfast.store.sql import audit_conditions

ENTRY_COLUMNS = 10
_TYPES = ("bigint", *["text"] * 9)
_APPEND = f"""
INSERT INTO holdfast.audit_log ({sql.AUDIT})
SELECT * FROM unnest({", ".join(f"${number}::{kind}[]" for number, kind in enumerate(_TYPES, 1))})
ON CONFLICT DO NOTHING
"""


def with_audit(statement: str, first: int, done: str, *, is_known: bool) -> str:
    """Extend a statement whose rows have o_now, o_ord and o_code so that it appends the entries of those `done`.

    The entries are its parameters from `first` on: the ord of each, and its columns. With `is_known` the tenant,
    project and environment come from the existing runs.
    """
    places = ", ".join(f"${first + 1 + number}::{kind}[]" for number, kind in enumerate(_TYPES))
    of_run = "r.tenant, r.project, r.environment" if is_known else "t.tenant, t.project, t.environment"
    join = "JOIN holdfast.runs r ON r.run_id = t.run_id" if is_known else ""
    return f"""
WITH did AS MATERIALIZED ({statement}), audited AS (
    INSERT INTO holdfast.audit_log ({sql.AUDIT})
    SELECT did.o_now, t.entry_id, {of_run}, t.run_id, t.actor, t.token_id, t.operation, t.entry
    FROM did JOIN unnest(${first}::bigint[], {places}) AS t (ord, {sql.AUDIT}) ON t.ord = did.o_ord {join}
    WHERE did.o_code = '{done}' ON CONFLICT DO NOTHING
) SELECT * FROM did"""


def entry_columns(entries: Iterable[tuple[int, AuditEntry]]) -> list[list[Any]]:
    """Return entries, each with its ord, as parameters of such a statement."""
    return columns([(number, *_row(entry)) for number, entry in entries], 1 + ENTRY_COLUMNS)


def _row(entry: AuditEntry) -> tuple[Any, ...]:
    return tuple(map(askable, audit_row(entry)))


async def append(transaction: Db, entries: Sequence[AuditEntry]) -> None:
    """Append entries that already have their time."""
    if entries:
        await transaction.fetch(_APPEND, *columns([_row(entry) for entry in entries], ENTRY_COLUMNS))


async def append_now(transaction: Transaction, entries: Sequence[AuditEntry], now: Instant | None) -> None:
    """Append entries with the server's time."""
    [[at]] = await transaction.fetch("SELECT holdfast.time_1($1)", now)
    await append(transaction, [replace(entry, at=at) for entry in entries])


async def find(db: Db, query: AuditQuery, limit: int) -> Found[AuditEntry]:
    """Return the entries that match the query."""
    where, order = audit_conditions(query), "DESC" if query.newest else "ASC"
    select = (
        f"SELECT {sql.AUDIT} FROM holdfast.audit_log {where.numbered} "
        f"ORDER BY at {order}, entry_id {order} LIMIT {where.limit_parameter}"
    )
    found = await db.fetch(select, *map(askable, where.values(limit)))
    return sql.found_of(found, sql.audit_of, itemgetter(1), itemgetter(0, 1))


async def old(
    transaction: Transaction, until: Instant, limit: int, tenant: str | None, run_ids: list[str] | None
) -> list[Any]:
    """Return the positions of the entries up to an instant, of this tenant and these runs, oldest first."""
    return await transaction.fetch(
        "SELECT at, entry_id FROM holdfast.audit_log WHERE at <= $1 AND ($3::text IS NULL OR tenant = $3) "
        "AND ($4::text[] IS NULL OR run_id = ANY ($4)) ORDER BY at, entry_id LIMIT $2",
        until,
        limit,
        tenant,
        run_ids,
    )


async def forget(transaction: Transaction, places: list[Any]) -> None:
    """Delete entries."""
    await transaction.fetch(
        "DELETE FROM holdfast.audit_log a USING unnest($1::bigint[], $2::text[]) AS x (at, entry_id) "
        "WHERE a.at = x.at AND a.entry_id = x.entry_id",
        [row[0] for row in places],
        [row[1] for row in places],
    )
