"""Workflows through a real node: time, chance, rotation, cancellation, compensation, pausing, starting, failing."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

import holdfast as hf
from holdfast.core import events as e
from holdfast.core.state import PAUSED
from holdfast.errors import ActivityFailed, Conflict, InvalidInput, RunCancelled, RunFailed
from tests.engine.harness import EngineVariant, event_types, wait_for_event, wait_for_history, wait_for_status

ONCE = hf.Retry(max_attempts=1)


@pytest.mark.contract("TMR-1", "WF-1")
async def test_sleeping_and_timing_out_take_the_time_they_should(variant: EngineVariant) -> None:
    app = hf.App("time")

    @app.workflow
    async def sleepy() -> str:
        began = hf.now()
        await hf.sleep(timedelta(milliseconds=20))
        await asyncio.sleep(0.02)
        assert hf.now() - began >= timedelta(milliseconds=40)
        try:
            async with asyncio.timeout(0.02):
                await hf.sleep(60)
        except TimeoutError:
            return "late"
        return "done"

    async with variant.node(app):
        run = await app.start(sleepy)
        assert await run.result() == "late"
        fired = [event for event in await run.events() if event.event_type == "TimerFired"]
        assert len(fired) == 3


@pytest.mark.contract("WF-2")
async def test_time_ids_and_chance_are_the_same_on_every_replay(variant: EngineVariant) -> None:
    app = hf.App("chance")
    seen: list[list[Any]] = []

    @app.activity
    async def nothing() -> None:
        return None

    @app.workflow
    async def draws() -> list[Any]:
        drawn: list[Any] = []
        for _ in range(3):
            drawn += [str(hf.uuid4()), hf.random().random(), hf.now().isoformat()]
            seen.append(list(drawn))
            await nothing()
        return drawn

    async with variant.node(app):
        result = await (await app.start(draws, run_id="run-1")).result()
        other = await (await app.start(draws, run_id="run-2")).result()
    for drawn in seen:
        assert drawn in (result[: len(drawn)], other[: len(drawn)])
    assert len(set(result[::3] + other[::3])) == 6
    assert len(set(result[1::3] + other[1::3])) == 6


# --- rotation


@pytest.mark.contract("CAN-1", "WF-4")
async def test_a_rotation_keeps_the_run_its_counters_and_its_signals(variant: EngineVariant) -> None:
    app = hf.App("rounds")

    @app.activity
    async def work(number: int) -> int:
        return number * 10

    @app.workflow
    async def rounds(number: int, seen: list[int]) -> list[int]:
        seen = [*seen, await hf.wait_signal("go", int), await work(number)]
        if number < 4:
            hf.continue_as_new(number + 1, seen)
        return seen

    async with variant.node(app):
        run = await app.start(rounds, 0, [])
        for number in range(5):
            await run.signal("go", number)
        assert await run.result() == [0, 0, 1, 10, 2, 20, 3, 30, 4, 40]
        names = await event_types(run)
        assert names.count("ContinuedAsNew") == 4
        assert names.count("SignalReceived") == 5


@pytest.mark.contract("CAN-1", "WF-4")
async def test_a_rotation_inside_a_task_group_or_a_saga_is_a_rotation(variant: EngineVariant) -> None:
    app = hf.App("rounds")

    @app.activity
    async def work() -> None:
        return None

    @app.workflow
    async def rounds(number: int) -> int:
        if number < 3:
            async with hf.Saga() as saga, asyncio.TaskGroup() as group:
                saga.undo(work)
                group.create_task(work())
                await work()
                hf.continue_as_new(number + 1)
        return number

    async with variant.node(app):
        assert await (await app.start(rounds, 0)).result() == 3


@pytest.mark.contract("CAN-1", "WF-4", "WF-6")
async def test_an_update_and_a_cancellation_survive_a_rotation(variant: EngineVariant) -> None:
    app = hf.App("rounds")

    @app.activity
    async def work() -> int:
        return 1

    @app.workflow
    async def rounds(number: int) -> int:
        total = number

        async def add(by: int) -> int:
            nonlocal total
            total += by + await work() - 1
            return total

        hf.on_update("add", add)
        try:
            await hf.wait_until(lambda: total > number)
        except asyncio.CancelledError:
            if total < 100:
                hf.continue_as_new(total + 100)  # does not heed it: the next stretch is cancelled again
            raise
        hf.continue_as_new(total)

    async with variant.node(app):
        run = await app.start(rounds, 0)
        assert [await run.update("add", by=n) for n in (1, 2, 3)] == [1, 3, 6]
        await wait_for_history(run, lambda events: sum(event.event_type == "ContinuedAsNew" for event in events) == 3)
        await run.cancel("enough")
        with pytest.raises(RunCancelled):
            await run.result()
        names = await event_types(run)
        assert names[names.index("RunCancelRequested") :].count("ContinuedAsNew") == 1


@pytest.mark.contract("CAN-1", "WF-2")
async def test_a_workflow_that_begins_again_for_ever_is_paused(variant: EngineVariant) -> None:
    app = hf.App("rounds")

    @app.workflow
    async def rounds(number: int) -> None:
        hf.continue_as_new(number + 1)

    async with variant.node(app):
        run = await app.start(rounds, 0)
        paused = await wait_for_event(run, "RunPaused")
        assert isinstance(paused.data, e.RunPaused)
        assert paused.data.reason == "RunawayWorkflow"


@pytest.mark.contract("CAN-1", "WF-4")
async def test_a_cancellation_that_a_rotation_did_not_heed_ends_the_next_stretch(variant: EngineVariant) -> None:
    app = hf.App("rounds")
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
                hf.continue_as_new(1)
            raise

    async with variant.node(app):
        run = await app.start(rounds, 0)
        await wait_for_event(run, "TimerStarted")
        await run.cancel()
        with pytest.raises(RunCancelled):
            await run.result()
    assert told == [0, 1]


# --- cancellation and compensation


@pytest.mark.contract("WF-4")
async def test_a_cancelled_run_may_clean_up_first_and_asking_twice_is_harmless(variant: EngineVariant) -> None:
    app = hf.App("cancel")
    cleaned: list[str] = []

    @app.activity
    async def clean(what: str) -> None:
        cleaned.append(what)

    @app.workflow
    async def careful() -> None:
        try:
            await hf.sleep(60)
        finally:
            await asyncio.shield(clean("one"))
            await clean("two")

    async with variant.node(app):
        run = await app.start(careful)
        await wait_for_event(run, "TimerStarted")
        await run.cancel("enough", actor="ann")
        await run.cancel("enough", actor="bob")
        with pytest.raises(RunCancelled):
            await run.result()
        assert (await event_types(run)).count("RunCancelRequested") == 1
    assert cleaned == ["one", "two"]


@pytest.mark.contract("WF-4", "ACT-1")
async def test_an_activity_that_nobody_waits_for_any_more_is_cancelled(variant: EngineVariant) -> None:
    app = hf.App("cancel")
    stopped = asyncio.Event()

    @app.activity
    async def endless() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            stopped.set()

    @app.workflow
    async def impatient() -> str:
        async with asyncio.timeout(0.02):
            await endless()
        return "never"

    async with variant.node(app):
        with pytest.raises(RunFailed, match="TimeoutError"):
            await (await app.start(impatient)).result()
        async with asyncio.timeout(60):
            await stopped.wait()


def saga_app(undone: list[str], *, is_broken: bool = False) -> tuple[hf.App, Any]:
    app = hf.App("saga")

    @app.activity
    async def do(what: str) -> str:
        return what

    @app.activity(retry=ONCE)
    async def undo(what: str) -> None:
        undone.append(what)
        if is_broken and what == "two":
            raise OSError("cannot undo two")

    @app.activity(retry=ONCE)
    async def break_down() -> None:
        raise ValueError("it broke")

    @app.workflow
    async def book(waits: bool) -> None:
        async with hf.Saga() as saga:
            for what in ("one", "two", "three"):
                await do(what)
                saga.undo(undo, what)
            if waits:
                await hf.sleep(60)
            await break_down()

    return app, book


@pytest.mark.contract("WF-4")
@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_what_was_done_is_undone_in_reverse_order(variant: EngineVariant, is_cancelled: bool) -> None:
    undone: list[str] = []
    app, book = saga_app(undone)
    async with variant.node(app):
        run = await app.start(book, is_cancelled)
        if is_cancelled:
            await wait_for_event(run, "TimerStarted")
            await run.cancel()
            with pytest.raises(RunCancelled):
                await run.result()
        else:
            with pytest.raises(RunFailed, match="it broke"):
                await run.result()
    assert undone == ["three", "two", "one"]


@pytest.mark.contract("WF-4")
async def test_when_undoing_fails_both_errors_are_reported_and_the_rest_is_undone(variant: EngineVariant) -> None:
    undone: list[str] = []
    app, book = saga_app(undone, is_broken=True)
    async with variant.node(app):
        with pytest.raises(RunFailed) as caught:
            await (await app.start(book, False)).result()
    assert undone == ["three", "two", "one"]
    assert "it broke" in caught.value.info.message
    assert "cannot undo two" in caught.value.info.message


# --- pausing


@pytest.mark.contract("WF-7", "SIG-13")
async def test_a_paused_run_records_results_and_goes_on_when_it_is_resumed(variant: EngineVariant) -> None:
    app = hf.App("pause")
    gate, after = asyncio.Event(), []

    @app.activity
    async def slow() -> str:
        await gate.wait()
        return "came while paused"

    @app.activity
    async def next_one() -> None:
        after.append(1)

    @app.workflow
    async def two_steps() -> str:
        first, signal = await asyncio.gather(slow(), hf.wait_signal("go", str))
        await next_one()
        return f"{first}, {signal}"

    async with variant.node(app):
        run = await app.start(two_steps)
        await wait_for_event(run, "SignalWaiting")
        await run.pause("lunch", actor="ann")
        await wait_for_status(run, PAUSED)
        await run.signal("go", "sent while paused")
        gate.set()
        await wait_for_event(run, "StepCompleted")
        assert after == []
        assert "SignalReceived" not in await event_types(run)
        await run.resume()
        assert await run.result() == "came while paused, sent while paused"


@pytest.mark.contract("WF-7", "SIG-13")
async def test_a_race_that_both_sides_won_during_a_pause_is_decided_once(variant: EngineVariant) -> None:
    app = hf.App("pause")
    gate = asyncio.Event()

    @app.activity
    async def slow(name: str) -> str:
        await gate.wait()
        return name

    @app.workflow
    async def race() -> str:
        tasks = [asyncio.create_task(slow(name)) for name in ("a", "b")]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await hf.sleep(0.01)
        return ",".join(sorted(task.result() for task in done))

    async with variant.node(app):
        run = await app.start(race)
        await wait_for_event(run, "StepStarted", times=2)
        await run.pause()
        await wait_for_status(run, PAUSED)
        gate.set()
        await wait_for_event(run, "StepCompleted", times=2)
        await run.resume()
        assert await run.result() in ("a", "b", "a,b")


# --- starting and failing


@pytest.mark.contract("QUE-1")
async def test_the_same_request_starts_one_run(variant: EngineVariant) -> None:
    app = hf.App("start")

    @app.workflow
    async def order(number: int) -> int:
        return number

    async with variant.node(app):
        first = await app.start(order, 1, request_id="req-1")
        again = await app.start(order, 1, request_id="req-1")
        assert again.run_id == first.run_id
        assert (await first.result(), await again.result()) == (1, 1)
        with pytest.raises(Conflict):
            await app.start(order, 2, request_id="req-1")


@pytest.mark.contract("WF-7", "API-2")
async def test_a_failed_run_tells_the_whole_chain_of_causes(variant: EngineVariant) -> None:
    app = hf.App("fail")

    @app.activity(retry=ONCE)
    async def deep() -> None:
        try:
            raise KeyError("the root")
        except KeyError as problem:
            raise OSError("the disk") from problem

    @app.workflow
    async def order() -> None:
        try:
            await deep()
        except ActivityFailed as problem:
            raise hf.WorkflowFailed("the order") from problem

    async with variant.node(app):
        with pytest.raises(RunFailed, match="the order") as caught:
            await (await app.start(order)).result()
    codes, info = [], caught.value.info
    while info is not None:
        codes.append(info.code)
        info = info.cause
    assert codes == ["WorkflowFailed", "ActivityFailed", "OSError", "KeyError"]


@pytest.mark.contract("API-2")
async def test_a_workflow_whose_result_cannot_be_kept_fails_and_says_so(variant: EngineVariant) -> None:
    app = hf.App("fail")

    @app.workflow(on_error="fail")
    async def odd() -> object:
        return object()

    async with variant.node(app):
        with pytest.raises(RunFailed, match="cannot be stored"):
            await (await app.start(odd)).result()


@pytest.mark.contract("WF-3")
async def test_a_new_run_takes_the_patched_way(variant: EngineVariant) -> None:
    app = hf.App("patch")

    @app.activity
    async def work() -> None:
        return None

    @app.workflow
    async def order() -> list[bool]:
        first = hf.patched("faster")
        await work()
        return [first, hf.patched("faster"), hf.patched("later")]

    async with variant.node(app):
        run = await app.start(order)
        assert await run.result() == [True, True, True]
        assert (await event_types(run)).count("MarkerRecorded") == 2


async def test_an_argument_that_does_not_fit_is_named_with_its_field() -> None:
    app = hf.App("arguments")

    @app.workflow
    async def order(item: str, sizes: dict[str, list[int]]) -> None: ...

    sizes: Any = {"a": [1, "large secret"]}
    async with app.node("memory://"):
        with pytest.raises(InvalidInput, match="argument 'sizes' of workflow 'order' does not fit") as caught:
            await app.start(order, "lamp", sizes)
    assert caught.value.message.endswith("Expected `int`, got `str` - at `$.sizes[...][1]`")
    assert caught.value.details["field"] == "sizes"


def test_what_cannot_be_registered_is_refused() -> None:
    app = hf.App("register")

    async def open_ended(*numbers: int) -> None: ...
    async def nameless(number: int, /) -> None: ...
    def plain() -> None: ...

    for function in (open_ended, nameless, plain):
        with pytest.raises(InvalidInput):
            app.workflow(function)  # type: ignore[arg-type]

    @app.workflow
    async def order() -> None: ...

    with pytest.raises(InvalidInput, match="registered twice"):
        app.workflow(order.definition.function)
