"""How processes on a bucket find what others did, what that costs, and what is found of processes that were killed."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import obstore
import pytest
from msgspec import Raw
from msgspec.structs import replace
from obstore.exceptions import GenericError
from obstore.store import MemoryStore as ObjectsInMemory

from holdfast.core.state import PAUSED, RUNNING
from holdfast.errors import StoreUnavailable
from holdfast.store.port import BulletinQuery, Duplicate, Existing, PurgePolicy, RunQuery, ScheduleQuery
from holdfast.store.queries import AlertQuery, SinkQuery
from holdfast.store.s3 import S3Store
from holdfast.store.s3 import bucket as bucket_module
from holdfast.store.s3.bucket import FIRST_REQUEST_S, LEAST_REQUEST_S, REQUEST_S, AnswerTime, Bucket, Stored, Unchanged
from holdfast.store.s3.mirror import OVERLAP
from holdfast.store.s3.server_time import ServerTime
from holdfast.testing import VirtualClock
from holdfast.testing.samples import SampleNode, complete, marker, new_run, signal, wait
from tests.machine_load import slowdown
from tests.store.faulty_objects import FaultyObjects, Killed, kill_at, opened

PARKED = int(os.environ.get("TEST_PARKED_RUNS", "2500"))
"""How many runs wait while a process has nothing to do."""


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.store.s3.bucket.FIRST_PAUSE_S", 0.0001)
    monkeypatch.setattr("holdfast.store.s3.bucket.MOST_PAUSE_S", 0.001)


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> FaultyObjects:
    return FaultyObjects(ObjectsInMemory(), monkeypatch)


async def test_a_change_that_nothing_announced_is_found_by_a_sweep(objects: FaultyObjects) -> None:
    clock = VirtualClock()
    store, other = opened(objects, clock), opened(objects, clock)
    await store.create([new_run("run-1")])
    assert len(await other.find(RunQuery())) == 1
    kill_at(objects, "PUT changes/")
    with pytest.raises(Killed):
        await store.create([new_run("run-2")])
    objects.plan = lambda request: None
    assert len(await other.find(RunQuery())) == 1
    assert await other._look(True)
    assert len(await other.find(RunQuery())) == 2
    assert [change.run_id for change in (await opened(objects, clock).changes("")).runs] == []


async def test_a_process_that_followed_nothing_for_long_reads_everything_again(objects: FaultyObjects) -> None:
    """What named the changes is deleted meanwhile; a caller that follows the changes learns that some are missing."""
    clock = VirtualClock()
    store, other = opened(objects, clock), opened(objects, clock)
    await store.create([new_run("run-1"), new_run("run-2")])
    cursor = (await other.changes()).cursor
    node = SampleNode(store)
    await node.renew()
    for run in await node.claim():
        await store.commit([await node.turn(run, complete())])
    await store.purge(PurgePolicy(finished_run_ms=0, run_ids=("run-1",)))
    clock.advance(ms=3_600_000)
    await store._look(True)
    assert await store.bucket.list("changes") == []
    assert [head.run_id for head in await other.find(RunQuery())] == ["run-2"]
    assert (await other.changes(cursor)).is_lost


@pytest.mark.contract("MSG-4")
async def test_a_listener_hears_of_what_another_process_did(
    objects: FaultyObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.store.s3.polling.FIRST_LOOK_S", 0.001)
    clock = VirtualClock()
    store, other = opened(objects, clock), opened(objects, clock)
    listener = other.wakeups.listen()
    await other.find(RunQuery())
    await store.create([new_run("run-1")])
    assert await listener.wait(60)
    listener.close()
    await other.close()


async def _parked(store: S3Store) -> None:
    """Make a run that waits for a signal, and belongs to no node."""
    node = SampleNode(store)
    await node.start("run-1", wait("go"))
    await node.step("run-1", release=True)


@contextmanager
def _impatience(store: S3Store) -> Iterator[None]:
    """Let a process give up soon, but only while its server fails."""
    patience_s, store.bucket.patience_s = store.bucket.patience_s, 0.05
    try:
        yield
    finally:
        store.bucket.patience_s = patience_s


# --- announcing


async def test_a_process_reads_no_head_of_runs_that_it_has_nothing_to_do_with(objects: FaultyObjects) -> None:
    clock = VirtualClock()
    store, other = opened(objects, clock), opened(objects, clock)
    node, idle = SampleNode(store), SampleNode(other, "node-b")
    await idle.claim()
    await node.start("run-1", wait("go"))
    for number in range(5):
        await node.step("run-1", marker(f"m{number}"))
    objects.log.clear()
    before = other.bucket.requests.copy()
    assert await other.claim("node-b", 10) == []
    assert (await other.stats()).runs == {"RUNNING": 1}
    assert await other.find(RunQuery(status=PAUSED)) == []
    assert (other.bucket.requests - before)["LIST"] == 3
    assert not [line for line in objects.log if "heads/" in line]
    assert [head.version for head in await other.find(RunQuery())] == [(await node.load("run-1")).head.version]


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_what_could_not_be_announced_is_announced_by_the_next_call(
    objects: FaultyObjects, is_cancelled: bool
) -> None:
    """Also what other calls had changed meanwhile; and the caller that gave up learns nothing of it."""
    clock = VirtualClock()
    store, other = opened(objects, clock), opened(objects, clock)
    await _parked(store)
    await other.find(RunQuery())
    has_tried = asyncio.Event()

    def plan(request: str) -> str | None:
        if not request.startswith("PUT changes/"):
            return None
        has_tried.set()
        return "before"

    objects.plan = plan
    with _impatience(store):
        delivering = asyncio.create_task(store.deliver([signal("run-1", "go")]))
        await has_tried.wait()
        if is_cancelled:
            delivering.cancel()
        with pytest.raises(asyncio.CancelledError if is_cancelled else StoreUnavailable):
            await delivering
    objects.plan = lambda request: None
    assert await SampleNode(other, "node-b").claim() == [], "nothing has told the other process"
    await store.create([new_run("run-2")])
    assert [run.head.run_id for run in await SampleNode(other, "node-b").claim()] == ["run-1", "run-2"]


async def test_a_write_whose_outcome_its_writer_does_not_learn_is_announced(objects: FaultyObjects) -> None:
    clock = VirtualClock()
    store, other = opened(objects, clock), opened(objects, clock)
    await _parked(store)
    await other.find(RunQuery())
    objects.plan = lambda request: {"P": "after", "G": "before"}[request[0]] if "heads/" in request else None
    with _impatience(store), pytest.raises(StoreUnavailable):
        await store.deliver([signal("run-1", "go")])
    objects.plan = lambda request: None
    await store._look(False)  # as a process that listens does
    assert [run.head.run_id for run in await SampleNode(other, "node-b").claim()] == ["run-1"]


async def test_what_took_long_to_be_announced_is_announced_again(objects: FaultyObjects) -> None:
    """A name that arrives late sorts before those that others have seen, and they list from there on."""
    clock = VirtualClock()
    store, other, third = opened(objects, clock), opened(objects, clock), opened(objects, clock)
    await other.find(RunQuery())
    is_late = asyncio.Event()

    def plan(request: str) -> str | None:
        if request.startswith("PUT changes/") and not is_late.is_set():
            is_late.set()
            clock.advance(ms=3 * OVERLAP // 1_000)
            return "before"
        return None

    await store.find(RunQuery())
    objects.plan = plan
    creating = asyncio.create_task(store.create([new_run("run-1")]))
    await is_late.wait()
    await third.create([new_run("run-2")])
    await other.find(RunQuery())
    await creating
    assert [head.run_id for head in await other.find(RunQuery())] == ["run-1", "run-2"]


async def _finished_in_silence(objects: FaultyObjects, clock: VirtualClock, *others: S3Store) -> None:
    """Have a node finish a run that all know, and be killed before it announces that."""
    store = opened(objects, clock)
    node = SampleNode(store)
    run = await node.start("run-1", wait("go"))
    for other in others:
        await other.find(RunQuery())
    turn = await node.turn(run, complete())
    kill_at(objects, "PUT changes/")
    with pytest.raises(Killed):
        await store.commit([turn])
    objects.plan = lambda request: None
    objects.log.clear()


@pytest.mark.contract("OWN-3")
async def test_who_waits_for_a_run_learns_of_its_end_although_its_node_was_killed_before_it_told(
    objects: FaultyObjects,
) -> None:
    """When the lease of that node has ended; until then, and again soon after, the run is not read."""
    clock = VirtualClock()
    waiting = opened(objects, clock)
    await _finished_in_silence(objects, clock, waiting)
    ended = RunQuery(run_ids=("run-1",), finished_from=0)
    assert await waiting.find(ended) == []
    assert not [line for line in objects.log if "heads/" in line]
    clock.advance(ms=30_000)
    assert [head.run_id for head in await waiting.find(ended)] == ["run-1"]


async def test_a_run_whose_node_is_gone_is_read_now_and_then_and_not_at_each_look(objects: FaultyObjects) -> None:
    clock = VirtualClock()
    store, waiting = opened(objects, clock), opened(objects, clock)
    await SampleNode(store, lease_ms=10_000).start("run-1", wait("go"))
    await waiting.find(RunQuery())
    clock.advance(ms=10_000)
    objects.log.clear()
    for _ in range(30):
        assert await waiting.find(RunQuery(run_ids=("run-1",), finished_from=0)) == []
        clock.advance(ms=1_000)
    assert sum("heads/" in line for line in objects.log) == 2


@pytest.mark.contract("OWN-3")
async def test_a_node_that_finds_what_another_could_not_announce_announces_it(objects: FaultyObjects) -> None:
    """It wanted to go on with the run of a node that is gone, and found it finished."""
    clock = VirtualClock()
    next_one, third = opened(objects, clock), opened(objects, clock)
    await _finished_in_silence(objects, clock, next_one, third)
    cursor = (await third.changes()).cursor
    clock.advance(ms=30_000)
    assert await SampleNode(next_one, "node-b").claim() == []
    assert [change.run_id for change in (await third.changes(cursor)).runs] == ["run-1"]
    assert [str(head.status) for head in await third.find(RunQuery())] == ["COMPLETED"]


@pytest.mark.contract("OWN-3", "MSG-2")
async def test_what_a_killed_process_has_sent_is_found_without_a_sweep(objects: FaultyObjects) -> None:
    """Another one relays it once more, finds it arrived, and goes on with the receiver, which belongs to no node."""
    clock = VirtualClock()
    store, other = opened(objects, clock), opened(objects, clock)
    await _parked(store)
    node = SampleNode(store)
    run = await node.start("run-2", wait("go"))
    await other.find(RunQuery())
    turn = await node.turn(run)
    kill_at(objects, "PUT changes/")
    with pytest.raises(Killed):
        await store.commit([replace(turn, sends=(signal("run-1", signal_id="sent"),))])
    objects.plan = lambda request: None
    next_one = SampleNode(other, "node-b")
    clock.advance(ms=30_000)
    taken = await next_one.claim()
    clock.advance(ms=3_000)
    taken += await next_one.claim()
    assert "run-1" in [loaded.head.run_id for loaded in taken]


@pytest.mark.contract("SIG-5", "OWN-3")
async def test_a_signal_that_is_sent_again_wakes_its_run_although_the_first_process_was_killed(
    objects: FaultyObjects,
) -> None:
    clock = VirtualClock()
    store, client, other = (opened(objects, clock) for _ in range(3))
    await _parked(store)
    await other.find(RunQuery())
    await client.find(RunQuery())
    kill_at(objects, "PUT changes/")
    with pytest.raises(Killed):
        await store.deliver([signal("run-1", signal_id="sent")])
    objects.plan = lambda request: None
    [again] = await client.deliver([signal("run-1", signal_id="sent")])
    assert isinstance(again, Duplicate)
    clock.advance(ms=3_000)
    assert [loaded.head.run_id for loaded in await SampleNode(other, "node-b").claim()] == ["run-1"]


@pytest.mark.contract("QUE-1", "OWN-3")
async def test_a_run_that_is_asked_for_again_begins_although_the_first_process_was_killed(
    objects: FaultyObjects,
) -> None:
    clock = VirtualClock()
    store, client, other = (opened(objects, clock) for _ in range(3))
    await other.find(RunQuery())
    await client.find(RunQuery())
    kill_at(objects, "PUT changes/")
    with pytest.raises(Killed):
        await store.create([new_run("run-1")])
    objects.plan = lambda request: None
    [again] = await client.create([new_run("run-1")])
    assert isinstance(again, Existing)
    clock.advance(ms=3_000)
    assert [loaded.head.run_id for loaded in await SampleNode(other, "node-b").claim()] == ["run-1"]


# --- the sweep, and the index


async def test_what_the_sweeping_process_knows_and_nothing_announced_reaches_the_others(objects: FaultyObjects) -> None:
    clock = VirtualClock()
    store, sweeping, third = (opened(objects, clock) for _ in range(3))
    await _parked(store)
    await sweeping.find(RunQuery())
    await third.find(RunQuery())
    kill_at(objects, "PUT changes/")
    with pytest.raises(Killed):
        await store.deliver([signal("run-1", "go")])
    objects.plan = lambda request: None
    await sweeping.load(["run-1"])  # so it is no news to this process
    assert await SampleNode(third, "node-c").claim() == []
    assert await sweeping._look(True)
    assert [run.head.run_id for run in await SampleNode(third, "node-c").claim()] == ["run-1"]


@pytest.mark.contract("OWN-4")
async def test_one_process_sweeps_and_another_when_it_is_gone(objects: FaultyObjects) -> None:
    clock = VirtualClock()
    first, second = opened(objects, clock), opened(objects, clock)
    for store in (first, second):
        await store.find(RunQuery())
    await first._look(True)
    before = second.bucket.requests.copy()
    await second._look(True)
    assert second.bucket.requests - before == Counter(LIST=2, GET=1), "it asks for the lock, and lists no heads"
    clock.advance(ms=300_000)
    before = second.bucket.requests.copy()
    await second._look(True)
    assert (second.bucket.requests - before)["LIST"] == 5


@pytest.mark.parametrize("damage", [None, b"no index", b""])
async def test_a_process_starts_from_the_index_and_the_heads_that_changed_since(
    objects: FaultyObjects, damage: bytes | None
) -> None:
    """An index that cannot be read, or is of another format, costs requests, and nothing else."""
    clock = VirtualClock()
    store = opened(objects, clock)
    await store.create([new_run(f"run-{number}", request_id=str(number)) for number in range(20)])
    await store._look(True)
    await store.create([new_run("later")])
    await store.create([new_run("deleted")])
    node = SampleNode(store)
    await node.renew()
    await node.step((await store.claim("node-a", 1))[0].head.run_id, complete())
    await store.purge(PurgePolicy(finished_run_ms=0))
    await store.bucket.delete(["heads/deleted"])
    if damage is not None:
        await store.bucket.put("index", damage)
    objects.log.clear()
    fresh = opened(objects, clock)
    claimed = await SampleNode(fresh, "node-b").claim(limit=1)
    read = {line.split()[1] for line in objects.log if line.startswith("GET heads/")}
    assert len(claimed) == 1
    assert "heads/later" in read
    assert (len(read) <= 4) == (damage is None)
    assert len(await fresh.find(RunQuery())) == 20


async def test_a_process_that_starts_lists_only_the_last_changes(objects: FaultyObjects) -> None:
    """However many there were in the quarter of an hour for which they are kept; and it misses none."""
    clock = VirtualClock()
    store = opened(objects, clock)
    await _parked(store)
    for number in range(1_100):
        obstore.put(objects.inner, f"changes/{clock.now() - 60_000_000 + number:020d}-000000001-x", b"{}")
    late = opened(objects, clock)
    before = late.bucket.requests.copy()
    assert len(await late.find(RunQuery())) == 1
    assert (late.bucket.requests - before)["LIST"] == 3, "the changes, the heads and the nodes, a page each"
    await store.create([new_run("run-2")])
    assert len(await late.find(RunQuery())) == 2


# --- what it costs


@pytest.mark.contract("WF-6", "MSG-4")
async def test_a_question_is_announced_and_who_looks_for_questions_in_vain_lists_none(
    objects: FaultyObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process finds it by its next look; one that has missed announcements reads them all again."""
    clock = VirtualClock()
    asking, asked = opened(objects, clock), opened(objects, clock)
    questions = BulletinQuery(kind="question")

    list_of, listed = asked.bucket.list, list[str]()

    async def noted(prefix: str, *options: Any) -> Any:
        listed.append(prefix)
        return await list_of(prefix, *options)

    monkeypatch.setattr(asked.bucket, "list", noted)

    async def looked() -> tuple[list[str], list[str]]:
        listed.clear()
        found = [each.bulletin_id for each in await asked.find_bulletins(questions)]
        return found, [prefix for prefix in listed if prefix.startswith("bulletins")]

    assert (await looked())[0] == []
    assert await looked() == ([], []), "it has looked before, and nothing was announced"
    await asking.put_bulletins("sample", {"s": Raw(b"1")}, 60_000)
    assert await looked() == ([], []), "nobody waits for samples"
    await asking.put_bulletins("question", {"q": Raw(b"1")}, 60_000)
    assert (await looked())[0] == ["q"]
    assert await looked() == (["q"], [])
    assert [each.bulletin_id for each in await asking.find_bulletins(questions)] == ["q"]
    clock.advance(ms=60_001)
    assert await looked() == ([], [])
    clock.advance(ms=3_600_000)
    await asking.put_bulletins("question", {"missed": Raw(b"1")}, 3_600_000)
    clock.advance(ms=1_800_000)
    await asking._look(True)
    assert await asking.bucket.list("changes") == []
    assert (await looked())[0] == ["missed"]


