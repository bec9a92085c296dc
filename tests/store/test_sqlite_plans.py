"""Every statement on the way of a turn, a signal or a claim finds its rows by an index, on a filled file."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from bench.search import SEARCHES, fill
from holdfast.core.admission import Overload, RunLimit
from holdfast.core.commands import PauseRun
from holdfast.core.events import NULL, ErrorInfo, RunStatus
from holdfast.store import search
from holdfast.store.port import FinishedRunQuery, Heartbeat, MailboxQuery, PurgePolicy, RunQuery, TaskQuery
from holdfast.store.sqlite import SqliteStore, queries
from holdfast.store.sqlite.admission import FIRST
from holdfast.store.sqlite.leases import NEXT_VISIBLE
from holdfast.testing.samples import (
    SampleNode,
    activity,
    complete,
    job,
    message,
    new_run,
    record,
    signal,
    task,
    timer,
    wait,
)
from holdfast.testing.store_suite.admission import admit, enqueue
from holdfast.testing.store_suite.jobs import queue_turn

MAY_BE_WALKED = (
    "SCAN json_each",
    "SCAN CONSTANT ROW",
    "SCAN nodes",
    "SCAN (subquery",
    "SCAN gates",
    "SCAN holdfast_schema",
    "SCAN sqlite_master",
)


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
    store._list = store._read  # type: ignore[method-assign]  # on the connection that is looked at
    store._database.connection.set_trace_callback(recorder)
    await store.create([new_run("new", request_id="r")])
    await store.deliver([signal("run-1", signal_id="s", require_waiting=True), message("run-1")])
    await node.step("run-1", records=[record("run-1")])
    await node.step("run-2", complete())
    await node.commit(await queue_turn(node, [job("run-4"), job("run-4", "other")], run="run-4"))
    await node.commit(await queue_turn(node, closed=["other"], run="run-4"))
    assert await store.next_due(node.name, None, ["mail"]) is not None
    assert len(await store.acquire_jobs("taker", ["mail", "post"], ["charge"], 10, 1_000)) == 1
    beats = [Heartbeat(run_id="run-4", step_id="charge", queue=queue, details=NULL) for queue in ("mail", "")]
    assert await store.heartbeat("taker", beats, 1_000) == [True, False]
    assert await store.heartbeat(node.name, [replace(beats[1], step_id="mine")], 1_000) == [True]
    await node.step("run-4", complete())
    await SampleNode(store, "other").claim()
    await store.renew("other", 60_000, [("order", "1")])
    await store.claim("other", 10, [("order", "1")])
    await store.next_due("other", [("order", "1")])
    await store.renew("gone", 1)
    await store.find_orphaned(0)
    await store.release(node.name, ["run-3"])
    await store.read_events("run-1", 2)
    policies: tuple[Overload, ...] = ("queue", "reject")
    for policy in policies:
        limit = RunLimit(at_once=1, per_key=1, starts=9, overload=policy)
        await enqueue(store, f"{policy}-1", f"{policy}-2", limit=limit, key="k")
    await admit(store, RunLimit(at_once=3, per_key=3, starts=5), claim_for="other")
    await SampleNode(store, "other").step("queue-1", complete())
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
async def test_a_turn_within_a_status_writes_no_index_of_runs(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "store.db")
    await store.migrate()
    node, database = SampleNode(store), store._database.connection
    await node.start("run-1", activity("charge"))
    recorder = Recorder()
    database.set_trace_callback(recorder)
    await node.step("run-1", activity("ship"))
    within = [each for each in recorder.statements if each.lstrip().startswith("UPDATE runs")]
    await node.step("run-1", PauseRun(error=ErrorInfo("VersionMismatch", "its code is missing")))
    database.set_trace_callback(None)
    [update] = within
    opened = [row for row in database.execute(f"EXPLAIN {update}") if row[1] == "OpenWrite"]
    assert len(opened) == 1  # the table
    for status, found in ((RunStatus.RUNNING, []), (RunStatus.PAUSED, ["run-1"])):
        assert [run.run_id for run in await store.find(RunQuery(status=status))] == found
    assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    await store.close()


@pytest.mark.contract("STO-1", "TSK-1")
@pytest.mark.parametrize(
    ("query", "plan"),
    [
        (TaskQuery(task_id="a"), "PRIMARY KEY (task_id=?"),
        (TaskQuery(run_id="run-1"), "tasks_by_run"),
        (TaskQuery(assignee="ann", status="OPEN"), "tasks_by_assignee (assignee=? AND status=? AND task_id>?)"),
        (TaskQuery(role="boss", status="OPEN"), "task_roles USING PRIMARY KEY (role=? AND status=?"),
        (TaskQuery(due_before=1, status="OPEN"), "tasks_by_due (status=? AND <expr><?)"),
        (
            TaskQuery(actor="ann", actor_roles=("boss",), status="OPEN"),
            "task_roles USING PRIMARY KEY (role=? AND status",
        ),
        (TaskQuery(actor="ann", actor_roles=("boss",), status="OPEN"), "tasks_by_assignee (assignee=? AND status=?"),
    ],
)
async def test_tasks_are_found_without_walking_through_all(tmp_path: Path, query: TaskQuery, plan: str) -> None:
    path = tmp_path / "store.db"
    store = await SqliteStore.open(path)
    await store.migrate()
    node = SampleNode(store)
    for number in range(200):
        await node.start(f"run-{number}", task("a", roles=(f"role-{number}",), assignee=f"person-{number}"), complete())
    recorder = Recorder()
    store._list = store._read  # type: ignore[method-assign]  # on the connection that is looked at
    store._database.connection.set_trace_callback(recorder)
    await store.find(query)
    store._database.connection.set_trace_callback(None)
    await store.close()
    db = sqlite3.connect(path)
    details = [row[-1] for statement in recorder.statements for row in db.execute(f"EXPLAIN QUERY PLAN {statement}")]
    db.close()
    assert [detail for detail in details if detail.startswith("SCAN") and not detail.startswith(MAY_BE_WALKED)] == []
    assert any(plan in detail for detail in details), details


@pytest.mark.contract("STO-1")
@pytest.mark.parametrize("before", [(2**62 - 1, ""), (5, "run-7"), (2**61, "gone")])
async def test_the_newest_runs_are_found_without_walking_or_sorting(tmp_path: Path, before: tuple[int, str]) -> None:
    path = tmp_path / "store.db"
    store = await SqliteStore.open(path)
    await store.migrate()
    await store.create([new_run(f"run-{number}", request_id=f"r-{number}") for number in range(20)])
    recorder = Recorder()
    store._list = store._read  # type: ignore[method-assign]  # on the connection that is looked at
    store._database.connection.set_trace_callback(recorder)
    await store.find(RunQuery(newest=True, before=before))
    store._database.connection.set_trace_callback(None)
    await store.close()
    db = sqlite3.connect(path)
    details = [row[-1] for statement in recorder.statements for row in db.execute(f"EXPLAIN QUERY PLAN {statement}")]
    db.close()
    assert "SEARCH runs USING INTEGER PRIMARY KEY (rowid>? AND rowid<?)" in details
    assert not [detail for detail in details if "B-TREE" in detail], details


@pytest.mark.contract("STO-1")
async def test_the_newest_runs_are_looked_for_in_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So no question keeps the process for long; and what an index leads to is found at once."""
    store = await SqliteStore.open(tmp_path / "store.db")
    await store.migrate()
    runs = [new_run(f"run-{number:02}", request_id=f"r-{number}", tags=(str(number % 7),)) for number in range(50)]
    await store.create([replace(new, reference_key=f"ref {new.run_id}") for new in runs])
    monkeypatch.setattr(queries, "WINDOW", 8)
    recorder = Recorder()
    store._list = store._read  # type: ignore[method-assign]  # on the connection that is looked at
    store._database.connection.set_trace_callback(recorder)
    assert [head.run_id for head in await store.find(RunQuery(newest=True, tag="3", limit=5))] == [
        "run-45", "run-38", "run-31", "run-24", "run-17",
    ]  # fmt: skip
    looked = [statement for statement in recorder.statements if "ORDER BY run_no DESC LIMIT" in statement]
    assert len([statement for statement in looked if "run_no >= " in statement]) == 5
    assert await store.find(RunQuery(newest=True, text="no such thing")) == []
    recorder.statements.clear()
    assert len(await store.find(RunQuery(newest=True, reference_key="ref run-00"))) == 1
    assert len(recorder.statements) == 2
    store._database.connection.set_trace_callback(None)
    await store.close()


