"""Bulletins on the server."""

from collections.abc import Mapping
from operator import itemgetter

from msgspec import Raw

from holdfast.core.instants import Instant
from holdfast.store import sql
from holdfast.store.postgres.columns import askable
from holdfast.store.postgres.pool import Db, Transaction
from holdfast.store.queries import BulletinQuery, Found
from holdfast.store.sql import bulletin_conditions
from holdfast.store.types import Bulletin

_PUT = f"""
INSERT INTO holdfast.bulletins ({sql.BULLETIN})
SELECT $1, t.bulletin_id, $2, $3, t.body FROM unnest($4::text[], $5::text[]) AS t (bulletin_id, body)
ORDER BY t.bulletin_id
ON CONFLICT DO NOTHING RETURNING bulletin_id
"""


async def put(
    transaction: Transaction, kind: str, bodies: Mapping[str, Raw], keep_ms: int, asked: Instant | None
) -> list[bool]:
    """Put bulletins, except under ids that have one, and delete those that have expired."""
    [[now]] = await transaction.fetch("SELECT holdfast.time_1($1)", asked)
    await transaction.fetch(
        "DELETE FROM holdfast.bulletins WHERE (kind, bulletin_id) IN (SELECT kind, bulletin_id FROM holdfast.bulletins "
        "WHERE expires_at <= $1 ORDER BY kind, bulletin_id FOR UPDATE)",
        now,
    )
    texts = [bytes(body).decode() for body in bodies.values()]
    stored = await transaction.fetch(_PUT, askable(kind), now, now + keep_ms * 1_000, list(map(askable, bodies)), texts)
    is_new = {row[0] for row in stored}
    return [askable(bulletin_id) in is_new for bulletin_id in bodies]


async def find(db: Db, query: BulletinQuery, limit: int, asked: Instant | None) -> Found[Bulletin]:
    """Return the bulletins that match the query."""
    [[now]] = await db.fetch("SELECT holdfast.time_1($1)", asked)
    where = bulletin_conditions(query, now)
    if query.bulletin_ids is not None:
        where.add("bulletin_id = ANY (?)", list(map(askable, query.bulletin_ids)))
    found = await db.fetch(
        f"SELECT {sql.BULLETIN} FROM holdfast.bulletins {where.numbered} ORDER BY at, bulletin_id "
        f"LIMIT {where.limit_parameter}",
        *map(askable, where.values(limit)),
    )
    return sql.found_of(found, sql.bulletin_of, itemgetter(1), itemgetter(2, 1))
