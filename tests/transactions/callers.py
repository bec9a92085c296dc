"""Callers with a table of their own in the store's database, and a transaction of each driver and wrapper."""

import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

TABLE = "CREATE TABLE IF NOT EXISTS caller_orders (id text PRIMARY KEY)"
INSERT = "INSERT INTO caller_orders VALUES ('{}')"

Do = Callable[[str], Awaitable[Any]]


class Caller:
    """A connection of a caller: what is given to Holdfast, and what the caller does with it themselves."""

    def __init__(self, connection: Any, execute: Do, commit: Any, rollback: Any) -> None:
        self.connection = connection
        self._execute = execute
        self._commit = commit
        self._rollback = rollback

    async def insert(self, id: str) -> None:
        """Insert a row, in the transaction."""
        await self._execute(INSERT.format(id))

    async def commit(self) -> None:
        """Commit."""
        await self._commit()

    async def rollback(self) -> None:
        """Roll back."""
        await self._rollback()


def soon(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """Return a function that blocks as one that is awaited."""

    async def called(*args: Any) -> Any:
        return function(*args)

    return called


@asynccontextmanager
async def by_asyncpg(url: str) -> AsyncIterator[Caller]:
    connection = await asyncpg.connect(url)
    try:
        transaction = connection.transaction()
        await transaction.start()
        yield Caller(connection, connection.execute, transaction.commit, transaction.rollback)
    finally:
        await connection.close()


@asynccontextmanager
async def by_asyncpg_pool(url: str) -> AsyncIterator[Caller]:
    async with asyncpg.create_pool(url, min_size=1, max_size=1) as pool, pool.acquire() as connection:
        # As many set it up: JSON in and out as values.
        import json

        await connection.set_type_codec("jsonb", encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
        transaction = connection.transaction()
        await transaction.start()
        yield Caller(connection, connection.execute, transaction.commit, transaction.rollback)


@asynccontextmanager
async def by_psycopg(url: str) -> AsyncIterator[Caller]:
    with psycopg.connect(url, row_factory=psycopg.rows.dict_row) as connection:
        yield Caller(connection, soon(connection.execute), soon(connection.commit), soon(connection.rollback))
        connection.rollback()


@asynccontextmanager
async def by_psycopg_client_side(url: str) -> AsyncIterator[Caller]:
    with psycopg.connect(url, cursor_factory=psycopg.ClientCursor) as connection:
        yield Caller(connection, soon(connection.execute), soon(connection.commit), soon(connection.rollback))
        connection.rollback()


@asynccontextmanager
async def by_async_psycopg(url: str) -> AsyncIterator[Caller]:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        yield Caller(connection, connection.execute, connection.commit, connection.rollback)
        await connection.rollback()


@asynccontextmanager
async def by_sqlalchemy(url: str) -> AsyncIterator[Caller]:
    engine = create_engine(alchemy_url(url, "psycopg"))
    with engine.connect() as connection:
        yield Caller(connection, soon(connection.exec_driver_sql), soon(connection.commit), soon(connection.rollback))
    engine.dispose()


@asynccontextmanager
async def by_session(url: str) -> AsyncIterator[Caller]:
    engine = create_engine(alchemy_url(url, "psycopg"))
    with Session(engine) as session:

        async def execute(sql: str) -> None:
            session.connection().exec_driver_sql(sql)

        yield Caller(session, execute, soon(session.commit), soon(session.rollback))
    engine.dispose()


def by_async_sqlalchemy(driver: str) -> Callable[[str], Any]:
    @asynccontextmanager
    async def opened(url: str) -> AsyncIterator[Caller]:
        engine = create_async_engine(alchemy_url(url, driver))
        async with engine.connect() as connection:
            yield Caller(connection, connection.exec_driver_sql, connection.commit, connection.rollback)
        await engine.dispose()

    return opened


@asynccontextmanager
async def by_async_session(url: str) -> AsyncIterator[Caller]:
    engine = create_async_engine(alchemy_url(url, "asyncpg"))
    async with AsyncSession(engine) as session:

        async def execute(sql: str) -> None:
            await (await session.connection()).exec_driver_sql(sql)

        yield Caller(session, execute, session.commit, session.rollback)
    await engine.dispose()


def alchemy_url(url: str, driver: str) -> str:
    """Return an address of PostgreSQL or SQLite as SQLAlchemy has it."""
    scheme, _, rest = url.partition("://")
    return url if scheme == "sqlite" else f"postgresql+{driver}://{rest}"


@asynccontextmanager
async def by_sqlite3(url: str) -> AsyncIterator[Caller]:
    connection = sqlite3.connect(url.removeprefix("sqlite:///"))
    connection.row_factory = lambda cursor, row: {"row": row}
    yield Caller(connection, soon(connection.execute), soon(connection.commit), soon(connection.rollback))
    connection.close()


@asynccontextmanager
async def by_explicit_sqlite3(url: str) -> AsyncIterator[Caller]:
    connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")

    def end(how: str) -> Callable[[], Awaitable[Any]]:
        return lambda: soon(connection.execute)(how)

    yield Caller(connection, soon(connection.execute), end("COMMIT"), end("ROLLBACK"))
    connection.close()


POSTGRES: dict[str, Callable[[str], Any]] = {
    "asyncpg": by_asyncpg,
    "asyncpg's pool": by_asyncpg_pool,
    "psycopg": by_psycopg,
    "psycopg, client side": by_psycopg_client_side,
    "psycopg async": by_async_psycopg,
    "SQLAlchemy": by_sqlalchemy,
    "SQLAlchemy's Session": by_session,
    "SQLAlchemy async, asyncpg": by_async_sqlalchemy("asyncpg"),
    "SQLAlchemy async, psycopg": by_async_sqlalchemy("psycopg_async"),
    "SQLAlchemy's AsyncSession": by_async_session,
}
SQLITE: dict[str, Callable[[str], Any]] = {
    "sqlite3": by_sqlite3,
    "sqlite3, explicit": by_explicit_sqlite3,
    "SQLAlchemy on SQLite": by_sqlalchemy,
    "Session on SQLite": by_session,
}


async def make_table(url: str) -> None:
    """Make the caller's own table beside the store's."""
    if url.startswith("sqlite"):
        path = Path(url.removeprefix("sqlite:///"))
        connection = sqlite3.connect(path)
        connection.execute(TABLE)
        connection.commit()
        connection.close()
        return
    other = await asyncpg.connect(url)
    await other.execute(TABLE)
    await other.close()


async def drop_table(url: str) -> None:
    """Drop the caller's table, so that the database can be used again."""
    if not url.startswith("sqlite"):
        other = await asyncpg.connect(url)
        await other.execute("DROP TABLE caller_orders")
        await other.close()


async def rows_of(url: str) -> set[str]:
    """Return the ids of the caller's rows that are committed."""
    if url.startswith("sqlite"):
        connection = sqlite3.connect(url.removeprefix("sqlite:///"))
        found = {id for (id,) in connection.execute("SELECT id FROM caller_orders")}
        connection.close()
        return found
    other = await asyncpg.connect(url)
    rows = await other.fetch("SELECT id FROM caller_orders")
    await other.close()
    return {row["id"] for row in rows}
