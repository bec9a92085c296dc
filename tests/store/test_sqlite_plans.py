"""Every statement on the way of a turn, a signal or a claim finds its rows by an index, on a filled file."""

import sqlite3
from pathlib import Path

import pytest

from holdfast.store.sqlite import SqliteStore
from holdfast.testing.samples import SampleNode, activity, complete, message, new_run, record, signal, timer, wait

MAY_BE_WALKED = ("SCAN json_each", "SCAN CONSTANT ROW", "SCAN nodes", "SCAN holdfast_schema", "SCAN sqlite_master")


class Recorder:
    """Remembers the statements that are executed, with values put in."""

    def __init__(self) -> None:
        self.statements: dict[str, None] = {}

    def __call__(self, statement: str) -> None:
        if statement.lstrip().startswith(("SELECT", "UPDATE", "DELETE", "INSERT")):
            self.statements[statement] = None


@pytest.mark.contract("STO-1")
async def test_hot_statements_use_their_indexes(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = await SqliteStore.open(path)
    await store.migrate()
    node = SampleNode(store)
    for number in range(50):
        await node.start(f"run-{number}", wait("go"), timer(2**61), activity("charge"))
    recorder = Recorder()
    store._database.connection.set_trace_callback(recorder)
    await store.create([new_run("new", request_id="r")])
    await store.deliver([signal("run-1", signal_id="s", require_waiting=True), message("run-1")])
    await node.step("run-1", records=[record("run-1")])
    await node.step("run-2", complete())
    await store.next_due(node.name)
    await SampleNode(store, "other").claim()
    await store.release(node.name, ["run-3"])
    await store.read_events("run-1", 2)
    store._database.connection.set_trace_callback(None)
    await store.close()
    db = sqlite3.connect(path)
    walked = [
        f"{detail}: {statement}"
        for statement in recorder.statements
        for *_, detail in db.execute(f"EXPLAIN QUERY PLAN {statement}")
        if detail.startswith("SCAN") and not detail.startswith(MAY_BE_WALKED)
    ]
    db.close()
    assert len(recorder.statements) > 25
    assert walked == []


@pytest.mark.contract("STO-1")
@pytest.mark.parametrize(
    ("statement", "index"),
    [
        (
            "SELECT 1 FROM signals WHERE run_no = 1 AND name = 'a' AND signal_id = 'b' AND accepted_at > 0",
            "signals_by_id",
        ),
        ("SELECT run_no FROM runs WHERE lease_owner = 'a' ORDER BY run_no LIMIT 1", "runs_owned"),
        (
            "SELECT run_no FROM runs WHERE lease_owner = 'a' AND ready_at <= 1 ORDER BY ready_at, run_no",
            "runs_owned_ready",
        ),
        (
            "SELECT run_no FROM runs WHERE lease_owner IS NULL AND ready_at <= 1 ORDER BY ready_at, run_no",
            "runs_free",
        ),
        ("SELECT node FROM nodes WHERE lease_until <= 1 ORDER BY lease_until", "nodes_lease"),
        ("SELECT min(due_at) FROM messages WHERE run_no = 1", "messages_due"),
    ],
)
async def test_each_index_serves_its_question_without_sorting(tmp_path: Path, statement: str, index: str) -> None:
    store = await SqliteStore.open(tmp_path / "store.db")
    await store.migrate()
    await store.close()
    db = sqlite3.connect(tmp_path / "store.db")
    details = [detail for *_, detail in db.execute(f"EXPLAIN QUERY PLAN {statement}")]
    db.close()
    assert len(details) == 1, details
    assert index in details[0]
