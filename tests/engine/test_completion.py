"""Activities whose outcome somebody reports later, by a token: recorded once, whatever comes in between."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, cast

import pytest

import holdfast as hf
from holdfast.client import Client
from holdfast.core import events as e
from holdfast.core.events import Event
from holdfast.core.keys import ActivityToken, read_activity_token, write_activity_token
from holdfast.core.state import TERMINAL
from holdfast.engine.check_histories import check_histories
from holdfast.errors import ActivityFailed, CallerError, Conflict, InvalidInput, NotFound, RunTerminal
from holdfast.store.port import Store, Turn
from holdfast.store.proxy import StoreProxy
from tests.engine.harness import (
    EngineVariant,
    event_types,
    store_with_virtual_time,
    wait_for_event,
    wait_for_history,
)

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
async def test_the_outcome_comes_later_and_the_run_is_parked_until_then(variant: EngineVariant) -> None:
    office = Office()
    async with variant.opened() as store, variant.node(office.app, store):
        run = await office.app.start(office.contract, "lease")
        token = await office.tokens.get()
        await wait_for_event(run, "StepDetached")
        [loaded] = await store.load([run.run_id])
        assert loaded is not None
        assert loaded.head.lease_owner is None
        await office.app.complete_activity(token, "ann")
        assert await run.result() == "signed by ann"
        assert await event_types(run) == [
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
async def test_a_result_of_the_wrong_type_is_refused_and_the_step_waits_on(variant: EngineVariant) -> None:
    office = Office()
    async with variant.node(office.app):
        run = await office.app.start(office.contract, "lease")
        token = await office.tokens.get()
        with pytest.raises(InvalidInput, match="does not fit str"):
            await office.app.complete_activity(token, {"by": "ann"})
        await office.app.complete_activity(token, "ann")
        assert await run.result() == "signed by ann"


@pytest.mark.contract("ACT-1")
async def test_an_outcome_that_comes_before_the_run_knows_of_the_detachment_is_not_lost(variant: EngineVariant) -> None:
    app = hf.App("office")

    @app.activity
    async def sign() -> str:
        context = hf.activity_context()
        await app.complete_activity(context.token, "ann")
        context.complete_later()

    @app.workflow
    async def contract() -> str:
        return await sign()

    async with variant.node(app):
        for _ in range(20):
            assert await (await app.start(contract)).result() == "ann"


@pytest.mark.contract("ACT-1")
@pytest.mark.parametrize("is_sync", [True, False])
async def test_also_from_a_thread_and_from_one_of_several_tasks(variant: EngineVariant, is_sync: bool) -> None:
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

    async with variant.node(app):
        run = await app.start(contract)
        await app.complete_activity(await tokens.get(), "ann")
        assert await run.result() == "ann"


@pytest.mark.contract("ACT-1")
async def test_the_first_outcome_stands_and_the_second_reporter_is_told(variant: EngineVariant) -> None:
    async with variant.opened() as store:
        winner = await first_of_three(store, cached_runs=variant.cached_runs)
    assert winner == "ann" or variant.store.startswith("s3:"), "the one who was the first to report"


@pytest.mark.contract("ACT-1")
@pytest.mark.parametrize("store", ["postgres", "bucket"], indirect=True)
async def test_the_first_outcome_stands_elsewhere_too(store: Store) -> None:
    """Reports go by connections or objects of their own, and any may be the first: who is told so is the winner."""
    await first_of_three(store)


async def first_of_three(store: Store, **options: Any) -> str:
    """Let three report outcomes of one attempt at once; return whose stands. The others are refused, and it is once."""
    office = Office(retry=hf.Retry(max_attempts=1))
    app = office.app
    async with asyncio.timeout(60), app.node(store, options=hf.NodeOptions(**options)):
        run = await app.start(office.contract, "lease")
        token = await office.tokens.get()
        await wait_for_event(run, "StepDetached")
        reports: dict[str, Callable[[], Awaitable[None]]] = {
            "ann": lambda: app.complete_activity(token, "ann"),
            "bob": lambda: app.complete_activity(token, "bob"),
            "nobody": lambda: app.fail_activity(token, "no"),
        }
        answers = await asyncio.gather(*(report() for report in reports.values()), return_exceptions=True)
        [winner] = [who for who, answer in zip(reports, answers, strict=True) if answer is None]
        assert [type(answer) in (Conflict, RunTerminal) for answer in answers].count(True) == 2
        signed = winner != "nobody"
        result = await run.result()
        assert result == f"signed by {winner}" if signed else result.endswith(": no")
        for who, report in reports.items():
            if who == winner:
                await report()  # the first answer may have been lost
            else:
                with pytest.raises(RunTerminal):
                    await report()
        types = await event_types(run)
        assert [types.count("StepCompleted"), types.count("StepFailed")] == [signed, not signed]
        return winner


@pytest.mark.contract("ACT-1")
async def test_a_step_that_is_closed_takes_no_outcome(variant: EngineVariant) -> None:
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

    async with variant.node(app):
        run = await app.start(contract)
        token = await tokens.get()
        await wait_for_event(run, "SignalWaiting")
        with pytest.raises(Conflict, match="is closed"):
            await app.complete_activity(token, "ann")
        await run.signal("go", "on")
        assert await run.result() == "on"


@pytest.mark.contract("ACT-1", "ATT-1")
async def test_a_failure_is_tried_again_with_a_new_token(variant: EngineVariant) -> None:
    office = Office()
    async with variant.node(office.app) as node:
        app, key = office.app, node.completion_key
        run = await app.start(office.contract, "lease")
        tokens = [await office.tokens.get()]
        await app.fail_activity(tokens[0], "the pen is empty")
        tokens.append(await office.tokens.get())
        with pytest.raises(Conflict, match="has come to attempt 2"):
            await app.fail_activity(tokens[0], "again")
        await app.fail_activity(tokens[1], ConnectionError("nobody there"))
        tokens.append(await office.tokens.get())
        assert [read_activity_token(token, key).engine_attempt_id for token in tokens] == [1, 2, 3]
        await app.fail_activity(tokens[2], "enough")
        assert await run.result() == "ActivityError: enough"
        errors = [event.data.error for event in await run.events() if isinstance(event.data, e.StepRetried)]
    assert [error.code for error in errors if error] == ["ActivityError", "ConnectionError"]
    assert office.seen == [None, "asked 1 times", "asked 2 times"]


@pytest.mark.contract("ACT-1")
async def test_what_cannot_be_mended_is_not_tried_again(variant: EngineVariant) -> None:
    office = Office()
    async with variant.node(office.app):
        run = await office.app.start(office.contract, "lease")
        await office.app.fail_activity(await office.tokens.get(), hf.NonRetryable("refused"))
        assert await run.result() == "NonRetryable: refused"


@pytest.mark.contract("ACT-1", "TMR-1")
@pytest.mark.parametrize("queue", ["", "desk"])
async def test_an_outcome_that_is_not_reported_in_time_fails_the_attempt(variant: EngineVariant, queue: str) -> None:
    office = Office(timeout=0.03, queue=queue)
    async with variant.node(office.app, queues=("desk",)):
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
async def test_the_time_for_the_whole_step_bounds_the_wait_too(variant: EngineVariant) -> None:
    bound_s, detached = 0.025, 0
    while not detached:  # on a busy machine the time may be over before the function has ended
        bound_s *= 2
        office = Office(schedule_to_close=bound_s, retry=hf.Retry(max_attempts=0, initial_ms=1))
        async with variant.opened() as store, variant.node(office.app, store):
            run = await office.app.start(office.contract, "lease")
            assert (await run.result()).startswith("TimeoutError")
            detached = (await event_types(run)).count("StepDetached")
    assert detached == 1


@pytest.mark.contract("ACT-1")
async def test_a_success_after_the_attempts_time_still_counts_while_the_step_is_open(variant: EngineVariant) -> None:
    office = Office(timeout=0.05, retry=hf.Retry(max_attempts=2, initial_ms=60_000, jitter=0.0))
    async with variant.node(office.app):
        run = await office.app.start(office.contract, "lease")
        token = await office.tokens.get()
        await wait_for_event(run, "StepRetried")
        await office.app.complete_activity(token, "ann")
        assert await run.result() == "signed by ann"


@pytest.mark.contract("ACT-1", "OWN-3")
async def test_another_node_does_not_ask_again(variant: EngineVariant) -> None:
    first, second = Office(), Office()
    async with variant.opened() as store:
        async with variant.node(first.app, store):
            run_id = (await first.app.start(first.contract, "lease")).run_id
            token = await first.tokens.get()
            await wait_for_event(first.app.run(run_id), "StepDetached")
        async with variant.node(second.app, store):
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
async def test_a_crash_before_the_detachment_is_recorded_loses_no_outcome(
    variant: EngineVariant, is_completed: bool
) -> None:
    """The node is gone between the end of the activity and the commit that would have said so."""
    first, second = Office(), Office()
    async with variant.opened() as store:
        async with variant.node(first.app, store, drain_s=0.01) as node:
            node.owned_runs.executor._report = lambda work, outcome: None  # word of it never arrives
            run_id = (await first.app.start(first.contract, "lease")).run_id
            token = await first.tokens.get()
            if is_completed:
                pump = next(task for task in node._tasks if task.get_name() == "turns")
                pump.cancel()
                await first.app.complete_activity(token, "ann")
        async with variant.node(second.app, store):
            run = second.app.run(run_id)
            if not is_completed:
                await second.app.complete_activity(await second.tokens.get(), "bob")
            assert await run.result() == ("signed by ann" if is_completed else "signed by bob")
            assert (await event_types(run)).count("StepCompleted") == 1


@pytest.mark.contract("ACT-1")
async def test_an_activity_from_a_queue_may_be_completed_later_too(variant: EngineVariant) -> None:
    office, desk = Office(queue="desk"), Office(queue="desk")
    async with variant.opened() as store, variant.node(office.app, store):
        run = await office.app.start(office.contract, "lease")
        async with variant.node(desk.app, store, queues=("desk",), takes_runs=False):
            token = await desk.tokens.get()
            await wait_for_event(run, "StepDetached")
            assert (await store.stats()).jobs == 0
        await office.app.complete_activity(token, "ann")
        assert await run.result() == "signed by ann"
        assert (await store.stats()).jobs == 0


@pytest.mark.contract("API-2")
@pytest.mark.parametrize(
    "token",
    ["", "nonsense", "é", "W10", "====", write_activity_token(ActivityToken("run-1", "sign", 1, 1), "f" * 64), 7, None],
)
async def test_a_malformed_token_is_refused(variant: EngineVariant, token: Any) -> None:
    office = Office()
    with pytest.raises(InvalidInput, match="no node is open"):
        await office.app.complete_activity("any", 1)
    async with variant.node(office.app) as node:
        with pytest.raises(InvalidInput, match="not the token of an activity"):
            await office.app.complete_activity(token, "ann")
        unknown = write_activity_token(ActivityToken("run-1", "sign", 1, 1), node.completion_key)
        with pytest.raises(NotFound):
            await office.app.complete_activity(unknown, "ann")


@pytest.mark.contract("API-2")
async def test_a_token_of_a_step_that_never_was_is_told_so(variant: EngineVariant) -> None:
    office = Office()
    async with variant.node(office.app) as node:
        key = node.completion_key
        run = await office.app.start(office.contract, "lease")
        token = await office.tokens.get()
        with pytest.raises(Conflict):
            await office.app.complete_activity(
                write_activity_token(ActivityToken(run.run_id, "other", 1, 1), key), "ann"
            )
        with pytest.raises(InvalidInput, match="there was none"):
            await office.app.complete_activity(
                write_activity_token(ActivityToken(run.run_id, "sign", 1, 7), key), "ann"
            )
        with pytest.raises(InvalidInput, match="cannot be stored"):
            await office.app.complete_activity(token, object())


@pytest.mark.contract("ACT-1", "FMT-2")
async def test_the_token_of_a_run_that_was_deleted_is_nothing_to_a_later_run_of_its_id(variant: EngineVariant) -> None:
    office = Office()
    async with variant.node(office.app), Client(office.app) as client:
        run = await office.app.start(office.contract, "lease", run_id="paper")
        of_deleted = await office.tokens.get()
        await run.terminate(wait=True)
        await client.runs.delete("paper")
        with pytest.raises(NotFound):
            await office.app.complete_activity(of_deleted, "ann")
        run = await office.app.start(office.contract, "lease", run_id="paper")
        token = await office.tokens.get()
        with pytest.raises(Conflict, match="deleted"):
            await office.app.complete_activity(of_deleted, "ann")
        with pytest.raises(Conflict, match="deleted"):
            await office.app.fail_activity(of_deleted, "no")
        await office.app.complete_activity(token, "bob")
        assert await run.result() == "signed by bob"


# --- what was acknowledged is recorded, whatever comes between the acceptance and the turn


class Closing(StoreProxy):
    """Holds back the next commit that closes the step until something else has happened."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.meanwhile: Callable[[], Awaitable[object]] | None = None

    async def commit(self, turns: Sequence[Turn]) -> Any:
        closes = any(isinstance(event.data, CLOSING) for turn in turns for event in turn.events)
        if closes and self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            await meanwhile()
        return await self.inner.commit(turns)


