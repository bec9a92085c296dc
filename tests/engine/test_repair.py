"""Runs whose program cannot go on are paused, say why, and go on once the code is right again."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import holdfast as hf
from holdfast.clock import SystemClock
from holdfast.core import events as e
from holdfast.core.state import PAUSED, RUNNING
from holdfast.engine.observe.doctor import examine
from holdfast.engine.turns.draft import prepare_run
from holdfast.errors import Conflict, NondeterminismError, RunCancelled, VersionMismatch
from tests.engine.harness import (
    EngineVariant,
    event_types,
    store_with_virtual_time,
    wait_for_event,
    wait_for_history,
    wait_for_status,
)


def shop(workflow: Callable[[Any, Any], Any], *, version: str = "1") -> tuple[hf.App, Any]:
    """Return an app with an activity and one workflow, called order."""
    app = hf.App("shop")

    @app.activity
    async def charge(what: str) -> str:
        return f"charged {what}"

    @app.activity
    async def ship(what: str) -> str:
        return f"shipped {what}"

    function = workflow(charge, ship)
    return app, app.workflow(name="order", version=version)(function)


def right(charge: Any, ship: Any) -> Any:
    async def order() -> str:
        first = await charge("a")
        await hf.wait_signal("go", str)
        return f"{first}, {await ship('a')}"

    return order


def wrong(charge: Any, ship: Any) -> Any:
    async def order() -> str:
        first = await ship("a")
        await hf.wait_signal("go", str)
        return f"{first}, {await charge('a')}"

    return order


@pytest.mark.contract("WF-2")
async def test_a_divergence_pauses_the_run_and_the_right_code_resumes_it(
    variant: EngineVariant, caplog: pytest.LogCaptureFixture
) -> None:
    async with variant.opened() as store:
        app, order = shop(right)
        async with variant.node(app, store):
            run_id = (await app.start(order)).run_id
            await wait_for_event(app.run(run_id), "SignalWaiting")
        app, order = shop(wrong)
        async with variant.node(app, store):
            run = app.run(run_id)
            await run.signal("go", "on")
            event = await wait_for_event(run, "RunPaused")
            assert isinstance(event.data, e.RunPaused)
            assert event.data.error is not None
            assert event.data.error.code == "NondeterminismError"
            message = event.data.error.message
            assert "event 3" in message
            assert "StepStarted of step 'charge' (charge)" in message
            assert "RunActivity for step 'ship' (ship)" in message
            assert f"{__file__}:{wrong(None, None).__code__.co_firstlineno + 1}" in message
            with pytest.raises(NondeterminismError) as caught:
                await run.query("anything")
            assert caught.value.details["run_seq"] == 3
            [found] = [each for each in (await examine(store, SystemClock())).findings if run_id in each.run_ids]
            assert "deploy code that fits their histories, with `hf.patched`" in found.advice
            await run.resume()
            await wait_for_history(run, lambda events: [x.event_type for x in events].count("RunPaused") == 2)
        app, order = shop(right)
        async with variant.node(app, store):
            run = app.run(run_id)
            await asyncio.sleep(0)
            assert (await run.snapshot()).status == PAUSED
            await run.resume("the code is right again")
            assert await run.result() == "charged a, shipped a"
        assert "is paused" in caplog.text


@pytest.mark.contract("WF-2", "WF-7")
async def test_results_that_come_while_the_code_is_wrong_are_kept(variant: EngineVariant) -> None:
    def waiting(charge: Any, ship: Any) -> Any:
        async def order() -> str:
            async def bounded() -> str:
                async with asyncio.timeout(60):
                    return str(await hf.wait_signal("never", str))

            results = await asyncio.gather(bounded(), hf.wait_signal("go", str), return_exceptions=True)
            return ",".join(type(result).__name__ for result in results)

        return order

    async with store_with_virtual_time(variant) as (store, clock):
        app, order = shop(waiting)
        async with variant.node(app, store):
            run_id = (await app.start(order)).run_id
            await wait_for_event(app.run(run_id), "SignalWaiting", times=2)
        app, order = shop(right)
        clock.advance(ms=60_000)
        async with variant.node(app, store):
            run = app.run(run_id)
            await wait_for_event(run, "TimerFired")
            assert (await run.snapshot()).status == PAUSED
        app, order = shop(waiting)
        async with variant.node(app, store):
            run = app.run(run_id)
            await run.signal("go", "on")
            await run.resume()
            assert await run.result() == "TimeoutError,str"


@pytest.mark.contract("WF-3")
@pytest.mark.parametrize("has_begun", [True, False])
async def test_a_run_of_an_unknown_version_is_paused_until_it_is_known_again(
    variant: EngineVariant, has_begun: bool
) -> None:
    async with variant.opened() as store:
        app, order = shop(right, version="2")
        if has_begun:
            async with variant.node(app, store):
                run_id = (await app.start(order)).run_id
                await wait_for_event(app.run(run_id), "SignalWaiting")
        else:
            run_id = await queued(store, app, order)
        app, _ = shop(right, version="1")
        async with variant.node(app, store, definition_grace_s=0.05):
            run = app.run(run_id)
            await run.signal("go", "on")
            event = await wait_for_event(run, "RunPaused")
            assert isinstance(event.data, e.RunPaused)
            assert event.data.error is not None
            assert event.data.error.code == "VersionMismatch"
            assert "needs version '2' of 'order'; known are ['1']" in event.data.error.message
            with pytest.raises(VersionMismatch if has_begun else Conflict):
                await run.query("anything")
            await run.resume()
            await wait_for_event(run, "RunPaused", times=2)
        app, _ = shop(right, version="2")
        async with variant.node(app, store):
            run = app.run(run_id)
            await run.resume()
            assert await run.result() == "charged a, shipped a"


async def queued(store: Any, app: hf.App, order: Any) -> str:
    """Create a run that no node has started."""
    definition = order.definition
    body = e.RunQueued(definition.name, definition.version, input=definition.signature.pack((), {}))
    await store.create([prepare_run("queued", body, await store.now(), "somebody")])
    return "queued"


@pytest.mark.contract("WF-3", "WF-2")
async def test_arguments_that_no_longer_fit_pause_the_run_and_harm_no_other(variant: EngineVariant) -> None:
    def before(charge: Any, ship: Any) -> Any:
        async def order(what: str) -> str:
            await hf.wait_signal("go", str)
            return what

        return order

    def after(charge: Any, ship: Any) -> Any:
        async def order(number: int) -> str:
            await hf.wait_signal("go", str)
            return str(number)

        return order

    async with variant.opened() as store:
        app, order = shop(before)
        async with variant.node(app, store):
            run_id = (await app.start(order, "a")).run_id
            await wait_for_event(app.run(run_id), "SignalWaiting")
        app, order = shop(after)
        async with variant.node(app, store):
            run = app.run(run_id)
            await run.signal("go", "on")
            await wait_for_status(run, PAUSED)
            other = await app.start(order, 1)
            await other.signal("go", "on")
            assert await other.result() == "1"
        app, order = shop(before)
        async with variant.node(app, store):
            await app.run(run_id).resume()
            assert await app.run(run_id).result() == "a"


@pytest.mark.contract("WF-2", "WF-4")
async def test_a_run_whose_code_is_wrong_can_be_cancelled_once_it_is_right(variant: EngineVariant) -> None:
    async with variant.opened() as store:
        app, order = shop(right)
        async with variant.node(app, store):
            run_id = (await app.start(order)).run_id
            await wait_for_event(app.run(run_id), "SignalWaiting")
        app, order = shop(wrong)
        async with variant.node(app, store):
            run = app.run(run_id)
            await run.cancel()
            await wait_for_event(run, "RunCancelRequested")
            await wait_for_status(run, PAUSED)
        app, order = shop(right)
        async with variant.node(app, store):
            run = app.run(run_id)
            await run.resume()
            with pytest.raises(RunCancelled):
                await run.result()


@pytest.mark.contract("WF-3")
async def test_patched_lets_new_code_serve_old_and_new_runs(variant: EngineVariant) -> None:
    def patched(charge: Any, ship: Any) -> Any:
        async def order() -> str:
            if hf.patched("ship first"):
                first = await ship("a")
            else:
                first = await charge("a")
            await hf.wait_signal("go", str)
            return f"{first}, {await ship('b')}"

        return order

    async with variant.opened() as store:
        app, order = shop(right)
        async with variant.node(app, store):
            old = (await app.start(order)).run_id
            await wait_for_event(app.run(old), "SignalWaiting")
        app, order = shop(patched)
        async with variant.node(app, store):
            new = (await app.start(order)).run_id
            for run_id in (old, new):
                await app.run(run_id).signal("go", "on")
            assert await app.run(old).result() == "charged a, shipped b"
            assert await app.run(new).result() == "shipped a, shipped b"
            assert "RunPaused" not in await event_types(app.run(old))


@pytest.mark.contract("WF-2")
async def test_a_workflow_that_spins_is_paused_and_goes_on_when_it_is_mended(
    variant: EngineVariant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.engine.turns.execute.MOST_CALLBACKS", 2_000)

    def spinning(charge: Any, ship: Any) -> Any:
        async def order() -> str:
            while True:  # noqa: ASYNC110
                await asyncio.sleep(0)

        return order

    async with variant.opened() as store:
        app, order = shop(spinning)
        async with variant.node(app, store):
            run = await app.start(order)
            event = await wait_for_event(run, "RunPaused")
            assert isinstance(event.data, e.RunPaused)
            assert event.data.reason == "RunawayWorkflow"
        app, order = shop(right)
        async with variant.node(app, store):
            mended = app.run(run.run_id)
            await mended.resume()
            await wait_for_event(mended, "SignalWaiting")
            assert (await mended.snapshot()).status == RUNNING
            await mended.signal("go", "on")
            assert await mended.result() == "charged a, shipped a"
