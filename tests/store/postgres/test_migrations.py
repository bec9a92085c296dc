"""Migrations behind the schema, and functions that follow the build, on PostgreSQL."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.errors import StoreError, StoreTooOld
from holdfast.store.postgres import PostgresStore, migrate
from holdfast.store.postgres.address import parse_address
from holdfast.store.queries import AuditQuery
from holdfast.store.schema import Schema
from holdfast.testing.samples import SampleNode
from tests.store.postgres.tampering import behind, execute
from tests.store.postgres.test_format import FORMATS, restore
from tests.store.test_migrations import planted

GOOD = "-- oldest reader: {}\nCREATE TABLE holdfast.wonders (wonder text);\n"
BROKEN = "-- oldest reader: {}\nCREATE TABLE holdfast.more (wonder text);\nINSERT INTO holdfast.nowhere VALUES (1);\n"


def with_migrations(monkeypatch: pytest.MonkeyPatch, folder: Path, *scripts: str) -> Schema:
    """Let this build know further migrations."""
    schema = planted(folder, "holdfast.store.postgres", *scripts)
    monkeypatch.setattr(migrate, "schema", lambda: schema)
    return schema


async def names(address: str, catalog: str) -> set[str]:
    """Return the names of the tables or functions of a store."""
    column, place = {"pg_class": ("relname", "relnamespace"), "pg_proc": ("proname", "pronamespace")}[catalog]
    async with behind(address) as connection:
        query = f"SELECT {column} FROM {catalog} WHERE {place} = to_regnamespace($1)"
        return {name for (name,) in await connection.fetch(query, parse_address(address).schema)}


@pytest.mark.contract("FMT-1")
async def test_a_migration_is_applied_once_and_is_in_the_audit_log(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await restore(FORMATS[0], address)
    schema = with_migrations(monkeypatch, tmp_path / "schema", GOOD)
    stores = [await PostgresStore.open(address) for _ in range(3)]
    assert set(await asyncio.gather(*(store.migrate() for store in stores))) == {schema.latest}
    await SampleNode(stores[0], "node-m").create("after")
    entries = [entry for entry in await stores[0].find(AuditQuery()) if entry.operation == "store.migrate"]
    assert len(entries) == 1
    for store in stores:
        await store.close()
    assert "wonders" in await names(address, "pg_class")


@pytest.mark.contract("FMT-1")
@pytest.mark.parametrize("is_new", [True, False])
async def test_a_migration_that_fails_leaves_nothing_behind(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    if not is_new:
        await restore(FORMATS[0], address)
    with monkeypatch.context() as broken:
        with_migrations(broken, tmp_path / "broken", GOOD, BROKEN)
        store = await PostgresStore.open(address)
        with pytest.raises(StoreError):
            await store.migrate()
        await store.close()
    found = await names(address, "pg_class")
    assert not found & {"wonders", "more"}
    assert ("runs" in found) is not is_new
    store = await PostgresStore.open(address)
    assert await store.migrate() == migrate.latest_version()
    await SampleNode(store, "node-m").create("after")
    await store.close()


@pytest.mark.contract("FMT-1")
async def test_functions_are_replaced_by_those_of_the_build_and_only_if_they_differ(address: str) -> None:
    """A store of the same format that another build has made lacks a function, and has another in an old form."""
    store = await PostgresStore.open(address)
    await store.migrate()
    known = await names(address, "pg_proc")
    await execute(address, "DROP FUNCTION holdfast.admit_1")
    assert await store.migrate() == migrate.latest_version()
    assert "admit_1" not in await names(address, "pg_proc"), "they are those of this build, by the comment"
    await execute(address, "COMMENT ON TABLE holdfast.holdfast_schema IS 'functions of another build'")
    await store.migrate()
    assert await names(address, "pg_proc") == known
    await store.close()


@pytest.mark.contract("FMT-1")
async def test_functions_of_a_newer_format_are_left_alone(address: str) -> None:
    store = await PostgresStore.open(address)
    await store.migrate()
    await execute(address, "INSERT INTO holdfast.holdfast_schema VALUES (1000, 1)")
    await execute(address, "COMMENT ON TABLE holdfast.holdfast_schema IS 'functions of a newer build'")
    await execute(address, "DROP FUNCTION holdfast.admit_1")
    assert await store.migrate() == 1000
    assert "admit_1" not in await names(address, "pg_proc")
    await store.close()


@pytest.mark.contract("FMT-1")
async def test_a_store_of_a_format_before_the_schema_is_refused(address: str) -> None:
    await restore(FORMATS[0], address)
    first = migrate.schema().first
    await execute(address, "UPDATE holdfast.holdfast_schema SET version = $1", first - 1)
    with pytest.raises(StoreTooOld, match="the Holdfast that made it"):
        await PostgresStore.open(address)
