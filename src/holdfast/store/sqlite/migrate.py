"""Bringing a file's schema up to date, once, whichever process comes first.

Migrations are the files `migrations/NNNN_*.sql`, applied in order, each recorded in `holdfast_schema`. All that are
missing are applied in one transaction.

A migration names, on its first line, the oldest schema whose code can still work with what it makes. One that only
adds (tables, indexes, columns with defaults) leaves that as it was, so old and new nodes share the file during a
rolling upgrade. Code that is too old for a file refuses it with `StoreTooNew` rather than guess.
"""

import sqlite3
from importlib.resources import files
from pathlib import Path

from msgspec import Struct

from holdfast.core.instants import Instant
from holdfast.errors import StoreNotMigrated, StoreTooNew
from holdfast.store import validation
from holdfast.store.sqlite import audit
from holdfast.store.sqlite.connection import APPLICATION_ID


class Migration(Struct, frozen=True):
    """One step of the schema."""

    version: int
    oldest_reader: int
    script: str


def migrations() -> list[Migration]:
    """Return every migration, in order."""
    folder = files("holdfast.store.sqlite") / "migrations"
    scripts = {int(file.name[:4]): file.read_text() for file in folder.iterdir() if file.name.endswith(".sql")}
    return [Migration(version, _oldest_reader(script), script) for version, script in sorted(scripts.items())]


def latest_version() -> int:
    """Return the version of the schema that this code writes."""
    return migrations()[-1].version


def migrate(db: sqlite3.Connection, path: Path, now: Instant) -> int:
    """Apply what is missing; runs inside a write transaction. Return the version of the file's schema."""
    db.execute(
        "CREATE TABLE IF NOT EXISTS holdfast_schema ("
        "version INTEGER PRIMARY KEY NOT NULL, oldest_reader INTEGER NOT NULL, applied_at INTEGER NOT NULL)"
    )
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    present = schema_version(db, path)
    for migration in migrations():
        if migration.version > present:
            for statement in split(migration.script):
                db.execute(statement)
            row = (migration.version, migration.oldest_reader, now)
            db.execute("INSERT INTO holdfast_schema VALUES (?, ?, ?)", row)
    if 0 < present < latest_version():
        audit.append(db, [validation.migration_entry(present, latest_version(), now)])
    return schema_version(db, path)


def schema_version(db: sqlite3.Connection, path: Path) -> int:
    """Return the version of the file's schema, 0 if it has none; refuse one that this code is too old for."""
    found = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'holdfast_schema'").fetchone()
    if found is None:
        return 0
    version, oldest_reader = db.execute(
        "SELECT coalesce(max(version), 0), coalesce(max(oldest_reader), 0) FROM holdfast_schema"
    ).fetchone()
    if oldest_reader > latest_version():
        raise StoreTooNew(
            f"{path}: the schema is at version {version} and needs code that knows version {oldest_reader}; "
            f"this Holdfast knows {latest_version()}. Upgrade Holdfast.",
            path=str(path),
            found=version,
            known=latest_version(),
        )
    return int(version)


def not_migrated(path: Path) -> StoreNotMigrated:
    """Make the error of a file whose schema is missing or old."""
    return StoreNotMigrated(f"{path}: the schema is missing or old; call migrate() first", path=str(path))


def split(script: str) -> list[str]:
    """Return the statements of a script. `executescript` would commit the transaction that this runs in."""
    statements, pending = [], ""
    for line in script.splitlines():
        pending += line + "\n"
        if sqlite3.complete_statement(pending):
            statements.append(pending)
            pending = ""
    return statements


def _oldest_reader(script: str) -> int:
    return int(script.partition("\n")[0].removeprefix("-- oldest reader:"))
