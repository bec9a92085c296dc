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
