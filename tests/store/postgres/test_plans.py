"""Every statement on the way of a turn, a signal or a claim finds its rows by an index, and says so itself.

The server writes down the plan of each statement, those within functions too, while the store does its work: on a
schema that was empty when the plans were made, and on one that is filled.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import asyncpg
import pytest
from msgspec.structs import replace

from bench.search import SEARCHES, fill_server
from holdfast.core.admission import Overload, RunLimit
from holdfast.core.bus import OutboxSettlement, Sink, SinkProgress
from holdfast.core.events import NULL
from holdfast.store import search
from holdfast.store.port import Heartbeat, TaskQuery
from holdfast.store.postgres import PostgresStore, bus, queries
from holdfast.store.postgres.address import parse_address
from holdfast.store.postgres.pool import Pool
from holdfast.store.queries import EventQuery, OutboxQuery, TokenQuery
from holdfast.testing import VirtualClock
from holdfast.testing.samples import (
    SampleNode,
    access_token,
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
from tests.store.postgres.tampering import behind, execute

HOUR_MS = 3_600_000
MAY_BE_WALKED = frozenset({"nodes", "growth_kept", "sinks"})
"""What is small by nature: there are as many rows as nodes, or as sinks, or one."""

TABLES = (
    *("runs", "agenda", "events", "messages", "signals", "acceptance_records", "waits", "jobs", "tasks"),
    *("activity_records", "access_tokens", "growth", "gates", "gate_runs", "gate_lines", "gate_starts", "gate_exits"),
)
FILL = (
    """INSERT INTO holdfast.runs (run_no, run_id, tenant, project, environment, plan_id, plan_version, run_request_id,
        request_key, input_sha256, tags, status, version, snapshot, created_at, updated_at, finished_at, ready_at)
    SELECT -n, 'filled-' || n, 't', 'p', 'e', 'plan', '1', 'r-' || n, sha256(('k' || n)::bytea), sha256(''), '[]',
        CASE WHEN n % 3 = 0 THEN 'RUNNING' ELSE 'COMPLETED' END, 1, '{"status":"COMPLETED","state_version":1}', n, n,
        CASE WHEN n % 3 = 0 THEN NULL ELSE n END, CASE WHEN n % 3 = 0 THEN 4000000000000000 + n END
    FROM generate_series(1, 6000) n""",
    """INSERT INTO holdfast.agenda SELECT run_no, '', 0, ready_at, ready_at, plan_id, plan_version
    FROM holdfast.runs WHERE run_no < 0 AND ready_at IS NOT NULL""",
    """INSERT INTO holdfast.events SELECT -n, 1, 'id', 'RunQueued', NULL, NULL, NULL, '{}', sha256(('e' || n)::bytea),
        n, n, 'a', '{}', NULL, NULL, 1 FROM generate_series(1, 6000) n""",
    """INSERT INTO holdfast.messages SELECT -n, 'm', 4000000000000000 + n, '{}' FROM generate_series(3, 6000, 3) n""",
    """INSERT INTO holdfast.signals SELECT -n, 1, 'go', 's', NULL, n, n, 2, 'null' FROM generate_series(1, 6000) n""",
    """INSERT INTO holdfast.acceptance_records SELECT -n, 'go', 's', 1, sha256(''), n, n, 1
    FROM generate_series(1, 6000) n""",
    """INSERT INTO holdfast.waits SELECT -n, 'w', 'go', 't', n, NULL FROM generate_series(3, 6000, 3) n""",
    """INSERT INTO holdfast.jobs SELECT -n, 's', 'mail', 'charge', 4000000000000000 + n, NULL, 1, NULL, '{}'
    FROM generate_series(3, 6000, 3) n""",
    """INSERT INTO holdfast.tasks SELECT 'task-' || n, -n, 's', CASE WHEN n % 3 = 0 THEN 'OPEN' ELSE 'COMPLETED' END,
        'person-' || n, ARRAY['role-' || n], n, '{}' FROM generate_series(1, 6000) n""",
    """INSERT INTO holdfast.activity_records SELECT -n, 'charge', 's', 'k', true, '{}'
    FROM generate_series(1, 6000) n""",
    """INSERT INTO holdfast.access_tokens SELECT 'token-' || n, 't', 's', n + 4000000000000000, NULL, '', NULL, '{}'
    FROM generate_series(1, 6000) n""",
    """INSERT INTO holdfast.growth SELECT -n, ARRAY[-n], NULL FROM generate_series(1, 6000) n""",
    """INSERT INTO holdfast.gates (plan_id, inside, waiting) SELECT CASE WHEN n = 1 THEN 'order' ELSE 'plan-' || n END,
        CASE WHEN n = 1 THEN 6000 ELSE 0 END, CASE WHEN n = 1 THEN 12000 ELSE 0 END FROM generate_series(1, 1000) n""",
    """INSERT INTO holdfast.gate_runs SELECT -n, 'order', 'tenant-' || n % 9, 'key-' || n % 6000, 'filled-' || n, n,
        n <= 6000 FROM generate_series(1, 18000) n""",
    """INSERT INTO holdfast.gate_lines SELECT 'order', 'tenant-' || n % 9, 'key-' || n, 1, 1, 1, -n
    FROM generate_series(1, 6000) n""",
    """INSERT INTO holdfast.gate_starts SELECT 'other', n, n FROM generate_series(1, 6000) n""",
    """INSERT INTO holdfast.gate_exits SELECT 'plan-' || n, -n FROM generate_series(2, 6000) n""",
)

STATES = ("filled", "empty", *(f"known to be {how}" for how in ("empty", "tiny", "small", "dead")), "analyzed again")


class Recorder:
    """Remembers the plans that the server tells of."""

    def __init__(self, schema: str, first_columns: dict[str, str]) -> None:
        self._schema = schema
        self._first_columns = first_columns
        self.plans: list[dict[str, Any]] = []

    def __call__(self, _: Any, notice: Any) -> None:
        text = str(notice.message)
        if "plan:" in text and self._schema in text:  # not what the driver asks of the server's catalogue
            self.plans.append(json.loads(text.partition("plan:")[2]))

    def nodes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every node of every plan, with the statement."""
        for plan in self.plans:
            pending = [plan["Plan"]]
            while pending:
                node = pending.pop()
                yield plan["Query Text"], node
                pending += node.get("Plans", [])

    def walked(self) -> list[str]:
        """What reads a whole table, or a whole index."""
        return [
            f"{node['Node Type']} of {node['Relation Name']} by {node.get('Index Name')}: {statement}"
            for statement, node in self.nodes()
            if node.get("Relation Name", "") not in {"", *MAY_BE_WALKED} and not self._is_looked_up(node)
        ]

    def _is_looked_up(self, node: dict[str, Any]) -> bool:
        """Return whether a place in an index is found. A condition on a later column is checked at every place."""
        if "Index Name" in node:
            return self._first_columns[node["Index Name"]] in node.get("Index Cond", "")
        return not node["Node Type"].endswith("Seq Scan")

    def indexes(self) -> set[str]:
        """The names of all indexes that are used."""
        return {node["Index Name"] for _, node in self.nodes() if "Index Name" in node}


