"""Duties that only one node may have at a time: each is executed under a named host lock.

A `HostDuty` is a task of the node. It waits until the lock is free, acquires it, and executes the duty for as long as
it can renew the lock in time. When it cannot, the work is cancelled. A node that stops releases the lock, so that the
next node takes over within `safety_poll_s`. After a crash the next node takes over when the lock's lease has expired.

Cancellation may come late, because a process can be frozen at any point. Work that writes therefore passes
`HeldLock.lock` to the verbs that compare its epoch, or writes only what is safe to write twice.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from holdfast.engine.leases import LeaseTimer
from holdfast.errors import LockLost, StoreError
from holdfast.store.decisions import is_free, lock_lost, name_of
from holdfast.store.port import HostLock, Store

logger = logging.getLogger("holdfast.node")
T = TypeVar("T")

RETRY_S = 0.2
"""The first delay after a failure of the store. Later ones are at most a third of the lease."""


class HeldLock:
    """A lock while its duty works."""

    def __init__(self, lock: HostLock, timer: LeaseTimer) -> None:
        self.lock = lock
        """The lock, for the verbs that are fenced by it."""
        self._timer = timer

    def check(self) -> None:
        """Raise `LockLost` unless the lock is certainly held now. Call it before a write that has no fence."""
        if not self._timer.is_certain:
            raise lock_lost(self.lock)


async def to_the_end(call: Awaitable[T], patience_s: float) -> T:
    """Wait for a call of the store. A cancelled caller still waits for the call to end, for a limited time."""
    calling = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(calling)
    except asyncio.CancelledError:
        await asyncio.wait({calling}, timeout=patience_s)
        calling.cancel()
        raise


async def acquire(store: Store, name: str, owner: str, lease_ms: int) -> HostLock | None:
    """Acquire a lock, if it is free. If the caller is cancelled meanwhile, no lock is left behind."""
    deciding = asyncio.ensure_future(store.acquire_lock(name, owner, lease_ms))
    try:
        return await to_the_end(deciding, lease_ms / 3_000)
    except asyncio.CancelledError:
        await release_acquired(store, deciding)
        raise


async def release_acquired(store: Store, deciding: "asyncio.Future[HostLock | None]") -> None:
    """Release the lock if the call of the store has acquired it."""
    if deciding.done() and not deciding.cancelled() and deciding.exception() is None:
        lock = deciding.result()
        if lock is not None:
            with suppress(StoreError):
                await store.release_lock(lock.name, lock.owner, lock.epoch)


Work = Callable[[HeldLock], Awaitable[None]]
"""The work of a duty while it holds its lock. It runs until it is cancelled; when it returns, the duty is over."""


class HostDuty:
    """One duty of one node. With `until_needed`, the lock is not even read before that has returned."""

    def __init__(
        self,
        name: str,
        node: str,
        store: Store,
        work: Work,
        lease_ms: int,
        safety_poll_s: float,
        until_needed: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.name = name
        self._node = node
        self._store = store
        self._work = work
        self._lease_ms = lease_ms
        self._safety_poll_s = safety_poll_s
        self._until_needed = until_needed
        self._held: HeldLock | None = None
        self._renewal: asyncio.Future[HostLock | None] | None = None

    @property
    def is_held(self) -> bool:
        """Whether this node has the lock, as far as it knows."""
        return self._held is not None

    async def run(self) -> None:
        """Execute the duty whenever this node has the lock, until it is over or cancelled."""
        pause_s = RETRY_S
        while True:
            try:
                if self._until_needed is not None:
                    await self._until_needed()
                timer = LeaseTimer(self._lease_ms)
                lock = await self._acquire(timer)
                pause_s = RETRY_S
                if await self._hold(lock, timer):
                    return
            except StoreError:
                logger.warning("node %s: the duty %s waits for the store", self._node, self.name, exc_info=True)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, self._lease_ms / 3_000)

    async def _acquire(self, timer: LeaseTimer) -> HostLock:
        """Wait until the lock is free, and acquire it. Waiting only reads the lock."""
        while True:
            now = await self._store.now()
            holders = {lock.name: lock for lock in await self._store.find_locks()}
            other = holders.get(self.name)
            if other is None or other.owner == self._node or is_free(other, now):
                with timer.renewing():
                    lock = await acquire(self._store, self.name, self._node, self._lease_ms)
                if lock is not None:
                    logger.debug("node %s has the lock %s, epoch %d", self._node, self.name, lock.epoch)
                    return lock
                timer.end()
                continue
            left_s = (other.lease_until - now) / 1_000_000
            await asyncio.sleep(min(left_s, self._safety_poll_s))

    async def _hold(self, lock: HostLock, timer: LeaseTimer) -> bool:
        """Execute the duty until the lock is lost; return whether the duty is over."""
        self._held = held = HeldLock(lock, timer)
        working = asyncio.ensure_future(self._work(held))
        try:
            while not working.done():
                await asyncio.wait({working}, timeout=self._lease_ms / 3_000)
                if not working.done() and not await self._renew(held, timer):
                    logger.warning("node %s has lost the lock %s", self._node, self.name)
                    return False
            await working
            return True
        except LockLost:
            logger.warning("node %s has lost the lock %s", self._node, self.name)
            return False
        finally:
            self._held = None
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            if self._renewal is not None:  # otherwise a running renewal would acquire the lock again after its release
                await asyncio.wait({self._renewal}, timeout=self._lease_ms / 3_000)
                await release_acquired(self._store, self._renewal)
                self._renewal = None
            await to_the_end(self._release(held.lock), self._lease_ms / 3_000)

    async def _renew(self, held: HeldLock, timer: LeaseTimer) -> bool:
        """Renew the lock; return whether it is still held. If the store fails, retry while the lock is held."""
        try:
            async with asyncio.timeout(self._lease_ms / 3_000):
                with timer.renewing():
                    deciding = self._store.acquire_lock(self.name, self._node, self._lease_ms)
                    self._renewal = asyncio.ensure_future(deciding)
                    renewed = await asyncio.shield(self._renewal)
        except (StoreError, TimeoutError):
            return timer.is_certain
        if renewed is None or renewed.epoch != held.lock.epoch:
            timer.end()
            return False
        held.lock = renewed
        return True

    async def _release(self, lock: HostLock) -> None:
        try:
            async with asyncio.timeout(self._lease_ms / 3_000):
                await self._store.release_lock(lock.name, lock.owner, lock.epoch)
        except (StoreError, TimeoutError):
            node = name_of(self._node)
            logger.warning("node %s could not release the lock %s; its lease expires", node, self.name)
