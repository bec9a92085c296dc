"""Human tasks through a real node: asking, waiting, giving up, and what happens by itself."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast.core import events as e
from holdfast.core.invariants import check
from holdfast.core.messages import Actor
from holdfast.core.state import PAUSED
from holdfast.errors import Conflict, InvalidInput, NotDurable, NotPermitted, RunCancelled, RunFailed
from holdfast.program.tasks import Escalation
from holdfast.testing import view_of
from tests.engine.harness import EngineVariant, event_types, wait_for_event, wait_for_status
from tests.engine.task_app import ANN, BOB, EVE, Approval, Choice, Size, make_task_app, open_task

# --- asking


@pytest.mark.contract("TSK-1")
@pytest.mark.parametrize(
    ("form", "answer", "result"),
    [
        (Approval, Approval(True, "fine"), {"approved": True, "note": "fine"}),
        (Choice, Choice("red"), {"colour": "red"}),
        (Size, {"width": 3}, {"width": 3}),
        (bool, True, True),
        (list[int], [1, 2], [1, 2]),
    ],
)
async def test_an_answer_is_typed_and_the_form_is_published(
    variant: EngineVariant, form: Any, answer: Any, result: Any
) -> None:
    app, asks = make_task_app(form)
    async with variant.node(app):
        run = await app.start(asks)
        asked = await open_task(app, run)
        assert msgspec.json.decode(asked.form) == msgspec.json.schema(form)
        done = await app.tasks.complete(asked.task_id, answer, actor=ANN)
        assert (done.status, done.completed_by) == ("COMPLETED", "ann")
        assert await run.result() == result


@pytest.mark.contract("TSK-1")
async def test_a_task_shows_all_that_was_asked_for(variant: EngineVariant) -> None:
    due = datetime(2020, 1, 1, tzinfo=UTC)
    app, asks = make_task_app(
        payload={"order": 7}, assignee="ann", due=due, route="/orders", task_type="review", approvals=1, of=None
    )
    async with variant.node(app):
        run = await app.start(asks)
        asked = await open_task(app, run)
        assert (asked.run_id, asked.step_id, asked.name, asked.workflow) == (run.run_id, "approve", "approve", "asks")
        assert (asked.route, asked.task_type, bytes(asked.payload)) == ("/orders", "review", b'{"order":7}')
        assert (asked.roles, asked.assignee) == (("clerk",), "ann")
        assert asked.due_at == int(due.timestamp()) * 1_000_000
        assert await app.tasks.get(asked.task_id) == asked


@pytest.mark.contract("TSK-1")
async def test_a_task_that_is_due_is_overdue_and_stays_open(variant: EngineVariant) -> None:
    app, asks = make_task_app(due=timedelta(milliseconds=1))
    async with variant.node(app):
        run = await app.start(asks)
        asked = await open_task(app, run)
        assert asked.due_at is not None
        while not (await app.tasks.get(asked.task_id)).is_overdue:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert await app.tasks.list(due_before=asked.due_at) == []
        [late] = await app.tasks.list(due_before=asked.due_at + 1)
        assert (late.status, late.is_overdue) == ("OPEN", True)
        done = await app.tasks.complete(asked.task_id, Approval(True), actor=ANN)
        assert not done.is_overdue


@pytest.mark.contract("TSK-1", "API-2")
@pytest.mark.parametrize(
    "options",
    [
        {"roles": "clerk"},
        {"roles": [""]},
        {"assignee": ""},
        {"due": datetime(2026, 1, 1)},  # noqa: DTZ001
        {"due": timedelta(0)},
        {"remind": timedelta(seconds=-1)},
        {"escalate": Escalation(after=timedelta(seconds=1))},
        {"approvals": 0},
        {"approvals": 3, "of": 2},
        {"form": complex},
        {"form": {"type": "string"}},
        {"payload": object()},
    ],
)
async def test_what_cannot_be_asked_raises_where_it_is_asked(variant: EngineVariant, options: dict[str, Any]) -> None:
    app, asks = make_task_app(**options)
    async with variant.node(app):
        with pytest.raises(RunFailed, match="InvalidInput"):
            await (await app.start(asks)).result()


async def test_only_a_workflow_asks() -> None:
    with pytest.raises(NotDurable, match="workflow"):
        await hf.task("approve", bool)


@pytest.mark.contract("TSK-1", "TSK-2", "WF-2")
async def test_several_tasks_at_once_and_one_after_another_are_steps_of_their_own(variant: EngineVariant) -> None:
    app = hf.App("asking")

    @app.workflow
    async def asks() -> list[int]:
        first = await asyncio.gather(*(hf.task("size", int) for _ in range(2)))
        return [*first, await hf.task("size", int)]

    async with variant.node(app):
        run = await app.start(asks)
        await wait_for_event(run, "TaskCreated", 2)
        asked = {task.step_id: task.task_id for task in await app.tasks.list()}
        assert sorted(asked) == ["size", "size#2"]
        await app.tasks.complete(asked["size#2"], 2, actor=EVE)
        await app.tasks.complete(asked["size"], 1, actor=EVE)
        assert (await event_types(run))[-2:] == ["TaskCompleted", "TaskCreated"]
        await app.tasks.complete((await open_task(app, run, 3)).task_id, 3, actor=EVE)
        assert await run.result() == [1, 2, 3]


@pytest.mark.contract("TSK-2", "WF-4")
async def test_a_wait_that_is_given_up_cancels_its_task(variant: EngineVariant) -> None:
    app = hf.App("asking")

    @app.workflow
    async def asks() -> str:
        try:
            async with asyncio.timeout(0.02):
                return await hf.task("approve", str)
        except TimeoutError:
            return "nobody answered"

    async with variant.node(app):
        run = await app.start(asks)
        assert await run.result() == "nobody answered"
        [task] = await app.tasks.list(run_id=run.run_id)
        assert task.status == "CANCELLED"
        with pytest.raises(Conflict, match="cancelled"):
            await app.tasks.complete(task.task_id, "late", actor=EVE)


@pytest.mark.contract("TSK-2", "WF-4", "INV")
async def test_cancelling_a_run_closes_its_tasks(variant: EngineVariant) -> None:
    app, asks = make_task_app()
    async with variant.node(app) as node:
        run = await app.start(asks)
        asked = await open_task(app, run)
        await run.cancel()
        with pytest.raises(RunCancelled):
            await run.result()
        assert (await app.tasks.get(asked.task_id)).status == "CANCELLED"
        view = await view_of(node.store, run.run_id, [])
        assert view is not None
        assert check(view) == []


@pytest.mark.contract("TSK-2", "SIG-13")
async def test_an_answer_is_recorded_while_the_run_is_paused_and_used_when_it_goes_on(variant: EngineVariant) -> None:
    app, asks = make_task_app()
    async with variant.node(app):
        run = await app.start(asks)
        asked = await open_task(app, run)
        await run.pause()
        await wait_for_status(run, PAUSED)
        with pytest.raises(InvalidInput):
            await app.tasks.complete(asked.task_id, 5, actor=ANN)
        done = await app.tasks.complete(asked.task_id, Approval(True), actor=ANN)
        assert (done.status, await run.status()) == ("COMPLETED", PAUSED)
        await run.resume()
        assert (await run.result())["approved"] is True


@pytest.mark.contract("TSK-2", "CAN-1")
async def test_a_rotation_cancels_the_tasks_that_are_open(variant: EngineVariant) -> None:
    app = hf.App("asking")

    @app.workflow
    async def asks(turn: int) -> str:
        if turn == 0:
            forgotten = asyncio.ensure_future(hf.task("forgotten", str))
            await hf.wait_signal("go", str)
            assert not forgotten.done()
            hf.continue_as_new(1)
        return await hf.task("approve", str)

    async with variant.node(app):
        run = await app.start(asks, 0)
        forgotten = await open_task(app, run)
        await run.signal("go", "on")
        asked = await open_task(app, run, 2)
        assert (asked.step_id, (await app.tasks.get(forgotten.task_id)).status) == ("1/approve", "CANCELLED")
        with pytest.raises(Conflict, match="cancelled"):
            await app.tasks.claim(forgotten.task_id, actor=EVE)
        await app.tasks.complete(asked.task_id, "yes", actor=EVE)
        assert await run.result() == "yes"


@pytest.mark.contract("TSK-2", "OWN-3")
async def test_a_task_outlives_the_node_that_asked(variant: EngineVariant) -> None:
    app, asks = make_task_app()
    async with variant.opened() as store:
        async with variant.node(app, store):
            run = await app.start(asks)
            asked = await open_task(app, run)
            await app.tasks.claim(asked.task_id, actor=ANN)
        later, _ = make_task_app()
        async with variant.node(later, store):
            with pytest.raises(InvalidInput):  # by the run's program: nothing has asked in this app yet
                await later.tasks.complete(asked.task_id, "no", actor=ANN)
            await later.tasks.complete(asked.task_id, Approval(True), actor=ANN)
            assert (await later.run(run.run_id).result())["approved"] is True
            history = await later.tasks.history(asked.task_id)
            assert [event.event_type for event in history] == [
                *("TaskCreated", "TaskAssigned", "TaskRefused", "TaskCompleted")
            ]


# --- by itself


@pytest.mark.contract("TSK-1", "TMR-1")
async def test_reminders_and_escalation_happen_by_themselves(variant: EngineVariant) -> None:
    app, asks = make_task_app(
        assignee="ann",
        remind=timedelta(milliseconds=20),
        escalate=Escalation(after=timedelta(milliseconds=30), roles=["boss"]),
    )
    async with variant.node(app):
        run = await app.start(asks)
        await wait_for_event(run, "TaskReminded", 2)
        escalated = (await wait_for_event(run, "TaskAssigned")).data
        assert isinstance(escalated, e.TaskAssigned)
        assert (escalated.action, escalated.assignee, escalated.roles) == ("escalate", None, ("boss",))
        asked = await open_task(app, run)
        assert asked.is_escalated
        assert asked.reminders >= 2
        with pytest.raises(NotPermitted):
            await app.tasks.complete(asked.task_id, Approval(True), actor=ANN)
        await app.tasks.complete(asked.task_id, Approval(True), actor=Actor("zoe", ("boss",)))
        await run.result()


# --- several answers


@pytest.mark.contract("TSK-1", "TSK-2")
async def test_two_of_three_answer_and_the_workflow_gets_both(variant: EngineVariant) -> None:
    app, asks = make_task_app(bool, approvals=2, of=3)
    async with variant.node(app):
        run = await app.start(asks)
        asked = await open_task(app, run)
        half = await app.tasks.complete(asked.task_id, True, actor=ANN)
        assert (half.status, half.answered_by) == ("OPEN", ("ann",))
        with pytest.raises(Conflict, match="answered already") as refused:
            await app.tasks.complete(asked.task_id, False, actor=ANN)
        assert refused.value.details["by"] == "ann"
        assert refused.value.details["at"] > 0
        await app.tasks.complete(asked.task_id, False, actor=BOB)
        assert await run.result() == [True, False]
