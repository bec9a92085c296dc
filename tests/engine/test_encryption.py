"""Encrypted payloads: nothing readable in the store, keys that rotate, and processes without them."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest

import holdfast as hf
from holdfast.clock import SystemClock
from holdfast.core.audit import AuditEntry
from holdfast.core.events import ContinuedAsNew, Event, RunQueued
from holdfast.core.state import state_of
from holdfast.engine.history import since_rotation
from holdfast.engine.observe.doctor import examine
from holdfast.errors import (
    Conflict,
    InvalidInput,
    PayloadsSealed,
    PayloadTooLarge,
    PayloadUnreadable,
    RunFailed,
)
from holdfast.settings import load_settings
from holdfast.store.open import open_store
from holdfast.store.payloads import SealingStore, sealed
from holdfast.store.port import DeadLetterQuery, LoadedRun, RunQuery
from holdfast.store.proxy import StoreProxy
from holdfast.store.sqlite.backup import copy_store, restore_store
from tests.engine.harness import wait_for_event
from tests.postgres_server import Installation

HUSH = "hush-4111-1111"
"""Stands in every value, and must stand nowhere in a store."""

K1, K2 = b"1" * 32, b"2" * 32


class Review(msgspec.Struct):
    note: str


def build(codecs: Any, **options: Any) -> tuple[hf.App, Any]:
    app = hf.App("shop", codecs=codecs, **options)

    @app.activity(retry=hf.Retry(max_attempts=2, initial_ms=1))
    async def charge(card: str) -> str:
        hf.activity_context().heartbeat({"at": f"{HUSH} progress"})
        if hf.activity_context().attempt == 1:
            raise ValueError(f"{HUSH} is declined")
        return f"{card} charged"

    @app.activity(queue="slow")
    async def pack(card: str) -> str:
        hf.activity_context().heartbeat({"at": f"{HUSH} packing"})
        return f"{card} packed"

    @app.activity(idempotency_key=lambda card: "key-1")
    async def book(card: str) -> str:
        return f"{card} booked"

    @app.workflow
    async def part(card: str) -> str:
        return f"{card} part"

    @app.workflow
    async def whatever(value: Any) -> Any:
        return value

    @app.workflow
    async def narrow() -> int:
        return await hf.wait_signal("note", int)

    @app.workflow(failures=RuntimeError)
    async def broken(card: str) -> str:
        raise RuntimeError(f"{card} is broken")

    @app.workflow
    async def order(card: str) -> list[str]:
        state: list[str] = []
        hf.on_query("state", lambda: state)

        def add(more: str) -> str:
            state.append(more)
            return f"{more} added"

        hf.on_update("add", add)
        first = await hf.wait_signal("first", str)
        paid = await charge(card)
        packed = await pack(card)
        child = await part(await book(card))
        reviewed = await hf.task("review", payload={"card": card}, form=Review, roles=("ops",))
        signal = await hf.wait_signal("go", str)
        return [first, paid, packed, child, reviewed.note, signal, *state]

    return app, {"order": order, "broken": broken, "part": part, "whatever": whatever, "narrow": narrow}


async def live_through(app: hf.App, workflows: Any) -> hf.RunHandle[Any]:
    """Let a run do everything that stores values."""
    first: Any = {"name": "first", "payload": f"{HUSH} first", "signal_id": "f-1"}
    run: hf.RunHandle[Any] = await app.start(workflows["order"], HUSH, request_id="r-1", with_signal=first)
    again = await app.start(workflows["order"], HUSH, request_id="r-1", with_signal=first)
    assert again.run_id == run.run_id
    await wait_for_event(run, "TaskCreated")
    [task] = await app.tasks.list(run_id=run.run_id)
    assert msgspec.json.decode(task.payload) == {"card": HUSH}
    who = hf.Actor("ann", roles=("ops",))
    await app.tasks.comment(task.task_id, f"{HUSH} comment", actor=who)
    await app.tasks.complete(task.task_id, {"note": f"{HUSH} note"}, actor=who)
    assert await run.update("add", more=f"{HUSH} update") == f"{HUSH} update added"
    assert await run.query("state") == [f"{HUSH} update"]
    await run.signal("later", f"{HUSH} unread")
    await run.signal("go", f"{HUSH} go", signal_id="g-1")
    await run.signal("go", f"{HUSH} go", signal_id="g-1")
    assert f"{HUSH} unread" in [mail.payload for mail in await run.mailbox()]
    assert await run.result() == [
        f"{HUSH} first",
        f"{HUSH} charged",
        f"{HUSH} packed",
        f"{HUSH} booked part",
        f"{HUSH} note",
        f"{HUSH} go",
        f"{HUSH} update",
    ]
    failed = await app.start(workflows["broken"], HUSH)
    with pytest.raises(RunFailed, match=HUSH):
        await failed.result()
    refused = await app.start(workflows["narrow"])
    await refused.signal("note", f"{HUSH} is no number")
    store = app.runtime().store
    while not (letters := await store.find(DeadLetterQuery(run_id=refused.run_id))):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert HUSH.encode() in letters[0].envelope
    return run


OPTIONS = hf.NodeOptions(queues=("slow",), cached_runs=0, drain_s=2.0)


def contents_of(path: Path) -> bytes:
    return b"".join(file.read_bytes() for file in path.parent.iterdir() if file.is_file())


@pytest.mark.contract("SEC-2")
async def test_nothing_readable_is_in_a_sqlite_file_or_its_log(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    app, workflows = build([hf.Encryption({"k1": K1})])
    async with asyncio.timeout(60), app.node(f"sqlite:///{path}", options=OPTIONS):
        await live_through(app, workflows)
        while_open = contents_of(path)
        assert b"aes-gcm" in while_open
        assert HUSH.encode() not in while_open
    assert HUSH.encode() not in contents_of(path)
    plain, plain_workflows = build([])
    other = tmp_path / "plain.db"
    async with asyncio.timeout(60), plain.node(f"sqlite:///{other}", options=OPTIONS):
        await live_through(plain, plain_workflows)
        assert HUSH.encode() in contents_of(other), "the search would find it"


@pytest.mark.contract("SEC-2")
async def test_nothing_readable_is_in_the_tables_of_postgresql(postgres_url: str) -> None:
    app, workflows = build([hf.Encryption({"k1": K1})])
    async with asyncio.timeout(60), app.node(postgres_url, options=OPTIONS):
        await live_through(app, workflows)
    db = await asyncpg.connect(postgres_url)
    try:
        tables = await db.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'holdfast'")
        text = "".join([str(await db.fetch(f"SELECT t::text FROM holdfast.{name} t")) for (name,) in tables])
    finally:
        await db.close()
    assert "aes-gcm" in text
    assert HUSH not in text
    assert HUSH.encode().hex() not in text


@pytest.mark.slow
@pytest.mark.contract("SEC-2")
@pytest.mark.parametrize("encrypts", [True, False], ids=["encrypted", "plain"])
async def test_nothing_readable_is_in_any_file_of_postgresql(postgres: Installation, encrypts: bool) -> None:
    """Tables as they are on the disk, and the write-ahead log with everything that was ever written to them."""
    server = postgres.server()
    app, workflows = build([hf.Encryption({"k1": K1})] if encrypts else [])
    store = await hf.PostgresStore.open(server.dsn)
    try:
        await store.migrate()
        server.keep_uncompressed()
        async with asyncio.timeout(60), app.node(store, options=OPTIONS):
            await live_through(app, workflows)
    finally:
        await store.close()
    files = server.files()
    for name in ("tables", "write-ahead log"):
        assert (HUSH.encode() in files[name]) is not encrypts, name
        assert (b"aes-gcm" in files[name]) is encrypts, name
    assert HUSH.encode() not in files["log"]


@pytest.mark.contract("SEC-2", "QUE-1", "SIG-5")
async def test_a_new_key_encrypts_and_the_old_one_still_reads_and_recognises(tmp_path: Path) -> None:
    address = f"sqlite:///{tmp_path}/shop.db"
    app, workflows = build([hf.Encryption({"k1": K1})])
    async with asyncio.timeout(60), app.node(address, options=OPTIONS):
        old = await live_through(app, workflows)
    app, workflows = build([hf.Encryption({"k2": K2, "k1": K1})])
    async with asyncio.timeout(60), app.node(address, options=OPTIONS):
        again = await app.start(workflows["order"], HUSH, request_id="r-1")
        assert again.run_id == old.run_id
        assert (await again.result())[1] == f"{HUSH} charged"
        with pytest.raises(Conflict):
            await app.start(workflows["order"], "another card", request_id="r-1")
        accepted = await again.signal("go", f"{HUSH} go", signal_id="g-1")
        assert accepted.signal_id == "g-1"
        with pytest.raises(Conflict):
            await again.signal("go", "another payload", signal_id="g-1")
        new = await app.start(workflows["part"], HUSH, request_id="r-2")
        assert await new.result() == f"{HUSH} part"
    app, workflows = build([hf.Encryption({"k2": K2})])
    async with asyncio.timeout(60), app.node(address, options=OPTIONS):
        again = await app.start(workflows["part"], HUSH, request_id="r-2")
        assert again.run_id == new.run_id
        assert await again.result() == f"{HUSH} part"
        with pytest.raises(PayloadUnreadable):
            await app.run(old.run_id).result()
        assert (await app.start(workflows["order"], HUSH, request_id="r-1")).run_id == old.run_id


@pytest.mark.contract("SEC-2", "QUE-6")
@pytest.mark.parametrize("store", ["sqlite", "postgres"])
async def test_a_later_input_of_a_debounced_run_is_sealed(
    store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Whichever request it came with: it is opened by the run that takes it."""
    address = f"sqlite:///{tmp_path}/shop.db" if store == "sqlite" else request.getfixturevalue("postgres_url")
    app, workflows = build([hf.Encryption({"k1": K1})])
    key = hf.Debounce("card", 1, 60)
    async with asyncio.timeout(60), app.node(address, options=OPTIONS):
        first = await app.start(workflows["part"], "another card", debounce=key, request_id="r-1")
        for _ in range(2):
            again = await app.start(workflows["part"], HUSH, debounce=key, request_id="r-2")
            assert again.run_id == first.run_id
        assert await first.result() == f"{HUSH} part"
    if store == "sqlite":
        assert HUSH.encode() not in contents_of(tmp_path / "shop.db")


