"""Sending signals, through a real node: declared types, batches, signal-with-start, receipts, and who waits."""

import asyncio
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest

import holdfast as hf
from holdfast.app import App
from holdfast.core.messages import AcceptedSignalResult
from holdfast.core.state import COMPLETED
from holdfast.engine.check_histories import check_histories
from holdfast.errors import (
    CheckpointOwnershipCapabilityError,
    Conflict,
    EngineError,
    InvalidInput,
    NotFound,
    NotWaiting,
    PayloadTooLarge,
    RunTerminal,
)
from holdfast.store.port import Capabilities, RunQuery
from holdfast.workflow import Workflow
from tests.engine.harness import EngineVariant, event_types, wait_for_event, wait_for_status


class Colour(Enum):
    RED = "red"


@dataclass
class Approval:
    approved: bool
    by: str
    level: Literal["low", "high"] = "low"
    colour: Colour = Colour.RED

    def __post_init__(self) -> None:
        if self.by == "secret":
            raise ValueError(f"{self.by} may not")


def approving_app() -> tuple[App, Workflow[[], str]]:
    """Return an app with a workflow that declares what it takes."""
    app = hf.App("approvals")

    @app.workflow(signals={"approval": Approval}, allow_other_signals=True)
    async def order() -> str:
        approval: Approval = await hf.wait_signal("approval")
        return approval.by

    return app, order


# --- declared types


@pytest.mark.contract("SIG-10")
@pytest.mark.parametrize(
    ("payload", "field", "reason"),
    [
        ({"approved": "secret", "by": "ann"}, "payload.approved", "Expected `bool`, got `str`"),
        ({"approved": True}, "payload", "Object missing required field `by`"),
        ({"approved": True, "by": "ann", "level": "secret"}, "payload.level", "Not one of the values"),
        ({"approved": True, "by": "ann", "colour": "secret"}, "payload.colour", "Not one of the values"),
        ({"approved": True, "by": "secret"}, "payload", "it does not fit"),
        ("secret", "payload", "Expected `object`, got `str`"),
    ],
)
@pytest.mark.parametrize("has_definition", [True, False])
async def test_what_does_not_fit_the_declared_type_is_refused_and_leaves_no_trace(
    variant: EngineVariant, payload: Any, field: str, reason: str, has_definition: bool
) -> None:
    app, order = approving_app()
    async with variant.node(app):
        run = await app.start(order)
        sender = run if has_definition else app.run(run.run_id)
        with pytest.raises(InvalidInput) as caught:
            await sender.signal("approval", payload)
        [many] = await app.signal_many([{"run_id": run.run_id, "name": "approval", "payload": payload}])
        for error in (caught.value, many):
            assert isinstance(error, InvalidInput)
            assert error.details["field"] == field
            assert error.details["reason"].startswith(reason)
            assert "secret" not in str(error.as_dict())
        assert await run.mailbox() == []
        await sender.signal("approval", Approval(True, "ann"))
        assert await run.result() == "ann"


@pytest.mark.contract("SIG-5", "SIG-10")
@pytest.mark.parametrize("changed", [{"approval": int}, {"consent": Approval}], ids=["other type", "other name"])
async def test_a_retry_gets_the_first_answer_though_the_declaration_has_changed_since(
    variant: EngineVariant, changed: dict[str, Any]
) -> None:
    """Whoever did not get the answer because of a deployment is not told that nothing was stored."""
    app, order = approving_app()
    fit = Approval(True, "ann")
    async with variant.opened() as store:
        async with app.connect(store):
            run = await app.start(order, request_id="o-1")
            sent = await run.signal("approval", fit, signal_id="click-1")
        later = hf.App("orders")

        @later.workflow(signals=changed)
        async def order() -> Any: ...

        async with later.connect(store):
            with_signal: Any = {"name": "approval", "payload": fit, "signal_id": "click-1"}
            run = await later.start(order, request_id="o-1", with_signal=with_signal)
            item: Any = {**with_signal, "run_id": run.run_id}
            refused: Any = [{**item, "signal_id": "click-2"}, {**item, "payload": "other"}, {**item, "signal_id": None}]
            for sender in (run, later.run(run.run_id)):
                assert await sender.signal("approval", fit, signal_id="click-1") == sent
                for other in refused:
                    with pytest.raises((InvalidInput, NotFound)):
                        await sender.signal("approval", other["payload"], signal_id=other["signal_id"])
            first, *others = await later.signal_many([item, *refused])
            assert first == sent
            assert all(isinstance(other, InvalidInput | NotFound) for other in others)
            assert len(await run.mailbox()) == 1


