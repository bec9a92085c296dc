"""Operators' commands through a real node: schema, authoriser, recorded decision, effect."""

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any, get_args

import pytest

import holdfast as hf
from holdfast.core import events as e
from holdfast.core.keys import retry_tag
from holdfast.core.messages import CONTROL_SIGNAL, ControlName, Message, SignalRequest
from holdfast.core.state import RunStatus
from holdfast.engine.inbox.authorization import ControlRequest
from holdfast.errors import Conflict, InvalidInput, NotFound, NotPermitted, RunTerminal
from holdfast.run import RunHandle
from holdfast.store.port import (
    Accepted,
    CommitConflict,
    Committed,
    Duplicate,
    Refused,
    RunQuery,
    Store,
    Turn,
)
from holdfast.store.proxy import StoreProxy
from holdfast.testing.samples import signal
from tests.engine.harness import (
    MOST_SECONDS,
    EngineVariant,
    event_types,
    wait_for_event,
    wait_for_history,
    wait_for_status,
)

COMMANDS: dict[ControlName, Any] = {
    "PAUSE": lambda run, **given: run.pause("why", **given),
    "RESUME": lambda run, **given: run.resume("why", **given),
    "CANCEL": lambda run, **given: run.cancel("why", **given),
    "APPROVE": lambda run, **given: run.approve("why", **given),
    "RETRY_STEP": lambda run, **given: run.retry_step("go", "why", **given),
    "SKIP_STEP": lambda run, **given: run.skip_step("go", "why", **given),
    "RETRY_RUN": lambda run, **given: run.retry_run("why", **given),
    "EMERGENCY_STOP": lambda run, **given: run.terminate("why", **given),
}


def verdicts(events: list[e.Event]) -> list[tuple[str, str, str, str]]:
    """Return what was decided about commands."""
    return [
        (event.event_type, event.data.name, event.data.actor, event.data.reason)
        for event in events
        if isinstance(event.data, e.SignalAccepted | e.SignalRejected)
    ]


def waiting(app: hf.App) -> Any:
    """Register a workflow that waits for a signal."""

    @app.workflow
    async def wait(name: str = "") -> str | None:
        word: str | None = await hf.wait_signal("go", str | None)
        return word

    return wait


# --- the authoriser


@pytest.mark.contract("SIG-13")
@pytest.mark.parametrize("name", get_args(ControlName))
@pytest.mark.parametrize(
    ("answer", "reason"), [(False, "not permitted"), ("ask bob", "ask bob"), (None, "not permitted")]
)
async def test_what_the_authoriser_refuses_is_recorded_and_changes_nothing(
    name: ControlName, answer: Any, reason: str, variant: EngineVariant
) -> None:
    asked: list[ControlRequest] = []

    async def refuse(request: ControlRequest) -> Any:
        if request.command == "START":
            return True
        asked.append(request)
        return answer

    app = hf.App("orders", authoriser=refuse)
    wait = waiting(app)
    async with variant.node(app):
        run: RunHandle[Any] = await app.start(wait)
        await wait_for_event(run, "SignalWaiting")
        for _ in range(2):  # the refusal of a retry is the same refusal
            with pytest.raises(NotPermitted, match=reason) as caught:
                await COMMANDS[name](run, actor="eve", signal_id="click-1")
        assert caught.value.details == {"run_id": run.run_id, "command": name, "actor": "eve"}
        await wait_for_event(run, "SignalRejected")
        assert verdicts(await run.events()) == [("SignalRejected", name, "eve", reason)]
        assert (await event_types(run))[-2:] == ["SignalWaiting", "SignalRejected"]
        step_id = "go" if name in ("RETRY_STEP", "SKIP_STEP") else None
        assert asked[0] == ControlRequest(
            run_id=run.run_id,
            workflow="wait",
            tenant="default",
            command=name,
            step_id=step_id,
            actor="eve",
            reason="why",
            step_kind="signal" if step_id else "",
        )


