"""Persisted formats: files that earlier builds wrote, and the rolling-upgrade matrix.

`formats/N.sql` is the dump of a file as format N wrote it, for each format since that of `schema.sql`. It is never
changed: a new format adds a file. To make the one of the present format:
`python -m tests.store.test_format formats/N.sql`.
"""

import asyncio
import sqlite3
import sys
import tempfile
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import pytest
from msgspec import Raw
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core.admission import AdmissionRequest, RunLimit
from holdfast.core.audit import AuditEntry
from holdfast.core.dead_letters import Settled
from holdfast.core.declarations import WorkflowDeclaration
from holdfast.core.events import UnknownBody
from holdfast.core.index_rows import FOR_PEOPLE, runtime_snapshot
from holdfast.core.messages import ActivitySucceeded
from holdfast.core.plans import RegisteredPlan
from holdfast.core.schedules import Schedule, ScheduleSpec
from holdfast.core.snapshot import project_run
from holdfast.core.state import CANCELLED, COMPLETED, RUNNING, state_of
from holdfast.errors import SignalAcceptanceIndeterminate, StoreTooNew
from holdfast.store.port import (
    Accepted,
    Created,
    Duplicate,
    Existing,
    Heartbeat,
    PurgePolicy,
    Refused,
    RunQuery,
    ScheduleQuery,
    Store,
    TaskQuery,
)
from holdfast.store.queries import AuditQuery, DeadLetterQuery, PlanQuery, TokenQuery
from holdfast.store.sqlite import SqliteStore
from holdfast.store.sqlite.connection import APPLICATION_ID
from holdfast.store.sqlite.migrate import latest_version, schema
from holdfast.testing import START, VirtualClock
from holdfast.testing.samples import (
    SampleNode,
    access_token,
    activity,
    complete,
    dead_letter,
    job,
    new_run,
    record,
    signal,
    task,
    timer,
    wait,
)

FORMATS = sorted((Path(__file__).parent / "formats").glob("*.sql"), key=lambda file: int(file.stem))
DAY_MS = 86_400_000
ONE = RunLimit(at_once=1)
KEY = "0123456789abcdef" * 4
DEFINITION = WorkflowDeclaration(plan_id="order", plan_version="1", signals={"approval": {"type": "boolean"}})


BODY = b'{"plan":"etl","version":"1"}'
PLAN = RegisteredPlan(tenant="acme", plan_id="etl", plan_version="1", sha256=sha256(BODY).hexdigest(), uri="file:etl")
SCHEDULE = Schedule(
    schedule_id="nightly",
    app="shop",
    workflow="order",
    input=Raw(b'{"n":1}'),
    spec=ScheduleSpec(cron="0 9 * * MON-FRI", tz="Europe/Sofia", jitter_ms=5_000, overlap="queue"),
    next_due=START + 7,
    queued=(START,),
    running=("waiting",),
)


async def write_sample(path: Path) -> None:
    """Write a file with everything that a format holds."""
    clock = VirtualClock()
    store = await SqliteStore.open(path, clock=clock)
    await store.migrate()
    await fill_with_sample(store, clock)
    await store.close()


