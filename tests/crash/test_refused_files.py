"""A file that cannot or must not be used is refused at once, with the reason."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.errors import StoreNotMigrated, StoreTooNew, StoreUnavailable, StoreUnsafe
from holdfast.store.sqlite import SqliteStore
from holdfast.testing.samples import new_run
from tests.crash import restricted_processes
from tests.crash.sample_file import make_file, read_file
from tests.races.parallel import run_in_parallel
from tests.races.stores import opened


def set_version(path: Path, version: int) -> int:
    """Make the file one of another version, which only code of that version can read; return what it was."""
    with closing(sqlite3.connect(path)) as connection:
        (present,) = connection.execute("SELECT max(version) FROM holdfast_schema").fetchone()
        connection.execute("DELETE FROM holdfast_schema WHERE version < ?", (present,))
        connection.execute("UPDATE holdfast_schema SET version = ?, oldest_reader = ?", (version, version))
        connection.commit()
    return int(present)


@pytest.mark.contract("FMT-1")
async def test_a_file_of_a_newer_version_is_refused_and_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await make_file(path)
    set_version(path, 1_000)
    written = path.read_bytes()

    with pytest.raises(StoreTooNew):
        await SqliteStore.open(path)

    assert path.read_bytes() == written


@pytest.mark.contract("FMT-1")
async def test_a_file_that_becomes_newer_while_it_is_open_is_not_written_by_the_older_version(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with opened(path) as older:
        await older.migrate()
        set_version(path, 1_000)
        with pytest.raises(StoreTooNew):
            await older.migrate()


@pytest.mark.contract("FMT-1")
async def test_a_file_of_an_older_version_must_be_migrated_first(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    picture = await make_file(path)
    present = set_version(path, 0)
    async with opened(path) as store:
        with pytest.raises(StoreNotMigrated):
            await store.create([new_run()])
        with pytest.raises(StoreNotMigrated):
            await store.load(["run-001"])
    set_version(path, present)
    assert await read_file(path) == picture


async def test_a_new_file_must_be_migrated_first(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        for verb in (store.create([new_run()]), store.load(["run-1"]), store.claim("node-a", 1), store.now()):
            with pytest.raises(StoreNotMigrated):
                await verb


async def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="nowhere"):
        await SqliteStore.open(tmp_path / "nowhere" / "store.db")
    assert not list(tmp_path.iterdir())


async def test_a_folder_is_not_a_store(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable):
        await SqliteStore.open(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.contract("STO-1")
@pytest.mark.parametrize("path", [":memory:", "", "file::memory:", "file::memory:?cache=shared"])
async def test_a_database_in_memory_is_refused_as_unsafe(
    path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreUnsafe):
        await SqliteStore.open(path)
    assert not list(tmp_path.iterdir())


# --- rights


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that other users may enter; pytest's own may not be."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.contract("STO-1")
@pytest.mark.parametrize(
    ("file_mode", "folder_mode", "code"),
    [
        (0o444, 0o555, "StoreReadOnly"),
        (0o444, 0o777, "StoreReadOnly"),
        (0o666, 0o555, "StoreReadOnly"),
        (0o000, 0o777, "StoreReadOnly"),
        (None, 0o555, "StoreReadOnly"),
    ],
    ids=["file and folder", "file", "folder", "unreadable", "new file"],
)
async def test_a_file_that_may_not_be_written_is_refused(
    public_folder: Path, file_mode: int | None, folder_mode: int, code: str
) -> None:
    folder = public_folder / "data"
    folder.mkdir()
    path = folder / "store.db"
    if file_mode is not None:
        await make_file(path)
        path.chmod(file_mode)
    folder.chmod(folder_mode)
    try:
        (found,) = run_in_parallel(restricted_processes.write_without_rights, processes=1, path=path)
    finally:
        folder.chmod(0o755)
    assert found == code
    assert [file.name for file in folder.iterdir()] == ([] if file_mode is None else ["store.db"])


@pytest.mark.contract("STO-1")
async def test_rights_that_come_back_are_enough(public_folder: Path) -> None:
    folder = public_folder / "data"
    folder.mkdir()
    path = folder / "store.db"
    picture = await make_file(path)
    path.chmod(0o444)
    (found,) = run_in_parallel(restricted_processes.write_without_rights, processes=1, path=path)
    path.chmod(0o644)
    assert found == "StoreReadOnly"
    assert await read_file(path) == picture