@pytest.mark.contract("SIG-13")
async def test_a_command_that_was_refused_can_be_permitted_later_with_the_same_id(variant: EngineVariant) -> None:
    allowed: list[str] = []
    app = hf.App("orders", authoriser=lambda request: request.command == "START" or request.actor in allowed)
    wait = waiting(app)
    async with variant.node(app):
        run = await app.start(wait)
        with pytest.raises(NotPermitted):
            await run.pause(actor="ann", signal_id="click-1")
        allowed.append("ann")
        await run.pause(actor="ann", signal_id="click-1", wait=True)
        assert await run.status() is RunStatus.PAUSED


@pytest.mark.contract("SIG-13")
async def test_an_authoriser_that_fails_lets_nothing_through() -> None:
    def fail(request: ControlRequest) -> bool:
        if request.command == "START":
            return True
        raise ConnectionError("the directory is down")

    app = hf.App("orders", authoriser=fail)
    wait = waiting(app)
    async with asyncio.timeout(60), app.node("memory://"):
        run = await app.start(wait)
        await wait_for_event(run, "SignalWaiting")
        with pytest.raises(ConnectionError):
            await run.terminate()
        with pytest.raises(NotFound):
            await app.run("nowhere").terminate()
        assert verdicts(await run.events()) == []


@pytest.mark.contract("SIG-13", "WF-7")
async def test_a_refusal_that_a_finished_run_cannot_record_is_still_a_refusal() -> None:
    app = hf.App("orders", authoriser=lambda request: request.command in ("START", "SIGNAL"))
    wait = waiting(app)
    async with asyncio.timeout(60), app.node("memory://"):
        run = await app.start(wait)
        await run.signal("go", "x")
        await run.result()
        before = await run.events()
        with pytest.raises(NotPermitted):
            await run.retry_run(actor="eve")
        assert await run.events() == before


# --- schema


@pytest.mark.contract("SIG-13", "API-2")
async def test_a_malformed_command_is_refused_before_anybody_is_asked_or_anything_is_stored() -> None:
    asked: list[ControlRequest] = []

    def note(request: ControlRequest) -> bool:
        asked.append(request)
        return True

    app = hf.App("orders", authoriser=note)
    wait = waiting(app)
    async with asyncio.timeout(60), app.node("memory://") as node:
        run = await app.start(wait)
        await wait_for_event(run, "SignalWaiting")
        asked.clear()  # about the start
        bad: list[Any] = [
            lambda: run.retry_step(""),
            lambda: run.skip_step("a\nb"),
            lambda: run.retry_step(None),  # type: ignore[arg-type]
            lambda: run.pause(7),  # type: ignore[arg-type]
            lambda: run.pause(actor=None),  # type: ignore[arg-type]
            lambda: run.pause(signal_id="x" * 129),
            lambda: run.retry_run(signal_id="a\x00"),
            lambda: run.retry_run(from_start="yes"),  # type: ignore[arg-type]
            lambda: run.skip_step("go", result=object()),
        ]
        for command in bad:
            with pytest.raises(InvalidInput):
                await command()
        assert asked == []
        assert (await node.store.stats()).signals == 0


@pytest.mark.contract("SIG-13", "API-2")
@pytest.mark.parametrize("name", [CONTROL_SIGNAL, "holdfast.update"])
async def test_the_stores_take_no_command_that_cannot_be_read(name: str, variant: EngineVariant) -> None:
    app = hf.App("orders")
    wait = waiting(app)
    async with variant.node(app) as node:
        run = await app.start(wait)
        [answer] = await node.store.deliver([signal(run.run_id, name, {"name": 7, "actor": "ann"})])
        assert isinstance(answer.error, InvalidInput)  # type: ignore[union-attr]


# --- decisions


@pytest.mark.contract("SIG-13")
async def test_who_waits_learns_what_was_decided(variant: EngineVariant) -> None:
    app = hf.App("orders")
    wait = waiting(app)
    async with variant.node(app):
        run = await app.start(wait)
        await wait_for_event(run, "SignalWaiting")
        with pytest.raises(Conflict, match="has started already"):
            await run.approve(actor="ann", signal_id="click-1", wait=True)
        with pytest.raises(Conflict, match="has started already"):
            await run.approve(actor="ann", signal_id="click-1", wait=True)
        with pytest.raises(Conflict, match="step 'go' has not failed"):
            await run.retry_step("go", actor="ann", wait=True)
        await run.pause(actor="ann", wait=True)
        assert await run.status() is RunStatus.PAUSED
        await run.terminate("fire", actor="ann", wait=True)
        assert await run.status() is RunStatus.CANCELLED
        with pytest.raises(RunTerminal):
            await run.resume(wait=True)


