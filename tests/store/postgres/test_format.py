"""Persisted formats on PostgreSQL: what earlier builds wrote, and the rolling-upgrade matrix.

`formats/N.sql` holds the rows of a store as format N wrote them, for tables made by `schema.sql` and the migrations up
to N. It is never changed: a new format adds a file. To make the one of the present format:
`python -m tests.store.postgres.test_format ADDRESS formats/N.sql`, on a schema that is not there yet.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core.bus import OutboxReplay, OutboxSettlement, Sink, SinkProgress, alert_of, letter_of
from holdfast.core.dead_letters import Settled
from holdfast.core.events import UnknownBody
from holdfast.core.index_rows import FOR_PEOPLE, runtime_snapshot
from holdfast.core.messages import ActivitySucceeded
from holdfast.core.snapshot import project_run
from holdfast.core.state import COMPLETED, RUNNING, state_of
from holdfast.store.port import Accepted, Created, Duplicate, Existing, PurgePolicy, RunQuery, ScheduleQuery, TaskQuery
from holdfast.store.postgres import PostgresStore
from holdfast.store.postgres.address import parse_address
from holdfast.store.postgres.migrate import schema as schema_scripts
from holdfast.store.postgres.pool import in_schema
from holdfast.store.queries import AlertQuery, BusDeadLetterQuery, DeadLetterQuery, OutboxQuery, SinkQuery, TokenQuery
from holdfast.testing import START, VirtualClock
from holdfast.testing.samples import SampleNode, access_token, complete, dead_letter, new_run, signal
from holdfast.testing.store_suite.admission import admit, enqueue
from tests.store.postgres.tampering import behind, execute
from tests.store.test_format import DAY_MS, SCHEDULE, check_plans, check_what_is_not_of_runs, fill_with_sample

FORMATS = sorted((Path(__file__).parent / "formats").glob("*.sql"), key=lambda file: int(file.stem))
TABLES = (
    *("runs", "agenda", "events", "messages", "signals", "acceptance_records", "waits", "tasks", "activity_records"),
    *("jobs", "dead_letters", "nodes", "access_tokens"),
    *("gates", "gate_starts", "gate_runs", "gate_exits", "gate_lines", "gate_started"),
    *("audit_log", "store_keys", "definitions", "plan_bodies", "plans", "plan_uses", "host_locks", "schedules"),
    *("sinks", "outbox", "alerts", "bus_dead_letters", "bulletins"),
)


async def dump(address: str) -> str:
    """Return the rows of a store as statements."""
    lines = []
    async with behind(address) as connection:
        await connection.execute(f"SET search_path = {parse_address(address).schema}")
        for table in TABLES:
            names = await connection.fetch(
                "SELECT attname FROM pg_attribute WHERE attrelid = $1::text::regclass AND attnum > 0 "
                "AND attgenerated = '' ORDER BY attnum",
                table,
            )
            columns = [name for (name,) in names]
            values = " || ', ' || ".join(f"quote_nullable({column})" for column in columns)
            for (row,) in await connection.fetch(f"SELECT {values} FROM {table} ORDER BY 1"):
                numbered = "OVERRIDING SYSTEM VALUE " if table in ("sinks", "alerts") else ""
                lines.append(f"INSERT INTO holdfast.{table} ({', '.join(columns)}) {numbered}VALUES ({row});")
        for sequence in ("run_numbers", "gate_numbers"):
            [[last]] = await connection.fetch(f"SELECT last_value FROM {sequence}")
            lines.append(f"SELECT setval('holdfast.{sequence}', {last});")
        for table, column in (("sinks", "sink_no"), ("alerts", "alert_no")):
            [[last]] = await connection.fetch(f"SELECT max({column}) FROM {table}")
            lines.append(f"SELECT setval(pg_get_serial_sequence('holdfast.{table}', '{column}'), {last});")
    return "\n".join([*lines, ""])


async def restore(file: Path, address: str) -> None:
    """Make a schema as a format had it."""
    schema = parse_address(address).schema
    async with behind(address) as connection, connection.transaction():
        await connection.execute(f"CREATE SCHEMA {schema}")
        await connection.execute(
            f"CREATE TABLE {schema}.holdfast_schema (version bigint PRIMARY KEY, oldest_reader bigint NOT NULL, "
            "applied_at timestamptz NOT NULL DEFAULT now())"
        )
        for migration in schema_scripts().migrations:
            if migration.version > int(file.stem):
                break
            await connection.execute(in_schema(migration.script, schema))
            await connection.execute(
                f"INSERT INTO {schema}.holdfast_schema VALUES ($1, $2)", migration.version, migration.oldest_reader
            )
        await connection.execute(in_schema(file.read_text(), schema))


@pytest.fixture(params=FORMATS, ids=lambda file: file.stem)
async def old_address(request: pytest.FixtureRequest, address: str) -> str:
    await restore(request.param, address)
    return address


async def opened(address: str, us: int = 10_000) -> PostgresStore:
    store = await PostgresStore.open(address, clock=VirtualClock(START + us))
    await store.migrate()
    return store


@pytest.mark.contract("FMT-1")
def test_there_is_a_fixture_for_every_format_that_is_read() -> None:
    known = [migration.version for migration in schema_scripts().migrations]
    assert sorted(int(file.stem) for file in FORMATS) == known


@pytest.mark.contract("FMT-1", "PRJ-4", "EVT-5")
async def test_old_writer_new_reader_sees_everything_and_goes_on(old_address: str) -> None:
    store = await opened(old_address)
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
    assert [found.step_id for found in await store.find(TaskQuery(role="manager"))] == ["approve"]
    asking, charging = await store.load(["asking", "charging"])
    assert asking is not None
    assert charging is not None
    assert asking.details == {"print": codec.encode("page 7")}
    assert [kept.idempotency_key for kept in charging.records] == ["order-1"]
    taken = await store.acquire_jobs("node-c", ["mail"], ["charge"], 10, 1_000)
    assert [(one.step_id, one.engine_attempt_id) for one in taken] == [("send", 1)]
    node = SampleNode(store)
    await node.renew()
    await node.commit(await node.turn(charging, complete(), inputs=[ActivitySucceeded("charge", 1)]))
    assert (await node.load("charging")).head.status is COMPLETED
    assert [run.head.run_id for run in await SampleNode(store, "node-z").claim()] == ["queued", "inside"]
    await store.close()


@pytest.mark.contract("FMT-1", "QUE-2")
async def test_admission_queues_of_any_format_go_on(old_address: str) -> None:
    store = await opened(old_address)
    node = SampleNode(store, "node-z")
    await node.claim()
    assert await admit(store, plan_id="limited") == []
    await node.step("inside", complete())
    assert await admit(store, plan_id="limited") == ["in line"]
    await enqueue(store, "behind", plan_id="limited")
    assert (await store.stats()).queued == 1
    await store.close()


@pytest.mark.contract("FMT-1", "MSG-3")
async def test_letters_are_found_and_requeued(old_address: str) -> None:
    store = await opened(old_address)
    [letter] = await store.find(DeadLetterQuery())
    assert letter == dead_letter("waiting")
    settled = await store.settle_dead_letters([letter.letter_id], "requeue", "ann\x00")
    assert settled == [Settled(letter.letter_id, "requeue")]
    [letter] = await store.find(DeadLetterQuery(settled=True))
    assert letter.settled_by == "ann\x00"
    await store.close()


@pytest.mark.contract("FMT-1", "API-4")
async def test_access_tokens_of_any_format_are_found(old_address: str) -> None:
    store = await opened(old_address)
    found = await store.find_tokens(TokenQuery())
    assert [token.token_id[0] for token in found] == ["a", "b"]
    assert found[0] == access_token("a" * 16)
    assert (found[1].revoked_at, found[1].revoked_by) == (START, "ann")
    await store.close()


@pytest.mark.contract("FMT-1", "API-4", "SIG-10")
async def test_the_audit_log_keys_and_definitions_of_any_format_are_found(old_address: str) -> None:
    store = await opened(old_address)
    await check_what_is_not_of_runs(store)
    await store.close()


@pytest.mark.contract("FMT-1", "WF-3")
async def test_an_old_node_says_nothing_of_what_it_can_run_and_is_believed_to_have_it(old_address: str) -> None:
    clock = VirtualClock(START + 3_600_000_000)
    store = await PostgresStore.open(old_address, clock=clock)
    await store.migrate()
    await store.renew("new", 60_000, [])
    assert ("order", "1") in [missing.plan for missing in await store.find_orphaned(0)]
    until = clock.now() + 1_000_000
    await execute(old_address, "INSERT INTO holdfast.nodes (node, lease_until) VALUES ('old', $1)", until)
    assert await store.find_orphaned(0) == []
    await store.close()


@pytest.mark.contract("FMT-1", "EVT-3")
async def test_new_writer_old_reader_ignores_what_it_does_not_know_and_keeps_it(old_address: str) -> None:
    """This code stands for the old one: a newer schema, table, column, event type and field were added."""
    store = await opened(old_address)
    count = len(await store.find(RunQuery()))
    await store.close()
    for statement in (
        "CREATE TABLE holdfast.wonders AS SELECT run_no, 'kept' AS wonder FROM holdfast.runs",
        "ALTER TABLE holdfast.runs ADD COLUMN mood text DEFAULT 'good'",
        "UPDATE holdfast.events SET data = '{\"deep\":[1,2]}' WHERE event_type = 'SignalWaiting'",
        "UPDATE holdfast.events SET event_type = 'WonderHappened' WHERE event_type = 'SignalWaiting'",
        'UPDATE holdfast.messages SET message = message::jsonb || \'{"colour":"red"}\'',
        "INSERT INTO holdfast.holdfast_schema VALUES (1000, 1)",
    ):
        await execute(old_address, statement)
    store = await PostgresStore.open(old_address, clock=VirtualClock(START + 10_000))
    assert await store.migrate() == 1000
    events = await store.read_events("waiting")
    [unknown] = [event.data for event in events if isinstance(event.data, UnknownBody)]
    assert bytes(unknown.raw) == b'{"deep":[1,2]}'
    assert state_of("waiting", events).status is RUNNING
    node = SampleNode(store)
    await node.renew()
    for run in await node.claim():
        await node.commit(await node.turn(run, complete()))
    assert isinstance((await store.create([new_run("new")]))[0], Created)
    await store.purge(PurgePolicy(finished_run_ms=0))
    await store.close()
    async with behind(old_address) as connection:
        schema = parse_address(old_address).schema
        assert await connection.fetchval(f"SELECT count(*) FROM {schema}.wonders") == count
        kept = await connection.fetchval(f"SELECT count(*) FROM {schema}.events WHERE event_type = 'WonderHappened'")
        assert kept == 1


@pytest.mark.contract("FMT-1", "OWN-4")
async def test_locks_and_schedules_are_in_stores_of_any_format(
    old_address: str, request: pytest.FixtureRequest
) -> None:
    store = await opened(old_address, 100_000_000)
    lock = await store.acquire_lock("retention", "node-b#1", 60_000)
    assert lock is not None
    is_old = request.node.callspec.params["old_address"].stem == "7"
    assert lock.epoch == (1 if is_old else 2)
    stored, _ = await store.commit_schedule(SCHEDULE, 0 if is_old else 1)
    assert await store.find(ScheduleQuery()) == [stored]
    await store.close()


@pytest.mark.contract("FMT-1", "WF-1")
async def test_plans_can_be_kept_in_a_store_of_any_format(old_address: str, request: pytest.FixtureRequest) -> None:
    store = await opened(old_address)
    await check_plans(store, has_some=request.node.callspec.params["old_address"].stem != "7")
    await store.close()


@pytest.mark.contract("FMT-1", "FMT-2")
async def test_retention_removes_only_records_that_are_safe_to_remove(old_address: str) -> None:
    store = await opened(old_address, 8 * DAY_MS * 1_000)
    report = await store.purge(PurgePolicy(finished_run_ms=DAY_MS, task_ms=DAY_MS, runtime_state_ms=DAY_MS))
    assert (report.runs, report.acceptance_records, report.tasks) == (1, 1, 0)
    [again] = await store.deliver([signal("waiting", "early", {"kept": True}, signal_id="click-1")])
    assert isinstance(again, Accepted)
    await store.close()


async def fill_with_bus(store: PostgresStore) -> None:
    """Add a sink that has yet to get something, has not got something else, and was sent an alert."""
    sink = await store.put_sink(Sink(name="log", kind="redis", address="redis://redis/log", alerts=True))
    await store.replay_outbox(OutboxReplay("log", run_id="waiting"))
    await store.replay_outbox(OutboxReplay("log", run_id="done"))
    entry = (await store.find(OutboxQuery(sink="log")))[0]
    letter = letter_of(sink, entry, "the stream is full", await store.now())
    await store.settle_outbox("log", [OutboxSettlement(entry=entry, letter=letter)], SinkProgress(failures=2))
    await store.raise_alerts([alert_of("BUS_DEAD_LETTER", 2, "the stream is full", run_id=letter.run_id)])


@pytest.mark.contract("FMT-1", "BUS-1")
async def test_what_a_sink_has_yet_to_get_is_read(request: pytest.FixtureRequest, old_address: str) -> None:
    store = await opened(old_address)
    if request.node.callspec.params["old_address"].stem == "7":  # which had no event bus
        assert await store.find(SinkQuery()) == []
        await store.close()
        return
    [status] = await store.find(SinkQuery(counted=True))
    assert (status.sink.name, status.backlog, status.dead_letters, status.failures) == ("log", 2, 1, 2)
    [alert], [letter] = await store.find(AlertQuery()), await store.find(BusDeadLetterQuery())
    assert (alert.code, alert.run_id, letter.detail) == ("BUS_DEAD_LETTER", letter.run_id, "the stream is full")
    await store.settle_bus_dead_letters([letter.letter_id], "requeue")
    assert len(await store.find(OutboxQuery(sink="log"))) == 3
    again = await store.put_sink(Sink(name="other", kind="redis", address="redis://redis/other"))
    assert again.name == "other"
    await store.close()


async def _write(address: str, file: Path) -> None:
    clock = VirtualClock()
    store = await PostgresStore.open(address, clock=clock)
    await store.migrate()
    await fill_with_sample(store, clock)
    await fill_with_bus(store)
    await store.close()
    file.write_text(await dump(address))


if __name__ == "__main__":
    asyncio.run(_write(sys.argv[1], Path(sys.argv[2])))
