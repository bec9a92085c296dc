"""What a bucket's server may do, from forgetting conditions to not answering, and what the store makes of it."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import obstore
import pytest
from msgspec.structs import replace
from obstore.store import LocalStore
from obstore.store import MemoryStore as ObjectsInMemory

import holdfast as hf
from holdfast.clock import SystemClock, SystemSecrets
from holdfast.core.admission import AdmissionRequest, RunLimit
from holdfast.core.bus import Sink
from holdfast.core.codec import format_instant
from holdfast.core.declarations import WorkflowDeclaration
from holdfast.core.keys import signal_storage_key, signal_suffix
from holdfast.errors import (
    CheckpointOwnershipCapabilityError,
    Conflict,
    InvalidInput,
    NotFound,
    StoreCorrupt,
    StoreTooNew,
    StoreUnavailable,
)
from holdfast.limits import Limits
from holdfast.settings import Settings
from holdfast.store.health import Bounds
from holdfast.store.open import open_store
from holdfast.store.port import (
    Accepted,
    CommitConflict,
    Committed,
    Created,
    DeadLetterQuery,
    MailboxQuery,
    PurgePolicy,
    Refused,
    RunQuery,
    Store,
)
from holdfast.store.s3 import S3Store
from holdfast.store.s3.bucket import Bucket, Stored
from holdfast.store.s3.documents import Document, LocksDocument
from holdfast.store.s3.head import TAIL_EVENTS
from holdfast.store.s3.server_time import ServerTime
from holdfast.testing import VirtualClock
from holdfast.testing.samples import SampleNode, complete, marker, new_run, read_history, read_picture, signal, wait
from holdfast.testing.store_suite.commit import CommitSuite
from holdfast.testing.store_suite.families import CHILD, child
from holdfast.testing.store_suite.host_locks import HostLockSuite
from tests.fault_proxy import FaultProxy, Weather
from tests.s3_server import Endpoint
from tests.store.faulty_objects import FaultyObjects, Killed, kill_at, opened
from tests.store.s3_tampering import lose_record


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.store.s3.bucket.FIRST_PAUSE_S", 0.0001)
    monkeypatch.setattr("holdfast.store.s3.bucket.MOST_PAUSE_S", 0.001)


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> FaultyObjects:
    return FaultyObjects(ObjectsInMemory(), monkeypatch)


# --- the self-test


@pytest.mark.contract("OWN-2", "STO-1", "STO-2")
@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("create", "it created an object over one that was there"),
        ("replace", "it replaced an object that had changed"),
        ("race", "of four replacements at the same time it accepted"),
    ],
)
async def test_a_server_that_ignores_a_condition_is_refused_with_what_it_did(
    monkeypatch: pytest.MonkeyPatch, mode: str, words: str
) -> None:
    put = obstore.put_async

    async def careless(store: Any, path: str, data: bytes, mode_: Any = None, **options: Any) -> Any:
        condition = options.get("mode")
        if (mode == "create" and condition == "create") or (mode == "replace" and isinstance(condition, dict)):
            options.pop("mode")
        if mode == "race" and data.startswith(b"rival"):
            options.pop("mode")
        return await put(store, path, data, **options)

    monkeypatch.setattr(obstore, "put_async", careless)
    with pytest.raises(CheckpointOwnershipCapabilityError, match=words) as refused:
        await Bucket(ObjectsInMemory()).check_conditions()
    assert refused.value.details["capability"] == "conditional_batch"
    assert refused.value.details["store"] == "S3Store"


@pytest.mark.contract("OWN-2")
async def test_a_backend_without_conditional_replacement_is_refused(tmp_path: Any) -> None:
    with pytest.raises(CheckpointOwnershipCapabilityError, match="conditional_batch"):
        await Bucket(LocalStore(tmp_path)).check_conditions()


@pytest.mark.contract("STO-1")
async def test_the_self_test_passes_and_leaves_nothing() -> None:
    bucket = Bucket(ObjectsInMemory())
    await bucket.check_conditions()
    assert await bucket.list("probe") == []


@pytest.mark.contract("STO-1", "OWN-2")
@pytest.mark.parametrize("seed", range(5))
async def test_the_self_test_passes_although_requests_fail(objects: FaultyObjects, seed: int) -> None:
    """A probe whose answer is lost is not taken for one that the server has refused."""
    rng = random.Random(seed)
    objects.plan = lambda request: rng.choice(["before", "after"]) if rng.random() < 0.4 else None
    await Bucket(objects, patience_s=60.0).check_conditions()
    assert [line for line in objects.log if not line.endswith(" None")], "this seed fails requests"


# --- unknown outcomes


@pytest.mark.contract("OWN-1", "OWN-3", "EVT-1")
@pytest.mark.parametrize("fault", ["before", "after"])
async def test_a_request_that_fails_once_is_repeated_and_happens_once(objects: FaultyObjects, fault: str) -> None:
    """Each request in turn fails: a run is created, a signal without an id delivered, and a turn committed, once."""
    number = 0
    while True:
        objects.inner = ObjectsInMemory()
        count = -1

        def plan(request: str, number: int = number) -> str | None:
            nonlocal count
            count += 1
            return fault if count == number else None

        objects.plan = plan
        store = opened(objects)
        node = SampleNode(store)
        await node.start("run-1", wait("go"))
        assert isinstance((await store.deliver([signal("run-1", "go")]))[0], Accepted)
        await node.step("run-1", complete())
        history = await read_history(store, "run-1")
        assert [event.run_seq for event in history] == list(range(1, len(history) + 1))
        assert history[-1].event_type == "RunCompleted"
        assert len(await store.find(MailboxQuery(run_id="run-1", consumed=True))) == 1
        assert len(await store.find(RunQuery())) == 1
        if count < number:
            return
        number += 1


@pytest.mark.contract("OWN-1", "SIG-5")
async def test_a_write_whose_answer_is_lost_and_that_others_follow_is_found_by_its_mark(objects: FaultyObjects) -> None:
    """The second try is refused, because the head has changed twice; the signal is not accepted again."""
    clock = VirtualClock()
    store, other = opened(objects, clock), opened(objects, clock)
    await store.create([new_run("run-1")])
    is_first = True

    def plan(request: str) -> str | None:
        nonlocal is_first
        if request == "PUT heads/run-1" and is_first:
            is_first = False
            return "after"
        return None

    objects.plan = plan
    await asyncio.gather(store.deliver([signal("run-1", "go")]), other.deliver([signal("run-1", "stop")]))
    names = [each.name for each in await store.find(MailboxQuery(run_id="run-1"))]
    assert sorted(names) == ["go", "stop"]


@pytest.mark.contract("TMR-2", "OWN-4", "INV")
async def test_what_one_reads_is_not_changed_by_a_late_answer_to_another(
    objects: FaultyObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the runs of a tick would be taken for created, and be lost, and a lock that is held for free."""
    document = Document(Bucket(objects), SystemSecrets(), "locks.json", LocksDocument())
    get, held = obstore.get_async, list[tuple[asyncio.Event, asyncio.Event]]()

    async def get_held(*args: Any, **options: Any) -> Any:
        is_served, may_arrive = asyncio.Event(), asyncio.Event()
        held.append((is_served, may_arrive))
        try:
            return await get(*args, **options)
        finally:
            is_served.set()
            await may_arrive.wait()

    async def begin_to_read() -> tuple[asyncio.Task[LocksDocument], asyncio.Event]:
        monkeypatch.setattr(obstore, "get_async", get_held)
        reading = asyncio.create_task(document.read())
        while not held:  # noqa: ASYNC110
            await asyncio.sleep(0)
        is_served, may_arrive = held.pop()
        await is_served.wait()
        monkeypatch.setattr(obstore, "get_async", get)
        return reading, may_arrive

    early, early_may_arrive = await begin_to_read()
    await document.change(lambda before, mark: (LocksDocument(released=("sweep",), mark=mark), None))
    late, late_may_arrive = await begin_to_read()
    early_may_arrive.set()
    assert (await early).released == ()
    late_may_arrive.set()
    assert (await late).released == ("sweep",)