CLOSING = (e.StepRetried, e.StepFailed, e.StepCancelled, e.RunCancelled, e.ContinuedAsNew, e.RunCompleted)


def outcomes(events: list[Event]) -> list[str]:
    """Return what the history says of outcomes."""
    return [event.event_type for event in events if isinstance(event.data, e.StepCompleted | e.StepFailed)]


@pytest.mark.contract("ACT-1", "SIG-8")
@pytest.mark.parametrize("closing", ["time-out", "deadline", "cancel", "race", "return", "stop", "rotation"])
@pytest.mark.parametrize("is_success", [True, False])
async def test_an_outcome_that_was_acknowledged_before_its_step_is_closed_is_recorded(
    variant: EngineVariant, closing: str, is_success: bool
) -> None:
    """The turn that closes the step was computed before the outcome came, and is committed after it."""
    tokens: asyncio.Queue[str] = asyncio.Queue()
    app = hf.App("office")
    once = hf.Retry(max_attempts=1)
    limits: dict[str, Any] = {"time-out": {"timeout": 0.2}, "deadline": {"schedule_to_close": 0.2}}.get(closing, {})

    @app.activity(retry=once, **limits)
    async def sign() -> str:
        tokens.put_nowait(hf.activity_context().token)
        hf.activity_context().complete_later()

    @app.workflow
    async def contract(is_first: bool) -> str:
        if not is_first:
            return "again"
        signing = asyncio.ensure_future(sign())
        try:
            if closing in ("return", "rotation"):
                await hf.wait_signal("go", str)
                if closing == "rotation":
                    hf.continue_as_new(False)
                return "left"
            async with asyncio.timeout(0.2 if closing == "race" else None):
                return await signing
        except (TimeoutError, ActivityFailed) as failure:
            return type(failure).__name__

    async with variant.opened() as inner:
        store = Closing(inner)
        async with variant.node(app, cast(Store, store)):
            run = await app.start(contract, True)
            token = await tokens.get()
            await wait_for_event(run, "StepDetached")
            report = app.complete_activity(token, "ann") if is_success else app.fail_activity(token, "no")
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            async def meanwhile() -> None:
                try:
                    await report
                    done.set_result(None)
                except CallerError as refusal:
                    done.set_exception(refusal)

            store.meanwhile = meanwhile
            if closing == "cancel":
                await run.cancel()
            elif closing == "stop":
                await run.terminate(actor="op")
            elif closing in ("return", "rotation"):
                await run.signal("go", "on")
            await wait_for_history(run, lambda events: isinstance(events[-1].data, FINISHED))
            try:
                await done
                is_acknowledged = True
            except Conflict:
                is_acknowledged = False
            events = await run.events()
        assert is_acknowledged or closing in ("time-out", "deadline")
        recorded = [event for event in events if event.caused_by_signal_id and isinstance(event.data, ENDS)]
        assert len(recorded) == is_acknowledged
        if is_acknowledged:
            assert recorded[0].event_type == ("StepCompleted" if is_success else "StepFailed")


