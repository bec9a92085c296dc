"""Duties under host locks: one node at a time does them, whatever becomes of the others."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from holdfast.engine.host_locks import HeldLock, HostDuty
from holdfast.errors import LockLost, StoreUnavailable
from holdfast.store.memory import MemoryStore
from holdfast.store.port import HostLock, Store
from holdfast.store.proxy import StoreProxy
from holdfast.testing.faults import Faults, FaultyStore, Weather
from holdfast.testing.sim_loop import LoopClock, SimLoop, SimProcess

LEASE_MS = 3_000
POLL_S = 2.0


class Ledger:
    """Who did the duty when, by the time of the loop."""

    def __init__(self) -> None:
        self.began: list[tuple[str, float, int]] = []
        self.writes: list[tuple[str, int]] = []

    def duty(self, store: Store, node: str, life: int = 1) -> HostDuty:
        async def work(held: HeldLock) -> None:
            self.began.append((node, asyncio.get_running_loop().time(), held.lock.epoch))
            while True:
                held.check()
                self.writes.append((node, held.lock.epoch))
                await asyncio.sleep(0.1)

        return HostDuty("duty", f"{node}#{life}", store, work, LEASE_MS, POLL_S)


@pytest.mark.contract("OWN-4")
def test_a_node_that_dies_is_replaced_when_its_lease_has_expired() -> None:
    loop, ledger = SimLoop(1), Ledger()

    async def main() -> None:
        store = MemoryStore(LoopClock(loop))
        processes = [SimProcess(loop, name) for name in "ab"]
        for process in processes:
            process.spawn(ledger.duty(store, process.name).run())
        await asyncio.sleep(10)
        [(first, _, epoch)] = ledger.began
        assert epoch == 1
        died_at = loop.time()
        processes["ab".index(first)].kill()
        await asyncio.sleep(10)
        (_, _, _), (second, began_at, epoch) = ledger.began
        assert (second != first, epoch) == (True, 2)
        assert LEASE_MS / 1_500 <= began_at - died_at <= LEASE_MS / 1_000 + 0.1

    loop.simulate(main())


@pytest.mark.contract("OWN-4")
def test_a_node_that_stops_hands_its_duty_over() -> None:
    loop, ledger = SimLoop(2), Ledger()

    async def main() -> None:
        store = MemoryStore(LoopClock(loop))
        tasks = {name: asyncio.create_task(ledger.duty(store, name).run()) for name in "ab"}
        await asyncio.sleep(10)
        [(first, _, _)] = ledger.began
        stopped_at = loop.time()
        tasks[first].cancel()
        await asyncio.gather(tasks[first], return_exceptions=True)
        assert first not in {lock.owner[0] for lock in await store.find_locks()}
        await asyncio.sleep(POLL_S + 0.1)
        (_, _, _), (second, began_at, _) = ledger.began
        assert second != first
        assert began_at - stopped_at <= POLL_S + 0.1
        tasks[second].cancel()

    loop.simulate(main())


@pytest.mark.contract("OWN-4")
def test_one_that_was_frozen_writes_nothing_more() -> None:
    loop, ledger = SimLoop(3), Ledger()

    async def main() -> None:
        store = MemoryStore(LoopClock(loop))
        processes = {name: SimProcess(loop, name) for name in "ab"}
        for name, process in processes.items():
            process.spawn(ledger.duty(store, name).run())
        await asyncio.sleep(10)
        [(first, _, _)] = ledger.began
        processes[first].stop()
        await asyncio.sleep(10)
        frozen = ledger.writes.index((ledger.began[1][0], 2))
        processes[first].go_on()
        await asyncio.sleep(10)
        assert {epoch for _, epoch in ledger.writes[frozen:]} == {2}

    loop.simulate(main())


@pytest.mark.contract("OWN-4")
@pytest.mark.parametrize("seed", range(10))
def test_in_any_weather_epochs_only_grow(seed: int) -> None:
    """However the store fails, and however often nodes die, two epochs never take turns."""
    loop, ledger = SimLoop(seed), Ledger()

    async def main() -> None:
        store, rng = MemoryStore(LoopClock(loop)), Random(seed)
        weather = Weather(Faults(latency_s=0.05, refused=0.1, unanswered=0.1, repeated=0.1))
        for life in range(20):
            processes = [SimProcess(loop, name) for name in "abc"]
            for process in processes:
                faulty = FaultyStore(store, weather, Random(rng.random()))
                process.spawn(ledger.duty(faulty, process.name, life).run())
            await asyncio.sleep(rng.uniform(0, 8))
            for process in processes:
                process.kill()

    loop.simulate(main())
    epochs = [epoch for _, epoch in ledger.writes]
    assert epochs == sorted(epochs)
    assert epochs[-1] >= 5


async def test_what_a_duty_raises_ends_it_and_gives_the_lock_up() -> None:
    store = MemoryStore()

    async def work(held: HeldLock) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await HostDuty("duty", "a#1", store, work, LEASE_MS, POLL_S).run()
    assert await store.find_locks() == []


@pytest.mark.contract("OWN-4")
async def test_a_duty_goes_on_when_the_store_is_back() -> None:
    store, tries = MemoryStore(), []

    async def work(held: HeldLock) -> None:
        tries.append(held.lock.epoch)
        if len(tries) == 1:
            raise StoreUnavailable("away")
        if len(tries) == 2:
            raise LockLost("lost")

    await HostDuty("duty", "a#1", store, work, LEASE_MS, POLL_S).run()
    assert tries == [1, 2, 3]


class SlowLocks(StoreProxy):
    """A store that is asked about locks, decides later, and decides also if its caller is gone: as PostgreSQL does."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.asked, self.may_decide = asyncio.Event(), asyncio.Event()

    async def acquire_lock(self, name: str, owner: str, lease_ms: int) -> HostLock | None:
        async def decide() -> HostLock | None:
            self.asked.set()
            await self.may_decide.wait()
            return await self._store.acquire_lock(name, owner, lease_ms)

        return await asyncio.shield(asyncio.ensure_future(decide()))

    async def release_lock(self, name: str, owner: str, epoch: int) -> bool:
        self.asked.set()
        await self.may_decide.wait()
        return await self._store.release_lock(name, owner, epoch)


