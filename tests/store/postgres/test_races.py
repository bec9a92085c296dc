"""Many processes on one schema: one is first, one owns, nobody sees half a turn, and the bell is heard."""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter

import pytest

from holdfast.core import codec
from holdfast.core.admission import RunLimit
from holdfast.core.codec import number_of
from holdfast.core.events import MarkerRecorded
from holdfast.core.invariants import check
from holdfast.errors import Conflict
from holdfast.store import port
from holdfast.store.postgres import PostgresStore
from holdfast.store.postgres.address import parse_address
from holdfast.store.postgres.migrate import latest_version
from holdfast.testing import system_view
from holdfast.testing.samples import SampleNode, new_run, read_history, read_mailbox, timer
from tests.races import contenders
from tests.races.parallel import run_in_parallel
from tests.races.stores import HOUR_MS, opened_anywhere, prepare
from tests.store.postgres.tampering import behind

pytestmark = pytest.mark.slow


@pytest.mark.contract("SIG-5")
async def test_of_simultaneous_senders_of_one_signal_exactly_one_is_accepted(address: str) -> None:
    await prepare(address, new_run("run-1"))

    played = run_in_parallel(contenders.send_signal, processes=4, threads=5, path=address, run_id="run-1", times=25)

    answers = [answer for answers in played for _, answer in answers]
    assert Counter(type(answer) for answer in answers) == {port.Accepted: 1, port.Duplicate: 499}
    (result,) = {answer.result for answer in answers}
    async with opened_anywhere(address) as store:
        (signal,) = await read_mailbox(store, "run-1")
    assert (signal.signal_id, signal.accepted_at, signal.inbox_seq) == ("click", result.accepted_at, 1)
    assert signal.suffix in result.signal_storage_key


@pytest.mark.contract("SIG-5")
async def test_of_simultaneous_payloads_under_one_id_one_stands_and_the_others_conflict(address: str) -> None:
    await prepare(address, new_run("run-1"))

    played = run_in_parallel(
        contenders.send_signal, processes=2, threads=6, path=address, run_id="run-1", times=10, payloads=3
    )

    async with opened_anywhere(address) as store:
        (signal,) = await read_mailbox(store, "run-1")
    winner = codec.decode(signal.payload, int)
    by_payload = {payload: [a for answers in played for p, a in answers if p == payload] for payload in range(3)}
    assert Counter(type(answer) for answer in by_payload.pop(winner)) == {port.Accepted: 1, port.Duplicate: 39}
    losers = [answer for answers in by_payload.values() for answer in answers]
    assert all(isinstance(answer, port.Refused) and isinstance(answer.error, Conflict) for answer in losers)


@pytest.mark.contract("QUE-1")
async def test_of_simultaneous_requests_with_one_id_exactly_one_creates_a_run(address: str) -> None:
    await prepare(address)

    played = run_in_parallel(contenders.start_same_request, processes=2, threads=8, path=address, times=10)

    answers = [answer for answers in played for answer in answers]
    assert Counter(type(answer) for answer in answers) == {port.Created: 1, port.Existing: 159}
    (run_id,) = {answer.run_id for answer in answers}
    async with opened_anywhere(address) as store:
        (head,) = await store.find(port.RunQuery())
        assert len(await read_history(store, run_id)) == 1
    assert head.run_id == run_id


@pytest.mark.contract("OWN-1")
async def test_of_owners_that_commit_the_same_version_exactly_one_wins_each_time(address: str) -> None:
    await prepare(address, new_run("run-1"), claim_for="node-0")
    versions = 25

    played = run_in_parallel(
        contenders.commit_same_version, processes=2, threads=4, path=address, run_id="run-1", versions=versions
    )

    winners: list[int] = []
    for answers in zip(*played, strict=True):
        assert Counter(type(answer) for answer in answers) == {port.Committed: 1, port.CommitConflict: 7}
        assert {answer.reason for answer in answers if isinstance(answer, port.CommitConflict)} == {"version"}
        winners += [contender for contender, answer in enumerate(answers) if isinstance(answer, port.Committed)]
    async with opened_anywhere(address) as store:
        events = await read_history(store, "run-1")
    recorded = [codec.decode(event.data.value, int) for event in events if isinstance(event.data, MarkerRecorded)]
    assert recorded == winners
    assert [event.run_seq for event in events] == list(range(1, versions + 3)), "queued, started, and the markers"