FINISHED = (e.RunCompleted, e.RunCancelled, e.RunFailed)
ENDS = (e.StepCompleted, e.StepFailed, e.StepRetried)


@pytest.mark.contract("ACT-1")
async def test_the_work_of_a_run_goes_on_when_its_turn_is_taken_again(variant: EngineVariant) -> None:
    """The turn that has not seen an outcome is taken again by the same node; activities beside it are left alone."""
    app, tokens, began = hf.App("office"), asyncio.Queue[str](), 0
    gate = asyncio.Event()

    @app.activity
    async def sign() -> str:
        tokens.put_nowait(hf.activity_context().token)
        hf.activity_context().complete_later()

    @app.activity(retry=hf.Retry(max_attempts=1))
    async def think() -> str:
        nonlocal began
        began += 1
        await gate.wait()
        return "thought"

    @app.activity
    async def quick() -> str:
        return "quick"

    @app.workflow
    async def contract() -> list[str]:
        async def twice() -> str:
            await hf.wait_signal("go", str)
            return await quick()

        return list(await asyncio.gather(sign(), think(), twice()))

    async with variant.opened() as inner:
        store = Closing(inner)
        async with variant.node(app, cast(Store, store)):
            run = await app.start(contract)
            token = await tokens.get()
            await wait_for_event(run, "SignalWaiting")
            await wait_for_event(run, "StepDetached")

            async def commit(turns: Sequence[Turn]) -> Any:
                if any(isinstance(event.data, e.SignalReceived) for turn in turns for event in turn.events):
                    store.commit = inner.commit  # type: ignore[method-assign]
                    await app.complete_activity(token, "ann")
                return await inner.commit(turns)

            store.commit = commit  # type: ignore[method-assign]
            await run.signal("go", "on")
            await wait_for_event(run, "StepCompleted", 2)
            gate.set()
            assert await run.result() == ["ann", "thought", "quick"]
    assert began == 1


