"""Host locks in the file. A released lock keeps its row, without an owner: its epoch must keep growing."""

import sqlite3

from holdfast.core.instants import Instant
from holdfast.store import decisions
from holdfast.store.sql import host_lock_of
from holdfast.store.types import HostLock

_COLUMNS = "name, owner, epoch, acquired_at, lease_until"
_ACQUIRE = f"""
INSERT INTO host_locks ({_COLUMNS}) VALUES (:name, :owner, 1, :now, :until)
ON CONFLICT DO UPDATE SET
    epoch = epoch + (owner IS NOT excluded.owner),
    acquired_at = iif(owner IS excluded.owner, acquired_at, excluded.acquired_at),
    owner = excluded.owner, lease_until = excluded.lease_until
WHERE owner IS NULL OR owner = excluded.owner OR lease_until <= :now OR lease_until > :now + {decisions.LEASE_HORIZON}
RETURNING {_COLUMNS}
"""
END_LIVES = """
UPDATE host_locks SET lease_until = min(lease_until, :now) WHERE owner > :first AND owner < :last AND owner <> :node
"""


def acquire(db: sqlite3.Connection, name: str, owner: str, lease_ms: int, now: Instant) -> HostLock | None:
    """Give the owner the lock, or return None if another owner has it."""
    asked = {"name": name, "owner": owner, "now": now, "until": now + lease_ms * 1_000}
    rows = db.execute(_ACQUIRE, asked).fetchall()
    return host_lock_of(rows[0]) if rows else None


def release(db: sqlite3.Connection, name: str, owner: str, epoch: int) -> bool:
    """Release the lock, if the owner has it at this epoch."""
    update = "UPDATE host_locks SET owner = NULL WHERE name = ? AND owner = ? AND epoch = ?"
    return db.execute(update, (name, owner, epoch)).rowcount == 1


def find(db: sqlite3.Connection) -> list[HostLock]:
    """Return the locks that have a holder."""
    rows = db.execute(f"SELECT {_COLUMNS} FROM host_locks WHERE owner IS NOT NULL ORDER BY name")
    return [host_lock_of(row) for row in rows]


def fence(db: sqlite3.Connection, lock: HostLock | None) -> None:
    """Raise for a holder that has lost its lock. Call this in the transaction that writes."""
    if lock is None:
        return
    select = "SELECT 1 FROM host_locks WHERE name = ? AND owner = ? AND epoch = ?"
    if db.execute(select, (lock.name, lock.owner, lock.epoch)).fetchone() is None:
        raise decisions.lock_lost(lock)