async def fill_with_sample(store: Store, clock: VirtualClock) -> None:
    """Let an empty store hold everything that a format holds."""
    node = SampleNode(store)
    await node.start("waiting", wait("approval", until=START + 48 * 3_600_000_000), request_id="request-1")
    await store.deliver([signal("waiting", "early", {"kept": True}, signal_id="click-1")])
    await node.start("asking", task("approve", roles=("manager",), assignee="ann"), tags=("eu",), reference_key="o-7")
    await node.start("charging", activity("charge", idempotency_key="order-1"), parent="waiting")
    turn = await node.turn(await node.load("charging"), records=[record("charging")])
    await node.commit(turn)
    await node.start("sleeping", timer(START + 1_000_000))
    await node.start("done", complete("shipped"))
    mailing = await node.turn(await node.load("asking"))
    await node.commit(replace(mailing, jobs=(job("asking", "print"), job("asking", "send"))))
    await store.acquire_jobs("node-b", ["mail"], ["charge"], 1, 60_000)
    beats = [("asking", "print", "mail", "page 7"), ("charging", "charge", "", "asked the bank")]
    for run_id, step_id, queue, details in beats:
        one = Heartbeat(run_id=run_id, step_id=step_id, queue=queue, details=codec.encode(details))
        await store.heartbeat("node-b" if queue else "node-a", [one], 60_000)
    dying = replace(await node.turn(await node.load("waiting")), dead=(dead_letter("waiting"),))
    await node.commit(dying)
    await store.put_tokens(
        [access_token("a" * 16), replace(access_token("b" * 16), revoked_at=START, revoked_by="ann")]
    )
    clock.advance(ms=5)
    await store.create([new_run("queued", now=clock.now(), value={"cents": 4200})])
    limited = [new_run(run_id, now=clock.now(), plan_id="limited", tenant="acme") for run_id in ("inside", "in line")]
    await store.create([replace(new, admission=AdmissionRequest(limit=ONE, key="k", priority=1)) for new in limited])
    await store.renew(node.name, node.lease_ms, [("order", "1"), ("order", "2")])
    await store.put_bulletins("sample", {"sample-1": Raw(b'{"ready":1}')}, DAY_MS)
    await store.append_audit([AuditEntry(entry_id="entry-1", operation="tokens.create", actor="ann")])
    await store.put_key("completion", KEY)
    await store.publish_definitions([DEFINITION])
    await store.put_plan("acme", PLAN.sha256, BODY)
    await store.register_plan(PLAN)
    await store.acquire_lock("retention", "node-a#1", 60_000)
    await store.commit_schedule(SCHEDULE, 0)


def restore(dump: Path, path: Path) -> None:
    """Make a file from a dump."""
    db = sqlite3.connect(path)
    db.executescript(f"PRAGMA application_id = {APPLICATION_ID};\n{dump.read_text()}")
    db.close()


@pytest.fixture(params=FORMATS, ids=lambda dump: dump.stem)
def old_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "old.db"
    restore(request.param, path)
    return path


def change(path: Path, script: str) -> None:
    db = sqlite3.connect(path)
    db.executescript(script)
    db.close()


@pytest.mark.contract("FMT-1")
def test_there_is_a_fixture_for_every_format_that_is_read() -> None:
    assert sorted(int(file.stem) for file in FORMATS) == [migration.version for migration in schema().migrations]


@pytest.mark.contract("FMT-1", "PRJ-4", "EVT-5")
async def test_old_writer_new_reader_sees_everything_and_goes_on(old_file: Path) -> None:
    clock = VirtualClock(START + 10_000)
    store = await SqliteStore.open(old_file, clock=clock)
    assert await store.migrate() == latest_version()
    heads = {head.run_id: head for head in await store.find(RunQuery())}
    assert sorted(heads) == ["asking", "charging", "done", "in line", "inside", "queued", "sleeping", "waiting"]
    for run_id, head in heads.items():
        events = await store.read_events(run_id)
        assert head.snapshot is not None
        folded = runtime_snapshot(state_of(run_id, events))
        for_people = {name: getattr(folded, name) for name in FOR_PEOPLE}  # which older versions did not write
        assert folded == replace(head.snapshot, **for_people)
        assert project_run(run_id, events).status == head.status
    [again] = await store.deliver([signal("waiting", "early", {"kept": True}, signal_id="click-1")])
    assert isinstance(again, Duplicate)
    assert await store.create([new_run("other", request_id="request-1")]) == [Existing("waiting")]
    node = SampleNode(store)
    await node.renew()
    run = await node.load("charging")
    assert [kept.idempotency_key for kept in run.records] == ["order-1"]
    await node.commit(await node.turn(run, complete(), inputs=[ActivitySucceeded("charge", 1)]))
    assert (await node.load("charging")).head.status is COMPLETED
    await store.close()


@pytest.mark.contract("FMT-1", "ACT-1")
async def test_jobs_of_any_format_are_acquired(old_file: Path) -> None:
    clock = VirtualClock(START + 10_000)
    store = await SqliteStore.open(old_file, clock=clock)
    await store.migrate()
    asking, charging = await store.load(["asking", "charging"])
    assert asking is not None
    assert charging is not None
    assert asking.details == {"print": codec.encode("page 7")}
    assert charging.details == {"charge": codec.encode("asked the bank")}
    taken = await store.acquire_jobs("node-c", ["mail"], ["charge"], 10, 1_000)
    clock.advance(ms=60_000)
    taken += [
        one for one in await store.acquire_jobs("node-c", ["mail"], ["charge"], 10, 1_000) if one.step_id == "print"
    ]
    assert [(one.step_id, one.engine_attempt_id) for one in taken] == [("send", 1), ("print", 2)]
    await store.close()