@pytest.mark.contract("STO-1", "SIG-9")
@pytest.mark.parametrize(
    "query", [MailboxQuery(), MailboxQuery(after_run="run-7", after=1), MailboxQuery(unfinished=True, tenant="acme")]
)
async def test_what_nobody_has_taken_is_found_by_its_index(tmp_path: Path, query: MailboxQuery) -> None:
    path = tmp_path / "store.db"
    store = await SqliteStore.open(path)
    await store.migrate()
    await store.create([new_run(f"run-{number}", request_id=f"r-{number}") for number in range(20)])
    recorder = Recorder()
    store._list = store._read  # type: ignore[method-assign]  # on the connection that is looked at
    store._database.connection.set_trace_callback(recorder)
    await store.find(query)
    store._database.connection.set_trace_callback(None)
    await store.close()
    db = sqlite3.connect(path)
    details = [row[-1] for statement in recorder.statements for row in db.execute(f"EXPLAIN QUERY PLAN {statement}")]
    db.close()
    assert "SEARCH signals USING INDEX signals_unconsumed (run_no>?)" in details, details
    assert not [detail for detail in details if detail.startswith("SCAN")], details
    assert [detail for detail in details if "B-TREE" in detail] in (
        [], ["USE TEMP B-TREE FOR RIGHT PART OF ORDER BY"], ["USE TEMP B-TREE FOR LAST TERM OF ORDER BY"],
    ), "the signals of one run are put in order, and not those of all"  # fmt: skip


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
        (
            "SELECT activity FROM jobs WHERE queue = 'q' AND visible_at <= 1 ORDER BY visible_at, run_no, step_id",
            "COVERING INDEX jobs_visible",
        ),
        (NEXT_VISIBLE.replace("?", "'q'"), "COVERING INDEX jobs_visible"),
        (FIRST.replace("?", "'p'"), "INDEX gate_lines_open (plan_id=? AND tenant>?)"),
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


