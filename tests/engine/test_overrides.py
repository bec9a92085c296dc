"""Skipping what people were asked or runs wait for, and resuming what a failed step has paused: by what it does."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from msgspec import Struct

import holdfast as hf
from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.audit import Caller
from holdfast.core.messages import Actor, control_request
from holdfast.core.state import RunStatus
from holdfast.engine.inbox.authorization import ControlRequest
from holdfast.errors import ActivityFailed, Conflict, InvalidInput, NotPermitted, RunCancelled
from holdfast.run import RunHandle
from tests.engine.harness import EngineVariant, event_types, wait_for_event, wait_for_status


class Approval(Struct, frozen=True):
    """What people are asked for."""

    is_approved: bool


def make_app(**given: Any) -> hf.App:
    """Return an app whose workflows wait in every way that can be skipped."""
    app = hf.App("orders", **given)

    @app.activity
    async def price(order_id: str) -> int:
        await asyncio.Event().wait()
        return 1

    @app.activity(on_failure="pause", retry=hf.Retry(max_attempts=1))
    async def charge(is_broken: bool) -> int:
        raise ValueError("the card was refused")

    @app.workflow
    async def one() -> str:
        return repr(await hf.task("approve", Approval))

    @app.workflow
    async def two() -> str:
        return repr(await hf.task("approve", Approval, roles=["lead"], approvals=2))

    @app.workflow
    async def typed() -> str:
        return repr(await hf.wait_signal("approve", Approval))

    @app.workflow
    async def timed() -> str:
        late = {"timeout": timedelta(hours=1), "on_timeout": lambda: "too late"}
        return repr(await hf.wait_signal("approve", Approval, **late))  # type: ignore[call-overload]

    @app.workflow
    async def handled() -> str:
        return repr(await hf.wait_signal("approve", Approval, handler=lambda approval: approval.is_approved))

    @app.workflow
    async def many() -> int:
        return len([vote async for vote in hf.signals("approve", Approval)])

    @app.workflow
    async def needs() -> str:
        approval = await hf.task("approve", Approval)
        return "yes" if approval.is_approved else "no"

    @app.workflow
    async def returns() -> Approval:
        return await hf.wait_signal("approve", Approval)

    @app.workflow(failures=LookupError)
    async def declines() -> str:
        if await hf.task("approve", Approval) is None:
            raise LookupError("nobody has answered")
        return "yes"

    @app.workflow
    async def prices() -> int | None:
        return await price("o-1")

    @app.workflow
    async def sleeps() -> str:
        await hf.sleep(3_600)
        return "awake"

    @app.workflow
    async def pays() -> int | str:
        try:
            return await charge(True)
        except ActivityFailed:
            return "told"

    return app


async def opened(app: hf.App, name: str, event: str = "") -> RunHandle[Any]:
    """Start a run and wait until its step is open."""
    [workflow] = [definition for definition in app.registry.workflows.values() if definition.name == name]
    started = await app.runtime().start(workflow, codec.encode({}))
    run: RunHandle[Any] = RunHandle(app.runtime(), started.run_id)
    waits = "TaskCreated" if name in ("one", "two", "needs", "declines") else "SignalWaiting"
    await wait_for_event(run, event or waits)
    return run


@pytest.mark.contract("SIG-13")
@pytest.mark.parametrize(
    ("name", "expected"),
    [("one", "None"), ("two", "None"), ("typed", "None"), ("timed", "'too late'"), ("handled", "None"), ("many", 0)],
)
async def test_a_task_or_wait_that_is_skipped_never_fails_its_run(
    name: str, expected: Any, variant: EngineVariant
) -> None:
    app = make_app()
    async with variant.node(app):
        run = await opened(app, name)
        await run.skip_step("approve", "nobody is left", actor="ann", wait=True)
        assert await run.result() == expected
        events = await run.events()
    [skipped] = [event for event in events if event.event_type == "StepSkipped"]
    assert skipped.step_id == "approve"
    assert '"nobody is left"' in codec.encode_body(skipped.data)
    assert events[-1].event_type == "RunCompleted"


@pytest.mark.contract("SIG-13")
@pytest.mark.parametrize("name", ["needs", "returns"])
async def test_a_workflow_that_cannot_do_without_the_answer_is_paused_and_goes_on_when_it_is_mended(
    name: str, variant: EngineVariant
) -> None:
    app = make_app()
    async with variant.opened() as store:
        async with variant.node(app, store):
            run = await opened(app, name)
            await run.skip_step("approve", wait=True)
            await wait_for_status(run, RunStatus.PAUSED)
            paused = [event for event in await run.events() if event.event_type == "RunPaused"]
            assert "skipped" in codec.encode_body(paused[-1].data)
            assert "RunFailed" not in await event_types(run)
            await run.resume(wait=True)
            await wait_for_event(run, "RunPaused", times=2)
        mended = hf.App("orders")

        @mended.workflow(name=name)
        async def patient() -> Any:
            waited = hf.task("approve", Approval) if name == "needs" else hf.wait_signal("approve", Approval)
            return {"is_approved": await waited is not None} if name == "returns" else str(await waited)

        async with variant.node(mended, store):
            again = mended.run(run.run_id)
            assert await again.result() == ("None" if name == "needs" else {"is_approved": False})


@pytest.mark.contract("SIG-13", "WF-7")
async def test_an_author_may_still_let_the_run_fail(variant: EngineVariant) -> None:
    app = make_app()
    async with variant.node(app):
        run = await opened(app, "declines")
        await run.skip_step("approve", wait=True)
        await wait_for_status(run, RunStatus.FAILED)
        events = await run.events()
    assert [event.event_type for event in events][-2:] == ["StepSkipped", "RunFailed"]
    failed = events[-1].data
    assert isinstance(failed, e.RunFailed)
    assert (failed.error.code, failed.error.message) == ("LookupError", "nobody has answered")


@pytest.mark.contract("SIG-13")
@pytest.mark.parametrize("name", ["one", "two", "typed", "timed", "handled"])
@pytest.mark.parametrize("answer", [{"is_approved": True}, [{"is_approved": True}], False, 0, ""])
async def test_nobody_answers_a_task_or_a_wait_by_skipping_it(name: str, answer: Any) -> None:
    app = make_app()
    async with asyncio.timeout(60), app.node("memory://"):
        run = await opened(app, name)
        with pytest.raises(Conflict, match="without a result"):
            await run.skip_step("approve", result=answer, wait=True)
        assert "StepSkipped" not in await event_types(run)


@pytest.mark.contract("SIG-13", "API-4")
@pytest.mark.parametrize("name", ["one", "two", "typed"])
async def test_skipping_a_task_or_a_wait_needs_a_permission_of_its_own(name: str, variant: EngineVariant) -> None:
    app = make_app()
    async with variant.node(app):
        run = await opened(app, name)
        operator = Caller(name="olga", scopes=frozenset({"runs:control"}))
        with pytest.raises(NotPermitted, match="runs:override"):
            await RunHandle(app.runtime(), run.run_id, None, operator).skip_step("approve", actor="olga", wait=True)
        rejected = await wait_for_event(run, "SignalRejected")
        assert "runs:override" in codec.encode_body(rejected.data)
        assert await run.status() is RunStatus.RUNNING
        admin = Caller(name="ann", scopes=frozenset({"runs:control", "runs:override"}))
        await RunHandle(app.runtime(), run.run_id, None, admin).skip_step("approve", actor="ann", wait=True)
        assert await run.result() == "None"


@pytest.mark.contract("SIG-13")
@pytest.mark.parametrize("name", ["two", "typed"])
async def test_a_skip_without_the_permission_is_rejected_by_the_run_whoever_let_it_through(name: str) -> None:
    app = make_app()
    async with asyncio.timeout(60), app.node("memory://") as node:
        run = await opened(app, name)
        # As it is sent by a process that cannot know yet what kind of step it will be, or by an older release.
        await node.store.deliver([control_request(run.run_id, "SKIP_STEP", "olga", step_id="approve")])
        rejected = await wait_for_event(run, "SignalRejected")
        assert "permission" in codec.encode_body(rejected.data)
        assert await run.status() is RunStatus.RUNNING


@pytest.mark.contract("SIG-13")
async def test_the_authoriser_sees_what_kind_of_step_is_skipped_and_with_what_result(variant: EngineVariant) -> None:
    asked: list[ControlRequest] = []

    def judge(request: ControlRequest) -> bool | str:
        asked.append(request)
        return request.command != "SKIP_STEP" or request.step_kind == "activity" or "ask two people"

    app = make_app(authoriser=judge)
    async with variant.node(app):
        for name, kind in (("two", "task"), ("typed", "signal")):
            run = await opened(app, name)
            with pytest.raises(NotPermitted, match="ask two people"):
                await run.skip_step("approve", actor="olga")
            assert (asked[-1].step_kind, bytes(asked[-1].payload)) == (kind, b"null")
        run = await opened(app, "prices", "StepStarted")
        await run.skip_step("price", result=7, wait=True)
        assert (asked[-1].step_kind, bytes(asked[-1].payload)) == ("activity", b"7")
        assert await run.result() == 7


@pytest.mark.contract("SIG-13", "API-2")
async def test_a_result_that_does_not_fit_the_skipped_activity_is_refused_before_anything_is_stored() -> None:
    app = make_app()
    options = hf.NodeOptions(drain_s=0.01)
    async with asyncio.timeout(60), app.node("memory://", options=options):
        run = await opened(app, "prices", "StepStarted")
        for wrong in ("seven", {"cents": 7}, [7], 7.5):
            with pytest.raises(InvalidInput, match="price"):
                await run.skip_step("price", result=wrong)
        assert await event_types(run) == ["RunQueued", "RunStarted", "StepStarted"]
        sleeping = await opened(app, "sleeps", "TimerStarted")
        with pytest.raises(Conflict, match="without a result"):
            await sleeping.skip_step("sleep", result=1, wait=True)
        await sleeping.skip_step("sleep", wait=True)
        assert await sleeping.result() == "awake"


# --- resuming what a failed step has paused


@pytest.mark.contract("SIG-13")
@pytest.mark.parametrize("wait", [True, False])
async def test_a_plain_resume_does_not_let_a_failure_reach_the_workflow(wait: bool, variant: EngineVariant) -> None:
    app = make_app()
    async with variant.node(app):
        run = await opened(app, "pays", "StepFailed")
        with pytest.raises(Conflict, match="retry") as caught:
            await run.resume(actor="ann", wait=wait)
        assert "raise_failure" in caught.value.message
        await wait_for_event(run, "SignalRejected")
        assert await run.status() is RunStatus.PAUSED
        await run.resume(actor="ann", raise_failure=True, wait=wait)
        assert await run.result() == "told"


@pytest.mark.contract("SIG-13")
async def test_what_failed_while_an_operator_held_the_run_is_not_let_through_by_a_plain_resume(
    variant: EngineVariant,
) -> None:
    app = hf.App("orders")
    fails = asyncio.Event()

    @app.activity(on_failure="pause", retry=hf.Retry(max_attempts=1))
    async def charge() -> int:
        await fails.wait()
        raise ValueError("the card was refused")

    @app.workflow
    async def pays() -> int:
        return await charge()

    async with variant.node(app):
        run = await app.start(pays)
        await wait_for_event(run, "StepStarted")
        await run.pause(wait=True)
        fails.set()
        await wait_for_event(run, "StepFailed")
        with pytest.raises(Conflict, match="retry"):
            await run.resume(wait=True)
        assert await run.status() is RunStatus.PAUSED
        await run.skip_step("charge", result=3, wait=True)
        assert await run.status() is RunStatus.PAUSED
        await run.resume(wait=True)
        assert await run.result() == 3


@pytest.mark.contract("SIG-13")
async def test_a_cancel_still_ends_what_a_failed_step_has_paused(variant: EngineVariant) -> None:
    app = make_app()
    async with variant.node(app):
        run = await opened(app, "pays", "StepFailed")
        await run.cancel("too late", actor="ann", wait=True)
        await wait_for_status(run, RunStatus.CANCELLED)
        events = await run.events()
    ends = ["RunPaused", "StepFailed", "SignalAccepted", "RunCancelRequested", "RunResumed", "RunCancelled"]
    assert [event.event_type for event in events][-6:] == ends
    assert codec.encode_body(events[-3].data) == '{"reason":"too late"}'


# --- starts and queries


@pytest.mark.contract("API-4")
async def test_the_authoriser_is_asked_about_starts_and_queries() -> None:
    asked: list[ControlRequest] = []
    refused: set[str] = set()

    def judge(request: ControlRequest) -> bool | str:
        asked.append(request)
        return request.command not in refused or "not today"

    app = hf.App("orders", authoriser=judge)

    @app.workflow
    async def order(order_id: str) -> None:
        hf.on_query("progress", lambda of: {"order_id": order_id, "of": of})
        await hf.wait_signal("go")

    async with asyncio.timeout(60), app.node("memory://") as node:
        run = await app.start(order, "o-1", tenant="acme", run_id="r-1")
        start = asked[-1]
        assert (start.command, start.workflow, start.tenant, start.run_id) == ("START", "order", "acme", "r-1")
        assert codec.decode(start.payload, dict) == {"order_id": "o-1"}
        await wait_for_event(run, "SignalWaiting")
        assert await run.query("progress", of=7) == {"order_id": "o-1", "of": 7}
        query = asked[-1]
        assert (query.command, query.name, query.run_id, query.tenant) == ("QUERY", "progress", "r-1", "acme")
        assert codec.decode(query.payload, dict) == {"of": 7}
        refused |= {"START", "QUERY"}
        before = await event_types(run)
        with pytest.raises(NotPermitted, match="not today"):
            await app.start(order, "o-2", run_id="r-2")
        with pytest.raises(NotPermitted, match="not today"):
            await app.start(order, "o-2", run_id="r-3", with_signal={"name": "go"})
        with pytest.raises(NotPermitted, match="not today"):
            await run.query("progress", of=7)
        assert await event_types(run) == before, "a query leaves no trace, a refused one neither"
        assert await node.store.load(["r-2", "r-3"]) == [None, None]


@pytest.mark.contract("TSK-1", "SIG-13")
async def test_the_rules_of_a_task_stand_beside_the_permission_to_skip_it(variant: EngineVariant) -> None:
    app = make_app()
    async with variant.node(app):
        run = await opened(app, "two")
        [task] = await app.tasks.list(run_id=run.run_id)
        with pytest.raises(NotPermitted):
            await app.tasks.complete(task.task_id, {"is_approved": True}, actor=Actor("olga", is_admin=True))
        await app.tasks.complete(task.task_id, {"is_approved": True}, actor=Actor("lea", ("lead",)))
        await run.skip_step("approve", wait=True)
        assert await run.result() == "None", "one of two answers is no approval"


ANSWERS = """
plan: answers
version: "1"
steps:
  - {id: price, signal: price}
  - {id: size, task: size}
  - {id: charge, activity: charge, input: {cents: "${steps.price.output}"}}
  - {id: pack, activity: charge, input: {cents: "${steps.size.output}"}}
  - {id: checked, activity: charge, requires_approval: true, input: {cents: 1}}
  - {id: after, activity: charge, input: {cents: "${steps.checked.output}"}}
  - {id: items, for_each: "${steps.price.output}", activity: charge, input: {cents: "${item}"}}
  - {id: thanks, activity: thank, depends_on: [charge, pack, after, items]}
output: "${sum(steps.price.output)}"
"""


@pytest.mark.contract("SIG-13")
async def test_what_is_skipped_in_a_plan_never_fails_its_run(variant: EngineVariant) -> None:
    app = hf.App("shop")
    done: list[str] = []

    @app.activity
    async def charge(cents: int) -> int:
        done.append(f"charge {cents}")
        return cents

    @app.activity
    async def thank() -> None:
        done.append("thank")

    async with variant.node(app):
        run = await app.plans.start(ANSWERS)
        await wait_for_event(run, "TaskCreated")
        for step_id in ("price", "size", "checked:approval"):
            await run.skip_step(step_id, wait=True)
        assert await run.result() is None
        assert done == ["thank"]
        statuses = {step.step_id: step.status for step in (await run.snapshot()).steps}
        assert statuses["price"] == "SKIPPED"
        approved = await app.plans.start(ANSWERS.replace("steps:", "requires_approval: true\nsteps:", 1))
        await wait_for_event(approved, "TaskCreated")
        await approved.skip_step(":approval", wait=True)
        with pytest.raises(RunCancelled):
            await approved.result()
        assert done == ["thank"]
