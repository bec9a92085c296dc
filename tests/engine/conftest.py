"""Every feature is tested on two stores, with programs kept in memory and with every turn replayed; some on all four.

With TEST_S3_SERVER=1 also in a bucket of a real object storage.
"""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from obstore.store import MemoryStore as ObjectsInMemory

from holdfast.store.memory import MemoryStore
from holdfast.store.port import Store
from holdfast.store.postgres import PostgresStore
from holdfast.store.s3 import S3Store
from holdfast.store.s3.bucket import Bucket
from holdfast.store.sqlite import SqliteStore
from tests.engine.harness import EngineVariant
from tests.s3_server import Endpoint
from tests.sqlite_template import put_empty_store

ADDRESSES = ("memory", "sqlite", "s3") if os.environ.get("TEST_S3_SERVER") else ("memory", "sqlite")


@pytest.fixture(params=ADDRESSES)
def stored_in(request: pytest.FixtureRequest) -> str:
    """Return on which kind of store the test runs."""
    return str(request.param)


@pytest.fixture
def address(
    stored_in: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Return the address of a store that is empty."""
    if stored_in == "s3":
        server: Endpoint = request.getfixturevalue("seaweed")
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        bucket = server.make_bucket()
        yield f"s3://{bucket}/engine"
        server.remove_bucket(bucket)
    else:
        yield "memory://" if stored_in == "memory" else f"sqlite:///{put_empty_store(tmp_path / 'engine.db')}"


@pytest.fixture(params=[5_000, 0], ids=["live", "replayed"])
def variant(request: pytest.FixtureRequest, address: str) -> EngineVariant:
    """Return where the test runs."""
    return EngineVariant(address, request.param)


@asynccontextmanager
async def opened_store(kind: str, request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Store]:
    """Open an empty store of this kind."""
    opened: Store
    if kind == "memory":
        opened = MemoryStore()
    elif kind == "sqlite":
        opened = await SqliteStore.open(put_empty_store(folder / "store.db"))
    elif kind == "bucket":
        opened = S3Store(Bucket(ObjectsInMemory()))
    else:
        opened = await PostgresStore.open(request.getfixturevalue("postgres_url"))
    await opened.migrate()
    yield opened
    await opened.close()


@pytest.fixture(params=["memory", "sqlite", "postgres", "bucket"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    """Return an empty store of each kind."""
    async with opened_store(request.param, request, tmp_path) as opened:
        yield opened
