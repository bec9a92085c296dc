"""The write latency budget: every write is measured against it, and what exceeds it is made known at once."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

import holdfast as hf
from holdfast.client import Client
from holdfast.clock import SystemClock
from holdfast.engine.abilities import Abilities, decode
from holdfast.engine.observe.doctor import examine
from holdfast.engine.observe.metrics import LateWrites, ObservedStore
from holdfast.errors import InvalidInput, StoreUnavailable
from holdfast.service.context import OPEN, make_service
from holdfast.service.http.prometheus import Metrics
from holdfast.store.port import CommitConflict, Committed, Store, Turn
from holdfast.store.proxy import StoreProxy
from tests.engine.harness import EngineVariant

BUDGET_MS = 500


class SlowStore(StoreProxy):
    """A store whose commits wait for a gate, and may fail after it."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = asyncio.Event()
        self.failures = 0
        """So many commits fail, after the gate, without being done."""

    async def commit(self, turns: Sequence[Turn]) -> list[Committed | CommitConflict]:
        self.waiting.set()
        await self.gate.wait()
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable("the store went away")
        return await self._store.commit(turns)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def make_app() -> tuple[hf.App, Any]:
    """Return an app with a workflow that waits for a signal before it ends."""
    app = hf.App("budget")

    @app.workflow
    async def waits() -> int:
        await hf.wait_signal("go")
        return 1

    return app, waits


def write_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines that were logged about the budget."""
    return [record.getMessage() for record in caplog.records if "write_latency_budget_ms" in record.getMessage()]


async def metrics_of(app: hf.App) -> str:
    """Return the metrics of the process of an app."""
    service = make_service(app)
    return (await Metrics(service).text(service.context(OPEN, "test"))).decode()


@pytest.mark.contract("LAT-1")
async def test_a_commit_over_the_budget_is_known_while_it_is_under_way(
    variant: EngineVariant, caplog: pytest.LogCaptureFixture
) -> None:
    app, waits = make_app()
    async with variant.opened() as inner:
        slow = SlowStore(inner)
        observed = ObservedStore(slow, BUDGET_MS)
        async with variant.node(app, observed, lease_ms=300), Client(app) as client:
            assert (await client.system.stats()).writes_over_budget == 0
            with caplog.at_level(logging.WARNING, "holdfast.node"):
                slow.gate.clear()
                run = await app.start(waits)
                await run.signal("go")
                await until(lambda: observed.write_latency.over_budget["commit"] == 1)
                assert len(write_lines(caplog)) == 1
                assert "a commit of 1 is not answered after 500 ms" in write_lines(caplog)[0]
                [alert] = (await client.system.alerts()).items
                assert (alert.code, alert.priority, alert.run_id) == ("WRITE_LATENCY_HIGH", 2, "")
                assert (await client.system.stats()).alerts == {"WRITE_LATENCY_HIGH": 1}
                slow.gate.set()
                assert await run.result() == 1
            stats = await client.system.stats()
            assert stats.writes_over_budget == 1
            assert stats.slowest_write_ms >= BUDGET_MS
            assert 'holdfast_writes_over_budget_total{verb="commit"} 1.0' in await metrics_of(app)
            assert "holdfast_write_latency_budget_seconds 0.5" in await metrics_of(app)
            await until_published(inner)
            [found] = [
                each for each in (await examine(inner, SystemClock())).findings if each.subject == "write latency"
            ]
            assert found.level == "wrong"
            assert "1 writes of node" in found.sentence
            assert "budget of 500 ms" in found.sentence


async def finding(store: Store) -> Any:
    """Return what the doctor finds of writes."""
    [found] = [each for each in (await examine(store, SystemClock())).findings if each.subject == "write latency"]
    return found


async def until_published(store: Store) -> None:
    """Wait until the node has published that its writes were late."""
    async with asyncio.timeout(30):
        while not any(decode(node.plans).late_writes for node in await store.find_nodes()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.contract("LAT-1")
async def test_writes_within_the_budget_are_measured_and_nothing_is_said(
    variant: EngineVariant, caplog: pytest.LogCaptureFixture
) -> None:
    app, waits = make_app()
    async with variant.opened() as inner:
        observed = ObservedStore(inner, 60_000)
        async with variant.node(app, observed):
            run = await app.start(waits)
            await run.signal("go")
            await run.result()
        assert sum(observed.counts.commit_s.counts) > 0
        assert not observed.write_latency.over_budget
        assert observed.write_latency.recent() is None
        assert (await finding(inner)).level == "fine"
    assert write_lines(caplog) == []


class Sleeping(StoreProxy):
    """A store whose creations and deliveries take a while, or fail."""

    def __init__(self, store: Store, fails: bool = False) -> None:
        super().__init__(store)
        self.fails = fails

    async def create(self, *given: Any, **named: Any) -> Any:
        return await self._late(lambda: self._store.create(*given, **named))

    async def deliver(self, items: Any) -> Any:
        return await self._late(lambda: self._store.deliver(items))

    async def commit(self, turns: Sequence[Turn]) -> Any:
        return await self._late(lambda: self._store.commit(turns))

    async def _late(self, verb: Callable[[], Awaitable[Any]]) -> Any:
        await asyncio.sleep(0.03)
        if self.fails:
            raise StoreUnavailable("gone")
        return await verb()


@pytest.mark.contract("LAT-1")
@pytest.mark.parametrize("fails", [False, True])
async def test_every_kind_of_write_counts_also_one_that_fails_and_one_line_in_ten_seconds_is_logged(
    fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    observed = ObservedStore(Sleeping(hf.MemoryStore(), fails), 10)
    with caplog.at_level(logging.WARNING, "holdfast.node"):
        for write in (observed.create([]), observed.deliver([]), observed.commit([]), observed.commit([])):
            if fails:
                with pytest.raises(StoreUnavailable):
                    await write
            else:
                await write
    assert observed.write_latency.over_budget == {"create": 1, "deliver": 1, "commit": 2}
    assert observed.write_latency.slowest_s >= 0.03
    assert sum(observed.counts.commit_s.counts) == 2
    assert len(write_lines(caplog)) == len(observed.write_latency.alerts) == 1
    late = observed.write_latency.recent()
    assert late is not None
    assert (late.count, late.budget_ms) == (4, 10)


def test_what_a_node_publishes_of_late_writes_is_read_by_others_and_left_out_by_older_ones() -> None:
    late = LateWrites(count=3, slowest_ms=8_200, budget_ms=3_000)
    told = Abilities(workflows=frozenset({("order", "1")}), late_writes=late).encode()
    assert decode(told) == Abilities(workflows=frozenset({("order", "1")}), late_writes=late)
    assert decode([("", "late writes\nmany\n1\n2")]) == Abilities()


@pytest.mark.contract("LAT-1", "API-2")
@pytest.mark.parametrize("given", [{"write_latency_budget_ms": bad} for bad in (0, -1, 1.5, True, "3000", None)])
def test_the_budget_is_a_number_of_milliseconds(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        hf.NodeOptions(**given)
    assert hf.NodeOptions().write_latency_budget_ms == 3_000