@pytest.mark.contract("SIG-10")
async def test_declared_types_are_published_and_other_names_are_allowed_with_a_warning(variant: EngineVariant) -> None:
    app, order = approving_app()
    schemas = app.signal_schemas(order)
    assert schemas.keys() == {"approval"}
    assert set(schemas["approval"]["$defs"]["Approval"]["properties"]) == {"approved", "by", "level", "colour"}
    async with variant.node(app):
        run = await app.start(order)
        warned = await run.signal("remark", {"anything": 1}, signal_id="a")
        assert warned.warning == "workflow 'order', version '1', declares no signal 'remark'; it declares ['approval']"
        assert await run.signal("remark", {"anything": 1}, signal_id="a") == warned
        assert await app.signal_many(
            [{"run_id": run.run_id, "name": "remark", "signal_id": "a", "payload": {"anything": 1}}]
        ) == [warned]
        assert [left.name for left in await run.mailbox()] == ["remark"]


@pytest.mark.contract("SIG-10", "API-2")
@pytest.mark.parametrize("signals", [{"holdfast.x": int}, {"": int}, {"go": object()}, {"go": complex}])
def test_a_declaration_that_makes_no_sense_is_refused(signals: Any) -> None:
    app = hf.App("odd")
    with pytest.raises(InvalidInput):

        @app.workflow(signals=signals)
        async def odd() -> None:
            pass


# --- to one of many waits, and only if somebody waits


@pytest.mark.contract("SIG-3", "SIG-9")
async def test_require_waiting_looks_for_the_wait_that_is_addressed(variant: EngineVariant) -> None:
    app = hf.App("waits")

    @app.workflow
    async def two() -> list[str]:
        return list(await asyncio.gather(hf.wait_signal("go", str), hf.wait_signal("go", str)))

    async with variant.node(app):
        run = await app.start(two)
        await wait_for_event(run, "SignalWaiting", times=2)
        await run.signal("go", "second", step_id="go#2", require_waiting=True)
        with pytest.raises(NotWaiting):
            await run.signal("go", "again", step_id="go#2", require_waiting=True)
        await run.signal("go", "first", require_waiting=True)
        assert await run.result() == ["first", "second"]


# --- many at once


@pytest.mark.contract("SIG-9", "API-2")
async def test_a_batch_answers_for_each_of_its_signals(variant: EngineVariant) -> None:
    app, order = approving_app()
    async with variant.node(app):
        runs = [await app.start(order) for _ in range(2)]
        first, second = (run.run_id for run in runs)
        await wait_for_event(runs[0], "SignalWaiting")
        await wait_for_event(runs[1], "SignalWaiting")
        fit = Approval(True, "ann")
        items: list[Any] = [
            {"run_id": first, "name": "approval", "payload": fit, "signal_id": "a"},
            {"run_id": first, "name": "approval", "payload": fit, "signal_id": "a"},
            {"run_id": first, "name": "approval", "payload": Approval(False, "bob"), "signal_id": "a"},
            {"run_id": "nowhere", "name": "approval", "payload": fit},
            {"run_id": second, "name": "approval", "payload": {"approved": 1}},
            {"run_id": second, "name": "remark", "require_waiting": True},
            {"run_id": second, "name": "remark", "payload": "x" * 70_000},
            {"run_id": second, "name": "remark", "payload": object()},
            {"run_id": second, "name": "holdfast.control"},
            {"run_id": second, "nam": "approval"},
            "approval",
            {"run_id": second, "name": "approval", "payload": fit},
        ]
        answers = await app.signal_many(items)
        assert [type(answer) for answer in answers] == [
            AcceptedSignalResult,
            AcceptedSignalResult,
            Conflict,
            NotFound,
            InvalidInput,
            NotWaiting,
            PayloadTooLarge,
            InvalidInput,
            InvalidInput,
            InvalidInput,
            InvalidInput,
            AcceptedSignalResult,
        ]
        assert answers[0] == answers[1]
        assert [await run.result() for run in runs] == ["ann", "ann"]
        assert await app.signal_many([]) == []


@pytest.mark.contract("SIG-9", "SIG-5")
async def test_signals_that_are_sent_at_once_are_answered_each_for_itself(variant: EngineVariant) -> None:
    app = hf.App("waits")

    @app.workflow
    async def waits() -> int:
        return await hf.wait_signal("go", int)

    async with variant.node(app):
        runs = await asyncio.gather(*(app.start(waits) for _ in range(40)))
        sends = [run.signal("go", number, signal_id="s") for number, run in enumerate(runs)]
        answers = await asyncio.gather(*sends, app.run("nowhere").signal("go", 1), return_exceptions=True)
        assert isinstance(answers[-1], NotFound)
        assert [answer.workflow_id for answer in answers[:-1]] == [run.run_id for run in runs]  # type: ignore[union-attr]
        assert await asyncio.gather(*(run.result() for run in runs)) == list(range(40))


