"""Creates or upgrades a schema, once, whichever node is first. See `store/schema.py`.

The functions (`functions.sql`) follow the tables: they are replaced as a whole if the database has other functions than
this build. The comment on `holdfast_schema` records which it has, as the digest of that file. A store that a newer
build has migrated keeps its functions. Nodes wait for each other with an advisory lock.
"""

from functools import cache
from hashlib import sha256
from importlib.resources import files

from holdfast.core.audit import migration_entry
from holdfast.core.codec import number_of
from holdfast.errors import StoreNotMigrated
from holdfast.store.postgres import audit
from holdfast.store.postgres.pool import Db, Transaction
from holdfast.store.schema import Schema, schema_of

FUNCTIONS = "SELECT coalesce(obj_description(to_regclass($1), 'pg_class'), '')"

_IS_THERE = """
SELECT EXISTS (
    SELECT FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
    WHERE nspname = $1 AND relname = 'holdfast_schema')
"""
"""This reads the catalogue. to_regclass uses the session's cache, which misses a schema that another node has created
while this one waited for the lock."""


def schema() -> Schema:
    """Return the schema that this build makes."""
    return schema_of("holdfast.store.postgres")


@cache
def functions() -> str:
    """Return the script that creates or replaces every function."""
    return (files("holdfast.store.postgres") / "functions.sql").read_text()


def latest_version() -> int:
    """Return the version of the schema that this build writes."""
    return schema().latest


async def migrate(db: Transaction, name: str, shown: str) -> int:
    """Apply what is missing to the schema of this name, within a transaction. Return its version."""
    await db.fetch("SELECT pg_advisory_xact_lock($1)", number_of(f"holdfast migration of {name}"))
    present = await schema_version(db, name, shown)
    if present == 0:
        [[is_there]] = await db.fetch("SELECT to_regnamespace($1) IS NOT NULL", name)
        if not is_there:  # the owner of a schema need not have the right to create one
            await db.script(f"CREATE SCHEMA {name}")
        await db.script(
            "CREATE TABLE IF NOT EXISTS holdfast.holdfast_schema ("
            "version bigint PRIMARY KEY, oldest_reader bigint NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())"
        )
    for migration in schema().missing(present):
        await db.script(migration.script)
        await db.fetch(
            "INSERT INTO holdfast.holdfast_schema (version, oldest_reader) VALUES ($1, $2)",
            migration.version,
            migration.oldest_reader,
        )
    if present <= latest_version():
        await _replace_functions(db, name)
    if 0 < present < latest_version():
        [[now]] = await db.fetch("SELECT holdfast.time_1(NULL)")
        await audit.append(db, [migration_entry(present, latest_version(), now)])
    return await schema_version(db, name, shown)


async def _replace_functions(db: Transaction, name: str) -> None:
    digest = f"functions {sha256(functions().encode()).hexdigest()}"
    [[found]] = await db.fetch(FUNCTIONS, f"{name}.holdfast_schema")
    if found != digest:
        await db.script(functions())
        await db.script(f"COMMENT ON TABLE holdfast.holdfast_schema IS '{digest}'")


async def schema_version(db: Db, name: str, shown: str) -> int:
    """Return the version of this schema, 0 if there is none; refuse one that this build cannot work with."""
    [[found]] = await db.fetch(_IS_THERE, name)
    if not found:
        return 0
    [[version, oldest_reader]] = await db.fetch(
        "SELECT coalesce(max(version), 0), coalesce(max(oldest_reader), 0) FROM holdfast.holdfast_schema"
    )
    schema().check(version, oldest_reader, shown, store=shown)
    return int(version)


def not_migrated(shown: str) -> StoreNotMigrated:
    """Make the error of a store whose schema is missing or old."""
    return StoreNotMigrated(f"{shown}: the schema is missing or old; call migrate() first", store=shown)