@pytest.mark.contract("ACT-1")
@pytest.mark.parametrize("is_success", [True, False])
async def test_a_paused_run_records_outcomes_and_goes_on_with_them(variant: EngineVariant, is_success: bool) -> None:
    office = Office(retry=hf.Retry(max_attempts=1))
    async with variant.node(office.app):
        run = await office.app.start(office.contract, "lease")
        token = await office.tokens.get()
        await wait_for_event(run, "StepDetached")
        await run.pause(actor="op")
        if is_success:
            await office.app.complete_activity(token, "ann")
        else:
            await office.app.fail_activity(token, "no")
        await wait_for_history(run, lambda events: bool(outcomes(events)))
        with pytest.raises(Conflict):
            await office.app.complete_activity(token, "bob")
        await run.resume(actor="op")
        assert await run.result() == ("signed by ann" if is_success else "ActivityError: no")


@pytest.mark.contract("ACT-1", "ATT-2")
async def test_a_step_that_an_operator_retries_takes_the_outcome_of_its_new_attempt_only(
    variant: EngineVariant,
) -> None:
    office = Office(retry=hf.Retry(max_attempts=1), on_failure="pause")
    async with variant.node(office.app):
        app = office.app
        run = await app.start(office.contract, "lease")
        first = await office.tokens.get()
        await app.fail_activity(first, "no")
        await wait_for_event(run, "RunPaused")
        await run.retry_step("sign", actor="op")
        second = await office.tokens.get()
        with pytest.raises(Conflict):
            await app.complete_activity(first, "late")
        await app.fail_activity(first, "no")  # again, as it was accepted before
        await app.complete_activity(second, "ann")
        assert await run.result() == "signed by ann"