@pytest.mark.contract("OWN-3")
async def test_a_server_that_stays_away_is_a_typed_error(objects: FaultyObjects) -> None:
    store = opened(objects, patience_s=0.05)
    objects.plan = lambda request: "before"
    with pytest.raises(StoreUnavailable):
        await store.load(["run-1"])


@pytest.mark.contract("OWN-1", "OWN-3", "INV")
@pytest.mark.parametrize("seed", range(5))
async def test_two_processes_and_a_server_that_fails_one_request_in_five(objects: FaultyObjects, seed: int) -> None:
    """No fork, no gap, nothing lost, nothing doubled."""
    rng = random.Random(seed)
    clock = VirtualClock()
    stores = [opened(objects, clock), opened(objects, clock)]
    objects.plan = lambda request: rng.choice(["before", "after"]) if rng.random() < 0.2 else None
    nodes = [SampleNode(store, name) for store, name in zip(stores, ("node-a", "node-b"), strict=True)]
    await asyncio.gather(*(store.create([new_run(f"run-{n}")]) for n, store in enumerate(stores * 3)))
    sent = 0
    for _ in range(6):
        items = [[signal(f"run-{rng.randrange(6)}", "go") for _ in range(3)] for _ in stores]
        answers = await asyncio.gather(*(store.deliver(mine) for store, mine in zip(stores, items, strict=True)))
        sent += sum(isinstance(answer, Accepted) for each in answers for answer in each)
        for node in nodes:
            for run in await node.claim():
                await node.store.commit([await node.turn(run, marker(f"m{run.head.version}"), release=True)])
    objects.plan = lambda request: None
    pictures = [await read_picture(store, ("node-a", "node-b")) for store in stores]
    assert pictures[0] == pictures[1]
    assert sum(head.inbox_seq for head in pictures[0]["runs"]) == sent
    for head in pictures[0]["runs"]:
        assert [event.run_seq for event in pictures[0]["events"][head.run_id]] == list(range(1, head.version + 1))


