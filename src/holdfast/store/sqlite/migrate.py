"""Creates or upgrades a file's schema, once, whichever process is first. See `store/schema.py`."""

import sqlite3
from functools import cache
from pathlib import Path

from holdfast.core.audit import migration_entry
from holdfast.core.instants import Instant
from holdfast.errors import StoreNotMigrated
from holdfast.store.schema import Schema, schema_of
from holdfast.store.sqlite import audit
from holdfast.store.sqlite.connection import APPLICATION_ID


def schema() -> Schema:
    """Return the schema that this build makes."""
    return schema_of("holdfast.store.sqlite")


def latest_version() -> int:
    """Return the version of the schema that this build writes."""
    return schema().latest


def migrate(db: sqlite3.Connection, path: Path, now: Instant) -> int:
    """Apply what is missing, within a write transaction. Return the version of the file's schema."""
    db.execute(
        "CREATE TABLE IF NOT EXISTS holdfast_schema ("
        "version INTEGER PRIMARY KEY NOT NULL, oldest_reader INTEGER NOT NULL, applied_at INTEGER NOT NULL)"
    )
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    present = schema_version(db, path)
    for migration in schema().missing(present):
        for statement in split(migration.script):
            db.execute(statement)
        row = (migration.version, migration.oldest_reader, now)
        db.execute("INSERT INTO holdfast_schema VALUES (?, ?, ?)", row)
    if 0 < present < latest_version():
        audit.append(db, [migration_entry(present, latest_version(), now)])
    return schema_version(db, path)


def schema_version(db: sqlite3.Connection, path: Path) -> int:
    """Return the version of the file's schema, 0 if it has none; refuse one that this build cannot work with."""
    found = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'holdfast_schema'").fetchone()
    if found is None:
        return 0
    version, oldest_reader = db.execute(
        "SELECT coalesce(max(version), 0), coalesce(max(oldest_reader), 0) FROM holdfast_schema"
    ).fetchone()
    schema().check(version, oldest_reader, str(path), path=str(path))
    return int(version)


def not_migrated(path: Path) -> StoreNotMigrated:
    """Make the error of a file whose schema is missing or old."""
    return StoreNotMigrated(f"{path}: the schema is missing or old; call migrate() first", path=str(path))


@cache
def split(script: str) -> tuple[str, ...]:
    """Return the statements of a script. `executescript` would commit the transaction that this runs in."""
    statements, pending = list[str](), ""
    for line in script.splitlines():
        pending += line + "\n"
        if sqlite3.complete_statement(pending):
            statements.append(pending)
            pending = ""
    return tuple(statements)
