"""A row that cannot be read is left out of its list and named; the others are listed all the same."""

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import holdfast as hf
from holdfast.clock import SystemClock
from holdfast.core.audit import AuditEntry
from holdfast.engine.check_histories import _heads
from holdfast.engine.observe.doctor import examine
from holdfast.errors import Conflict, StoreCorrupt
from holdfast.store.port import MailboxQuery, RunQuery, WaitQuery
from holdfast.store.queries import AuditQuery, DeadLetterQuery
from tests.engine.harness import wait_for_event
from tests.service.in_process import serve_in_process

WRONG = {"task": '{"route":null}', "snapshot": '{"status":5}', "tags": "[5]"}
"""JSON that a column cannot hold."""


def asking() -> tuple[hf.App, Any]:
    """Return an app whose runs ask somebody."""
    app = hf.App("asking")

    @app.workflow
    async def ask() -> bool:
        return await hf.task("approve", bool)

    return app, ask


async def damaged(path: Path, table: str, column: str, key: str) -> tuple[str, list[str], list[str]]:
    """Make a file with five runs and tasks; spoil a row, and return its key, and the ids of runs and of tasks."""
    app, ask = asking()
    async with asyncio.timeout(60), app.node(f"sqlite:///{path}"):
        runs = [await app.start(ask, run_id=f"run-{number}") for number in range(5)]
        for run in runs:
            await wait_for_event(run, "TaskCreated")
            await run.signal("other", {"n": 1}, signal_id="s-1")
        tasks = [task.task_id for task in await app.tasks.list()]
    with closing(sqlite3.connect(path)) as db, db:
        [spoilt] = db.execute(f"SELECT {key} FROM {table} ORDER BY {key} LIMIT 1 OFFSET 4").fetchone()
        db.execute(f"UPDATE {table} SET {column} = ? WHERE {key} = ?", (WRONG[column], spoilt))
    return str(spoilt), [run.run_id for run in runs], tasks


@pytest.mark.contract("TSK-1", "MSG-3")
async def test_one_damaged_task_does_not_hide_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spoilt, _, tasks = await damaged(tmp_path / "store.db", "tasks", "task", "task_id")
    app, _ = asking()
    address = f"sqlite:///{tmp_path}/store.db"
    async with asyncio.timeout(60), serve_in_process(address, app=app) as server:
        with caplog.at_level(logging.ERROR, "holdfast.store"):
            found = await app.tasks.list()
        assert [task.task_id for task in found] == [task_id for task_id in tasks if task_id != spoilt]
        assert found.unreadable == (spoilt,)  # type: ignore[attr-defined]
        assert spoilt in caplog.text
        seen, unreadable, cursor = [], [], ""
        while True:
            status, page = await server.rest("tasks.list", {"limit": 1, **({"cursor": cursor} if cursor else {})})
            assert status == 200
            seen += [item["task_id"] for item in page["items"]]
            unreadable += page["unreadable"]
            cursor = page["next"]
            if cursor is None:
                break
        assert seen == [task_id for task_id in tasks if task_id != spoilt]
        assert set(unreadable) == {spoilt}
        with pytest.raises(StoreCorrupt, match=spoilt):
            await app.tasks.get(spoilt)
        report = await examine(app.runtime().store, SystemClock())
        assert any(spoilt in finding.sentence for finding in report.findings if finding.level == "wrong")


@pytest.mark.contract("QUE-4", "MSG-3")
@pytest.mark.parametrize("column", ["snapshot", "tags"])
async def test_one_damaged_run_does_not_hide_the_others(column: str, tmp_path: Path) -> None:
    spoilt, runs, _ = await damaged(tmp_path / "store.db", "runs", column, "run_id")
    app, _ = asking()
    async with asyncio.timeout(60), app.connect(f"sqlite:///{tmp_path}/store.db"):
        store = app.runtime().store
        for newest in (False, True):
            found = await store.find(RunQuery(newest=newest))
            assert sorted(head.run_id for head in found) == [run_id for run_id in runs if run_id != spoilt]
            assert found.unreadable == (spoilt,)
            [first] = await store.find(RunQuery(newest=newest, limit=1)) or [None]
            assert first is None or first.run_id != spoilt
        heads = [head async for head in _heads(store)]
        assert [head.details["run_id"] for head in heads if isinstance(head, StoreCorrupt)] == [spoilt]
        report = await examine(store, SystemClock())
        assert any(spoilt in finding.run_ids for finding in report.findings if finding.level == "wrong")


@pytest.mark.contract("SIG-9")
async def test_one_damaged_signal_does_not_hide_the_others(tmp_path: Path) -> None:
    await damaged(tmp_path / "store.db", "tasks", "task", "task_id")
    with closing(sqlite3.connect(tmp_path / "store.db")) as db, db:
        db.execute("UPDATE signals SET payload = 'nul' WHERE run_no = (SELECT run_no FROM runs WHERE run_id = 'run-2')")
    app, _ = asking()
    async with asyncio.timeout(60), app.connect(f"sqlite:///{tmp_path}/store.db"):
        found = await app.runtime().store.find(MailboxQuery())
        assert [signal.run_id for signal in found] == ["run-0", "run-1", "run-3", "run-4"]
        assert found.unreadable == ("run-2/other/s-1",)


Spoil = Callable[[str], Awaitable[None]]


@pytest.fixture(params=["sqlite", "postgres"])
def spoiled(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Spoil]:
    """Return the address of a new store, and what carries out SQL in it."""
    if request.param == "sqlite":

        async def in_file(sql: str) -> None:
            with closing(sqlite3.connect(tmp_path / "store.db")) as db, db:
                assert db.execute(sql.replace("holdfast.", "")).rowcount > 0

        return f"sqlite:///{tmp_path}/store.db", in_file
    address: str = request.getfixturevalue("postgres_url")

    async def on_server(sql: str) -> None:
        connection = await asyncpg.connect(address)
        assert await connection.execute(sql.replace("CAST(x'ff' AS TEXT)", "'\\xff'::bytea")) != "UPDATE 0"
        await connection.close()

    return address, on_server