# --- crashes between two objects


@pytest.mark.contract("OWN-3", "QUE-1")
async def test_a_request_whose_run_was_not_created_is_completed_by_a_retry(objects: FaultyObjects) -> None:
    store, new = opened(objects), new_run("run-1")
    kill_at(objects, "PUT heads/run-1")
    with pytest.raises(Killed):
        await store.create([new])
    objects.plan = lambda request: None
    again = opened(objects)
    [answer] = await again.create([new_run("run-2", request_id=new.run_request_id)])
    assert answer.run_id == "run-1"  # type: ignore[union-attr]
    assert [head.run_id for head in await again.find(RunQuery())] == ["run-1"]


@pytest.mark.contract("OWN-3", "MSG-2", "WF-4")
@pytest.mark.parametrize("nth", range(1, 9))
async def test_what_a_turn_sends_arrives_once_although_its_process_is_killed(objects: FaultyObjects, nth: int) -> None:
    """Killed before the nth write after the commit; another process relays what is left, once its time has come."""
    clock = VirtualClock()
    store = opened(objects, clock)
    node = SampleNode(store)
    await node.start("run-1", child())
    await node.claim()
    count = 0

    def plan(request: str) -> str | None:
        nonlocal count
        count += request.startswith("PUT")
        if count == nth:
            raise Killed
        return None

    turn = await node.turn(await node.load(CHILD), complete("done"))
    objects.plan = plan
    is_killed = False
    try:
        await store.commit([turn])
    except Killed:
        is_killed = True
    objects.plan = lambda request: None
    other = opened(objects, clock)
    heir = SampleNode(other, "node-b")
    clock.advance(ms=60_000)
    await heir.renew()
    await heir.claim()
    if nth == 1:
        [answer] = await other.commit([turn])
        assert is_killed
        assert isinstance(answer, CommitConflict)  # it was never committed, and the run has another owner
        return
    [parent] = [run for run in await other.load(["run-1"]) if run is not None]
    assert [message.type for message in parent.messages].count("SubWorkflowCompleted") == 1
    assert other._mirror.summaries[CHILD].sending_since is None


# --- the format


@pytest.mark.contract("EVT-1", "EVT-4")
async def test_older_events_go_into_segments_and_are_read_with_the_others(objects: FaultyObjects) -> None:
    store = opened(objects)
    node = SampleNode(store)
    run = await node.start("run-1", wait("go"))
    first = None
    for number in range(TAIL_EVENTS + 20):
        turn = await node.turn(run, marker(f"m{number}"))
        first = first or turn
        assert isinstance((await store.commit([turn]))[0], Committed)
        run = await node.load("run-1")
    held = store._mirror.ordered()["run-1"]
    assert held.segments
    assert len(held.events) < TAIL_EVENTS
    other = opened(objects)
    for reader in (store, other):
        history = await read_history(reader, "run-1")
        assert [event.run_seq for event in history] == list(range(1, run.head.version + 1))
    assert first is not None
    [again] = await other.commit([first])  # a turn of long ago is recognised
    assert isinstance(again, Committed)
    later = await node.turn(run, marker("late"))
    old = replace(first.events[0], engine_run_ref=later.events[0].engine_run_ref)
    [conflict] = await other.commit([replace(later, events=(old,))])
    assert isinstance(conflict, CommitConflict)
    assert (conflict.reason, conflict.existing) == ("event exists", history[first.expected_version])


