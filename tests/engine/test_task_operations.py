"""What people may do with tasks, through a real node: operations, races, retries, and finding."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.invariants import check
from holdfast.core.messages import TASK_SIGNAL, Actor
from holdfast.core.state import PAUSED
from holdfast.engine.inbox.tasks import TaskView
from holdfast.errors import Conflict, InvalidInput, NotFound, NotPermitted
from holdfast.store.memory import MemoryStore
from holdfast.store.port import CommitConflict, Committed, MailboxQuery, Turn
from holdfast.testing import view_of
from tests.engine.harness import EngineVariant, event_types, wait_for_event
from tests.engine.task_app import ANN, BOB, EVE, ROOT, Approval, make_task_app, open_task

# --- operations


@pytest.mark.contract("TSK-1")
async def test_a_task_goes_from_hand_to_hand_and_everything_stands_in_its_history(variant: EngineVariant) -> None:
    app, asks = make_task_app()
    async with variant.node(app):
        run = await app.start(asks)
        id_ = (await open_task(app, run)).task_id
        assert (await app.tasks.claim(id_, actor=ANN)).assignee == "ann"
        assert (await app.tasks.release(id_, actor=ANN)).assignee is None
        assert (await app.tasks.assign(id_, "bob", actor=ROOT)).assignee == "bob"
        moved = await app.tasks.reassign(id_, "eve", roles=["boss"], actor=ANN)
        assert (moved.assignee, moved.roles) == ("eve", ("boss",))
        await app.tasks.comment(id_, "mine now", actor=EVE)
        with pytest.raises(NotPermitted):
            await app.tasks.comment(id_, "and mine?", actor=ANN)
        await app.tasks.complete(id_, Approval(False), actor=EVE)
        history = await app.tasks.history(id_)
        told = [(getattr(event.data, "action", ""), getattr(event.data, "actor", "")) for event in history]
        assert told == [
            *(("", ""), ("claim", "ann"), ("release", "ann"), ("assign", "root"), ("reassign", "ann")),
            *(("", "eve"), ("comment", "ann"), ("", "eve")),
        ]
        assert all(event.persisted_at > 0 for event in history)
        await run.result()


@pytest.mark.contract("TSK-2")
async def test_whoever_comes_second_is_told_who_was_first_and_when(variant: EngineVariant) -> None:
    app, asks = make_task_app()
    async with variant.node(app):
        run = await app.start(asks)
        asked = await open_task(app, run)
        first = await app.tasks.complete(asked.task_id, Approval(True), actor=ANN)
        await run.result()
        for action in (
            app.tasks.complete(asked.task_id, Approval(False), actor=BOB),
            app.tasks.claim(asked.task_id, actor=BOB),
        ):
            with pytest.raises(Conflict, match="'ann'") as refused:
                await action
            assert refused.value.details["completed_by"] == "ann"
            assert refused.value.details["completed_at"] == first.completed_at


@pytest.mark.contract("TSK-2")
@pytest.mark.parametrize("goes_on", [True, False])
async def test_of_fifty_who_complete_at_once_exactly_one_wins(variant: EngineVariant, goes_on: bool) -> None:
    app = hf.App("asking")

    @app.workflow
    async def asks() -> int:
        answer = await hf.task("approve", int)
        if goes_on:
            await hf.wait_signal("go", str)
        return answer

    async with variant.node(app) as node:
        run = await app.start(asks)
        asked = await open_task(app, run)
        everybody = (app.tasks.complete(asked.task_id, n, actor=Actor(f"p{n}")) for n in range(50))
        answers = await asyncio.gather(*everybody, return_exceptions=True)
        [winner] = [n for n, answer in enumerate(answers) if not isinstance(answer, BaseException)]
        losers = [answer for answer in answers if isinstance(answer, BaseException)]
        assert all(isinstance(loser, Conflict) for loser in losers), losers
        told = {(loser.details["completed_by"], loser.details["completed_at"]) for loser in losers}  # type: ignore[attr-defined]
        done = await app.tasks.get(asked.task_id)
        assert told == {(f"p{winner}", done.completed_at)}
        if goes_on:
            await run.signal("go", "on")
        assert await run.result() == winner
        view = await view_of(node.store, run.run_id, [])
        assert view is not None
        assert check(view) == []


@pytest.mark.contract("TSK-2", "SIG-5")
async def test_a_retry_of_an_operation_gets_the_first_decision(variant: EngineVariant) -> None:
    app, asks = make_task_app()
    async with variant.node(app):
        run = await app.start(asks)
        asked = await open_task(app, run)

        async def complete(answer: bool) -> TaskView:
            return await app.tasks.complete(asked.task_id, Approval(answer), actor=ANN, operation_id="click-1")

        for _ in range(2):
            with pytest.raises(NotPermitted):
                await app.tasks.claim(asked.task_id, actor=EVE, operation_id="click-0")
        first = await complete(True)
        await run.result()
        assert await complete(True) == first
        with pytest.raises(Conflict, match="click-1"):
            await complete(False)
        assert (await event_types(run)).count("TaskCompleted") == 1
        assert (await event_types(run)).count("TaskRefused") == 1


@pytest.mark.contract("TSK-2", "API-2")
async def test_an_answer_that_does_not_fit_stores_nothing_where_the_form_is_known(variant: EngineVariant) -> None:
    app, asks = make_task_app()
    async with variant.node(app):
        run = await app.start(asks)
        asked = await open_task(app, run)
        before = await event_types(run)
        with pytest.raises(InvalidInput, match="Approval"):
            await app.tasks.complete(asked.task_id, {"approved": "perhaps"}, actor=ANN)
        assert await event_types(run) == before
        await app.tasks.complete(asked.task_id, Approval(True), actor=ANN)
        await run.result()


@pytest.mark.contract("TSK-2", "WF-2")
async def test_a_program_that_cannot_go_on_keeps_answers_for_the_one_that_can(variant: EngineVariant) -> None:
    app, asks = make_task_app()
    other = hf.App("asking")

    @other.workflow(name="asks")
    async def changed() -> None:
        await hf.wait_signal("other", str)

    async with variant.opened() as store:
        async with variant.node(app, store):
            run = await app.start(asks)
            asked = await open_task(app, run)
        async with variant.node(other, store):
            claimed = await other.tasks.claim(asked.task_id, actor=ANN)
            assert (claimed.assignee, await run.status()) == ("ann", PAUSED)
            bad = asyncio.ensure_future(other.tasks.complete(asked.task_id, "yes", actor=ANN, operation_id="bad"))
            good = asyncio.ensure_future(other.tasks.complete(asked.task_id, Approval(True), actor=ANN))
            kept = MailboxQuery(run_id=run.run_id, name=TASK_SIGNAL)
            while len(await store.find(kept)) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await other.tasks.comment(asked.task_id, "done?", actor=ANN)  # decided after the answers were seen
            assert len(await store.find(kept)) == 2
            for waiting in (bad, good):
                waiting.cancel()
            await asyncio.gather(bad, good, return_exceptions=True)
        mended, _ = make_task_app()
        async with variant.node(mended, store):
            await mended.run(run.run_id).resume()
            assert (await mended.run(run.run_id).result())["approved"] is True
            with pytest.raises(InvalidInput):
                await mended.tasks.complete(asked.task_id, "yes", actor=ANN, operation_id="bad")


# --- finding


@pytest.mark.contract("TSK-1")
async def test_tasks_are_found_by_whom_they_concern_and_what_they_are(variant: EngineVariant) -> None:
    app = hf.App("asking")

    @app.workflow
    async def asks(name: str, roles: list[str], assignee: str | None, payload: str) -> bool:
        return await hf.task(name, bool, roles=roles, assignee=assignee, payload={"text": payload})

    @app.workflow
    async def other() -> bool:
        return await hf.task("open", bool)

    async with variant.node(app):
        runs = [
            await app.start(asks, "check", ["clerk", "boss"], None, "Straße 7"),
            await app.start(asks, "sign", ["boss"], "ann", "the contract"),
            await app.start(asks, "mine", [], "eve", ""),
            await app.start(other),
        ]
        for run in runs:
            await wait_for_event(run, "TaskCreated")

        async def found(**query: Any) -> set[str]:
            return {task.name for task in await app.tasks.list(**query)}

        assert await found() == {"check", "sign", "mine", "open"}
        assert await found(role="boss") == {"check", "sign"}
        assert await found(assignee="ann") == {"sign"}
        assert await found(workflow="other") == {"open"}
        assert await found(run_id=runs[2].run_id) == {"mine"}
        assert await found(text="STRAße 7") == {"check"}, "only A to Z have no case"
        assert await found(text="STRASSE") == set()
        assert await found(text="sig", status="OPEN") == {"sign"}
        assert await found(actor=Actor("ann")) == {"sign", "open"}
        assert await found(actor=BOB) == {"check", "open"}
        assert await found(actor=Actor("zoe", ("boss",)), status="OPEN") == {"check", "sign", "open"}
        assert await found(actor=EVE) == {"mine", "open"}
        assert await found(status="COMPLETED") == set()
        [open_to_all] = await app.tasks.list(workflow="other")
        await app.tasks.claim(open_to_all.task_id, actor=BOB)
        assert await found(actor=EVE) == {"mine"}
        with pytest.raises(NotFound):
            await app.tasks.get(open_to_all.task_id, actor=EVE)
        with pytest.raises(NotFound):
            await app.tasks.history(open_to_all.task_id, actor=EVE)
        assert (await app.tasks.get(open_to_all.task_id, actor=ROOT)).assignee == "bob"


@pytest.mark.contract("TSK-1")
async def test_tasks_are_paged_with_and_without_a_text(variant: EngineVariant) -> None:
    app = hf.App("asking")

    @app.workflow
    async def asks() -> None:
        await asyncio.gather(*(hf.task(f"{'odd' if n % 2 else 'even'}", bool) for n in range(10)))

    async with variant.node(app):
        run = await app.start(asks)
        await wait_for_event(run, "TaskCreated", 10)
        for text, many in ((None, 10), ("odd", 5)):
            seen: list[str] = []
            while page := await app.tasks.list(text=text, limit=3, after=seen[-1] if seen else ""):
                assert len(page) <= 3
                seen += [task.task_id for task in page]
            assert len(set(seen)) == len(seen) == many
        await run.cancel()


@pytest.mark.contract("TSK-1", "API-2")
async def test_bad_requests_are_refused_and_leave_no_trace(variant: EngineVariant) -> None:
    app, asks = make_task_app()
    with pytest.raises(InvalidInput, match="no node"):
        _ = app.tasks
    async with variant.node(app):
        run = await app.start(asks)
        id_ = (await open_task(app, run)).task_id
        before = await event_types(run)
        with pytest.raises(NotFound):
            await app.tasks.claim("nowhere", actor=ANN)
        bad = [
            app.tasks.claim(id_, actor=Actor("")),
            app.tasks.claim(id_, actor=Actor("ann", ("",))),
            app.tasks.claim(id_, actor=ANN, operation_id=""),
            app.tasks.assign(id_, "", actor=ANN),
            app.tasks.reassign(id_, "bob", roles=[""], actor=ANN),
            app.tasks.comment(id_, "", actor=ANN),
            app.tasks.comment(id_, "x" * 4_001, actor=ANN),
            app.tasks.complete(id_, object(), actor=ANN),
            app.tasks.list(limit=0),
        ]
        for request in bad:
            with pytest.raises(InvalidInput):
                await request
        assert await event_types(run) == before
        await run.cancel()


# --- one commit, and the bell


class Watched(MemoryStore):
    """Remembers what was committed."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[Turn] = []

    async def commit(self, turns: Sequence[Turn]) -> list[Committed | CommitConflict]:
        self.turns += turns
        return await super().commit(turns)


