"""`health`: the file and its disk, and facts about all runs."""

import shutil
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

from holdfast.core.instants import Instant
from holdfast.errors import StoreError
from holdfast.store.health import (
    SECOND,
    Bounds,
    Facts,
    Finding,
    facts_of,
    fine,
    note,
    questions,
    size_words,
    spread,
    time_words,
    wrong,
)
from holdfast.store.sqlite.connection import Database, translate
from holdfast.store.sqlite.migrate import latest_version, schema_version


async def examine(database: Database, bounds: Bounds, now: Instant, *, thorough: bool) -> Facts:
    """Examine the file and all runs."""
    findings = await _writable(database)
    try:
        findings += [_durable(database.connection), _log(database, bounds), _room(database.connection, bounds)]
    except sqlite3.Error as problem:
        raise translate(problem, database.path) from problem
    findings.append(_disk(database.path, bounds))
    findings.append(_rights(database.path))
    findings += await database.read(lambda db: list(_time(db, now)))
    if thorough:
        findings.append(await database.read(_whole))
    return await database.read(lambda db: _facts(db, database.path, bounds, now, tuple(findings)))


def _rights(path: Path) -> Finding:
    """Report which other users may read the file, the files next to it, or the folder of its sockets."""
    beside = [path, *(path.with_name(f"{path.name}{end}") for end in ("-wal", "-shm", "-wake"))]
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in beside if file.exists()}
    wide = [f"{name} ({mode:03o})" for name, mode in modes.items() if mode & 0o077]
    if not wide:
        return fine("rights", "only the user of the store can read its files")
    advice = f"if they need not: `chmod go-rwx {path}*`, and the same for backups"
    return note("rights", f"others than the user of the store have rights to {', '.join(wide)}", advice)


def _facts(db: sqlite3.Connection, path: Path, bounds: Bounds, now: Instant, findings: tuple[Finding, ...]) -> Facts:
    answers = {name: db.execute(sql).fetchall() for name, sql in questions("", now, bounds).items()}
    sample = spread("", answers["ends"], bounds)
    return facts_of(
        answers,
        db.execute(sample).fetchall() if sample else (),
        software=f"SQLite {sqlite3.sqlite_version}",
        schema_version=schema_version(db, path),
        latest_version=latest_version(),
        findings=findings,
    )


async def _writable(database: Database) -> list[Finding]:
    """Acquire the lock that a writer needs, and release it."""
    try:
        await database.write(lambda db: None)
    except StoreError as problem:
        advice = "see which process holds it, or what is wrong with its disk; nodes cannot record anything meanwhile"
        return [wrong("writing", problem.message, advice)]
    return [fine("writing", f"{database.path} can be written")]


def _durable(db: sqlite3.Connection) -> Finding:
    (journal_mode,) = db.execute("PRAGMA journal_mode").fetchone()
    (synchronous,) = db.execute("PRAGMA synchronous").fetchone()
    settings = f"journal_mode is {journal_mode}, synchronous is {synchronous}"
    if journal_mode == "wal" and synchronous == 2:
        return fine("durability", f"what was acknowledged is on the disk: {settings}")
    return wrong("durability", f"{settings}; wal and 2 are needed", "see who changes the settings while nodes work")


def _log(database: Database, bounds: Bounds) -> Finding:
    """Run a checkpoint, as every node does from time to time, and check what remains in the log."""
    _, pages, merged = database.connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    (page_size,) = database.connection.execute("PRAGMA page_size").fetchone()
    left = max(0, pages - merged) * page_size
    if left >= bounds.log_bytes:
        sentence = f"{size_words(left)} of the log cannot be merged: a process has been reading for long"
        return wrong("log", sentence, f"end it; `lsof {database.path.name}` lists who has the file open")
    log = database.path.with_name(f"{database.path.name}-wal")
    size = log.stat().st_size if log.exists() else 0
    return fine("log", f"the log has {size_words(size)}, and {size_words(left)} of it wait to be merged")


def _disk(path: Path, bounds: Bounds) -> Finding:
    usage = shutil.disk_usage(path.parent)
    left = f"{size_words(usage.free)} of {size_words(usage.total)} are free on the disk of {path.name}"
    if usage.free < bounds.disk_bytes and usage.free < bounds.disk_share * usage.total:
        return wrong("disk", left, "make room, or `holdfast store backup` to another disk and go on there")
    if usage.free < path.stat().st_size:
        return note("disk", f"{left}, less than it has itself", "let backups go to another disk")
    return fine("disk", left)


def _room(db: sqlite3.Connection, bounds: Bounds) -> Finding:
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    (free,) = db.execute("PRAGMA freelist_count").fetchone()
    (page_size,) = db.execute("PRAGMA page_size").fetchone()
    sentence = f"the file has {size_words(pages * page_size)}, of which {size_words(free * page_size)} are free"
    if free * page_size >= bounds.free_bytes and free >= bounds.free_share * pages:
        advice = "new runs will use it; to give it back to the disk, stop all nodes and VACUUM the file"
        return note("size", sentence, advice)
    return fine("size", sentence)


def _time(db: sqlite3.Connection, now: Instant) -> Iterator[Finding]:
    """Compare the clock with what was written last: a file has no clock of its own."""
    row = db.execute("SELECT persisted_at FROM events ORDER BY rowid DESC LIMIT 1").fetchone()
    if row is not None and row[0] > now + SECOND:
        sentence = f"the last event was recorded {time_words(row[0] - now)} from now: the clock was set back"
        yield wrong("clock", sentence, "set the clock of this machine; timers are late by that much until then")


def _whole(db: sqlite3.Connection) -> Finding:
    (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":  # SQLite's text may quote stored data
        return wrong("integrity", "the file is damaged", "stop the nodes, keep a copy of it, and restore a backup")
    return fine("integrity", "all of the file was read, and it is whole")
