"""Where the tests of the engine run: a real node on a real store, within a bounded time."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from msgspec import Struct

from holdfast.app import App
from holdfast.core.events import Event
from holdfast.core.state import RunStatus
from holdfast.engine.node import Node
from holdfast.engine.options import NodeOptions
from holdfast.errors import NotFound
from holdfast.run import RunHandle
from holdfast.settings import load_settings
from holdfast.store.memory import MemoryStore
from holdfast.store.open import open_store
from holdfast.store.port import Store
from holdfast.store.sqlite import SqliteStore
from holdfast.testing import VirtualClock

MOST_SECONDS = 60.0
"""A test that takes longer hangs."""


class EngineVariant(Struct, frozen=True):
    """A store, and how many runs a node keeps in memory: with none, every turn replays the run's history."""

    store: str
    cached_runs: int

    @asynccontextmanager
    async def node(self, app: App, store: Store | None = None, **options: Any) -> AsyncIterator[Node]:
        """Run an app here; on a store that outlives the node, if one is given."""
        chosen = NodeOptions(cached_runs=self.cached_runs, **{"drain_s": 2.0, **options})
        async with asyncio.timeout(MOST_SECONDS), app.node(store or self.store, options=chosen) as node:
            yield node

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Store]:
        """Open the store for several nodes, one after the other."""
        store = await open_store(load_settings({}, store=self.store))
        try:
            yield store
        finally:
            await store.close()


@asynccontextmanager
async def store_with_virtual_time(variant: EngineVariant) -> AsyncIterator[tuple[Store, VirtualClock]]:
    """Give a store whose time stands still."""
    clock = VirtualClock()
    path = variant.store.removeprefix("sqlite:///")
    store: Store = MemoryStore(clock=clock) if path == variant.store else await SqliteStore.open(path, clock=clock)
    await store.migrate()
    try:
        yield store, clock
    finally:
        await store.close()


async def wait_for_history(run: RunHandle[Any], condition: Callable[[list[Event]], bool]) -> list[Event]:
    """Wait until the run's history is as it should be, and return it."""
    async with asyncio.timeout(MOST_SECONDS):
        while not condition(events := await _events(run)):  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        return events


async def _events(run: RunHandle[Any]) -> list[Event]:
    try:
        return await run.events()
    except NotFound:  # a child that its parent has yet to start
        return []


async def wait_for_event(run: RunHandle[Any], event_type: str, times: int = 1) -> Event:
    """Wait for an event of this type, and return the last one."""
    events = await wait_for_history(
        run, lambda events: sum(event.event_type == event_type for event in events) >= times
    )
    return [event for event in events if event.event_type == event_type][-1]


async def wait_for_status(run: RunHandle[Any], status: RunStatus) -> None:
    """Wait until the run has come to this status."""
    async with asyncio.timeout(MOST_SECONDS):
        while (await run.snapshot()).status != status:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def wait_for_child(variant: EngineVariant, run: RunHandle[Any]) -> None:
    """Wait until a child is there whose parent has started it: elsewhere than in a bucket it is, by the same commit."""
    if variant.store.startswith("s3:"):
        async with asyncio.timeout(MOST_SECONDS):
            while not await _is_there(run):  # noqa: ASYNC110
                await asyncio.sleep(0.002)


async def _is_there(run: RunHandle[Any]) -> bool:
    try:
        await run.status()
    except NotFound:
        return False
    return True


async def event_types(run: RunHandle[Any]) -> list[str]:
    """Return the types of a run's events."""
    return [event.event_type for event in await run.events()]
