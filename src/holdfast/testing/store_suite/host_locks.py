"""The store suite, host locks: one holder at a time, by the store's clock, and each with its own epoch."""

import asyncio
from typing import Any

import pytest

from holdfast.errors import InvalidInput
from holdfast.store.decisions import LEASE_HORIZON
from holdfast.store.port import HostLock, Store
from holdfast.testing import START, VirtualClock
from holdfast.testing.store_suite.base import BAD_NAMES, STRANGE_NAMES, SuiteBase

FIRST, SECOND = "node-a#1", "node-b#1"


async def held(store: Store, name: str, owner: str, lease_ms: int = 1_000) -> HostLock:
    """Acquire a lock that is free or already held by the caller."""
    lock = await store.acquire_lock(name, owner, lease_ms)
    assert lock is not None
    return lock


class HostLockSuite(SuiteBase):
    """Locks for what only one node may do at a time."""

    @pytest.mark.contract("OWN-4")
    async def test_a_lock_has_one_holder_until_its_lease_expires(self, store: Store, clock: VirtualClock) -> None:
        """It does not expire a microsecond earlier; the next holder has the next epoch."""
        lock = await held(store, "retention", FIRST)
        assert lock == HostLock(
            name="retention", owner=FIRST, epoch=1, acquired_at=START, lease_until=START + 1_000_000
        )
        assert await store.find_locks() == [lock]
        clock.advance(us=999_999)
        assert await store.acquire_lock("retention", SECOND, 1_000) is None
        clock.advance(us=1)
        taken = await held(store, "retention", SECOND)
        assert (taken.owner, taken.epoch, taken.acquired_at) == (SECOND, 2, clock.now())
        assert await store.acquire_lock("retention", FIRST, 1_000) is None
        assert await store.find_locks() == [taken]

    @pytest.mark.contract("OWN-4")
    async def test_its_holder_renews_it_and_keeps_the_epoch(self, store: Store, clock: VirtualClock) -> None:
        """Even late, if no other owner came first: what it wrote under the epoch remains valid."""
        await held(store, "retention", FIRST)
        clock.advance(ms=999)
        renewed = await held(store, "retention", FIRST, 5_000)
        assert renewed == HostLock(
            name="retention", owner=FIRST, epoch=1, acquired_at=START, lease_until=clock.now() + 5_000_000
        )
        clock.advance(ms=60_000)
        assert await store.find_locks() == [renewed]
        assert (await held(store, "retention", FIRST)).epoch == 1

    @pytest.mark.contract("OWN-4")
    async def test_a_released_lock_is_free_at_once(self, store: Store, clock: VirtualClock) -> None:
        """Only its holder can release it, at its epoch; the epoch grows even for the same owner."""
        lock = await held(store, "retention", FIRST)
        assert not await store.release_lock("retention", SECOND, lock.epoch)
        assert not await store.release_lock("retention", FIRST, lock.epoch + 1)
        assert not await store.release_lock("other", FIRST, lock.epoch)
        assert await store.find_locks() == [lock]
        assert await store.release_lock("retention", FIRST, lock.epoch)
        assert not await store.release_lock("retention", FIRST, lock.epoch)
        assert await store.find_locks() == []
        assert (await held(store, "retention", FIRST)).epoch == 2
        assert await store.release_lock("retention", FIRST, 2)
        assert (await held(store, "retention", SECOND)).epoch == 3

    @pytest.mark.contract("OWN-4")
    async def test_of_many_that_ask_at_once_one_gets_it(self, store: Store, clock: VirtualClock) -> None:
        """Every name is a separate lock."""
        asked = [store.acquire_lock("retention", f"node-{number}#1", 1_000) for number in range(8)]
        won = [lock for lock in await asyncio.gather(*asked) if lock is not None]
        assert len(won) == 1
        assert won == await store.find_locks()
        for name in STRANGE_NAMES:
            assert (await held(store, name, SECOND)).epoch == 1
        names = [lock.name for lock in await store.find_locks()]
        assert names == sorted({"retention", *STRANGE_NAMES})

    @pytest.mark.contract("OWN-1", "OWN-4")
    async def test_a_node_that_comes_back_ends_the_locks_of_its_former_lives(
        self, store: Store, clock: VirtualClock
    ) -> None:
        """This excludes other nodes, whose names may begin alike."""
        await held(store, "retention", FIRST, 60_000)
        await held(store, "relay", "node-aa#1", 60_000)
        await store.renew("node-a#2", 60_000)
        assert await store.acquire_lock("retention", "node-a#2", 1_000) is None
        await store.renew("node-a#2", 60_000, is_start=True)
        assert (await held(store, "retention", "node-a#2")).epoch == 2
        assert await store.acquire_lock("relay", "node-a#2", 1_000) is None

    @pytest.mark.contract("OWN-4")
    async def test_a_clock_that_was_ahead_holds_no_lock_up(self, store: Store, clock: VirtualClock) -> None:
        """A lease that ends beyond the horizon counts as expired."""
        clock.advance(us=2 * LEASE_HORIZON)
        await held(store, "retention", FIRST)
        clock.set_back(ms=2 * LEASE_HORIZON // 1_000)
        assert (await held(store, "retention", SECOND)).epoch == 2

    @pytest.mark.contract("OWN-4", "API-2")
    @pytest.mark.parametrize("name", BAD_NAMES)
    async def test_what_is_no_name_is_refused(self, store: Store, clock: VirtualClock, name: Any) -> None:
        """Invalid leases are refused as well."""
        for call in (
            store.acquire_lock(name, FIRST, 1),
            store.acquire_lock("retention", name, 1),
            store.acquire_lock("retention", FIRST, 0),
            store.release_lock(name, FIRST, 1),
            store.release_lock("retention", name, 1),
            store.release_lock("retention", FIRST, 2**70),
        ):
            with pytest.raises(InvalidInput):
                await call
        assert await store.find_locks() == []