FIRST_COLUMNS = """
SELECT c.relname, pg_get_indexdef(c.oid, 1, true) FROM pg_class c
WHERE c.relkind IN ('i', 'I') AND c.relnamespace = $1::regnamespace
"""


async def recorded(address: str, clock: VirtualClock | None = None) -> tuple[PostgresStore, Recorder]:
    """Open a store whose only connection tells of the plans of what it executes."""
    store = await PostgresStore.open(f"{address}&connections=1", clock=clock)
    await store.migrate()
    schema = parse_address(address).schema
    [connection] = store._pool._free
    recorder = Recorder(schema, dict(await connection.fetch(FIRST_COLUMNS, schema)))
    connection.add_log_listener(recorder)
    try:
        await connection.execute("LOAD 'auto_explain'")
    except asyncpg.UndefinedFileError:  # as in the wheel
        await store.close()
        pytest.skip("this server has no auto_explain, and cannot tell of its plans")
    for setting in (
        "SET auto_explain.log_min_duration = 0",
        "SET auto_explain.log_nested_statements = on",
        "SET auto_explain.log_format = json",
        "SET auto_explain.log_level = notice",
    ):
        await connection.execute(setting)
    return store, recorder


async def nothing() -> None:
    """Let the server be."""


async def pass_admission(store: PostgresStore, number: int, between: Callable[[], Awaitable[Any]] = nothing) -> None:
    """Queue runs, admit them, and let them leave."""
    node = SampleNode(store, f"doorkeeper-{number}", HOUR_MS)
    await node.renew()
    queue = RunLimit(at_once=40_000, per_key=1, starts=100_000)
    overloads: tuple[Overload, ...] = ("queue", "reject")
    for overload in overloads:
        run_ids = [f"{overload}-{number}-{each}" for each in range(3)]
        await enqueue(store, *run_ids, limit=replace(queue, overload=overload), key=run_ids[0], claim_for=node.name)
        await between()
        await node.step(run_ids[0], complete())
        admitted = await admit(store, queue, claim_for=node.name)
        assert admitted == run_ids[1:2] * (overload == "queue")
    await enqueue(store, f"delay-{number}", limit=RunLimit(starts=100_000, overload="delay"))


