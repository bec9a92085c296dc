"""A long transaction keeps dead rows from being removed: a claim does not walk through them, and misses nothing."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.store.postgres import PostgresStore
from holdfast.store.postgres.leases import AGAIN_AFTER
from holdfast.testing import VirtualClock
from holdfast.testing.samples import SampleNode, new_run, timer
from tests.store.postgres.tampering import behind, execute
from tests.store.postgres.test_plans import HOUR_MS, Recorder, recorded

ROWS = 20_000


async def pile_up(address: str, since: int) -> None:
    """Let runs have come and gone, one each millisecond since then, as the ready set sees it."""
    await execute(
        address,
        "INSERT INTO holdfast.agenda SELECT -n, '', 0, $1 + 1000 * n, $1 + 1000 * n, 'order', '1' "
        "FROM generate_series(1, $2::bigint) n",
        since,
        ROWS,
    )
    await execute(address, "DELETE FROM holdfast.agenda WHERE run_no < 0")


def pages_of_agenda(recorder: Recorder) -> int:
    """How many pages of the ready set were looked at by claims."""
    scans = [node for text, node in recorder.nodes() if node.get("Relation Name") == "agenda" and "a.place" in text]
    return sum(node["Shared Hit Blocks"] + node["Shared Read Blocks"] for node in scans)


async def measured_claim(recorder: Recorder, node: SampleNode) -> int:
    recorder.plans.clear()
    assert len(await node.claim()) == 1
    return pages_of_agenda(recorder)


@pytest.mark.slow
@pytest.mark.contract("STO-1", "MSG-4")
async def test_a_claim_does_not_walk_through_what_is_long_done(address: str) -> None:
    clock = VirtualClock()
    store, recorder = await recorded(address, clock)
    [connection] = store._pool._free
    await connection.execute("SET auto_explain.log_analyze = on")
    await connection.execute("SET auto_explain.log_buffers = on")
    node = SampleNode(store, "node-a", HOUR_MS)
    async with behind(address) as analyst, analyst.transaction(isolation="repeatable_read"):
        await analyst.fetch("SELECT count(*) FROM pg_class")
        await pile_up(address, clock.now())
        clock.advance(ms=60_000)
        await store.create([new_run("run-1")])
        first = await measured_claim(recorder, node)
        clock.advance(ms=1_000)
        second = await measured_claim(recorder, node)
    await store.close()
    assert first > 100, "the dead rows are there"
    assert second < 30, "and whoever has seen that they are dead does not look at them again"


@pytest.mark.contract("MSG-2", "TMR-1")
async def test_what_was_entered_behind_the_start_of_claims_is_found_all_the_same(address: str) -> None:
    """As if its transaction had taken a minute, or another machine's clock were behind."""
    clock, slow = VirtualClock(), VirtualClock()
    store = await PostgresStore.open(address, clock=clock)
    await store.migrate()
    clock.advance(ms=60_000)
    node = SampleNode(store, "node-a", HOUR_MS)
    assert await node.claim() == []
    clock.advance(ms=1)
    assert await node.claim() == []
    late = await PostgresStore.open(address, clock=slow)
    await late.create([new_run("late")])
    found: list[Any] = []
    for _ in range(AGAIN_AFTER // 1_000_000 + 2):
        clock.advance(ms=1_000)
        found += await node.claim()
    assert found[0].head.run_id == "late"
    await late.close()
    await store.close()


@pytest.mark.contract("TMR-1", "MSG-2")
async def test_what_was_ready_for_long_is_claimed_first_wherever_it_was_entered(address: str) -> None:
    clock = VirtualClock()
    store = await PostgresStore.open(address, clock=clock)
    await store.migrate()
    node, other = SampleNode(store, "node-a", HOUR_MS), SampleNode(store, "node-b", HOUR_MS)
    await node.start("sleeper", timer(clock.now() + 1_000_000))
    clock.advance(ms=60_000)
    await store.create([new_run("young")])
    clock.advance(ms=10_000)
    await store.create([new_run("younger")])
    await store.release("node-a", ["sleeper"])
    assert [run.head.run_id for run in await other.claim(1)] == ["sleeper"]
    await store.release("node-b", ["sleeper"])
    assert [run.head.run_id for run in await other.claim(2)] == ["sleeper", "young"]
    await store.close()
