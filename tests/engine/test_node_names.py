"""A node that comes back under its name: it takes over what its former life held, which finds out and ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.engine.node import Node
from holdfast.errors import InvalidInput, NodeSuperseded, StoreUnavailable
from holdfast.store.decisions import name_of
from holdfast.store.proxy import StoreProxy
from tests.chaos.stores import File
from tests.engine.harness import MOST_SECONDS, EngineVariant
from tests.engine.named_node import RUN_ID, make_ship_app

ROOT = Path(__file__).parents[2]
LEASE_MS = 600_000
PATIENCE_S = 60.0


def vanish(node: Node) -> None:
    """End a node as a killed process ends: without a word to any other."""
    for task in node._tasks:
        task.cancel()
    node.owned_runs.executor.cancel_all()


@asynccontextmanager
async def killed(app: hf.App, store: Any, name: str, **options: Any) -> AsyncIterator[Node]:
    """Open a node that is gone in the end, as if its process had been killed."""
    context = app.node(store, name=name, options=hf.NodeOptions(lease_ms=LEASE_MS, **options))
    node = await context.__aenter__()
    yield node
    vanish(node)
    app.runtimes.remove(app.runtime())


@pytest.mark.contract("OWN-1", "OWN-3")
async def test_an_engine_restarted_under_its_name_goes_on_with_its_runs_within_the_lease(
    variant: EngineVariant,
) -> None:
    app, ship = make_ship_app()
    async with variant.opened() as store, asyncio.timeout(MOST_SECONDS):
        async with killed(app, store, "web-0") as former:
            run_id = (await app.start(ship)).run_id
            while not former.owned_runs.executor.busy:  # noqa: ASYNC110
                await asyncio.sleep(0)
        async with app.node(store, name="web-0", options=hf.NodeOptions(lease_ms=LEASE_MS)) as node:
            assert name_of(node.name) == name_of(former.name) == "web-0"
            assert node.name != former.name
            assert await app.run(run_id).result() == "built by attempt 2"


@pytest.mark.contract("OWN-1", "ACT-1")
async def test_jobs_of_a_former_life_do_not_wait_until_they_become_visible(variant: EngineVariant) -> None:
    app = hf.App("yard")
    began = asyncio.Event()

    @app.activity(queue="far")
    async def build() -> str:
        if hf.activity_context().attempt == 1:
            began.set()
            await asyncio.Event().wait()
        return "built"

    @app.workflow
    async def ship() -> str:
        return await build()

    async with variant.opened() as store, asyncio.timeout(MOST_SECONDS):
        async with killed(app, store, "web-0", queues=("far",), visible_ms=LEASE_MS):
            run_id = (await app.start(ship)).run_id
            await began.wait()
        async with app.node(store, name="web-0", options=hf.NodeOptions(queues=("far",))):
            assert await app.run(run_id).result() == "built"


@pytest.mark.contract("OWN-1")
async def test_of_two_nodes_with_one_name_the_older_fails_and_the_younger_goes_on(
    variant: EngineVariant, caplog: pytest.LogCaptureFixture
) -> None:
    (older, ship), (younger, _) = make_ship_app(), make_ship_app()
    async with variant.opened() as store, asyncio.timeout(MOST_SECONDS):
        with pytest.raises(NodeSuperseded, match="node web-0: another process has started under this name"):  # noqa: PT012
            async with older.node(store, name="web-0", options=hf.NodeOptions(lease_ms=90)) as first:
                run = await older.start(ship)
                while not first.owned_runs.executor.busy:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                async with younger.node(store, name="web-0") as second:
                    assert await younger.run(run.run_id).result() == "built by attempt 2"
                    while first.failure is None:  # noqa: ASYNC110
                        await asyncio.sleep(0.002)
                    with pytest.raises(NodeSuperseded):
                        await older.start(ship)
                    with pytest.raises(NodeSuperseded):
                        await first.run_until(asyncio.get_running_loop().create_future())
                    assert first.owned_runs.executor.busy == 0
                    assert list((await store.stats()).leases) == [second.name]
    assert second.failure is None
    assert " stops: " in caplog.text


@pytest.mark.contract("OWN-1")
async def test_a_node_that_was_superseded_says_so_also_if_the_store_cannot_be_reached(variant: EngineVariant) -> None:
    """Who restarts it whenever the store has failed would take the runs from the younger one again."""

    class Unreachable(StoreProxy):
        """A store that is lost when a node ends."""

        async def release(self, node: str, run_ids: Sequence[str] | None = None) -> int:
            raise StoreUnavailable("the store could not be reached")

    (older, _), (younger, _) = make_ship_app(), make_ship_app()
    async with variant.opened() as store, asyncio.timeout(MOST_SECONDS):
        first = older.node(Unreachable(store), name="web-0", options=hf.NodeOptions(lease_ms=90))
        with pytest.raises(NodeSuperseded):
            async with first as node, younger.node(store, name="web-0"):
                await node.run_until(asyncio.get_running_loop().create_future())


@pytest.mark.parametrize("name", ["", "a#b", "a\nb", "x" * 201, 7])
async def test_a_name_that_no_node_can_have_is_refused(name: Any) -> None:
    app, _ = make_ship_app()
    store = hf.MemoryStore()
    with pytest.raises(InvalidInput, match="name"):
        async with app.node(store, name=name):
            pass
    assert (await store.stats()).leases == {}


# --- with processes


@asynccontextmanager
async def process(name: str, address: str, lease_ms: int, *more: str) -> AsyncIterator[Process]:
    """Start a process that is a node, and kill it in the end."""
    command = [sys.executable, "-m", "tests.engine.named_node", name, address, str(lease_ms), *more]
    started = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=PIPE, stderr=PIPE)
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


async def hear(started: Process, line: str) -> None:
    """Wait until a process has said this."""
    assert started.stdout is not None
    while (heard := (await started.stdout.readline()).decode().strip()) != line:
        assert heard, f"it ended before it said {line!r}"


@pytest.fixture(params=["sqlite", "postgres"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the address of a store that processes can share."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/lives.db"
    url: str = request.getfixturevalue("postgres_url")
    return url


async def freeze(started: Process, address: str) -> None:
    """Stop a process where it is, but not while it holds the lock of a file: nobody takes that from it."""
    while True:
        started.send_signal(signal.SIGSTOP)
        await asyncio.to_thread(os.waitid, os.P_PID, started.pid, os.WSTOPPED)
        file = File(Path(address.removeprefix("sqlite:///")))
        if address.startswith("postgresql") or not await asyncio.to_thread(file.is_held):
            return
        started.send_signal(signal.SIGCONT)


async def result(address: str) -> object:
    """Wait for the run's result."""
    app, _ = make_ship_app()
    async with app.connect(address):
        return await app.run(RUN_ID).result()


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.contract("OWN-1", "OWN-3")
async def test_a_killed_process_that_is_started_again_under_its_name_goes_on_at_once(shared: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        async with process("web-0", shared, LEASE_MS, "starts") as first:
            await hear(first, "began 1")
            first.send_signal(signal.SIGKILL)
            await first.wait()
        async with process("web-0", shared, LEASE_MS) as second:
            await hear(second, "began 2")
            assert await result(shared) == "built by attempt 2"


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.contract("OWN-1", "OWN-3")
async def test_a_frozen_process_that_wakes_up_finds_its_name_taken_and_ends(shared: str) -> None:
    async with asyncio.timeout(PATIENCE_S), process("web-0", shared, 3_000, "starts") as zombie:
        await hear(zombie, "began 1")
        await freeze(zombie, shared)
        async with process("web-0", shared, LEASE_MS) as second:
            await hear(second, "began 2")
            assert await result(shared) == "built by attempt 2"
            zombie.send_signal(signal.SIGCONT)
            _, said = await zombie.communicate()
            assert zombie.returncode == 1
            assert b"NodeSuperseded" in said
            assert second.returncode is None
