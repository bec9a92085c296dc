"""Opening the store that is measured."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bench.workload import LIMITS
from holdfast.store.port import Store
from holdfast.store.sqlite import SqliteStore


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[Store]:
    """Open a SQLite store, bring its schema up to date, and close it at the end."""
    store = await SqliteStore.open(path, limits=LIMITS)
    try:
        await store.migrate()
        yield store
    finally:
        await store.close()