@pytest.mark.contract("TSK-2")
async def test_completing_is_one_commit_with_all_that_follows() -> None:
    app = hf.App("asking")

    @app.workflow
    async def asks() -> None:
        await hf.task("first", bool)
        await hf.task("second", bool, remind=timedelta(hours=1))

    store = Watched()
    async with app.node(store):
        run = await app.start(asks)
        asked = await open_task(app, run)
        await app.tasks.complete(asked.task_id, True, actor=EVE)
        [turn] = [turn for turn in store.turns if any(task.status == "COMPLETED" for task in turn.tasks)]
        assert [event.event_type for event in turn.events] == ["TaskCompleted", "TaskCreated"]
        assert [(task.name, task.status) for task in turn.tasks] == [("first", "COMPLETED"), ("second", "OPEN")]
        assert [message.type for message in turn.messages] == ["TimerDue"]
        assert len(turn.received) == 1
        assert turn.snapshot.active_task_id == turn.tasks[1].task_id
        await run.cancel()


@pytest.mark.contract("TSK-1", "MSG-4")
async def test_who_waits_for_a_decision_is_woken_and_does_not_poll(
    variant: EngineVariant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.engine.history.POLL_S", 1_000.0)
    app = hf.App("asking")
    gate = asyncio.Event()

    @app.activity
    async def work() -> None:
        await gate.wait()

    @app.workflow
    async def asks() -> bool:
        asking = asyncio.ensure_future(hf.task("approve", bool, roles=["clerk"]))
        await work()
        return await asking

    async with variant.node(app):
        run = await app.start(asks)
        asked = await open_task(app, run)
        with pytest.raises(NotPermitted):
            await app.tasks.claim(asked.task_id, actor=EVE)
        await app.tasks.comment(asked.task_id, "soon", actor=ANN)
        await app.tasks.complete(asked.task_id, True, actor=ANN)
        gate.set()
        assert await run.result() is True