@pytest.mark.contract("FMT-1")
async def test_a_head_of_a_newer_format_or_a_damaged_one_is_a_typed_error(objects: FaultyObjects) -> None:
    store = opened(objects)
    await store.create([new_run("run-1")])
    found = await store.bucket.get("heads/run-1")
    assert found is not None
    newer = json.loads(found.data) | {"format": 99}
    for data, error in ((json.dumps(newer).encode(), StoreTooNew), (b"{", StoreCorrupt)):
        await store.bucket.put("heads/run-1", data)
        with pytest.raises(error):
            await opened(objects).load(["run-1"])


@pytest.mark.contract("FMT-1", "MSG-3", "OWN-3")
@pytest.mark.parametrize("harm", [b"{", b"newer"])
async def test_a_run_whose_head_cannot_be_read_stops_no_other(objects: FaultyObjects, harm: bytes) -> None:
    """In processes that knew it and in those that start; it is named, refused for itself, and goes on once mended."""
    clock = VirtualClock()
    store = opened(objects, clock)
    node = SampleNode(store)
    bad, fine = await node.start("bad", wait("go")), await node.start("fine", wait("go"))
    found = await store.bucket.get("heads/bad")
    assert found is not None
    turns = [await node.turn(run, marker("late")) for run in (bad, fine)]
    newer = json.dumps(json.loads(found.data) | {"format": 99}).encode()
    await store.bucket.put("heads/bad", newer if harm == b"newer" else harm)
    lost, committed = await store.commit(turns)
    assert isinstance(lost, CommitConflict)
    assert isinstance(committed, Committed)
    clock.advance(ms=60_000)
    for process in (store, opened(objects, clock)):
        refused, accepted = await process.deliver([signal("bad", "go"), signal("fine", "go")])
        assert isinstance(refused, Refused)
        assert isinstance(refused.error, Conflict)
        assert isinstance(accepted, Accepted)
        runs = await process.find(RunQuery())
        assert ([run.run_id for run in runs], runs.unreadable) == (["fine"], ("bad",))
        assert (await process.find(RunQuery(run_ids=("fine",)))).unreadable == ()
        assert await process._look(True) in (True, False)
        assert await process.purge(PurgePolicy(finished_run_ms=1)) is not None
        facts = await process.health(Bounds())
        [finding] = [each for each in facts.findings if each.subject == "heads"]
        assert (finding.level, finding.run_ids) == ("wrong", ("bad",))
        with pytest.raises(StoreTooNew if harm == b"newer" else StoreCorrupt):
            await process.load(["bad"])
        other = SampleNode(process, f"node-{process._writer}")
        await other.renew()
        assert {run.head.run_id for run in await other.claim()} <= {"fine"}
        before = len(objects.log)
        await other.claim()
        await process.next_due(other.name)
        assert not any("heads/bad" in request for request in objects.log[before:]), "it is read once"
        await process.release(other.name)
    await store.bucket.put("heads/bad", found.data)
    await store._look(True)
    other = SampleNode(store, "node-z")
    await other.renew()
    assert {run.head.run_id for run in await other.claim()} == {"bad", "fine"}
    assert (await store.find(RunQuery())).unreadable == ()


# --- the bus


@pytest.mark.contract("STO-2")
@pytest.mark.contract("BUS-1", open="a bucket has no outbox, and refuses sinks")
async def test_a_sink_is_refused_with_the_capability_that_is_missing(objects: FaultyObjects) -> None:
    store = opened(objects)
    assert store.capabilities.lacking == {"limits on activities", "outbox"}
    assert store.capabilities.scan_consistency == "eventual"
    sink = Sink(name="hook", kind="webhook", address="https://example.com/hook", secret="hook/key")
    with pytest.raises(CheckpointOwnershipCapabilityError, match="outbox"):
        await store.put_sink(sink)


