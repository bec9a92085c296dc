"""Retention as a node does it: rules, batches, the archive, stale runs, the lock, and what a crash leaves."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
import os
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import holdfast as hf
from holdfast.clock import SystemIds
from holdfast.core.audit import AuditEntry
from holdfast.core.events import Event
from holdfast.engine import history as engine_history
from holdfast.engine import retention
from holdfast.engine.observe.metrics import observed
from holdfast.engine.retention import Retention, RetentionDuty, RetentionRule
from holdfast.errors import (
    ArtifactCorrupt,
    ArtifactMissing,
    Conflict,
    HistoryGap,
    InvalidInput,
    LockLost,
    RunCancelled,
    StoreFull,
    StoreUnavailable,
)
from holdfast.settings import load_settings
from holdfast.store import decisions
from holdfast.store.archive import Archive
from holdfast.store.artifacts import Artifacts
from holdfast.store.memory import MemoryStore
from holdfast.store.object_artifacts import ObjectArtifacts
from holdfast.store.payloads import SealingStore
from holdfast.store.port import ArchivedRunQuery, AuditQuery, PurgePolicy, PurgeReport, RunQuery, Store
from holdfast.store.proxy import StoreProxy
from holdfast.store.sqlite import SqliteStore
from holdfast.testing import VirtualClock
from holdfast.testing.samples import SampleNode, complete, fail, marker, read_history, signal, task, wait
from tests.s3_server import S3Server

CYCLES = int(os.environ.get("TEST_RETENTION_CYCLES", "8"))
NOW = timedelta(0)
DAY_MS = 86_400_000


class Cancelled(list[str]):
    """The runs that were cancelled."""

    async def __call__(self, run_id: str, reason: str) -> None:
        assert reason
        self.append(run_id)


def duty(
    store: Store,
    policy: Retention,
    archive: Archive | None = None,
    cancelled: Cancelled | None = None,
    node: str = "node-a",
) -> RetentionDuty:
    return RetentionDuty(
        node, observed(store), policy, SystemIds(), archive, Cancelled() if cancelled is None else cancelled
    )


async def left(store: Store) -> list[str]:
    return [head.run_id for head in await store.find(RunQuery())]


async def until(is_there: Callable[[], Awaitable[Any]]) -> None:
    """Wait until nothing is there any more."""
    while await is_there():  # noqa: ASYNC110 - the store does not notify of what is deleted
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "SHORTEST_PAUSE_S", 0.0)
    monkeypatch.setattr(retention, "REST", 0.0)


# --- what goes


@pytest.mark.contract("FMT-2")
async def test_the_first_rule_that_matches_decides_how_long_a_run_is_kept(store: Store) -> None:
    node = SampleNode(store)
    await node.start("failed", fail())
    await node.start("acme", complete(), tenant="acme")
    await node.start("acme-failed", fail(), tenant="acme")
    await node.start("done", complete())
    await node.start("open", wait("go"))
    policy = Retention(
        finished=NOW,
        rules=(
            RetentionRule(tenant="acme", status="FAILED", finished=NOW),
            RetentionRule(tenant="acme", finished=None),
            RetentionRule(status="FAILED", finished=timedelta(days=1)),
        ),
    )
    planned = await duty(store, policy).preview(5.0)
    assert await left(store) == ["acme", "acme-failed", "done", "failed", "open"]
    report = await duty(store, policy).sweep()
    assert await left(store) == ["acme", "failed", "open"]
    assert (report.runs, planned.runs, planned.events) == (2, 2, report.events)
    assert report.by_workflow == planned.by_workflow
    assert not report.has_more
    [entry] = await store.find(AuditQuery(operation="retention.run"))
    assert (entry.actor, entry.detail) == ("retention", f"runs 2, events {report.events}")
    assert (await duty(store, policy).sweep()).runs == 0
    assert len(await store.find(AuditQuery(operation="retention.run"))) == 1


@pytest.mark.contract("FMT-2")
async def test_by_default_nothing_is_deleted(store: Store) -> None:
    node = SampleNode(store)
    await node.start("done", complete(), tenant="acme")
    report = await duty(store, Retention()).sweep()
    assert report == replace(await duty(store, Retention()).preview(5.0), at=report.at)
    assert await left(store) == ["done"]
    assert await store.find(AuditQuery()) == []


@pytest.mark.contract("FMT-2")
async def test_a_commit_deletes_bounded_bytes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small runs go together, few large ones; one that is larger than the bound goes alone, and all go."""
    monkeypatch.setattr(retention, "BATCH_BYTES", 20_000)
    node = SampleNode(store)
    sizes: dict[str, int] = {}
    for number, size in enumerate([10, 3_000, 3_000, 9_000, 50_000, 10, 10, 9_000, 9_000, 9_000, 3_000, 10]):
        run_id = f"run-{number:02}"
        await node.start(run_id, marker("large", "é" * (size // 2)))
        await node.step(run_id, complete())
        sizes[run_id] = size
    batches: list[list[str]] = []

    class Counting(StoreProxy):
        async def purge(self, policy: PurgePolicy, audit: Any = None) -> PurgeReport:
            before = set(await left(store))
            report = await self._store.purge(policy, audit)
            if policy.run_ids is not None:
                batches.append(sorted(before - set(await left(store))))
            return report

    report = await duty(Counting(store), Retention(finished=NOW)).sweep()
    assert (report.runs, await left(store)) == (12, [])
    assert sum(report.by_workflow.values()) == 12
    assert sorted(run_id for batch in batches for run_id in batch) == sorted(sizes)
    weights = [sum(sizes[run_id] for run_id in batch) for batch in batches]
    assert all(weight <= 20_000 or len(batch) == 1 for weight, batch in zip(weights, batches, strict=True)), batches
    assert max(map(len, batches)) >= 4, "small ones go together"


@pytest.mark.contract("FMT-2")
async def test_many_runs_go_in_bounded_batches(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """By count, and by events; a large run goes alone. What was deleted in between is no problem."""
    monkeypatch.setattr(retention, "BATCH_RUNS", 4)
    monkeypatch.setattr(retention, "BATCH_EVENTS", 20)
    monkeypatch.setattr(retention, "PAGE_RUNS", 7)
    monkeypatch.setattr(retention, "LOOK_RUNS", 5)
    node = SampleNode(store)
    for number in range(30):
        await node.start(f"run-{number:02}", *(task(f"t{each}") for each in range(25 if number == 7 else 1)))
        await node.step(f"run-{number:02}", complete())
    batches: list[int] = []

    class Counting(StoreProxy):
        async def purge(self, policy: PurgePolicy, audit: Any = None) -> PurgeReport:
            report = await self._store.purge(policy, audit)
            if policy.run_ids is not None:
                batches.append(report.events)
            return report

    await store.purge(PurgePolicy(run_ids=("run-03",), finished_run_ms=0))
    report = await duty(Counting(store), Retention(finished=NOW)).sweep()
    assert (report.runs, await left(store)) == (29, [])
    assert len(batches) >= 29 / 4
    assert [each for each in batches if each > 20] == [max(batches)]


@pytest.mark.contract("FMT-2")
async def test_a_pass_that_is_out_of_time_says_that_there_is_more(store: Store) -> None:
    node = SampleNode(store)
    for number in range(60):
        await node.start(f"run-{number:02}", complete())
    worker = duty(store, Retention(finished=NOW))
    report = await worker.sweep(until_s=0.0)
    assert (report.runs, report.has_more) == (retention.BATCH_RUNS, True)
    assert (await worker.preview(0.0)).runs == 35
    assert (await worker.sweep()).runs == 35


@pytest.mark.contract("FMT-2", "OWN-4")
async def test_a_pass_ends_before_the_next_commit_when_the_lock_is_lost(store: Store) -> None:
    node = SampleNode(store)
    for number in range(60):
        await node.start(f"run-{number:02}", complete())
    checks = iter([True, False])

    def check() -> None:
        if not next(checks):
            raise LockLost("gone")

    with pytest.raises(LockLost):
        await duty(store, Retention(finished=NOW)).sweep(check)
    assert len(await left(store)) == 60 - retention.BATCH_RUNS
    [entry] = await store.find(AuditQuery(operation="retention.run"))
    assert entry.detail.startswith("runs 25,")


@pytest.mark.contract("FMT-2", "OWN-4")
async def test_only_one_pass_is_under_way(store: Store) -> None:
    """In a process and between processes; after a crash the next one waits for the lease."""
    worker = duty(store, Retention(finished=NOW))
    lock = await store.acquire_lock("retention-pass", "node-b", 60_000)
    assert lock is not None
    with pytest.raises(Conflict):
        await worker.sweep()
    await store.release_lock("retention-pass", "node-b", lock.epoch)
    seen: list[type] = []

    async def again() -> None:
        with pytest.raises(Conflict):
            await worker.sweep()
        seen.append(Conflict)

    tasks: list[asyncio.Task[None]] = []
    await SampleNode(store).start("run-1", complete())
    await worker.sweep(lambda: tasks.append(asyncio.create_task(again())))
    await asyncio.gather(*tasks)
    assert seen
    assert await store.find_locks() == []


@pytest.mark.contract("FMT-2", "PRJ-4")
async def test_tasks_and_snapshots_go_before_their_runs_do(store: Store) -> None:
    node = SampleNode(store)
    for run_id in ("a", "b"):
        await node.start(run_id, task("approve"))
        await node.step(run_id, complete())
    await node.start("open", task("approve"))
    worker = duty(store, Retention(tasks=NOW, snapshots=NOW))
    report = await worker.sweep()
    assert (report.runs, report.tasks, report.runtime_states) == (0, 2, 2)
    assert (await worker.sweep()).tasks == 0
    await node.step("open", complete())
    assert (await worker.sweep()).tasks == 1
    assert len(await read_history(store, "a")) > 0


@pytest.mark.contract("FMT-2", "SIG-6")
async def test_other_kinds_have_their_own_windows() -> None:
    clock = VirtualClock()
    store = MemoryStore(clock)
    node = SampleNode(store)
    await node.start("run-1", wait("go"))
    await store.deliver([signal("run-1", "other", signal_id="s")])
    await store.append_audit([AuditEntry(entry_id="old", operation="x")])
    clock.advance(ms=8 * DAY_MS)
    policy = Retention(audit=7, dead_letters=timedelta(days=7), archive_index=7, finished=30)
    await store.append_audit([AuditEntry(entry_id="new", operation="x")])
    report = await duty(store, policy).sweep()
    assert (report.acceptance_records, report.audit_entries, report.runs) == (1, 1, 0)
    assert await left(store) == ["run-1"]


# --- what is stale


@pytest.mark.contract("FMT-2")
async def test_stale_runs_and_tasks_are_alerts_and_cancelled_only_if_asked() -> None:
    clock = VirtualClock()
    store = MemoryStore(clock)
    node = SampleNode(store)
    await node.start("waits", wait("go"))
    await node.start("asks", task("approve"))
    clock.advance(ms=DAY_MS)
    await node.start("fresh", task("approve"))
    cancelled = Cancelled()
    policy = Retention(stale_runs=1, stale_tasks=1)
    worker = duty(store, policy, cancelled=cancelled)
    preview, report = await worker.preview(5.0), None
    assert (preview.stale_runs, preview.stale_tasks, list(worker.alerts)) == (2, 1, [])
    report = await worker.sweep()
    assert (report.stale_runs, report.stale_tasks, report.cancelled, cancelled) == (2, 1, 0, [])
    assert [alert.code for _, alert in worker.alerts] == ["STALE_RUNS", "STALE_TASKS"]
    assert worker.alerts[0][1].detail == "2 runs that have not changed for 1 days, such as asks, waits"
    asked = Retention(stale_tasks=1, cancel_stale_tasks=True)
    assert (await duty(store, asked, cancelled=cancelled).sweep()).cancelled == 1
    assert cancelled == ["asks"]
    both = Retention(stale_runs=1, stale_tasks=1, cancel_stale_tasks=True, cancel_stale_runs=True)
    await duty(store, both, cancelled=cancelled).sweep()
    assert cancelled == ["asks", "asks", "waits"]
    assert await left(store) == ["asks", "fresh", "waits"]


@pytest.mark.contract("FMT-2", "TMR-2")
async def test_a_run_that_starts_later_is_not_stale_before(store: Store) -> None:
    app = hf.App("shop", retention=Retention(stale_runs=0, cancel_stale_runs=True, every=timedelta(milliseconds=50)))

    @app.workflow
    async def waiting() -> None:
        await hf.wait_signal("go")

    async with app.node(store):
        later = await app.start(waiting, after=timedelta(days=60))
        with pytest.raises(RunCancelled):
            await (await app.start(waiting)).result()
        assert (await later.snapshot()).status == "PENDING"
        await later.cancel()


# --- the archive


@pytest.mark.contract("FMT-2")
async def test_histories_are_archived_before_they_are_deleted(store: Store, tmp_path: Path) -> None:
    """Many runs of a tenant in one object, each read without the others, and all of it by any tool."""
    node = SampleNode(store)
    for number in range(3):
        await node.start(f"run-{number}", task("approve"), tags=("blue",))
        await node.step(f"run-{number}", complete())
    await node.start("acme-1", complete(), tenant="acme")
    histories = {run_id: await read_history(store, run_id) for run_id in await left(store)}
    archive = Archive(tmp_path, store)
    report = await duty(store, Retention(finished=NOW), archive).sweep()
    assert (report.runs, report.archived, await left(store)) == (4, 4, [])
    found = await store.find(ArchivedRunQuery())
    assert sorted(run.run_id for run in found) == sorted(histories)
    assert len({run.object_key for run in found}) == 2
    for run in found:
        archived = await archive.read(run)
        assert archived.events == histories[run.run_id]
        assert archived.head.tags == (("blue",) if run.tenant == "default" else ())
    [key] = {run.object_key for run in found if run.tenant == "default"}
    lines = [json.loads(line) for line in gzip.decompress((tmp_path / key).read_bytes()).splitlines()]
    assert [line["run"]["run_id"] for line in lines if "run" in line] == ["run-0", "run-1", "run-2"]
    assert [entry["run_id"] for entry in lines[-1]["index"]] == ["run-0", "run-1", "run-2"]
    assert await archive.delete_tenant("acme") == 1
    with pytest.raises(ArtifactMissing):
        await archive.read(next(run for run in found if run.tenant == "acme"))


class Failing(StoreProxy):
    """A store that fails to purge, before or after it has."""

    def __init__(self, store: Store, failures: list[str]) -> None:
        super().__init__(store)
        self.failures = failures

    async def purge(self, policy: PurgePolicy, audit: Any = None) -> PurgeReport:
        failure = self.failures.pop(0) if self.failures and policy.run_ids is not None else ""
        if failure == "before":
            raise StoreUnavailable("gone")
        report = await self._store.purge(policy, audit)
        if failure == "after":
            raise StoreUnavailable("gone")
        return report


@pytest.mark.contract("FMT-2")
@pytest.mark.parametrize("failure", ["before", "after"])
async def test_a_crash_between_archive_and_deletion_loses_nothing(store: Store, tmp_path: Path, failure: str) -> None:
    """The runs are archived again under the same name, if they are the same runs."""
    node = SampleNode(store)
    for number in range(3):
        await node.start(f"run-{number}", complete())
    histories = {run_id: await read_history(store, run_id) for run_id in await left(store)}
    archive = Archive(tmp_path / "archive", store)
    worker = duty(Failing(store, [failure]), Retention(finished=NOW), archive)
    with pytest.raises(StoreUnavailable):
        await worker.sweep()
    assert len(await left(store)) == (3 if failure == "before" else 0)
    await worker.sweep()
    found = await store.find(ArchivedRunQuery())
    assert {run.run_id: (await archive.read(run)).events for run in found} == histories
    assert len([path for path in (tmp_path / "archive").rglob("*") if path.is_file()]) == 1


@pytest.mark.contract("FMT-2")
async def test_what_cannot_be_archived_is_not_deleted(tmp_path: Path) -> None:
    store = MemoryStore()
    node = SampleNode(store)
    await node.start("run-1", complete())
    place = tmp_path / "file"
    place.write_text("no folder")
    with pytest.raises(StoreUnavailable):
        await duty(store, Retention(finished=NOW), Archive(place, store)).sweep()
    assert await left(store) == ["run-1"]


@pytest.mark.contract("FMT-2")
async def test_a_full_archive_deletes_nothing_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention goes on once there is room again."""
    store = MemoryStore()
    node = SampleNode(store)
    for number in range(3):
        await node.start(f"run-{number}", complete())

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    worker = duty(store, Retention(finished=NOW), Archive(tmp_path, store))
    with monkeypatch.context() as patched:
        patched.setattr("holdfast.store.artifacts._finish", full)
        with pytest.raises(StoreFull):
            await worker.sweep()
    assert len(await left(store)) == 3
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert (await worker.sweep()).runs == 3


@pytest.mark.contract("FMT-2")
async def test_an_object_that_was_changed_is_not_shown_as_history(tmp_path: Path) -> None:
    store = MemoryStore()
    await SampleNode(store).start("run-1", complete())
    archive = Archive(tmp_path, store)
    await duty(store, Retention(finished=NOW), archive).sweep()
    [run] = await store.find(ArchivedRunQuery())
    path = tmp_path / run.object_key
    path.write_bytes(path.read_bytes()[:20] + b"?" + path.read_bytes()[21:])
    with pytest.raises(ArtifactCorrupt):
        await archive.read(run)


@pytest.mark.contract("FMT-2", "SEC-2")
async def test_encrypted_values_stay_encrypted_and_offloaded_ones_come_along(tmp_path: Path) -> None:
    """Also a signal that came with the start, which is bound to its request."""
    secret, large = "the secret of the run", "x" * 5_000
    place = hf.Artifacts(tmp_path / "values", offload_bytes=1_000)
    app = hf.App("shop", codecs=[hf.Encryption({"k1": b"1" * 32})], artifacts=place)

    @app.workflow
    async def keep(text: str) -> str:
        note = await hf.wait_signal("note", str)
        return text + note

    store = MemoryStore()
    async with app.node(store):
        options: dict[str, Any] = {"with_signal": {"name": "note", "payload": large}, "run_id": "run-1"}
        run = await app.start(keep, secret, **options)
        assert await run.result() == secret + large
        history = await run.events()
        sealed = app.runtime().store.inner  # type: ignore[attr-defined]
        assert isinstance(sealed, SealingStore)
        archive = Archive(tmp_path / "archive", sealed)
        await duty(app.runtime().store, Retention(finished=NOW), archive).sweep()
        assert await left(store) == []
        assert await Artifacts(place.store).delete_run(store, "run-1") > 0
        [archived] = await store.find(ArchivedRunQuery())
        assert secret.encode() not in await archive.export(archived)
        assert b"xxxx" not in await archive.export(archived)
        assert (await archive.read(archived)).events == history


@pytest.mark.contract("FMT-2")
async def test_histories_are_archived_in_a_bucket(s3_server: S3Server) -> None:
    """And one of them is read from it by a request for its part."""
    store = MemoryStore()
    node = SampleNode(store)
    for number in range(5):
        await node.start(f"run-{number}", complete())
    histories = {run_id: await read_history(store, run_id) for run_id in await left(store)}
    archive = Archive(ObjectArtifacts(s3_server.store(s3_server.make_bucket())), store)
    assert (await duty(store, Retention(finished=NOW), archive).sweep()).archived == 5
    found = await store.find(ArchivedRunQuery())
    assert {run.run_id: (await archive.read(run)).events for run in found} == histories
    assert len({run.object_key for run in found}) == 1
    assert await archive.delete_tenant("default") == 1
    with pytest.raises(ArtifactMissing):
        await archive.read(found[0])


# --- size


@pytest.mark.contract("FMT-2")
async def test_a_file_does_not_grow_as_long_as_as_much_goes_as_comes(tmp_path: Path) -> None:
    """SQLite uses the pages again that a purge leaves. `TEST_RETENTION_CYCLES=300` is a long play."""
    path = tmp_path / "store.db"
    store = await SqliteStore.open(path)
    await store.migrate()
    node, sizes = SampleNode(store), list[int]()
    for cycle in range(CYCLES):
        for number in range(40):
            await node.start(f"run-{cycle}-{number}", task("approve"), complete())
        assert (await duty(store, Retention(finished=NOW, audit=NOW)).sweep()).runs == 40
        [[pages]] = store._database.connection.execute("PRAGMA page_count").fetchall()
        sizes.append(pages)
    await store.close()
    print(f"{CYCLES} cycles: {sizes[1]} pages after the second, {max(sizes)} at most, {sizes[-1]} in the end")
    assert max(sizes[2:]) <= 1.05 * sizes[1], sizes


# --- nodes


@pytest.mark.contract("FMT-2", "OWN-4")
async def test_a_node_with_a_policy_does_it_under_the_lock(store: Store) -> None:
    app = hf.App("shop", retention=hf.Retention(finished=NOW, every=timedelta(milliseconds=20)))

    @app.workflow
    async def nothing() -> int:
        return 1

    async with app.node(store, name="a"), asyncio.timeout(30):
        run = await app.start(nothing)
        assert await run.result() == 1
        await until(lambda: left(store))
        assert "retention" in [lock.name for lock in await store.find_locks()]
    assert await store.find_locks() == []


@pytest.mark.contract("FMT-2")
async def test_a_node_without_a_policy_has_no_such_duty(store: Store) -> None:
    app = hf.App("shop")
    async with app.node(store):
        assert await store.find_locks() == []
        assert app.runtime().retention.policy == hf.Retention()


# --- the policy


def test_a_policy_comes_from_settings_too() -> None:
    environ = {
        "HOLDFAST_RETENTION__FINISHED_DAYS": "30",
        "HOLDFAST_RETENTION__RULES": '[{"workflow": "import", "finished_days": 0.5}, {"finished_days": null}]',
        "HOLDFAST_RETENTION__ARCHIVE": "file:///var/archive",
        "HOLDFAST_RETENTION__STALE_RUNS_DAYS": "90",
        "HOLDFAST_RETENTION__CANCEL_STALE_RUNS": "true",
        "HOLDFAST_RETENTION__EVERY_S": "60",
    }
    assert Retention.from_settings(load_settings(environ).retention) == Retention(
        finished=30,
        rules=(RetentionRule(workflow="import", finished=0.5), RetentionRule(finished=None)),
        archive="file:///var/archive",
        stale_runs=90,
        cancel_stale_runs=True,
        every=timedelta(seconds=60),
    )
    assert Retention.from_settings(load_settings({}).retention) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"finished": "30"},
        {"finished": -1},
        {"finished": True},
        {"finished": float("nan")},
        {"tasks": 1e30},
        {"every": 5},
        {"every": timedelta(0)},
        {"rules": (1,)},
        {"cancel_stale_runs": True},
    ],
)
def test_a_policy_that_is_wrong_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        Retention(**wrong)


def test_settings_that_are_wrong_are_refused() -> None:
    with pytest.raises(InvalidInput):
        load_settings({"HOLDFAST_RETENTION__RULES": "{"})
    with pytest.raises(InvalidInput):
        RetentionRule(status="RUNNING", finished=1)


# --- histories that are not whole, and long ones


class Holey(StoreProxy):
    """A store that has lost one event of a run."""

    lost = 0

    async def read_events(self, run_id: str, *given: Any) -> list[Event]:
        found = await self.inner.read_events(run_id, *given)
        return [event for event in found if (run_id, event.run_seq) != ("holey", self.lost)]


@pytest.mark.contract("FMT-2", "PRJ-2")
@pytest.mark.parametrize("lost", [1, 2, "the last"])
async def test_a_history_with_a_gap_is_neither_archived_nor_deleted(store: Store, tmp_path: Path, lost: Any) -> None:
    """It could not be read again. Others go."""
    holey = Holey(store)
    node = SampleNode(store)
    await node.start("holey", complete())
    await node.start("whole", complete())
    holey.lost = len(await read_history(store, "holey")) if lost == "the last" else lost
    archive = Archive(tmp_path / "archive", holey)
    report = await duty(holey, Retention(finished=NOW), archive).sweep()
    assert (report.runs, report.archived) == (1, 1)
    assert await left(store) == ["holey"]
    assert [run.run_id for run in await store.find(ArchivedRunQuery())] == ["whole"]


class Breaking(StoreProxy):
    """A store whose process ends after some purges."""

    left = 3

    async def purge(self, policy: PurgePolicy, audit: AuditEntry | None = None) -> PurgeReport:
        if self.left == 0:
            raise StoreUnavailable("the process has ended")
        self.left -= 1
        return await self.inner.purge(policy, audit)


@pytest.mark.contract("FMT-2", "EVT-1", "EVT-6")
@pytest.mark.parametrize("store", ["sqlite", "postgres"], indirect=True)
async def test_a_long_history_goes_in_parts_and_the_run_with_the_last(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no commit holds up others for long. After a crash between two parts the archive has the whole history."""
    monkeypatch.setattr(decisions, "PART_EVENTS", 10)
    monkeypatch.setattr(retention, "BATCH_EVENTS", 10)
    node = SampleNode(store)
    await node.start("long", *(marker(f"m-{number}") for number in range(60)), complete())
    await node.start("short", complete())
    history = await read_history(store, "long")
    archive = Archive(tmp_path / "archive", store)
    breaking = Breaking(store)
    with pytest.raises(StoreUnavailable):
        await duty(breaking, Retention(finished=NOW), archive).sweep()
    assert set(await left(store)) == {"long", "short"}
    rest = await store.read_events("long")
    assert [event.run_seq for event in rest] == list(range(31, len(history) + 1))
    with pytest.raises(HistoryGap, match="event 1 is missing"):
        await engine_history.read_history(store, "long")
    report = await duty(store, Retention(finished=NOW), archive).sweep()
    assert (report.runs, report.events, report.archived) == (2, len(rest) + 3, 1)
    assert await left(store) == []
    [found] = [run for run in await store.find(ArchivedRunQuery()) if run.run_id == "long"]
    assert (await archive.read(found)).events == history