@pytest.mark.contract("FMT-1", "TSK-1")
async def test_tasks_of_any_format_are_found_by_whom_they_concern(old_file: Path) -> None:
    store = await SqliteStore.open(old_file, clock=VirtualClock(START + 10_000))
    await store.migrate()
    for query in (
        TaskQuery(role="manager", status="OPEN"),
        TaskQuery(assignee="ann"),
        TaskQuery(actor="ann"),
        TaskQuery(actor="bob", actor_roles=("manager",)),
        TaskQuery(workflow="order"),
    ):
        assert [found.step_id for found in await store.find(query)] == ["approve"]
    assert await store.find(TaskQuery(actor="bob")) == []
    await store.close()


@pytest.mark.contract("FMT-1", "TSK-1")
async def test_rows_of_an_old_writer_are_found_by_whom_they_concern(old_file: Path) -> None:
    """The statement names no columns: no column may be added to this table."""
    store = await SqliteStore.open(old_file, clock=VirtualClock(START + 10_000))
    await store.migrate()
    [known] = await store.find(TaskQuery())
    await store.close()
    change(
        old_file,
        """
        INSERT INTO tasks SELECT 'new', run_no, 'later', 'OPEN', NULL, '["clerk","clerk"]', task FROM tasks;
        UPDATE tasks SET roles = '["boss"]' WHERE task_id <> 'new';
        """,
    )
    store = await SqliteStore.open(old_file, clock=VirtualClock(START + 10_000))
    assert len(await store.find(TaskQuery(role="clerk"))) == 1
    assert await store.find(TaskQuery(role="manager")) == []
    assert await store.find(TaskQuery(role="boss", status="OPEN")) == [known]
    await store.close()


@pytest.mark.contract("FMT-1", "MSG-3")
async def test_dead_letters_of_any_format_are_found_and_requeued(old_file: Path) -> None:
    store = await SqliteStore.open(old_file, clock=VirtualClock(START + 10_000))
    await store.migrate()
    [letter] = await store.find(DeadLetterQuery())
    assert letter == dead_letter("waiting")
    settled = await store.settle_dead_letters([letter.letter_id], "requeue", "ann")
    assert settled == [Settled(letter.letter_id, "requeue")]
    await store.close()


@pytest.mark.contract("FMT-1", "API-4")
async def test_access_tokens_of_any_format_are_found(old_file: Path) -> None:
    store = await SqliteStore.open(old_file, clock=VirtualClock(START + 10_000))
    await store.migrate()
    found = await store.find_tokens(TokenQuery())
    assert found[0] == access_token("a" * 16)
    assert (found[1].revoked_at, found[1].revoked_by) == (START, "ann")
    await store.close()


async def check_what_is_not_of_runs(store: Store) -> None:
    """Check that a store has the audit log, key and definition of the sample."""
    operations = [entry.operation for entry in await store.find(AuditQuery())]
    assert [each for each in operations if each != "store.migrate"] == ["tokens.create"]
    assert await store.put_key("completion", "f" * 64) == KEY
    assert await store.find_definitions([("order", "1")]) == [DEFINITION]


async def check_plans(store: Store, *, has_some: bool) -> None:
    """Check that a store has the plan of the sample, or that it can keep one."""
    assert [plan.plan_id for plan in await store.find_plans(PlanQuery())] == (["etl"] if has_some else [])
    assert await store.get_plan("acme", PLAN.sha256) == (BODY if has_some else None)
    await store.put_plan("acme", PLAN.sha256, BODY)
    assert (await store.register_plan(PLAN)).sha256 == PLAN.sha256
    [created] = await store.create([new_run("of a plan", plan_id="plan:etl", plan=PLAN.sha256)])
    assert isinstance(created, Created)