# --- with the start of a run


@pytest.mark.contract("SIG-9", "QUE-1")
async def test_a_run_is_started_with_a_signal_and_signalled_if_it_is_there(variant: EngineVariant) -> None:
    app = hf.App("baskets")

    @app.workflow
    async def basket() -> list[str]:
        return [item async for item in hf.signals("add", str, timeout=0.2)]

    async with variant.node(app):
        runs = [
            await app.start(
                basket,
                request_id="cart-1",
                with_signal={"name": "add", "payload": item, "signal_id": item},
            )
            for item in ("pear", "fig", "pear")
        ]
        assert len({run.run_id for run in runs}) == 1
        assert await runs[0].result() == ["pear", "fig"]
        with pytest.raises(RunTerminal):
            await app.start(basket, request_id="cart-1", with_signal={"name": "add", "payload": "late"})


@pytest.mark.contract("SIG-9", "SIG-10", "API-2")
async def test_a_signal_that_does_not_fit_keeps_the_run_from_starting(variant: EngineVariant) -> None:
    app, order = approving_app()
    bad: list[Any] = [
        {"name": "approval", "payload": {"approved": 5}},
        {"name": "approval", "payload": Approval(True, "ann"), "signal_id": ""},
        {"name": "holdfast.update"},
        {"name": "approval", "step_id": "approval"},
        {},
        "approval",
    ]
    async with variant.node(app) as node:
        for signal in bad:
            with pytest.raises(InvalidInput):
                await app.start(order, with_signal=signal)
        assert await node.store.find(RunQuery()) == []
        run = await app.start(order, with_signal={"name": "approval", "payload": Approval(True, "ann")})
        assert await run.result() == "ann"


# --- what has become of it


@pytest.mark.contract("SIG-12")
async def test_a_receipt_follows_a_signal_to_its_end(variant: EngineVariant) -> None:
    app = hf.App("waits")

    @app.workflow
    async def waits() -> str:
        first = await hf.wait_signal("go", str)
        await hf.wait_signal("end", str)
        return first

    async with variant.node(app):
        run = await app.start(waits)
        sent = await run.signal("go", "a")
        received = await wait_for_event(run, "SignalReceived")
        late = await run.signal("go", "b", signal_id="late")
        first = await run.receipt("go", sent.signal_id)
        assert (first.status, first.accepted_at, first.consumed_at_event, first.reason) == (
            "consumed",
            sent.accepted_at,
            received.run_seq,
            None,
        )
        second = await run.receipt("go", "late")
        assert (second.status, second.accepted_at, second.consumed_at_event) == ("accepted", late.accepted_at, None)
        await run.signal("end", "")
        await wait_for_status(run, COMPLETED)
        third = await run.receipt("go", "late")
        assert (third.status, third.reason) == ("expired", "the run was COMPLETED before a wait took it")
        for name, signal_id in (("go", "other"), ("stop", "late")):
            with pytest.raises(NotFound):
                await run.receipt(name, signal_id)
        with pytest.raises(NotFound):
            await app.run("nowhere").receipt("go", "late")


@pytest.mark.contract("SIG-9")
async def test_waits_and_mailboxes_can_be_found(variant: EngineVariant) -> None:
    app = hf.App("waits")

    @app.workflow
    async def waits(name: str) -> str:
        return await hf.wait_signal(name, str, timeout=60)

    async with variant.node(app):
        runs = [await app.start(waits, name, run_id=f"run-{index}") for index, name in enumerate(("a", "b", "a"))]
        for run in runs:
            await wait_for_event(run, "SignalWaiting")
        assert [(wait.run_id, wait.name) async for wait in app.waits()] == [
            ("run-0", "a"),
            ("run-1", "b"),
            ("run-2", "a"),
        ]
        assert [wait.run_id async for wait in app.waits(name="a")] == ["run-0", "run-2"]
        assert [wait.step_id async for wait in app.waits(run_id="run-1", name="a")] == []
        await runs[1].signal("c", {"n": 1}, signal_id="kept", step_id="nowhere")
        [kept] = await runs[1].mailbox()
        assert (kept.name, kept.signal_id, kept.payload, kept.step_id) == ("c", "kept", {"n": 1}, "nowhere")
        assert 0 <= kept.age_ms < 8_000


