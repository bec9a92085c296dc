"""The store in a bucket passes the conformance suite, on obstore's memory and on a real server."""

from __future__ import annotations

from typing import Any

import pytest
from obstore.store import MemoryStore as ObjectsInMemory

from holdfast.limits import Limits
from holdfast.store.port import Store
from holdfast.store.s3 import S3Store
from holdfast.store.s3.bucket import Bucket
from holdfast.testing import VirtualClock
from holdfast.testing.store_suite import StoreSuite
from tests.store.s3_tampering import lose_record


class TestS3Store(StoreSuite):
    objects: Any

    @pytest.fixture(autouse=True)
    def _in_memory(self) -> None:
        self.objects = ObjectsInMemory()

    async def make_store(self, clock: VirtualClock, limits: Limits) -> Store:
        return S3Store(Bucket(self.objects), clock, limits)

    async def make_peer(self, store: Store, clock: VirtualClock, limits: Limits) -> Store:
        return S3Store(Bucket(self.objects), clock, limits)

    async def lose_acceptance_record(self, store: Store, run_id: str, name: str, signal_id: str) -> None:
        assert isinstance(store, S3Store)
        await lose_record(store, run_id, name, signal_id)