@pytest.mark.contract("SEC-2")
async def test_a_run_waits_for_a_node_that_has_its_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    address = f"sqlite:///{tmp_path}/shop.db"
    app, workflows = build([hf.Encryption({"k1": K1})])
    async with asyncio.timeout(60), app.node(address):
        run = await app.start(workflows["order"], HUSH)
        await wait_for_event(run, "SignalWaiting")
        await app.start(workflows["part"], HUSH)
    other, others = build([hf.Encryption({"k2": K2})])
    store = await open_store(load_settings({}, store=address))
    try:
        async with asyncio.timeout(60), other.node(store, options=OPTIONS):
            fresh = await other.start(others["part"], "fresh")
            await other.run(run.run_id).signal("first", "opened with k2 only")
            assert await fresh.result() == "fresh part"
            await logged(caplog, f"run {run.run_id} is deferred")
            heads = [head.run_id for head in await other.runtime().store.find(RunQuery())]
            assert {run.run_id, fresh.run_id} <= set(heads)
    finally:
        await store.close()
    app, workflows = build([hf.Encryption({"k1": K1, "k2": K2})])
    async with asyncio.timeout(60), app.node(address, options=OPTIONS):
        again = app.run(run.run_id)
        await wait_for_event(again, "TaskCreated")
        events = await again.events()
        assert not any(event.event_type in ("RunFailed", "RunPaused") for event in events)