@pytest.mark.contract("ACT-1", "SIG-8")
async def test_the_stores_clock_decides_whether_an_outcome_comes_in_time(variant: EngineVariant) -> None:
    """No node is there to record that the time is over, and nobody is told that an outcome counts which does not."""
    office, later = Office(schedule_to_close=5, retry=hf.Retry(max_attempts=1)), Office()
    async with store_with_virtual_time(variant) as (store, clock):
        async with variant.node(office.app, store):
            run_id = (await office.app.start(office.contract, "lease")).run_id
            token = await office.tokens.get()
            await wait_for_event(office.app.run(run_id), "StepDetached")
        clock.advance(ms=5_000)
        async with asyncio.timeout(60), later.app.connect(store):
            with pytest.raises(Conflict, match="time is over"):
                await later.app.complete_activity(token, "ann")
        async with variant.node(office.app, store):
            assert (await office.app.run(run_id).result()).startswith("TimeoutError")


@pytest.mark.contract("ACT-1")
@pytest.mark.slow
async def test_of_many_callers_with_one_token_exactly_one_is_acknowledged(variant: EngineVariant) -> None:
    """Callers, some of them alike, race with each other, with time-outs and with an operator."""
    office = Office(timeout=0.03, retry=hf.Retry(max_attempts=2, initial_ms=1, jitter=0.0))
    async with variant.opened() as store, variant.node(office.app, store):
        app = office.app
        for number in range(25):
            run = await app.start(office.contract, "lease")
            tokens = [await office.tokens.get()]
            reports = [app.complete_activity(tokens[0], f"{who}") for who in range(4)]
            reports += [app.fail_activity(tokens[0], "no") for _ in range(2)]
            if number % 3 == 0:
                await asyncio.sleep(0.028)
            cancelling = [run.cancel()] if number % 5 == 0 else []
            answers = await asyncio.gather(*reports, *cancelling, return_exceptions=True)
            answers = answers[:6]
            while (await run.snapshot()).status not in TERMINAL:
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        tokens.append(await office.tokens.get())
                        with suppress(Conflict, RunTerminal):
                            await app.complete_activity(tokens[-1], "last")
            kept = {min(number, 4) for number in range(6) if answers[number] is None}  # the last two are alike
            assert len(kept) <= 1, answers
            assert all(answer is None or isinstance(answer, Conflict | RunTerminal) for answer in answers), answers
            events = await run.events()
            recorded = [event for event in events if event.caused_by_signal_id and isinstance(event.data, ENDS)]
            of_first = [event for event in recorded if _is_of_first(event)]
            assert len(of_first) == len(kept)
            while not office.tokens.empty():
                office.tokens.get_nowait()