@pytest.mark.contract("STO-2", "BUS-1")
async def test_a_node_whose_app_declares_a_sink_is_refused_at_start_up() -> None:
    app = hf.App("shop")
    app.sink("hook", "https://example.com/hook", secret="hook/key")
    with pytest.raises(CheckpointOwnershipCapabilityError, match="outbox") as refused:
        async with app.node(S3Store(Bucket(ObjectsInMemory()))):
            pass
    assert (refused.value.details["capability"], refused.value.details["store"]) == ("outbox", "S3Store")


# --- signals by any S3 client


def _object(run_id: str, name: str, at: int, uuid: str, payload: object) -> tuple[str, bytes]:
    content = {"id": uuid, "name": name, "payload": payload, "created_at": format_instant(at)}
    return signal_storage_key(run_id, name, signal_suffix(at, uuid)), json.dumps(content).encode()


@pytest.mark.contract("SIG-1", "SIG-3")
async def test_a_signal_that_is_put_into_the_bucket_is_accepted_once(objects: FaultyObjects) -> None:
    clock = VirtualClock()
    store, other = opened(objects, clock), opened(objects, clock)
    node = SampleNode(store)
    await node.start("run-1", wait("go"))
    await store.commit([await node.turn(await node.load("run-1"), release=True)])
    key, data = _object("run-1", "go", clock.now(), "a1b2c3d4", {"approved": True})
    await store.bucket.put(key, data)
    for each in (store, other, store):
        await each._look(False)
    [accepted] = await other.find(MailboxQuery(run_id="run-1"))
    assert (accepted.name, accepted.signal_id) == ("go", "a1b2c3d4")
    assert json.loads(bytes(accepted.payload)) == {"approved": True}
    [run] = await node.claim()
    assert [each.signal_id for each in run.signals] == ["a1b2c3d4"]
    assert [listed.key for listed in await store.bucket.list("workflow")] == [key]  # it stays, to be looked at


@pytest.mark.contract("SIG-1", "MSG-3")
async def test_a_signal_behind_the_cursor_is_reported_and_dead_lettered(
    objects: FaultyObjects, caplog: pytest.LogCaptureFixture
) -> None:
    clock = VirtualClock()
    store = opened(objects, clock)
    node = SampleNode(store)
    await node.start("run-1", wait("go"))
    early = clock.now()
    clock.advance(ms=5_000)
    await store.deliver([signal("run-1", "go")])
    await node.step("run-1", wait("again"))
    late = _object("run-1", "go", early, "late", 1)
    wrong = ("workflow/run-1/signals/go/yesterday_x.json", late[1])
    broken = (signal_storage_key("run-1", "go", signal_suffix(clock.now(), "broken")), b"{")
    sealed = _object("run-1", "go", clock.now(), "sealed", {"$holdfast": ["e", "x"]})
    large = _object("run-1", "go", clock.now(), "large", "x" * 100_000)
    for key, data in (late, wrong, broken, sealed, large):
        await store.bucket.put(key, data)
    for _ in range(2):
        await store._look(False)
    letters = await store.find(DeadLetterQuery())
    assert sorted(letter.reason for letter in letters) == ["refused", *4 * ["undecodable"]]
    assert any("behind the cursor" in letter.detail for letter in letters)
    assert "behind the cursor" in caplog.text
    assert await store.find(MailboxQuery(run_id="run-1")) == []
    again = opened(objects, clock)
    await again.find(RunQuery())
    before = again.bucket.requests.copy()
    await again._look(False)  # a process that starts reads none of them again
    assert again.bucket.requests - before == Counter(LIST=2)


async def test_a_signal_to_a_run_that_is_not_there_waits_for_it(objects: FaultyObjects) -> None:
    clock = VirtualClock()
    store = opened(objects, clock)
    key, data = _object("run-1", "go", clock.now(), "early", 1)
    await store.bucket.put(key, data)
    await store._look(False)
    before = store.bucket.requests.copy()
    await store._look(False)
    assert store.bucket.requests - before == Counter(LIST=2), "waiting costs nothing"
    await store.create([new_run("run-1")])
    await store._look(False)
    assert [each.signal_id for each in await store.find(MailboxQuery(run_id="run-1"))] == ["early"]


