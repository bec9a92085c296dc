"""One SQLite file: opened safely, written in groups, with its errors translated into ours.

**Group commit.** Writes that arrive while others are in progress share one transaction and one fsync: `write` queues a
function, and a single flusher runs all queued functions between BEGIN IMMEDIATE and COMMIT. Each function has its own
savepoint, so a failure does not affect the others. No function yields to the event loop, so a reader on this connection
never sees half a transaction.

**Many processes.** If another process holds a lock, this module waits for it without blocking the event loop and
without raising "database is locked", for at most `busy_ms`; then it raises `StoreBusy`.

Everything runs on the event loop's own thread: `sqlite3` releases the interpreter's lock on every row, and a writer
thread was measured at half the speed.
"""

import asyncio
import os
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from traceback import clear_frames
from typing import Any, TypeVar

from holdfast.errors import (
    StoreBusy,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
    StoreUnsafe,
)

T = TypeVar("T")

APPLICATION_ID = 0x484F4C44
"""Marks a SQLite file as ours: the letters HOLD."""

SMALLEST_FILE = 512
"""No SQLite file that contains anything is smaller."""

PRIVATE_FILE = 0o600
"""Other users have no rights on the files of a store, from the moment of their creation."""

OLDEST_SQLITE = (3, 31, 0)
CLOSE_S = 3.0
"""How long closing a store waits for another process to release its lock."""

CACHE_KB = 8 * 1024
"""How much of the file is cached in memory. With SQLite's own 2 MB a run of three steps reads twice as many pages."""

LOG_PAGES = 4_000
"""From which size on the write-ahead log is merged into the file: 16 MB. Pages that many turns change are then written
once for all of them."""

SHORT_PAUSE_S = 0.001
"""The pause between tries while another process writes: about as long as a commit takes."""

LONG_PAUSE_S = 0.025
"""The pause once the other process has held the lock for a second: it is migrating, or it was stopped."""

_ERRORS: dict[int, tuple[type[StoreError], str]] = {
    sqlite3.SQLITE_BUSY: (StoreBusy, "another process is using the store"),
    sqlite3.SQLITE_LOCKED: (StoreBusy, "another process is using the store"),
    sqlite3.SQLITE_READONLY: (
        StoreReadOnly,
        "the store cannot be written; check the rights of the file and its folder",
    ),
    sqlite3.SQLITE_IOERR: (StoreUnavailable, "reading or writing the store failed"),
    sqlite3.SQLITE_CORRUPT: (StoreCorrupt, "the store is damaged; restore it from a backup"),
    sqlite3.SQLITE_NOTADB: (StoreCorrupt, "the file is not a Holdfast store, or its beginning is damaged"),
    sqlite3.SQLITE_FULL: (StoreFull, "there is no room left for the store; nothing was written"),
    sqlite3.SQLITE_CANTOPEN: (StoreUnavailable, "the store cannot be opened; check the path and the rights"),
}

_SIGNS_OF_DAMAGE = ("Could not decode to UTF-8", "unsupported file format", "malformed")

_FAULTS_OF_ONE = (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.InterfaceError, sqlite3.DataError)


def _register_plain_values() -> None:
    """Register with `sqlite3` how None and truth values are stored.

    Otherwise it searches for an adapter for each value, through attributes that do not exist: for most rows that takes
    longer than the rest of the binding. Adapters apply to the whole process; these change no value.
    """
    adapters: dict[type, Callable[[Any], Any]] = {type(None): {}.get, bool: int}
    for kind, adapt in adapters.items():
        if (kind, sqlite3.PrepareProtocol) not in sqlite3.adapters:
            sqlite3.register_adapter(kind, adapt)


