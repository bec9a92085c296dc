"""Admission on PostgreSQL: which locks are waited for, what is retried, and what runs without a limit pay."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from msgspec.structs import replace

from holdfast.core.admission import NO_LIMIT, AdmissionRequest, RunLimit
from holdfast.errors import Conflict
from holdfast.limits import Limits
from holdfast.store.port import Created, Existing, NewRun
from holdfast.store.postgres import PostgresStore
from holdfast.store.postgres.address import parse_address
from holdfast.store.postgres.create import create
from holdfast.store.postgres.pool import in_schema
from holdfast.testing import VirtualClock
from holdfast.testing.samples import SampleNode, complete, new_run, signal
from holdfast.testing.store_suite.admission import ONE, admit, enqueue, finish, waiting
from holdfast.testing.store_suite.base import check_refused
from tests.store.admission_model import compare
from tests.store.postgres.proxy import Proxy
from tests.store.postgres.tampering import behind
from tests.store.postgres.test_plans import HOUR_MS, recorded

SOON_S = 60.0


@pytest.fixture
async def store(address: str) -> AsyncIterator[PostgresStore]:
    store = await PostgresStore.open(address)
    await store.migrate()
    yield store
    await store.close()


@asynccontextmanager
async def holding(address: str, sql: str, *args: Any) -> AsyncIterator[Any]:
    """A transaction of somebody else who holds the locks that a statement takes, and lets go at the end."""
    async with behind(address) as connection, connection.transaction():
        await connection.execute("SET LOCAL lock_timeout = '5s'")
        await connection.fetch(in_schema(sql, parse_address(address).schema), *args)
        yield connection


async def until_somebody_waits(connection: Any) -> None:
    """Return when the server says that a session waits for a lock."""
    waiting_for_locks = (
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND pid <> pg_backend_pid()"
    )
    async with asyncio.timeout(SOON_S):
        while not await connection.fetchval(waiting_for_locks + " AND datname = current_database()"):
            await connection.execute("SELECT pg_stat_clear_snapshot()")


LOCK_RUN = "SELECT 1 FROM holdfast.runs WHERE run_id = $1 FOR UPDATE"
LOCK_QUEUE = "SELECT 1 FROM holdfast.gates WHERE plan_id = $1 FOR UPDATE"


def with_admission(run_id: str, limit: RunLimit = ONE, **options: Any) -> NewRun:
    """Return a run with an admission request."""
    return replace(new_run(run_id, **options), admission=AdmissionRequest(limit=limit))


# --- locks


@pytest.mark.contract("QUE-2", "OWN-1")
async def test_run_that_leaves_waits_for_no_lock_of_the_queue(address: str, store: PostgresStore) -> None:
    node = SampleNode(store, "node-a", HOUR_MS)
    await enqueue(store, "a", "b")
    await node.claim()
    async with holding(address, LOCK_QUEUE, "order"):
        async with asyncio.timeout(SOON_S):
            await node.step("a", complete())
    assert await admit(store) == ["b"]


@pytest.mark.contract("QUE-2", "QUE-3")
async def test_run_that_is_queued_while_the_last_one_leaves_is_admitted_after_that(
    address: str, store: PostgresStore
) -> None:
    """It was queued when there was no room, and cannot be seen yet when `admit` is called for the free place."""
    node = SampleNode(store, "node-a", HOUR_MS)
    await enqueue(store, "a")
    is_queued, may_end = asyncio.Event(), asyncio.Event()

    async def enqueue_slowly(session: Any) -> None:
        assert await create(session, [with_admission("b")], None, Limits(), None) == [Created("b")]
        is_queued.set()
        await may_end.wait()

    coming = asyncio.create_task(store._pool.transact(enqueue_slowly))
    await is_queued.wait()
    await finish(node, "a")
    admitting = asyncio.create_task(admit(store))
    async with behind(address) as connection:
        await until_somebody_waits(connection)
    may_end.set()
    await coming
    assert await admitting == ["b"]


@pytest.mark.contract("QUE-2")
async def test_new_run_does_not_wait_for_the_run_that_is_next(address: str, store: PostgresStore) -> None:
    """Another transaction holds that run: the next call admits it."""
    node = SampleNode(store, "node-a", HOUR_MS)
    await enqueue(store, "a", "b")
    await finish(node, "a")
    async with holding(address, LOCK_RUN, "b"):
        async with asyncio.timeout(SOON_S):
            assert await enqueue(store, "c") == [Created("c")]
    assert await waiting(store, "b", "c") == ["b", "c"]
    assert await admit(store) == ["b"]


@pytest.mark.contract("QUE-3", "OWN-1")
async def test_runs_that_are_admitted_are_locked_in_order_of_their_ids(address: str, store: PostgresStore) -> None:
    """As everywhere, whatever their ranks: no transaction that waits for the first lock holds the second."""
    await enqueue(store, "a")
    await enqueue(store, "z", priority=1)
    await enqueue(store, "m")
    async with holding(address, LOCK_RUN, "m") as connection:
        admitting = asyncio.create_task(admit(store, NO_LIMIT))
        await until_somebody_waits(connection)
        await connection.fetch(in_schema(LOCK_RUN, parse_address(address).schema), "z")
    assert await admitting == ["z", "m"]


@pytest.mark.contract("QUE-2", "WF-7")
async def test_run_that_finished_while_it_was_chosen_is_not_admitted(address: str, store: PostgresStore) -> None:
    """Its place is free again, and the answer is to call again at once."""
    await enqueue(store, "a", "b")
    end = "UPDATE holdfast.runs SET finished_at = 1, status = 'CANCELLED' WHERE run_id = $1"
    async with holding(address, end, "b") as connection:
        admitting = asyncio.create_task(store.admit({"order": RunLimit(at_once=2)}, 9))
        await until_somebody_waits(connection)
    admitted, again = await admitting
    assert admitted == []
    assert again is not None
    assert again <= await store.now()
    await enqueue(store, "c", limit=RunLimit(at_once=2))
    assert await waiting(store, "c") == []


# --- what is done again


@pytest.mark.contract("QUE-1", "QUE-2")
async def test_run_that_was_created_without_a_request_takes_no_place(address: str, store: PostgresStore) -> None:
    """Its id is taken by a run without a request, which could not be seen when this one was queued."""
    is_created, may_end = asyncio.Event(), asyncio.Event()

    async def create_slowly(session: Any) -> None:
        await create(session, [new_run("a", request_id="other")], None, Limits(), None)
        is_created.set()
        await may_end.wait()

    creating = asyncio.create_task(store._pool.transact(create_slowly))
    await is_created.wait()
    coming = asyncio.create_task(store.create([with_admission("a", request_id="mine")]))
    async with behind(address) as connection:
        await until_somebody_waits(connection)
    may_end.set()
    await creating
    check_refused((await coming)[0], Conflict)
    await enqueue(store, "b")
    assert await waiting(store, "b") == []


@pytest.mark.contract("QUE-1", "QUE-2")
async def test_run_whose_creation_was_not_answered_is_created_once(address: str, store: PostgresStore) -> None:
    async with Proxy(address) as proxy:
        shaky = await PostgresStore.open(proxy.address)
        await shaky.renew("node-a", HOUR_MS)
        proxy.loses_answer_to = b"run-1"
        assert await shaky.create([with_admission("run-1")], "node-a") == [Created("run-1", 1)]
        proxy.loses_answer_to = b"run-2"
        assert await shaky.create([with_admission("run-2")], "node-a") == [Created("run-2")]
        assert proxy.lost == 2
        assert await shaky.create([with_admission("run-2")], "node-a") == [Existing("run-2")]
        assert await waiting(shaky, "run-1", "run-2") == ["run-2"]
        await shaky.close()


# --- what others pay


@pytest.mark.slow
@pytest.mark.contract("QUE-2")
async def test_runs_without_a_limit_never_touch_admission(address: str) -> None:
    """No statement of theirs reads a table of admission, although other runs are queued."""
    store, recorder = await recorded(address)
    await enqueue(store, "limited", "in line")
    recorder.plans.clear()
    node = SampleNode(store, "node-a", HOUR_MS)
    await node.start("run-1")
    await store.deliver([signal("run-1")])
    child = replace(await node.turn(await node.load("run-1")), starts=(new_run("child"),))
    await node.commit(child)
    await node.step("run-1", complete())
    await store.close()
    assert len(recorder.plans) > 10
    tables = {cast("str", node["Relation Name"]) for _, node in recorder.nodes() if "Relation Name" in node}
    assert "runs" in tables
    assert [table for table in tables if table.startswith("gate")] == []
    assert [text for text, _ in recorder.nodes() if "gate_" in text.replace("gate_no", "")] == []


# --- the rule


@pytest.mark.contract("QUE-2")
@pytest.mark.parametrize("seed", range(8))
async def test_the_functions_admit_by_the_rule_of_the_core(address: str, seed: int) -> None:
    """They decide in SQL what `core/admission.py` decides; any sequence of starts and ends gives the same answers."""
    clock = VirtualClock()
    store = await PostgresStore.open(address, clock=clock)
    await store.migrate()
    try:
        await compare(store, clock, random.Random(seed), 150)
    finally:
        await store.close()
