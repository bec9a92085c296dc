"""Schedules over long times, with nodes that die: each tick starts one run, whatever the clocks and the store do.

`TEST_SCHEDULE_DAYS=366` plays a whole year, as `make soak` does.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from itertools import takewhile
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.core import events as e
from holdfast.core.keys import ANY_VERSION
from holdfast.core.schedules import Schedule, ScheduleSpec
from holdfast.engine.host_locks import HostDuty
from holdfast.engine.schedules import Declaration, Schedules, tags_of
from holdfast.engine.ticks import ticks_after
from holdfast.engine.turns.draft import prepare_run, start_key
from holdfast.errors import StoreUnavailable
from holdfast.registry import Registry
from holdfast.store.memory import MemoryStore
from holdfast.store.port import NewRun, ScheduleQuery, Store
from holdfast.testing import START, sim_loop
from holdfast.testing.faults import Faults, FaultyStore, Weather
from holdfast.testing.sim_loop import LoopClock, SimLoop, SimProcess
from tests.sim.cluster import SeededIds

DAY_S = 86_400
LEASE_MS = 3_600_000
BEGIN = START + 53 * 86_400_000_000
"""March 22: the clocks change in Sofia a week later, and on Lord Howe Island after another."""
NODES = "abc"
MOST_KILLS = 20
"""How many kills in a row there are at most; then the processes have a moment."""

ZONES = ("Europe/Sofia", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata", "UTC")
CRONS = ("30 2 * * *", "30 3 * * *", "0 9 * * MON-FRI", "15 */6 * * *", "0 0 L * *", "0 1,2,3 * * SUN")
DAYS, SCHEDULES = int(os.environ.get("TEST_SCHEDULE_DAYS", "16")), 50


class _Known:
    version = "1"


class FixedVersion(Registry):
    """A registry in which every workflow is there."""

    def workflow(self, name: str, version: str | None = None) -> Any:
        """Return a definition that has a version."""
        return _Known()


def schedules_of(store: Store, ids: SeededIds, node: str) -> Schedules:
    """Return the schedules as one process has them."""

    def prepare(queued: e.RunQueued, schedule: Schedule, tick: int) -> NewRun:
        run_id = ids.new_id()
        key = start_key(run_id, queued, ANY_VERSION)
        return prepare_run(run_id, queued, tick, node, tags=tags_of(schedule), key=key)

    async def never(*_: Any) -> None:
        raise AssertionError("nothing is cancelled, and no run is awaited")

    plans: Any = None
    return Schedules("sim", store, FixedVersion(), plans, ids, prepare, never, never, never, 3_600.0)


def declared(number: int) -> Schedule:
    """Return one of many different schedules."""
    if number % 10 == 0:
        spec = ScheduleSpec(every_ms=3_600_000 * (5 + number), overlap="allow")
    elif number % 10 == 1:
        spec = ScheduleSpec(at=BEGIN + number * 3_600_000_000, overlap="allow")
    else:
        jitter_ms = 60_000 * (number % 4)
        cron, tz = CRONS[number % len(CRONS)], ZONES[number % len(ZONES)]
        spec = ScheduleSpec(cron=cron, tz=tz, overlap="allow", jitter_ms=jitter_ms)
    spec = replace(spec, catch_up_ms=30 * 86_400_000)
    return Schedule(schedule_id=f"s-{number}", app="sim", workflow="w", spec=spec)


async def play(loop: SimLoop, store: MemoryStore, rng: Random, days: int) -> int:
    """Let three processes fire schedules; return how often one was killed.

    While ticks are due one of them is killed every second, and some die within a commit; the store is not always there.
    """
    weather = Weather(Faults(latency_s=0.05, refused=0.05, unanswered=0.05, repeated=0.05, unheard=0.5))
    kills = 0

    async def live(name: str, life: int) -> None:
        faulty, owner = FaultyStore(store, weather, Random(rng.random())), f"{name}#{life}"
        while True:
            try:
                await faulty.renew(owner, LEASE_MS, is_start=True)
                break
            except StoreUnavailable:
                await asyncio.sleep(0.1)
        schedules = schedules_of(faulty, SeededIds(Random(rng.random())), name)
        await HostDuty("schedules", owner, faulty, schedules.fire, LEASE_MS, 3_600.0, schedules.until_needed).run()

    processes: dict[str, SimProcess] = {}

    def restart(name: str) -> None:
        if name in processes:
            processes[name].kill()
        processes[name] = SimProcess(loop, f"{name}-{kills}")
        processes[name].spawn(live(name, kills))
        if rng.random() < 0.3:
            processes[name].fuse = rng.randrange(1, 200)

    for name in NODES:
        restart(name)
    until = loop.time() + days * DAY_S
    while loop.time() < until:
        await asyncio.sleep(await seconds_until_due(store))
        for _ in range(MOST_KILLS):
            kills += 1
            restart(rng.choice(NODES))
            await asyncio.sleep(rng.uniform(0.5, 1.5))
            if await seconds_until_due(store) > 2.0:
                break
        if rng.random() < 0.02:  # runs are deleted as soon as they could have been; their ticks are not run again
            purged.update(await delete_some(store, rng))
    weather.faults = Faults()
    restart("calm")
    await asyncio.sleep(3 * DAY_S)
    for process in processes.values():
        process.kill()
    return kills


async def seconds_until_due(store: MemoryStore) -> float:
    """Return how long nothing is due."""
    [first] = await store.find(ScheduleQuery(app="sim", by_due=True, limit=1))
    assert first.next_due is not None
    return max(0.0, (first.next_due - await store.now()) / 1_000_000)


purged: Counter[tuple[str, int]] = Counter()


def tick_of(first: Any) -> tuple[str, int]:
    """Return the tick of a run by its first event."""
    assert isinstance(first, e.RunQueued)
    assert first.schedule is not None
    return first.schedule.schedule_id, first.schedule.tick


async def delete_some(store: MemoryStore, rng: Random) -> list[tuple[str, int]]:
    """Delete some runs behind the back of the schedules, as retention does when they have finished long ago."""
    gone = [run_id for run_id in store._runs if rng.random() < 0.3]
    ticks = []
    for run_id in gone:
        run = store._runs.pop(run_id)
        ticks.append(tick_of(run.events[0].data))
        store._requests = {key: of for key, of in store._requests.items() if of != run_id}
    return ticks


@pytest.mark.slow
@pytest.mark.contract("TMR-2", "OWN-4", "FMT-2")
@pytest.mark.parametrize("seed", [1])
def test_each_tick_starts_one_run_whatever_dies(
    seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sim_loop, "MOST_ROUNDS", 50_000 * DAYS)
    caplog.set_level(logging.ERROR, "holdfast")
    loop, rng = SimLoop(seed), Random(seed)
    store = MemoryStore(LoopClock(loop, BEGIN))
    purged.clear()

    async def main() -> int:
        first = schedules_of(store, SeededIds(rng), "first")
        for number in range(SCHEDULES):
            await first.declare(Declaration(declared(number)))
        return await play(loop, store, rng, DAYS)

    kills = loop.simulate(main())
    end = BEGIN + DAYS * DAY_S * 1_000_000
    started = Counter(tick_of(run.events[0].data) for run in store._runs.values()) + purged
    wanted = Counter(
        (f"s-{number}", tick)
        for number in range(SCHEDULES)
        for tick in takewhile(lambda tick: tick < end, ticks_after(declared(number).spec, BEGIN))
    )
    early = Counter({key: count for key, count in started.items() if key[1] < end})
    assert early == wanted
    print(f"{len(wanted)} ticks in {DAYS} days, {kills} kills")
    assert len(wanted) > 27 * DAYS, len(wanted)
    assert kills > 10 * DAYS, kills
    assert max(started.values()) == 1
