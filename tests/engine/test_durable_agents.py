"""Durable agents of every library with an adapter: what a crash, a person, an operator or another node does to them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.agents.steps import Approval
from holdfast.core.events import RunPaused
from holdfast.core.state import PAUSED
from holdfast.errors import NotPermitted
from holdfast.run import RunHandle
from holdfast.service.context import Headers, Principal
from holdfast.store.port import Store
from holdfast.testing import explore
from tests.engine.agent_kits import CLERK, KITS, STEPS, Cashier, Options
from tests.engine.harness import MOST_SECONDS, EngineVariant, event_types, wait_for_event, wait_for_status
from tests.service.in_process import serve_in_process

# A program that is dropped, to be replayed later, closes nothing: the library's queues within it are garbage then.
pytestmark = pytest.mark.filterwarnings("ignore:Unclosed <MemoryObject:ResourceWarning")


@pytest.fixture(params=list(KITS))
def kit(request: pytest.FixtureRequest) -> Any:
    """Return what makes the cashier in one of the libraries."""
    return KITS[request.param]


def serving(cashier: Cashier) -> Any:
    """Return the workflow that asks the agent once."""

    @cashier.app.workflow
    async def serve(customer: str) -> str:
        return (await cashier.ask(customer, "o-1", None))[0]

    return serve


async def steps(run: RunHandle[Any]) -> list[str]:
    """Return the steps that a run has begun, in order."""
    return [event.step_id or "" for event in await run.events() if event.event_type in ("StepStarted", "TaskCreated")]


async def decide(run: RunHandle[Any], app: hf.App, approval: Approval) -> None:
    """Answer the open task of a run."""
    await wait_for_event(run, "TaskCreated")
    [task] = await app.tasks.list(run_id=run.run_id, status="OPEN", actor=CLERK)
    await app.tasks.complete(task.task_id, approval, actor=CLERK)


async def test_each_call_is_a_step_and_the_text_of_the_model_is_streamed(variant: EngineVariant, kit: Any) -> None:
    cashier = kit(Options(stream="tokens"))
    serve = serving(cashier)
    async with asyncio.timeout(MOST_SECONDS), variant.node(cashier.app):
        run = await cashier.app.start(serve, "bob")
        assert (await run.result()).strip() == "refunded o-1 of bob"
        assert await steps(run) == STEPS
        text = "".join([chunk.value async for chunk in run.stream("tokens")])
        assert text.strip() == "refunded o-1 of bob"
    assert cashier.called == ["model", "refund o-1 of bob", "model"]


@pytest.mark.contract("ACT-1")
@pytest.mark.parametrize("approved", [None, True, False], ids=["unasked", "approved", "refused"])
def test_a_crash_at_any_commit_repeats_nothing_that_was_recorded(kit: Any, approved: bool | None) -> None:
    cashier = kit(Options(approves=approved is not None))
    serve = serving(cashier)

    async def drive(run: RunHandle[Any]) -> None:
        while not (tasks := await cashier.app.tasks.list(run_id=run.run_id, status="OPEN", actor=CLERK)):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        await cashier.app.tasks.complete(tasks[0].task_id, Approval(bool(approved), "too late"), actor=CLERK)

    shown = explore(
        cashier.app,
        serve,
        "bob",
        drive=None if approved is None else drive,
        repeatable=["cashier.model", "cashier.tool"],
        before=cashier.called.clear,
    )
    shown.assert_clean()
    first = shown.plays[0]
    assert first.calls == {"cashier.model": 2, "cashier.tool": 0 if approved is False else 1} or (
        approved is False and first.calls == {"cashier.model": 2}
    )
    assert len(shown.plays) > 8
    for play in shown.plays[1:]:  # what had no record by then, and only that, is called again: once at most
        assert play.ending == first.ending
        assert sum(play.calls.values()) <= sum(first.calls.values()) + 1
        if play.point.startswith("after commit"):
            assert play.calls == first.calls, play
    assert any(play.point.startswith("after commit") for play in shown.plays)


@pytest.mark.contract("TSK-1")
async def test_a_person_approves_or_refuses_a_call_and_the_model_gets_the_note(
    variant: EngineVariant, kit: Any
) -> None:
    cashier = kit(Options(approves=True))
    serve = serving(cashier)
    async with asyncio.timeout(MOST_SECONDS), variant.node(cashier.app):
        for approved, shown in ((True, "refunded o-1 of bob"), (False, "too late")):
            run = await cashier.app.start(serve, "bob")
            await wait_for_event(run, "TaskCreated")
            [open_task] = await cashier.app.tasks.list(run_id=run.run_id, status="OPEN", actor=CLERK)
            assert bytes(open_task.payload) == b'{"agent":"cashier","tool":"refund","arguments":{"order":"o-1"}}'
            with pytest.raises(NotPermitted):
                await cashier.app.tasks.complete(open_task.task_id, Approval(True), actor=hf.Actor("eve"))
            await cashier.app.tasks.complete(open_task.task_id, Approval(approved, "too late"), actor=CLERK)
            assert await run.result() == shown
    assert cashier.called.count("refund o-1 of bob") == 1


async def test_a_run_is_cancelled_in_the_middle_of_a_model_call_of_a_tool_and_of_an_approval(
    variant: EngineVariant, kit: Any
) -> None:
    for at in ("model", "tool", "approval"):
        reached = asyncio.Event()

        async def hang(reached: asyncio.Event = reached) -> None:
            reached.set()
            await asyncio.Event().wait()

        cashier = kit(
            Options(
                approves=at == "approval",
                before_model=hang if at == "model" else None,
                before_tool=hang if at == "tool" else None,
            )
        )
        serve = serving(cashier)
        async with asyncio.timeout(MOST_SECONDS), variant.node(cashier.app):
            run = await cashier.app.start(serve, "bob")
            if at == "approval":
                await wait_for_event(run, "TaskCreated")
            else:
                await reached.wait()
            before = list(cashier.called)
            await run.cancel()
            with pytest.raises(hf.errors.RunCancelled):
                await run.result()
            assert cashier.called == before, at
            assert await cashier.app.tasks.list(run_id=run.run_id, status="OPEN", actor=CLERK) == []


@pytest.mark.contract("SIG-13")
async def test_a_paused_agent_asks_nothing_until_it_goes_on(variant: EngineVariant, kit: Any) -> None:
    reached, goes_on = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        reached.set()
        await goes_on.wait()

    cashier = kit(Options(before_tool=wait))
    serve = serving(cashier)
    async with asyncio.timeout(MOST_SECONDS), variant.node(cashier.app):
        run = await cashier.app.start(serve, "bob")
        await reached.wait()
        await run.pause()
        await wait_for_status(run, PAUSED)
        goes_on.set()
        await wait_for_event(run, "StepCompleted", times=2)
        assert cashier.called == ["model", "refund o-1 of bob"]
        assert (await run.snapshot()).status == PAUSED
        await run.resume()
        assert await run.result() == "refunded o-1 of bob"
    assert cashier.called == ["model", "refund o-1 of bob", "model"]


@pytest.mark.contract("CAN-1", "SIG-3")
async def test_a_conversation_goes_on_over_rotations(variant: EngineVariant, kit: Any) -> None:
    cashier = kit(Options(settings={"limits": hf.Limits(rotation_steps=4)}))

    @cashier.app.workflow
    async def converse(most: int, said: Any, answers: list[str]) -> list[str]:
        while len(answers) < most:
            answer, said = await cashier.ask("bob", await hf.wait_signal("order", str), said)
            answers.append(answer)
            hf.continue_as_new_if_long(most, said, answers)
        return answers

    async with asyncio.timeout(MOST_SECONDS), variant.node(cashier.app):
        run = await cashier.app.start(converse, 4, None, [])
        for number in range(4):
            await run.signal("order", f"o-{number}", signal_id=f"s-{number}")
        assert await run.result() == [f"refunded o-{number} of bob" for number in range(4)]
        assert (await event_types(run)).count("ContinuedAsNew") >= 2
    assert [call for call in cashier.called if call != "model"] == [f"refund o-{number} of bob" for number in range(4)]


@pytest.mark.contract("ACT-1")
async def test_model_and_tools_are_called_by_workers_of_their_queues(kit: Any, tmp_path: Path) -> None:
    options = Options(stream="tokens", model={"queue": "models"}, tool={"queue": "tools"})
    cashier, worker = kit(options), kit(options)
    serve = serving(cashier)
    serving(worker)
    address = f"sqlite:///{tmp_path}/shop.db"
    for_jobs = hf.NodeOptions(takes_runs=False, queues=("models", "tools"))
    async with asyncio.timeout(MOST_SECONDS), cashier.app.node(address), worker.app.node(address, options=for_jobs):
        run = await cashier.app.start(serve, "bob")
        assert (await run.result()).strip() == "refunded o-1 of bob"
        text = "".join([chunk.value async for chunk in run.stream("tokens")])
        assert text.strip() == "refunded o-1 of bob"
    assert cashier.called == []
    assert worker.called == ["model", "refund o-1 of bob", "model"]


@pytest.mark.contract("SEC-2")
@pytest.mark.parametrize("sealed", [True, False], ids=["encrypted", "plain"])
async def test_nothing_that_an_agent_says_is_readable_in_the_store(kit: Any, sealed: bool, tmp_path: Path) -> None:
    codecs = [hf.Encryption({"k1": b"k" * 32})] if sealed else []
    cashier = kit(Options(approves=True, stream="tokens", settings={"codecs": codecs}))
    serve = serving(cashier)
    path = tmp_path / "shop.db"
    one = hf.NodeOptions(cached_runs=0, drain_s=2.0)
    async with asyncio.timeout(MOST_SECONDS), cashier.app.node(f"sqlite:///{path}", options=one):
        run = await cashier.app.start(serve, "hush-customer")
        await decide(run, cashier.app, Approval(True, "hush-note"))
        assert (await run.result()).strip() == "refunded o-1 of hush-customer"
    content = b"".join(file.read_bytes() for file in path.parent.iterdir() if file.is_file())
    for word in (b"hush-customer", b"hush-note", b"Be kind.", b"refunded o-1"):
        assert (word in content) is not sealed, word


@pytest.mark.contract("API-4")
async def test_an_agent_belongs_to_the_tenant_of_its_run(kit: Any) -> None:
    seen: list[str] = []

    async def note() -> None:
        seen.append(hf.activity_context().tenant)

    cashier = kit(Options(approves=True, before_model=note, before_tool=note))
    serving(cashier)

    async def by_header(headers: Headers) -> Principal:
        return Principal(name="ann", tenant=headers.get(b"x-tenant", b"").decode(), roles=("clerk",))

    async with serve_in_process(app=cashier.app, authenticate=by_header) as server:
        asked = {"workflow": "serve", "input": {"customer": "bob"}}
        run_id = (await server.rest("runs.start", asked, **{"x-tenant": "acme"}))[1]["run_id"]
        await wait_for_event(cashier.app.run(run_id), "TaskCreated")
        assert (await server.rest("tasks.list", {}, **{"x-tenant": "other"}))[1]["items"] == []
        [task] = (await server.rest("tasks.list", {}, **{"x-tenant": "acme"}))[1]["items"]
        answer = {"task_id": task["task_id"], "answer": {"approved": True}}
        assert (await server.rest("tasks.complete", answer, **{"x-tenant": "other"}))[0] == 404
        assert (await server.rest("tasks.complete", answer, **{"x-tenant": "acme"}))[0] == 200
        assert await cashier.app.run(run_id).result() == "refunded o-1 of bob"
    assert seen == ["acme"] * 3


async def test_an_agent_lives_on_every_store(store: Store, kit: Any) -> None:
    cashier = kit(Options(approves=True, stream="tokens"))
    serve = serving(cashier)
    for cached in (100, 0):
        options = hf.NodeOptions(cached_runs=cached, drain_s=2.0)
        async with asyncio.timeout(MOST_SECONDS), cashier.app.node(store, options=options):
            run = await cashier.app.start(serve, "bob")
            await decide(run, cashier.app, Approval(True))
            assert (await run.result()).strip() == "refunded o-1 of bob"
            assert "".join([chunk.value async for chunk in run.stream("tokens")]).strip() == "refunded o-1 of bob"
    assert cashier.called == ["model", "refund o-1 of bob", "model"] * 2


async def test_what_the_provider_refuses_for_good_is_not_asked_again(kit: Any) -> None:
    class Refused(Exception):
        def __init__(self, status_code: int) -> None:
            super().__init__(f"status {status_code}")
            self.status_code = status_code

    class Busy(Refused):
        class response:  # noqa: N801  (as in the libraries)
            headers = {"retry-after": "0"}  # noqa: RUF012

    problems: list[Exception] = [Busy(429), Refused(503)]

    async def refuse() -> None:
        if problems:
            raise problems.pop(0)

    cashier = kit(Options(before_model=refuse, model={"retry": hf.Retry(initial_ms=1)}))
    serve = serving(cashier)
    async with asyncio.timeout(MOST_SECONDS), cashier.app.node("memory://"):
        assert await (await cashier.app.start(serve, "bob")).result() == "refunded o-1 of bob"
        assert cashier.called.count("model") == 4
        problems.append(Refused(401))
        run = await cashier.app.start(serve, "bob")
        with pytest.raises(hf.errors.RunFailed, match="the provider of the model answers 401"):
            await run.result()
        assert cashier.called.count("model") == 5


async def test_another_question_than_the_recorded_one_pauses_the_run_and_names_the_step(kit: Any) -> None:
    store = hf.MemoryStore()

    def version(order: str) -> tuple[Cashier, Any]:
        cashier = kit(Options())

        @cashier.app.workflow
        async def serve(customer: str) -> str:
            answer: str = (await cashier.ask(customer, order, None))[0]
            await hf.wait_signal("go")
            return answer

        return cashier, serve

    async with asyncio.timeout(MOST_SECONDS):
        cashier, serve = version("o-1")
        async with cashier.app.node(store):
            await wait_for_event(await cashier.app.start(serve, "bob", run_id="run-1"), "SignalWaiting")
        cashier, _ = version("o-2")
        async with cashier.app.node(store):
            run = cashier.app.run("run-1")
            await run.signal("go")
            paused = (await wait_for_event(run, "RunPaused")).data
            assert isinstance(paused, RunPaused)
            assert paused.error is not None
            assert paused.error.code == "NondeterminismError"
            assert "cashier.model" in paused.error.message
            assert "o-2" in paused.error.message
        cashier, _ = version("o-1")
        async with cashier.app.node(store):
            run = cashier.app.run("run-1")
            await run.resume()
            assert await run.result() == "refunded o-1 of bob"
    assert cashier.called == []
