"""Samples of the installation over time, and takeovers: kept in the store, for whoever looks later."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
from msgspec import Raw

import holdfast as hf
from holdfast.clock import SystemClock
from holdfast.engine.observe.samples import KIND, Sampler, find_samples
from holdfast.engine.observe.takeovers import find_takeovers
from holdfast.errors import InvalidInput, RunFailed
from holdfast.store.port import BulletinQuery
from holdfast.store.proxy import StoreProxy
from holdfast.testing import START, VirtualClock

EVERY_S = 60.0


def make_app() -> Any:
    """Return an app with a workflow that ends as it is told, and one whose activity fails."""
    app = hf.App("sampled")

    @app.workflow
    async def ends(how: str) -> str:
        if how == "fail":
            raise hf.WorkflowFailed("as told")
        if how == "wait":
            await hf.wait_signal("go")
        return how

    @app.activity(retry=hf.Retry(max_attempts=100, initial_ms=3_600_000))
    async def call() -> None:
        raise ConnectionError("nobody answers")

    @app.workflow
    async def tries() -> None:
        await call()

    return app, ends, tries


async def test_a_sample_counts_what_an_operator_asks_for() -> None:
    """Runs by status, what has ended since the last sample, what is tried again, and the load of each node."""
    clock = VirtualClock(START)
    store = hf.MemoryStore(clock=clock)
    app, ends, tries = make_app()
    async with app.node(store, name="web-1", options=hf.NodeOptions(sample_s=None)) as node:
        sampler = Sampler(store, node.name, EVERY_S, 3_600.0)
        for how in ("fail", "fine", "fine"):
            run = await app.start(ends, how)
            with pytest.raises(RunFailed) if how == "fail" else nullcontext():
                await run.result()
        waiting, trying = await app.start(ends, "wait"), await app.start(tries)
        async with asyncio.timeout(30):
            while store_head(store, trying.run_id).snapshot.retrying is None:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        clock.advance(ms=1_000)
        await node._renew()
        assert await sampler.come_round()
        [found] = await find_samples(store, 0, 10)
        sample = found.sample
        assert (sample.completed, sample.failed, sample.retrying, sample.nodes) == (2, 1, 1, 1)
        assert sample.runs == {"COMPLETED": 2, "FAILED": 1, "RUNNING": 2}
        assert list(sample.load) == ["web-1"]
        assert sample.load["web-1"].activities == 0
        assert not await sampler.come_round()  # there is one of this minute
        clock.advance(ms=60_000)
        await node._renew()
        assert await sampler.come_round()
        second = (await find_samples(store, 0, 10))[1]
        assert (second.sample.completed, second.sample.failed, second.every_s) == (0, 0, 60.0)
        await waiting.cancel()


def store_head(store: Any, run_id: str) -> Any:
    """Return a run of the memory store as it is now."""
    return store._runs[run_id].head


async def test_of_many_processes_one_takes_the_sample_and_old_ones_go() -> None:
    """Whatever the number of nodes: one sample a stretch, and no more of them than the window holds."""
    clock = VirtualClock(START)
    store = hf.MemoryStore(clock=clock)
    samplers = [Sampler(store, f"node-{number}", EVERY_S, 600.0) for number in range(5)]
    for _ in range(30):
        assert sum(await asyncio.gather(*(sampler.come_round() for sampler in samplers))) == 1
        clock.advance(ms=60_000)
    found = await find_samples(store, 0, 1_000)
    assert len(found) == 9  # what is ten minutes old has expired
    assert {each.every_s for each in found} == {60.0}
    assert await store.find_locks() == []


async def test_a_process_that_dies_while_it_samples_holds_up_no_other() -> None:
    """Its lock expires."""
    clock = VirtualClock(START)
    store = hf.MemoryStore(clock=clock)
    assert await store.acquire_lock("samples", "dead#1", 60_000) is not None
    sampler = Sampler(store, "alive#1", EVERY_S, 600.0)
    assert not await sampler.come_round()
    clock.advance(ms=60_000)
    assert await sampler.come_round()


async def test_samples_that_another_release_has_stored_otherwise_are_left_out() -> None:
    """They hide no others."""
    store = hf.MemoryStore()
    await store.put_bulletins(KIND, {"1": Raw(b'{"every_s":"often"}'), "2": Raw(b"[]")}, 60_000)
    assert await Sampler(store, "web-1", EVERY_S, 600.0).come_round()
    assert len(await find_samples(store, 0, 10)) == 1
    await store.put_bulletins("takeover", {"1": Raw(b"1")}, 60_000)
    assert await find_takeovers(store, 0, 10) == []


class CountingStore(StoreProxy):
    """Counts what the sampler asks a store for."""

    counted = 0

    async def stats(self) -> Any:
        self.counted += 1
        return await self._store.stats()


async def test_a_node_and_a_process_that_only_serves_sample_by_themselves() -> None:
    """A connection of a command does not."""
    for takes_runs in (True, False):
        store = CountingStore(hf.MemoryStore(clock=SystemClock()))
        app, _, _ = make_app()
        async with app.node(store, options=hf.NodeOptions(takes_runs=takes_runs, sample_s=0.1)):
            async with asyncio.timeout(30):
                while not await store.find_bulletins(BulletinQuery(kind=KIND)):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
    store = CountingStore(hf.MemoryStore())
    async with app.connect(store):
        await asyncio.sleep(0.3)
    assert store.counted == 0


def test_how_often_is_a_number_of_seconds() -> None:
    for options in ({"sample_s": 0}, {"sample_s": -1.0}, {"sample_keep_s": 0.0}, {"sample_keep_s": None}):
        with pytest.raises(InvalidInput):
            hf.NodeOptions(**options)


class Killed(StoreProxy):
    """A store to which a node gives nothing back, as if its process had been killed."""

    async def release(self, node: str, run_ids: Sequence[str] | None = None) -> int:
        return 0


@pytest.mark.contract("OWN-2")
@pytest.mark.parametrize("successor", ["web-2", "web-1"])
async def test_a_takeover_is_a_line_in_the_log_and_kept_for_the_page(
    successor: str, caplog: pytest.LogCaptureFixture
) -> None:
    """From another node, and from a former process of the same name; one for all runs, and none for a graceful stop."""
    store = hf.MemoryStore()
    app = hf.App("sampled")
    hangs = asyncio.Event()

    @app.activity
    async def hang() -> None:
        hangs.set()
        await asyncio.sleep(0 if done else 3_600)

    @app.workflow
    async def hanging() -> str:
        await hang()
        return "done"

    done = False
    options = hf.NodeOptions(lease_ms=300, drain_s=0.0, sample_s=None)
    async with app.node(Killed(store), name="web-1", options=options):
        runs = [await app.start(hanging) for _ in range(3)]
        await hangs.wait()
    done = True
    with caplog.at_level(logging.WARNING, "holdfast.node"):
        async with app.node(store, name=successor, options=options), asyncio.timeout(30):
            for run in runs:
                assert await app.run(run.run_id).result() == "done"
            while not (found := await find_takeovers(store, 0, 10)):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    assert [(each.takeover.node, each.takeover.taken_from, each.takeover.runs) for each in found] == [
        (successor, "web-1", 3)
    ]
    whose = "its former process" if successor == "web-1" else "web-1"
    assert f"node {successor} has taken over 3 runs of {whose}" in caplog.messages
    async with app.node(store, name="web-3", options=options):
        assert await (await app.start(hanging)).result() == "done"
    assert len(await find_takeovers(store, 0, 10)) == 1
