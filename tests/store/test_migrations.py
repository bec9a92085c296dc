"""Migrations behind the schema: applied once, as a whole or not at all, to a store of any format that is read."""

import asyncio
import shutil
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from importlib.resources import as_file, files
from pathlib import Path

import pytest

from holdfast.core.search import parse_conditions
from holdfast.errors import HoldfastError, StoreNotMigrated, StoreTooNew, StoreTooOld
from holdfast.store.queries import AuditQuery, RunQuery
from holdfast.store.schema import Schema, read_schema
from holdfast.store.sqlite import SqliteStore, migrate
from holdfast.store.types import PurgePolicy
from holdfast.testing.samples import SampleNode, new_run
from tests.store.test_format import FORMATS, change, restore

GOOD = "-- oldest reader: {}\nCREATE TABLE wonders (wonder TEXT);\nALTER TABLE runs ADD COLUMN mood TEXT;\n"
BROKEN = GOOD + "INSERT INTO wonders VALUES ('half');\nINSERT INTO no_such_table VALUES (1);\n"


def planted(folder: Path, package: str, *scripts: str) -> Schema:
    """Return the schema of a package with these migrations behind it."""
    with as_file(files(package)) as here:
        folder.mkdir()
        shutil.copy(here / "schema.sql", folder)
        if (here / "migrations").is_dir():
            shutil.copytree(here / "migrations", folder / "migrations")
        (folder / "migrations").mkdir(exist_ok=True)
    known = read_schema(folder)
    for number, script in enumerate(scripts, known.latest + 1):
        text = script.format(known.migrations[-1].oldest_reader)
        (folder / "migrations" / f"{number:04}_planted.sql").write_text(text)
    return read_schema(folder)


def with_migrations(monkeypatch: pytest.MonkeyPatch, folder: Path, *scripts: str) -> Schema:
    """Let this build know further migrations."""
    schema = planted(folder, "holdfast.store.sqlite", *scripts)
    monkeypatch.setattr(migrate, "schema", lambda: schema)
    return schema


