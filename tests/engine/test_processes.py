"""Activities and the processes that carry them out: killed with SIGKILL, and finished by others."""

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.core.invariants import check
from holdfast.store.port import Store
from holdfast.testing import system_view
from tests.engine.killable_process import LEASE_MS, RUN_ID, make_film_app

pytestmark = [pytest.mark.slow, pytest.mark.process]

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0


@asynccontextmanager
async def hand(role: str, address: str) -> AsyncIterator[Process]:
    """Start a process in a role, and kill it in the end."""
    command = [sys.executable, "-m", "tests.engine.killable_process", role, address]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=PIPE)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def hear(process: Process, line: str) -> None:
    """Wait until a process has said this."""
    assert process.stdout is not None
    while (heard := (await process.stdout.readline()).decode().strip()) != line:
        assert heard, f"it ended before it said {line!r}"


@asynccontextmanager
async def watching(address: str) -> AsyncIterator[Store]:
    """Look at the store from this process."""
    store = await hf.open_store(hf.Settings(store=address))
    try:
        yield store
    finally:
        await store.close()


async def finish(address: str) -> tuple[object, list[str]]:
    """Bring the run to its end with a node of this process; return its result and the types of its events."""
    app, _ = make_film_app("far", is_hanging=False)
    options = hf.NodeOptions(lease_ms=LEASE_MS)
    async with asyncio.timeout(PATIENCE_S), app.node(address, options=options) as node:
        run = app.run(RUN_ID)
        result = await run.result()
        events = [event.event_type for event in await run.events()]
        assert check(await system_view(node.store)) == []
        assert (await node.store.stats()).jobs == 0
    return result, events


@pytest.mark.contract("ACT-1", "OWN-3", "ATT-1")
async def test_a_job_outlives_the_processes_of_its_run_and_of_its_taker(tmp_path: Path) -> None:
    address = f"sqlite:///{tmp_path}/film.db"
    async with hand("producer", address) as producer:
        await hear(producer, "ready")
        async with watching(address) as store:
            while (await store.stats()).jobs == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    async with hand("worker hangs", address) as first:
        await hear(first, "began 1")
    async with hand("worker", address) as second:
        await hear(second, "began 2")
        result, events = await finish(address)
    assert result == "attempt 2"
    assert events.count("StepCompleted") == events.count("StepStarted") == 1


@pytest.mark.contract("ACT-1", "OWN-3")
async def test_details_outlive_the_process_that_said_them(tmp_path: Path) -> None:
    address = f"sqlite:///{tmp_path}/film.db"
    async with hand("producer hangs", address) as producer:
        await hear(producer, "began 1")
        async with watching(address) as store:
            while not (await store.load([RUN_ID]))[0].details:  # type: ignore[union-attr] # noqa: ASYNC110
                await asyncio.sleep(0.01)
    result, events = await finish(address)
    assert result == [2, {"frames": 7}]
    assert events.count("StepRetried") == 1
