"""The store in a bucket passes the conformance suite: on obstore's memory; with TEST_S3_SERVER=1 on a real server."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from msgspec.structs import replace
from obstore.store import MemoryStore as ObjectsInMemory

from holdfast.core.schedules import request_id_of
from holdfast.limits import Limits
from holdfast.store.port import FinishedRunQuery, PurgePolicy, ScheduleQuery, Store
from holdfast.store.s3 import S3Store
from holdfast.store.s3.admission import Admission
from holdfast.store.s3.bucket import Bucket
from holdfast.testing import VirtualClock
from holdfast.testing.samples import SampleNode, complete, new_run
from holdfast.testing.store_suite import StoreSuite
from holdfast.testing.store_suite.admission import admit, enqueue, release, waiting
from holdfast.testing.store_suite.schedules import schedule
from tests.store.s3_tampering import lose_record

HAS_SERVER = bool(os.environ.get("TEST_S3_SERVER"))
pytestmark = [pytest.mark.process] if HAS_SERVER else []


def objects_for(request: pytest.FixtureRequest) -> Any:
    """Return where the objects of a test are."""
    if not HAS_SERVER:
        return ObjectsInMemory()
    server = request.getfixturevalue("seaweed")
    return server.store(server.make_bucket(), prefix="my/prefix", retry_config={"max_retries": 0})


class TestS3Store(StoreSuite):
    objects: Any

    @pytest.fixture(autouse=True)
    def _objects(self, request: pytest.FixtureRequest) -> None:
        self.objects = objects_for(request)

    async def make_store(self, clock: VirtualClock, limits: Limits) -> Store:
        return S3Store(Bucket(self.objects), clock, limits)

    async def make_peer(self, store: Store, clock: VirtualClock, limits: Limits) -> Store:
        return S3Store(Bucket(self.objects), clock, limits)

    async def lose_acceptance_record(self, store: Store, run_id: str, name: str, signal_id: str) -> None:
        assert isinstance(store, S3Store)
        await lose_record(store, run_id, name, signal_id)


@pytest.mark.contract("QUE-2", "OWN-3")
async def test_run_that_was_released_by_a_process_that_died_gets_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its head says that it is queued; the next `admit` of any process puts it into the queue."""
    objects, clock = ObjectsInMemory(), VirtualClock()
    store, peer = S3Store(Bucket(objects), clock), S3Store(Bucket(objects), clock)
    for each in (store, peer):
        await each.migrate()
    node = SampleNode(store, "node-a", 3_600_000)
    await node.renew()
    await store.create([new_run("held", now=clock.now())])
    with monkeypatch.context() as patch:
        patch.setattr(Admission, "enter_again", _dies)
        await release(node, "held")
    assert await waiting(peer, "held") == ["held"]
    await admit(peer)
    [claimed] = await SampleNode(peer, "node-b").claim()
    assert claimed.head.run_id == "held"
    await enqueue(store, "next")
    assert await waiting(store, "next") == ["next"]
    for each in (store, peer):
        await each.close()


async def _dies(*_: object) -> None:
    """Do nothing, as a process that is killed before it."""


@pytest.mark.contract("TMR-2", "FMT-2")
async def test_a_process_that_was_frozen_before_it_started_a_tick_does_not_start_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another one has started it meanwhile, the run has ended, and it was deleted on demand."""
    objects, clock = ObjectsInMemory(), VirtualClock()
    store, peer = S3Store(Bucket(objects), clock), S3Store(Bucket(objects), clock)
    for each in (store, peer):
        await each.migrate()
    stored, _ = await store.commit_schedule(schedule(), 0)
    written, thaw = asyncio.Event(), asyncio.Event()
    change = store._schedules._document.change

    async def freeze(decide: Any) -> Any:
        answer = await change(decide)
        written.set()
        await thaw.wait()
        return answer

    monkeypatch.setattr(store._schedules._document, "change", freeze)
    tick = new_run("tick-1", now=clock.now(), request_id=request_id_of("nightly", 7))
    frozen = asyncio.create_task(store.commit_schedule(replace(stored, watermark=7), 1, [tick]))
    await written.wait()
    node = SampleNode(peer, "node-b")
    assert await peer.find(ScheduleQuery())  # which starts what was left
    await node.renew()
    [claimed] = await node.claim()
    await node.commit(await node.turn(claimed, complete()))
    clock.advance(ms=1)
    assert (await peer.purge(PurgePolicy(finished_run_ms=0))).runs == 0  # retention keeps it for a week
    assert await peer.find(FinishedRunQuery(until=clock.now(), held_after=1)) == []
    assert (await peer.purge(PurgePolicy(finished_run_ms=0, sink_hold_ms=0))).runs == 1
    thaw.set()
    _, [answer] = await frozen
    assert answer.run_id == "tick-1"  # type: ignore[union-attr]
    assert await peer.load(["tick-1"]) == [None]
    for each in (store, peer):
        await each.close()


@pytest.mark.contract("FMT-2", "TMR-2")
async def test_the_run_of_a_tick_is_kept_for_a_week() -> None:
    """Others go by their window."""
    clock = VirtualClock()
    store = S3Store(Bucket(ObjectsInMemory()), clock)
    await store.migrate()
    node = SampleNode(store)
    await node.renew()
    for run_id, request_id in (("tick", request_id_of("nightly", 7)), ("other", "r-1")):
        await store.create([new_run(run_id, now=clock.now(), request_id=request_id)])
    for claimed in await node.claim():
        await node.commit(await node.turn(claimed, complete()))
    policy = PurgePolicy(finished_run_ms=0)
    clock.advance(ms=1)
    assert (await store.purge(policy)).runs == 1
    clock.advance(ms=policy.sink_hold_ms)
    assert (await store.purge(policy)).runs == 1
    await store.close()
