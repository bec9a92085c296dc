"""Streams in a bucket: the last chunks in the head, earlier ones in parts, and what is left when a write fails."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import pytest
from obstore.store import MemoryStore as ObjectsInMemory

from holdfast.core.streams import Appended, StreamPage, StreamRead
from holdfast.errors import Conflict, StoreCorrupt
from holdfast.store.port import PurgePolicy, Refused, Store
from holdfast.store.s3 import S3Store
from holdfast.store.s3.streams import HEAD_BYTES
from holdfast.testing import VirtualClock
from holdfast.testing.samples import SampleNode, complete, marker, wait
from holdfast.testing.store_suite.streams import append, chunks, page, values
from tests.store.faulty_objects import FaultyObjects, Killed, kill_at, opened

pytestmark = pytest.mark.contract("STR-1")

TEXT = "x" * 1_000


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.store.s3.bucket.FIRST_PAUSE_S", 0.0001)
    monkeypatch.setattr("holdfast.store.s3.bucket.MOST_PAUSE_S", 0.001)


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> FaultyObjects:
    return FaultyObjects(ObjectsInMemory(), monkeypatch)


async def write_many(store: Store, count: int, first: int = 0, **more: Any) -> None:
    """Append so many chunks of a thousand bytes, one by one."""
    for number in range(first, first + count):
        await append(store, chunks([number, TEXT], position=number, **more))


async def read_all(store: Store, name: str = "tokens") -> list[Any]:
    """Read a stream page by page, and check that no chunk is missing or doubled."""
    found: list[Any] = []
    while True:
        read = await page(store, len(found), name)
        new = [(seq, value) for seq, value in values(read) if seq > len(found)]
        if not new:
            assert read.head.last_seq == len(found)
            return found
        assert [seq for seq, _ in new] == list(range(len(found) + 1, len(found) + 1 + len(new)))
        found += [value for _, value in new]


async def keys(store: S3Store, prefix: str) -> list[str]:
    return [each.key for each in await store.bucket.list(prefix)]


async def test_a_head_stays_small_and_earlier_chunks_are_read_from_parts(objects: FaultyObjects) -> None:
    """From each place, by each process; runs of the same turns and other streams are not disturbed."""
    store = opened(objects)
    await SampleNode(store).start("run-1", wait("go"))
    for number in range(200):
        await append(store, chunks([number, TEXT], position=number))
        await append(store, chunks(number, name="small", position=number))
    head = await store.bucket.get("heads/run-1")
    assert head is not None
    assert len(head.data) < 2 * HEAD_BYTES
    assert len(await keys(store, "events/run-1")) >= 2
    for reader in (store, opened(objects)):
        assert await read_all(reader) == [[number, TEXT] for number in range(200)]
        assert await read_all(reader, "small") == list(range(200))
        for after in (0, 1, 63, 64, 65, 150, 199):
            read = await page(reader, after, most_bytes=1)
            assert values(read)[0] == (after + 1, [after, TEXT])
        assert values(await page(reader, 200)) == []
    assert (await append(opened(objects), chunks("next", position=200))).head.last_seq == 201


async def test_what_is_larger_than_a_part_is_cut(objects: FaultyObjects) -> None:
    store = opened(objects)
    await SampleNode(store).start("run-1", wait("go"))
    given = [chunks("y" * 300_000, position=number) for number in range(8)]
    assert all(isinstance(each, Appended) for each in await store.append_streams(given))
    sizes = [each.size for each in await store.bucket.list("events/run-1")]
    assert len(sizes) == 2
    assert [len(value) for value in await read_all(opened(objects))] == [300_000] * 8


async def test_an_append_is_one_request_and_an_announcement_a_second(objects: FaultyObjects) -> None:
    """A run that writes none costs what it did, and its head is one that earlier versions read."""
    clock = VirtualClock()
    store = opened(objects, clock)
    node = SampleNode(store)
    await node.start("run-1", wait("go"))
    silent = await node.start("silent", wait("go"))
    clock.advance(ms=1_000)
    before = store.bucket.requests.copy()
    for number in range(10):
        clock.advance(ms=100)
        await append(store, chunks(number, position=number))
    assert store.bucket.requests - before == Counter(PUT=11)
    before = store.bucket.requests.copy()
    both = [chunks("a", position=10), chunks("b", step_id="other:1")]
    assert all(isinstance(each, Appended) for each in await store.append_streams(both))
    await store.read_streams([StreamRead(run_id="run-1", name="tokens"), StreamRead(run_id="run-1", name="x")])
    assert store.bucket.requests - before == Counter(PUT=1, GET=1)
    turn = await node.turn(silent, marker("one"))
    before = store.bucket.requests.copy()
    await store.commit([turn])
    assert store.bucket.requests - before == Counter(PUT=2)
    for run_id, known in (("silent", 1), ("run-1", 2)):
        head = await store.bucket.get(f"heads/{run_id}")
        assert head is not None
        assert json.loads(head.data)["format"] == known


@pytest.mark.parametrize("fault", ["before", "after"])
async def test_a_request_that_fails_at_each_place_appends_once(objects: FaultyObjects, fault: str) -> None:
    store = opened(objects)
    await SampleNode(store).start("run-1", wait("go"))
    failed: set[str] = set()

    def plan(request: str) -> str | None:
        if request in failed:
            failed.discard(request)
            return None
        failed.add(request)
        return fault

    objects.plan = plan
    await write_many(store, 100)
    objects.plan = lambda _: None
    assert [number for number, _ in await read_all(opened(objects))] == list(range(100))


async def test_a_process_that_is_killed_between_a_part_and_its_head_leaves_nothing_behind(
    objects: FaultyObjects,
) -> None:
    """What it had not acknowledged is written by the next attempt; a part that no head names goes with the run."""
    clock = VirtualClock()
    store = opened(objects, clock)
    node = SampleNode(store)
    await node.start("run-1", wait("go"))
    kept = HEAD_BYTES // 1_200
    await write_many(store, kept)
    kill_at(objects, "PUT heads/", nth=1)
    with pytest.raises(Killed):
        await append(store, chunks(TEXT * 20, position=kept))
    objects.plan = lambda _: None
    [orphan] = await keys(store, "events/run-1")
    other = opened(objects, clock)
    assert [number for number, _ in await read_all(other)] == list(range(kept))
    resumed = await append(other, chunks(attempt=2, resumes=True))
    assert resumed.position == kept
    await append(other, chunks(TEXT * 20, attempt=2, position=kept))
    assert orphan in await keys(other, "events/run-1")
    assert len(await read_all(other)) == kept + 1
    await SampleNode(other).step("run-1", complete())
    clock.advance(ms=1_000)
    assert (await other.purge(PurgePolicy(finished_run_ms=1))).runs == 1
    assert await keys(other, "events/run-1") == []
    assert await other.read_streams([StreamRead(run_id="run-1", name="tokens")]) == [None]


@pytest.mark.parametrize("seed", range(3))
async def test_writers_in_several_processes_number_their_chunks_without_gaps(objects: FaultyObjects, seed: int) -> None:
    """Each step's in its order, once; while one request in five fails, or its answer is lost."""
    processes = [opened(objects, VirtualClock(), patience_s=60.0) for _ in range(4)]
    await SampleNode(processes[0]).start("run-1", wait("go"))
    rng = random.Random(seed)
    objects.plan = lambda _: rng.choice(["before", "after"]) if rng.random() < 0.2 else None

    async def write(process: Store, step: str) -> None:
        for number in range(40):
            await append(process, chunks([step, number, TEXT], step_id=step, position=number))

    await asyncio.gather(*(write(process, f"step:{place}") for place, process in enumerate(processes)))
    objects.plan = lambda _: None
    found = await read_all(opened(objects))
    for place in range(4):
        assert [number for step, number, _ in found if step == f"step:{place}"] == list(range(40))


