"""A `CancelledError` that no caller asked for is an error with its traceback, wherever the code raises it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import holdfast as hf
from holdfast.core import events as e
from holdfast.core.state import CANCELLED, FAILED, PAUSED
from holdfast.errors import RunCancelled, RunFailed, UpdateFailed
from tests.engine.harness import EngineVariant, wait_for_event, wait_for_status


async def raises() -> None:
    raise asyncio.CancelledError("stray")


async def raises_without_words() -> None:
    raise asyncio.CancelledError


async def awaits_what_it_cancelled() -> None:
    async def forever() -> None:
        await hf.sleep(600)

    task = asyncio.create_task(forever())
    await asyncio.sleep(0)
    task.cancel("stray")
    await task


async def gathers() -> None:
    await asyncio.gather(raises(), hf.sleep(600))


async def awaits_a_group() -> None:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(raises())
    await task


WAYS: list[Callable[[], Awaitable[None]]] = [
    raises,
    raises_without_words,
    awaits_what_it_cancelled,
    gathers,
    awaits_a_group,
]


@pytest.mark.contract("WF-7")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_it_pauses_the_run(
    variant: EngineVariant, way: Callable[[], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> None:
    app = hf.App("stray")

    @app.workflow
    async def stray() -> None:
        await hf.sleep(0.001)
        await way()

    with caplog.at_level(logging.INFO, logger="holdfast.node"):
        async with variant.node(app):
            run = await app.start(stray)
            await wait_for_status(run, PAUSED)
            paused = (await wait_for_event(run, "RunPaused")).data
    assert isinstance(paused, e.RunPaused)
    assert paused.error is not None
    assert paused.error.cause is not None
    assert paused.error.cause.code == "CancelledError"
    assert paused.error.cause.message
    assert way.__name__ in paused.error.cause.traceback
    assert f"run {run.run_id} is paused: UnhandledError: the workflow raised CancelledError" in caplog.text


@pytest.mark.contract("WF-7")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_it_fails_the_run_where_its_author_chose_so(
    variant: EngineVariant, way: Callable[[], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> None:
    app = hf.App("stray", on_error="fail")

    @app.workflow
    async def stray() -> None:
        await hf.sleep(0.001)
        await way()

    with caplog.at_level(logging.INFO, logger="holdfast.runs"):
        async with variant.node(app):
            run = await app.start(stray)
            with pytest.raises(RunFailed) as failed:
                await run.result()
            assert await run.status() is FAILED
    assert failed.value.info.code == "CancelledError"
    assert failed.value.info.message
    assert way.__name__ in failed.value.info.traceback
    assert f"run {run.run_id} has failed: CancelledError" in caplog.text


@pytest.mark.contract("WF-4", "WF-7")
@pytest.mark.parametrize("is_rotated", [False, True])
async def test_a_run_that_was_asked_to_is_cancelled(variant: EngineVariant, is_rotated: bool) -> None:
    app = hf.App("asked")

    @app.workflow
    async def asked(rotates: bool) -> None:
        try:
            await hf.sleep(600)
        finally:
            if rotates:
                hf.continue_as_new(False)

    async with variant.node(app):
        run = await app.start(asked, is_rotated)
        await wait_for_event(run, "TimerStarted")
        await run.cancel()
        with pytest.raises(RunCancelled):
            await run.result()
        assert await run.status() is CANCELLED


@pytest.mark.contract("WF-6", "WF-7")
async def test_it_fails_the_update_whose_handler_raises_it(variant: EngineVariant) -> None:
    app = hf.App("update")

    @app.workflow
    async def takes() -> str:
        hf.on_update("stray", raises)
        return await hf.wait_signal("close", str)

    async with variant.node(app):
        run = await app.start(takes)
        with pytest.raises(UpdateFailed, match="CancelledError: stray") as failed:
            await run.update("stray")
        assert "in raises" in failed.value.info.traceback
        await run.signal("close", "done")
        assert await run.result() == "done"


@pytest.mark.contract("WF-4", "WF-7")
async def test_it_fails_in_the_parent_of_a_child_that_raises_it(variant: EngineVariant) -> None:
    app = hf.App("family")

    @app.workflow(on_error="fail")
    async def child() -> None:
        await raises()

    @app.workflow
    async def parent() -> str:
        try:
            await child()
        except hf.errors.ChildFailed as problem:
            return f"{problem.info.code}: {problem.info.message}"
        return "none"

    async with variant.node(app):
        run = await app.start(parent, run_id="p")
        assert await run.result() == "CancelledError: stray"
        await wait_for_status(app.run("p/child"), FAILED)


@pytest.mark.contract("ACT-1", "WF-7")
@pytest.mark.parametrize("is_async", [True, False])
async def test_it_fails_the_step_whose_activity_raises_it(variant: EngineVariant, is_async: bool) -> None:
    app = hf.App("activity")

    def in_a_thread() -> None:
        raise asyncio.CancelledError("stray")

    activity: Any = app.activity(name="work", retry=hf.Retry(max_attempts=1))(raises if is_async else in_a_thread)

    @app.workflow
    async def works() -> None:
        await activity()

    async with variant.node(app):
        run = await app.start(works)
        with pytest.raises(RunFailed, match="stray"):
            await run.result()
        body = (await wait_for_event(run, "StepFailed")).data
        assert isinstance(body, e.StepFailed)
        assert body.error.code == "CancelledError"