async def work(store: PostgresStore, number: int, between: Callable[[], Awaitable[Any]] = nothing) -> None:
    """Do everything that is done often."""
    first, second, third, fourth = (f"run-{number}-{each}" for each in range(4))
    node = SampleNode(store, f"node-{number}", HOUR_MS)
    place = (await store.changes()).cursor
    for run_id in (first, second, third, fourth):
        await node.start(run_id, wait("go"), timer(2**61), activity("charge"))
    await store.create([new_run(f"new-{number}", request_id=f"new-{number}")])
    await store.deliver([signal(first, signal_id="s", require_waiting=True), message(first)])
    await between()
    await node.step(first, records=[record(first)])
    await between()
    await node.step(second, complete())
    await node.commit(await queue_turn(node, [job(fourth), job(fourth, "other")], run=fourth))
    await node.commit(await queue_turn(node, closed=["other"], run=fourth))
    assert await store.next_due(node.name, None, ["mail"]) is not None
    assert len(await store.acquire_jobs("taker", ["mail", "post"], ["charge"], 10, 1_000)) == 1
    beats = [Heartbeat(run_id=fourth, step_id="charge", queue=queue, details=NULL) for queue in ("mail", "")]
    assert await store.heartbeat("taker", beats, 1_000) == [True, False]
    assert await store.heartbeat(node.name, [replace(beats[1], step_id="mine")], 1_000) == [True]
    await node.step(fourth, complete())
    await SampleNode(store, f"other-{number}", HOUR_MS).claim()
    await store.renew(f"other-{number}", HOUR_MS, [("order", "1")])
    await store.claim(f"other-{number}", 10, [("order", "1")])
    await store.next_due(f"other-{number}", [("order", "1")])
    assert await store.find_orphaned(0) == []
    await store.release(node.name, [third])
    assert await store.read_events(first, 2)
    assert (await store.changes(place)).runs
    assert await store.put_tokens([access_token()]) == await store.find_tokens(
        TokenQuery(token_ids=(access_token().token_id,))
    )
    await store.release(node.name)


