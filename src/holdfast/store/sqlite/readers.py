"""Read-only connections to the file, in separate threads: for lists and searches.

The event loop's own thread writes, and does reads that an index makes short. Reads that may take long happen here, so
that they delay neither API nor nodes nor leases. A read that takes too long is interrupted, and so is one whose caller
was cancelled.
"""

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from holdfast.errors import RequestTimedOut, StoreUnavailable
from holdfast.limits import LIST_S
from holdfast.store.decisions import TOO_SLOW
from holdfast.store.sql import text_or_damage
from holdfast.store.sqlite.connection import CLOSE_S, check_unreadable, finish_reading, translate

T = TypeVar("T")

THREADS = 4
STEPS = 5_000
"""How many steps of SQLite's virtual machine run between checks for an interruption: well below a millisecond."""

BUSY_S = 5.0


class Readers:
    """The threads that read one file."""

    def __init__(self, path: Path, seconds: float = LIST_S) -> None:
        self._path = path
        self._seconds = seconds
        self._free: list[sqlite3.Connection] = []
        self._threads: ThreadPoolExecutor | None = None
        self._readings: set[_Reading] = set()
        self._is_closed = False

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run a function that only reads, in a thread. All its statements see the store as it was at one instant."""
        if self._is_closed:
            raise StoreUnavailable("the store is closed", path=str(self._path))
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="holdfast-reader")
        loop = asyncio.get_running_loop()
        reading = _Reading()
        self._readings.add(reading)
        timer = loop.call_later(self._seconds, reading.give_up)
        try:
            return await loop.run_in_executor(self._threads, self._run, work, reading)
        except asyncio.CancelledError:
            reading.give_up()
            raise
        finally:
            timer.cancel()
            self._readings.discard(reading)

    async def close(self) -> None:
        """Interrupt the reads in progress, and close the connections."""
        self._is_closed = True
        for reading in self._readings:
            reading.give_up()
        if self._threads is not None:
            await _ended(self._threads)
        free, self._free = self._free, []
        for connection in free:
            connection.close()

    def _run(self, work: Callable[[sqlite3.Connection], T], reading: "_Reading") -> T:
        connection = None
        try:
            reading.check()
            connection = self._free.pop() if self._free else self._connect()
            connection.set_progress_handler(reading.is_given_up, STEPS)
            connection.execute("BEGIN")
            return self._work(work, connection)
        except sqlite3.Error as problem:
            finish_reading(problem)
            reading.check()
            raise translate(problem, self._path) from problem
        except Exception as problem:
            finish_reading(problem)
            raise
        finally:
            if connection is not None:
                self._let_go(connection)

    def _work(self, work: Callable[[sqlite3.Connection], T], connection: sqlite3.Connection) -> T:
        """Do the work; if a text is invalid, repeat it in a way that recognises damaged rows."""
        try:
            return work(connection)
        except sqlite3.OperationalError as problem:
            check_unreadable(problem)
            finish_reading(problem)
        connection.text_factory = text_or_damage
        try:
            return work(connection)
        finally:
            connection.text_factory = str

    def _connect(self) -> sqlite3.Connection:
        address = f"{self._path.as_uri()}?mode=ro"
        connection = sqlite3.connect(
            address, uri=True, timeout=BUSY_S, isolation_level=None, cached_statements=64, check_same_thread=False
        )
        connection.execute("PRAGMA query_only = ON")
        connection.execute("PRAGMA temp_store = MEMORY")
        return connection

    def _let_go(self, connection: sqlite3.Connection) -> None:
        connection.set_progress_handler(None, 0)
        if connection.in_transaction:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
        self._free.append(connection)


async def _ended(threads: ThreadPoolExecutor) -> None:
    """Wait for threads to end, for a bounded time: not in one of the loop's threads, which may all be busy."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def wait() -> None:
        threads.shutdown()
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=wait, name="holdfast-reader-end", daemon=True).start()
    with suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_S):
            await ended.wait()


class _Reading:
    """One read, which the event loop may interrupt."""

    def __init__(self) -> None:
        self._is_given_up = False

    def give_up(self) -> None:
        self._is_given_up = True

    def is_given_up(self) -> bool:
        return self._is_given_up

    def check(self) -> None:
        if self._is_given_up:
            raise RequestTimedOut(TOO_SLOW)