@pytest.mark.contract("OWN-4")
@pytest.mark.parametrize("is_renewal", [False, True], ids=["acquired", "renewed"])
async def test_a_duty_that_is_cancelled_while_the_store_decides_leaves_no_lock(is_renewal: bool) -> None:
    store = SlowLocks(MemoryStore())
    is_working = asyncio.Event()

    async def work(held: HeldLock) -> None:
        is_working.set()
        await asyncio.Event().wait()

    duty = asyncio.create_task(HostDuty("duty", "a#1", store, work, LEASE_MS, POLL_S).run())
    await store.asked.wait()
    if is_renewal:
        store.may_decide.set()
        await is_working.wait()
        store.asked.clear()
        store.may_decide.clear()
        await store.asked.wait()
    duty.cancel()
    await asyncio.sleep(0)
    store.may_decide.set()
    await asyncio.wait({duty})
    assert duty.cancelled()
    assert await store.find_locks() == []


@pytest.mark.contract("OWN-4")
async def test_a_duty_that_is_cancelled_while_it_releases_its_lock_has_released_it() -> None:
    store, has_worked = SlowLocks(MemoryStore()), asyncio.Event()

    async def work(held: HeldLock) -> None:
        store.asked.clear()
        store.may_decide.clear()
        has_worked.set()

    store.may_decide.set()
    duty = asyncio.create_task(HostDuty("duty", "a#1", store, work, LEASE_MS, POLL_S).run())
    await has_worked.wait()
    await store.asked.wait()
    duty.cancel()
    await asyncio.sleep(0)
    store.may_decide.set()
    await asyncio.wait({duty})
    assert await store.find_locks() == []