@pytest.mark.contract("INV")
async def test_processes_that_write_hard_never_see_a_lock_and_everything_adds_up(address: str) -> None:
    await prepare(address)

    played = run_in_parallel(contenders.write_hard, processes=4, threads=2, path=address, seconds=3.0)

    assert all(counts["runs"] for counts in played), "nobody starves"
    total = {name: sum(counts[name] for counts in played) for name in played[0]}
    async with opened_anywhere(address) as store:
        stats = await store.stats()
        view = await system_view(store)
    assert len(view.runs) == sum(stats.runs.values()) == total["runs"]
    assert stats.runs.get("COMPLETED", 0) == total["finished"]
    assert sum(len(run.signals) for run in view.runs) == total["signals"]
    assert sum(len(run.events) for run in view.runs) == total["events"]
    assert check(view) == []


@pytest.mark.contract("QUE-2", "QUE-3")
@pytest.mark.parametrize("limit", [RunLimit(at_once=3), RunLimit(at_once=5, per_key=1)])
async def test_no_more_runs_are_inside_than_allowed_and_nobody_waits_for_ever(address: str, limit: RunLimit) -> None:
    await prepare(address)

    played = run_in_parallel(contenders.pass_admission, processes=4, path=address, runs=25, limit=limit)

    most = max(count for counts in played for count in counts)
    assert 1 <= most <= (limit.at_once or 0)
    async with opened_anywhere(address) as store:
        stats = await store.stats()
        assert (stats.runs, stats.queued) == ({"COMPLETED": 100}, 0)
        assert await store.admit({"order": limit}, 9) == ([], None)
    assert await admission_counts(address) == [("order", 0, 0)]


@pytest.mark.contract("QUE-2", "QUE-3", "OWN-1")
async def test_admission_never_deadlocks(address: str) -> None:
    await prepare(address)
    limits = {"a": RunLimit(at_once=3), "b": RunLimit(per_key=2), "c": RunLimit(at_once=6, starts=500, period_ms=50)}

    played = run_in_parallel(contenders.crowd_admission, processes=4, threads=2, path=address, rounds=15, limits=limits)

    async with opened_anywhere(address) as store:
        await store.admit(limits, 1)
        stats = await store.stats()
    assert stats.runs["CANCELLED"] > 0
    assert stats.runs["COMPLETED"] + stats.runs["CANCELLED"] == sum(played)
    assert (stats.queued, stats.messages) == (0, 0)
    assert await admission_counts(address) == [("a", 0, 0), ("b", 0, 0), ("c", 0, 0)]


async def admission_counts(address: str) -> list[tuple[str, int, int]]:
    """Return how many runs are inside and queued by plan, as the queues count them; no line may be left over."""
    async with behind(address) as connection:
        schema = parse_address(address).schema
        assert await connection.fetchval(f"SELECT count(*) FROM {schema}.gate_lines") == 0
        found = await connection.fetch(f"SELECT plan_id, inside, waiting FROM {schema}.gates ORDER BY 1")
    return [tuple(row) for row in found]


@pytest.mark.contract("STO-1", "MSG-2")
async def test_a_run_is_never_seen_in_the_middle_of_a_turn(address: str) -> None:
    await prepare(address)
    async with opened_anywhere(address) as store:
        await SampleNode(store, "node-0", HOUR_MS).start("run-1", timer(1))

    _, *looks = run_in_parallel(contenders.turn_or_look, processes=3, path=address, run_id="run-1", turns=120)

    assert all(looks)


