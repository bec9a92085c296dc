"""`joined`: creates runs and delivers signals in a transaction that a caller has begun on the caller's own connection.

The statements are those of `create` and `deliver`. asyncpg accepts their values directly; psycopg gets each value as
text, whose type the server knows, so that nothing depends on how the caller has configured the connection. A savepoint
keeps the caller's transaction usable after a refusal. The notification of nodes is part of the transaction too: the
server sends it on commit.
"""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import asyncpg

from holdfast.core.instants import Instant
from holdfast.core.messages import Message, SignalRequest
from holdfast.errors import HoldfastError, InvalidInput, StoreUnavailable
from holdfast.limits import Limits
from holdfast.store import port
from holdfast.store.joined import Driver, Run, driver_of, not_begun, other_database, unusable
from holdfast.store.postgres import admission
from holdfast.store.postgres.create import create
from holdfast.store.postgres.faults import UNSTORABLE, fault_of
from holdfast.store.postgres.inbox import deliver
from holdfast.store.postgres.pool import Pool, Rows, Transaction, in_schema
from holdfast.store.postgres.wakeups import channel_of

EXPECTED = "a connection of asyncpg or psycopg 3, or one of SQLAlchemy or Django with such a driver"
DATABASE = """
SELECT c.system_identifier::text || '/' || d.oid || '/' || n.oid
FROM pg_control_system() c, pg_database d, pg_namespace n WHERE d.datname = current_database() AND n.nspname = $1
"""
"""Identifies the schema of the store, whichever way a connection reached its server."""

NOTIFY = f"SELECT pg_notify($2, ''), ({DATABASE})"
UNSTORABLE_CLASSES = ("22", "23", "54")
"""The classes of errors that are caused by the data to be stored."""

FAILED = "25P02"
_PLACE = re.compile(r"\$(\d+)")
_TO_ESCAPE = re.compile(r'(["\\])')
_IDLE = 0
"""The state of a psycopg connection without a transaction."""


class _Unstorable(ValueError):
    """A driver's report that the data cannot be stored."""


class _Statements(Protocol):
    """Executes statements on a caller's connection."""

    async def fetch(self, sql: str, args: Sequence[Any]) -> Rows: ...

    async def check_begun(self) -> None: ...


class _Asyncpg:
    """A connection of asyncpg, or one from its pool."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def fetch(self, sql: str, args: Sequence[Any]) -> Rows:
        rows: Rows = await self._connection.fetch(sql, *args)
        return [tuple(row) for row in rows]

    async def check_begun(self) -> None:
        if not self._connection.is_in_transaction():
            raise not_begun()


class _Psycopg:
    """A connection of psycopg 3, sync or async."""

    def __init__(self, connection: Any, run: Run) -> None:
        import psycopg  # the package of this connection

        self._connection = connection
        self._run = run
        self._is_async = isinstance(connection, psycopg.AsyncConnection)
        self._rows = psycopg.rows.tuple_row
        self._failure = psycopg.Error

    async def fetch(self, sql: str, args: Sequence[Any]) -> Rows:
        text = _PLACE.sub(r"%(p\1)s", sql.replace("%", "%%")) if args else sql
        given = {f"p{number}": as_text(value) for number, value in enumerate(args, 1)} or None
        try:
            if self._is_async:
                async with self._connection.cursor(row_factory=self._rows) as cursor:
                    await cursor.execute(text, given)
                    return [] if cursor.description is None else await cursor.fetchall()
            rows: Rows = await self._run(lambda: self._fetch_here(text, given))
            return rows
        except self._failure as problem:
            code = getattr(problem, "sqlstate", None) or ""
            if code.startswith(UNSTORABLE_CLASSES) or (not code and type(problem).__name__ == "DataError"):
                raise _Unstorable(type(problem).__name__) from problem
            raise

    def _fetch_here(self, text: str, given: dict[str, str | None] | None) -> Rows:
        with self._connection.cursor(row_factory=self._rows) as cursor:
            cursor.execute(text, given)
            rows: Rows = [] if cursor.description is None else cursor.fetchall()
            return rows

    async def check_begun(self) -> None:
        if self._connection.autocommit and self._connection.info.transaction_status == _IDLE:
            raise not_begun()


def as_text(value: Any) -> str | None:
    """Return a value as PostgreSQL writes it, for a parameter whose type the server knows."""
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return "{" + ",".join(_element(each) for each in value) + "}"
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, bytes | bytearray):
        return f"\\x{value.hex()}"
    return str(value)


def _element(value: Any) -> str:
    text = as_text(value)
    return "NULL" if text is None else '"' + _TO_ESCAPE.sub(r"\\\1", text) + '"'


class _CallersTransaction(Transaction):
    """A caller's transaction, in the form that the verbs of the store accept."""

    def __init__(self, statements: _Statements, schema: str) -> None:
        super().__init__(statements, schema)
        self._statements = statements

    async def fetch(
        self, sql: str, *args: Any, is_repeatable: bool = True, if_lost: Callable[[], None] | None = None
    ) -> Rows:
        return await self._statements.fetch(in_schema(sql, self._schema), args)

    async def script(self, sql: str) -> None:
        await self._statements.fetch(in_schema(sql, self._schema), ())

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        await self.script("SAVEPOINT holdfast_work")
        try:
            yield
        except Exception:
            await self.script("ROLLBACK TO SAVEPOINT holdfast_work")
            await self.script("RELEASE SAVEPOINT holdfast_work")
            raise
        await self.script("RELEASE SAVEPOINT holdfast_work")


