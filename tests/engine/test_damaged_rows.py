"""A row that cannot be read is left out of its list and named; the others are listed all the same."""

import asyncio
import logging
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.engine.checking import _heads
from holdfast.engine.doctor import examine
from holdfast.errors import StoreCorrupt
from holdfast.ports import SystemClock
from holdfast.store.port import MailboxQuery, RunQuery
from tests.engine.place import until_event
from tests.service.stage import on_stage

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
    async with asyncio.timeout(10), app.node(f"sqlite:///{path}"):
        runs = [await app.start(ask, run_id=f"run-{number}") for number in range(5)]
        for run in runs:
            await until_event(run, "TaskCreated")
            await run.signal("other", {"n": 1}, signal_id="s-1")
        tasks = [task.task_id for task in await app.tasks.list()]
    with sqlite3.connect(path) as db:
        [spoilt] = db.execute(f"SELECT {key} FROM {table} ORDER BY {key} LIMIT 1 OFFSET 4").fetchone()
        db.execute(f"UPDATE {table} SET {column} = ? WHERE {key} = ?", (WRONG[column], spoilt))
    return str(spoilt), [run.run_id for run in runs], tasks


@pytest.mark.contract("TSK-1", "MSG-3")
async def test_one_damaged_task_does_not_hide_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spoilt, _, tasks = await damaged(tmp_path / "store.db", "tasks", "task", "task_id")
    app, _ = asking()
    address = f"sqlite:///{tmp_path}/store.db"
    async with asyncio.timeout(20), on_stage(address, app=app) as stage:
        with caplog.at_level(logging.ERROR, "holdfast.store"):
            found = await app.tasks.list()
        assert [task.task_id for task in found] == [task_id for task_id in tasks if task_id != spoilt]
        assert found.unreadable == (spoilt,)  # type: ignore[attr-defined]
        assert spoilt in caplog.text
        seen, unreadable, cursor = [], [], ""
        while True:
            status, page = await stage.rest("tasks.list", {"limit": 1, **({"cursor": cursor} if cursor else {})})
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
        report = await examine(app.opened().store, SystemClock())
        assert any(spoilt in finding.sentence for finding in report.findings if finding.level == "wrong")


@pytest.mark.contract("QUE-4", "MSG-3")
@pytest.mark.parametrize("column", ["snapshot", "tags"])
async def test_one_damaged_run_does_not_hide_the_others(column: str, tmp_path: Path) -> None:
    spoilt, runs, _ = await damaged(tmp_path / "store.db", "runs", column, "run_id")
    app, _ = asking()
    async with asyncio.timeout(20), app.connect(f"sqlite:///{tmp_path}/store.db"):
        store = app.opened().store
        for newest in (False, True):
            found = await store.find_runs(RunQuery(newest=newest))
            assert sorted(head.run_id for head in found) == [run_id for run_id in runs if run_id != spoilt]
            assert found.unreadable == (spoilt,)
            [first] = await store.find_runs(RunQuery(newest=newest, limit=1)) or [None]
            assert first is None or first.run_id != spoilt
        heads = [head async for head in _heads(store)]
        assert [head.details["run_id"] for head in heads if isinstance(head, StoreCorrupt)] == [spoilt]
        report = await examine(store, SystemClock())
        assert any(spoilt in finding.run_ids for finding in report.findings if finding.level == "wrong")


@pytest.mark.contract("SIG-9")
async def test_one_damaged_signal_does_not_hide_the_others(tmp_path: Path) -> None:
    await damaged(tmp_path / "store.db", "tasks", "task", "task_id")
    with sqlite3.connect(tmp_path / "store.db") as db:
        db.execute("UPDATE signals SET payload = 'nul' WHERE run_no = (SELECT run_no FROM runs WHERE run_id = 'run-2')")
    app, _ = asking()
    async with asyncio.timeout(20), app.connect(f"sqlite:///{tmp_path}/store.db"):
        found = await app.opened().store.find_mailbox(MailboxQuery())
        assert [signal.run_id for signal in found] == ["run-0", "run-1", "run-3", "run-4"]
        assert found.unreadable == ("run-2/other/s-1",)  # type: ignore[attr-defined]
