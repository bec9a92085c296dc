"""The file that everybody plays on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from holdfast.limits import Limits
from holdfast.store.port import Created, NewRun
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


async def prepare(path: Path, *runs: NewRun, claim_for: str | None = None) -> None:
    """Make a file with these runs."""
    async with opened(path) as store:
        await store.migrate()
        if claim_for is not None:
            await store.renew(claim_for, HOUR_MS)
        answers = await store.create(runs, claim_for)
        assert all(isinstance(answer, Created) for answer in answers), answers
