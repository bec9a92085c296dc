"""A wait with a time-out in a run that is paused: what counts is when the signal came, not when the run goes on."""

import asyncio
from typing import Any

import pytest

import holdfast as hf
from holdfast.app import App
from holdfast.core.state import PAUSED
from holdfast.run import RunHandle
from holdfast.store.port import Store
from holdfast.testing.samples import message
from tests.engine.harness import EngineVariant, event_types, store_with_virtual_time, wait_for_event, wait_for_status

MINUTE_US = 60_000_000
EARLY = pytest.mark.parametrize(
    ("early_us", "expected"),
    [(1_000, ["somebody", "late"]), (0, ["somebody", "late"]), (-1, ["nobody", "somebody"])],
    ids=["before", "at once", "after"],
)


def waiting_app(version: str = "1") -> tuple[App, Any]:
    app = hf.App("signals")

    @app.workflow(version=version)
    async def waits() -> list[str]:
        first = await hf.wait_signal("go", str, timeout=60, on_timeout=lambda: "nobody")
        return [first, await hf.wait_signal("go", str)]

    return app, waits


async def until_quiet(store: Store, run: RunHandle[Any]) -> None:
    """Wait until a turn has handled all that the run was told."""
    while (await store.load([run.run_id]))[0].head.ready_at is not None:  # type: ignore[union-attr]  # noqa: ASYNC110
        await asyncio.sleep(0.002)


@EARLY
@pytest.mark.contract("SIG-8", "SIG-3")
async def test_a_signal_that_came_in_time_wins_over_a_time_out_during_the_pause(
    variant: EngineVariant, early_us: int, expected: list[str]
) -> None:
    app, waits = waiting_app()
    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store):
        run = await app.start(waits)
        await wait_for_event(run, "SignalWaiting")
        await run.pause()
        await wait_for_status(run, PAUSED)
        clock.advance(us=MINUTE_US - early_us)
        await run.signal("go", "somebody")
        clock.advance(ms=5_000)
        store.wakeups.notify()
        await until_quiet(store, run)
        assert ("SignalTimedOut" in await event_types(run)) is (expected[0] == "nobody")
        await run.signal("go", "late")
        await run.resume()
        assert await run.result() == expected


@EARLY
@pytest.mark.contract("SIG-8", "WF-3")
async def test_so_it_does_while_the_program_is_not_there_to_take_it(
    variant: EngineVariant, early_us: int, expected: list[str]
) -> None:
    app, waits = waiting_app()
    async with store_with_virtual_time(variant) as (store, clock):
        async with variant.node(app, store):
            run = await app.start(waits)
            await wait_for_event(run, "SignalWaiting")
        clock.advance(us=MINUTE_US - early_us)
        await run.signal("go", "somebody")
        clock.advance(ms=5_000)
        other, _ = waiting_app(version="2")
        async with variant.node(other, store, definition_grace_s=0.05):
            stranger = other.run(run.run_id)
            await wait_for_event(stranger, "RunPaused")
            assert "SignalTimedOut" not in await event_types(stranger)
        async with variant.node(app, store):
            run = app.run(run.run_id)
            await run.signal("go", "late")
            await run.resume()
            assert await run.result() == expected


@pytest.mark.contract("SIG-8", "SIG-9")
@pytest.mark.parametrize("signals", [1, 2])
async def test_a_wait_times_out_during_a_pause_if_all_signals_are_for_others(
    variant: EngineVariant, signals: int
) -> None:
    app = hf.App("signals")

    @app.workflow
    async def waits() -> list[str]:
        patient = hf.wait_signal("go", str)
        timed = hf.wait_signal("go", str, timeout=60, on_timeout=lambda: "nobody")
        return list(await asyncio.gather(patient, timed))

    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store):
        run = await app.start(waits)
        await wait_for_event(run, "SignalWaiting", times=2)
        await run.pause()
        await wait_for_status(run, PAUSED)
        for number in range(signals):
            await run.signal("go", str(number))
        clock.advance(us=MINUTE_US)
        store.wakeups.notify()
        await until_quiet(store, run)
        await run.resume()
        assert await run.result() == ["0", "1" if signals == 2 else "nobody"]


@pytest.mark.contract("SIG-8", "SIG-10")
async def test_a_signal_that_did_not_fit_before_the_pause_keeps_no_wait_from_timing_out(variant: EngineVariant) -> None:
    app, waits = waiting_app()
    async with store_with_virtual_time(variant) as (store, clock):
        async with variant.node(app, store):
            run = await app.start(waits)
            await wait_for_event(run, "SignalWaiting")
        async with app.connect(store):
            run = app.run(run.run_id)
            await run.signal("go", 7, step_id="go")
            await run.pause()
            await store.deliver([message(run.run_id, "so that the signal is taken before the pause")])
        clock.advance(us=MINUTE_US + 1)
        async with variant.node(app, store):
            run = app.run(run.run_id)
            await wait_for_status(run, PAUSED)
            await until_quiet(store, run)
            assert (await event_types(run))[-4:] == [
                "SignalDeadLettered",
                "SignalAccepted",
                "RunPaused",
                "SignalTimedOut",
            ]
            await run.resume()
            await run.signal("go", "somebody")
            assert await run.result() == ["nobody", "somebody"]