class Database:
    """A connection to one file."""

    def __init__(self, path: Path, connection: sqlite3.Connection, busy_ms: int) -> None:
        self.path = path
        self.connection = connection
        self._busy_ms = busy_ms
        self._queue: list[_Job] = []
        self._flusher: asyncio.Task[None] | None = None
        self._is_closed = False

    @classmethod
    async def open(cls, path: Path, busy_ms: int) -> "Database":
        """Open the file, and refuse it if it is damaged, foreign, or cannot promise durability."""
        try:
            path = _checked(path)
            create_private(path)
        except (OSError, ValueError) as problem:
            raise StoreUnavailable(f"{path}: the path cannot be used: {problem}", path=str(path)) from problem
        _register_plain_values()
        try:
            connection = sqlite3.connect(path, timeout=0.0, isolation_level=None, cached_statements=256)
        except sqlite3.Error as problem:
            raise translate(problem, path) from problem
        database = cls(path, connection, busy_ms)
        try:
            await database.read(lambda db: _refuse_foreign(db, path))
            await database._when_free(lambda: _make_durable(connection, path))
            await database._when_free(lambda: _refuse_truncated(connection, path))
        except BaseException:
            connection.close()
            raise
        return database

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run a function that only reads. All its statements see the store as it was at one instant."""
        self.check_open()

        def attempt() -> T:
            self.connection.execute("BEGIN")
            try:
                return work(self.connection)
            except Exception as problem:
                finish_reading(problem)
                raise
            finally:
                self._roll_back()

        return await self._when_free(attempt)

    async def write(self, work: Callable[[sqlite3.Connection], T], then: Callable[[], None] | None = None) -> T:
        """Run a function inside a transaction that it shares with others; return when it is durable.

        `then` is called at that point, even if the caller has been cancelled meanwhile.
        """
        self.check_open()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.append(_Job(work, future, then))
        if self._flusher is None:
            self._flusher = asyncio.create_task(self._flush())
        return await future

    async def finish(self) -> None:
        """Accept no more work, and finish what is pending. Work that waits longer for a lock is abandoned."""
        if self._is_closed:
            return
        self._is_closed = True
        flusher = self._flusher
        try:
            if flusher is not None:
                await asyncio.wait([flusher], timeout=CLOSE_S)
        finally:
            if flusher is not None and not flusher.done():
                flusher.cancel()
                _fail(self._queue, StoreUnavailable("the store is closed", path=str(self.path)))
                self._queue = []

    async def close(self) -> None:
        """Finish pending work and close the file. The last connection that may write removes the log of the file."""
        try:
            await self.finish()
        finally:
            with suppress(sqlite3.Error):
                self.connection.close()

    def check_open(self) -> None:
        """Raise if the file has been closed."""
        if self._is_closed:
            raise StoreUnavailable("the store is closed", path=str(self.path))

    async def _flush(self) -> None:
        try:
            while self._queue:
                await self._flush_once()
        finally:
            self._flusher = None

    async def _flush_once(self) -> None:
        try:
            await self._when_free(lambda: self.connection.execute("BEGIN IMMEDIATE"))
        except (StoreError, asyncio.CancelledError) as problem:
            group, self._queue = self._queue, []
            _fail(group, problem)
            if isinstance(problem, asyncio.CancelledError):
                raise
            return
        group, self._queue = self._queue, []
        try:
            answers = [self._run(job.work) for job in group]
            self.connection.execute("COMMIT")
        except sqlite3.Error as problem:
            self._roll_back()
            _fail(group, translate(problem, self.path))
            return
        except BaseException:  # the process is being stopped while a caller's work is in progress
            self._roll_back()
            _fail(group, StoreUnavailable("the work was interrupted", path=str(self.path)))
            raise
        for job, answer in zip(group, answers, strict=True):
            job.answer(answer)

    async def _when_free(self, attempt: Callable[[], T]) -> T:
        """Try until no other process holds the lock, or the time is over."""
        pause = _Pause(self._busy_ms)
        while True:
            try:
                return attempt()
            except sqlite3.Error as problem:
                if not _is_busy(problem) or not await pause.more():
                    raise translate(problem, self.path) from problem

    def _run(self, work: Callable[[sqlite3.Connection], Any]) -> Any:
        """Run one function of the group. An error of the file ends the whole group; any other only this function."""
        self.connection.execute("SAVEPOINT work")
        try:
            answer = work(self.connection)
        except Exception as problem:
            finish_reading(problem)
            if isinstance(problem, sqlite3.Error) and not isinstance(problem, _FAULTS_OF_ONE):
                raise
            self.connection.execute("ROLLBACK TO work")
            answer = _Failed(problem)
        self.connection.execute("RELEASE work")
        return answer

    def _roll_back(self) -> None:
        if self.connection.in_transaction:
            with suppress(sqlite3.Error):
                self.connection.execute("ROLLBACK")


class _Job:
    """A function that waits to run in a transaction, with the future and the callback for its answer."""

    def __init__(
        self,
        work: Callable[[sqlite3.Connection], Any],
        future: asyncio.Future[Any],
        then: Callable[[], None] | None,
    ) -> None:
        self.work = work
        self.future = future
        self._then = then

    def answer(self, answer: Any) -> None:
        if not isinstance(answer, _Failed) and self._then is not None:
            self._then()
        if self.future.done():  # its caller was cancelled; the work is durable all the same
            return
        if isinstance(answer, _Failed):
            self.future.set_exception(answer.error)
        else:
            self.future.set_result(answer)


class _Failed:
    """The answer of a function that raised."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Pause:
    """Waits between tries, until the limit is reached."""

    def __init__(self, busy_ms: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._most_s = busy_ms / 1_000

    async def more(self) -> bool:
        waited_s = self._loop.time() - self._since
        if waited_s >= self._most_s:
            return False
        await asyncio.sleep(SHORT_PAUSE_S if waited_s < 1.0 else LONG_PAUSE_S)
        return True


def finish_reading(problem: BaseException | None) -> None:
    """Close the cursors that were being read when this was raised.

    A cursor that was not read to its end keeps this connection on an old snapshot as long as the exception lives: once
    another process has written, this connection could no longer write.
    """
    while problem is not None:
        clear_frames(problem.__traceback__)
        problem = problem.__context__


def check_unreadable(problem: Exception) -> None:
    """Re-raise errors that are not about a row: SQLite has no separate error class for invalid text."""
    if isinstance(problem, sqlite3.OperationalError) and "UTF-8" not in str(problem):
        raise problem


def translate(problem: sqlite3.Error, path: Path) -> StoreError:
    """Return the error as one of ours. SQLite's text may quote stored data, so only its error code is passed on."""
    code = getattr(problem, "sqlite_errorcode", 0) & 0xFF
    kind, text = _ERRORS.get(code, (StoreUnavailable, "the store failed"))
    if str(problem).startswith(_SIGNS_OF_DAMAGE):
        kind, text = _ERRORS[sqlite3.SQLITE_CORRUPT]
    return kind(f"{path}: {text} ({getattr(problem, 'sqlite_errorname', 'no code')})", path=str(path))


def _is_busy(problem: sqlite3.Error) -> bool:
    return getattr(problem, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _fail(group: list[_Job], problem: BaseException) -> None:
    for job in group:
        if not job.future.done():
            job.future.set_exception(problem)


def _checked(path: Path) -> Path:
    """Return the resolved path of the file, after checking what exists.

    SQLite puts the log next to the name that it was given; two names of one file would have two logs.
    """
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        raise StoreUnsafe(f"SQLite {sqlite3.sqlite_version} is too old; {OLDEST_SQLITE} or newer is needed")
    if str(path) in ("", ".", ":memory:") or str(path).startswith("file:"):
        raise StoreUnsafe("the embedded store needs a file; a database in memory does not survive the process")
    path = path.resolve()
    if not path.parent.is_dir():
        raise StoreUnavailable(f"{path}: the folder {path.parent} does not exist", path=str(path))
    if path.is_dir():
        raise StoreUnavailable(f"{path}: this is a folder, not a file", path=str(path))
    for needed in (path.parent, path):
        if needed.exists() and not os.access(needed, os.W_OK):
            raise StoreReadOnly(
                f"{path}: {needed} cannot be written; the store needs both file and folder", path=str(path)
            )
    size = path.stat().st_size if path.exists() else 0
    if size and path.stat().st_nlink > 1:
        raise StoreUnsafe(
            f"{path}: the file has another name (a hard link), and each name has its own log", path=str(path)
        )
    if 0 < size < SMALLEST_FILE:  # SQLite would treat it as a new file, and overwrite it
        raise StoreCorrupt(f"{path}: the file is cut short, or not a Holdfast store", path=str(path))
    if size == 0 and _wal_size(path) > 0:
        # SQLite would treat the file as new and delete the log, with everything in it.
        raise StoreCorrupt(f"{path}: the file is missing or empty, but its log {path.name}-wal is not", path=str(path))
    return path


def create_private(path: Path) -> None:
    """Create a file that only its owner can read, unless it exists. SQLite gives its log the mode of the file."""
    with suppress(FileExistsError):
        made = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, PRIVATE_FILE)
        try:
            os.fchmod(made, PRIVATE_FILE)  # a umask removes rights, including required ones
        finally:
            os.close(made)


def _refuse_foreign(db: sqlite3.Connection, path: Path) -> None:
    (application_id,) = db.execute("PRAGMA application_id").fetchone()
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application_id != APPLICATION_ID and (tables or application_id):
        raise StoreCorrupt(f"{path}: this SQLite file belongs to another program", path=str(path))


def _make_durable(db: sqlite3.Connection, path: Path) -> None:
    """Set a write-ahead log and full synchronisation, and verify both."""
    (journal_mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
    for pragma in ("synchronous = FULL", "fullfsync = ON", "checkpoint_fullfsync = ON", "temp_store = MEMORY"):
        db.execute(f"PRAGMA {pragma}")
    db.execute(f"PRAGMA cache_size = -{CACHE_KB}")
    db.execute(f"PRAGMA wal_autocheckpoint = {LOG_PAGES}")
    (synchronous,) = db.execute("PRAGMA synchronous").fetchone()
    if journal_mode != "wal" or synchronous != 2:
        raise StoreUnsafe(
            f"{path}: durability was refused: journal_mode is {journal_mode} (wal is needed), "
            f"synchronous is {synchronous} (2 is needed)",
            path=str(path),
        )


def _refuse_truncated(db: sqlite3.Connection, path: Path) -> None:
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    (page_size,) = db.execute("PRAGMA page_size").fetchone()
    if _wal_size(path) == 0 and path.stat().st_size < pages * page_size:
        raise StoreCorrupt(f"{path}: the file is cut short: {pages} pages are missing their end", path=str(path))


def _wal_size(path: Path) -> int:
    wal = path.with_name(path.name + "-wal")
    return wal.stat().st_size if wal.exists() else 0
