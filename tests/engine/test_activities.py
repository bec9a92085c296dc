"""Activities through a real node: results, failures, retries, timeouts, and what cannot be kept."""

import asyncio
import threading
from dataclasses import dataclass
from datetime import timedelta

import pytest

import holdfast as hf
from holdfast.core import codec
from holdfast.core import events as e
from holdfast.errors import ActivityFailed, InvalidInput, NotDurable, RunFailed
from tests.engine.harness import EngineVariant, event_types, wait_for_event

QUICK = hf.Retry(max_attempts=3, initial_ms=1, jitter=0.0)


@dataclass
class Order:
    id: str
    cents: int


@pytest.mark.contract("ACT-1", "WF-1")
async def test_async_and_sync_activities_return_typed_results(variant: EngineVariant) -> None:
    app = hf.App("shop")
    threads: list[str] = []

    @app.activity
    async def price(order: Order) -> Order:
        threads.append(threading.current_thread().name)
        return Order(order.id, order.cents * 2)

    @app.activity
    def tax(order: Order) -> int:
        threads.append(threading.current_thread().name)
        return order.cents // 10

    @app.workflow
    async def total(order: Order) -> int:
        priced = await price(order)
        assert isinstance(priced, Order)
        return priced.cents + await tax(priced)

    async with variant.node(app):
        run = await app.start(total, Order("o-1", 100))
        assert await run.result() == 220
    assert threads[0] == threading.main_thread().name != threads[1]


@pytest.mark.contract("ACT-1")
async def test_a_failure_is_retried_with_backoff_and_counted(variant: EngineVariant) -> None:
    app = hf.App("shop")
    attempts: list[int] = []

    @app.activity(retry=QUICK)
    async def flaky() -> str:
        attempts.append(hf.activity_context().attempt)
        if len(attempts) < 3:
            raise ConnectionError("try again")
        return "there"

    @app.workflow
    async def patient() -> str:
        return await flaky()

    async with variant.node(app):
        run = await app.start(patient)
        assert await run.result() == "there"
        retried = [event for event in await run.events() if isinstance(event.data, e.StepRetried)]
    assert attempts == [1, 2, 3]
    assert [event.data.error.code for event in retried] == ["ConnectionError"] * 2  # type: ignore[attr-defined]
    delays = [event.data.due_at - event.emitted_at for event in retried]  # type: ignore[attr-defined]
    assert delays == [1_000, 2_000]


class CardDeclined(hf.NonRetryable):
    pass


@pytest.mark.contract("ACT-1")
@pytest.mark.parametrize(
    ("problem", "calls"), [(CardDeclined("no"), 1), (ValueError("bad"), 1), (ConnectionError("down"), 3)]
)
async def test_what_cannot_be_mended_is_not_retried(variant: EngineVariant, problem: Exception, calls: int) -> None:
    app = hf.App("shop")
    called: list[int] = []

    @app.activity(retry=hf.Retry(max_attempts=3, initial_ms=1, non_retryable=("ValueError",)))
    async def charge() -> None:
        called.append(1)
        raise problem

    @app.workflow
    async def order() -> str:
        try:
            await charge()
        except ActivityFailed as failure:
            return f"{failure.info.code}: {failure.info.message}"
        return "charged"

    async with variant.node(app):
        assert await (await app.start(order)).result() == f"{type(problem).__name__}: {problem}"
    assert len(called) == calls


@pytest.mark.contract("ACT-1")
async def test_options_can_be_changed_for_one_call(variant: EngineVariant) -> None:
    app = hf.App("shop")
    called: list[int] = []

    @app.activity(retry=hf.Retry(max_attempts=5, initial_ms=1))
    async def broken() -> None:
        called.append(1)
        raise ConnectionError

    @app.workflow
    async def once() -> str:
        try:
            await broken.options(retry=hf.Retry(max_attempts=1))()
        except ActivityFailed:
            return "given up"
        return "fine"

    async with variant.node(app):
        assert await (await app.start(once)).result() == "given up"
    assert len(called) == 1
    with pytest.raises(InvalidInput, match="unknown activity option 'retires'"):
        broken.options(retires=3)


@pytest.mark.contract("ACT-1")
@pytest.mark.parametrize("option", ["timeout", "schedule_to_close"])
async def test_an_activity_that_takes_too_long_is_stopped(variant: EngineVariant, option: str) -> None:
    app = hf.App("shop")
    begun: list[str] = []
    stopped: list[str] = []

    @app.activity(retry=hf.Retry(max_attempts=1))
    async def slow() -> None:
        begun.append("begun")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            stopped.append("stopped")
            raise

    @app.workflow
    async def impatient() -> str:
        try:
            await slow.options(**{option: timedelta(milliseconds=20)})()
        except ActivityFailed as failure:
            return str(failure.info.code)
        return "done"

    async with variant.node(app), asyncio.timeout(60):
        while not begun:  # on a busy machine the time may be over before the attempt begins
            assert await (await app.start(impatient)).result() == "TimeoutError"
    assert len(stopped) == len(begun)