class JoinedPostgres:
    """The verbs of a store in one transaction of a caller."""

    def __init__(
        self, pool: Pool, given: Any, limits: Limits, now: Instant | None, database: Callable[[], Awaitable[str]]
    ) -> None:
        self._pool = pool
        self._given = given
        self._limits = limits
        self._now = now
        self._database = database

    async def create(self, runs: Sequence[port.NewRun]) -> list[port.Created | port.Existing | port.Refused]:
        async with self._opened() as transaction:
            await admission.lock(transaction, runs)
            return await create(transaction, runs, None, self._limits, self._now)

    async def deliver(self, items: Sequence[SignalRequest | Message]) -> list[port.Delivered]:
        async with self._opened() as transaction:
            try:
                async with transaction.savepoint():
                    return [*await deliver(transaction, items, self._limits, self._now)]
            except UNSTORABLE as problem:
                refusal = InvalidInput(f"it cannot be stored: {type(problem).__name__}")
                return [port.Refused(refusal) for _ in items]

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[_CallersTransaction]:
        """Check the caller's connection and notify nodes through it. Errors of the server are raised as ours."""
        shown = self._pool.address.shown
        statements = _statements_of(await driver_of(self._given))
        await statements.check_begun()
        transaction = _CallersTransaction(statements, self._pool.address.schema)
        try:
            schema = self._pool.address.schema
            [[_, found]] = await transaction.fetch(NOTIFY, schema, channel_of(schema))
            if found is None or found != await self._database():
                raise other_database(shown)
            yield transaction
        except HoldfastError:
            raise
        except Exception as problem:
            if getattr(problem, "sqlstate", None) == FAILED:
                raise InvalidInput("the transaction has failed already: roll it back", field="connection") from problem
            fault = fault_of(problem, shown)
            if fault is not None:
                raise fault.error from problem
            if not isinstance(problem, asyncpg.PostgresError) and hasattr(problem, "sqlstate"):  # from psycopg
                text = f"{shown}: the server has failed ({problem.sqlstate or type(problem).__name__})"
                raise StoreUnavailable(text, store=shown) from problem
            raise


def _statements_of(driver: Driver) -> _Statements:
    if driver.package == "asyncpg" and hasattr(driver.connection, "is_in_transaction"):  # a pool is not a connection
        return _Asyncpg(driver.connection)
    if driver.package == "psycopg" and hasattr(driver.connection, "cursor"):
        return _Psycopg(driver.connection, driver.run)
    raise unusable(driver.connection, EXPECTED)
