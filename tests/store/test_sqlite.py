"""SQLite passes the conformance suite, on a real file."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.limits import Limits
from holdfast.store.port import Store
from holdfast.store.sqlite import SqliteStore
from holdfast.testing import VirtualClock
from holdfast.testing.samples import SampleNode, read_picture
from holdfast.testing.store_suite import StoreSuite
from holdfast.testing.store_suite.commit import rich_turn
from tests.sqlite_template import put_empty_store
from tests.store.sqlite_tampering import lose_record


class TestSqliteStore(StoreSuite):
    path: Path

    @pytest.fixture(autouse=True)
    def _in_a_folder(self, tmp_path: Path) -> None:
        self.path = put_empty_store(tmp_path / "holdfast.db")

    async def make_store(self, clock: VirtualClock, limits: Limits) -> Store:
        return await SqliteStore.open(self.path, clock=clock, limits=limits)

    async def make_peer(self, store: Store, clock: VirtualClock, limits: Limits) -> Store:
        return await SqliteStore.open(self.path, clock=clock, limits=limits)

    async def lose_acceptance_record(self, store: Store, run_id: str, name: str, signal_id: str) -> None:
        lose_record(self.path, run_id, name, signal_id)

    @pytest.mark.contract("STO-1")
    async def test_everything_is_there_after_closing_and_opening(self, store: Store, clock: VirtualClock) -> None:
        node = SampleNode(store)
        await node.commit(await rich_turn(node))
        before = await read_picture(store, ["node-a"])
        await store.close()
        again = await self.make_store(clock, self.limits)
        try:
            assert await read_picture(again, ["node-a"]) == before
        finally:
            await again.close()
