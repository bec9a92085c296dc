"""Bulletins in the file.

The primary key is kind and id: the first one under an id stays. One index orders a kind by time, and one finds what has
expired, which each writer deletes.
"""

import sqlite3
from collections.abc import Mapping
from operator import itemgetter

from msgspec import Raw

from holdfast.core.codec import encode_text
from holdfast.core.instants import Instant
from holdfast.store import sql
from holdfast.store.queries import BulletinQuery, Found
from holdfast.store.sql import bulletin_conditions
from holdfast.store.types import Bulletin

_PUT = f"INSERT OR IGNORE INTO bulletins ({sql.BULLETIN}) VALUES (?, ?, ?, ?, ?)"
_FORGET = "DELETE FROM bulletins WHERE expires_at <= ?"


def put(db: sqlite3.Connection, kind: str, bodies: Mapping[str, Raw], keep_ms: int, now: Instant) -> list[bool]:
    """Put bulletins, except under ids that have one, and delete those that have expired."""
    db.execute(_FORGET, (now,))
    rows = [
        (kind, bulletin_id, now, now + keep_ms * 1_000, bytes(body).decode()) for bulletin_id, body in bodies.items()
    ]
    return [db.execute(_PUT, row).rowcount == 1 for row in rows]


def find(db: sqlite3.Connection, query: BulletinQuery, limit: int, now: Instant) -> Found[Bulletin]:
    """Return the bulletins that match the query."""
    where = bulletin_conditions(query, now)
    if query.bulletin_ids is not None:
        where.add("bulletin_id IN (SELECT value FROM json_each(?))", encode_text(query.bulletin_ids))
    found = db.execute(
        f"SELECT {sql.BULLETIN} FROM bulletins {where.text} ORDER BY at, bulletin_id LIMIT ?", where.values(limit)
    )
    return sql.found_of(found.fetchall(), sql.bulletin_of, itemgetter(1), itemgetter(2, 1))
