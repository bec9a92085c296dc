"""Heartbeats: an activity that falls silent is tried again, one that says it goes on is left alone."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

import holdfast as hf
from holdfast.store.port import Heartbeat, Store
from holdfast.store.proxy import StoreProxy
from tests.engine.harness import EngineVariant

QUICK = hf.Retry(max_attempts=3, initial_ms=1, jitter=0.0)


@pytest.mark.contract("ACT-1")
async def test_an_activity_that_falls_silent_is_tried_again_and_finds_its_details() -> None:
    app = hf.App("test")
    seen: list[object] = []

    @app.activity(heartbeat_timeout=0.05, retry=QUICK)
    async def copy() -> int:
        context = hf.activity_context()
        seen.append(context.details)
        context.heartbeat(f"attempt {context.attempt}")
        if context.attempt < 3:
            await asyncio.sleep(60)
        return context.attempt

    @app.workflow
    async def job() -> int:
        attempts: int = await copy()
        return attempts

    async with asyncio.timeout(60), app.node("memory://"):
        run = await app.start(job)
        assert await run.result() == 3
        retried = [event for event in await run.events() if event.event_type == "StepRetried"]
    assert seen == [None, "attempt 1", "attempt 2"]
    assert all("no heartbeat within 50 ms" in str(event.data.error) for event in retried)  # type: ignore[attr-defined]
    assert len(retried) == 2


@pytest.mark.contract("ACT-1")
async def test_work_that_says_it_goes_on_may_take_as_long_as_it_likes_also_in_a_thread() -> None:
    app = hf.App("test")
    pause = threading.Event()

    @app.activity(heartbeat_timeout=0.2, retry=QUICK)
    def count() -> int:
        for _ in range(8):
            pause.wait(0.05)
            hf.activity_context().heartbeat()
        return hf.activity_context().attempt

    @app.workflow
    async def job() -> int:
        attempts: int = await count()
        return attempts

    async with asyncio.timeout(60), app.node("memory://"):
        assert await (await app.start(job)).result() == 1


@pytest.mark.contract("ACT-1", "OWN-3")
async def test_details_are_found_by_the_next_attempt_on_another_node(variant: EngineVariant) -> None:
    told = asyncio.Event()
    seen: list[object] = []

    def registered(is_hanging: bool) -> tuple[hf.App, Any]:
        app = hf.App("test")

        @app.activity
        async def copy() -> str:
            context = hf.activity_context()
            seen.append(context.details)
            context.heartbeat({"page": 1})
            context.heartbeat({"page": 2})
            context.heartbeat()  # without details it says only that the work goes on
            told.set()
            if is_hanging:
                await asyncio.Event().wait()
            return "copied"

        @app.workflow
        async def job() -> str:
            return await copy()

        return app, job

    async with variant.opened() as store:
        app, job = registered(is_hanging=True)
        async with variant.node(app, store, drain_s=0.01):
            run_id = (await app.start(job)).run_id
            await told.wait()
        app, _ = registered(is_hanging=False)
        async with variant.node(app, store):
            assert await app.run(run_id).result() == "copied"
        [loaded] = await store.load([run_id])
        assert loaded is not None
        assert loaded.details == {}
    assert seen == [None, {"page": 2}]


@pytest.mark.contract("ACT-1")
async def test_details_are_told_once_a_second_and_only_if_there_are_any(variant: EngineVariant) -> None:
    app = hf.App("test")

    @app.activity
    async def chatter(has_details: bool) -> str:
        context = hf.activity_context()
        for number in range(500):
            if has_details:
                context.heartbeat(number)
            else:
                context.heartbeat()
            await asyncio.sleep(0)
        return str(context.details)

    @app.workflow
    async def job() -> list[str]:
        return await asyncio.gather(*(chatter(has_details) for has_details in (True, True, False)))

    async with variant.opened() as store:
        counted = CountedStore(store)
        async with variant.node(app, counted):
            run = await app.start(job)
            assert await run.result() == ["499", "499", "None"]
        [loaded] = await store.load([run.run_id])
        assert loaded is not None
        assert loaded.details == {}
    assert 1 <= counted.calls <= 3
    assert counted.steps <= {"chatter", "chatter#2"}


class CountedStore(StoreProxy):
    """A store that counts beats."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.calls = 0
        self.steps: set[str] = set()

    async def heartbeat(self, node: str, beats: Sequence[Heartbeat], visible_ms: int) -> list[bool]:
        self.calls += 1
        self.steps |= {beat.step_id for beat in beats}
        return await self.inner.heartbeat(node, beats, visible_ms)


@pytest.mark.contract("API-2")
async def test_details_that_cannot_be_kept_fail_the_step_and_say_so(variant: EngineVariant) -> None:
    app = hf.App("test")

    @app.activity
    async def odd() -> None:
        hf.activity_context().heartbeat(object())

    @app.workflow
    async def job() -> str:
        try:
            await odd()
        except hf.errors.ActivityFailed as failure:
            return str(failure.info.message)
        return "kept"

    async with variant.node(app):
        assert "cannot be stored" in await (await app.start(job)).result()