@pytest.mark.contract("MSG-4")
async def test_a_node_that_asks_for_sinks_and_schedules_again_and_again_lists_nothing(objects: FaultyObjects) -> None:
    """Each node does, every five seconds: sinks there are none, and schedules are one object."""
    store = opened(objects)
    await store.find(ScheduleQuery(app="shop"))
    before = len(objects.log)
    assert await store.find(SinkQuery()) == []
    assert await store.find(AlertQuery()) == []
    assert objects.log[before:] == []
    found = await store.find(ScheduleQuery(app="shop"))
    assert objects.log[before:] == ["GET schedules.json None"]
    assert found.as_of == await store.now()


@pytest.mark.contract("STO-1", "MSG-4")
@pytest.mark.parametrize("runs", [0, PARKED])
async def test_an_idle_process_sends_as_many_requests_in_an_hour_as_it_says(
    monkeypatch: pytest.MonkeyPatch, runs: int
) -> None:
    """Counted over an hour of looks, probes of the time, and sweeps: parked runs cost no request of their own."""
    elapsed_us, is_over = 0, asyncio.Event()

    async def sleep(seconds: float) -> None:
        nonlocal elapsed_us
        elapsed_us += round(seconds * 1e6)
        if elapsed_us > 3_600_000_000:
            is_over.set()
            await asyncio.Event().wait()
        await asyncio.sleep(0)

    monkeypatch.setattr("holdfast.store.s3.polling.sleep", sleep)
    monkeypatch.setattr("holdfast.store.s3.polling.FIRST_LOOK_S", 5.0)
    inner = ObjectsInMemory()
    maker = opened(inner)
    await _parked(maker)
    found = await maker.bucket.get("heads/run-1")
    assert found is not None
    for number in range(runs):
        obstore.put(inner, f"heads/p{number:06}", found.data.replace(b"run-1", b"p%06d" % number))

    class Passing(Bucket):
        async def get_newer(self, key: str, etag: str | None) -> Stored | Unchanged | None:
            found = await super().get_newer(key, etag)
            return found._replace(modified_at=elapsed_us) if isinstance(found, Stored) else found

    store = S3Store(Passing(inner))
    store._time = ServerTime(store.bucket, lambda: elapsed_us)
    await store._look(True)
    before = store.bucket.requests.copy()
    listener = store.wakeups.listen()
    await is_over.wait()
    sent = store.bucket.requests - before
    said = store.idle_requests_per_hour()
    once = sent.total() - 2 * sent["again"]  # a busy machine sends some again
    assert abs(once - said) <= 4, f"{sent} with {runs} parked runs, and it says {said}"
    assert sent["GET"] < 200, "none of them is for a run"
    assert len(store._mirror.summaries) == runs + 1
    listener.close()
    await store.close()


