"""Bringing a schema up to date, once, whichever node comes first.

Migrations are the files `migrations/NNNN_*.sql`, applied in order, each recorded in `holdfast_schema`; then
`functions.sql`, which replaces every function. All that is missing is applied in one transaction, under a lock that
every node asks for. As in the embedded store, a migration
names the oldest schema whose code can still work with what it makes; code that is too old refuses the store.
"""

from functools import cache
from importlib.resources import files

from msgspec import Struct

from holdfast.core.codec import number_of
from holdfast.errors import StoreNotMigrated, StoreTooNew
from holdfast.store import validation
from holdfast.store.postgres import audit
from holdfast.store.postgres.pool import Db, Transaction


class Migration(Struct, frozen=True):
    """One step of the schema."""

    version: int
    oldest_reader: int
    script: str


@cache
def migrations() -> tuple[Migration, ...]:
    """Return every migration, in order."""
    folder = files("holdfast.store.postgres") / "migrations"
    scripts = {int(file.name[:4]): file.read_text() for file in folder.iterdir() if file.name.endswith(".sql")}
    return tuple(Migration(version, _oldest_reader(script), script) for version, script in sorted(scripts.items()))


def functions() -> str:
    """Return the script that makes every function, or replaces it."""
    return (files("holdfast.store.postgres") / "functions.sql").read_text()


def latest_version() -> int:
    """Return the version of the schema that this code writes."""
    return migrations()[-1].version


async def migrate(db: Transaction, schema: str, shown: str) -> int:
    """Apply what is missing, within a transaction. Return the version of the schema."""
    await db.fetch("SELECT pg_advisory_xact_lock($1)", number_of(f"holdfast migration of {schema}"))
    present = await schema_version(db, schema, shown)
    if present == 0:
        [[is_there]] = await db.fetch("SELECT to_regnamespace($1) IS NOT NULL", schema)
        if not is_there:  # who owns a schema need not have the right to create one
            await db.script(f"CREATE SCHEMA {schema}")
        await db.script(
            "CREATE TABLE IF NOT EXISTS holdfast.holdfast_schema ("
            "version bigint PRIMARY KEY, oldest_reader bigint NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())"
        )
    missing = [migration for migration in migrations() if migration.version > present]
    for migration in missing:
        await db.script(migration.script)
        await db.fetch(
            "INSERT INTO holdfast.holdfast_schema (version, oldest_reader) VALUES ($1, $2)",
            migration.version,
            migration.oldest_reader,
        )
    if missing:
        await db.script(functions())
        if present > 0:
            [[now]] = await db.fetch("SELECT holdfast.time_1(NULL)")
            await audit.append(db, [validation.migration_entry(present, latest_version(), now)])
    return await schema_version(db, schema, shown)


async def schema_version(db: Db, schema: str, shown: str) -> int:
    """Return the version of the schema, 0 if there is none; refuse one that this code is too old for."""
    [[found]] = await db.fetch("SELECT to_regclass($1) IS NOT NULL", f"{schema}.holdfast_schema")
    if not found:
        return 0
    [[version, oldest_reader]] = await db.fetch(
        "SELECT coalesce(max(version), 0), coalesce(max(oldest_reader), 0) FROM holdfast.holdfast_schema"
    )
    if oldest_reader > latest_version():
        raise StoreTooNew(
            f"{shown}: the schema is at version {version} and needs code that knows version {oldest_reader}; "
            f"this Holdfast knows {latest_version()}. Upgrade Holdfast.",
            store=shown,
            found=version,
            known=latest_version(),
        )
    return int(version)


def not_migrated(shown: str) -> StoreNotMigrated:
    """Make the error of a store whose schema is missing or old."""
    return StoreNotMigrated(f"{shown}: the schema is missing or old; call migrate() first", store=shown)


def _oldest_reader(script: str) -> int:
    return int(script.partition("\n")[0].removeprefix("-- oldest reader:"))
