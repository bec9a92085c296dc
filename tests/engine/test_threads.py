"""Activities that are not async: threads of the node's own, bounded, and never more than there are slots."""

import asyncio
import logging
import threading

import pytest

import holdfast as hf
from tests.engine.harness import EngineVariant, wait_for_event

ONCE = hf.Retry(max_attempts=1)


@pytest.mark.contract("ACT-1", "MSG-4")
async def test_as_many_run_at_once_as_there_are_slots(variant: EngineVariant) -> None:
    app = hf.App("shop")
    together = threading.Barrier(40)

    @app.activity
    def meet() -> str:
        together.wait(timeout=60)  # all of them are here, or none goes on
        return threading.current_thread().name

    @app.workflow
    async def party() -> list[str]:
        return await asyncio.gather(*(meet() for _ in range(40)))

    async with variant.node(app, activities_at_once=40):
        names = await (await app.start(party)).result()
    assert len(set(names)) == 40
    assert all(name.startswith("holdfast-activity") for name in names)


@pytest.mark.contract("ACT-1", "MSG-4")
async def test_one_that_took_too_long_keeps_its_slot_until_it_returns(
    variant: EngineVariant, caplog: pytest.LogCaptureFixture
) -> None:
    app = hf.App("shop")
    gate = threading.Event()
    entered: list[str] = []

    @app.activity(retry=ONCE, timeout=0.4)  # within which a busy machine begins it
    def slow(name: str) -> str:
        entered.append(name)
        if name == "first":
            gate.wait(60)
        return name

    @app.workflow
    async def order(name: str) -> str:
        try:
            return await slow(name)
        except hf.errors.ActivityFailed as failure:
            return str(failure.info.message)

    with caplog.at_level(logging.WARNING, logger="holdfast.activities"):
        async with variant.node(app, activities_at_once=1) as node:
            first = await app.start(order, "first")
            assert await first.result() == "activity 'slow' took longer than 400 ms"
            second = await app.start(order, "second")
            await wait_for_event(second, "StepStarted")
            assert node._slots.free == 0
            assert entered == ["first"]
            gate.set()
            assert await second.result() == "second"
    [record] = caplog.records
    assert "'slow' has ended, but its function still runs" in record.message


@pytest.mark.contract("ACT-1")
@pytest.mark.parametrize("problem", [StopIteration(), SystemExit(1), asyncio.CancelledError(), KeyError("gone")])
async def test_whatever_a_function_raises_is_recorded(variant: EngineVariant, problem: BaseException) -> None:
    app = hf.App("shop")

    @app.activity(retry=ONCE)
    def odd() -> None:
        raise problem

    @app.workflow
    async def order() -> str:
        try:
            await odd()
        except hf.errors.ActivityFailed as failure:
            return str(failure.info.code)
        return "fine"

    async with variant.node(app):
        code = await (await app.start(order)).result()
    assert code == ("RuntimeError" if isinstance(problem, StopIteration) else type(problem).__name__)


@pytest.mark.contract("ACT-1", "MSG-4")
async def test_stopping_does_not_wait_for_a_thread(variant: EngineVariant) -> None:
    app = hf.App("shop")
    entered, gate, ended = asyncio.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    @app.activity
    def stuck() -> None:
        loop.call_soon_threadsafe(entered.set)
        gate.wait(20)
        ended.set()

    @app.workflow
    async def order() -> None:
        await stuck()

    try:
        async with variant.node(app, drain_s=0.01):
            await app.start(order)
            await entered.wait()
        assert not ended.is_set()
    finally:
        gate.set()


@pytest.mark.contract("ACT-1")
async def test_a_function_that_says_it_goes_on_hears_that_its_time_is_over(variant: EngineVariant) -> None:
    app = hf.App("shop")
    heard = asyncio.Event()
    loop, pause, begun = asyncio.get_running_loop(), threading.Event(), threading.Event()

    @app.activity(retry=ONCE, schedule_to_close=0.05)
    def steady() -> None:
        begun.set()
        try:
            while not pause.wait(0.002):
                hf.activity_context().heartbeat()
        except asyncio.CancelledError:
            loop.call_soon_threadsafe(heard.set)
            raise

    @app.workflow
    async def order() -> str:
        try:
            await steady()
        except hf.errors.ActivityFailed as failure:
            return str(failure.info.message)
        return "done"

    async with variant.node(app):
        while not begun.is_set():  # on a busy machine its time may be over before it begins
            message = await (await app.start(order)).result()
        await heard.wait()
    assert message == "activity 'steady' was not done within 50 ms of being scheduled"