@pytest.mark.contract("SIG-9", "CAN-1", "SIG-3", "SIG-5")
async def test_a_rotation_keeps_what_is_in_the_mailbox_and_knows_its_ids(variant: EngineVariant) -> None:
    app = hf.App("rotates")

    @app.workflow
    async def rounds(number: int) -> str:
        if number > 0:
            await hf.wait_signal("go", str)
            hf.continue_as_new(number - 1)
        return await hf.wait_signal("late", str)

    async with variant.node(app):
        run = await app.start(rounds, 3)
        kept = await run.signal("late", "kept", signal_id="only")
        await run.signal("go", "1")
        await wait_for_event(run, "ContinuedAsNew")
        assert [left.signal_id for left in await run.mailbox()] == ["only"]
        assert await run.signal("late", "kept", signal_id="only") == kept
        with pytest.raises(Conflict):
            await run.signal("late", "other", signal_id="only")
        await run.signal("go", "2")
        await run.signal("go", "3")
        assert await run.result() == "kept"
        assert (await event_types(run)).count("ContinuedAsNew") == 3
        assert (await run.receipt("late", "only")).status == "consumed"


# --- how it gets there


@pytest.mark.contract("SIG-8", "OWN-1")
async def test_a_node_with_nothing_to_do_claims_in_the_transaction_of_the_signal(tmp_path: Path) -> None:
    app, order = approving_app()
    store = await hf.SqliteStore.open(tmp_path / "store.db")
    await store.migrate()
    statements: list[str] = []
    async with asyncio.timeout(60), app.node(store) as node:
        runs = [await app.start(order) for _ in range(10)]
        for run in runs:
            await wait_for_event(run, "SignalWaiting")
        store._database.connection.set_trace_callback(statements.append)
        for run in runs:
            while not node.turn_loop.is_idle:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            await run.signal("approval", Approval(True, "ann"))
            assert await run.result() == "ann"
        store._database.connection.set_trace_callback(None)
    await store.close()
    transactions = " ".join(statements).split("BEGIN IMMEDIATE")
    accepting = [text for text in transactions if "INSERT INTO signals" in text]
    assert len(accepting) == 10
    together = [text.partition("INSERT INTO signals")[2] for text in accepting]
    claims = sum("UPDATE runs SET lease_epoch" in later for later in together)
    assert claims > 0, "a bell from before may wake the node just then, but not every time"


class HangingStore(hf.MemoryStore):
    """A store that answers no delivery."""

    async def deliver(self, items: Any) -> Any:
        await asyncio.Event().wait()


@pytest.mark.contract("API-2")
async def test_who_sends_while_the_node_stops_is_told_that_nobody_knows() -> None:
    app, order = approving_app()
    async with asyncio.timeout(60):
        async with app.node(HangingStore()):
            run = await app.start(order)
            await wait_for_event(run, "SignalWaiting")
            sending = [asyncio.create_task(run.signal("remark", number)) for number in range(3)]
            await asyncio.sleep(0)
        for sent in await asyncio.gather(*sending, return_exceptions=True):
            assert isinstance(sent, EngineError)
            assert "same signal_id" in sent.message


@pytest.mark.contract("OWN-2", "SIG-5")
async def test_signals_without_an_id_do_not_fail_with_those_that_the_store_cannot_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOLDFAST_CHECKPOINT_OWNERSHIP", "single-owner")
    app, order = approving_app()
    weak = Capabilities(conditional_batch=False, atomic_batch=True, read_after_write=True, scan_consistency="snapshot")
    async with asyncio.timeout(60), app.node(hf.MemoryStore(capabilities=weak)):
        run = await app.start(order)
        sends = [
            run.signal("remark", 1, signal_id="a"),
            run.signal("remark", 2),
            run.signal("remark", 3, signal_id="b"),
        ]
        answers = await asyncio.gather(*sends, return_exceptions=True)
        expected = [CheckpointOwnershipCapabilityError, AcceptedSignalResult, CheckpointOwnershipCapabilityError]
        assert [type(answer) for answer in answers] == expected
        with pytest.raises(CheckpointOwnershipCapabilityError):
            await app.start(order, with_signal={"name": "remark", "signal_id": "a"})


@pytest.mark.contract("WF-3", "WF-2")
async def test_histories_with_signals_of_every_kind_are_checked_without_a_node() -> None:
    app = hf.App("checked")

    @app.workflow(signals={"vote": int, "begin": str})
    async def everything() -> list[Any]:
        await hf.wait_signal("begin", str)  # when all votes are there, however long they take
        await app.run("nowhere").signal("go", "x")
        skipped = await hf.wait_signal("never", str, condition=lambda: False)
        doubled = await hf.wait_signal("vote", handler=lambda vote: 2 * vote)
        votes = [vote async for vote in hf.signals("vote", timeout=0.05)]
        return [skipped, doubled, votes]

    async with asyncio.timeout(60), app.node(hf.MemoryStore()):
        run = await app.start(everything)
        await run.signal("vote", 1)
        await run.signal("vote", 2)
        await run.signal("begin", "now")
        assert await run.result() == [None, 2, [2]]
        history = await run.events()
    assert check_histories(app.registry, [history]) == []