async def test_a_node_that_lost_the_run_appends_nothing_whatever_it_knows(objects: FaultyObjects) -> None:
    """Also if it has the run in memory as it was before, and a request of it was under way."""
    clock = VirtualClock()
    store, other = opened(objects, clock), opened(objects, clock)
    node = SampleNode(store)
    await node.start("run-1", wait("go"))
    await append(store, chunks("a"))
    clock.advance(ms=60_000)
    [taken] = await SampleNode(other, "node-b").claim()
    assert taken.head.lease_epoch == 2
    before = await store.bucket.get("heads/run-1")
    [answer] = await store.append_streams([chunks("late", position=1)])
    assert isinstance(answer, Refused)
    assert isinstance(answer.error, Conflict)
    assert await store.bucket.get("heads/run-1") == before
    await append(other, chunks("A", attempt=2, node="node-b", epoch=2))
    assert [each.restarted_from for each in (await page(store)).segments] == [None, 1]


async def test_a_part_that_is_missing_or_damaged_is_a_typed_error(objects: FaultyObjects) -> None:
    store = opened(objects)
    await SampleNode(store).start("run-1", wait("go"))
    await write_many(store, 80)
    [part] = await keys(store, "events/run-1")
    for harm in (store.bucket.put(part, b"{"), store.bucket.delete([part])):
        await harm
        with pytest.raises(StoreCorrupt, match="events/run-1"):
            await read_all(opened(objects))


async def test_a_reader_beside_a_purge_is_told_that_there_is_no_run(objects: FaultyObjects) -> None:
    """Never that the store is damaged: a run is deleted in several requests, and its head last."""
    clock = VirtualClock()
    store = opened(objects, clock)
    node = SampleNode(store)
    run = await node.start("run-1", wait("go"))
    await write_many(store, 80)
    for number in range(150):  # more events than a head holds
        await store.commit([await node.turn(run, marker(f"m{number}"))])
        run = await node.load("run-1")
    await node.step("run-1", complete())
    clock.advance(ms=1_000)
    seen: list[list[StreamPage | None]] = []
    delete = store.bucket.delete

    async def delete_and_read(keys: Any) -> None:
        await delete(keys)
        reader = opened(objects, clock)
        seen.append(await reader.read_streams([StreamRead(run_id="run-1", name="tokens")]))
        events = await reader.read_events("run-1")
        assert [event.run_seq for event in events] == list(range(1, len(events) + 1))

    store.bucket.delete = delete_and_read  # type: ignore[method-assign]
    assert (await store.purge(PurgePolicy(finished_run_ms=1))).runs == 1
    assert len(seen) >= 3
    assert seen[-1] == [None]
