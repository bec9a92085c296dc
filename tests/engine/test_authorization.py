"""The authoriser decides on everything that is sent to a run: signals, operations on tasks, updates."""

import asyncio
import logging
from typing import Any

import pytest

import holdfast as hf
from holdfast.core import codec
from holdfast.core.messages import Actor
from holdfast.engine.inbox.authorization import ControlRequest, Verdict
from holdfast.errors import InvalidInput, NotFound, NotPermitted, RunTerminal
from holdfast.run import RunHandle
from tests.engine.harness import EngineVariant, wait_for_event, wait_for_history
from tests.engine.test_commands import verdicts

EVE = Actor("eve", ("clerk",))


class Guard:
    """An authoriser that notes what it is asked, and refuses eve everything."""

    def __init__(self) -> None:
        self.asked: list[ControlRequest] = []

    async def __call__(self, request: ControlRequest) -> Verdict:
        if request.command == "START":  # tests/engine/test_overrides.py asks about these
            return True
        self.asked.append(request)
        return request.actor != "eve" or "ask bob"


def make_app(guard: Any) -> tuple[hf.App, Any]:
    """Return an app whose workflow takes signals, updates and the answer to a task."""
    app = hf.App("orders", authoriser=lambda request: request.command == "START" or guard(request))

    @app.workflow(signals={"go": str})
    async def everything() -> list[Any]:
        said: list[str] = []
        hf.on_update("say", lambda word: said.append(word))
        answer = await hf.task("approve", bool, roles=["clerk"])
        return [answer, await hf.wait_signal("go", str), said]

    return app, everything


async def opened(app: hf.App, workflow: Any, **options: Any) -> RunHandle[Any]:
    """Start a run, and wait until its task is there."""
    run: RunHandle[Any] = await app.start(workflow, **options)
    await wait_for_event(run, "TaskCreated")
    return run


async def rejected(run: RunHandle[Any], count: int) -> list[tuple[str, str, str]]:
    """Return what was refused, once there is so much of it: what, to whom, and why."""
    await wait_for_history(run, lambda events: len(verdicts(events)) >= count)
    return [(name, actor, why) for kind, name, actor, why in verdicts(await run.events()) if kind == "SignalRejected"]


@pytest.mark.contract("API-4", "SIG-13")
async def test_whatever_is_refused_is_recorded_and_reaches_nobody(variant: EngineVariant) -> None:
    guard = Guard()
    app, everything = make_app(guard)
    async with variant.node(app):
        run = await opened(app, everything)
        [task] = await app.tasks.list(run_id=run.run_id)
        for _ in range(2):  # the refusal of a retry is the same refusal
            with pytest.raises(NotPermitted, match="ask bob") as caught:
                await run.signal("go", "now", signal_id="click-1", actor="eve")
        assert caught.value.details == {"run_id": run.run_id, "command": "SIGNAL", "name": "go", "actor": "eve"}
        with pytest.raises(NotPermitted):
            await app.tasks.complete(task.task_id, True, actor=EVE)
        assert await rejected(run, 2) == [("SIGNAL go", "eve", "ask bob"), ("TASK complete", "eve", "ask bob")]
        assert await run.mailbox() == []
        assert (await app.tasks.get(task.task_id)).status == "OPEN"
        told = [event.event_type for event in await app.tasks.history(task.task_id)]
        assert told == ["TaskCreated", "SignalRejected"]
        signal, _, operation = guard.asked
        assert signal == ControlRequest(
            run_id=run.run_id,
            workflow="everything",
            tenant="default",
            command="SIGNAL",
            name="go",
            step_id=None,
            actor="eve",
            reason="",
            payload=codec.encode("now"),
        )
        assert (operation.command, operation.name, operation.step_id) == ("TASK", "complete", task.step_id)
        assert operation.payload == codec.encode(True)


@pytest.mark.contract("API-4")
async def test_whatever_is_permitted_is_asked_about_and_arrives(variant: EngineVariant) -> None:
    guard = Guard()
    app, everything = make_app(guard)
    async with variant.node(app):
        run = await opened(
            app, everything, tenant="acme", with_signal={"name": "go", "payload": "first", "actor": "ann"}
        )
        await run.update("say", word="hello")
        [task] = await app.tasks.list(run_id=run.run_id)
        await app.tasks.complete(task.task_id, True, actor=Actor("ann", ("clerk",)))
        assert await run.result() == [True, "first", ["hello"]]
        asked = [(each.command, each.name, each.actor, each.tenant) for each in guard.asked]
        assert asked == [
            ("SIGNAL", "go", "ann", "acme"),
            ("UPDATE", "say", "", "acme"),
            ("TASK", "complete", "ann", "acme"),
        ]
        assert [each.run_id for each in guard.asked] == ["", run.run_id, run.run_id]
        assert verdicts(await run.events()) == []


@pytest.mark.contract("API-4", "SIG-9")
async def test_of_a_batch_each_is_decided_by_itself_and_refusals_are_recorded() -> None:
    guard = Guard()
    app, everything = make_app(guard)
    async with asyncio.timeout(60), app.node("memory://"):
        run = await opened(app, everything)
        answers = await app.signal_many(
            [
                {"run_id": run.run_id, "name": "go", "payload": "a", "actor": "eve"},
                {"run_id": run.run_id, "name": "go", "payload": "b", "actor": "ann"},
                {"run_id": "nowhere", "name": "go", "payload": "c", "actor": "eve"},
                {"run_id": run.run_id, "name": "go", "payload": 7, "actor": "eve"},
                {"run_id": run.run_id, "name": "go", "payload": "d", "signal_id": "\ud800", "actor": "eve"},
                {"run_id": ["no", "id"], "name": "stop", "actor": "eve"},  # type: ignore[typeddict-item]
            ]
        )
        kinds = [type(answer).__name__ for answer in answers]
        assert kinds == ["NotPermitted", "AcceptedSignalResult", "NotFound", *["InvalidInput"] * 3]
        assert [each.payload for each in guard.asked] == [codec.encode("a"), codec.encode("b")]
        assert await rejected(run, 1) == [("SIGNAL go", "eve", "ask bob")]
        assert [mail.payload for mail in await run.mailbox()] == ["b"]