def waiting(authoriser: Any = None) -> tuple[hf.App, Any]:
    """Return an app whose runs wait, and take what does not fit for a dead letter."""
    app = hf.App("waiting", authoriser=authoriser)

    @app.workflow
    async def wait() -> int:
        return await hf.wait_signal("number", int)

    return app, wait


async def five_waiting(address: str) -> None:
    """Make five runs that wait; each has a dead letter, a signal that nobody takes, and an entry in the audit log."""
    app, wait = waiting()
    async with asyncio.timeout(60), app.node(address) as node:
        for number in range(5):
            run = await app.start(wait, run_id=f"run-{number}")
            await run.signal("number", "none", signal_id="s-0")
            await run.signal("other", number, signal_id="s-1")
            await wait_for_event(run, "SignalDeadLettered")
            entry = AuditEntry(entry_id=f"e-{number}", actor="ann", operation="test", run_id=run.run_id)
            await node.store.append_audit([entry])


OF_RUN = "run_no IN (SELECT run_no FROM holdfast.runs WHERE run_id IN ('run-1', 'run-4'))"
LETTERS = f"UPDATE holdfast.dead_letters SET detail = CAST(x'ff' AS TEXT) WHERE {OF_RUN}"
ENTRIES = """UPDATE holdfast.audit_log SET entry = '{"at":"x"}' WHERE run_id IN ('run-1', 'run-4')"""
MAIL = f"UPDATE holdfast.signals SET payload = 'nul' WHERE name = 'other' AND {OF_RUN}"
LEFT = ["run-0", "run-2", "run-3"]


@pytest.mark.contract("MSG-3", "SIG-9")
@pytest.mark.parametrize("limit", [1, 2, 500])
async def test_no_list_fails_for_damaged_rows_among_others(spoiled: tuple[str, Spoil], limit: int) -> None:
    address, spoil = spoiled
    await five_waiting(address)
    app, _ = waiting()
    async with asyncio.timeout(60), serve_in_process(address, app=app) as server:
        await spoil(LETTERS)
        await spoil(ENTRIES)
        store = app.runtime().store
        for operation in ("letters.list", "audit.list"):
            items = await all_pages(server, operation, limit)
            assert [item["run_id"] for item in items] == LEFT, items
        letters = await store.find(DeadLetterQuery())
        entries = await store.find(AuditQuery())
        assert [letter.run_id for letter in letters] == [entry.run_id for entry in entries] == LEFT
        assert len(letters.unreadable) == 2
        assert entries.unreadable == ("e-1", "e-4")
        [spoilt, _] = letters.unreadable
        assert (await server.rest("letters.get", {"letter_id": spoilt}))[0] == 500
        [refused, settled] = await store.settle_dead_letters([spoilt, letters[0].letter_id], "drop", "ann")
        assert isinstance(refused.error, Conflict)  # type: ignore[union-attr]
        assert settled.letter_id == letters[0].letter_id  # type: ignore[union-attr]
        await spoil(MAIL)
        assert [item["run_id"] for item in await all_pages(server, "signals.unconsumed", limit)] == LEFT
        assert [mail.name for mail in await app.run("run-2").mailbox()] == ["other"]
        assert await app.run("run-4").mailbox() == []


async def all_pages(server: Any, operation: str, limit: int) -> list[Any]:
    items, cursor = [], ""
    while cursor is not None:
        status, page = await server.rest(operation, {"limit": limit, **({"cursor": cursor} if cursor else {})})
        assert status == 200
        items += page["items"]
        cursor = page["next"]
    return sorted(items, key=lambda item: str(item["run_id"]))


@pytest.mark.contract("SIG-12")
@pytest.mark.parametrize("damage", ["name = CAST(x'ff' AS TEXT)", "since = 'soon'", "token = x'00'"])
async def test_one_damaged_wait_does_not_hide_the_others(tmp_path: Path, damage: str) -> None:
    address = f"sqlite:///{tmp_path}/store.db"
    await five_waiting(address)
    with closing(sqlite3.connect(tmp_path / "store.db")) as db, db:
        db.execute(f"UPDATE waits SET {damage} WHERE {OF_RUN}".replace("holdfast.", ""))
    app, _ = waiting()
    async with asyncio.timeout(60), serve_in_process(address, app=app) as server:
        found = await app.runtime().store.find(WaitQuery())
        assert [wait.run_id for wait in found] == LEFT
        assert found.unreadable == ("run-1/number", "run-4/number")
        for limit in (1, 500):
            assert [item["run_id"] for item in await all_pages(server, "signals.waiting", limit)] == LEFT


@pytest.mark.contract("API-4", "SIG-9")
async def test_of_a_batch_only_the_signals_to_a_damaged_run_are_refused(spoiled: tuple[str, Spoil]) -> None:
    address, spoil = spoiled
    await five_waiting(address)
    await spoil("UPDATE holdfast.runs SET snapshot = '{\"status\":5}' WHERE run_id = 'run-2'")
    app, _ = waiting(lambda request: True)
    async with asyncio.timeout(60), app.connect(address):
        answers = await app.signal_many([{"run_id": f"run-{n}", "name": "number", "payload": n} for n in range(5)])
        kinds = [type(answer).__name__ for answer in answers]
        assert kinds == [*["AcceptedSignalResult"] * 2, "Conflict", *["AcceptedSignalResult"] * 2]