@pytest.mark.contract("FMT-1", "OWN-4")
async def test_locks_and_schedules_are_in_files_of_any_format(old_file: Path, request: pytest.FixtureRequest) -> None:
    store = await SqliteStore.open(old_file, clock=VirtualClock(START + 100_000_000))
    await store.migrate()
    lock = await store.acquire_lock("retention", "node-b#1", 60_000)
    assert lock is not None
    is_old = request.node.callspec.params["old_file"].stem == "8"
    assert lock.epoch == (1 if is_old else 2)
    stored, _ = await store.commit_schedule(SCHEDULE, 0 if is_old else 1)
    assert await store.find(ScheduleQuery()) == [stored]
    await store.close()


@pytest.mark.contract("FMT-1", "WF-1")
async def test_plans_can_be_kept_in_a_file_of_any_format(old_file: Path, request: pytest.FixtureRequest) -> None:
    store = await SqliteStore.open(old_file, clock=VirtualClock(START + 10_000))
    await store.migrate()
    await check_plans(store, has_some=request.node.callspec.params["old_file"].stem != "8")
    await store.close()


@pytest.mark.contract("FMT-1", "API-4", "SIG-10")
async def test_the_audit_log_keys_and_definitions_of_any_format_are_found(old_file: Path) -> None:
    store = await SqliteStore.open(old_file, clock=VirtualClock(START + 10_000))
    await store.migrate()
    await check_what_is_not_of_runs(store)
    await store.close()


@pytest.mark.contract("FMT-1", "QUE-2")
async def test_queued_runs_of_any_format_are_admitted(old_file: Path) -> None:
    """Also when the run inside was finished without freeing its place."""
    store = await SqliteStore.open(old_file, clock=VirtualClock(START + 10_000))
    await store.migrate()
    assert await store.admit({"limited": ONE}, 9) == ([], None)
    change(old_file, "UPDATE runs SET status = 'COMPLETED', ready_at = NULL, finished_at = 1 WHERE run_id = 'inside'")
    admitted, _ = await store.admit({"limited": ONE}, 9)
    assert [each.run_id for each in admitted] == ["in line"]
    await store.close()


@pytest.mark.contract("FMT-1", "QUE-2", "WF-7")
async def test_run_that_an_old_node_has_cancelled_in_line_is_passed_over(old_file: Path) -> None:
    store = await SqliteStore.open(old_file, clock=VirtualClock(START + 10_000))
    await store.migrate()
    change(old_file, "UPDATE runs SET status = 'CANCELLED', finished_at = 1 WHERE run_id = 'in line'")
    assert await store.admit({"limited": RunLimit(at_once=2)}, 9) == ([], None)
    assert (await store.stats()).queued == 0
    assert [head.ready_at for head in await store.find(RunQuery(status=CANCELLED))] in ([None], [])
    await store.close()


@pytest.mark.contract("FMT-1", "QUE-2")
async def test_place_of_a_run_that_an_old_node_has_purged_is_free_again(old_file: Path) -> None:
    store = await SqliteStore.open(old_file, clock=VirtualClock(START + 10_000))
    await store.migrate()
    change(old_file, "DELETE FROM runs WHERE run_id = 'inside'")
    admitted, _ = await store.admit({"limited": ONE}, 9)
    assert [each.run_id for each in admitted] == ["in line"]
    await store.close()


@pytest.mark.contract("FMT-1", "WF-3")
async def test_an_old_node_says_nothing_of_what_it_can_run_and_is_believed_to_have_it(old_file: Path) -> None:
    """The statements name no columns: none may be added to this table."""
    clock = VirtualClock(START + 3_600_000_000)
    store = await SqliteStore.open(old_file, clock=clock)
    await store.migrate()
    await store.renew("new", 60_000, [])
    assert ("order", "1") in [missing.plan for missing in await store.find_orphaned(0)]
    change(old_file, f"INSERT OR REPLACE INTO nodes VALUES ('old', {clock.now() + 1_000_000})")
    assert await store.find_orphaned(0) == []
    change(old_file, "DELETE FROM nodes WHERE node = 'old' OR node = 'new'")
    assert ("order", "1") in [missing.plan for missing in await store.find_orphaned(0)]
    with closing(sqlite3.connect(old_file)) as db:
        assert db.execute("SELECT count(*) FROM node_plans WHERE node = 'new'").fetchone() == (0,)
    await store.close()