@pytest.mark.contract("STO-1")
async def test_a_fresh_schema_is_migrated_once_whoever_comes_first(address: str) -> None:
    versions = run_in_parallel(contenders.migrate, processes=8, path=address)

    assert len(versions) == 8
    assert len(set(versions)) == 1
    async with opened_anywhere(address) as store:
        heads = await store.find(port.RunQuery())
    assert [head.run_id for head in heads] == [f"run-{number}" for number in range(8)]


@pytest.mark.contract("STO-1")
async def test_whoever_waited_for_another_ones_migration_finds_it_done(address: str) -> None:
    """A session of the server remembers that there is no such schema, and may notice a new one late."""
    schema = parse_address(address).schema
    newer = latest_version() + 1
    store = await PostgresStore.open(address)
    async with behind(address) as first, behind(address) as onlooker:
        async with first.transaction():
            await first.fetch("SELECT pg_advisory_xact_lock($1)", number_of(f"holdfast migration of {schema}"))
            await first.execute(f"CREATE SCHEMA {schema}")
            await first.execute(
                f"CREATE TABLE {schema}.holdfast_schema (version bigint PRIMARY KEY, oldest_reader bigint)"
            )
            await first.execute(f"INSERT INTO {schema}.holdfast_schema VALUES ({newer}, 1)")
            second = asyncio.create_task(store.migrate())
            waiting = (
                "SELECT count(*) FROM pg_locks JOIN pg_database ON pg_database.oid = database "
                "WHERE datname = current_database() AND locktype = 'advisory' AND NOT granted"
            )
            while not await onlooker.fetchval(waiting):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await second == newer
    await store.close()


@pytest.mark.contract("OWN-1", "MSG-2")
async def test_claimers_share_the_runs_and_no_run_goes_to_two(address: str) -> None:
    await prepare(address, *(new_run(f"run-{number:03}") for number in range(500)))

    played = run_in_parallel(contenders.claim_everything, processes=2, threads=8, path=address, batch=7)

    claimed = [run_id for claims in played for run_id, _ in claims]
    assert len(claimed) == len(set(claimed)), "no run goes to two"
    assert {epoch for claims in played for _, epoch in claims} == {1}
    async with opened_anywhere(address) as store:
        left = await store.stats()
        assert left.ready + len(claimed) == 500, "what nobody got because all were busy with it is still there"


@pytest.mark.contract("OWN-1")
async def test_the_late_commit_of_a_stalled_owner_is_fenced(address: str) -> None:
    await prepare(address, new_run("run-1"))

    stalled, successor = run_in_parallel(contenders.stall_or_take_over, processes=2, path=address)

    assert successor["epoch"] == stalled["epoch"] + 1
    assert isinstance(successor["answer"], port.Committed)
    assert isinstance(stalled["answer"], port.CommitConflict)
    async with opened_anywhere(address) as store:
        events = await read_history(store, "run-1")
    assert {event.engine_run_ref.node for event in events[1:]} == {"node-1"}


@pytest.mark.contract("MSG-4")
@pytest.mark.parametrize("closes", [False, True], ids=["sender stays", "sender closes at once"])
async def test_a_delivery_in_one_process_wakes_a_listener_in_another(address: str, closes: bool) -> None:
    await prepare(address, new_run("run-1"))

    heard, rung = run_in_parallel(
        contenders.ring_or_listen, processes=2, path=address, run_id="run-1", times=30, closes=closes
    )

    delays = [then - now for now, then in zip(rung, heard, strict=True)]
    assert statistics.median(delays) < 0.2, delays


@pytest.mark.contract("MSG-4")
async def test_listening_in_silence_is_not_polling(address: str) -> None:
    await prepare(address, new_run("run-1"))

    (looks,) = run_in_parallel(contenders.listen_in_silence, processes=1, path=address, seconds=1.0)

    assert looks < 10
