"""What workflows declare of their signals is checked by every process that takes them, with their code or without."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta, Struct

import holdfast as hf
from holdfast.core import codec
from holdfast.core.declarations import WorkflowDeclaration
from holdfast.engine.inbox.declarations import Declared, DeclaredByCode, DeclaredInStore, published
from holdfast.errors import InvalidInput, NotFound
from holdfast.program.definitions import WorkflowDefinition
from holdfast.store.memory import MemoryStore
from holdfast.store.port import MailboxQuery, RunQuery, Store
from holdfast.store.postgres.store import PostgresStore
from holdfast.store.queries import DeadLetterQuery
from tests.engine.harness import wait_for_event


@dataclass
class Approval:
    approved: bool
    by: str


@pytest.fixture(params=["memory", "sqlite", "postgres"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    """A store of each kind."""
    store: Any = MemoryStore()
    if request.param == "sqlite":
        store = await hf.SqliteStore.open(tmp_path / "store.db")
    if request.param == "postgres":
        store = await PostgresStore.open(request.getfixturevalue("postgres_url"))
    await store.migrate()
    yield store
    await store.close()


def shop(version: str = "1", **options: Any) -> tuple[hf.App, Any]:
    """Return an app with one version of a workflow."""
    app = hf.App("shop")

    @app.workflow(version=version, **options)
    async def order() -> str:
        approval = await hf.wait_signal("approval", Approval)
        return str(approval.by)

    return app, order


DECLARES: dict[str, Any] = {"signals": {"approval": Approval}}
OTHERS: dict[str, tuple[str, dict[str, Any]] | None] = {
    "no such workflow": None,
    "another version": ("2", {"signals": {"approval": int}}),
    "another version that declares nothing": ("2", {}),
    "the same version": ("1", DECLARES),
}


@pytest.mark.contract("SIG-10")
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
async def test_every_process_refuses_what_does_not_fit(store: Store, other: tuple[str, dict[str, Any]] | None) -> None:
    app, order = shop("1", **DECLARES)
    elsewhere = hf.App("elsewhere") if other is None else shop(other[0], **other[1])[0]
    async with asyncio.timeout(60), app.node(store):
        run = await app.start(order)
        await wait_for_event(run, "SignalWaiting")
        async with elsewhere.connect(store):
            there = elsewhere.run(run.run_id)
            for payload in ({"approved": "secret", "by": "ann"}, {"approved": True}, 7, None):
                with pytest.raises(InvalidInput) as refused:
                    await there.signal("approval", payload)
                assert "secret" not in str(refused.value.as_dict())
                [answer] = await elsewhere.signal_many(
                    [{"run_id": run.run_id, "name": "approval", "payload": payload, "signal_id": "a"}]
                )
                assert isinstance(answer, InvalidInput)
            with pytest.raises(NotFound, match="declares no signal 'remark'; it declares") as unknown:
                await there.signal("remark", 1)
            assert unknown.value.details["declared"] == ["approval"]
            [answer] = await elsewhere.signal_many([{"run_id": run.run_id, "name": "remark"}])
            assert isinstance(answer, NotFound)
            assert await store.find(MailboxQuery(run_id=run.run_id, consumed=True)) == []
            await there.signal("approval", {"approved": True, "by": "ann"})
        assert await run.result() == "ann"


@pytest.mark.contract("SIG-10")
async def test_who_sends_a_name_that_is_only_allowed_is_warned_everywhere(store: Store) -> None:
    app, order = shop("1", **DECLARES, allow_other_signals=True)
    elsewhere = hf.App("elsewhere")
    async with asyncio.timeout(60), app.node(store):
        run = await app.start(order)
        async with elsewhere.connect(store):
            first = await elsewhere.run(run.run_id).signal("remark", 1, signal_id="a")
            answers = [
                await elsewhere.run(run.run_id).signal("remark", 1, signal_id="a"),
                await run.signal("remark", 1, signal_id="a"),
                *await elsewhere.signal_many(
                    [{"run_id": run.run_id, "name": "remark", "payload": 1, "signal_id": "a"}]
                ),
            ]
    assert first.warning == "workflow 'order', version '1', declares no signal 'remark'; it declares ['approval']"
    assert answers == [first] * 3


@pytest.mark.contract("SIG-10")
@pytest.mark.parametrize("has_code", [True, False])
async def test_what_a_workflow_sends_is_refused_like_from_any_sender(store: Store, has_code: bool) -> None:
    shopping, order = shop("1", **DECLARES)
    app = shopping if has_code else hf.App("elsewhere")

    @app.workflow
    async def sender(run_id: str) -> None:
        for name, payload in (("approval", 7), ("remark", 1), ("approval", {"approved": True, "by": "ann"})):
            await app.run(run_id).signal(name, payload)

    async with asyncio.timeout(60), shopping.connect(store):
        run = await shopping.start(order)
    async with asyncio.timeout(60), app.node(store):
        sent = await app.start(sender, run.run_id)
        await sent.result()
        letters = await store.find(DeadLetterQuery(run_id=sent.run_id))
    assert sorted(letter.detail.split(": ", 2)[1:][0] for letter in letters) == ["InvalidInput", "NotFound"]
    assert {letter.reason for letter in letters} == {"refused"}
    [taken] = await store.find(MailboxQuery(run_id=run.run_id, consumed=True))
    assert codec.decode(taken.payload, dict) == {"approved": True, "by": "ann"}


@pytest.mark.contract("SIG-10", "WF-4")
async def test_a_sender_is_told_nothing_of_what_runs_of_other_tenants_declare(store: Store) -> None:
    app, order = shop("1", **DECLARES)

    @app.workflow
    async def sender(run_id: str) -> None:
        await app.run(run_id).signal("approval", 7)

    async with asyncio.timeout(60), app.node(store):
        run = await app.start(order, tenant="other")
        sent = await app.start(sender, run.run_id)
        await sent.result()
        [letter] = await store.find(DeadLetterQuery(run_id=sent.run_id))
    assert "NotFound: " in letter.detail
    assert "declare" not in letter.detail


@pytest.mark.contract("SIG-10", "WF-3")
async def test_what_counts_is_the_version_that_the_run_was_started_with(store: Store) -> None:
    old, order = shop("1", signals={"approval": int})
    async with asyncio.timeout(60), old.connect(store):
        run = await old.start(order)
    new, _ = shop("2", **DECLARES)
    async with new.connect(store):
        with pytest.raises(InvalidInput):
            await new.run(run.run_id).signal("approval", {"approved": True, "by": "ann"})
        await new.run(run.run_id).signal("approval", 7)


@pytest.mark.contract("SIG-10", "SIG-9", "QUE-1")
@pytest.mark.parametrize("has_both", [True, False])
async def test_a_signal_with_the_start_of_a_run_that_is_there_is_checked_by_the_version_of_that_run(
    store: Store, has_both: bool
) -> None:
    old, order = shop("1", signals={"approval": int, "remark": str})
    async with asyncio.timeout(60), old.connect(store):
        run = await old.start(order, request_id="r")
    new, later = shop("2", **DECLARES)
    if has_both:

        @new.workflow(name="order", version="1", signals={"approval": int, "remark": str})
        async def first_order() -> str:
            return str(await hf.wait_signal("approval"))

    async with asyncio.timeout(60), new.connect(store):
        payload: Any
        for name, payload, problem in (
            ("approval", {"approved": True, "by": "ann"}, InvalidInput),
            ("no such", 7, NotFound),
        ):
            with pytest.raises(problem):
                await new.start(later, request_id="r", with_signal={"name": name, "payload": payload})
        assert await store.find(MailboxQuery(run_id=run.run_id)) == []
        for signal_id, name, payload in (("a", "approval", 7), ("b", "remark", "fine"), ("a", "approval", 7)):
            again = await new.start(
                later, request_id="r", with_signal={"name": name, "payload": payload, "signal_id": signal_id}
            )
            assert again.run_id == run.run_id
        kept = await store.find(MailboxQuery(run_id=run.run_id))
        assert [(signal.name, bytes(signal.payload)) for signal in kept] == [("approval", b"7"), ("remark", b'"fine"')]
        for name, payload, problem in (("approval", 7, InvalidInput), ("remark", "fine", NotFound)):
            with pytest.raises(problem):  # in its own version it fits nothing, and there is no run without its signal
                await new.start(later, request_id="s", with_signal={"name": name, "payload": payload})
            with pytest.raises(problem):
                await new.start(
                    later, request_id="r", workflow_version="2", with_signal={"name": name, "payload": payload}
                )
        assert len(await store.find(RunQuery())) == 1


@pytest.mark.contract("SIG-10")
async def test_a_workflow_that_is_registered_while_a_node_is_open_is_published_when_it_is_started(store: Store) -> None:
    app, elsewhere = hf.App("shop"), hf.App("elsewhere")
    async with asyncio.timeout(60), app.node(store), elsewhere.connect(store):

        @app.workflow(signals={"go": int})
        async def late() -> int:
            return int(await hf.wait_signal("go"))

        run = await app.start(late)
        with pytest.raises(InvalidInput):
            await elsewhere.run(run.run_id).signal("go", "word")
        await elsewhere.run(run.run_id).signal("go", 1)
        assert await run.result() == 1


@pytest.mark.contract("SIG-10")
@pytest.mark.parametrize("many", [True, False])
async def test_what_was_declared_by_a_run_that_is_deleted_does_not_count_for_the_next_of_its_id(
    store: Store, many: bool
) -> None:
    app, elsewhere = hf.App("shop"), hf.App("elsewhere")

    @app.workflow(signals={"approval": int})
    async def order() -> int:
        return int(await hf.wait_signal("approval"))

    @app.workflow(signals={"remark": str})
    async def note() -> str:
        return str(await hf.wait_signal("remark"))

    async def send(name: str, payload: Any) -> None:
        if not many:
            await elsewhere.run("r").signal(name, payload)
            return
        [answer] = await elsewhere.signal_many([{"run_id": "r", "name": name, "payload": payload}])
        if isinstance(answer, Exception):
            raise answer

    async with asyncio.timeout(60), app.node(store), elsewhere.connect(store):
        first = await app.start(order, run_id="r")
        await send("approval", 7)
        assert await first.result() == 7
        await store.purge(hf.PurgePolicy(finished_run_ms=0, run_ids=("r",)))
        run = await app.start(note, run_id="r")
        with pytest.raises(InvalidInput):
            await send("remark", 7)
        await send("remark", "fine")
        with pytest.raises(NotFound):
            await send("approval", 7)
        assert await run.result() == "fine"


@pytest.mark.contract("SIG-10", "LAT-1")
async def test_only_the_first_signal_to_a_run_costs_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    asked: list[str] = []
    app, order = shop("1", signals={"approval": Approval}, allow_other_signals=True)
    elsewhere = hf.App("elsewhere")
    async with asyncio.timeout(60), app.node(store), elsewhere.connect(store):
        runs = [await app.start(order) for _ in range(5)]
        for verb in ("find", "find_definitions", "load"):
            _note(store, verb, asked, monkeypatch)
        for run in runs:
            await run.signal("remark")
        assert asked == [], "whoever has started it knows what it is"
        items: list[Any] = [{"run_id": run.run_id, "name": "remark"} for run in runs]
        for _ in range(3):
            await elsewhere.signal_many(items)
            await elsewhere.run(runs[0].run_id).signal("remark")
    assert asked == ["find", "find_definitions"]


def _note(store: Any, verb: str, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = getattr(store, verb)

    async def noted(*args: Any) -> Any:
        asked.append(verb)
        return await before(*args)

    monkeypatch.setattr(store, verb, noted)


# --- schemas are as strict as types


class Card(Struct, tag=True, forbid_unknown_fields=True):
    number: Annotated[str, Meta(min_length=2, max_length=4, pattern="^[0-9]+$")]


class Invoice(Struct, tag=True):
    due: Annotated[datetime, Meta(tz=True)]
    id: uuid.UUID
    amount: Decimal
    lines: list[tuple[int, str]] = []
    notes: dict[str, Annotated[int, Meta(ge=0)]] = {}
    kind: Literal["a", "b"] = "a"
    parent: "Invoice | None" = None


ID = "12345678-1234-5678-1234-567812345678"
INVOICE = {"type": "Invoice", "due": "2026-01-01T00:00:00Z", "id": ID, "amount": "1.5"}
VALUES: list[Any] = [
    {"type": "Card", "number": "12"},
    {"type": "Card", "number": "1"},
    {"type": "Card", "number": "12345"},
    {"type": "Card", "number": "1x"},
    {"type": "Card", "number": "12", "secret": 1},
    {"type": "Cash"},
    {"number": "12"},
    INVOICE,
    {**INVOICE, "due": "tomorrow"},
    {**INVOICE, "id": "secret"},
    {**INVOICE, "lines": [[1, "a"], [2, "b"]]},
    {**INVOICE, "lines": [[1.0, "a"]]},
    {**INVOICE, "lines": [[1, "a", "b"]]},
    {**INVOICE, "lines": [[1]]},
    {**INVOICE, "lines": [[True, "a"]]},
    {**INVOICE, "notes": {"secret": 1}},
    {**INVOICE, "notes": {"secret": -1}},
    {**INVOICE, "notes": {"secret": "x"}},
    {**INVOICE, "kind": "b"},
    {**INVOICE, "kind": "secret"},
    {**INVOICE, "parent": INVOICE},
    {**INVOICE, "parent": {**INVOICE, "kind": 7}},
    {**INVOICE, "parent": {"type": "Card", "number": "12"}},
    {"type": "Invoice"},
    7,
    "secret",
    None,
    [],
]


async def taking() -> None:
    """Take anything."""


@pytest.mark.contract("SIG-10")
@pytest.mark.parametrize("value", VALUES, ids=lambda value: msgspec.json.encode(value).decode()[:60])
def test_a_schema_refuses_what_its_type_refuses_and_shows_nothing_of_it(value: Any) -> None:
    definition = WorkflowDefinition(taking, "pay", "1", {"pay": Card | Invoice})
    kept = msgspec.json.decode(msgspec.json.encode(published(definition)), type=WorkflowDeclaration)
    by_code, by_schema = (_refusal(declared, value) for declared in (DeclaredByCode(definition), DeclaredInStore(kept)))
    assert (by_code is None) == (by_schema is None), (by_code, by_schema)
    assert "secret" not in str((by_code, by_schema))


def _refusal(declared: Declared, value: Any) -> dict[str, Any] | None:
    try:
        declared.check("pay", codec.encode(value))
    except InvalidInput as refusal:
        return refusal.as_dict()
    return None
