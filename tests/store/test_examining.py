"""What a SQLite store says of its own file: each finding is shown by making it true."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from holdfast.store.health import Bounds, Finding, size_words, time_words
from holdfast.store.port import PurgePolicy
from holdfast.store.sqlite import SqliteStore
from holdfast.testing import VirtualClock
from holdfast.testing.samples import SampleNode, complete, new_run, wait


async def opened(path: Path, clock: VirtualClock | None = None, busy_ms: int = 30_000) -> SqliteStore:
    """Open a store, and make it if it is not there."""
    store = await SqliteStore.open(path, clock=clock or VirtualClock(), busy_ms=busy_ms)
    await store.migrate()
    return store


async def found(store: SqliteStore, subject: str, *, thorough: bool = False, **bounds: Any) -> list[Finding]:
    """Return what the store says of a subject."""
    facts = await store.health(Bounds(**bounds), thorough=thorough)
    return [one for one in facts.findings if one.subject == subject]


async def test_a_new_file_is_fine(tmp_path: Path) -> None:
    store = await opened(tmp_path / "store.db")
    facts = await store.health(Bounds(), thorough=True)
    await store.close()
    assert {one.level for one in facts.findings} == {"fine"}
    assert {one.subject for one in facts.findings} == {
        "writing", "durability", "log", "size", "disk", "integrity", "rights",
    }  # fmt: skip
    assert facts.software == f"SQLite {sqlite3.sqlite_version}"
    assert facts.schema_version == facts.latest_version


@pytest.mark.contract("STO-3")
async def test_a_process_that_holds_the_file_is_noticed(tmp_path: Path) -> None:
    store = await opened(tmp_path / "store.db", busy_ms=20)
    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        [writing] = await found(store, "writing")
        assert writing.level == "wrong"
        assert "another process is using the store" in writing.sentence
        other.execute("ROLLBACK")
        [writing] = await found(store, "writing")
        assert writing.level == "fine"
    await store.close()


@pytest.mark.contract("STO-1")
async def test_settings_that_are_not_durable_are_noticed(tmp_path: Path) -> None:
    store = await opened(tmp_path / "store.db")
    store._database.connection.execute("PRAGMA synchronous = OFF")
    [durability] = await found(store, "durability")
    await store.close()
    assert (durability.level, "synchronous is 0; wal and 2 are needed" in durability.sentence) == ("wrong", True)


async def test_a_reader_that_keeps_the_log_from_being_merged_is_noticed(tmp_path: Path) -> None:
    store = await opened(tmp_path / "store.db")
    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM runs").fetchone()
        await store.create([new_run(f"run-{number}", value="x" * 10_000) for number in range(30)])
        [log] = await found(store, "log", log_bytes=100_000)
        assert (log.level, "cannot be merged" in log.sentence) == ("wrong", True)
        assert "lsof store.db" in log.advice
        reader.execute("ROLLBACK")
    [log] = await found(store, "log", log_bytes=100_000)
    await store.close()
    assert log.level == "fine"


async def test_a_disk_with_little_room_is_noticed(tmp_path: Path) -> None:
    store = await opened(tmp_path / "store.db")
    [disk] = await found(store, "disk", disk_bytes=2**62, disk_share=1.0)
    assert (disk.level, "are free on the disk of store.db" in disk.sentence) == ("wrong", True)
    for disk_bytes, disk_share in ((0, 1.0), (2**62, 0.0)):
        [disk] = await found(store, "disk", disk_bytes=disk_bytes, disk_share=disk_share)
        assert disk.level == "fine", "both bounds must be passed"
    await store.close()


async def test_a_file_that_is_mostly_empty_is_noted(tmp_path: Path) -> None:
    clock = VirtualClock()
    store = await opened(tmp_path / "store.db", clock)
    node = SampleNode(store)
    for number in range(20):
        await node.start(f"run-{number}", complete("x" * 20_000))
    clock.advance(ms=1_000)
    assert (await store.purge(PurgePolicy(finished_run_ms=1))).runs == 20
    [size] = await found(store, "size", free_bytes=10_000)
    assert (size.level, "VACUUM" in size.advice) == ("note", True)
    store._database.connection.execute("VACUUM")
    [size] = await found(store, "size", free_bytes=10_000)
    await store.close()
    assert size.level == "fine"


@pytest.mark.contract("SIG-2")
async def test_a_clock_that_was_set_back_is_noticed(tmp_path: Path) -> None:
    clock = VirtualClock()
    store = await opened(tmp_path / "store.db", clock)
    await SampleNode(store).start("run-1", wait("go"))
    assert await found(store, "clock") == []
    clock.set_back(ms=3_600_000)
    [back] = await found(store, "clock")
    await store.close()
    assert (back.level, back.sentence) == (
        "wrong",
        "the last event was recorded 60 minutes from now: the clock was set back",
    )


async def test_damage_is_found_on_request(tmp_path: Path) -> None:
    store = await opened(tmp_path / "store.db")
    await store.create([new_run(f"run-{number}") for number in range(200)])
    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as db:
        db.execute("PRAGMA writable_schema = ON")
        db.execute("UPDATE sqlite_master SET sql = replace(sql, 'UNIQUE (', 'CHECK (run_no < 0), UNIQUE (') "
                   "WHERE name = 'events'")  # fmt: skip
        db.execute("CREATE TABLE later (n)")  # so that everybody reads the schema again
    assert await found(store, "integrity") == [], "it may take long"
    [integrity] = await found(store, "integrity", thorough=True)
    await store.close()
    assert (integrity.level, integrity.sentence) == ("wrong", "the file is damaged")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.04, "0.0 seconds"), (1.5, "1.5 seconds"), (90, "90 seconds"), (600, "10 minutes"), (172_800, "2 days")],
)
def test_times_are_said_in_words(seconds: float, words: str) -> None:
    assert time_words(seconds * 1_000_000) == words


@pytest.mark.parametrize(("size", "words"), [(512, "512 bytes"), (2_048, "2.0 KB"), (3 * 2**30, "3.0 GB")])
def test_sizes_are_said_in_words(size: int, words: str) -> None:
    assert size_words(size) == words
