"""Copies of a store: taken while nodes work, verified before use, and never written over an existing file.

A copy is one file, without a separate log. It holds the store as it was at one instant: the source is read within one
transaction, which in a write-ahead log neither waits for writers nor makes them wait.
"""

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict, replace

from holdfast.core.audit import AuditEntry
from holdfast.errors import Conflict, StoreCorrupt, StoreUnavailable
from holdfast.store.sqlite import audit
from holdfast.store.sqlite.connection import APPLICATION_ID, create_private, translate
from holdfast.store.sqlite.migrate import latest_version, schema_version

STEP_PAGES = 2_000
"""How many pages are copied between two reports of progress: about 8 MB."""

Progress = Callable[[int, int], None]
"""Gets the number of copied pages and the total."""


class Copied(Struct, frozen=True, kw_only=True):
    """A verified copy."""

    path: str
    size_bytes: int
    schema_version: int
    runs: int


class FileInfo(Struct, frozen=True, kw_only=True):
    """What can be read from a store's file, whatever its version is."""

    path: str
    size_bytes: int
    log_bytes: int
    schema_version: int
    latest_version: int
    runs: int
    sqlite_version: str


class Restored(Copied, frozen=True, kw_only=True):
    """A restored store. `tokens_revoked` counts sessions too."""

    tokens_revoked: int


def restore_store(
    copy: Path, to: Path, entry: AuditEntry, *, keep_tokens: bool = False, progress: Progress = lambda done, of: None
) -> Restored:
    """Restore a copy, and revoke the tokens in it, unless they are to be kept.

    A token that was revoked after the copy was taken would be valid again. The audit entry, which already has its time,
    is in the restored store from the start.
    """
    revoked: list[int] = []

    def work(db: sqlite3.Connection) -> None:
        revoked.append(0 if keep_tokens else _revoke_tokens(db, entry))
        if _has_table(db, "audit_log"):
            kept = "tokens kept" if keep_tokens else f"{revoked[0]} tokens and sessions revoked"
            audit.append(db, [replace(entry, detail=kept)])

    copied = copy_store(copy, to, progress, work)
    return Restored(**asdict(copied), tokens_revoked=revoked[0])


def _revoke_tokens(db: sqlite3.Connection, entry: AuditEntry) -> int:
    if not _has_table(db, "access_tokens"):
        return 0
    return db.execute(
        "UPDATE access_tokens SET revoked_at = ?, revoked_by = ? WHERE revoked_at IS NULL", (entry.at, entry.operation)
    ).rowcount


def copy_store(
    source: Path,
    to: Path,
    progress: Progress = lambda done, of: None,
    work: Callable[[sqlite3.Connection], None] | None = None,
) -> Copied:
    """Copy a store to a new file. The file appears when it is complete, checked and durable.

    `work` is applied to the copy before that.
    """
    _refuse_taken(to)
    part = to.with_name(f"{to.name}.part-{os.getpid()}")
    try:
        part.unlink(missing_ok=True)
        create_private(part)
        with closing(_open(source)) as db, closing(sqlite3.connect(part)) as copy:
            _check_ours(db, source)
            db.execute("BEGIN")
            db.execute("SELECT count(*) FROM sqlite_master").fetchone()  # begins the snapshot
            db.backup(copy, pages=STEP_PAGES, progress=lambda _, left, of: progress(of - left, of))
            copy.execute("PRAGMA journal_mode = DELETE").fetchone()
            if work is not None:
                with copy:
                    work(copy)
        copied = _checked(part)
        _keep(part, to)
    except sqlite3.Error as problem:
        raise translate(problem, source) from problem
    except OSError as problem:
        raise StoreUnavailable(f"{to}: the copy cannot be written: {problem}", path=str(to)) from problem
    finally:
        for left_over in (part, Path(f"{part}-journal")):
            with suppress(OSError):
                left_over.unlink(missing_ok=True)
    return Copied(path=str(to), size_bytes=to.stat().st_size, schema_version=copied[0], runs=copied[1])


def file_info(path: Path) -> FileInfo:
    """Return what can be read from a store's file."""
    try:
        with closing(_open(path)) as db:
            _check_ours(db, path)
            log = Path(f"{path}-wal")
            return FileInfo(
                path=str(path),
                size_bytes=path.stat().st_size,
                log_bytes=log.stat().st_size if log.exists() else 0,
                schema_version=schema_version(db, path),
                latest_version=latest_version(),
                runs=_count_runs(db),
                sqlite_version=sqlite3.sqlite_version,
            )
    except sqlite3.Error as problem:
        raise translate(problem, path) from problem


def _refuse_taken(path: Path) -> None:
    for taken in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        if taken.exists():
            raise Conflict(f"{taken}: this is there already, and nothing is overwritten; name another file")
    if not path.parent.is_dir():
        raise StoreUnavailable(f"{path}: the folder {path.parent} does not exist", path=str(path))


def _open(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        raise StoreUnavailable(f"{path}: there is no such store", path=str(path))
    mode = "rw" if os.access(path, os.W_OK) else "ro"
    db = sqlite3.connect(f"{path.resolve().as_uri()}?mode={mode}", uri=True, isolation_level=None, timeout=30.0)
    db.execute("PRAGMA query_only = ON")
    return db


def _check_ours(db: sqlite3.Connection, path: Path) -> None:
    (application_id,) = db.execute("PRAGMA application_id").fetchone()
    if application_id != APPLICATION_ID:
        raise StoreCorrupt(f"{path} is not a Holdfast store", path=str(path))


def _checked(path: Path) -> tuple[int, int]:
    """Read all of a copy, and return its schema version and its number of runs."""
    with closing(_open(path)) as db:
        _check_ours(db, path)
        (found,) = db.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok" or db.execute("PRAGMA foreign_key_check").fetchone() is not None:
            raise StoreCorrupt(f"{path}: the copy is damaged, and so perhaps is the store", path=str(path))
        return schema_version(db, path), _count_runs(db)


def _count_runs(db: sqlite3.Connection) -> int:
    if not _has_table(db, "runs"):
        return 0
    (runs,) = db.execute("SELECT count(*) FROM runs").fetchone()
    return int(runs)


def _has_table(db: sqlite3.Connection, name: str) -> bool:
    found = db.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (name,)).fetchone()
    return found is not None


def _keep(part: Path, to: Path) -> None:
    """Make a file durable and rename it, unless another file has the name by now."""
    with part.open("rb") as file:
        os.fsync(file.fileno())
    try:
        os.link(part, to)
    except FileExistsError as problem:
        raise Conflict(f"{to}: this is there already, and nothing is overwritten; name another file") from problem
    part.unlink()
    folder = os.open(to.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