@pytest.mark.slow
@pytest.mark.contract("STO-1")
@pytest.mark.parametrize("state", STATES)
async def test_hot_statements_use_their_indexes(address: str, state: str) -> None:
    """Whenever the plans are made: while the tables are small the server may believe that they stay so.

    "analyzed again" is what a server does by itself, at any moment, while the first runs are made.
    """
    store, recorder = await recorded(address)
    if state == "filled":
        await fill(address)
    if state == "known to be tiny":  # to walk through one row costs no more than to look for it
        await SampleNode(store).start("alone", wait("go"), timer(2**61), activity("charge"))
    if state in ("known to be small", "known to be dead", "analyzed again"):
        await work(store, 0)
        await pass_admission(store, 0)
    if state == "known to be dead":  # as a long transaction keeps what was removed
        for table in set(TABLES) - {"runs", "events", "signals", "acceptance_records"}:  # those are kept for long
            await execute(address, f"DELETE FROM {parse_address(address).schema}.{table}")
        for table in TABLES:
            await execute(address, f"ANALYZE {parse_address(address).schema}.{table}")
    elif state.startswith("known"):
        await execute(address, "VACUUM ANALYZE")
    analyze = partial(execute, address, "ANALYZE") if state == "analyzed again" else nothing
    for number in (1, 2):
        await work(store, number, analyze)
        await pass_admission(store, number, analyze)
    if state != "filled":
        # Plans outside functions are made anew each time, and may well walk what is empty.
        recorder.plans = [plan for plan in recorder.plans if "$" not in plan["Query Text"]]
    await store.close()
    assert len(recorder.plans) > 40
    assert recorder.walked() == []
    expected = {"agenda_places", "agenda_pkey", "runs_pkey", "runs_run_id", "messages_due"}
    expected |= {"signals_unconsumed", "signals_by_id", "acceptance_records_pkey", "jobs_visible", "jobs_pkey"}
    expected |= {"gates_pkey", "gate_runs_pkey", "gate_runs_waiting", "gate_lines_open", "gate_exits_pkey"}
    assert expected | {"gate_lines_pkey", "gate_starts_pkey"} <= recorder.indexes()


async def fill(address: str) -> None:
    """Fill every table behind the store's back, as if much had happened, and let the server look at it."""
    for statement in FILL:
        await execute(address, statement)
    for table in TABLES:
        await execute(address, f"ANALYZE {parse_address(address).schema}.{table}")


@pytest.mark.slow
@pytest.mark.contract("STO-1", "TSK-1")
async def test_tasks_are_found_without_walking_through_all(address: str) -> None:
    store, recorder = await recorded(address)
    store._lists = store._pool  # whose plans are looked at
    await fill(address)
    await SampleNode(store).start("run-1", task("a", roles=("boss",), assignee="ann"))
    for query, index in (
        (TaskQuery(task_id="a"), "tasks_pkey"),
        (TaskQuery(run_id="run-1"), "tasks_by_run"),
        (TaskQuery(assignee="ann", status="OPEN"), "tasks_by_assignee"),
        (TaskQuery(role="boss", status="OPEN"), "tasks_by_role"),
        (TaskQuery(due_before=1, status="OPEN"), "tasks_by_due"),
        (TaskQuery(actor="ann", actor_roles=("boss",), status="OPEN"), "tasks_by_role"),
    ):
        recorder.plans.clear()
        await store.find(query)
        assert recorder.walked() == []
        assert index in recorder.indexes(), query
    await store.close()


