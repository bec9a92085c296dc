"""A query while its run goes on: each has a program of its own, and neither is taken for the other."""

import asyncio
from typing import Any

import pytest

import holdfast as hf
from holdfast.core import codec
from holdfast.store.proxy import StoreProxy
from tests.engine.harness import EngineVariant, wait_for_event


class Held(StoreProxy):
    """A store that can hold up who reads a history, once."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.asked, self.may_read = asyncio.Event(), asyncio.Event()
        self.holds_up = False

    async def read_events(self, run_id: str, *bounds: Any) -> Any:
        """Read, when it is allowed."""
        if self.holds_up:
            self.holds_up = False
            self.asked.set()
            await self.may_read.wait()
        return await self.inner.read_events(run_id, *bounds)


class Slow(StoreProxy):
    """A store that can take its time to commit."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.asked, self.may_commit = asyncio.Event(), asyncio.Event()
        self.may_commit.set()

    async def commit(self, turns: Any) -> Any:
        """Commit, when it is allowed."""
        self.asked.set()
        await self.may_commit.wait()
        return await self.inner.commit(turns)


def counting_app() -> tuple[hf.App, Any]:
    app = hf.App("counting")

    @app.workflow
    async def count() -> list[str]:
        seen: list[str] = []
        hf.on_query("seen", lambda: seen)
        while len(seen) < 4:
            seen.append(await hf.wait_signal("go", str))
        return seen

    return app, count


@pytest.mark.contract("WF-6", "WF-2")
@pytest.mark.parametrize("cached_runs", [0, 5_000], ids=["replayed", "live"])
async def test_a_query_that_is_overtaken_by_a_turn_changes_nothing_for_the_run(address: str, cached_runs: int) -> None:
    """The query reads the history, and is held up in the middle of it; the run takes a turn meanwhile."""
    app, count = counting_app()
    variant = EngineVariant(address, cached_runs)
    async with variant.opened() as inner:
        async with variant.node(app, inner):
            run_id = (await app.start(count)).run_id
            await wait_for_event(app.run(run_id), "SignalWaiting")
        store: Any = Held(inner)
        async with variant.node(app, store) as node:
            run: Any = app.run(run_id)
            for number in range(3):
                store.holds_up = node.run_cache._runs.get(run_id) is None
                is_held = store.holds_up
                store.asked.clear()
                store.may_read.clear()
                asking = asyncio.create_task(run.query("seen"))
                if is_held:
                    await store.asked.wait()
                await run.signal("go", f"s{number}")
                await wait_for_event(run, "SignalReceived", times=number + 1)
                # In a bucket its event is there before its commit has been answered.
                while not node.is_at_rest:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                pumped = node.run_cache._runs.get(run_id)
                store.may_read.set()
                answer = await asking
                assert answer == [f"s{earlier}" for earlier in range(number)] + [f"s{number}"] * (len(answer) - number)
                assert node.run_cache._runs.get(run_id) is pumped, "the pump's program is not replaced by the query's"
                assert pumped is None or not pumped.is_closed
            await run.signal("go", "end")
            assert await run.result() == ["s0", "s1", "s2", "end"]
            assert node.failure is None


@pytest.mark.contract("WF-6")
async def test_a_query_of_a_run_that_is_not_in_memory_leaves_nothing_there(variant: EngineVariant) -> None:
    app, count = counting_app()
    async with variant.opened() as store:
        async with variant.node(app, store):
            run_id = (await app.start(count)).run_id
            await wait_for_event(app.run(run_id), "SignalWaiting")
        async with variant.node(app, store) as node:
            ask = app.runtime().query
            answers = await asyncio.gather(*(ask(run_id, "seen", codec.encode({})) for _ in range(3)))
            assert [codec.decode(answer, list[str]) for answer in answers] == [[], [], []]
            assert node.run_cache._runs == {}


@pytest.mark.contract("WF-6")
async def test_a_query_does_not_see_what_is_not_durable_yet(variant: EngineVariant) -> None:
    app, count = counting_app()
    async with variant.opened() as inner:
        store: Any = Slow(inner)
        async with variant.node(app, store) as node:
            run: Any = await app.start(count)
            await wait_for_event(run, "SignalWaiting")
            store.asked.clear()
            store.may_commit.clear()
            await run.signal("go", "now")
            await store.asked.wait()
            assert await run.query("seen") == []
            store.may_commit.set()
            await wait_for_event(run, "SignalReceived")
            assert await run.query("seen") == ["now"]
            assert node.failure is None
