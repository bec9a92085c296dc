"""Where a test finds PostgreSQL: each one gets a schema of its own, in a database that its process has for itself."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator

import asyncpg
import pytest

from tests.postgres_server import Databases

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def postgres_dsn(databases: Databases) -> Iterator[str]:
    """Return the address of a database that the tests of this process share."""
    with databases.database() as url:
        yield url


@pytest.fixture
async def address(postgres_dsn: str) -> AsyncIterator[str]:
    """Return the address of a store in a schema that is not there yet, and goes with the test."""
    schema = f"test_{next(_numbers)}"
    yield f"{postgres_dsn}{'&' if '?' in postgres_dsn else '?'}schema={schema}"
    connection = await asyncpg.connect(postgres_dsn)
    await connection.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")
    await connection.close()
