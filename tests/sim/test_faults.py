"""A store seen through bad weather keeps the port's promises, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from holdfast.errors import StoreUnavailable
from holdfast.store.memory import MemoryStore
from holdfast.store.port import Created, Existing
from holdfast.testing.faults import Faults, FaultyStore, Weather
from holdfast.testing.samples import new_run, signal
from holdfast.testing.sim_loop import LoopClock, SimLoop

Scene = Callable[[FaultyStore, MemoryStore, Weather], Coroutine[Any, Any, None]]


def play(faults: Faults, scene: Scene) -> None:
    """Play a scene in this weather."""
    loop = SimLoop(1)

    async def main() -> None:
        store, weather = MemoryStore(LoopClock(loop)), Weather(faults)
        await scene(FaultyStore(store, weather, Random(1)), store, weather)

    loop.simulate(main())


def test_in_calm_weather_it_is_the_store() -> None:
    async def scene(faulty: FaultyStore, store: MemoryStore, weather: Weather) -> None:
        assert await faulty.create([new_run("run-1")]) == [Created("run-1")]
        assert await faulty.load(["run-1"]) == await store.load(["run-1"])

    play(Faults(), scene)


def test_a_refused_verb_was_not_carried_out() -> None:
    async def scene(faulty: FaultyStore, store: MemoryStore, weather: Weather) -> None:
        with pytest.raises(StoreUnavailable):
            await faulty.create([new_run("run-1")])
        assert await store.load(["run-1"]) == [None]

    play(Faults(refused=1.0), scene)


def test_an_unanswered_verb_was_carried_out_and_can_be_retried() -> None:
    async def scene(faulty: FaultyStore, store: MemoryStore, weather: Weather) -> None:
        with pytest.raises(StoreUnavailable):
            await faulty.create([new_run("run-1")])
        weather.faults = Faults()
        assert await faulty.create([new_run("run-1")]) == [Existing("run-1")]

    play(Faults(unanswered=1.0), scene)


def test_what_is_repeated_arrives_later_and_changes_nothing() -> None:
    async def scene(faulty: FaultyStore, store: MemoryStore, weather: Weather) -> None:
        await faulty.create([new_run("run-1")])
        await faulty.deliver([signal("run-1", signal_id="one")])
        before = await store.load(["run-1"])
        await asyncio.sleep(100.0)
        assert await store.load(["run-1"]) == before

    play(Faults(repeated=1.0), scene)


def test_nobody_reaches_a_store_that_is_down() -> None:
    async def scene(faulty: FaultyStore, store: MemoryStore, weather: Weather) -> None:
        weather.is_down = True
        with pytest.raises(StoreUnavailable):
            await faulty.now()
        weather.is_down = False
        assert await faulty.now() >= await store.now() - 1_000

    play(Faults(), scene)


def test_a_lost_wake_up_costs_the_time_that_is_waited() -> None:
    async def scene(faulty: FaultyStore, store: MemoryStore, weather: Weather) -> None:
        listener = faulty.wakeups.listen()
        store.wakeups.notify()
        assert not await listener.wait(5.0)
        weather.faults = Faults()
        faulty.wakeups.notify()
        assert await listener.wait(5.0)
        listener.close()

    play(Faults(unheard=1.0), scene)


def test_answers_take_time() -> None:
    async def scene(faulty: FaultyStore, store: MemoryStore, weather: Weather) -> None:
        for _ in range(20):
            await faulty.now()
        assert asyncio.get_running_loop().time() > 1.0

    play(Faults(latency_s=0.1), scene)
