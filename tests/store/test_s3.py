"""The store in a bucket passes the conformance suite: on obstore's memory; with TEST_S3_SERVER=1 on a real server."""

from __future__ import annotations

import os
from typing import Any

import pytest
from obstore.store import MemoryStore as ObjectsInMemory

from holdfast.limits import Limits
from holdfast.store.port import Store
from holdfast.store.s3 import S3Store
from holdfast.store.s3.admission import Admission
from holdfast.store.s3.bucket import Bucket
from holdfast.testing import VirtualClock
from holdfast.testing.samples import SampleNode, new_run
from holdfast.testing.store_suite import StoreSuite
from holdfast.testing.store_suite.admission import admit, enqueue, release, waiting
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
