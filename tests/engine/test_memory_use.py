"""What a node and its store keep of runs that have finished: nothing that grows with their number."""

import asyncio
import gc
import tracemalloc

import pytest

import holdfast as hf
from tests.engine.harness import EngineVariant
from tests.process_state import traced_memory

RUNS = 400
BYTES_PER_RUN = 40
"""Less than an entry of a dict with its key: one that is kept for each run is found."""


@pytest.mark.contract("OWN-3")
async def test_finished_runs_leave_nothing_behind(tmp_path_factory: pytest.TempPathFactory) -> None:
    variant = EngineVariant(f"sqlite:///{tmp_path_factory.mktemp('soak')}/soak.db", 5_000)
    app = hf.App("soak")

    @app.activity
    async def act(number: int) -> int:
        return number

    @app.workflow
    async def work(number: int) -> int:
        first = await act(number)
        if number % 4 == 0:
            await hf.wait_signal("go", str)
        return await act(first)

    async def one(number: int) -> None:
        run = await app.start(work, number, request_id=f"request-{number}")
        if number % 4 == 0:
            await run.signal("go", "now", signal_id=f"signal-{number}")
        assert await run.result() == number

    async def many(first: int) -> int:
        for start in range(first, first + RUNS, 100):
            await asyncio.gather(*(one(number) for number in range(start, start + 100)))
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    async with asyncio.timeout(60), app.node(variant.store):
        with traced_memory():
            after = [await many(round * RUNS) for round in range(4)][1:]
            # What is kept for each run is kept in every round; what is made once, such as a cache, only in one.
            kept = min(after[1] - after[0], after[2] - after[1]) / RUNS
        assert kept < BYTES_PER_RUN, f"{kept:.0f} bytes are kept for each run that has finished"


class Measuring:
    """An app with runs that are under way, that wait, and that end."""

    def __init__(self) -> None:
        self.app = app = hf.App("collected")
        self.gate = asyncio.Event()

        @app.activity
        async def act(number: int) -> int:
            await self.gate.wait()
            return number

        @app.workflow
        async def work(number: int) -> int:
            return await act(number) + await act(number)

        @app.workflow
        async def wait() -> int:
            return await hf.wait_signal("go", int)

        self.work, self.wait = work, wait

    async def to_their_end(self, count: int) -> None:
        """Take runs of each kind to their end."""
        working = await asyncio.gather(*(self.app.start(self.work, number) for number in range(count)))
        waiting = await asyncio.gather(*(self.app.start(self.wait) for _ in range(count)))
        await asyncio.gather(*(run.signal("go", 1) for run in waiting))
        await asyncio.gather(*(run.result() for run in (*working, *waiting)))


def tracked() -> int:
    """Return how many objects the garbage collector walks through.

    A dict that holds nothing to walk through is not counted: up to Python 3.13 the collector leaves it out by itself.
    """
    gc.collect()
    return sum(type(each) is not dict or any(map(gc.is_tracked, each.values())) for each in gc.get_objects())


async def test_a_run_has_few_objects_that_the_garbage_collector_walks_through() -> None:
    measuring, count = Measuring(), 100
    options = hf.NodeOptions(lease_ms=600_000, activities_at_once=2)  # the others wait for a slot
    async with asyncio.timeout(60), measuring.app.node("memory://", options=options):
        measuring.gate.set()
        await measuring.to_their_end(20)
        measuring.gate.clear()
        before = tracked()
        waiting = await asyncio.gather(*(measuring.app.start(measuring.wait) for _ in range(count)))
        parked = tracked()
        working = await asyncio.gather(*(measuring.app.start(measuring.work, number) for number in range(count)))
        under_way = tracked()
        measuring.gate.set()
        await asyncio.gather(*(run.signal("go", 1) for run in waiting))
        await asyncio.gather(*(run.result() for run in (*waiting, *working)))
    assert (parked - before) / count < 25
    assert (under_way - parked) / count < 25


async def test_a_start_that_waits_has_few_objects_that_the_garbage_collector_walks_through() -> None:
    measuring, count = Measuring(), 200
    async with asyncio.timeout(60), measuring.app.node("memory://", options=hf.NodeOptions(lease_ms=600_000)):
        measuring.gate.set()
        await measuring.to_their_end(20)
        before = tracked()
        starting = [asyncio.ensure_future(measuring.app.start(measuring.wait)) for _ in range(count)]
        await asyncio.sleep(0)  # each has asked for its run, and none has an answer
        waiting = tracked()
        runs = await asyncio.gather(*starting)
        await asyncio.gather(*(run.signal("go", 1) for run in runs))
        await asyncio.gather(*(run.result() for run in runs))
    assert (waiting - before) / count < 11


async def test_finished_runs_leave_the_garbage_collector_nothing_to_free() -> None:
    measuring = Measuring()
    measuring.gate.set()
    async with asyncio.timeout(60), measuring.app.node("memory://", options=hf.NodeOptions(lease_ms=600_000)):
        await measuring.to_their_end(20)
        gc.collect()
        gc.disable()
        try:
            await measuring.to_their_end(100)
            freed = gc.collect()
        finally:
            gc.enable()
    assert freed < 100  # for 200 runs: none has a cycle