def tables(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as db:
        return {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def versions(path: Path) -> list[int]:
    with closing(sqlite3.connect(path)) as db:
        return [version for (version,) in db.execute("SELECT version FROM holdfast_schema ORDER BY 1")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a file of the format of `schema.sql`."""
    path = tmp_path / "a.db"
    restore(FORMATS[0], path)
    return path


@pytest.mark.contract("FMT-1")
async def test_a_migration_is_applied_once_and_is_in_the_audit_log(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = migrate.latest_version()
    schema = with_migrations(monkeypatch, tmp_path / "schema", GOOD)
    store = await SqliteStore.open(path)
    with pytest.raises(StoreNotMigrated):
        await store.create([new_run("early")])
    assert await store.migrate() == schema.latest == before + 1
    assert await store.migrate() == schema.latest
    node = SampleNode(store, "node-m")
    await node.create("after")
    entries = [entry for entry in await store.find(AuditQuery()) if entry.operation == "store.migrate"]
    assert len(entries) == 1
    await store.close()
    assert versions(path)[-1] == schema.latest
    assert "wonders" in tables(path)


@pytest.mark.contract("FMT-1")
async def test_an_empty_file_gets_the_schema_and_all_migrations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = with_migrations(monkeypatch, tmp_path / "schema", GOOD, "-- oldest reader: {}\nDROP TABLE wonders;\n")
    store = await SqliteStore.open(tmp_path / "new.db")
    assert await store.migrate() == schema.latest
    await store.close()
    assert versions(tmp_path / "new.db") == [migration.version for migration in schema.migrations]
    assert "wonders" not in tables(tmp_path / "new.db")


@pytest.mark.contract("FMT-1")
@pytest.mark.parametrize("is_new", [True, False])
async def test_a_migration_that_fails_leaves_nothing_behind(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    """Also of what went before it in the same call; the store works on as it was."""
    file = tmp_path / "new.db" if is_new else path
    known = [] if is_new else versions(path)
    with monkeypatch.context() as broken:
        with_migrations(broken, tmp_path / "broken", GOOD, BROKEN.replace("CREATE TABLE wonders (wonder TEXT);\n", ""))
        store = await SqliteStore.open(file)
        with pytest.raises((sqlite3.Error, HoldfastError)):
            await store.migrate()
        await store.close()
    assert "wonders" not in tables(file)
    assert ("runs" in tables(file)) is not is_new
    store = await SqliteStore.open(file)
    await store.migrate()
    await SampleNode(store, "node-m").create("after")
    await store.close()
    assert versions(file) == sorted({*known, *(migration.version for migration in migrate.schema().migrations)})


@pytest.mark.contract("FMT-1")
async def test_simultaneous_openings_apply_each_migration_once(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = with_migrations(monkeypatch, tmp_path / "schema", GOOD)
    for file in (path, tmp_path / "new.db"):
        stores = [await SqliteStore.open(file) for _ in range(4)]
        assert set(await asyncio.gather(*(store.migrate() for store in stores))) == {schema.latest}
        for store in stores:
            await store.close()


@pytest.mark.contract("FMT-1")
async def test_a_file_of_a_format_before_the_schema_is_refused_and_left_alone(path: Path) -> None:
    first = migrate.schema().first
    change(path, f"PRAGMA journal_mode = WAL; DELETE FROM holdfast_schema WHERE version >= {first}")
    written = path.read_bytes()
    with pytest.raises(StoreTooOld, match="the Holdfast that made it") as refused:
        await SqliteStore.open(path)
    assert (refused.value.details["found"], refused.value.details["known"]) == (first - 1, first)
    assert path.read_bytes() == written


@pytest.mark.contract("FMT-1")
def test_a_build_knows_its_formats_by_its_scripts(tmp_path: Path) -> None:
    schema = planted(tmp_path / "schema", "holdfast.store.sqlite", GOOD)
    first, latest = schema.first, schema.latest
    assert [migration.version for migration in schema.missing(0)] == _range(first, latest)
    assert [migration.version for migration in schema.missing(first)] == _range(first + 1, latest)
    assert schema.missing(latest + 5) == []
    schema.check(0, 0, "here")
    schema.check(latest + 5, latest, "here")
    with pytest.raises(StoreTooNew):
        schema.check(latest + 5, latest + 1, "here")
    with pytest.raises(StoreTooOld):
        schema.check(first - 1, 1, "here")


@pytest.mark.contract("FMT-1")
def test_the_page_names_the_formats_that_are_written_and_those_that_are_migrated(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "production.md").read_text(encoding="utf-8")
    sqlite, postgres = (planted(tmp_path / name, f"holdfast.store.{name}") for name in ("sqlite", "postgres"))
    written = f"format {sqlite.latest} on SQLite and {postgres.latest} on PostgreSQL"
    assert f"{written}, and migrates stores from {sqlite.first} and {postgres.first} on" in page


def _range(first: int, last: int) -> Iterable[int]:
    return list(range(first, last + 1))


@pytest.mark.contract("FMT-1", "QUE-4")
async def test_attributes_that_an_older_build_writes_are_found_by_tenant(tmp_path: Path) -> None:
    """What was there before the migration, and what a node writes that shares the file; both go with the run."""
    path = tmp_path / "shared.db"
    restore(next(file for file in FORMATS if file.stem == "9"), path)
    number = "(SELECT run_no FROM runs WHERE run_id = 'done')"
    change(path, f"INSERT INTO run_attributes VALUES ({number}, 'cents', 'n', 5.0, NULL)")
    store = await SqliteStore.open(path)
    await store.migrate()
    change(path, f"INSERT INTO run_attributes VALUES ({number}, 'region', 's', NULL, 'eu')")
    [head] = await store.find(RunQuery(run_ids=("done",)))
    for where in ("cents=5", "region=e*", "cents=5 region=eu"):
        query = RunQuery(tenant=head.tenant, where=parse_conditions(where, {}), newest=True)
        assert [found.run_id for found in await store.find(query)] == ["done"], where
    assert (await store.purge(PurgePolicy(finished_run_ms=0))).runs == 1
    await store.close()
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM tenant_attributes").fetchone() == (0,)