def _is_of_first(event: Event) -> bool:
    """Return whether the event records what was reported with the first token."""
    if isinstance(event.data, e.StepCompleted):
        return bytes(event.data.result) != b'"last"'
    return True


@pytest.mark.contract("ACT-1", "WF-2")
@pytest.mark.parametrize("second", ["success", "failure", "pause", "retry"])
@pytest.mark.parametrize("ends", ["race", "rotation", "return"])
async def test_outcomes_of_several_steps_that_come_together_are_all_recorded(
    variant: EngineVariant, second: str, ends: str
) -> None:
    """The first lets the program give up the other step, which has its outcome by then; replay goes the same way."""
    app, tokens = hf.App("office"), asyncio.Queue[tuple[str, str]]()

    async def ask() -> str:
        context = hf.activity_context()
        tokens.put_nowait((context.step_id, context.token))
        context.complete_later()

    retry = hf.Retry(max_attempts=2 if second == "retry" else 1, initial_ms=60_000)
    ask = app.activity(retry=retry, on_failure="pause" if second == "pause" else "raise")(ask)

    @app.activity
    async def after() -> str:
        return "after"

    @app.workflow
    async def contract(is_first: bool = True) -> str:
        if not is_first:
            return "again"
        asked = [asyncio.ensure_future(ask()) for _ in range(2)]
        _, left = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        for other in left:
            other.cancel()
        if ends == "rotation":
            hf.continue_as_new(False)
        if ends == "race":
            await hf.wait_signal("go", str)
        return await after()

    async with variant.opened() as store:
        async with variant.node(app, store):
            run_id = (await app.start(contract)).run_id
            given = dict([await tokens.get(), await tokens.get()])
            await wait_for_event(app.run(run_id), "StepDetached", 2)
        async with asyncio.timeout(60), app.connect(store):
            await app.complete_activity(given["ask"], "ann")
            if second == "success":
                await app.complete_activity(given["ask#2"], "bob")
            else:
                await app.fail_activity(given["ask#2"], "no")
        async with variant.node(app, store):
            run = app.run(run_id)
            await wait_for_history(run, lambda events: sum(isinstance(event.data, ENDS) for event in events) >= 2)
            if second == "pause":
                await wait_for_event(run, "RunPaused")
                await run.resume(actor="op", raise_failure=True)
            if ends == "race":
                await run.signal("go", "on")
            assert await run.result() == ("again" if ends == "rotation" else "after")
            events = await run.events()
    ended = {event.step_id: event.event_type for event in events if isinstance(event.data, ENDS)}
    assert ended["ask"] == "StepCompleted"
    assert ended["ask#2"] == {"success": "StepCompleted", "retry": "StepRetried"}.get(second, "StepFailed")
    assert any(isinstance(event.data, e.StepCancelled) for event in events) is (second == "retry")
    assert check_histories(app.registry, [events]) == []
