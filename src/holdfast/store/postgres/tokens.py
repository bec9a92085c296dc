"""Access tokens on the server: the record as it was created, and separate columns for the little that changes."""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core.access import AccessToken, merge_tokens
from holdfast.core.codec import encode_text
from holdfast.core.instants import Instant
from holdfast.errors import InvalidInput, StoreCorrupt
from holdfast.store import sql
from holdfast.store.postgres.columns import askable, columns
from holdfast.store.postgres.pool import Db, Transaction
from holdfast.store.queries import Found, TokenQuery
from holdfast.store.sql import Where

_COLUMNS = "token, revoked_at, revoked_by, last_used_at"

_FORGET = """
DELETE FROM holdfast.access_tokens WHERE session_of IS NOT NULL AND expires_at <= (SELECT holdfast.time_1($1))
"""
_KEEP = """
INSERT INTO holdfast.access_tokens
SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[], $5::bigint[], $6::bytea[], $7::bigint[],
    $8::text[]) AS t (token_id) ORDER BY token_id
ON CONFLICT DO NOTHING
"""
_KEPT = f"SELECT {_COLUMNS} FROM holdfast.access_tokens WHERE token_id = ANY ($1) ORDER BY token_id FOR UPDATE"
_JOIN = """
UPDATE holdfast.access_tokens a SET revoked_at = t.revoked_at, revoked_by = t.revoked_by, last_used_at = t.last_used_at
FROM unnest($1::text[], $2::bigint[], $3::bytea[], $4::bigint[]) AS t (token_id, revoked_at, revoked_by, last_used_at)
WHERE a.token_id = t.token_id
"""

_KEEP_KEY = "INSERT INTO holdfast.store_keys (name, key) VALUES ($1, $2) ON CONFLICT DO NOTHING"


async def put(transaction: Transaction, tokens: Sequence[AccessToken], now: Instant | None) -> list[AccessToken]:
    """Store tokens, merged with what is stored of them."""
    await transaction.fetch(_FORGET, now)
    await transaction.fetch(_KEEP, *columns([_row_of(token) for token in tokens], 8))
    found = await transaction.fetch(_KEPT, [token.token_id for token in tokens])
    kept = {token.token_id: token for token in map(_token_of, found)}
    before = dict(kept)
    for token in tokens:
        kept[token.token_id] = merge_tokens(kept[token.token_id], token)
    changed = [
        (token_id, token.revoked_at, token.revoked_by.encode(), token.last_used_at)
        for token_id, token in kept.items()
        if token != before[token_id]
    ]
    if changed:
        await transaction.fetch(_JOIN, *columns(changed, 4))
    return [kept[token.token_id] for token in tokens]


async def put_key(db: Db, name: str, key: str) -> str:
    """Store a key unless there is one, and return the stored one."""
    await db.fetch(_KEEP_KEY, name, bytes.fromhex(key))
    kept = await get_key(db, name)
    assert kept is not None
    return kept


async def get_key(db: Db, name: str) -> str | None:
    """Return the key stored under a name, or None."""
    kept = await db.fetch("SELECT key FROM holdfast.store_keys WHERE name = $1", name)
    return bytes(kept[0][0]).hex() if kept else None


async def find(db: Db, query: TokenQuery, limit: int) -> Found[AccessToken]:
    """Return the tokens that match the query."""
    where = Where()
    where.add("token_id > ?", askable(query.after))
    where.add_given("tenant = ?", askable(query.tenant))
    if query.token_ids is not None:
        where.add("token_id = ANY (?)", list(map(askable, query.token_ids)))
    if not query.sessions:
        where.add("session_of IS NULL")
    columns = f"{_COLUMNS}, token_id"
    select = (
        f"SELECT {columns} FROM holdfast.access_tokens {where.numbered} ORDER BY token_id LIMIT {where.limit_parameter}"
    )
    found = await db.fetch(select, *where.values(limit))
    return sql.found_of(found, _token_of, itemgetter(4), itemgetter(4))


def _row_of(token: AccessToken) -> tuple[Any, ...]:
    return (
        token.token_id,
        token.tenant,
        token.session_of,
        token.expires_at,
        token.revoked_at,
        token.revoked_by.encode(),
        token.last_used_at,
        encode_text(token),
    )


def _token_of(row: Any) -> AccessToken:
    try:
        made = codec.decode(row[0].encode(), AccessToken)
    except InvalidInput as problem:
        raise StoreCorrupt("the record of an access token cannot be read") from problem
    return replace(made, revoked_at=row[1], revoked_by=row[2].decode(), last_used_at=row[3])
