"""Activities whose outcome somebody reports later, by a token: recorded once, whatever comes in between."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest

import holdfast as hf
from holdfast.core import events as e
from holdfast.core.tokens import ActivityToken, read_token, write_token
from holdfast.errors import ActivityFailed, Conflict, InvalidInput, NotFound, RunTerminal
from holdfast.store.port import Store
from tests.engine.place import Place, types, until_event

QUICK = hf.Retry(max_attempts=3, initial_ms=1, jitter=0.0)


class Office:
    """An app that asks somebody to sign, and gives away a token for each attempt."""

    def __init__(self, **options: Any) -> None:
        self.tokens: asyncio.Queue[str] = asyncio.Queue()
        self.seen: list[Any] = []
        self.app = app = hf.App("office")

        @app.activity(**{"retry": QUICK, **options})
        async def sign(paper: str) -> str:
            context = hf.activity_context()
            self.seen.append(context.details)
            context.heartbeat(f"asked {context.attempt} times")
            self.tokens.put_nowait(context.token)
            context.complete_later()

        @app.workflow
        async def contract(paper: str) -> str:
            try:
                return f"signed by {await sign(paper)}"
            except ActivityFailed as failure:
                return f"{failure.info.code}: {failure.info.message}"

        self.contract = contract


@pytest.mark.contract("ACT-1")
async def test_the_outcome_comes_later_and_the_run_is_parked_until_then(place: Place) -> None:
    office = Office()
    async with place.opened() as store, place.node(office.app, store):
        run = await office.app.start(office.contract, "lease")
        token = await office.tokens.get()
        await until_event(run, "StepDetached")
        [loaded] = await store.load([run.run_id])
        assert loaded is not None
        assert loaded.head.lease_owner is None
        await office.app.complete_activity(token, "ann")
        assert await run.result() == "signed by ann"
        assert await types(run) == [
            "RunQueued",
            "RunStarted",
            "StepStarted",
            "StepDetached",
            "StepCompleted",
            "RunCompleted",
        ]
        [after] = await store.load([run.run_id])
        assert after is not None
        assert after.details == {}


@pytest.mark.contract("ACT-1")
async def test_an_outcome_that_comes_before_the_run_knows_of_the_detachment_is_not_lost(place: Place) -> None:
    app = hf.App("office")

    @app.activity
    async def sign() -> str:
        context = hf.activity_context()
        await app.complete_activity(context.token, "ann")
        context.complete_later()

    @app.workflow
    async def contract() -> str:
        return await sign()

    async with place.node(app):
        for _ in range(20):
            assert await (await app.start(contract)).result() == "ann"


@pytest.mark.contract("ACT-1")
@pytest.mark.parametrize("is_sync", [True, False])
async def test_also_from_a_thread_and_from_one_of_several_tasks(place: Place, is_sync: bool) -> None:
    app = hf.App("office")
    tokens: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def hand_out() -> str:
        context = hf.activity_context()
        loop.call_soon_threadsafe(tokens.put_nowait, context.token)
        context.complete_later()

    async def ask() -> str:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(hand_out))
        return "never"

    activity = app.activity(hand_out if is_sync else ask)

    @app.workflow
    async def contract() -> str:
        return str(await activity())

    async with place.node(app):
        run = await app.start(contract)
        await app.complete_activity(await tokens.get(), "ann")
        assert await run.result() == "ann"


@pytest.mark.contract("ACT-1")
async def test_the_first_outcome_stands_and_the_second_reporter_is_told(place: Place) -> None:
    office = Office()
    async with place.node(office.app):
        app = office.app
        run = await app.start(office.contract, "lease")
        token = await office.tokens.get()
        await until_event(run, "StepDetached")
        answers = await asyncio.gather(
            app.complete_activity(token, "ann"),
            app.complete_activity(token, "bob"),
            app.fail_activity(token, "no"),
            return_exceptions=True,
        )
        assert answers[0] is None
        assert all(isinstance(answer, Conflict | RunTerminal) for answer in answers[1:])
        assert await run.result() == "signed by ann"
        with pytest.raises(RunTerminal):
            await app.complete_activity(token, "bob")
        assert (await types(run)).count("StepCompleted") == 1


@pytest.mark.contract("ACT-1")
async def test_a_step_that_is_closed_takes_no_outcome(place: Place) -> None:
    app = hf.App("office")
    tokens: asyncio.Queue[str] = asyncio.Queue()

    @app.activity
    async def sign() -> str:
        tokens.put_nowait(hf.activity_context().token)
        hf.activity_context().complete_later()

    @app.workflow
    async def contract() -> str:
        try:
            async with asyncio.timeout(0.01):
                return await sign()
        except TimeoutError:
            return await hf.wait_signal("go", str)

    async with place.node(app):
        run = await app.start(contract)
        token = await tokens.get()
        await until_event(run, "SignalWaiting")
        with pytest.raises(Conflict, match="is closed"):
            await app.complete_activity(token, "ann")
        await run.signal("go", "on")
        assert await run.result() == "on"


@pytest.mark.contract("ACT-1", "ATT-1")
async def test_a_failure_is_tried_again_with_a_new_token(place: Place) -> None:
    office = Office()
    async with place.node(office.app):
        app = office.app
        run = await app.start(office.contract, "lease")
        tokens = [await office.tokens.get()]
        await app.fail_activity(tokens[0], "the pen is empty")
        tokens.append(await office.tokens.get())
        with pytest.raises(Conflict, match="has come to attempt 2"):
            await app.fail_activity(tokens[0], "again")
        await app.fail_activity(tokens[1], ConnectionError("nobody there"))
        tokens.append(await office.tokens.get())
        assert [read_token(token).engine_attempt_id for token in tokens] == [1, 2, 3]
        await app.fail_activity(tokens[2], "enough")
        assert await run.result() == "ActivityError: enough"
        errors = [event.data.error for event in await run.events() if isinstance(event.data, e.StepRetried)]
    assert [error.code for error in errors if error] == ["ActivityError", "ConnectionError"]
    assert office.seen == [None, "asked 1 times", "asked 2 times"]


@pytest.mark.contract("ACT-1")
async def test_what_cannot_be_mended_is_not_tried_again(place: Place) -> None:
    office = Office()
    async with place.node(office.app):
        run = await office.app.start(office.contract, "lease")
        await office.app.fail_activity(await office.tokens.get(), hf.NonRetryable("refused"))
        assert await run.result() == "NonRetryable: refused"


@pytest.mark.contract("ACT-1", "TMR-1")
@pytest.mark.parametrize("queue", ["", "desk"])
async def test_an_outcome_that_is_not_reported_in_time_fails_the_attempt(place: Place, queue: str) -> None:
    office = Office(timeout=0.03, queue=queue)
    async with place.node(office.app, queues=("desk",)):
        run = await office.app.start(office.contract, "lease")
        assert await run.result() == "TimeoutError: the outcome of activity 'sign' was not reported in time"
        events = await run.events()
    kinds = [event.event_type for event in events if event.step_id]
    assert kinds == [
        "StepStarted",
        *("StepDetached", "StepRetried") * 2,
        "StepDetached",
        "StepFailed",
    ]
    assert [e.engine_attempt_id for e in events if e.event_type == "StepDetached"] == [1, 2, 3]
    for detached, following in pairwise(events):
        if isinstance(detached.data, e.StepDetached):
            assert detached.data.until is not None
            assert following.emitted_at >= detached.data.until


@pytest.mark.contract("ACT-1")
async def test_the_time_for_the_whole_step_bounds_the_wait_too(place: Place) -> None:
    office = Office(schedule_to_close=0.05, retry=hf.Retry(max_attempts=0, initial_ms=1))
    async with place.node(office.app):
        run = await office.app.start(office.contract, "lease")
        assert (await run.result()).startswith("TimeoutError")
        assert (await types(run)).count("StepDetached") == 1


@pytest.mark.contract("ACT-1")
async def test_a_success_after_the_attempts_time_still_counts_while_the_step_is_open(place: Place) -> None:
    office = Office(timeout=0.05, retry=hf.Retry(max_attempts=2, initial_ms=60_000, jitter=0.0))
    async with place.node(office.app):
        run = await office.app.start(office.contract, "lease")
        token = await office.tokens.get()
        await until_event(run, "StepRetried")
        await office.app.complete_activity(token, "ann")
        assert await run.result() == "signed by ann"


@pytest.mark.contract("ACT-1", "OWN-3")
async def test_another_node_does_not_ask_again(place: Place) -> None:
    first, second = Office(), Office()
    async with place.opened() as store:
        async with place.node(first.app, store):
            run_id = (await first.app.start(first.contract, "lease")).run_id
            token = await first.tokens.get()
            await until_event(first.app.run(run_id), "StepDetached")
        async with place.node(second.app, store):
            run = second.app.run(run_id)
            await run.signal("anything", 1)  # it takes a turn, and has every reason to look
            await until_consumed(store, run_id)
            await second.app.complete_activity(token, "ann")
            assert await run.result() == "signed by ann"
    assert second.seen == []


async def until_consumed(store: Store, run_id: str) -> None:
    """Wait until nothing is left for the run to look at."""
    while True:
        [loaded] = await store.load([run_id])
        assert loaded is not None
        if loaded.head.ready_at is None:
            return
        await asyncio.sleep(0.002)


@pytest.mark.contract("ACT-1", "OWN-3")
@pytest.mark.parametrize("is_completed", [True, False])
async def test_a_crash_before_the_detachment_is_recorded_loses_no_outcome(place: Place, is_completed: bool) -> None:
    """The node is gone between the end of the activity and the commit that would have said so."""
    first, second = Office(), Office()
    async with place.opened() as store:
        async with place.node(first.app, store, drain_s=0.01) as node:
            node._workers._report = lambda work, outcome: None  # word of it never arrives
            run_id = (await first.app.start(first.contract, "lease")).run_id
            token = await first.tokens.get()
            if is_completed:
                pump = next(task for task in node._tasks if task.get_name() == "pump")
                pump.cancel()
                await first.app.complete_activity(token, "ann")
        async with place.node(second.app, store):
            run = second.app.run(run_id)
            if not is_completed:
                await second.app.complete_activity(await second.tokens.get(), "bob")
            assert await run.result() == ("signed by ann" if is_completed else "signed by bob")
            assert (await types(run)).count("StepCompleted") == 1


@pytest.mark.contract("ACT-1")
async def test_an_activity_from_a_queue_may_be_completed_later_too(place: Place) -> None:
    office, desk = Office(queue="desk"), Office(queue="desk")
    async with place.opened() as store, place.node(office.app, store):
        run = await office.app.start(office.contract, "lease")
        async with place.node(desk.app, store, queues=("desk",), takes_runs=False):
            token = await desk.tokens.get()
            await until_event(run, "StepDetached")
            assert (await store.stats()).jobs == 0
        await office.app.complete_activity(token, "ann")
        assert await run.result() == "signed by ann"
        assert (await store.stats()).jobs == 0


@pytest.mark.contract("API-2")
@pytest.mark.parametrize(
    "token", ["", "nonsense", "é", "W10", "====", write_token(ActivityToken("run-1", "sign", 1, 1)) + "A", 7, None]
)
async def test_a_malformed_token_is_refused(place: Place, token: Any) -> None:
    office = Office()
    with pytest.raises(InvalidInput, match="no node is open"):
        await office.app.complete_activity("any", 1)
    async with place.node(office.app):
        with pytest.raises(InvalidInput, match="not the token of an activity"):
            await office.app.complete_activity(token, "ann")
        with pytest.raises(NotFound):
            await office.app.complete_activity(write_token(ActivityToken("run-1", "sign", 1, 1)), "ann")


@pytest.mark.contract("API-2")
async def test_a_token_of_a_step_that_never_was_is_told_so(place: Place) -> None:
    office = Office()
    async with place.node(office.app):
        run = await office.app.start(office.contract, "lease")
        await office.tokens.get()
        with pytest.raises(Conflict):
            await office.app.complete_activity(write_token(ActivityToken(run.run_id, "other", 1, 1)), "ann")
        with pytest.raises(InvalidInput, match="cannot be stored"):
            await office.app.complete_activity(write_token(ActivityToken(run.run_id, "sign", 1, 1)), object())
