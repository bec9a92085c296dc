"""`joined`: creates runs and delivers signals in a transaction that a caller has begun on the caller's own connection.

The caller's tables are in the same file as the store's, so one commit writes both. A store that is attached to a
connection of another file is refused: with a write-ahead log SQLite commits each file separately, so that a crash
between the two leaves a row without its run.

SQLite does not notify of commits, so the transaction is polled until it has ended; then nodes are notified.
"""

import asyncio
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from holdfast.core.instants import Instant
from holdfast.core.messages import Message, SignalRequest
from holdfast.errors import InvalidInput, StoreBusy
from holdfast.limits import Limits
from holdfast.store import port
from holdfast.store.joined import Driver, driver_of, not_begun, other_database, unusable
from holdfast.store.sqlite import create, inbox
from holdfast.store.sqlite.connection import translate

T = TypeVar("T")

EXPECTED = "a connection of sqlite3, or one of SQLAlchemy or Django with that driver"
FIRST_PAUSE_S, LONGEST_PAUSE_S, WATCHED_S = 0.002, 0.1, 60.0
"""How often a transaction is polled, first and later, and for how long. After that, nodes find the run by polling."""


class JoinedSqlite:
    """The verbs of a store in one transaction of a caller."""

    def __init__(
        self,
        path: Path,
        given: Any,
        limits: Limits,
        now: Callable[[], Instant],
        watch: Callable[[sqlite3.Connection], None],
    ) -> None:
        self._path = path
        self._given = given
        self._limits = limits
        self._now = now
        self._watch = watch

    async def create(self, runs: Sequence[port.NewRun]) -> list[port.Created | port.Existing | port.Refused]:
        return await self._write(lambda db: create.create(db, runs, None, self._limits, self._now()))

    async def deliver(self, items: Sequence[SignalRequest | Message]) -> list[port.Delivered]:
        return await self._write(lambda db: [*inbox.deliver(db, items, self._limits, self._now())])

    async def _write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        driver = await driver_of(self._given)
        connection = _connection_of(driver)
        answer: T = await driver.run(lambda: self._work_on(connection, work))
        self._watch(connection)
        return answer

    def _work_on(self, db: sqlite3.Connection, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            with _plain_rows(db):
                self._check(db)
                _begin(db)
                db.execute("SAVEPOINT holdfast_work")
                try:
                    answer = work(db)
                except BaseException:
                    db.execute("ROLLBACK TO holdfast_work")
                    db.execute("RELEASE holdfast_work")
                    raise
                db.execute("RELEASE holdfast_work")
                return answer
        except sqlite3.ProgrammingError as problem:
            if "thread" not in str(problem):
                raise
            text = "the connection belongs to another thread: call from there, with a SyncClient"
            raise InvalidInput(text, field="connection") from problem
        except sqlite3.Error as problem:
            error = translate(problem, self._path)
            if isinstance(error, StoreBusy):
                text = f"{self._path}: another connection writes: roll back, begin with BEGIN IMMEDIATE, and try again"
                raise StoreBusy(text, path=str(self._path)) from problem
            raise error from problem

    def _check(self, db: sqlite3.Connection) -> None:
        """Refuse a connection whose main file is not the store's."""
        files = {name: file for _, name, file in db.execute("PRAGMA database_list")}
        if _is_same(files.get("main", ""), self._path):
            return
        attached = [name for name, file in files.items() if _is_same(file, self._path)]
        if attached:
            raise InvalidInput(
                f"the store is attached as {attached[0]}: SQLite commits attached files one by one, so that a "
                "crash could leave a row without its run; connect to the store's file, and have your tables there",
                field="connection",
            )
        raise other_database(str(self._path))


def _connection_of(driver: Driver) -> sqlite3.Connection:
    if not isinstance(driver.connection, sqlite3.Connection):
        raise unusable(driver.connection, EXPECTED)
    return driver.connection


def _begin(db: sqlite3.Connection) -> None:
    """Begin the transaction that `sqlite3` would begin with the caller's next write; refuse where it would not."""
    if db.in_transaction:
        return
    if db.isolation_level is None or getattr(db, "autocommit", False) is True:
        raise not_begun()
    db.execute("BEGIN IMMEDIATE")


@contextmanager
def _plain_rows(db: sqlite3.Connection) -> Iterator[None]:
    """Read rows as they are stored, whatever row type the caller has configured."""
    row_factory, text_factory = db.row_factory, db.text_factory
    db.row_factory, db.text_factory = None, str
    try:
        yield
    finally:
        db.row_factory, db.text_factory = row_factory, text_factory


def _is_same(file: str, path: Path) -> bool:
    try:
        return bool(file) and os.path.samefile(file, path)
    except OSError:
        return False


async def when_ended(connection: sqlite3.Connection, notify: Callable[[], None]) -> None:
    """Notify nodes when a transaction has ended."""
    loop = asyncio.get_running_loop()
    until, pause_s = loop.time() + WATCHED_S, FIRST_PAUSE_S
    while _is_open(connection) and loop.time() < until:
        await asyncio.sleep(pause_s)
        pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)
    notify()


def _is_open(connection: sqlite3.Connection) -> bool:
    try:
        return connection.in_transaction
    except sqlite3.ProgrammingError:  # it was closed
        return False
