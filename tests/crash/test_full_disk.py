"""There is no room left: the write is refused, nothing acknowledged is lost, and work goes on when there is room."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import StoreFull
from holdfast.store.port import Accepted, Committed, Created, Duplicate
from holdfast.store.sqlite import SqliteStore
from holdfast.testing.samples import SampleNode, marker, new_run, signal, timer
from tests.crash import restricted_processes
from tests.crash.file_check import check_file
from tests.races.parallel import run_in_parallel
from tests.races.stores import HOUR_MS, opened, prepare

pytestmark = pytest.mark.slow


def limit_pages(store: SqliteStore, more: int | None) -> None:
    """Let the file grow by so many pages and no more; None lifts the limit."""
    connection = store._database.connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {2**30 if more is None else pages + more}")


async def create_without_end(store: SqliteStore, acknowledged: list[str]) -> None:
    """Create runs until something goes wrong, and note those that were acknowledged."""
    while True:
        (answer,) = await store.create([new_run(f"run-{len(acknowledged):03}", value="x" * 2_000)])
        assert isinstance(answer, Created)
        acknowledged.append(answer.run_id)


@pytest.mark.contract("STO-1", "INV")
async def test_a_full_disk_loses_nothing_and_work_goes_on_when_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await prepare(path)
    async with opened(path) as store:
        acknowledged: list[str] = []
        for _ in range(3):
            limit_pages(store, 20)
            with pytest.raises(StoreFull):
                await create_without_end(store, acknowledged)
            assert all(run is not None for run in await store.load(acknowledged))
            assert await store.load([f"run-{len(acknowledged):03}"]) == [None]
            limit_pages(store, None)
            (answer,) = await store.create([new_run(f"run-{len(acknowledged):03}")])
            assert isinstance(answer, Created), "work goes on"
            acknowledged.append(answer.run_id)
    assert await check_file(path) == len(acknowledged)


@pytest.mark.contract("STO-1", "MSG-2")
async def test_a_turn_that_finds_no_room_leaves_no_trace_and_can_be_committed_later(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await prepare(path)
    async with opened(path) as store:
        node = SampleNode(store, "node-a", HOUR_MS)
        before = await node.start("run-1", timer(1))
        turn = await node.turn(before, marker("large", "x" * 100_000))
        limit_pages(store, 2)
        with pytest.raises(StoreFull):
            await node.commit(turn)
        with pytest.raises(StoreFull):
            await store.deliver([signal("run-1", value="y" * 60_000, signal_id="click")])
        assert await node.load("run-1") == before
        limit_pages(store, None)
        answer = await node.commit(turn)
        assert isinstance(answer, Committed), answer
        assert answer.version == before.head.version + 2
        (first,), (second,) = [
            await store.deliver([signal("run-1", value="y" * 60_000, signal_id="click")]) for _ in range(2)
        ]
    assert (type(first), type(second)) == (Accepted, Duplicate)
    assert await check_file(path) == 1


@pytest.mark.contract("STO-1", "INV")
@pytest.mark.parametrize("most_bytes", [300_000, 1_000_000])
async def test_a_limit_on_file_sizes_loses_nothing(tmp_path: Path, most_bytes: int) -> None:
    path = tmp_path / "store.db"
    await prepare(path)

    ((acknowledged, code, is_readable),) = run_in_parallel(
        restricted_processes.create_until_refused, processes=1, path=path, most_bytes=most_bytes
    )

    assert code in ("StoreFull", "StoreUnavailable")
    assert acknowledged
    assert is_readable
    async with opened(path) as store:
        assert all(run is not None for run in await store.load(acknowledged))
        await store.create([new_run("run-after")])
    assert await check_file(path) == len(acknowledged) + 1
