"""Another process holds the file: we wait, and if it is too long we say so in our own words."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.errors import HoldfastError, StoreBusy, StoreUnavailable
from holdfast.store.port import Created, PurgePolicy
from holdfast.store.sqlite import SqliteStore
from holdfast.testing.samples import new_run
from tests.races.stores import opened, prepare

pytestmark = pytest.mark.slow

HOLDER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
if sys.argv[2] == "exclusive":
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
connection.execute("BEGIN IMMEDIATE")
if sys.argv[2] == "exclusive":
    connection.execute("CREATE TABLE IF NOT EXISTS holdfast_other (id INTEGER)")
print("held", flush=True)
sys.stdin.readline()
connection.execute("ROLLBACK")
connection.close()
print("free", flush=True)
sys.stdin.readline()
"""
SHORT_MS = 200


@contextmanager
def held(path: Path, kind: str = "write") -> Iterator[Callable[[], None]]:
    """Let another process hold a lock; the function that is given releases it."""
    command = [sys.executable, "-c", HOLDER, str(path), kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        answers, orders = holder.stdout, holder.stdin

        def release() -> None:
            orders.write("\n")
            assert answers.readline() == "free\n"

        try:
            assert answers.readline() == "held\n"
            yield release
        finally:
            holder.kill()


@pytest.mark.contract("STO-3")
async def test_a_lock_that_is_held_for_too_long_is_a_busy_store(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await prepare(path, new_run("run-1"))
    async with opened(path, busy_ms=SHORT_MS) as store:
        with held(path) as release:
            began = time.monotonic()
            with pytest.raises(StoreBusy) as caught:
                await store.create([new_run("run-2")])
            waited = time.monotonic() - began
            assert SHORT_MS / 1_000 <= waited < 5
            assert "database is locked" not in f"{caught.value} {caught.value.details}"
            assert await store.load(["run-2"]) == [None], "reading goes on while another process writes"
            release()
            (answer,) = await store.create([new_run("run-2")])
    assert isinstance(answer, Created)


@pytest.mark.contract("STO-3")
@pytest.mark.parametrize("verb", ["commit", "deliver", "claim", "renew", "release", "purge", "migrate"])
async def test_every_verb_that_writes_says_so(tmp_path: Path, verb: str) -> None:
    arguments: dict[str, tuple[object, ...]] = {
        "commit": ([],),
        "deliver": ([],),
        "claim": ("node-a", 1),
        "renew": ("node-a", 1_000),
        "release": ("node-a",),
        "purge": (PurgePolicy(),),
        "migrate": (),
    }
    path = tmp_path / "store.db"
    await prepare(path)
    async with opened(path, busy_ms=20) as store:
        with held(path), pytest.raises(StoreBusy):
            await getattr(store, verb)(*arguments[verb])


@pytest.mark.contract("STO-3")
async def test_a_lock_that_is_held_for_a_while_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await prepare(path)
    async with opened(path) as store:
        with held(path) as release:
            writes = [asyncio.create_task(store.create([new_run(f"run-{number}")])) for number in range(5)]
            done, _ = await asyncio.wait(writes, timeout=0.3)
            assert not done, "written although another process holds the lock"
            release()
            answers = await asyncio.wait_for(asyncio.gather(*writes), 60)
    assert all(isinstance(answer, Created) for (answer,) in answers)


@pytest.mark.contract("STO-3", "MSG-4")
async def test_a_store_that_is_closed_does_not_wait_for_ever_for_a_lock(tmp_path: Path) -> None:
    """What was waiting for it is not done, and its caller learns that."""
    path = tmp_path / "store.db"
    await prepare(path)
    store = await SqliteStore.open(path)
    with held(path):
        writing = asyncio.create_task(store.create([new_run("run-1")]))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await store.close()
        assert time.monotonic() - began < 10
        with pytest.raises(StoreUnavailable):
            await writing
    async with opened(path) as store:
        assert await store.load(["run-1"]) == [None]


@pytest.mark.contract("STO-3")
async def test_waiting_for_a_lock_does_not_hold_up_the_event_loop(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await prepare(path)
    async with opened(path) as store:
        with held(path) as release:
            write = asyncio.create_task(store.create([new_run()]))
            longest = 0.0
            for _ in range(50):
                began = time.monotonic()
                await asyncio.sleep(0.002)
                longest = max(longest, time.monotonic() - began)
            release()
            await write
    assert longest < 5, "the loop stood still while the store waited"


@pytest.mark.contract("STO-3")
async def test_a_file_that_another_process_keeps_for_itself_is_busy(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await prepare(path)
    with held(path, "exclusive"), pytest.raises(StoreBusy) as caught:
        async with opened(path, busy_ms=SHORT_MS) as store:
            await store.load(["run-1"])
    assert "database is locked" not in str(caught.value)


@pytest.mark.contract("STO-3")
async def test_a_process_that_is_killed_leaves_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await prepare(path)
    async with opened(path, busy_ms=SHORT_MS) as store:
        with held(path):
            pass
        try:
            (answer,) = await store.create([new_run()])
        except HoldfastError as error:
            pytest.fail(f"a dead process still holds the file: {error}")
    assert isinstance(answer, Created)