@pytest.mark.contract("SIG-13", "SIG-5")
async def test_a_command_with_an_id_is_applied_once(variant: EngineVariant) -> None:
    app = hf.App("orders")
    wait = waiting(app)
    async with variant.node(app):
        run = await app.start(wait)
        await wait_for_event(run, "SignalWaiting")
        for _ in range(3):
            await run.pause("lunch", actor="ann", signal_id="click-1", wait=True)
        await run.resume(actor="ann", wait=True)
        await run.pause("lunch", actor="ann", signal_id="click-1", wait=True)
        assert await run.status() is RunStatus.RUNNING
        with pytest.raises(Conflict):
            await run.pause("tea", actor="ann", signal_id="click-1")
        await run.cancel()


# --- steps


@pytest.mark.contract("ATT-2", "SIG-13")
@pytest.mark.parametrize("queue", ["", "mail"])
async def test_a_step_that_paused_its_run_is_tried_again_until_it_succeeds(queue: str, variant: EngineVariant) -> None:
    app = hf.App("orders")
    tries: list[int] = []

    @app.activity(retry=hf.Retry(max_attempts=2, initial_ms=1), queue=queue, on_failure="pause")
    async def charge() -> str:
        tries.append(len(tries))
        if len(tries) <= 22:
            raise ConnectionError("no answer")
        return "paid"

    @app.workflow
    async def order() -> str:
        return await charge()

    async with variant.node(app, queues=("mail",)):
        run = await app.start(order)
        for times in range(1, 12):  # ATT-2: past nine
            await wait_for_event(run, "StepFailed", times)
            assert await run.status() is RunStatus.PAUSED
            await run.retry_step("charge", "again", actor="ann")
        assert await run.result() == "paid"
        [step] = (await run.snapshot()).steps
        assert (step.logical_attempt_id, step.engine_attempt_id, len(tries)) == (12, 23, 23)


@pytest.mark.contract("SIG-13", "ATT-1")
@pytest.mark.parametrize("queue", ["", "mail"])
async def test_an_activity_that_is_due_in_an_hour_is_tried_now_if_asked_for(queue: str, variant: EngineVariant) -> None:
    app = hf.App("orders")
    tries: list[int] = []

    @app.activity(retry=hf.Retry(max_attempts=2, initial_ms=3_600_000), queue=queue)
    async def charge() -> str:
        tries.append(len(tries))
        if len(tries) == 1:
            raise ConnectionError("no answer")
        return "paid"

    @app.workflow
    async def order() -> str:
        return await charge()

    async with variant.node(app, queues=("mail",)) as node:
        run = await app.start(order)
        await wait_for_event(run, "StepRetried")
        [head] = await node.store.find(RunQuery(retrying=True))
        assert head.run_id == run.run_id
        await run.retry_step("charge", "the bank is back", actor="ann")
        assert await run.result() == "paid"
        assert not await node.store.find(RunQuery(retrying=True))


@pytest.mark.contract("ATT-2", "SIG-13", "OWN-3")
async def test_a_step_that_paused_its_run_is_tried_again_by_another_node(variant: EngineVariant) -> None:
    def life(answers: list[str]) -> tuple[hf.App, Any]:
        app = hf.App("orders")

        @app.activity(retry=hf.Retry(max_attempts=1), on_failure="pause")
        async def charge() -> str:
            return answers.pop()

        @app.workflow
        async def order() -> str:
            return await charge()

        return app, order

    async with variant.opened() as store:
        first, order = life([])
        async with variant.node(first, store):
            await wait_for_event(await first.start(order, run_id="run-1"), "StepFailed")
        second, _ = life(["paid"])
        async with variant.node(second, store):
            run = second.run("run-1")
            assert await run.status() is RunStatus.PAUSED
            await run.retry_step("charge")
            assert await run.result() == "paid"


