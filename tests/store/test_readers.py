"""Lists of a SQLite store are read beside the event loop: it goes on, whatever somebody looks for."""

import asyncio
import sqlite3
import threading
from pathlib import Path

import pytest

from holdfast.errors import RequestTimedOut, StoreReadOnly, StoreUnavailable
from holdfast.store.port import TaskQuery
from holdfast.store.sqlite.readers import THREADS, Readers
from holdfast.store.sqlite.store import SqliteStore
from holdfast.testing.samples import SampleNode, new_run, task

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
MOST_SECONDS = 60.0


def endless(db: sqlite3.Connection) -> None:
    """Look for something without end."""
    db.execute(ENDLESS).fetchone()


async def opened(tmp_path: Path) -> SqliteStore:
    """Return a store with a file of its own."""
    store = await SqliteStore.open(tmp_path / "store.db")
    await store.migrate()
    return store


@pytest.mark.contract("MSG-4")
async def test_a_store_closes_though_others_occupy_all_threads_of_the_loop(tmp_path: Path) -> None:
    store, go_on = await opened(tmp_path), threading.Event()
    await store.find(TaskQuery())
    others = [asyncio.create_task(asyncio.to_thread(go_on.wait)) for _ in range(100)]
    try:
        async with asyncio.timeout(MOST_SECONDS / 2):
            await asyncio.sleep(0.01)
            await store.close()
    finally:
        go_on.set()
        await asyncio.gather(*others)


@pytest.mark.contract("STO-1", "API-2")
async def test_everything_goes_on_while_lists_are_read(tmp_path: Path) -> None:
    """Commits are made while every thread that reads is busy; and what takes too long is given up."""
    store = await opened(tmp_path)
    store._readers = Readers(store._database.path, 0.5)
    async with asyncio.timeout(MOST_SECONDS):
        searches = [asyncio.create_task(store._list(lambda db, _: endless(db))) for _ in range(2 * THREADS)]
        created = 0
        while not all(search.done() for search in searches):
            await store.create([new_run(f"run-{created}", request_id=f"r-{created}")])
            created += 1
        assert created > 10, "nothing was written meanwhile"
        for search in searches:
            with pytest.raises(RequestTimedOut):
                search.result()
        assert sum((await store.stats()).runs.values()) == created, (
            "the threads are free again, and see what was written"
        )
    await store.close()


@pytest.mark.contract("STO-1")
async def test_a_reading_ends_with_its_caller(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    async with asyncio.timeout(MOST_SECONDS):
        searches = [asyncio.create_task(store._list(lambda db, _: endless(db))) for _ in range(2 * THREADS)]
        await asyncio.sleep(0)
        for search in searches:
            search.cancel()
        await asyncio.gather(*searches, return_exceptions=True)
        assert await store.find(TaskQuery()) == [], "a thread is free"
    await store.close()


@pytest.mark.contract("STO-1")
async def test_closing_does_not_wait_for_lists(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    async with asyncio.timeout(MOST_SECONDS):
        search = asyncio.create_task(store._list(lambda db, _: endless(db)))
        await asyncio.sleep(0)
        await store.close()
        with pytest.raises(RequestTimedOut):
            await search
        with pytest.raises(StoreUnavailable):
            await store.find(TaskQuery())


@pytest.mark.contract("STO-1")
async def test_lists_show_what_was_acknowledged_and_cannot_write(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    node = SampleNode(store)
    for number in range(20):
        await node.start(f"run-{number}", task("a"))
        assert len(await store.find(TaskQuery())) == number + 1
    with pytest.raises(StoreReadOnly):
        await store._list(lambda db, _: db.execute("DELETE FROM tasks"))
    assert len(await store.find(TaskQuery())) == 20
    await store.close()


@pytest.mark.contract("STO-1")
async def test_a_closed_store_leaves_one_file(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await store.create([new_run("run-1")])
    await store.find(TaskQuery())
    await store.close()
    assert [path.name for path in tmp_path.iterdir() if "-wal" in path.name or "-shm" in path.name] == []
