"""Features of the engine on a bucket that no other test plays there, each in one combination, with replay."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import Raw
from obstore.store import MemoryStore as ObjectsInMemory

import holdfast as hf
from holdfast.core import codec
from holdfast.core.state import RunStatus
from holdfast.engine.observe.samples import Sampler, find_samples
from holdfast.engine.observe.takeovers import find_takeovers
from holdfast.errors import NotFound, RunCancelled, RunTimedOut
from holdfast.store.s3 import S3Store
from holdfast.store.s3.bucket import Bucket, Listed, Stored, Unchanged
from holdfast.testing import VirtualClock
from tests.engine.harness import wait_for_event

MOST_S = 60
REPLAYED = hf.NodeOptions(cached_runs=0, sample_s=None)


def opened(clock: VirtualClock | None = None, objects: Any = None) -> S3Store:
    """Return a store in a bucket."""
    return S3Store(Bucket(objects or ObjectsInMemory()), clock)


async def page(number: int) -> str:
    """Return a page."""
    return f"page {number}"


@pytest.mark.contract("WF-4")
async def test_what_is_under_way_is_waited_for_when_a_run_is_cancelled() -> None:
    app = hf.App("shop")
    go, begun = asyncio.Event(), asyncio.Event()
    undone: list[str] = []

    @app.activity(cancel="wait")
    async def book(what: str) -> str:
        begun.set()
        await go.wait()
        return what

    @app.activity
    async def give_back(what: str) -> None:
        undone.append(what)

    @app.workflow
    async def trip() -> None:
        async with hf.Saga() as saga:
            saga.undo(give_back, await book("hotel"))
            await hf.sleep(3_600)

    async with asyncio.timeout(MOST_S), app.node(opened(), options=REPLAYED):
        run = await app.start(trip)
        await begun.wait()
        await run.cancel("it rains", wait=True)
        go.set()
        with pytest.raises(RunCancelled, match="it rains"):
            await run.result()
        types = [event.event_type for event in await run.events()]
    assert undone == ["hotel"]
    assert types.count("StepCompleted") == 2
    assert "StepCancelled" not in types


@pytest.mark.contract("WF-1")
async def test_functions_of_a_module_are_steps_and_an_entity_lives_on_its_signals() -> None:
    """Of an entity more signals are taken in a minute than a run takes otherwise, over rotations."""
    app = hf.App("shop", limits=hf.Limits(signals_per_run_per_minute=2))

    @app.workflow
    async def collect() -> list[str]:
        return [await hf.step(page, number) for number in range(2)]

    @app.workflow(entity=True)
    async def cart(items: list[str]) -> list[str]:
        items.append(await hf.wait_signal("add", str))
        if items[-1] != "pay":
            hf.continue_as_new(items)
        return items

    async with asyncio.timeout(MOST_S), app.node(opened(), options=REPLAYED):
        pages = await app.start(collect)
        run = await app.start(cart, [])
        for item in ("tea", "cup", "milk", "pay"):
            await run.signal("add", item)
        assert await pages.result() == ["page 0", "page 1"]
        assert await run.result() == ["tea", "cup", "milk", "pay"]


@pytest.mark.contract("WF-8")
async def test_a_run_times_out_and_cleans_up_by_the_time_of_the_store() -> None:
    clock = VirtualClock()
    store, app, undone = opened(clock), hf.App("shop"), list[str]()

    @app.activity
    async def undo(what: str) -> None:
        undone.append(what)

    @app.workflow
    async def order() -> str:
        async with hf.Saga() as saga:
            saga.undo(undo, "booking")
            return await hf.wait_signal("paid", str)

    async with asyncio.timeout(MOST_S), app.node(store, options=REPLAYED):
        run = await app.start(order, execution_timeout=60)
        await wait_for_event(run, "SignalWaiting")
        clock.advance(ms=60_000)
        store.wakeups.notify()
        with pytest.raises(RunTimedOut):
            await run.result()
        assert await run.status() == RunStatus.FAILED
    assert undone == ["booking"]


@pytest.mark.contract("QUE-6")
async def test_starts_are_debounced() -> None:
    """From two processes: one run, which begins with the last input."""
    clock, objects = VirtualClock(), ObjectsInMemory()
    app, key = hf.App("shop"), hf.Debounce("doc", 30, 300)

    @app.workflow
    async def index(text: str) -> str:
        return text

    async with asyncio.timeout(MOST_S), app.node(opened(clock, objects), options=REPLAYED):
        runs = [await app.start(index, f"draft {number}", debounce=key) for number in range(3)]
        assert {run.run_id for run in runs} == {runs[0].run_id}
        await wait_for_event(runs[0], "InputReplaced", 2)
        clock.advance(ms=30_001)
        app.runtime().store.wakeups.notify()
        assert await runs[0].result() == "draft 2"
        after = await app.start(index, "draft 3", debounce=key)
        assert after.run_id == f"{runs[0].run_id}~000002"


async def test_samples_and_takeovers_are_kept() -> None:
    """One process of several takes the sample; a run of a node that is gone is a takeover that all can read."""
    clock, objects, app = VirtualClock(), ObjectsInMemory(), hf.App("shop")

    @app.workflow
    async def waits() -> None:
        await hf.wait_signal("go")

    stores = [opened(clock, objects) for _ in range(3)]
    samplers = [Sampler(store, f"node-{number}", 60.0, 600.0) for number, store in enumerate(stores)]
    await stores[1].renew("gone", 5_000)
    async with asyncio.timeout(MOST_S), app.connect(stores[0]):
        run = await app.start(waits)
    [claimed] = await stores[1].claim("gone", 1)
    assert (claimed.head.run_id, claimed.head.lease_owner) == (run.run_id, "gone")
    clock.advance(ms=5_000)
    async with asyncio.timeout(MOST_S), app.node(stores[2], name="next", options=REPLAYED):
        await wait_for_event(app.run(run.run_id), "SignalWaiting")
        assert sum(await asyncio.gather(*(sampler.come_round() for sampler in samplers))) == 1
        [found] = await find_samples(stores[0], 0, 10)
        assert found.sample.runs == {"RUNNING": 1}
        while not (taken := await find_takeovers(stores[0], 0, 10)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await app.run(run.run_id).cancel()
    assert [(each.takeover.node, each.takeover.runs) for each in taken] == [("next", 1)]


@pytest.mark.contract("WF-6", "STO-2")
async def test_a_query_is_answered_by_a_node_of_another_process_that_has_the_code() -> None:
    """They meet in the bucket alone: the question is announced, and its asker looks for the answer."""
    objects = ObjectsInMemory()
    app, front = hf.App("shop"), hf.App("front")

    @app.workflow
    async def order(customer: str) -> str:
        hf.on_query("who", lambda: customer)
        return await hf.wait_signal("go", str)

    async with asyncio.timeout(MOST_S), app.node(opened(objects=objects), options=REPLAYED):
        run = await app.start(order, "Ada")
        await wait_for_event(run, "SignalWaiting")
        async with front.connect(opened(objects=objects)):
            ask, nothing = front.runtime(), codec.encode({})
            answer, handlers, refused = await asyncio.gather(
                ask.query(run.run_id, "who", nothing),
                ask.handlers(run.run_id),
                ask.query(run.run_id, "colour", nothing),
                return_exceptions=True,
            )
            assert answer == codec.encode("Ada")
            assert isinstance(handlers, Raw)
            assert list(codec.decode(handlers, dict)["queries"]) == ["who"]
            assert isinstance(refused, NotFound)
        await run.signal("go", "gone")
        assert await run.result() == "gone"


class NotedBucket(Bucket):
    """A bucket that notes what is asked for, and when there is enough of that."""

    def __init__(self, enough: int) -> None:
        super().__init__(ObjectsInMemory())
        self.enough = enough
        self.asked: list[str] = []
        self.has_enough = asyncio.Event()

    def _note(self, kind: str, key: str) -> None:
        self.asked.append(f"{kind} {key.partition('/')[0]}")
        if len(self.asked) >= self.enough:
            self.has_enough.set()

    async def list(self, prefix: str, after: str = "", until: str | None = None) -> list[Listed]:
        self._note("LIST", prefix)
        return await super().list(prefix, after, until)

    async def get_newer(self, key: str, etag: str | None) -> Stored | Unchanged | None:
        self._note("GET", key)
        return await super().get_newer(key, etag)

    async def put(self, key: str, data: bytes) -> str:
        self._note("PUT", key)
        return await super().put(key, data)

    async def _write(self, key: str, data: bytes, mark: bytes, mode: Any) -> Stored | None:
        self._note("PUT", key)
        return await super()._write(key, data, mark, mode)


@pytest.mark.contract("MSG-4")
async def test_an_idle_node_asks_for_changes_for_signals_and_for_its_schedules_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Questions, sinks, queues and runs that wait cost nothing while nothing changes."""
    monkeypatch.setattr("holdfast.store.s3.polling.FIRST_LOOK_S", 0.02)
    app, bucket = hf.App("shop"), NotedBucket(enough=1_000_000)

    @app.workflow
    async def order() -> None:
        await hf.wait_signal("go")

    options = hf.NodeOptions(safety_poll_s=0.02, sample_s=None)
    async with asyncio.timeout(MOST_S), app.node(S3Store(bucket), options=options):
        run = await app.start(order)
        await wait_for_event(run, "SignalWaiting")
        before = len(bucket.asked)
        bucket.enough = before + 200
        await bucket.has_enough.wait()
        asked = set(bucket.asked[before + 50 :])  # by then the last change is known to all
    always = {"LIST changes", "LIST workflow", "GET schedules.json"}
    now_and_then = {"PUT nodes", "GET nodes", "PUT time", "GET time"}
    assert always <= asked <= always | now_and_then
