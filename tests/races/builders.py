"""Runs and turns, made by the core as the engine makes them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec import Raw

from holdfast.core.commands import Command
from holdfast.core.events import NULL, Event, RunQueued
from holdfast.core.state import state_of
from holdfast.engine.turn import TurnDraft, start_run
from holdfast.limits import Limits
from holdfast.store.port import Created, LoadedRun, NewRun, Store
from holdfast.store.sqlite import SqliteStore

HOUR_MS = 3_600_000
GENEROUS = Limits(signals_per_run_per_minute=1_000_000)


@asynccontextmanager
async def opened(path: Path, limits: Limits = GENEROUS) -> AsyncIterator[SqliteStore]:
    """Open a store on a file that has been migrated, and close it at the end."""
    store = await SqliteStore.open(path, limits=limits)
    try:
        yield store
    finally:
        await store.close()


async def prepare(path: Path, *runs: NewRun, claim_for: str | None = None) -> None:
    """Make a file with these runs."""
    async with opened(path) as store:
        await store.migrate()
        if claim_for is not None:
            await store.renew(claim_for, HOUR_MS)
        answers = await store.create(runs, claim_for)
        assert all(isinstance(answer, Created) for answer in answers), answers


def new_run(run_id: str, request_id: str = "", value: Raw = NULL, now: int = 1) -> NewRun:
    """Make a run to create."""
    return start_run(run_id, RunQueued("shop", "1", run_request_id=request_id, input=value), now, "starter")


async def load(store: Store, run_id: str) -> LoadedRun:
    """Return a run that must be there."""
    (loaded,) = await store.load([run_id])
    assert loaded is not None, f"run {run_id} is missing"
    return loaded


async def history(store: Store, run_id: str) -> list[Event]:
    """Return all events of a run."""
    events: list[Event] = []
    while page := await store.read_events(run_id, after=len(events)):
        events += page
    return events


async def draft(store: Store, loaded: LoadedRun, node: str, *commands: Command) -> TurnDraft:
    """Begin a turn: handle everything that is in the inbox, then do what the program asks for."""
    run_id = loaded.head.run_id
    turn = TurnDraft(state_of(run_id, await history(store, run_id)), loaded, await store.now(), node)
    for message in loaded.messages:
        turn.handle(message)
    for signal in loaded.signals:
        turn.handle(signal)
    turn.enact(commands)
    return turn