@pytest.mark.contract("SIG-1", "SIG-2", "SIG-5", "MSG-3")
async def test_whatever_is_put_into_the_bucket_as_a_signal_harms_nothing(
    objects: FaultyObjects, caplog: pytest.LogCaptureFixture
) -> None:
    """What can be accepted is, once; the rest is reported; and those that come after are consumed as ever."""
    clock = VirtualClock()
    store = opened(objects, clock)
    node = SampleNode(store)
    await node.start("run-1", wait("go"))
    await node.start("ü / %2F", wait("go"))
    await node.start("done")
    await node.step("done", complete())
    far = clock.now() + 200 * 365 * 86_400_000_000
    good = [
        _object("run-1", "go", far, "future", 1),
        _object("run-1", "go", clock.now() - 86_400_000_000, "past", 2),
        _object("run-1", "g/o ü", clock.now(), "odd-name", None),
        _object("ü / %2F", "go", clock.now(), "odd-run", [1]),
        _object("run-1", "go", clock.now(), "future", "earlier"),
    ]
    prefix = f"workflow/run-1/signals/go/{signal_suffix(clock.now(), 'x')}"
    bad = [
        (f"{prefix}1.json", b""),
        (f"{prefix}2.json", b"[" * 50_000),
        (f"{prefix}3.json", b'{"id": "x3", "name": "go", "payload": NaN}'),
        (f"{prefix}4.json", b'{"id": "x4", "name": "stop", "payload": 1}'),
        (f"{prefix}5.json", b'{"id": "x5", "name": "go", "payload": "\xff"}'),
        (f"{prefix}6.json", b'{"id": "x6", "payload": 1}'),
        (f"{prefix}7.json", b"x" * 10_000_000),
        ("workflow/run-1/signals/go/x.json", good[0][1]),
        (f"workflow/run-1/signals/%FF/{signal_suffix(clock.now(), 'x')}8.json", good[0][1]),
        _object("run-1", "holdfast.outcome", clock.now(), "x9", {}),
        _object("run-1", "x" * 300, clock.now(), "x10", {}),
        _object("done", "go", clock.now(), "x11", {}),
    ]
    left_alone = [
        ("workflow/run-1/signals/go", b"{}"),
        ("workflow/run-1/signals/go/deeper/x.json", b"{}"),
        (f"{prefix}12.txt", good[0][1]),
        ("workflow/nothing/signals/go/x.json", b"{}"),
        ("workflow/%FF/signals/go/x.json", b"{}"),
    ]
    for key, data in good + bad + left_alone:
        await store.bucket.put(key, data)
    for process in (store, opened(objects, clock), store):
        await process._look(False)
    mailbox = {each.signal_id: json.loads(bytes(each.payload)) for each in await store.find(MailboxQuery())}
    assert mailbox == {"future": "earlier", "past": 2, "odd-name": None, "odd-run": [1]}
    letters = await store.find(DeadLetterQuery())
    assert {letter.detail.split(": ")[0].removeprefix("signal ") for letter in letters} == {key for key, _ in bad}
    assert caplog.text.count("its key is not that of a signal") == 2 * 3
    clock.advance(ms=1)
    await store.deliver([signal("run-1", "go", "after", signal_id="after")])
    run = await node.load("run-1")
    assert [each.signal_id for each in run.signals if each.name == "go"][-1] == "after"


# --- the time


@pytest.mark.contract("SIG-2")
async def test_time_is_the_servers_never_ahead_and_never_goes_back() -> None:
    elapsed = 0
    server = 1_000_000_000_000_000

    class Server:
        """A bucket that says when something was written in whole seconds, as S3 does."""

        written = 0

        async def put(self, key: str, data: bytes) -> str:
            nonlocal elapsed
            elapsed += 20_000
            self.written = (server + elapsed) // 1_000_000 * 1_000_000
            return ""

        async def get(self, key: str) -> Stored:
            return Stored(b"", "", self.written)

    bucket: Any = Server()
    time = ServerTime(bucket, lambda: elapsed)
    last = 0
    for _ in range(30):
        now = await time.now()
        assert last <= now <= server + elapsed
        last = now
        elapsed += 31_337_000
    assert server + elapsed - await time.now() < 1_000_000
    server -= 3_600_000_000
    for _ in range(12):
        elapsed += 31_000_000
        now = await time.now()
        assert now >= last
        last = now


# --- a real server


