"""The reference model passes the conformance suite."""

from __future__ import annotations

from holdfast.limits import Limits
from holdfast.store.memory import MemoryStore
from holdfast.store.port import Store
from holdfast.testing import VirtualClock
from holdfast.testing.store_suite import StoreSuite


class TestMemoryStore(StoreSuite):
    async def make_store(self, clock: VirtualClock, limits: Limits) -> Store:
        return MemoryStore(clock, limits)

    async def lose_acceptance_record(self, store: Store, run_id: str, name: str, signal_id: str) -> None:
        assert isinstance(store, MemoryStore)
        del store._runs[run_id].acceptances[name, signal_id]
