"""Host locks in the reference model."""

from msgspec.structs import replace

from holdfast.core.instants import Instant
from holdfast.store import decisions
from holdfast.store.types import HostLock


class HostLocks:
    """Named locks: the last holder of each, and whether that has released it."""

    def __init__(self) -> None:
        self._locks: dict[str, HostLock] = {}
        self._released: set[str] = set()

    def acquire(self, name: str, owner: str, lease_ms: int, now: Instant) -> HostLock | None:
        """Give the owner the lock, or return None if another owner has it."""
        known, until = self._locks.get(name), now + lease_ms * 1_000
        if known is not None and name not in self._released and known.owner == owner:
            lock = replace(known, lease_until=until)
        elif known is None or name in self._released or decisions.is_free(known, now):
            epoch = 1 if known is None else known.epoch + 1
            lock = HostLock(name=name, owner=owner, epoch=epoch, acquired_at=now, lease_until=until)
        else:
            return None
        self._released.discard(name)
        self._locks[name] = lock
        return lock

    def release(self, name: str, owner: str, epoch: int) -> bool:
        """Release the lock, if the owner has it at this epoch."""
        known = self._locks.get(name)
        if known is None or name in self._released or (known.owner, known.epoch) != (owner, epoch):
            return False
        self._released.add(name)
        return True

    def find(self) -> list[HostLock]:
        """Return the locks that have a holder."""
        return [lock for name, lock in sorted(self._locks.items()) if name not in self._released]

    def end_lives(self, node: str, now: Instant) -> None:
        """End the leases of other lives of a node."""
        for name, lock in self._locks.items():
            if decisions.is_another_life(node, lock.owner):
                self._locks[name] = replace(lock, lease_until=min(lock.lease_until, now))

    def fence(self, lock: HostLock) -> None:
        """Raise for a holder that has lost its lock."""
        known = self._locks.get(lock.name)
        if known is None or lock.name in self._released or (known.owner, known.epoch) != (lock.owner, lock.epoch):
            raise decisions.lock_lost(lock)