class TestRealServer(CommitSuite, HostLockSuite):
    """What is committed, on the wire. The whole suite passes there too, and takes minutes (`make soak`)."""

    objects: Any

    @pytest.fixture(autouse=True)
    def _bucket(self, seaweed: Endpoint) -> None:
        self.objects = seaweed.store(seaweed.make_bucket(), prefix="my/prefix", retry_config={"max_retries": 0})

    async def make_store(self, clock: VirtualClock, limits: Limits) -> Store:
        return S3Store(Bucket(self.objects), clock, limits)

    async def make_peer(self, store: Store, clock: VirtualClock, limits: Limits) -> Store:
        return S3Store(Bucket(self.objects), clock, limits)

    async def lose_acceptance_record(self, store: Store, run_id: str, name: str, signal_id: str) -> None:
        assert isinstance(store, S3Store)
        await lose_record(store, run_id, name, signal_id)


@pytest.fixture(params=["s3_server", "seaweed"])
def server(request: pytest.FixtureRequest) -> Endpoint:
    """Return moto's server, and a real one."""
    found: Endpoint = request.getfixturevalue(request.param)
    return found


@pytest.mark.contract("OWN-2", "STO-1", "STO-2")
@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("if-match", "it replaced an object that had changed"),
        ("if-none-match", "it created an object over one that was there"),
    ],
)
async def test_a_real_server_that_ignores_a_condition_is_refused(
    seaweed: Endpoint, monkeypatch: pytest.MonkeyPatch, header: str, words: str
) -> None:
    proxy = FaultProxy(seaweed, Weather(drops=header))
    for name, value in proxy.environment().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CheckpointOwnershipCapabilityError, match=words):
        await open_store(Settings(store=f"s3://{proxy.make_bucket()}/shop"))
    assert proxy.kill()["dropped a condition"] >= 1


