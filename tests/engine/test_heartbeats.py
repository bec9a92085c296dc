"""Heartbeats: an activity that falls silent is tried again, one that says it goes on is left alone."""

import asyncio
import threading

import pytest

import holdfast as hf

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

    async with asyncio.timeout(10), app.node("memory://"):
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

    async with asyncio.timeout(10), app.node("memory://"):
        assert await (await app.start(job)).result() == 1