@pytest.mark.contract("STO-1")
async def test_an_answer_that_is_lost_does_not_hold_up_a_batch_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long is waited follows from how long answers take; a server that is slow as a whole is waited for."""
    assert AnswerTime().bound_s(0, 0) == FIRST_REQUEST_S, "the first answer is waited for as TCP does"
    usual, slow = AnswerTime(), AnswerTime()
    for _ in range(100):
        usual.note(0.01)
        slow.note(2.0)
    assert usual.bound_s(0, 0) == LEAST_REQUEST_S
    assert usual.bound_s(0, 3_000_000) == LEAST_REQUEST_S + 3.0
    assert usual.bound_s(2, 0) == 4 * LEAST_REQUEST_S
    assert usual.bound_s(10, 0) == slow.bound_s(5, 0) == REQUEST_S
    assert 2.0 < slow.bound_s(0, 0) <= REQUEST_S
    bucket = Bucket(ObjectsInMemory())
    bucket._answer_time = usual
    monkeypatch.setattr("holdfast.store.s3.bucket.LEAST_REQUEST_S", 0.02)
    put, sent = obstore.put_async, 0

    async def never_answered(store: Any, path: str, data: bytes, **options: Any) -> Any:
        nonlocal sent
        sent += 1
        answer = await put(store, path, data, **options)
        if sent == 1:
            await asyncio.Event().wait()
        return answer

    monkeypatch.setattr(obstore, "put_async", never_answered)
    written = await asyncio.wait_for(bucket.create("key", b"data mark", b"mark"), 5.0)
    assert written is not None
    assert sent == 2


@pytest.mark.contract("MSG-4")
async def test_a_process_has_a_bounded_number_of_requests_open_and_several_turns_at_once(
    objects: FaultyObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_module, "OPEN_REQUESTS", 5)
    store = opened(objects)
    node = SampleNode(store)
    await store.create([new_run(f"run-{number}", request_id=str(number)) for number in range(20)])
    turns = [await node.turn(run, marker("one")) for run in await node.claim()]
    open_now, most_open, passes = 0, 0, objects._pass

    async def counted(kind: str, path: str, send: Any) -> Any:
        nonlocal open_now, most_open
        open_now += 1
        most_open = max(most_open, open_now)
        try:
            await asyncio.sleep(0)
            return await passes(kind, path, send)
        finally:
            open_now -= 1

    monkeypatch.setattr(objects, "_pass", counted)
    await store.commit(turns)
    assert len(turns) == 20
    assert most_open == 5


@pytest.mark.contract("OWN-1")
async def test_a_lease_begins_when_all_runs_are_known_however_long_that_takes(objects: FaultyObjects) -> None:
    clock = VirtualClock()
    await opened(objects, clock).create([new_run("run-1")])

    def plan(request: str) -> str | None:
        if request.startswith("GET heads/"):
            clock.advance(ms=60_000)
        return None

    objects.plan = plan
    store = opened(objects, clock)
    assert await store.renew("node-a", 10_000) == await store.now() + 10_000_000
    assert [run.head.run_id for run in await store.claim("node-a", 10)] == ["run-1"]


async def test_a_listing_that_fails_goes_on_where_it_had_come_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 2,500 objects, of which each page fails once: three pages more, and not all of them again and again."""
    inner = ObjectsInMemory()
    for number in range(2_500):
        obstore.put(inner, f"heads/{number:06}", b"")
    listing, offsets = obstore.list, []

    async def failing(pages: Any, is_bad: bool) -> Any:
        async for page in pages:
            yield page
            if is_bad:
                raise GenericError("503 Slow Down")

    def listed(store: Any, prefix: str, **options: Any) -> Any:
        offsets.append(options["offset"])
        return failing(listing(store, prefix, **options), len(offsets) < 3)

    monkeypatch.setattr(obstore, "list", listed)
    bucket = Bucket(inner)
    assert [each.key for each in await bucket.list("heads")] == [f"heads/{number:06}" for number in range(2_500)]
    assert offsets == [None, "heads/000999", "heads/001999"]


