"""Middleware around workflows, activities and what is asked of runs."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

import holdfast as hf
from holdfast.errors import InvalidInput, NotPermitted, RunFailed
from holdfast.store.memory import MemoryStore
from tests.engine.harness import EngineVariant, event_types, wait_for_event

pytestmark = pytest.mark.contract("CTX-2")


def shop() -> tuple[hf.App, Any]:
    """Return an app with an order that adds numbers, in the loop, in a thread and in a queue, and waits between."""
    app = hf.App("shop")

    @app.activity
    async def add(number: int) -> int:
        return number + 1

    @app.activity
    def add_in_thread(number: int) -> int:
        return number + 1

    @app.activity(queue="elsewhere", timeout=timedelta(minutes=1))
    async def add_elsewhere(number: int) -> int:
        return number + 1

    @app.workflow(signals={"go": int})
    async def order(number: int) -> int:
        async def more(by: int) -> int:
            nonlocal number
            number += by
            return number

        hf.on_query("so_far", lambda: number)
        hf.on_update("more", more)
        number = await add_elsewhere(await add_in_thread(await add(number)))
        return number + await hf.wait_signal("go", int)

    return app, order


async def test_middleware_is_called_outermost_first_around_each_attempt(variant: EngineVariant) -> None:
    app, order = shop()
    seen: list[str] = []

    @app.middleware("activity")
    async def outer(call: hf.ActivityCall, call_next: hf.CallNext[hf.ActivityCall]) -> Any:
        assert hf.activity_context().step_id == call.step_id
        seen.append(f"outer {call.activity} {call.arguments} attempt {call.attempt}")
        result = await call_next(call)
        seen.append(f"outer got {result}")
        return result

    @app.middleware("activity")
    async def inner(call: hf.ActivityCall, call_next: hf.CallNext[hf.ActivityCall]) -> Any:
        seen.append("inner")
        return await call_next(call)

    async with variant.node(app, queues=("elsewhere",)):
        run = await app.start(order, 1)
        await run.signal("go", 10)
        assert await run.result() == 14
    expected = []
    for number, name in enumerate(("add", "add_in_thread", "add_elsewhere"), 1):
        expected += [f"outer {name} {{'number': {number}}} attempt 1", "inner", f"outer got {number + 1}"]
    assert seen == expected


async def test_middleware_may_change_arguments_and_results_raise_and_call_again() -> None:
    app = hf.App("changing")

    @app.activity(retry=hf.Retry(max_attempts=1))
    async def halve(number: int) -> int:
        if number % 2:
            raise ValueError("odd")
        return number // 2

    @app.workflow
    async def work(number: int) -> int:
        return await halve(number)

    @app.middleware("activity")
    async def tolerant(call: hf.ActivityCall, call_next: hf.CallNext[hf.ActivityCall]) -> Any:
        if call.arguments["number"] < 0:
            raise hf.NonRetryable("negative")
        try:
            return await call_next(call)
        except ValueError:
            changed = hf.ActivityCall(
                activity=call.activity,
                run_id=call.run_id,
                step_id=call.step_id,
                attempt=call.attempt,
                arguments={"number": call.arguments["number"] - 1},
            )
            return 100 + await call_next(changed)

    async with asyncio.timeout(30), app.node(MemoryStore()):
        assert [await (await app.start(work, number)).result() for number in (4, 5)] == [2, 102]
        with pytest.raises(RunFailed, match="negative"):
            await (await app.start(work, -2)).result()


async def test_time_that_middleware_takes_counts_for_the_attempt() -> None:
    app = hf.App("slow")

    @app.activity(timeout=timedelta(milliseconds=20), retry=hf.Retry(max_attempts=1))
    async def quick() -> None: ...

    @app.workflow
    async def work() -> None:
        await quick()

    @app.middleware("activity")
    async def slow(call: hf.ActivityCall, call_next: hf.CallNext[hf.ActivityCall]) -> Any:
        await asyncio.Event().wait()

    async with asyncio.timeout(30), app.node(MemoryStore()):
        with pytest.raises(RunFailed, match="took longer than 20 ms"):
            await (await app.start(work)).result()


async def test_middleware_around_a_workflow_is_its_code_and_runs_at_replay(variant: EngineVariant) -> None:
    app, order = shop()

    @app.activity
    async def audit(what: str) -> str:
        return what

    @app.middleware("workflow")
    async def audited(call: hf.WorkflowCall, call_next: hf.CallNext[hf.WorkflowCall]) -> Any:
        assert hf.run_info().run_id == call.run_id
        begun = await audit(f"{call.workflow} {call.version} begins with {call.arguments['number']}")
        result = await call_next(call)
        return result + (1000 if begun.endswith("begins with 1") and hf.context()["user"] == "ann" else 0)

    async with variant.opened() as store:
        async with variant.node(app, store, queues=("elsewhere",)):
            run = await app.start(order, 1, context={"user": "ann"})
            await wait_for_event(run, "SignalWaiting")
        async with variant.node(app, store, queues=("elsewhere",)):  # which rebuilds it by replay
            run = app.run(run.run_id)
            await run.signal("go", 10)
            assert await run.result() == 1014
            steps = [event.step_id for event in await run.events() if event.event_type == "StepStarted"]
            assert steps == ["audit", "add", "add_in_thread", "add_elsewhere"]


async def test_middleware_goes_on_with_a_workflow_that_rotates_and_is_cancelled(variant: EngineVariant) -> None:
    app, begun = hf.App("rotating"), list[int]()

    @app.workflow
    async def count(number: int) -> None:
        if number < 2:
            hf.continue_as_new(number + 1)
        await hf.wait_signal("never")

    @app.middleware("workflow")
    async def noted(call: hf.WorkflowCall, call_next: hf.CallNext[hf.WorkflowCall]) -> Any:
        begun.append(call.arguments["number"])
        try:
            return await call_next(call)
        finally:
            begun.append(-call.arguments["number"])

    async with variant.node(app):
        run = await app.start(count, 0)
        await wait_for_event(run, "SignalWaiting")
        await run.cancel()
        await wait_for_event(run, "RunCancelled")
        assert (await event_types(run)).count("ContinuedAsNew") == 2
    assert {0, 1, 2} <= set(begun)
    assert begun[-1] == -2


async def test_middleware_around_clients_sees_each_verb_and_sets_the_context(variant: EngineVariant) -> None:
    app, order = shop()
    seen: list[tuple[str, str, Any]] = []

    @app.middleware("client")
    async def noted(call: hf.ClientCall, call_next: hf.CallNext[hf.ClientCall]) -> Any:
        seen.append((call.verb, call.name or call.workflow, call.input))
        return await call_next(call.with_context(user="ann") if call.verb == "start" else call)

    async with variant.node(app, queues=("elsewhere",)):
        run = await app.start(order, 1, context={"order": "7"})
        await wait_for_event(run, "SignalWaiting")
        assert await run.query("so_far") == 4
        assert await run.update("more", by=2) == 6
        await run.pause()
        await run.resume()
        [sent] = await app.signal_many([{"run_id": run.run_id, "name": "go", "payload": 10}])
        assert not isinstance(sent, Exception)
        assert await run.result() == 14
        [first, *_] = await run.events()
        assert bytes(getattr(first.data, "context", b"")) == b'{"order":"7","user":"ann"}'
    assert seen == [
        ("start", "order", {"number": 1}),
        ("query", "so_far", {}),
        ("update", "more", {"by": 2}),
        ("command", "PAUSE", None),
        ("command", "RESUME", None),
        ("signal", "go", 10),
    ]


async def test_middleware_around_clients_may_refuse() -> None:
    app, order = shop()

    @app.middleware("client")
    async def closed(call: hf.ClientCall, call_next: hf.CallNext[hf.ClientCall]) -> Any:
        raise NotPermitted(f"no {call.verb} at night")

    store = MemoryStore()
    async with asyncio.timeout(30), app.node(store):
        with pytest.raises(NotPermitted, match="no start at night"):
            await app.start(order, 1)
        [answer] = await app.signal_many([{"run_id": "r", "name": "go", "payload": 1}])
        assert isinstance(answer, NotPermitted)


@pytest.mark.contract("SIG-9", "CTX-2")
async def test_each_signal_of_many_is_answered_by_itself_beside_middleware(variant: EngineVariant) -> None:
    app, order = shop()

    @app.middleware("client")
    async def through(call: hf.ClientCall, call_next: hf.CallNext[hf.ClientCall]) -> Any:
        return await call_next(call)

    async with variant.node(app, queues=("elsewhere",)):
        run = await app.start(order, 1)
        malformed: list[Any] = [
            5,
            {},
            {"run_id": 5, "name": "go"},
            {"run_id": run.run_id, "name": "go", "payload": {1: 2}},
        ]
        sent = await app.signal_many([*malformed, {"run_id": run.run_id, "name": "go", "payload": 10}])
        assert [type(each) for each in sent[:-1]] == [InvalidInput] * len(malformed)
        assert not isinstance(sent[-1], Exception)
        assert await run.result() == 14


def test_what_is_no_middleware_is_refused() -> None:
    app = hf.App("wrong")
    wrong: Any = "http"
    with pytest.raises(InvalidInput, match='"workflow", "activity" or "client"'):
        app.middleware(wrong)
    plain: Any = lambda call, call_next: None  # noqa: E731
    with pytest.raises(InvalidInput, match="async function"):
        app.middleware("activity")(plain)
