"""Transactions become visible in another order than they are numbered in: whoever follows changes misses none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from holdfast.store.port import Store
from holdfast.store.postgres import PostgresStore
from holdfast.store.postgres.address import parse_address
from holdfast.store.postgres.changefeed import Cursor
from holdfast.store.postgres.pool import in_schema
from holdfast.testing import VirtualClock, system_view
from holdfast.testing.samples import SampleNode, marker, new_run, wait
from holdfast.testing.store_suite.changefeed import is_nothing, versions
from tests.races import contenders
from tests.races.parallel import run_in_parallel
from tests.store.postgres.tampering import behind, execute

HOUR_MS = 3_600_000
KEPT_MS = 30_000
PATIENCE_S = 60.0

APPEND = """
INSERT INTO holdfast.events
SELECT run_no, version + 1, 'id', 'MarkerRecorded', NULL, NULL, NULL, '{}', sha256(run_id::bytea), 1, 1, 'a', '{}',
    NULL, NULL, 1 FROM holdfast.runs WHERE run_id = $1
"""
GROW = "UPDATE holdfast.runs SET version = version + 1 WHERE run_id = $1"


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
async def store(address: str, clock: VirtualClock) -> AsyncIterator[PostgresStore]:
    store = await PostgresStore.open(address, clock=clock)
    await store.migrate()
    yield store
    await store.close()


class Slow:
    """Somebody whose turn takes long: it has begun, and is committed when asked for."""

    def __init__(self, connection: Any, schema: str, run_id: str) -> None:
        self._connection, self._schema, self._run_id = connection, schema, run_id
        self._transaction = connection.transaction()

    async def begin(self) -> None:
        await self._transaction.start()
        await self._connection.execute(in_schema(GROW, self._schema), self._run_id)

    async def commit(self) -> None:
        await self._connection.execute(in_schema(APPEND, self._schema), self._run_id)
        await self._transaction.commit()


def first_unseen(cursor: str) -> int:
    """Return the first transaction that whoever has a cursor has not seen."""
    end, _, under_way = cursor.partition(":")
    return min(map(int, [end, *filter(None, under_way.split(","))]))


async def all_changes(store: Store, cursor: str, limit: int) -> tuple[dict[str, int], str]:
    """Go on from place to place until there is no more."""
    seen: dict[str, int] = {}
    has_more = True
    while has_more:
        changes = await store.changes(cursor, limit)
        assert not changes.is_lost
        cursor, has_more = changes.cursor, changes.has_more
        seen |= versions(changes)
    return seen, cursor


@pytest.mark.contract("EVT-6")
@pytest.mark.parametrize("limit", [1, 2, 1_000])
async def test_a_turn_that_began_before_others_and_is_committed_after_them_is_not_missed(
    address: str, store: PostgresStore, limit: int
) -> None:
    """And nobody who follows the others waits for it."""
    node = SampleNode(store, lease_ms=HOUR_MS)
    for run_id in ("slow", "slower", "quick"):
        await node.start(run_id, wait("go"))
    schema = parse_address(address).schema
    cursor = (await store.changes()).cursor
    async with behind(address) as one, behind(address) as other:
        slow, slower = Slow(one, schema, "slow"), Slow(other, schema, "slower")
        await slow.begin()
        await slower.begin()
        await node.step("quick", marker("a"))
        seen, cursor = await all_changes(store, cursor, limit)
        assert seen == {"quick": 4}
        await slow.commit()
        await node.step("quick", marker("b"))
        seen, cursor = await all_changes(store, cursor, limit)
        assert seen == {"slow": 4, "quick": 5}
        assert is_nothing(await store.changes(cursor))
        await slower.commit()
        seen, cursor = await all_changes(store, cursor, limit)
        assert seen == {"slower": 4}
    assert is_nothing(await store.changes(cursor))


@pytest.mark.slow
@pytest.mark.contract("EVT-6", "API-3")
async def test_whoever_follows_hard_writers_has_seen_every_run_to_its_end(address: str, store: PostgresStore) -> None:
    cursor, seen, looks = (await store.changes()).cursor, dict[str, int](), 0
    writing = asyncio.create_task(
        asyncio.to_thread(run_in_parallel, contenders.write_hard, processes=2, threads=4, path=address, seconds=2.0)
    )
    while not writing.done():
        found, cursor = await all_changes(store, cursor, 50)
        seen |= found
        looks += bool(found)
    await writing
    seen |= (await all_changes(store, cursor, 50))[0]
    runs = (await system_view(store)).runs
    assert seen == {run.run_id: len(run.events) for run in runs}
    assert looks > 3
    assert len(runs) > 10


async def test_a_look_is_bounded_though_many_turns_were_committed_at_once(store: PostgresStore) -> None:
    cursor = (await store.changes()).cursor
    for batch in range(3):
        await store.create([new_run(f"run-{batch}-{number}") for number in range(50)])
    first = await store.changes(cursor, 60)
    assert (len(first.runs), first.has_more) == (100, True)
    second = await store.changes(first.cursor, 60)
    assert len(versions(first) | versions(second)) == 150


@pytest.mark.contract("EVT-6")
async def test_what_is_noted_is_forgotten_after_a_while_and_who_has_slept_is_told(
    address: str, store: PostgresStore, clock: VirtualClock
) -> None:
    """Who goes on looking is not disturbed."""
    await store.renew("node-b", HOUR_MS)
    asleep = (await store.changes()).cursor
    await store.create([new_run("run-1")])
    awake = (await store.changes(asleep)).cursor
    async with asyncio.timeout(PATIENCE_S), behind(address) as connection:
        while await connection.fetchval(f"SELECT count(*) FROM {parse_address(address).schema}.growth"):
            looked = await store.changes(awake)
            assert is_nothing(looked)
            awake = looked.cursor
            clock.advance(ms=KEPT_MS + 1)
            await store.renew("node-b", HOUR_MS)  # others on the same server may be under way since before
    assert (await store.changes(asleep)).is_lost
    await store.create([new_run("run-2")])
    assert versions(await store.changes(awake)) == {"run-2": 1}


@pytest.mark.contract("EVT-6")
async def test_nothing_is_forgotten_because_transactions_have_waited(address: str, store: PostgresStore) -> None:
    """The time of a transaction that has waited is before that of the last one: that is no reason to forget."""
    await store.renew("node-b", HOUR_MS)
    cursor = (await store.changes()).cursor
    await store.create([new_run("run-1")])
    started_at = await store.now()
    for behind_ms in (1, 2, 3, 4):
        late = await PostgresStore.open(address, clock=VirtualClock(started_at - behind_ms * 1_000))
        await late.renew("node-b", HOUR_MS)
        await late.close()
    assert versions(await store.changes(cursor)) == {"run-1": 1}


async def test_nothing_is_forgotten_that_somebody_may_not_have_seen_yet(
    address: str, store: PostgresStore, clock: VirtualClock
) -> None:
    """While a turn is being committed, whatever is noted later stays too."""
    await SampleNode(store, lease_ms=HOUR_MS).start("slow", wait("go"))
    async with behind(address) as connection:
        slow = Slow(connection, parse_address(address).schema, "slow")
        await slow.begin()
        number = await connection.fetchval("SELECT pg_current_xact_id()::text::bigint")
        async with asyncio.timeout(PATIENCE_S):  # others on the same server may be under way since before
            while first_unseen(cursor := (await store.changes()).cursor) < number:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await store.create([new_run("run-1")])
        for _ in range(5):
            clock.advance(ms=KEPT_MS + 1)
            await store.renew("node-b", HOUR_MS)
        assert versions(await store.changes(cursor)) == {"run-1": 1}
        await slow.commit()
    assert versions(await store.changes(cursor)) == {"run-1": 1, "slow": 4}


async def test_a_server_that_was_filled_from_a_dump_numbers_anew(
    address: str, store: PostgresStore, clock: VirtualClock
) -> None:
    await store.create([new_run("run-0")])
    await execute(address, "UPDATE holdfast.growth SET xid = xid + 1000000000000")
    await execute(address, "UPDATE holdfast.growth_kept SET lost_before = 10 ^ 12, ended_before = 10 ^ 12")
    for number in range(1, 4):
        cursor = (await store.changes()).cursor
        await store.create([new_run(f"run-{number}")])
        assert versions(await store.changes(cursor)) == {f"run-{number}": 1}
        clock.advance(ms=KEPT_MS + 1)
        await store.renew("node-b", HOUR_MS)
    assert (await store.changes("999999999999:")).is_lost


def test_a_place_within_a_look_has_seen_what_was_taken_and_nothing_else() -> None:
    before, here = Cursor(10, (3, 5, 8)), Cursor(20, (5, 12, 17))
    assert before.after(4, here) == Cursor(10, (5, 8))
    assert before.after(8, here) == Cursor(10, (5,))
    assert before.after(14, here) == Cursor(15, (5, 12))
    assert before.after(19, here) == Cursor(20, (5, 12, 17))
    assert str(Cursor(20, (5, 12))) == "20:5,12"
