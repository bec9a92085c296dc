"""Hooks: the app is called when one of its runs fails or is paused."""

import asyncio
import logging

import pytest

import holdfast as hf
from tests.engine.harness import EngineVariant


@pytest.mark.contract("WF-7")
async def test_the_app_hears_of_runs_that_fail_and_are_paused(
    variant: EngineVariant, caplog: pytest.LogCaptureFixture
) -> None:
    app = hf.App("orders")
    heard: asyncio.Queue[tuple[str, str, str]] = asyncio.Queue()

    @app.on_failed
    async def page_somebody(run_id: str, why: str) -> None:
        await heard.put(("failed", run_id, why))

    @app.on_paused
    def write(run_id: str, why: str) -> None:
        heard.put_nowait(("paused", run_id, why))
        raise RuntimeError("the pager is broken")

    @app.activity(on_failure="pause", retry=hf.Retry(max_attempts=1))
    async def charge() -> None:
        raise ValueError("no card")

    @app.workflow
    async def order() -> None:
        await charge()

    @app.workflow(failures=ValueError)
    async def refund() -> None:
        raise ValueError("no money")

    caplog.set_level(logging.WARNING)
    async with variant.node(app):
        paused = await app.start(order)
        assert await heard.get() == ("paused", paused.run_id, "step 'charge' failed")
        failed = await app.start(refund)
        assert await heard.get() == ("failed", failed.run_id, "ValueError: no money")
    assert f"run {failed.run_id} has failed: ValueError: no money" in caplog.text
    assert f"run {paused.run_id} is paused: step 'charge' failed" in caplog.text
    assert "write failed for run" in caplog.text
    levels = {record.levelno for record in caplog.records if "has failed: ValueError" in record.getMessage()}
    assert levels == {logging.WARNING}
