"""Connections of callers: how to unwrap them, and in which thread they may be used.

A caller can start a run or send a signal in a transaction on the caller's own connection, along with other rows. The
caller commits or rolls back; a store only executes statements. This module unwraps connections of SQLAlchemy and Django
and returns the driver's connection, with its transaction begun. The store decides which drivers it supports. This
module must not commit, roll back, close, or leave anything changed on a connection.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from holdfast.core.messages import Message, SignalRequest
from holdfast.errors import InvalidInput
from holdfast.store.types import Created, Delivered, Existing, NewRun, Refused

T = TypeVar("T")
Run = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Calls a function in a thread where the connection may be used, and waits for its result."""

_BEGIN = "SELECT 1"
"""A statement that makes SQLAlchemy begin its transaction, if it has not done so yet."""


class JoinedStore(Protocol):
    """The verbs of a store within a caller's transaction. See `RunStore.joined`."""

    async def create(self, runs: Sequence[NewRun]) -> list[Created | Existing | Refused]:
        """Create runs, as `RunStore.create` does, owned by no node."""
        ...

    async def deliver(self, items: Sequence[SignalRequest | Message]) -> list[Delivered]:
        """Deliver signals, as `RunStore.deliver` does."""
        ...


class InThread(Struct, frozen=True):
    """A connection that belongs to another thread than the event loop's: the thread of its owner, which waits there."""

    connection: Any
    run: Run


class Driver(Struct, frozen=True):
    """A driver's connection, the driver's package, and where its methods may be called if they block."""

    connection: Any
    package: str
    run: Run


async def inline(work: Callable[[], T]) -> T:
    """Call a function in this thread."""
    return work()


async def driver_of(given: Any) -> Driver:
    """Return the driver's connection behind a caller's object. If that is a wrapper, its transaction has begun."""
    run: Run = inline
    if isinstance(given, InThread):
        given, run = given.connection, given.run
    if package_of(given) == "sqlalchemy":
        given = await _of_sqlalchemy(given, run)
    elif package_of(given) == "django":
        given = await run(lambda: _of_django(given))
    return Driver(given, package_of(given), run)


def package_of(value: Any) -> str:
    """Return the package that defines the type of a value; for a subclass, the package of the class it extends."""
    for kind in type(value).__mro__:
        package = kind.__module__.partition(".")[0]
        if package in _PACKAGES:
            return package
    return type(value).__module__.partition(".")[0]


_PACKAGES = frozenset({"aiosqlite", "asyncpg", "django", "psycopg", "sqlalchemy", "sqlite3"})


async def _of_sqlalchemy(given: Any, run: Run) -> Any:
    """Return the driver's connection of a `Connection`, a `Session`, or an async variant of these."""
    if hasattr(given, "sync_session"):
        given = await given.connection()
    if hasattr(given, "get_raw_connection"):
        await given.exec_driver_sql(_BEGIN)
        return (await given.get_raw_connection()).driver_connection

    def of_sync() -> Any:
        connection = given if hasattr(given, "exec_driver_sql") else given.connection()
        connection.exec_driver_sql(_BEGIN)
        return connection.connection.driver_connection

    if not hasattr(given, "exec_driver_sql") and not hasattr(given, "connection"):
        raise unusable(given, "a Connection or a Session of SQLAlchemy")
    return await run(of_sync)


def _of_django(given: Any) -> Any:
    if not hasattr(given, "ensure_connection"):
        raise unusable(given, "django.db.connection")
    given.ensure_connection()
    return given.connection


def unusable(given: Any, expected: str) -> InvalidInput:
    """Return the error for an object that is not a usable connection."""
    kind = type(given)
    found = f"{kind.__module__}.{kind.__qualname__}"
    return InvalidInput(f"connection is {expected}, not {found}", field="connection")


def not_begun() -> InvalidInput:
    """Return the error for a connection that would commit each statement separately."""
    return InvalidInput(
        "the connection has no transaction, so that each statement would be committed by itself: begin one first",
        field="connection",
    )


def other_database(shown: str) -> InvalidInput:
    """Return the error for a connection to another database than the store's."""
    return InvalidInput(f"the connection is not to the database of the store, {shown}", field="connection")


def no_transactions(store: str) -> InvalidInput:
    """Return the error of a store that cannot join a caller's transaction."""
    return InvalidInput(
        f"{store} takes no connection of yours: only stores in PostgreSQL and SQLite share transactions",
        field="connection",
    )