async def logged(caplog: pytest.LogCaptureFixture, words: str) -> None:
    """Wait until a node has logged this."""
    while words not in caplog.text:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.mark.contract("SEC-2")
async def test_a_process_without_keys_takes_no_runs_shows_no_bytes_and_stores_no_value(tmp_path: Path) -> None:
    address = f"sqlite:///{tmp_path}/shop.db"
    app, workflows = build([hf.Encryption({"k1": K1})])
    async with asyncio.timeout(60), app.node(address, options=OPTIONS):
        run = await live_through(app, workflows)
        waiting = await app.start(workflows["order"], HUSH)
        await wait_for_event(waiting, "SignalWaiting")
    plain, plain_workflows = build([])
    with pytest.raises(PayloadsSealed, match="keys"):
        async with plain.node(address):
            pass
    with pytest.raises(PayloadsSealed):
        async with plain.node(address, options=hf.NodeOptions(takes_runs=False, queues=("slow",))):
            pass
    async with plain.connect(address):
        with pytest.raises(PayloadsSealed):
            await plain.start(plain_workflows["part"], HUSH)
        with pytest.raises(PayloadsSealed):
            await plain.run(waiting.run_id).signal("first", HUSH)
        with pytest.raises(PayloadUnreadable):
            await plain.run(run.run_id).result()
        assert [mail.payload for mail in await plain.run(run.run_id).mailbox()] == [{"$holdfast": "encrypted"}]
        await plain.run(waiting.run_id).cancel(actor="ann")  # it holds no value


