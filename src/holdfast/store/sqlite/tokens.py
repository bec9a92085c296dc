"""Access tokens in the file: the record as it was created, and separate columns for the little that changes."""

import sqlite3
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core.access import AccessToken, merge_tokens
from holdfast.core.instants import Instant
from holdfast.errors import InvalidInput, StoreCorrupt
from holdfast.store.queries import Found, TokenQuery
from holdfast.store.sql import Where, found_of

_COLUMNS = "token, revoked_at, revoked_by, last_used_at"


def put(db: sqlite3.Connection, tokens: Sequence[AccessToken], now: Instant) -> list[AccessToken]:
    """Store tokens, merged with what is stored of them."""
    db.execute("DELETE FROM access_tokens WHERE session_of IS NOT NULL AND expires_at <= ?", (now,))
    for token in tokens:
        db.execute(
            "INSERT OR IGNORE INTO access_tokens VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                token.token_id,
                token.tenant,
                token.session_of,
                token.expires_at,
                token.revoked_at,
                token.revoked_by,
                token.last_used_at,
                bytes(codec.encode(token)).decode(),
            ),
        )
        whole = merge_tokens(_of(db, token.token_id), token)
        db.execute(
            "UPDATE access_tokens SET revoked_at = ?, revoked_by = ?, last_used_at = ? WHERE token_id = ?",
            (whole.revoked_at, whole.revoked_by, whole.last_used_at, whole.token_id),
        )
    return [_of(db, token.token_id) for token in tokens]


def put_key(db: sqlite3.Connection, name: str, key: str) -> str:
    """Store a key unless there is one, and return the stored one."""
    db.execute("INSERT OR IGNORE INTO store_keys (name, key) VALUES (?, ?)", (name, bytes.fromhex(key)))
    kept = get_key(db, name)
    assert kept is not None
    return kept


def get_key(db: sqlite3.Connection, name: str) -> str | None:
    """Return the key stored under a name, or None."""
    kept = db.execute("SELECT key FROM store_keys WHERE name = ?", (name,)).fetchone()
    return None if kept is None else bytes(kept[0]).hex()


def find(db: sqlite3.Connection, query: TokenQuery, limit: int) -> Found[AccessToken]:
    """Return the tokens that match the query."""
    where = Where()
    where.add("token_id > ?", query.after)
    where.add_given("tenant = ?", query.tenant)
    if query.token_ids is not None:
        where.add("token_id IN (SELECT value FROM json_each(?))", bytes(codec.encode(query.token_ids)).decode())
    if not query.sessions:
        where.add("session_of IS NULL")
    found = db.execute(
        f"SELECT {_COLUMNS}, token_id FROM access_tokens {where.text} ORDER BY token_id LIMIT ?", where.values(limit)
    ).fetchall()
    return found_of(found, _token_of, itemgetter(4), itemgetter(4))


def _of(db: sqlite3.Connection, token_id: str) -> AccessToken:
    return _token_of(db.execute(f"SELECT {_COLUMNS} FROM access_tokens WHERE token_id = ?", (token_id,)).fetchone())


def _token_of(row: tuple[Any, ...]) -> AccessToken:
    try:
        made = codec.decode(row[0].encode(), AccessToken)
    except InvalidInput as problem:
        raise StoreCorrupt("the record of an access token cannot be read") from problem
    return replace(made, revoked_at=row[1], revoked_by=row[2], last_used_at=row[3])