@pytest.mark.process
@pytest.mark.contract("STO-1", "SIG-1", "SIG-2")
async def test_a_store_is_opened_by_its_address_and_takes_the_time_of_its_server(
    server: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    address = f"s3://{server.make_bucket()}/shop"
    store = await open_store(Settings(store=address))
    now = await store.now()
    assert abs(now - SystemClock().now()) < 3_000_000
    await store.create([new_run("run-1")])
    await store.close()
    again = await open_store(Settings(store=address))
    assert [head.run_id for head in await again.find(RunQuery())] == ["run-1"]
    assert await again.now() >= now
    await again.close()


@pytest.mark.process
@pytest.mark.contract("API-2")
async def test_a_bucket_that_is_missing_or_refuses_is_a_typed_error(
    server: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreUnavailable, match="no such bucket"):
        await open_store(Settings(store="s3://there-is-none/shop"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StoreUnavailable, match="credentials"):
        await open_store(Settings(store=f"s3://{server.make_bucket()}/shop"))
    with pytest.raises(InvalidInput):
        await open_store(Settings(store="s3://"))


# --- names that are too long for a key

LONG = "汉" * 85  # the longest id that there is: 255 bytes, 765 as it is percent-encoded


def _refuses_long_parts(request: str) -> str | None:
    return "before" if any(len(part) > 255 for part in request.partition(" ")[2].split("/")) else None


@pytest.mark.contract("API-2", "STO-1")
async def test_a_run_whose_key_the_server_does_not_take_is_refused_before_anything_is_stored(
    objects: FaultyObjects,
) -> None:
    """As a start, a child, and of a schedule. To a verb that only looks there is no such run."""
    store = opened(objects)
    node = SampleNode(store)
    run = await node.start("run-1")
    objects.plan = _refuses_long_parts
    before = {each.key for each in await store.bucket.list("") if not each.key.startswith("probe/")}
    [answer] = await store.create([new_run(LONG, request_id="long")])
    assert isinstance(answer, Refused)
    assert isinstance(answer.error, InvalidInput)
    assert (answer.error.details["field"], answer.error.details["most"]) == ("run_id", 255)
    assert {each.key for each in await store.bucket.list("") if not each.key.startswith("probe/")} == before
    assert await store.load([LONG]) == [None]
    assert await store.read_events(LONG) == []
    [unknown] = await store.deliver([signal(LONG)])
    assert isinstance(unknown, Refused)
    assert isinstance(unknown.error, NotFound)
    turn = await node.turn(run, replace(child(), child_run_id=LONG))
    assert isinstance(await node.commit(turn), Committed)
    [message] = (await node.load("run-1")).messages
    assert message.type == "SubWorkflowCompleted"
    assert b"run_id" in bytes(message.payload)
    assert b"InvalidInput" in bytes(message.payload)
    with pytest.raises(InvalidInput):
        await SampleNode(store, LONG[:66]).renew()


@pytest.mark.contract("API-2")
async def test_other_names_that_are_too_long_for_a_key_are_refused(objects: FaultyObjects) -> None:
    """Of a workflow with a limit, a version of a definition, a tenant's plan, a key; names of signals are in no key."""
    store = opened(objects)
    await SampleNode(store).start("run-1", wait("go"))
    objects.plan = _refuses_long_parts
    asked = AdmissionRequest(limit=RunLimit(at_once=1))
    [queued] = await store.create([replace(new_run("run-2", plan_id=LONG), admission=asked)])
    assert isinstance(queued, Refused)
    assert isinstance(queued.error, InvalidInput)
    assert queued.error.details["field"] == "workflow"
    for refused in (
        store.publish_definitions([WorkflowDeclaration(plan_id="order", plan_version=LONG)]),
        store.put_plan(LONG, "0" * 64, b"{}"),
        store.put_key(LONG, "0" * 64),
    ):
        with pytest.raises(InvalidInput):
            await refused
    [accepted] = await store.deliver([signal("run-1", LONG)])
    assert isinstance(accepted, Accepted)


async def test_a_server_that_takes_long_names_is_asked_once(objects: FaultyObjects) -> None:
    store = opened(objects)
    for number in range(3):
        [answer] = await store.create([new_run(f"{LONG[:-1]}{number}", request_id=str(number))])
        assert isinstance(answer, Created)
    assert sum("PUT probe/" in line for line in objects.log) == 1
    assert len(await store.find(RunQuery())) == 3


async def test_a_prefix_counts_towards_the_length_of_a_key(objects: FaultyObjects) -> None:
    store = opened(objects)
    store.bucket._prefix_bytes = 1_024 - 200
    [fits, too_long] = await store.create([new_run("x" * 100), new_run("x" * 200, request_id="2")])
    assert isinstance(fits, Created)
    assert isinstance(too_long, Refused)
    assert too_long.error.details["most"] == 1_024


async def test_a_real_server_that_takes_no_long_names_is_a_typed_refusal(seaweed: Endpoint) -> None:
    store = S3Store(Bucket(seaweed.store(seaweed.make_bucket(), prefix="p", retry_config={"max_retries": 0})))
    [refused, made] = await store.create([new_run(LONG, request_id="1"), new_run("x" * 240, request_id="2")])
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, InvalidInput)
    assert isinstance(made, Created)


# --- requests are counted


@pytest.mark.contract("STO-1")
async def test_a_turn_takes_two_requests_and_a_signal_two(objects: FaultyObjects) -> None:
    store = opened(objects)
    node = SampleNode(store)
    run = await node.start("run-1", wait("go"))
    turn = await node.turn(run, marker("one"))
    before = store.bucket.requests.copy()
    await store.commit([turn])
    assert store.bucket.requests - before == Counter(PUT=2)
    before = store.bucket.requests.copy()
    await store.deliver([signal("run-1", "go")])
    assert store.bucket.requests - before == Counter(PUT=2)
    before = store.bucket.requests.copy()
    await store.find(RunQuery())
    assert store.bucket.requests - before == Counter(LIST=1)


@pytest.mark.contract("STO-1")
async def test_a_workflow_of_many_steps_takes_at_most_three_requests_for_each_turn() -> None:
    """Counted on a node at work: heads, announcements, and what claiming and leases cost besides."""
    app = hf.App("counted")

    @app.activity
    async def one() -> int:
        return 1

    @app.workflow
    async def many(steps: int) -> int:
        return sum([await one() for _ in range(steps)])

    store = S3Store(Bucket(ObjectsInMemory()))
    async with app.node(store):
        await (await app.start(many, 1, run_id="warm")).result()
        before = store.bucket.requests.copy()
        await (await app.start(many, 30, run_id="counted")).result()
        sent = store.bucket.requests - before
    turns = len({event.persisted_at for event in await read_history(S3Store(store.bucket), "counted")})
    assert turns >= 30
    assert sent.total() <= 3 * turns, (sent, turns)
