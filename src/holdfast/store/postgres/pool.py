"""Connections to one server: few, kept open, replaced when they break; and work that is retried where that is safe.

The driver's pool resets a connection after each use, which costs a third of a small query; that is unnecessary here,
because nothing is left behind in a session. Every verb may be repeated (see the port), so after a transient error (a
server restart, a deadlock, a replica that has not taken over yet) the work is retried with growing pauses, up to a
bound; then a typed error is raised. The exception is work with `is_repeatable=False`: if its answer was lost, its
outcome is unknown, and the caller gets the error.

A caller that is cancelled only stops waiting: its work is completed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import asyncpg

from holdfast.errors import InvalidInput, RequestTimedOut, StoreError, StoreReadOnly, StoreUnavailable, StoreUnsafe
from holdfast.store.decisions import TOO_SLOW
from holdfast.store.postgres.address import Address
from holdfast.store.postgres.faults import Refusal, fault_of

T = TypeVar("T")
Rows = list[Any]

FIRST_PAUSE_S = 0.01
LONGEST_PAUSE_S = 1.0
STATEMENT_S = 60.0
"""How long to wait for an answer. A silently lost connection is noticed by then at the latest."""

CONNECT_S = 10.0

CLOSE_S = 3.0
"""How long closing a store waits for pending work, and for its connections to end."""

_LOOK = """
SELECT pg_is_in_recovery() AS is_replica, current_setting('transaction_read_only') = 'on' AS is_read_only,
    current_setting('server_encoding') AS encoding, current_setting('fsync') AS fsync,
    current_setting('full_page_writes') AS full_page_writes, current_setting('synchronous_commit') AS synchronous_commit
"""


class Db(Protocol):
    """Executes statements: a pool, or a transaction."""

    async def fetch(
        self, sql: str, *args: Any, is_repeatable: bool = True, if_lost: Callable[[], None] | None = None
    ) -> Rows:
        """Execute a statement and return its rows. `holdfast.` in it stands for the store's schema."""
        ...


class Transaction:
    """One connection for the duration of a transaction."""

    def __init__(self, connection: Any, schema: str) -> None:
        self.connection = connection
        self._schema = schema

    async def fetch(
        self, sql: str, *args: Any, is_repeatable: bool = True, if_lost: Callable[[], None] | None = None
    ) -> Rows:
        rows: Rows = await self.connection.fetch(in_schema(sql, self._schema), *args)
        return rows

    async def script(self, sql: str) -> None:
        """Execute statements without parameters."""
        await self.connection.execute(in_schema(sql, self._schema))

    def savepoint(self) -> Any:
        """Return a context that is rolled back if it raises."""
        return self.connection.transaction()