@pytest.mark.contract("ACT-1")
async def test_schedule_to_close_covers_all_attempts_together(variant: EngineVariant) -> None:
    app = hf.App("shop")
    called: list[int] = []

    @app.activity(retry=hf.Retry(max_attempts=0, initial_ms=20, factor=1.0, jitter=0.0))
    async def broken() -> None:
        called.append(1)
        raise ConnectionError

    @app.workflow
    async def bounded(limit_s: float) -> str:
        try:
            await broken.options(schedule_to_close=limit_s)()
        except ActivityFailed:
            return "given up"
        return "fine"

    limit_s = 0.4
    async with variant.node(app):
        while len(called) < 2:  # a busy machine may need longer for the first attempt alone
            called.clear()
            limit_s *= 2
            assert await (await app.start(bounded, limit_s)).result() == "given up"
    assert len(called) - 1 <= limit_s * 1_000 / 20, "there is a delay before each attempt but the first"


@pytest.mark.contract("ACT-1", "API-2")
@pytest.mark.parametrize(
    "value", [object(), float("nan"), {1, object()}, "\ud800"], ids=["object", "nan", "set", "half"]
)
async def test_a_result_that_cannot_be_kept_fails_the_step_and_says_so(variant: EngineVariant, value: object) -> None:
    app = hf.App("shop")
    called: list[int] = []

    @app.activity(retry=QUICK)
    async def odd() -> object:
        called.append(1)
        return value

    @app.workflow
    async def order() -> str:
        try:
            await odd()
        except ActivityFailed as failure:
            return str(failure.info.message)
        return "kept"

    async with variant.node(app):
        message = await (await app.start(order)).result()
    assert "the result of activity 'odd'" in message
    assert len(called) == 1


@pytest.mark.contract("API-2")
async def test_arguments_that_do_not_fit_are_refused_where_they_are_given(variant: EngineVariant) -> None:
    app = hf.App("shop")

    @app.activity
    async def charge(cents: int) -> int:
        raise AssertionError("never called")

    @app.workflow
    async def order(cents: int) -> str:
        try:
            await charge("many")  # type: ignore[arg-type]
        except InvalidInput as problem:
            return problem.message
        return "charged"

    async with variant.node(app):
        run = await app.start(order, 1)
        assert "does not fit" in await run.result()
        assert "StepStarted" not in await event_types(run)
        with pytest.raises(InvalidInput, match="does not fit"):
            await app.start(order, "one")
        with pytest.raises(InvalidInput, match="missing a required argument"):
            await app.start(order)


class Strange(Exception):
    code = 404  # as in urllib's HTTPError

    def __str__(self) -> str:
        raise RuntimeError("not even that")


@pytest.mark.contract("ACT-1", "API-2")
@pytest.mark.parametrize("problem", [Strange(), ValueError("half \ud800"), ValueError("x" * 100_000)])
async def test_whatever_an_activity_raises_can_be_recorded_and_read(variant: EngineVariant, problem: Exception) -> None:
    app = hf.App("shop")

    @app.activity(retry=hf.Retry(max_attempts=1))
    async def bad() -> None:
        raise problem

    @app.workflow
    async def order() -> None:
        await bad()

    async with variant.node(app):
        run = await app.start(order)
        with pytest.raises(RunFailed) as caught:
            await run.result()
        failed = await wait_for_event(run, "StepFailed")
    assert isinstance(failed.data, e.StepFailed)
    assert failed.data.error.code == type(problem).__name__
    assert codec.decode_body("StepFailed", 1, codec.encode_body(failed.data)) == failed.data
    assert caught.value.info.code == "ActivityFailed"
    assert caught.value.info.cause == failed.data.error


async def test_an_activity_is_a_plain_function_outside_a_workflow() -> None:
    app = hf.App("shop")

    @app.activity
    def double(n: int) -> int:
        return 2 * n

    @app.workflow
    async def twice(n: int) -> int:
        return await double(await double(n))

    assert await twice.plain(3) == 12
    with pytest.raises(NotDurable):
        hf.activity_context()


@pytest.mark.contract("ACT-1")
@pytest.mark.parametrize("problem", [asyncio.CancelledError(), SystemExit(1)])
async def test_an_activity_that_raises_what_only_the_engine_should_is_a_failure_like_any_other(
    variant: EngineVariant, problem: BaseException
) -> None:
    app = hf.App("shop")

    @app.activity(retry=hf.Retry(max_attempts=1))
    async def odd() -> None:
        raise problem

    @app.workflow
    async def order() -> str:
        try:
            await odd()
        except ActivityFailed as failure:
            return str(failure.info.code)
        return "fine"

    async with variant.node(app):
        assert await (await app.start(order)).result() == type(problem).__name__