class Explained:
    """Executes statements as a pool does, and keeps the plan of each."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.nodes: list[dict[str, Any]] = []

    async def fetch(self, sql: str, *args: Any, **options: Any) -> list[Any]:
        """Execute a statement; explain it, unless it looks for the number of the run behind which to begin."""
        if "coalesce((SELECT run_no" not in sql:
            [[text]] = await self._pool.fetch(f"EXPLAIN (FORMAT JSON) {sql}", *args)
            pending = [json.loads(text)[0]["Plan"]]
            while pending:
                node = pending.pop()
                self.nodes.append(node)
                pending += node.get("Plans", [])
        return await self._pool.fetch(sql, *args, **options)


@pytest.mark.contract("QUE-4")
async def test_searches_read_their_index_and_nothing_else(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the runs of a source are gathered or walked through, for one tenant or all."""
    store = await PostgresStore.open(address)
    await store.migrate()
    async with behind(address) as connection:
        await fill_server(connection, parse_address(address).schema, 20_000)
    for few, tenant, (label, query) in product((0, search.FEW), (None, "tenant-7"), SEARCHES.items()):
        monkeypatch.setattr(search, "FEW", few)
        asked = replace(query, tenant=tenant, newest=query.order is None)
        if not search.is_driven(asked):
            continue
        db = Explained(store._pool)
        await queries._search_part(db, asked, 10)
        walked = [node for node in db.nodes if node["Node Type"].endswith("Seq Scan")]
        assert walked == [], (label, tenant, few)
        used = {node["Index Name"] for node in db.nodes if "Index Name" in node}
        expected = (OF_TENANTS if tenant else OF_ALL).get(label)
        assert expected is None or expected in used, (label, tenant, few, used)
    await store.close()


OF_ALL = {
    "equality, few": "run_attributes_word",
    "range, few": "run_attributes_number",
    "prefix, few": "run_attributes_word",
    "ordered": "run_attributes_number",
    "status": "runs_by_status",
    "rare workflow": "runs_by_workflow",
    "time of end": "runs_finished",
    "ordered by time of end": "runs_finished",
}
OF_TENANTS = {
    "equality, few": "run_attributes_tenant_word",
    "range, few": "run_attributes_tenant_number",
    "status": "runs_by_tenant_status",
    "all": "runs_by_tenant",
    "time of end": "runs_by_tenant_finished",
}


@pytest.mark.slow
@pytest.mark.contract("STO-1")
@pytest.mark.parametrize("state", ["filled", "empty"])
async def test_each_signal_that_a_turn_consumes_is_found_by_its_number(address: str, state: str) -> None:
    """Not among all that are unconsumed: of those a mailbox may have thousands."""
    store, recorder = await recorded(address)
    if state == "filled":
        await fill(address)
    node = SampleNode(store, "node", HOUR_MS)
    await node.start("run-1", wait("go"))
    await store.deliver([signal("run-1", signal_id="s")])
    await node.step("run-1")
    await store.close()
    consuming = [node for statement, node in recorder.nodes() if "SET consumed_seq" in statement]
    assert {node["Index Name"] for node in consuming if "Index Name" in node} == {"signals_pkey"}


@pytest.mark.contract("BUS-1")
async def test_a_page_of_a_long_backlog_is_read_and_settled_by_its_keys(address: str) -> None:
    """The rest of the backlog is not looked at, on a schema that was empty when the plans were made."""
    store, recorder = await recorded(address)
    [connection] = store._pool._free
    await connection.execute("SET auto_explain.log_analyze = on")
    await store.put_sink(Sink(name="all", kind="projection"))
    node = SampleNode(store, "node-a", HOUR_MS)
    for run_id in ("a", "b"):
        await node.start(run_id, wait("go"))
    await execute(
        address,
        "INSERT INTO holdfast.outbox SELECT s.sink_no, -n, 1, 1, n, 0, n "
        "FROM generate_series(1, 20000) n, holdfast.sinks s",
    )
    recorder.plans.clear()
    page = await bus.find_outbox(store._pool, OutboxQuery(sink="all", after=(-30_000, 0)), 50)
    assert (
        await store.settle_outbox("all", [OutboxSettlement(entry=each) for each in page], SinkProgress()) == [True] * 50
    )
    query = EventQuery(after=(("a", 0), ("b", 0)), most_bytes=10**6)
    assert len(await queries.find_events(store._pool, query, 100)) >= 4
    rows = {
        node["Relation Name"]: max(node["Actual Rows"] * node["Actual Loops"], node.get("Rows Removed by Filter", 0))
        for _, node in recorder.nodes()
        if node.get("Relation Name") in ("outbox", "runs")
    }
    await store.close()
    assert rows["outbox"] <= 50
    assert rows["runs"] <= 50
    assert recorder.walked() == []
