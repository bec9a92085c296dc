"""Large batches on a store that works aside: while it commits one half of the turns, the node takes the other."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest

import holdfast as hf
from holdfast.engine.turns.turn_loop import OVERLAPPED
from holdfast.errors import StoreUnavailable
from holdfast.store.memory import MemoryStore
from holdfast.store.port import Capabilities, CommitConflict, Committed, Turn
from holdfast.store.proxy import StoreProxy

RUNS = 2 * OVERLAPPED
ASIDE = Capabilities(
    conditional_batch=True,
    atomic_batch=True,
    read_after_write=True,
    scan_consistency="snapshot",
    commits_aside=True,
)


class StoreAside(StoreProxy):
    """A store whose commits take a while, during which the node goes on. The first ones may fail, done or not."""

    def __init__(self, failures: Sequence[str] = ()) -> None:
        super().__init__(MemoryStore(capabilities=ASIDE))
        self.failures = list(failures)
        self.under_way = 0
        self.most_under_way = 0
        self.sizes: list[int] = []

    async def commit(self, turns: Sequence[Turn]) -> list[Committed | CommitConflict]:
        """Commit after some rounds of the loop."""
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        self.sizes.append(len(turns))
        try:
            for _ in range(50):
                await asyncio.sleep(0)
            failure = self.failures.pop(0) if self.failures and len(turns) >= OVERLAPPED // 2 else ""
            if failure == "before":
                raise StoreUnavailable("the server is away")
            answers = await self._store.commit(turns)
            if failure == "after":
                raise StoreUnavailable("the answer was lost")
            return answers
        finally:
            self.under_way -= 1


@pytest.mark.contract("STO-1", "OWN-1")
@pytest.mark.parametrize("failures", [(), ("before", "after"), ("after", "before", "after")])
async def test_turns_that_are_committed_in_halves_happen_once(
    failures: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.engine.turns.turn_loop.RETRY_S", 0.0)
    app = hf.App("halves")
    calls: Counter[tuple[str, int]] = Counter()

    @app.activity
    async def charge(who: str, number: int) -> int:
        calls[who, number] += 1
        return number

    @app.workflow
    async def order(who: str) -> list[int]:
        first = await charge(who, 0)
        return [first, *await asyncio.gather(charge(who, 1), charge(who, 2))]

    store = StoreAside(failures)
    async with app.node(store, options=hf.NodeOptions(activities_at_once=RUNS, cached_runs=RUNS)):
        runs = await asyncio.gather(*(app.start(order, f"order-{number}") for number in range(RUNS)))
        results = await asyncio.gather(*(run.result() for run in runs))
    assert results == [[0, 1, 2]] * RUNS
    assert set(calls.values()) == {1}
    assert len(calls) == 3 * RUNS
    assert store.most_under_way == 2
    assert not store.failures


@pytest.mark.contract("OWN-3")
async def test_a_node_that_is_stopped_between_two_halves_loses_nothing() -> None:
    app = hf.App("halves")

    @app.activity
    async def charge(number: int) -> int:
        return number

    @app.workflow
    async def order(number: int) -> int:
        return await charge(number) + await charge(number)

    store = StoreAside()
    async with app.node(store, name="node-a", options=hf.NodeOptions(activities_at_once=RUNS)):
        runs = await asyncio.gather(*(app.start(order, number) for number in range(RUNS)))
        run_ids = [run.run_id for run in runs]
        while store.under_way < 2:  # noqa: ASYNC110 - no round of the loop may be missed
            await asyncio.sleep(0)
    async with app.node(store, name="node-b"):
        results = await asyncio.gather(*(app.run(run_id).result() for run_id in run_ids))
    assert results == [2 * number for number in range(RUNS)]
