"""Where the bus meets the rest: tenants, rotation, retention, archives, copies, and sinks that come and go (BUS-1)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import holdfast as hf
from holdfast.clock import SystemIds
from holdfast.core.bus import OutboxReplay, Sink
from holdfast.engine.observe.metrics import observed
from holdfast.engine.retention import Retention, RetentionDuty
from holdfast.errors import Conflict, NotFound
from holdfast.store.archive import Archive
from holdfast.store.copy import copy_store
from holdfast.store.port import ArchivedRunQuery, RunQuery, Store
from holdfast.store.queries import OutboxQuery
from holdfast.store.sqlite import SqliteStore
from holdfast.testing import VirtualClock
from holdfast.testing.samples import SampleNode, complete
from tests.bus.test_relay import OPTIONS, make_app, running, status_of, until_sent
from tests.bus.webhook_server import until

pytestmark = pytest.mark.contract("BUS-1")

ALL = Sink(name="all", kind="projection")


class Seen(dict[str, list[int]]):
    """The numbers of each run's events, as a projection got them."""

    def __call__(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            self.setdefault(event["subject"], []).append(int(event["sequence"]))


@pytest.fixture
async def file(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    """Return a store in a file, with a clock of its own."""
    opened = await SqliteStore.open(tmp_path / "store.db", clock=VirtualClock())
    await opened.migrate()
    yield opened
    await opened.close()


def clock_of(store: SqliteStore) -> VirtualClock:
    clock = store._clock
    assert isinstance(clock, VirtualClock)
    return clock


def retention_of(store: Store, folder: Path) -> RetentionDuty:
    """Return a retention that archives runs a day after their end."""

    async def cancel(run_id: str, reason: str) -> None:
        raise AssertionError(run_id)

    seen = observed(store)
    archive = Archive(folder / "archive", seen)
    return RetentionDuty("node-a", seen, Retention(finished=timedelta(days=1)), SystemIds(), archive, cancel)


async def numbers_of(run: hf.RunHandle[Any]) -> list[int]:
    return [event.run_seq for event in await run.events()]


@pytest.mark.contract("API-4")
async def test_a_sink_of_a_tenant_gets_nothing_of_others_also_by_replays(store: Store) -> None:
    """From an instant on, of a run, and of alerts."""
    app, order = make_app()
    seen = {name: Seen() for name in ("acme", "all")}
    app.projection("acme", tenant="acme")(seen["acme"])
    app.projection("all")(seen["all"])
    async with running(app, store):
        mine, theirs = [await app.start(order, 1, tenant=tenant) for tenant in ("acme", "other")]
        for run in (mine, theirs):
            await run.result()
        for asked in (OutboxReplay("acme"), OutboxReplay("acme", run_id=theirs.run_id)):
            await store.replay_outbox(asked)
        for name in seen:
            await until_sent(store, name)
        assert set(seen["acme"]) == {mine.run_id}
        assert set(seen["all"]) == {mine.run_id, theirs.run_id}


@pytest.mark.contract("CAN-1")
async def test_the_events_of_a_run_that_rotates_arrive_in_order() -> None:
    """The numbers go on across a rotation, and what begins and ends each stretch is among them."""
    app = hf.App("shop")
    seen, types = Seen(), list[str]()

    @app.workflow
    async def turning(left: int) -> int:
        await hf.sleep(0.001)
        if left:
            hf.continue_as_new(left - 1)
        return left

    def note(events: list[dict[str, Any]]) -> None:
        seen(events)
        types.extend(event["type"] for event in events)

    app.projection("all")(note)
    async with running(app, hf.MemoryStore()) as _:
        run = await app.start(turning, 5)
        await run.result()
        await until_sent(app.runtime().store, "all")
        assert seen == {run.run_id: await numbers_of(run)}
    assert types.count("holdfast.ContinuedAsNew") == 5


@pytest.mark.contract("FMT-2")
async def test_retention_waits_a_week_for_a_paused_sink_and_no_longer(file: SqliteStore, tmp_path: Path) -> None:
    """What goes then is archived all the same; the sink gets the rest when it is resumed, and no failure is counted."""
    clock, node = clock_of(file), SampleNode(file)
    await file.put_sink(replace(ALL, is_paused=True))
    await node.start("old", complete())
    keeping = retention_of(file, tmp_path)
    clock.advance(ms=2 * 86_400_000)
    assert (await keeping.sweep()).runs == 0
    clock.advance(ms=6 * 86_400_000)
    await node.renew()
    await node.start("young", complete())
    assert (await keeping.sweep()).runs == 1
    assert [run.run_id for run in await file.find(ArchivedRunQuery())] == ["old"]
    assert [entry.run_id for entry in await file.find(OutboxQuery(sink="all"))] == ["young", "young"]


async def test_a_sink_that_is_removed_and_made_again_gets_what_is_committed_from_then_on(store: Store) -> None:
    """While nodes run; and of a run that is under way, the events from then on."""
    app, seen = hf.App("shop"), Seen()

    @app.workflow
    async def waiting() -> int:
        return await hf.wait_signal("go", int) + await hf.wait_signal("go", int)

    app.projection("all")(seen)
    async with running(app, store):
        run = await app.start(waiting)
        await until_sent(store, "all")
        await until(lambda: len(seen.get(run.run_id, ())) >= 3)
        before = list(seen.pop(run.run_id))
        await store.remove_sink("all")
        await run.signal("go", 1)
        async with asyncio.timeout(60):
            while len(await run.events()) == len(before):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        missed = (await numbers_of(run))[len(before) :]
        await store.put_sink(ALL)
        await run.signal("go", 2)
        assert await run.result() == 3
        await until(lambda: bool(seen))
        await until_sent(store, "all")
        history = await numbers_of(run)
    assert before + missed + seen[run.run_id] == history


async def test_a_sink_that_is_removed_while_events_are_sent_ends_its_relay(store: Store) -> None:
    """Nothing of it is left, and other sinks go on."""
    app, order = make_app()
    seen, began, may_end = Seen(), asyncio.Event(), asyncio.Event()

    @app.projection("slow")
    async def slow(events: list[dict[str, Any]]) -> None:
        began.set()
        await may_end.wait()

    app.projection("all")(seen)
    async with running(app, store):
        run = await app.start(order, 1)
        await began.wait()
        await store.remove_sink("slow")
        may_end.set()
        await run.result()
        await until_sent(store, "all")
        assert seen == {run.run_id: await numbers_of(run)}
        async with asyncio.timeout(60):
            while "bus/slow" in [lock.name for lock in await store.find_locks()]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await store.find(OutboxQuery(sink="slow")) == []


async def test_a_replay_from_an_event_of_a_run_that_is_gone_is_refused(file: SqliteStore, tmp_path: Path) -> None:
    """Archived or deleted: the store does not have it. One from an instant on leaves it out."""
    node = SampleNode(file)
    await file.put_sink(ALL)
    await node.start("old", complete())
    await node.start("young", complete())
    await file.remove_sink("all")  # so that nothing holds the runs
    clock_of(file).advance(ms=2 * 86_400_000)
    assert (await retention_of(file, tmp_path).sweep()).archived == 2
    await file.put_sink(ALL)
    with pytest.raises(NotFound, match="old"):
        await file.replay_outbox(OutboxReplay("all", run_id="old"))
    await node.renew()
    await node.start("new", complete())
    done = await file.replay_outbox(OutboxReplay("all"))
    assert done.runs == 1
    assert {entry.run_id for entry in await file.find(OutboxQuery(sink="all"))} == {"new"}


@pytest.mark.contract("STO-1")
async def test_a_store_is_copied_once_its_sinks_have_got_everything(file: SqliteStore, tmp_path: Path) -> None:
    """The copy has the sinks, sends nothing again, and sends what comes."""
    node = SampleNode(file)
    await file.put_sink(ALL)
    await node.start("run-1", complete())
    await file.release(node.name)
    copy = await SqliteStore.open(tmp_path / "copy.db", clock=clock_of(file))
    await copy.migrate()
    with pytest.raises(Conflict, match="have yet to get events: all"):
        await copy_store(file, copy)
    assert await copy.find(RunQuery()) == []
    app, seen = make_app()[0], Seen()
    app.projection("all")(seen)
    real = await SqliteStore.open(tmp_path / "store.db")
    async with running(app, real, replace(OPTIONS, takes_runs=False, relays=True)):
        await until_sent(real, "all")
    await real.close()
    clock_of(file).advance(ms=10**7)
    for _ in range(2):  # also when it is repeated
        assert (await copy_store(file, copy)).sinks == 1
        assert (await status_of(copy, "all")).backlog == 0
    await SampleNode(copy, "node-b").start("run-2", complete())
    assert {entry.run_id for entry in await copy.find(OutboxQuery(sink="all"))} == {"run-2"}
    await copy.close()
