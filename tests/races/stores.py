"""What everybody plays on: a file, or a schema on a server, which is named by its address."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from holdfast.limits import Limits
from holdfast.store.port import Created, NewRun, Store
from holdfast.store.postgres import PostgresStore
from holdfast.store.sqlite import SqliteStore

HOUR_MS = 3_600_000
GENEROUS = Limits(signals_per_run_per_minute=1_000_000)
"""The rate limit is tested elsewhere; here it would only stop the senders."""


@asynccontextmanager
async def opened(path: Path, busy_ms: int = 30_000) -> AsyncIterator[SqliteStore]:
    """Open a store on a file, and close it at the end."""
    store = await SqliteStore.open(path, limits=GENEROUS, busy_ms=busy_ms)
    try:
        yield store
    finally:
        await store.close()


async def open_anywhere(place: Path | str, busy_ms: int = 30_000) -> Store:
    """Open a store on a file, or at an address."""
    if isinstance(place, str):
        return await PostgresStore.open(place, limits=GENEROUS, busy_ms=busy_ms)
    return await SqliteStore.open(place, limits=GENEROUS, busy_ms=busy_ms)


@asynccontextmanager
async def opened_anywhere(place: Path | str, busy_ms: int = 30_000) -> AsyncIterator[Store]:
    """Open a store on a file or at an address, and close it at the end."""
    store = await open_anywhere(place, busy_ms)
    try:
        yield store
    finally:
        await store.close()


async def prepare(path: Path | str, *runs: NewRun, claim_for: str | None = None) -> None:
    """Make a store with these runs."""
    async with opened_anywhere(path) as store:
        await store.migrate()
        if claim_for is not None:
            await store.renew(claim_for, HOUR_MS)
        answers = await store.create(runs, claim_for)
        assert all(isinstance(answer, Created) for answer in answers), answers