@pytest.mark.contract("SEC-2")
async def test_keys_can_be_given_to_every_node_before_one_encrypts(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    app, workflows = build([hf.Encryption({"k1": K1}, encrypts=False)])
    async with asyncio.timeout(60), app.node(f"sqlite:///{path}", options=OPTIONS):
        run = await app.start(workflows["order"], HUSH, request_id="r-1")
        await wait_for_event(run, "SignalWaiting")
        assert HUSH.encode() in contents_of(path)
    app, workflows = build([hf.Encryption({"k1": K1})])
    async with asyncio.timeout(60), app.node(f"sqlite:///{path}", options=OPTIONS):
        again = await app.start(workflows["order"], HUSH, request_id="r-1")
        assert again.run_id == run.run_id
        await app.run(run.run_id).signal("first", "second half is encrypted")
        again = app.run(run.run_id)
        await wait_for_event(again, "TaskCreated")
        events = await again.events()
    assert isinstance(events[0].data, RunQueued)
    assert events[0].data.input == msgspec.Raw(b'{"card":"' + HUSH.encode() + b'"}')
    assert b"second half is encrypted" not in contents_of(path)


@pytest.mark.contract("SEC-2")
async def test_a_value_that_is_moved_to_another_run_or_changed_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    app, workflows = build([hf.Encryption({"k1": K1})])
    async with asyncio.timeout(60), app.node(f"sqlite:///{path}"):
        one = await app.start(workflows["part"], f"{HUSH} one")
        two = await app.start(workflows["part"], f"{HUSH} two")
        await one.result(), await two.result()
    with closing(sqlite3.connect(path)) as db, db:
        of = "WHERE event_type = 'RunCompleted' AND run_no = (SELECT run_no FROM runs WHERE run_id = ?)"
        [data] = db.execute(f"SELECT data FROM events {of}", (one.run_id,)).fetchone()
        assert db.execute(f"UPDATE events SET data = ? {of}", (data, two.run_id)).rowcount == 1
    app, workflows = build([hf.Encryption({"k1": K1})])
    async with asyncio.timeout(60), app.node(f"sqlite:///{path}"):
        assert await app.run(one.run_id).result() == f"{HUSH} one part"
        with pytest.raises(PayloadUnreadable):
            await app.run(two.run_id).result()


@pytest.mark.contract("SIG-11", "SEC-2")
async def test_limits_are_for_what_the_sender_sent(tmp_path: Path) -> None:
    app, workflows = build([hf.Encryption({"k1": K1})], limits=hf.Limits(signal_payload_bytes=1_000))
    async with asyncio.timeout(60), app.node(f"sqlite:///{tmp_path}/shop.db"):
        run = await app.start(workflows["order"], HUSH)
        await run.signal("first", "x" * 998)
        with pytest.raises(PayloadTooLarge):
            await run.signal("first", "x" * 999)
        with pytest.raises(InvalidInput, match="reserved"):
            await run.signal("later", {"$holdfast": ["aes-gcm"], "data": "aaaa"})
        with pytest.raises(InvalidInput, match="reserved"):
            await app.start(workflows["whatever"], {"$holdfast": ["aes-gcm"], "data": "aaaa"})


@pytest.mark.contract("SEC-2")
async def test_keys_come_from_settings_and_from_a_file(tmp_path: Path) -> None:
    path, keys = tmp_path / "shop.db", tmp_path / "keys"
    keys.write_text(f"k2:{K2.hex()}\nk1:{K1.hex()}\n")
    for environment in (
        {"HOLDFAST_ENCRYPTION__KEYS": f"k1:{K1.hex()}"},
        {"HOLDFAST_ENCRYPTION__KEYS_FILE": str(keys)},
    ):
        settings = load_settings({"HOLDFAST_STORE": f"sqlite:///{path}", **environment})
        assert K1.hex() not in repr(settings)
        store = await open_store(settings)
        try:
            app, workflows = build([])
            async with asyncio.timeout(60), app.node(store, options=OPTIONS):
                run = await app.start(workflows["part"], HUSH, request_id="r-1")
                assert await run.result() == f"{HUSH} part"
        finally:
            await store.close()
    assert HUSH.encode() not in contents_of(path)
    for wrong in ("k1", "k1:abc", f"k1:{K1.hex()},k1:{K2.hex()}", f"a b:{K1.hex()}"):
        with pytest.raises(InvalidInput) as problem:
            await open_store(load_settings({}, store=f"sqlite:///{path}", encryption={"keys": wrong}))
        assert K1.hex() not in str(problem.value)


@pytest.mark.contract("SEC-2")
async def test_a_node_that_was_started_before_encryption_leaves_such_runs_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A node without keys may be running when another one begins to encrypt."""
    address = f"sqlite:///{tmp_path}/shop.db"
    plain, _ = build([])
    app, workflows = build([hf.Encryption({"k1": K1})])

    class Slow(StoreProxy):
        """Gives the node no run until the other one has stored encrypted values."""

        async def claim(self, *args: Any) -> list[LoadedRun]:
            claimed: list[LoadedRun] = await self.inner.claim(*args) if go.is_set() else []
            return claimed

    go = asyncio.Event()
    store = await open_store(load_settings({}, store=address))
    try:
        async with asyncio.timeout(60), plain.node(Slow(store), options=OPTIONS), app.connect(address):
            run = await app.start(workflows["order"], HUSH)
            await run.signal("first", HUSH)
            go.set()
            await logged(caplog, f"run {run.run_id} is deferred")
            assert [event.event_type for event in await run.events()] == ["RunQueued"]
    finally:
        await store.close()
    async with asyncio.timeout(60), app.node(address, options=OPTIONS):
        await wait_for_event(app.run(run.run_id), "TaskCreated")


async def test_a_codec_of_ones_own_gets_every_value_with_its_run(tmp_path: Path) -> None:
    class Upper:
        """Swaps the case."""

        name = "upper"

        def __init__(self) -> None:
            self.seen: list[str] = []

        async def open(self, store: Any) -> None:
            pass

        async def encode(self, payloads: Any) -> list[bytes | None]:
            self.seen += [payload.scope for payload in payloads]
            return [payload.data.swapcase() for payload in payloads]

        async def decode(self, payloads: Any) -> list[bytes | str]:
            return [payload.data.swapcase() for payload in payloads]

        def fingerprint(self, scope: str, sha256: str) -> str:
            return sha256

    codec = Upper()
    app, workflows = build([codec])
    async with asyncio.timeout(60), app.node(f"sqlite:///{tmp_path}/shop.db", options=OPTIONS):
        run = await live_through(app, workflows)
        assert run.run_id in codec.seen
        assert isinstance(app.runtime().store.inner, SealingStore)  # type: ignore[attr-defined]


@pytest.mark.contract("SEC-2", "FMT-2")
async def test_a_restored_copy_is_read_with_the_same_keys(tmp_path: Path) -> None:
    path, copy, restored = (tmp_path / name for name in ("shop.db", "copy.db", "restored.db"))
    app, workflows = build([hf.Encryption({"k1": K1})])
    async with asyncio.timeout(60), app.node(f"sqlite:///{path}", options=OPTIONS):
        run = await live_through(app, workflows)
        await asyncio.to_thread(copy_store, path, copy)
    entry = AuditEntry(entry_id="e-1", operation="store.restore", actor="ann", at=SystemClock().now())
    await asyncio.to_thread(restore_store, copy, restored, entry)
    assert HUSH.encode() not in copy.read_bytes() + restored.read_bytes()
    app, workflows = build([hf.Encryption({"k2": K2, "k1": K1})])
    async with asyncio.timeout(60), app.node(f"sqlite:///{restored}", options=OPTIONS):
        assert (await app.start(workflows["order"], HUSH, request_id="r-1")).run_id == run.run_id
        assert (await app.run(run.run_id).result())[1] == f"{HUSH} charged"


@pytest.mark.contract("SEC-2", "CAN-1")
async def test_a_rotation_carries_values_on_encrypted_and_the_rest_is_read_without_keys(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    app = hf.App("shop", codecs=[hf.Encryption({"k1": K1})])

    @app.activity(retry=hf.Retry(max_attempts=1))
    async def fail(card: str) -> None:
        raise ValueError(f"{card} is declined")

    @app.workflow
    async def rotate(card: str, rounds: int) -> str:
        async def add(more: str) -> str:
            await hf.wait_until(lambda: rounds == 0)
            return f"{more} added"

        hf.on_update("add", add)
        with suppress(hf.errors.ActivityFailed):
            await fail(card)
        await hf.wait_signal("go", str)
        if rounds:
            hf.continue_as_new(card, rounds - 1)
        return card

    async with asyncio.timeout(60), app.node(f"sqlite:///{path}", options=OPTIONS):
        run = await app.start(rotate, HUSH, 1)
        update = asyncio.create_task(run.update("add", more=f"{HUSH} update"))
        await wait_for_event(run, "UpdateAccepted")
        await run.signal("go", HUSH)
        assert await update == f"{HUSH} update added"
        await run.signal("go", HUSH)
        assert await run.result() == HUSH
        sealed_events = [event async for event in _events(path, run.run_id)]
    assert HUSH.encode() not in contents_of(path)
    rotated = since_rotation(sealed_events)
    assert isinstance(rotated[0].data, ContinuedAsNew)
    assert b'"plan_id":"rotate"' in bytes(rotated[0].data.carried)
    assert b'"updates"' in bytes(rotated[0].data.carried)
    state = state_of(run.run_id, rotated)
    assert (state.plan_id, state.version) == ("rotate", sealed_events[-1].run_seq)


async def _events(path: Path, run_id: str) -> AsyncIterator[Event]:
    """Yield the events of a run as they are stored."""
    store = await hf.SqliteStore.open(path)
    try:
        for event in await store.read_events(run_id):
            yield event
    finally:
        await store.close()


@pytest.mark.contract("SEC-2")
@pytest.mark.parametrize("codecs", [[], [hf.Encryption({"k1": K1})]], ids=["without keys", "with keys"])
async def test_the_doctor_finds_nothing_amiss(tmp_path: Path, codecs: list[hf.Encryption]) -> None:
    app, workflows = build([hf.Encryption({"k1": K1})])
    async with asyncio.timeout(60), app.node(f"sqlite:///{tmp_path}/shop.db", options=OPTIONS):
        await live_through(app, workflows)
    store = await hf.SqliteStore.open(tmp_path / "shop.db")
    try:
        report = await examine(await sealed(store, codecs, takes_runs=False), SystemClock())
        [found] = [finding for finding in report.findings if finding.subject == "runs"]
        assert (found.level, found.sentence) == ("fine", "4 runs were read in full, and nothing is amiss")
    finally:
        await store.close()
