"""`store copy`: everything arrives, is the same, and goes on."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace
from obstore.store import MemoryStore as ObjectsInMemory

import holdfast as hf
from holdfast.core.admission import AdmissionRequest, RunLimit
from holdfast.core.audit import AuditEntry
from holdfast.core.bus import Sink
from holdfast.core.messages import ActivityOutcome, activity_completed
from holdfast.core.plans import RegisteredPlan
from holdfast.core.schedules import Schedule, ScheduleSpec
from holdfast.core.state import COMPLETED, retry_token
from holdfast.core.streams import Appended, StreamAppend, StreamPage, StreamRead
from holdfast.errors import CheckpointOwnershipCapabilityError, Conflict, InvalidInput
from holdfast.store.copy import copy_store
from holdfast.store.memory import MemoryStore
from holdfast.store.open import open_store
from holdfast.store.port import (
    Accepted,
    ArchivedRun,
    ArchivedRunQuery,
    AuditQuery,
    Duplicate,
    Heartbeat,
    PurgePolicy,
    Refused,
    RunQuery,
    ScheduleQuery,
    Store,
)
from holdfast.store.postgres import PostgresStore
from holdfast.store.s3 import S3Store
from holdfast.store.s3.bucket import Bucket
from holdfast.store.sqlite import SqliteStore
from holdfast.testing import VirtualClock
from holdfast.testing.samples import (
    SampleNode,
    access_token,
    activity,
    complete,
    dead_letter,
    job,
    marker,
    new_run,
    read_picture,
    signal,
    task,
    timer,
    wait,
)
from tests.engine.harness import wait_for_event
from tests.s3_server import S3Server

KINDS = ("sqlite", "postgres", "s3")
SHA = "ab" * 32

T = TypeVar("T")

Make = Callable[[str], Awaitable[Store]]

pytestmark = pytest.mark.process  # PostgreSQL is among the stores


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
async def make(request: pytest.FixtureRequest, tmp_path: Path, clock: VirtualClock) -> Any:
    """Return a function that makes an empty store of a kind."""
    made: list[Store] = []
    databases: list[Any] = []

    async def make_store(kind: str) -> Store:
        store: Any
        if kind == "sqlite":
            store = await SqliteStore.open(tmp_path / f"{len(made)}.db", clock=clock)
        elif kind == "postgres":
            database = request.getfixturevalue("databases").store()
            databases.append(database)
            store = await PostgresStore.open(database.__enter__(), clock=clock)
        else:
            store = S3Store(Bucket(ObjectsInMemory()), clock)
        await store.migrate()
        made.append(store)
        return store  # type: ignore[no-any-return]

    yield make_store
    for store in made:
        await store.close()
    for database in databases:
        database.__exit__(None, None, None)


WRITER: dict[str, Any] = {
    "run_id": "talks",
    "name": "tokens",
    "step_id": "ask:1",
    "attempt": 1,
    "node": "node-a",
    "epoch": 1,
}


async def stream(store: Store, given: StreamAppend) -> None:
    """Append to a stream."""
    [answer] = await store.append_streams([given])
    assert isinstance(answer, Appended), answer


async def read_streams(store: Store) -> list[StreamPage | None]:
    """Read both streams, page by page."""
    pages = [await store.read_streams([StreamRead(run_id="talks", name="other")])]
    after, last = 0, 1
    while after < last:
        pages.append(await store.read_streams([StreamRead(run_id="talks", name="tokens", after=after)]))
        assert pages[-1][0] is not None
        after, last = after + sum(each.count for each in pages[-1][0].segments), pages[-1][0].head.last_seq
    return [each for page in pages for each in page]


async def fill(store: Store, clock: VirtualClock) -> None:
    """Put one of everything into a store, with times that differ."""
    node = SampleNode(store)
    await node.start("waits", wait("go"), wait("later", until=await store.now() + 60_000_000), tags=("a", "b"))
    clock.advance(ms=1)
    await store.deliver([signal("waits", "go", 1, signal_id="click"), signal("waits", "other", {"ü": 2})])
    clock.advance(ms=1)
    await node.step("waits", marker("after"))
    await store.deliver([signal("waits", "go", 3, signal_id="second")])
    attributes: Any = {"city": "Ruse", "amount": 7, "vip": True, "kinds": ("x", "y")}
    await node.start(
        "asks", task("approve", roles=("clerk",)), timer(await store.now() + 5_000_000), attributes=attributes
    )
    clock.advance(ms=1)
    run = await node.start("works", activity("charge", idempotency_key="k"), reference_key="order-7")
    dead = dead_letter("works", "letter-1")
    await store.commit([replace(await node.turn(run, marker("dead")), dead=(dead,))])
    turn = await node.turn(await node.load("works"), marker("queued"))
    await store.commit([replace(turn, jobs=(job("works", "mail"),))])
    [taken] = await store.acquire_jobs("node-b", ["mail"], ["charge"], 1, 30_000)
    beat = Heartbeat(run_id="works", step_id="mail", queue="mail", engine_attempt_id=1, details=hf_raw({"done": 3}))
    assert await store.heartbeat("node-b", [beat], 30_000) == [True], taken
    for number in range(150):  # more than a head holds
        await node.step("long" if number else (await node.start("long")).head.run_id, marker(f"m{number}"))
    await node.step("long", complete({"x": 1}))
    await store.create([new_run("idle", now=await store.now(), tenant="acme", plan=None)])
    await node.start("talks", wait("go"))
    for number in range(80):  # more than a head holds
        await stream(store, StreamAppend(**WRITER, position=number, count=1, body=hf_raw([[number, "é" * 1_000]])))
    await stream(store, StreamAppend(**WRITER | {"attempt": 2}, count=2, body=hf_raw(["again", None])))
    await stream(store, StreamAppend(**WRITER | {"name": "other", "step_id": "tell:1"}, closes=True))
    await store.put_tokens([access_token(), access_token("fedcba9876543210", tenant="acme")])
    await store.put_plan("acme", SHA, b"steps: []")
    plan = RegisteredPlan(tenant="acme", plan_id="p", plan_version="1", sha256=SHA, registered_by="ann")
    await store.register_plan(plan)
    schedule = Schedule(schedule_id="daily", app="shop", workflow="order", spec=ScheduleSpec(cron="0 9 * * *"))
    await store.commit_schedule(schedule, 0)
    await store.append_audit([AuditEntry(entry_id="e1", operation="token.create", actor="ann")])
    await store.put_key("completion", "00" * 32)
    await store.release(node.name)
    await store.release("node-b")


def hf_raw(value: object) -> Any:
    from holdfast.core import codec

    return codec.encode(value)


@pytest.mark.contract("STO-1", "EVT-1", "SIG-5", "INV")
@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("source", KINDS)
async def test_everything_arrives_as_it_was(make: Make, clock: VirtualClock, source: str, target: str) -> None:
    here, there = await make(source), await make(target)
    await fill(here, clock)
    report = await copy_store(here, there)
    assert (report.runs, report.runs_written, report.unfinished_runs) == (6, 6, 5)
    assert (report.signals, report.unconsumed_signals, report.dead_letters, report.jobs) == (3, 2, 1, 1)
    assert (report.open_waits, report.tasks, report.schedules, report.tokens, report.plans) == (2, 1, 1, 2, 1)
    before, after = await read_picture(here), await read_picture(there)
    for part in before:
        assert after[part] == before[part], part
    assert await there.find(AuditQuery()) == await here.find(AuditQuery())
    streams = await read_streams(there)
    assert streams == await read_streams(here)
    assert streams[-1] is not None
    assert streams[-1].head.last_seq == 82
    assert await there.get_key("completion") == "00" * 32
    assert await there.get_plan("acme", SHA) == b"steps: []"
    [schedule] = await there.find(ScheduleQuery())
    assert schedule.spec.cron == "0 9 * * *"
    assert (await copy_store(here, there)).runs_written == 0
    [again] = await there.deliver([signal("waits", "go", 1, signal_id="click")])
    assert isinstance(again, Duplicate), "the id of a signal stays used"
    claimed = await SampleNode(there, "node-c").claim()
    assert {run.head.run_id for run in claimed} >= {"waits", "works", "idle"}
    [owned] = [run for run in claimed if run.head.run_id == "talks"]
    resumes = WRITER | {"attempt": 3, "node": "node-c", "epoch": owned.head.lease_epoch, "resumes": True}
    [resumed] = await there.append_streams([StreamAppend(**resumes)])
    assert isinstance(resumed, Appended)
    assert resumed.position == 2, "who wrote what is known"
    assert (await SampleNode(there, "node-c").step("waits", complete())).head.finished_at is not None


@pytest.mark.contract("QUE-6")
@pytest.mark.parametrize(("source", "target"), [("sqlite", "postgres"), ("postgres", "s3"), ("s3", "sqlite")])
async def test_a_debounced_run_takes_inputs_and_begins_with_the_last_in_the_copy(
    make: Make, clock: VirtualClock, source: str, target: str
) -> None:
    here, there = await make(source), await make(target)
    app = hf.App("search")
    key = hf.Debounce("doc-7", quiet=30, at_most=300)

    @app.workflow
    async def index(text: str) -> str:
        return text

    async with asyncio.timeout(60):
        async with app.connect(here):
            first = await app.start(index, "a", debounce=key)
            await app.start(index, "b", debounce=key, request_id="r-2")
        clock.advance(ms=10_000)
        assert (await copy_store(here, there)).unconsumed_signals == 1
        async with app.node(there):
            for text, request in (("b", "r-2"), ("c", "r-3")):
                again = await app.start(index, text, debounce=key, request_id=request)
                assert (again.run_id, again.is_reused) == (first.run_id, True)
            run = app.run(first.run_id)
            await wait_for_event(run, "InputReplaced", 2)
            clock.advance(ms=30_001)
            there.wakeups.notify()
            assert await run.result() == "c"


@pytest.mark.contract("OWN-1", "OWN-3")
async def test_a_run_that_had_an_owner_is_ready_in_the_copy_and_its_owner_is_fenced(
    make: Make, clock: VirtualClock
) -> None:
    here, there = await make("sqlite"), await make("s3")
    node = SampleNode(here)
    run = await node.start("run-1", wait("go"))
    with pytest.raises(Conflict, match="nodes work on the source of the copy: node-a"):
        await copy_store(here, there)
    clock.advance(ms=31_000)
    await copy_store(here, there)
    [copied] = await there.load(["run-1"])
    assert copied is not None
    assert (copied.head.lease_owner, copied.head.lease_epoch) == (None, run.head.lease_epoch + 1)
    assert [each.head.run_id for each in await SampleNode(there).claim()] == ["run-1"]


@pytest.mark.contract("FMT-2", "ACT-1")
@pytest.mark.parametrize(("source", "target"), [("sqlite", "s3"), ("s3", "sqlite"), ("s3", "s3")])
async def test_archived_runs_and_jobs_under_way_are_what_they_were(
    make: Make, clock: VirtualClock, source: str, target: str
) -> None:
    """Where deleted runs are archived is known in the copy; and the outcome of a job reaches its run there, once."""
    here, there = await make(source), await make(target)
    node = SampleNode(here)
    old = await node.start("old")
    await node.step("old", complete())
    head = old.head
    archived = ArchivedRun(
        run_id="old",
        tenant=head.tenant,
        project=head.project,
        environment=head.environment,
        plan_id=head.plan_id,
        plan_version=head.plan_version,
        status=COMPLETED,
        version=head.version + 1,
        created_at=head.created_at,
        finished_at=await here.now(),
        object_key="runs/1",
        offset=0,
        size_bytes=9,
    )
    policy = PurgePolicy(finished_run_ms=0, run_ids=("old",), archived=(archived,))
    assert (await here.purge(policy)).runs == 1
    run = await node.start("works", wait("go"))
    await here.commit([replace(await node.turn(run, marker("queued")), jobs=(job("works", "mail"),))])
    [taken] = await here.acquire_jobs("node-b", ["mail"], ["charge"], 1, 30_000)
    for each in (node.name, "node-b"):
        await here.release(each)
    await copy_store(here, there)
    assert await there.find(ArchivedRunQuery()) == await here.find(ArchivedRunQuery()) != []
    outcome = activity_completed(
        "works",
        "mail",
        retry_token("mail", 1),
        ActivityOutcome(logical_attempt_id=1, engine_attempt_id=1),
        0,
        taken.scheduled_at,
    )
    answers = [type(await _first(there.deliver([message]))) for message in (replace(outcome, opened_at=7), outcome)]
    assert answers == [Refused, Accepted]
    assert (await there.purge(PurgePolicy(archived_run_ms=0))).archived_runs == 1


async def _first(answers: Awaitable[list[T]]) -> T:
    return (await answers)[0]


async def test_what_cannot_be_copied_whole_is_refused(make: Make) -> None:
    here, there = await make("sqlite"), await make("s3")
    await here.put_sink(Sink(name="hook", kind="webhook", address="https://example.org/hook", secret="HOOK"))
    with pytest.raises(CheckpointOwnershipCapabilityError, match="outbox"):
        await copy_store(here, there)
    await here.remove_sink("hook")
    limited = replace(new_run("run-1"), admission=AdmissionRequest(limit=RunLimit(at_once=1)))
    await here.create([limited])
    with pytest.raises(Conflict, match="run run-1 is queued by the limit"):
        await copy_store(here, there)
    assert await there.find(RunQuery()) == []
    with pytest.raises(InvalidInput, match="cannot be copied"):
        await copy_store(here, MemoryStore())


async def test_a_run_that_has_gone_on_in_the_copy_is_not_overwritten(make: Make, clock: VirtualClock) -> None:
    here, there = await make("sqlite"), await make("postgres")
    await here.create([new_run("run-1", now=await here.now())])
    await copy_store(here, there)
    node = SampleNode(there)
    await node.claim()
    await node.step("run-1", marker("one"))
    await there.release(node.name)
    with pytest.raises(Conflict, match="has gone on in the target"):
        await copy_store(here, there)


async def test_what_has_changed_since_an_interrupted_copy_is_copied_again(make: Make, clock: VirtualClock) -> None:
    here, there = await make("s3"), await make("sqlite")
    await here.create([new_run("run-1", now=await here.now()), new_run("run-2", now=await here.now(), request_id="2")])
    await copy_store(here, there)
    await here.deliver([signal("run-2", "go", 1, signal_id="late")])
    assert (await copy_store(here, there)).runs_written == 1
    [copied] = await there.load(["run-2"])
    assert copied is not None
    assert [each.signal_id for each in copied.signals] == ["late"]


# --- on the command line


def make_app(charged: asyncio.Semaphore) -> tuple[hf.App, Any]:
    app = hf.App("copied")

    @app.activity
    async def charge(order: str) -> str:
        charged.release()
        return f"charged {order}"

    @app.workflow
    async def order(name: str) -> list[Any]:
        return [await charge(name), await hf.wait_signal("approved", int), await charge("again")]

    return app, order


async def copy_command(source: str, target: str, **options: Any) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "holdfast", "store", "copy", source, target, "--json"]
    return await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE, **options)


@pytest.mark.contract("OWN-3", "SIG-3", "SIG-5", "INV")
async def test_live_runs_go_on_from_sqlite_to_postgres_to_a_bucket(
    tmp_path: Path, postgres_url: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    places = [f"sqlite:///{tmp_path / 'a.db'}", postgres_url, f"s3://{s3_server.make_bucket()}/shop"]
    charged = asyncio.Semaphore(0)
    app, order = make_app(charged)
    async with app.node(places[0]):
        await app.start(order, "one", run_id="one")
        await app.start(order, "two", run_id="two")
        await charged.acquire()
        await charged.acquire()
    async with app.connect(places[0]):
        receipt = await app.run("one").signal("approved", 7, signal_id="click")
    for source, target in itertools.pairwise(places):
        process = await copy_command(source, target)
        said, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        assert json.loads(said)["unfinished_runs"] == 2
    async with asyncio.timeout(60), app.node(places[-1]):
        assert await app.run("one").signal("approved", 7, signal_id="click") == receipt
        assert await app.run("one").result() == ["charged one", 7, "charged again"]
        await app.run("two").signal("approved", 8)
        assert await app.run("two").result() == ["charged two", 8, "charged again"]


async def test_a_copy_that_is_killed_goes_on_when_it_is_repeated(tmp_path: Path) -> None:
    here, there = (f"sqlite:///{tmp_path / name}" for name in ("a.db", "b.db"))
    store = await open_store(hf.Settings(store=here))
    for first in range(0, 600, 100):
        runs = [new_run(f"r{number}", request_id=str(number)) for number in range(first, first + 100)]
        await store.create(runs)
    process = await copy_command(here, there)
    other = await open_store(hf.Settings(store=there))
    while len(await other.find(RunQuery(limit=1_000))) < 50:
        pass
    process.kill()
    await process.communicate()
    copied = len(await other.find(RunQuery(limit=1_000)))
    process = await copy_command(here, there)
    said, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    report = json.loads(said)
    assert report["runs"] == 600
    assert report["runs_written"] == 600 - copied
    assert (await read_picture(other))["events"] == (await read_picture(store))["events"]
    await store.close()
    await other.close()
