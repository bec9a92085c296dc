"""Histories stay short: a real node cuts where the workflow may be cut, and nothing is lost by it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.core import events as e
from holdfast.core.state import RunStatus
from holdfast.errors import InvalidInput, RunCancelled, RunFailed
from tests.engine.harness import EngineVariant, event_types, wait_for_event, wait_for_history

FEW = hf.Limits(rotation_steps=4, signals_per_run_per_minute=1_000)
MANY = hf.Limits(rotation_steps=1_000, signals_per_run_per_minute=1_000)


def collecting(limits: hf.Limits | None) -> tuple[hf.App, Any]:
    app = hf.App("collecting", limits=limits)

    @app.activity
    async def work(number: int) -> int:
        return number * 10

    @app.workflow
    async def collect(most: int, seen: list[int], added: int) -> list[int]:
        async def add(by: int) -> int:
            nonlocal added
            added += await work(by)
            return added

        hf.on_update("add", add)
        hf.on_query("seen", lambda: len(seen))
        while len(seen) < most:
            seen.append(await work(await hf.wait_signal("go", int)))
            hf.continue_as_new_if_long(most, seen, added)
        return [*seen, added]

    return app, collect


@pytest.mark.contract("CAN-1", "SIG-3", "WF-6")
async def test_a_long_run_has_a_short_history_and_loses_nothing(variant: EngineVariant) -> None:
    app, collect = collecting(FEW)
    async with variant.node(app):
        run = await app.start(collect, 12, [], 0)
        for number in range(11):
            await run.signal("go", number)
            if number % 4 == 0:
                await run.update("add", by=1)
        await wait_for_history(run, lambda events: sum(event.event_type == "SignalReceived" for event in events) == 11)
        await wait_for_event(run, "StepCompleted", times=14)
        assert await run.query("seen") == 11
        await run.signal("go", 11)
        assert await run.result() == [*(number * 10 for number in range(12)), 30]
        names = await event_types(run)
        assert names.count("ContinuedAsNew") >= 3
        assert names.count("ContinuedAsNew") == names.count("MarkerRecorded")
        assert names.count("UpdateCompleted") == 3


@pytest.mark.contract("CAN-1", "WF-2", "OWN-3")
@pytest.mark.parametrize("limits", [(MANY, FEW), (FEW, MANY)], ids=["fewer later", "more later"])
async def test_other_limits_after_a_restart_change_nothing_that_is_recorded(
    variant: EngineVariant, limits: tuple[hf.Limits, hf.Limits]
) -> None:
    async with variant.opened() as store:
        app, collect = collecting(limits[0])
        async with variant.node(app, store):
            run_id = (await app.start(collect, 12, [], 0)).run_id
        for number in range(12):
            app, _ = collecting(limits[number % 2])
            async with variant.node(app, store):
                run = app.run(run_id)
                await run.signal("go", number)
                await wait_for_event(run, "StepCompleted", times=number + 1)
                snapshot = await run.snapshot()
                assert snapshot.status in (RunStatus.RUNNING, RunStatus.COMPLETED)
        async with variant.node(app, store):
            assert await app.run(run_id).result() == [*(number * 10 for number in range(12)), 0]
            assert (await event_types(app.run(run_id))).count("ContinuedAsNew") >= 2


@pytest.mark.contract("CAN-1", "WF-4")
async def test_a_cancellation_survives_a_cut(variant: EngineVariant) -> None:
    app = hf.App("cancel", limits=hf.Limits(rotation_steps=2))
    told: list[int] = []

    @app.activity
    async def work(number: int) -> None:
        told.append(number)

    @app.workflow
    async def rounds(number: int) -> None:
        try:
            await hf.sleep(60)
        except asyncio.CancelledError:
            await work(number)
            if number == 0:
                hf.continue_as_new_if_long(1)
            raise

    async with variant.node(app):
        run = await app.start(rounds, 0)
        await wait_for_event(run, "TimerStarted")
        await run.cancel()
        with pytest.raises(RunCancelled):
            await run.result()
        assert (await event_types(run)).count("ContinuedAsNew") == 1
    assert told == [0, 1]


@pytest.mark.contract("CAN-1")
async def test_limits_come_from_the_environment_unless_the_app_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async def rotations(limits: hf.Limits | None, store: Any) -> int:
        app = hf.App("limits", limits=limits)

        @app.activity
        async def work() -> None: ...

        @app.workflow
        async def loop(number: int) -> None:
            while number < 60:
                await work()
                number += 1
                hf.continue_as_new_if_long(number)

        async with app.node(store):
            run = await app.start(loop, 0)
            await run.result()
            return (await event_types(run)).count("ContinuedAsNew")

    assert await rotations(None, "memory://") == 1
    monkeypatch.setenv("HOLDFAST_LIMITS__ROTATION_STEPS", "20")
    assert await rotations(None, "memory://") == 3
    assert await rotations(hf.Limits(rotation_steps=30), "memory://") == 2
    assert await rotations(hf.Limits(rotation_steps=10), hf.MemoryStore()) == 6
    assert await rotations(None, hf.MemoryStore()) == 1, "a store that was opened elsewhere says nothing"


@pytest.mark.contract("SIG-11")
async def test_the_limits_of_an_app_are_those_of_the_store_that_it_opens() -> None:
    app, collect = collecting(hf.Limits(signal_payload_bytes=10))
    async with app.node("memory://"):
        run = await app.start(collect, 1, [], 0)
        with pytest.raises(hf.errors.PayloadTooLarge):
            await run.signal("go", "x" * 11)


# --- values that cannot be stored, and what can not be started


class Thing:
    """Knows nothing of JSON."""


@pytest.mark.contract("API-2")
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Path("a"), r"argument 'path' of activity 'load': a value of type \w+Path cannot be stored; use str\(\) of it"),
        ([Path("a")], r"argument 'path' of activity 'load': a value of type \w+Path \(in a list\) cannot be stored"),
        ({Thing()}, r"'path' of activity 'load': a value of type Thing \(in a set\) cannot be stored; use a dataclass"),
        (float("nan"), r"argument 'path' of activity 'load': a value of type float cannot be stored: nan has no JSON"),
    ],
)
async def test_an_argument_that_cannot_be_stored_is_named(value: Any, message: str) -> None:
    app = hf.App("values", on_error="fail")

    @app.activity
    async def load(number: int, path: Any) -> None: ...

    @app.workflow
    async def order() -> None:
        await load(1, path=value)

    async with app.node("memory://"):
        with pytest.raises(RunFailed, match=message):
            await (await app.start(order)).result()


@pytest.mark.contract("API-2")
async def test_what_is_no_workflow_is_refused() -> None:
    app = hf.App("values")

    @app.activity
    async def work() -> None: ...

    @app.workflow
    async def order(number: Any) -> None: ...

    async def plain() -> None: ...

    async with app.node("memory://"):
        for wrong in (plain, work, "order"):
            with pytest.raises(InvalidInput, match=r"is not a workflow: register the function with @app\.workflow"):
                await app.start(wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match="argument 'number' of workflow 'order': a value of type Thing cannot"):
            await app.start(order, Thing())
        with pytest.raises(InvalidInput, match="workflow 'order': missing a required argument: 'number'"):
            await app.start(order)


@pytest.mark.contract("API-2", "INV")
@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: hf.sleep(1e30), "at most a thousand years"),
        (lambda: hf.sleep(float("inf")), "at most a thousand years"),
        (lambda: hf.sleep("soon"), "a number of seconds, not 'soon'"),  # type: ignore[arg-type]
        (lambda: asyncio.sleep(1e30), "at most a thousand years"),
        (lambda: hf.wait_signal("go", str, timeout=1e30), "at most a thousand years"),
        (lambda: hf.wait_signal("", str), "signal name must be a string that is not empty"),
        (lambda: hf.wait_signal(5, str), "signal name must be a string"),  # type: ignore[call-overload]
        (lambda: hf.wait_signal("x" * 256, str), "the most is 255"),
        (lambda: hf.wait_until(asyncio.sleep), "a plain function, not an async one"),  # type: ignore[arg-type]
    ],
)
async def test_what_no_store_could_keep_fails_the_run_and_says_why(
    variant: EngineVariant, ask: Any, message: str
) -> None:
    app = hf.App("values", on_error="fail")

    @app.workflow
    async def order() -> None:
        await ask()

    async with variant.node(app):
        with pytest.raises(RunFailed, match=message) as caught:
            await (await app.start(order)).result()
        assert isinstance(caught.value.info, e.ErrorInfo)
        assert caught.value.info.code == "InvalidInput"
