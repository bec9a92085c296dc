"""`App.serve`: a node for a process that is nothing but a node. What it does to others is seen in `tests/cli`."""

import asyncio
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.codec import encode
from holdfast.core.events import RunQueued
from holdfast.engine.turns.draft import prepare_run
from holdfast.errors import InvalidInput
from tests.engine.harness import MOST_SECONDS

ENDING = (signal.SIGTERM, signal.SIGINT)


def handlers() -> list[Any]:
    """Return what is done at the signals that end a process."""
    return [signal.getsignal(ending) for ending in ENDING]


class Stage(hf.MemoryStore):
    """A store that does something when a node has begun."""

    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__()
        self._then = then
        self.nodes: list[str] = []

    async def claim(self, node: str, limit: int, plan_ids: Any = None) -> Any:
        """Claim, and do it once for each node: a second signal would end the process."""
        if node not in self.nodes:
            self.nodes.append(node)
            self._then()
        return await super().claim(node, limit, plan_ids)


@pytest.mark.contract("MSG-4")
@pytest.mark.parametrize("ending", ENDING)
async def test_a_node_ends_at_a_signal_and_the_signals_do_what_they_did_before(
    ending: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    before = handlers()
    caplog.set_level(logging.INFO, "holdfast.node")
    during: list[list[Any]] = []

    def end() -> None:
        during.append(handlers())
        signal.raise_signal(ending)

    store = Stage(end)
    for _ in range(2):
        async with asyncio.timeout(MOST_SECONDS):
            await hf.App("shop").serve(store, name="web")
        assert handlers() == before
    assert all(set(changed).isdisjoint(before) for changed in during)
    assert f"stops because of {ending.name}" in caplog.text
    first, second = store.nodes
    assert first.startswith("web#")
    assert second.startswith("web#")
    assert first != second, "a name is for one life of one process"
    assert (await store.stats()).nodes == 0


STUCK = """
import asyncio, signal, sys, threading
import holdfast as hf

app = hf.App("shop")

def never():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
    threading.Event().wait()

async def stubborn():
    signal.raise_signal(signal.SIGTERM)
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

async def to_thread():
    await asyncio.to_thread(never)

functions = {"never": never, "stubborn": stubborn, "to_thread": to_thread}
pack = app.activity(name="pack", queue=sys.argv[2])(functions[sys.argv[1]])

@app.workflow
async def order() -> None:
    await pack()

async def main():
    store = hf.MemoryStore()
    async with app.connect(store):
        await app.start(order)
    await app.serve(store, options=hf.NodeOptions(drain_s=0.01, queues=("far",)))

asyncio.run(main())
"""
"""A process that is asked to stop by an activity that does not end, not even when it is cancelled."""


@pytest.mark.process
@pytest.mark.contract("MSG-4")
@pytest.mark.parametrize("queue", ["", "far"])
@pytest.mark.parametrize("activity", ["never", "stubborn", "to_thread"])
def test_a_process_that_serves_ends_although_an_activity_does_not_return(activity: str, queue: str) -> None:
    asked = [sys.executable, "-c", STUCK, activity, queue]
    ended = subprocess.run(asked, timeout=60, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    assert "activities cancelled because they took too long: 1" in ended.stderr


@pytest.mark.contract("MSG-4")
async def test_what_is_waited_for_before_the_node_stops_counts_as_time_to_drain() -> None:
    app, began = hf.App("shop"), asyncio.Event()

    @app.activity
    async def pack() -> None:
        began.set()
        await asyncio.Event().wait()

    @app.workflow
    async def order() -> None:
        await pack()

    loop = asyncio.get_running_loop()
    async with asyncio.timeout(MOST_SECONDS):
        async with app.node("memory://", options=hf.NodeOptions(drain_s=5.0)) as node:
            await app.start(order)
            await began.wait()
            asked: asyncio.Future[str] = loop.create_future()
            asked.set_result("SIGTERM")
            await node.run_until(asked)
            await asyncio.sleep(4.2)  # such as requests that are under way
            since = loop.time()
    assert 0.9 < loop.time() - since < 4.5


@pytest.mark.contract("MSG-4")
async def test_a_node_in_a_program_of_somebody_else_leaves_the_signals_alone() -> None:
    before = handlers()
    async with hf.App("shop").node("memory://"):
        assert handlers() == before
    assert handlers() == before


def test_only_the_main_thread_can_serve() -> None:
    problems: list[BaseException] = []

    def serve() -> None:
        try:
            asyncio.run(hf.App("shop").serve("memory://"))
        except InvalidInput as problem:
            problems.append(problem)

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join(MOST_SECONDS)
    [problem] = problems
    assert "async with app.node(...)" in str(problem)


async def test_a_node_that_has_failed_does_not_stay_and_do_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("nobody thought of this")

    before = handlers()
    store = Stage(fail)
    with pytest.raises(RuntimeError, match="nobody thought of this"):
        async with asyncio.timeout(MOST_SECONDS):
            await hf.App("shop").serve(store)
    assert handlers() == before
    assert "has failed" in caplog.text
    assert (await store.stats()).nodes == 0


class Slow(hf.MemoryStore):
    """A store that takes its time to commit, and counts how often it is asked what is due."""

    asked = 0

    async def commit(self, turns: Any) -> Any:
        """Commit, later."""
        for _ in range(50):
            await asyncio.sleep(0)
        return await super().commit(turns)

    async def next_due(self, node: str, plan_ids: Any = None, queues: Any = ()) -> Any:
        """Answer, and count."""
        self.asked += 1
        return await super().next_due(node, plan_ids, queues)


@pytest.mark.contract("MSG-4")
async def test_a_node_that_stops_commits_what_has_ended_and_begins_nothing_more() -> None:
    app = hf.App("shop")
    began: list[str] = []
    is_under_way, may_end = asyncio.Event(), asyncio.Event()

    @app.activity
    async def pack(what: str) -> str:
        began.append(what)
        is_under_way.set()
        await may_end.wait()
        return what

    @app.workflow
    async def order() -> str:
        return await pack("box") + await pack("bag")

    store = Slow()
    async with asyncio.timeout(MOST_SECONDS):
        async with app.node(store, options=hf.NodeOptions(drain_s=1_000)) as node:
            run = await app.start(order, run_id="r")
            await is_under_way.wait()
            stopping = asyncio.create_task(node.stop())
            await asyncio.sleep(0)
            asked = store.asked
            queued = RunQueued("order", "1", input=encode({}))
            await store.create([prepare_run("late", queued, await store.now(), "test")])
            for _ in range(50):
                await asyncio.sleep(0)
            may_end.set()
            await stopping
        assert store.asked - asked <= 1, "what is due is no concern of a node that stops"
        assert began == ["box"]
        last = [event.event_type for event in await store.read_events("r")][-3:]
        assert last == ["StepCompleted", "StepStarted", "StepRetried"], "the second has not begun"
        assert len(await store.read_events("late")) == 1
        async with app.node(store):
            assert await app.run(run.run_id).result() == "boxbag"