@pytest.mark.contract("SIG-13")
async def test_a_retry_that_is_certain_to_be_refused_is_answered_at_once_and_recorded(
    variant: EngineVariant, stored_in: str
) -> None:
    app = hf.App("orders")
    goes_on = asyncio.Event()

    @app.activity
    async def charge() -> str:
        await goes_on.wait()
        return "paid"

    @app.workflow
    async def order() -> str:
        await charge()
        return await hf.wait_signal("go", str)

    async with variant.node(app):
        run = await app.start(order)
        await wait_for_event(run, "StepStarted")
        # It may fail before the run decides. A bucket answers so late that the run may have decided, and refused it.
        with suppress(Conflict) if stored_in == "s3" else nullcontext():
            await run.retry_step("charge", signal_id="early")
        await wait_for_history(run, lambda events: len(verdicts(events)) == 1)
        goes_on.set()
        await wait_for_event(run, "SignalWaiting")
        for signal_id, step_id in (("1", "no-such-step"), ("2", "charge"), ("2", "charge")):
            with pytest.raises(Conflict, match="has not failed"):
                await run.retry_step(step_id, actor="ann", signal_id=signal_id)
        await wait_for_history(run, lambda events: len(verdicts(events)) == 3)
        with pytest.raises(Conflict, match="has not failed"):
            await run.retry_step("charge", actor="ann", signal_id="2")  # as the first time
        await run.signal("go", "on")
        assert await run.result() == "on"
        assert {verdict[0] for verdict in verdicts(await run.events())} == {"SignalRejected"}


class Overtaken(StoreProxy):
    """A store on which a run decides on a command right after its sender has looked for the decision in vain."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.is_sent = False
        self.may_commit = asyncio.Event()
        self.has_committed = asyncio.Event()

    async def deliver(self, items: Sequence[SignalRequest | Message]) -> list[Accepted | Duplicate | Refused]:
        """Hold up the run's turn from now on, if this is a command."""
        self.is_sent = any(isinstance(item, SignalRequest) and item.name == CONTROL_SIGNAL for item in items)
        return await self.inner.deliver(items)

    async def commit(self, turns: Sequence[Turn]) -> list[Committed | CommitConflict]:
        """Commit, once the sender has looked."""
        if self.is_sent:
            await self.may_commit.wait()
        answers = await self.inner.commit(turns)
        if self.is_sent:
            self.has_committed.set()
        return answers

    async def read_events(
        self, run_id: str, after: int = 0, limit: int | None = None, most_bytes: int | None = None
    ) -> list[e.Event]:
        """Read, and let the run decide before the caller gets what was read."""
        found = await self.inner.read_events(run_id, after, limit, most_bytes)
        if self.is_sent and not self.may_commit.is_set():
            self.may_commit.set()
            await self.has_committed.wait()
        return found


@pytest.mark.contract("SIG-13")
async def test_a_retry_that_the_run_refuses_while_its_sender_looks_is_a_conflict() -> None:
    app = hf.App("orders")

    @app.workflow
    async def order() -> str:
        return await hf.wait_signal("go", str)

    store = Overtaken(hf.MemoryStore())
    async with asyncio.timeout(MOST_SECONDS), app.node(store):
        run = await app.start(order)
        await wait_for_event(run, "SignalWaiting")
        with pytest.raises(Conflict, match="has not failed"):
            await run.retry_step("no-such-step", actor="ann", signal_id="1")
        assert store.has_committed.is_set()
        store.is_sent = False
        await run.signal("go", "on")
        assert await run.result() == "on"


@pytest.mark.contract("SIG-13")
async def test_a_step_that_is_skipped_while_it_runs_is_cancelled(variant: EngineVariant) -> None:
    app = hf.App("orders")
    cancelled = asyncio.Event()
    started = asyncio.Event()

    @app.activity
    async def charge() -> str:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return "paid"

    @app.workflow
    async def order() -> str | None:
        return await charge()

    async with variant.node(app):
        run = await app.start(order)
        await started.wait()
        await run.skip_step("charge", "not needed", result="free", actor="ann")
        assert await run.result() == "free"
        await cancelled.wait()


