"""Schedules over long times, with nodes that die: each tick starts one run, whatever the clocks and the store do.

`TEST_SCHEDULE_DAYS=366` plays a whole year, as `make soak` does.
"""

from __future__ import annotations

import asyncio
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
from holdfast.registry import Registry
from holdfast.store.memory import MemoryStore
from holdfast.store.port import NewRun, Store
from holdfast.testing import START
from holdfast.testing.faults import Faults, FaultyStore, Weather
from holdfast.testing.sim_loop import LoopClock, SimLoop, SimProcess
from tests.sim.cluster import SeededIds

DAY_S = 86_400
LEASE_MS = 3_600_000
BEGIN = START + 53 * 86_400_000_000
"""March 22: the clocks change in Sofia a week later, and on Lord Howe Island after another."""
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


async def play(loop: SimLoop, store: MemoryStore, rng: Random, days: int) -> None:
    """Let three processes fire schedules; they die all the time, and the store is not always there."""
    weather = Weather(Faults(latency_s=0.2, refused=0.05, unanswered=0.05, repeated=0.05, unheard=0.5))
    lives = 0

    async def live(process: SimProcess, name: str) -> None:
        faulty = FaultyStore(store, weather, Random(rng.random()))
        schedules = schedules_of(faulty, SeededIds(Random(rng.random())), name)
        duty = HostDuty("schedules", f"{name}#{lives}", faulty, schedules.fire, LEASE_MS, 3_600.0, schedules.is_needed)
        await duty.run()

    processes: dict[str, SimProcess] = {}
    until = loop.time() + days * DAY_S
    while loop.time() < until:
        name = rng.choice("abc")
        if name in processes:
            processes[name].kill()
        lives += 1
        processes[name] = SimProcess(loop, f"{name}-{lives}")
        processes[name].spawn(live(processes[name], name))
        if rng.random() < 0.3:
            processes[name].fuse = rng.randrange(1, 2_000)
        await asyncio.sleep(rng.expovariate(1 / (DAY_S / 6)))
        if rng.random() < 0.2:  # runs are deleted as soon as they could have been; their ticks are not run again
            purged.update(await delete_some(store, rng))
    processes["calm"] = SimProcess(loop, "calm")
    weather.faults = Faults()
    processes["calm"].spawn(live(processes["calm"], "calm"))
    await asyncio.sleep(3 * DAY_S)
    for process in processes.values():
        process.kill()


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


@pytest.mark.contract("TMR-2", "OWN-4", "FMT-2")
@pytest.mark.parametrize("seed", [1])
def test_each_tick_starts_one_run_whatever_dies(seed: int) -> None:
    loop, rng = SimLoop(seed), Random(seed)
    store = MemoryStore(LoopClock(loop, BEGIN))
    purged.clear()

    async def main() -> None:
        first = schedules_of(store, SeededIds(rng), "first")
        for number in range(SCHEDULES):
            await first.declare(Declaration(declared(number)))
        await play(loop, store, rng, DAYS)

    loop.simulate(main())
    end = BEGIN + DAYS * DAY_S * 1_000_000
    started = Counter(tick_of(run.events[0].data) for run in store._runs.values()) + purged
    wanted = Counter(
        (f"s-{number}", tick)
        for number in range(SCHEDULES)
        for tick in takewhile(lambda tick: tick < end, ticks_after(declared(number).spec, BEGIN))
    )
    early = Counter({key: count for key, count in started.items() if key[1] < end})
    assert early == wanted
    assert len(wanted) > 20 * DAYS, len(wanted)
    assert max(started.values()) == 1