@pytest.mark.contract("FMT-1", "SIG-6")
async def test_missing_records_mean_what_they_meant_before_there_were_records(old_file: Path) -> None:
    change(old_file, "DELETE FROM activity_records; DELETE FROM acceptance_records;")
    store = await SqliteStore.open(old_file, clock=VirtualClock(START + 10_000))
    await store.migrate()
    [run] = await store.load(["charging"])
    assert run is not None
    assert run.records == ()
    [without_id, with_id] = await store.deliver(
        [signal("waiting", "early"), signal("waiting", "early", {"kept": True}, signal_id="click-1")]
    )
    assert isinstance(without_id, Accepted)
    assert isinstance(with_id, Refused)
    assert isinstance(with_id.error, SignalAcceptanceIndeterminate)
    await store.close()


@pytest.mark.contract("FMT-1", "EVT-3")
async def test_new_writer_old_reader_ignores_what_it_does_not_know_and_keeps_it(old_file: Path) -> None:
    """This code stands for the old one: a newer schema, table, event type and field were added under its feet."""
    store = await SqliteStore.open(old_file, clock=VirtualClock())
    await store.migrate()
    await store.close()
    change(
        old_file,
        """
        CREATE TABLE wonders (run_no INTEGER, wonder TEXT);
        INSERT INTO wonders SELECT run_no, 'kept' FROM runs;
        ALTER TABLE runs ADD COLUMN mood TEXT DEFAULT 'good';
        UPDATE events SET event_type = 'WonderHappened', data = '{"deep":[1,2]}' WHERE event_type = 'SignalWaiting';
        UPDATE messages SET message = json_set(message, '$.colour', 'red');
        INSERT INTO holdfast_schema VALUES (1000, 1, 0);
        """,
    )
    store = await SqliteStore.open(old_file, clock=VirtualClock(START + 10_000))
    assert await store.migrate() == 1000
    events = await store.read_events("waiting")
    [unknown] = [event for event in events if isinstance(event.data, UnknownBody)]
    assert bytes(unknown.data.raw) == b'{"deep":[1,2]}'  # type: ignore[attr-defined]
    assert state_of("waiting", events).status is RUNNING
    node = SampleNode(store)
    await node.renew()
    for run in await node.claim():
        await node.commit(await node.turn(run, complete()))
    assert isinstance((await store.create([new_run("new")]))[0], Created)
    await store.purge(PurgePolicy(finished_run_ms=0))
    await store.close()
    db = sqlite3.connect(old_file)
    assert db.execute("SELECT count(*) FROM wonders WHERE wonder = 'kept'").fetchone() == (8,)
    assert db.execute("SELECT count(*) FROM events WHERE event_type = 'WonderHappened'").fetchone() == (1,)
    assert db.execute("SELECT DISTINCT mood FROM runs").fetchall() == [("good",)]
    db.close()


@pytest.mark.contract("FMT-1")
async def test_a_file_that_needs_newer_code_is_refused_and_left_alone(old_file: Path) -> None:
    store = await SqliteStore.open(old_file)
    change(old_file, "INSERT INTO holdfast_schema VALUES (1000, 1000, 0)")
    with pytest.raises(StoreTooNew, match="Upgrade Holdfast"):
        await store.migrate()
    await store.close()
    with pytest.raises(StoreTooNew):
        await SqliteStore.open(old_file)


@pytest.mark.contract("FMT-1", "FMT-2")
async def test_retention_removes_only_records_that_are_safe_to_remove(old_file: Path) -> None:
    store = await SqliteStore.open(old_file, clock=VirtualClock(START + 8 * DAY_MS * 1_000))
    await store.migrate()
    report = await store.purge(PurgePolicy(finished_run_ms=DAY_MS, task_ms=DAY_MS, runtime_state_ms=DAY_MS))
    assert (report.runs, report.acceptance_records, report.tasks) == (1, 1, 0)
    [again] = await store.deliver([signal("waiting", "early", {"kept": True}, signal_id="click-1")])
    assert isinstance(again, Accepted)
    assert (await store.load(["charging"]))[0].records != ()  # type: ignore[union-attr]
    await store.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(write_sample(Path(folder) / "sample.db"))
        lines = sqlite3.connect(Path(folder) / "sample.db").iterdump()
        Path(sys.argv[1]).write_text("\n".join(lines) + "\n")