@pytest.mark.contract("SIG-13", "WF-4")
async def test_a_child_that_is_skipped_is_cancelled_and_the_parent_goes_on(variant: EngineVariant) -> None:
    app = hf.App("orders")
    wait = waiting(app)

    @app.workflow
    async def parent() -> str | None:
        answer: str | None = await wait()
        return answer

    async with variant.node(app):
        run = await app.start(parent)
        started = await wait_for_event(run, "ChildStarted")
        await run.skip_step("wait")
        assert await run.result() is None
        child = app.run(started.data.child_run_id)  # type: ignore[attr-defined]
        await wait_for_status(child, RunStatus.CANCELLED)


# --- doing a run again


@pytest.mark.contract("SIG-13", "WF-7", "QUE-1")
async def test_a_finished_run_is_done_again_as_a_new_run_once_for_each_command(variant: EngineVariant) -> None:
    app = hf.App("orders")
    tries: list[str] = []

    @app.activity(retry=hf.Retry(max_attempts=1))
    async def charge(name: str) -> str:
        tries.append(name)
        if len(tries) == 1:
            raise ConnectionError("no answer")
        return f"{name} paid"

    @app.workflow
    async def order(name: str) -> str:
        return await charge(name)

    async with variant.node(app) as node:
        run = await app.start(order, "o-1", reference_key="o-1", tags=("eu",))
        with pytest.raises(hf.errors.RunFailed):
            await run.result()
        before = await run.events()
        again = await run.retry_run("bank is back", actor="ann", signal_id="click-1")
        assert again.run_id != run.run_id
        assert await again.result() == "o-1 paid"
        assert (await run.retry_run("bank is back", actor="ann", signal_id="click-1")).run_id == again.run_id
        assert await run.events() == before
        [found] = await node.store.find(RunQuery(tag=retry_tag(run.run_id)))
        assert (found.run_id, found.reference_key, found.tags[0]) == (again.run_id, "o-1", "eu")
        first = (await again.events())[0].data
        assert isinstance(first, e.RunQueued)
        assert first.retry_of == e.RetryOf(run.run_id, "click-1", "ann", "bank is back")
        assert first.input == before[0].data.input  # type: ignore[attr-defined]
        other = await again.retry_run(signal_id="click-1")
        assert other.run_id not in (run.run_id, again.run_id)
        assert await other.result() == "o-1 paid"
        assert (await run.retry_run()).run_id != (await run.retry_run()).run_id  # without an id each is a new one


@pytest.mark.contract("SIG-13", "WF-7")
async def test_a_run_that_goes_on_is_not_done_again_and_says_so(variant: EngineVariant) -> None:
    app = hf.App("orders")
    wait = waiting(app)
    async with variant.node(app) as node:
        run = await app.start(wait)
        with pytest.raises(Conflict, match="has not finished"):
            await run.retry_run("again", actor="ann")
        await wait_for_history(run, lambda events: verdicts(events) != [])
        assert verdicts(await run.events()) == [("SignalRejected", "RETRY_RUN", "ann", "the run has not finished")]
        assert len(await node.store.find(RunQuery())) == 1


# --- damage


@pytest.mark.contract("SIG-13", "MSG-3")
async def test_a_command_that_was_damaged_in_the_store_is_rejected_and_stops_nobody() -> None:
    app = hf.App("orders")
    wait = waiting(app)
    store = hf.MemoryStore()
    async with asyncio.timeout(60), app.node(store):
        run = await app.start(wait)
        await wait_for_event(run, "SignalWaiting")
        inbox = store._runs[run.run_id]
        for name in (CONTROL_SIGNAL, "holdfast.update"):
            inbox._accept(SignalRequest(run_id=run.run_id, name=name), hf.Limits(), await store.now())
        store.wakeups.notify()
        await wait_for_event(run, "UpdateCompleted")
        assert verdicts(await run.events()) == [("SignalRejected", "", "", "the command cannot be read")]
        await run.signal("go", "fine")
        assert await run.result() == "fine"
