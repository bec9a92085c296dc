"""Host locks on the server. A released lock keeps its row, without an owner: its epoch must keep growing."""

from holdfast.core.instants import Instant
from holdfast.store import decisions
from holdfast.store.postgres.pool import Db
from holdfast.store.sql import host_lock_of
from holdfast.store.types import HostLock

_COLUMNS = "name, owner, epoch, acquired_at, lease_until"
_ACQUIRE = f"""
INSERT INTO holdfast.host_locks AS l ({_COLUMNS})
SELECT $2, $3, 1, t.now, t.now + $4 FROM (SELECT holdfast.time_1($1) AS now) t
ON CONFLICT (name) DO UPDATE SET
    epoch = l.epoch + (l.owner IS DISTINCT FROM excluded.owner)::int,
    acquired_at = CASE WHEN l.owner = excluded.owner THEN l.acquired_at ELSE excluded.acquired_at END,
    owner = excluded.owner, lease_until = excluded.lease_until
WHERE l.owner IS NULL OR l.owner = excluded.owner OR l.lease_until <= excluded.acquired_at
    OR l.lease_until > excluded.acquired_at + {decisions.LEASE_HORIZON}
RETURNING {_COLUMNS}
"""
_END_LIVES = """
UPDATE holdfast.host_locks l SET lease_until = least(l.lease_until, $1)
WHERE l.owner > $2 AND l.owner < $3 AND l.owner <> $4
"""


async def acquire(db: Db, name: str, owner: str, lease_ms: int, now: Instant | None) -> HostLock | None:
    """Give the owner the lock, or return None if another owner has it."""
    rows = await db.fetch(_ACQUIRE, now, name, owner, lease_ms * 1_000)
    return host_lock_of(rows[0]) if rows else None


async def release(db: Db, name: str, owner: str, epoch: int) -> bool:
    """Release the lock, if the owner has it at this epoch."""
    update = "UPDATE holdfast.host_locks SET owner = NULL WHERE name = $1 AND owner = $2 AND epoch = $3 RETURNING 1"
    return bool(await db.fetch(update, name, owner, epoch))


async def find(db: Db) -> list[HostLock]:
    """Return the locks that have a holder."""
    rows = await db.fetch(f"SELECT {_COLUMNS} FROM holdfast.host_locks WHERE owner IS NOT NULL ORDER BY name")
    return [host_lock_of(row) for row in rows]


async def end_lives(db: Db, node: str, now: Instant) -> None:
    """End the locks of other lives of a node."""
    first, last = decisions.lives_of(node) or ("", "")
    await db.fetch(_END_LIVES, now, first, last, node)


async def fence(db: Db, lock: HostLock | None) -> None:
    """Raise for a holder that has lost its lock. Call this in the transaction that writes.

    The row is locked, so that no other owner acquires the lock before the transaction has ended.
    """
    if lock is None:
        return
    select = "SELECT 1 FROM holdfast.host_locks WHERE name = $1 AND owner = $2 AND epoch = $3 FOR SHARE"
    if not await db.fetch(select, lock.name, lock.owner, lock.epoch):
        raise decisions.lock_lost(lock)
