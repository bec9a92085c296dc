"""Every feature is tested on two stores, with programs kept in memory and with every turn replayed."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.store.memory import MemoryStore
from holdfast.store.port import Store
from holdfast.store.postgres import PostgresStore
from holdfast.store.sqlite import SqliteStore
from tests.engine.harness import EngineVariant


@pytest.fixture(params=["memory", "sqlite"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the address of a store that is empty."""
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/engine.db"


@pytest.fixture(params=[5_000, 0], ids=["live", "replayed"])
def variant(request: pytest.FixtureRequest, address: str) -> EngineVariant:
    """Return where the test runs."""
    return EngineVariant(address, request.param)


@pytest.fixture(params=["memory", "sqlite", "postgres"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    """Return an empty store of each kind."""
    opened: Store
    if request.param == "memory":
        opened = MemoryStore()
    elif request.param == "sqlite":
        opened = await SqliteStore.open(tmp_path / "store.db")
    else:
        opened = await PostgresStore.open(request.getfixturevalue("postgres_url"))
    await opened.migrate()
    yield opened
    await opened.close()
