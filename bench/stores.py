"""Opening the store that is measured, and the options of the node that works on it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.workload import LIMITS
from holdfast.engine.options import NodeOptions
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


def as_the_command(**options: Any) -> NodeOptions:
    """Return options of a node as `holdfast node` sets them: the process is the node's own."""
    return NodeOptions(tune_gc=True, **options)