@pytest.mark.contract("API-4", "SIG-9")
async def test_a_batch_may_be_larger_than_what_a_store_takes_at_once() -> None:
    guard = Guard()
    app, everything = make_app(guard)
    async with asyncio.timeout(60), app.node("memory://"):
        run = await opened(app, everything)
        nowhere = [f"nowhere-{number}" for number in range(hf.Limits().batch_items)]
        answers = await app.signal_many(
            [{"run_id": run_id, "name": "go", "payload": "x", "actor": "eve"} for run_id in [*nowhere, run.run_id]]
        )
        assert all(isinstance(answer, NotFound) for answer in answers[:-1])
        assert isinstance(answers[-1], NotPermitted)


@pytest.mark.contract("API-4", "SIG-9")
async def test_a_signal_that_may_not_come_with_a_start_lets_nothing_start(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard()
    app, everything = make_app(guard)
    first: Any = {"name": "go", "payload": "x", "signal_id": "s-1", "actor": "eve"}
    async with asyncio.timeout(60), app.node("memory://") as node:
        for run_id in (None, "order-1"):
            with pytest.raises(NotPermitted):
                await app.start(everything, run_id=run_id, request_id="r-1", with_signal=first)
        assert sum((await node.store.stats()).runs.values()) == 0
        lines = [record for record in caplog.records if record.name == "holdfast.access"]
        assert len(lines) == 2
        assert all("eve" in line.getMessage() and line.levelno == logging.WARNING for line in lines)
        run = await opened(app, everything, run_id="order-1")
        with pytest.raises(NotPermitted):
            await app.start(everything, run_id="order-1", with_signal=first)
        assert await rejected(run, 1) == [("SIGNAL go", "eve", "ask bob")]
        assert await run.mailbox() == []


@pytest.mark.contract("API-4")
async def test_the_form_is_checked_and_the_run_looked_for_before_anybody_is_asked() -> None:
    guard = Guard()
    app, everything = make_app(guard)
    async with asyncio.timeout(60), app.node("memory://"):
        run = await opened(app, everything)
        for name, payload, signal_id in (("go", 7, "a"), ("go", "x", ""), ("go", "x", "\ud800"), ("", "x", "a")):
            with pytest.raises(InvalidInput):
                await run.signal(name, payload, signal_id=signal_id, actor="eve")
        with pytest.raises(InvalidInput):
            await app.start(everything, with_signal={"name": "go", "payload": "x", "signal_id": "\ud800"})
        with pytest.raises(NotFound):
            await app.run("nowhere").signal("go", "x", actor="eve")
        assert guard.asked == []


@pytest.mark.contract("API-4", "SIG-13")
async def test_two_who_are_refused_with_the_same_id_are_both_refused_and_recorded() -> None:
    app, everything = make_app(lambda request: False)
    async with asyncio.timeout(60), app.node("memory://"):
        run = await opened(app, everything)
        for actor in ("eve", "mallory"):
            with pytest.raises(NotPermitted):
                await run.signal("go", actor, signal_id="click-1", actor=actor)
            with pytest.raises(NotPermitted):
                await run.pause(actor=actor, signal_id="click-1")
        assert {(name, actor) for name, actor, _ in await rejected(run, 4)} == {
            (name, actor) for name in ("SIGNAL go", "PAUSE") for actor in ("eve", "mallory")
        }


@pytest.mark.contract("API-4", "WF-7")
async def test_an_authoriser_that_fails_lets_no_signal_through_and_a_finished_run_records_no_refusal() -> None:
    def fail(request: ControlRequest) -> bool:
        raise ConnectionError("the directory is down")

    app, everything = make_app(fail)
    async with asyncio.timeout(60), app.node("memory://"):
        run = await opened(app, everything)
        with pytest.raises(ConnectionError):
            await run.signal("go", "x")
        with pytest.raises(ConnectionError):
            await run.update("say", word="x")
        assert await run.mailbox() == []
    guard = Guard()
    app = hf.App("orders", authoriser=guard)

    @app.workflow
    async def nothing() -> None:
        """End at once."""

    async with asyncio.timeout(60), app.node("memory://"):
        run = await app.start(nothing)
        await run.result()
        before = await run.events()
        with pytest.raises(NotPermitted):
            await run.signal("go", "x", actor="eve")
        with pytest.raises(RunTerminal):
            await run.signal("go", "x", actor="ann")
        assert await run.events() == before


async def test_what_a_workflow_sends_is_not_asked_about() -> None:
    guard = Guard()
    app = hf.App("orders", authoriser=guard)

    @app.workflow
    async def child(parent: str) -> None:
        await app.run(parent).signal("done", "yes")

    @app.workflow
    async def parent() -> str:
        await child(app.run().run_id)
        return await hf.wait_signal("done", str)

    async with asyncio.timeout(60), app.node("memory://"):
        assert await (await app.start(parent)).result() == "yes"
    assert guard.asked == []