@pytest.mark.contract("STO-1", "OWN-3")
async def test_many_heads_are_read_however_long_they_take_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patience is for one request, not for all that wait for each other: a process starts without an index too."""
    inner = ObjectsInMemory()
    maker = opened(inner)
    await _parked(maker)
    found = await maker.bucket.get("heads/run-1")
    assert found is not None
    for number in range(2_500):
        obstore.put(inner, f"heads/p{number:06}", found.data.replace(b"run-1", b"p%06d" % number))
    get, listing = obstore.get_async, obstore.list
    busy = slowdown()

    async def slow(*given: Any, **options: Any) -> Any:
        await asyncio.sleep(0.02 * busy)
        return await get(*given, **options)

    async def slow_pages(*given: Any, **options: Any) -> Any:
        async for page in listing(*given, **options):
            await asyncio.sleep(0.3 * busy)
            yield page

    monkeypatch.setattr(obstore, "get_async", slow)
    monkeypatch.setattr(obstore, "list", slow_pages)
    late = opened(inner, patience_s=0.7 * busy)
    assert len(await late.bucket.list("heads")) == 2_501
    assert len(await late.find(RunQuery(status=RUNNING, limit=10_000))) == 1_000
    assert len(late._mirror.summaries) == 2_501
    assert late.bucket.requests["again"] < 25  # a busy machine delays some; with shared patience it would be most


@pytest.mark.contract("STO-2", "STO-1")
async def test_a_listing_that_lags_makes_changes_late_and_loses_none(
    objects: FaultyObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever order the names appear in: each is shown some seconds after it was written, up to six."""
    clock = VirtualClock()
    shown_at: dict[str, int] = {}
    rng = random.Random(7)
    put, listing = obstore.put_async, obstore.list

    async def noted(store: Any, path: str, data: bytes, **options: Any) -> Any:
        shown_at.setdefault(path, clock.now() + rng.randrange(6_000_000))
        return await put(store, path, data, **options)

    async def lagging(*given: Any, **options: Any) -> Any:
        async for page in listing(*given, **options):
            yield [each for each in page if shown_at[each["path"]] <= clock.now()]

    monkeypatch.setattr(obstore, "put_async", noted)
    monkeypatch.setattr(obstore, "list", lagging)
    store, other = opened(objects, clock), opened(objects, clock)
    await other.find(RunQuery())
    for number in range(30):
        await store.create([new_run(f"run-{number}")])
        clock.advance(ms=rng.randrange(1_500))
        await other.find(RunQuery())
    clock.advance(ms=6_000)
    assert len(await other.find(RunQuery())) == 30
    await SampleNode(other).renew()
    assert len(await SampleNode(other).claim(30)) == 30