@pytest.mark.contract("FMT-2")
async def test_retention_walks_no_table(tmp_path: Path) -> None:
    """Neither what looks for runs that are past their window, nor what deletes them by their ids."""
    store = await SqliteStore.open(tmp_path / "store.db")
    await store.migrate()
    node = SampleNode(store)
    for number in range(20):
        await node.start(f"run-{number}", task("approve"), wait("go"))
        await store.deliver([signal(f"run-{number}", "other", signal_id="s")])
        await node.step(f"run-{number}", complete())
    recorder = Recorder()
    store._list = store._read  # type: ignore[method-assign]  # on the connection that is looked at
    store._database.connection.set_trace_callback(recorder)
    now = await store.now()
    heads = await store.find(FinishedRunQuery(until=now, look=10, limit=10, held_after=now))
    kept = PurgePolicy(task_ms=0, runtime_state_ms=0, dead_letter_ms=0, audit_ms=0, archived_run_ms=0)
    await store.purge(replace(kept, run_ids=tuple(head.run_id for head in heads[:3])))
    await store.purge(PurgePolicy(run_ids=tuple(head.run_id for head in heads), finished_run_ms=0))
    await store.purge(replace(kept, limit=2))
    store._database.connection.set_trace_callback(None)
    assert await store.find(RunQuery(limit=1)) != []
    db = store._database.connection
    walked = [
        f"{detail}: {statement}"
        for statement in recorder.statements
        for *_, detail in db.execute(f"EXPLAIN QUERY PLAN {statement}")
        if detail.startswith("SCAN") and not detail.startswith((*MAY_BE_WALKED, "SCAN s "))
    ]
    assert len(recorder.statements) > 15
    assert walked == []
    await store.close()


@pytest.mark.contract("QUE-4")
@pytest.mark.parametrize("few", [0, search.FEW], ids=["many", "few"])
@pytest.mark.parametrize("tenant", [None, "tenant-7"])
async def test_searches_read_their_index_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few: int, tenant: str | None
) -> None:
    """Whether the runs of a source are gathered or walked through; and nothing is sorted that was walked in order."""
    monkeypatch.setattr(search, "FEW", few)
    path = tmp_path / "store.db"
    store = await SqliteStore.open(path)
    await store.migrate()
    await store.close()
    fill(path, 3_000)
    recorder = Recorder()
    with closing(sqlite3.connect(path)) as database:
        for label, query in SEARCHES.items():
            asked = replace(query, tenant=tenant, newest=query.order is None)
            if not search.is_driven(asked):
                continue
            recorder.statements.clear()
            database.set_trace_callback(recorder)
            queries.search_runs(asked, 10, database, 0)
            database.set_trace_callback(None)
            plans = [
                detail
                for statement in recorder.statements
                if "coalesce((SELECT run_no" not in statement  # the newest run, which is the first that is looked at
                for *_, detail in database.execute(f"EXPLAIN QUERY PLAN {statement}")
            ]
            of_tables = [detail for detail in plans if detail.startswith("SCAN") and detail[5:] not in PARTS]
            assert not of_tables, (label, plans)
            expected = OF_TENANTS.get(label) if tenant else OF_ALL.get(label)
            assert expected is None or any(expected in detail for detail in plans), (label, plans)


OF_ALL = {
    "equality, few": "run_attributes_word (name=? AND kind=? AND word=? AND run_no<?)",
    "range, many": "run_attributes_number (name=? AND kind=? AND number>?",
    "prefix, few": "run_attributes_word (name=? AND kind=? AND word>? AND word<?)",
    "ordered": "run_attributes_number (name=? AND kind=?",
    "status": "runs_by_status (status=? AND run_no<?)",
    "rare workflow": "runs_by_workflow (plan_id=? AND run_no<?)",
    "time of end": "runs_finished (finished_at>? AND finished_at<?)",
    "ordered by time of end": "runs_finished (finished_at>?)",
}
OF_TENANTS = {
    "equality, few": "tenant_attributes USING PRIMARY KEY (tenant=? AND name=? AND kind=? AND value=? AND run_no<?)",
    "range, many": "tenant_attributes USING PRIMARY KEY (tenant=? AND name=? AND kind=? AND value>?",
    "prefix, few": "tenant_attributes USING PRIMARY KEY (tenant=? AND name=? AND kind=? AND value>? AND value<?)",
    "status": "runs_by_tenant_status (tenant=? AND status=? AND run_no<?)",
    "all": "runs_by_tenant (tenant=? AND run_no<?)",
    "time of end": "runs_by_tenant_finished (tenant=? AND finished_at>? AND finished_at<?)",
}
PARTS = ("x", "found", "gathered", "valued", "driven")
"""Parts of a statement that are bounded: what was found in an index."""
