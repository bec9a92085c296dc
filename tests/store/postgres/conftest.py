"""Where the PostgreSQL server of the tests is: each test gets a schema of its own there."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator

import asyncpg
import pytest

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def postgres_dsn() -> str:
    dsn = os.environ.get("HOLDFAST_TEST_POSTGRES")
    assert dsn, "HOLDFAST_TEST_POSTGRES must name a PostgreSQL server, such as postgresql://postgres@127.0.0.1/postgres"
    return dsn


@pytest.fixture
async def address(postgres_dsn: str) -> AsyncIterator[str]:
    """The address of a store in a schema that is not there yet, and goes with the test."""
    schema = f"test_{os.getpid()}_{next(_numbers)}"
    yield f"{postgres_dsn}{'&' if '?' in postgres_dsn else '?'}schema={schema}&allow_unsafe=true"
    connection = await asyncpg.connect(postgres_dsn)
    await connection.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")
    await connection.close()