class Pool:
    """The connections to one server. With `statement_s` a statement that takes longer is cancelled, and not retried."""

    def __init__(self, address: Address, busy_ms: int, statement_s: float | None = None) -> None:
        self.address = address
        self.busy_ms = busy_ms
        self._statement_s = statement_s
        self._busy_s = busy_ms / 1_000
        self._free: list[Any] = []
        self._in_use: set[Any] = set()
        self._places = asyncio.Semaphore(address.connections)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False
        self._is_gone = False
        self._closing = asyncio.Event()

    # --- work

    async def fetch(
        self, sql: str, *args: Any, is_repeatable: bool = True, if_lost: Callable[[], None] | None = None
    ) -> Rows:
        """Execute one statement in a separate transaction."""
        text = in_schema(sql, self.address.schema)

        async def work(connection: Any) -> Rows:
            if self.address.has_pooler:  # a statement is prepared and executed in two steps, which need one session
                async with connection.transaction():
                    if self._statement_s is not None:
                        await connection.execute(f"SET LOCAL statement_timeout = {self._statement_s * 1_000:.0f}")
                    return await connection.fetch(text, *args)  # type: ignore[no-any-return]
            return await connection.fetch(text, *args)  # type: ignore[no-any-return]

        return await self._try(work, is_repeatable, if_lost)

    async def transact(self, work: Callable[[Transaction], Awaitable[T]]) -> T:
        """Run a function that executes statements in one transaction. It may run again: it has no other effects."""

        async def attempt(connection: Any) -> T:
            async with connection.transaction():
                return await work(Transaction(connection, self.address.schema))

        return await self._try(attempt, is_repeatable=True)

    async def finished(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for work that is completed even if its caller is cancelled, and before the pool is closed."""
        try:
            self.check_open()
        except StoreError:
            work.close()
            raise
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Finish pending work, for a bounded time, and close the connections; if cancelled, immediately."""
        if self._is_closed:
            return
        self._is_closed = True
        self._closing.set()
        free, self._free = self._free, []
        try:
            async with asyncio.timeout(CLOSE_S):
                if self._tasks:
                    await asyncio.wait(self._tasks)
                for connection in free:
                    await _close(connection)
        except TimeoutError:
            pass
        finally:
            self._is_gone = True
            for connection in (*free, *self._in_use):
                _abandon(connection)

    def check_open(self) -> None:
        """Raise if the store has been closed."""
        if self._is_closed:
            raise StoreUnavailable("the store is closed", store=self.address.shown)

    async def check(self) -> None:
        """Connect, and immediately refuse a server that cannot be used or reached."""
        try:
            self._free.append(await self._connect(is_first=True))
        except ValueError as problem:  # from the driver; it may quote the password
            raise InvalidInput("the address of the store cannot be used", field="store") from problem
        except Exception as problem:
            fault = fault_of(problem, self.address.shown)
            raise (problem if fault is None else fault.error) from problem

    # --- connections and retries

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may have been cancelled

    async def _try(
        self, work: Callable[[Any], Awaitable[T]], is_repeatable: bool, if_lost: Callable[[], None] | None = None
    ) -> T:
        loop = asyncio.get_running_loop()
        until, pause_s = loop.time() + self._busy_s, FIRST_PAUSE_S
        while True:
            connection = None
            try:
                async with self._places:
                    if self._is_gone:
                        self.check_open()
                    connection = await self._take()
                    self._in_use.add(connection)
                    try:
                        return await work(connection)
                    finally:
                        self._in_use.discard(connection)
                        self._give_back(connection)
            except (Exception, asyncio.CancelledError) as problem:
                if self._statement_s is not None and isinstance(problem, asyncpg.QueryCanceledError):
                    raise RequestTimedOut(TOO_SLOW) from problem
                fault = fault_of(problem, self.address.shown)
                if fault is None:
                    if connection is not None and isinstance(problem, asyncio.CancelledError):
                        _abandon(connection)  # the loop is being stopped while the work is in progress
                    raise
                if fault.is_lost and connection is not None:
                    _abandon(connection)
                    if not is_repeatable:
                        raise fault.error from problem
                    if if_lost is not None:
                        if_lost()
                if not fault.is_passing or loop.time() >= until or self._is_closed:
                    raise fault.error from problem
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._closing.wait()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _take(self) -> Any:
        while self._free:
            connection = self._free.pop()
            if not connection.is_closed():
                return connection
        return await self._connect()

    def _give_back(self, connection: Any) -> None:
        if self._is_closed:
            _abandon(connection)
        elif not connection.is_closed():
            self._free.append(connection)

    async def _connect(self, *, is_first: bool = False) -> Any:
        timeout = {} if self._statement_s is None else {"statement_timeout": f"{self._statement_s * 1_000:.0f}"}
        connection = await connect(self.address, **timeout)
        try:
            [found] = await connection.fetch(_LOOK)
            self._refuse(found, is_first)
        except BaseException:
            _abandon(connection)
            raise
        return connection

    def _refuse(self, found: Any, is_first: bool) -> None:
        shown = self.address.shown
        if found["is_replica"] or found["is_read_only"]:
            what = "the server is a replica" if found["is_replica"] else "the server takes no writes"
            error = StoreReadOnly(f"{shown}: {what}; name the primary", store=shown)
            raise Refusal(error, is_passing=not is_first)
        if found["encoding"] != "UTF8":
            text = f"{shown}: the database must be encoded in UTF8, not {found['encoding']}"
            raise Refusal(StoreUnsafe(text, store=shown), is_passing=False)
        unsafe = [name for name in ("fsync", "full_page_writes", "synchronous_commit") if found[name] == "off"]
        if unsafe and not self.address.allow_unsafe:
            text = f"{shown}: the server may lose what it has acknowledged: {', '.join(unsafe)} is off"
            raise Refusal(StoreUnsafe(text, store=shown), is_passing=False)


async def connect(address: Address, **settings: str) -> Any:
    """Open a connection. Behind a pooler it has no settings or prepared statements, because they would be lost."""
    given = (
        {}
        if address.has_pooler
        else {
            "application_name": f"holdfast {address.schema}",
            "jit": "off",
            "plan_cache_mode": "force_custom_plan",
            **settings,
        }
    )
    try:
        return await asyncpg.connect(
            address.dsn,
            timeout=CONNECT_S,
            command_timeout=STATEMENT_S,
            statement_cache_size=0 if address.has_pooler else 200,
            max_cached_statement_lifetime=0,
            server_settings=given or None,
            target_session_attrs="primary" if "," in address.dsn else None,
        )
    except PermissionError as problem:
        if not _is_home_closed():
            raise
        text = (
            f"{address.shown}: this user may not read the home folder, where the driver looks for certificates; "
            "set HOME to a folder that the user may read"
        )
        raise Refusal(StoreUnavailable(text, store=address.shown), is_passing=False) from problem


def _is_home_closed() -> bool:
    try:
        Path("~/.postgresql/root.crt").expanduser().stat()
    except PermissionError:
        return True
    except (OSError, RuntimeError):
        pass
    return False


def in_schema(sql: str, schema: str) -> str:
    """Return a statement with `holdfast.` replaced by the name of our schema."""
    return sql if schema == "holdfast" else sql.replace("holdfast.", f"{schema}.")


def _abandon(connection: Any) -> None:
    if not connection.is_closed():
        connection.terminate()


async def _close(connection: Any) -> None:
    try:
        await connection.close(timeout=CONNECT_S)
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError):
        _abandon(connection)  # nothing on it is open
