"""What tests do on a server behind a store's back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from holdfast.store.postgres.address import parse_address
from holdfast.store.postgres.pool import in_schema


@asynccontextmanager
async def behind(address: str) -> AsyncIterator[Any]:
    """A connection of the test's own."""
    connection = await asyncpg.connect(parse_address(address).dsn)
    try:
        yield connection
    finally:
        await connection.close()


async def execute(address: str, sql: str, *args: Any) -> str:
    """Execute a statement; `holdfast.` stands for the schema of the address."""
    async with behind(address) as connection:
        status: str = await connection.execute(in_schema(sql, parse_address(address).schema), *args)
        return status


async def lose_record(address: str, run_id: str, name: str, signal_id: str) -> None:
    """Delete the acceptance record of a signal, and leave its payload."""
    await execute(
        address,
        "DELETE FROM holdfast.acceptance_records WHERE name = $2 AND signal_id = $3 "
        "AND run_no = (SELECT run_no FROM holdfast.runs WHERE run_id = $1)",
        run_id,
        name,
        signal_id,
    )
