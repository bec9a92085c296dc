"""Artifacts of activities, and values that are too large for the store."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore as Bucket

import holdfast as hf
from holdfast.client import Client
from holdfast.core.events import StepCompleted
from holdfast.core.keys import ANCESTORS
from holdfast.engine.check_histories import check_store
from holdfast.errors import (
    ArtifactCorrupt,
    ArtifactMissing,
    Conflict,
    InvalidInput,
    PayloadUnreadable,
    RunFailed,
    StoreUnavailable,
)
from holdfast.store.payloads import sealed
from holdfast.store.port import CommitConflict, Committed, RunQuery, Turn
from holdfast.store.proxy import StoreProxy
from tests.engine.harness import EngineVariant, wait_for_event
from tests.process_state import traced_memory

KIB, MIB = 1024, 1024 * 1024
LARGE = "x" * (300 * KIB)
KEY = b"1" * 32


def build(artifacts: hf.Artifacts | None, **options: Any) -> tuple[hf.App, Any]:
    app = hf.App("shop", artifacts=artifacts, **options)

    @app.activity
    async def film(megabytes: int) -> hf.Artifact:
        async def frames() -> AsyncIterator[bytes]:
            for number in range(megabytes):
                yield bytes([number % 251]) * MIB

        return await hf.put_artifact(frames(), kind="film")

    @app.activity(queue="slow", retry=hf.Retry(max_attempts=1))
    async def measure(artifact: hf.Artifact) -> int:
        size = 0
        async for chunk in hf.open_artifact(artifact):
            size += len(chunk)
        await hf.put_artifact(b"measured", kind="log")
        return size

    @app.activity
    async def double(text: str) -> str:
        hf.activity_context().heartbeat(text)
        return text * 2

    @app.workflow
    async def make(megabytes: int) -> tuple[hf.Artifact, int]:
        artifact = await film(megabytes)
        return artifact, await measure(artifact)

    @app.workflow
    async def child(text: str) -> str:
        return text

    @app.workflow
    async def grow(text: str) -> list[int]:
        seen = ""
        hf.on_query("seen", lambda: seen)
        doubled = await double(text)
        back = await child(doubled)
        signal = await hf.wait_signal("more", str)
        seen = signal
        return [len(doubled), len(back), len(signal)]

    return app, {"make": make, "grow": grow, "child": child}


OPTIONS: dict[str, Any] = {"queues": ("slow",)}


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.contract("SEC-2")
async def test_an_artifact_is_streamed_and_only_its_reference_is_in_the_history(
    variant: EngineVariant, tmp_path: Path
) -> None:
    folder = tmp_path / "artifacts"
    app, workflows = build(hf.Artifacts(f"file://{folder}", retention={"film": timedelta(days=30)}))
    async with variant.node(app, **OPTIONS):
        run = await app.start(workflows["make"], 3)
        artifact, size = await run.result()
        assert size == 3 * MIB == artifact.size_bytes
        assert artifact.kind == "film"
        assert artifact.expires_at is not None
        steps = [event.data for event in await run.events() if isinstance(event.data, StepCompleted)]
        assert [[each.kind for each in step.artifacts] for step in steps] == [["film"], ["log"]]
        assert steps[0].artifacts == (artifact,)
        assert all(len(step.result) < 1_000 for step in steps)
        received = [chunk async for chunk in app.open_artifact(artifact)]
        assert sum(map(len, received)) == 3 * MIB
    assert len(files_in(folder)) == 2


@pytest.mark.contract("SEC-2")
@pytest.mark.parametrize("problem", ["missing", "changed"])
async def test_an_artifact_that_is_not_what_was_stored_fails_who_reads_it(tmp_path: Path, problem: str) -> None:
    folder, address = tmp_path / "artifacts", f"sqlite:///{tmp_path}/shop.db"
    app, workflows = build(hf.Artifacts(folder))
    async with asyncio.timeout(60), app.node(address):
        run = await app.start(workflows["make"], 1)
        await wait_for_event(run, "StepCompleted")
        [path] = files_in(folder)
        if problem == "missing":
            path.unlink()
        else:
            path.write_bytes(b"y" * MIB)
    app, workflows = build(hf.Artifacts(folder))
    async with asyncio.timeout(60), app.node(address, options=hf.NodeOptions(**OPTIONS)):
        expected = ArtifactMissing if problem == "missing" else ArtifactCorrupt
        with pytest.raises(RunFailed, match=expected.code):
            await app.run(run.run_id).result()


async def test_without_an_artifact_store_an_activity_gets_an_error(variant: EngineVariant) -> None:
    app, workflows = build(None)
    async with variant.node(app):
        with pytest.raises(RunFailed, match="no artifact store"):
            await (await app.start(workflows["make"], 1)).result()


@pytest.mark.contract("SEC-2", "ACT-1")
async def test_large_values_are_beside_the_store_and_everything_sees_them(tmp_path: Path) -> None:
    folder, path = tmp_path / "artifacts", tmp_path / "shop.db"
    limits = hf.Limits(signal_payload_bytes=4 * MIB, value_bytes=8 * MIB)
    options = hf.NodeOptions(cached_runs=0, drain_s=2.0)
    app, workflows = build(hf.Artifacts(folder), limits=limits)
    async with asyncio.timeout(60), app.node(f"sqlite:///{path}", options=options):
        run = await app.start(workflows["grow"], LARGE, request_id="r-1")
        assert (await app.start(workflows["grow"], LARGE, request_id="r-1")).run_id == run.run_id
        with pytest.raises(Conflict):
            await app.start(workflows["grow"], LARGE + "y", request_id="r-1")
        await wait_for_event(run, "SignalWaiting")
        await run.signal("more", LARGE, signal_id="m-1")
        await run.signal("more", LARGE, signal_id="m-1")
        with pytest.raises(Conflict):
            await run.signal("more", LARGE + "y", signal_id="m-1")
        assert await run.result() == [2 * len(LARGE), 2 * len(LARGE), len(LARGE)]
        assert await run.query("seen") == LARGE
        assert sum(len(getattr(event.data, "result", b"")) > len(LARGE) for event in await run.events()) >= 2
        assert await check_store(app.registry, app.runtime().store, finished=True) == []
    assert LARGE[:1_000].encode() not in path.read_bytes()
    assert all(file.stat().st_size >= len(LARGE) for file in files_in(folder))
    plain, plain_workflows = build(None, limits=limits)
    store = await hf.SqliteStore.open(path)
    try:
        alone = await sealed(store, (), takes_runs=False)
        problems = await check_store(plain.registry, alone, finished=True)
        assert {problem.code for problem in problems} == {"PayloadUnreadable"}
    finally:
        await store.close()
    assert plain_workflows


@pytest.mark.contract("SEC-2")
async def test_offloaded_values_are_encrypted_and_rotate(tmp_path: Path) -> None:
    folder, address = tmp_path / "artifacts", f"sqlite:///{tmp_path}/shop.db"
    app, workflows = build(hf.Artifacts(folder), codecs=[hf.Encryption({"k1": KEY})])
    async with asyncio.timeout(60), app.node(address):
        run = await app.start(workflows["child"], LARGE)
        assert await run.result() == LARGE
    assert files_in(folder)
    assert not any(b"x" * 100 in file.read_bytes() for file in files_in(folder))
    app, workflows = build(hf.Artifacts(folder), codecs=[hf.Encryption({"k2": b"2" * 32, "k1": KEY})])
    async with asyncio.timeout(60), app.node(address):
        assert await app.run(run.run_id).result() == LARGE
    app, workflows = build(hf.Artifacts(folder), codecs=[hf.Encryption({"k2": b"2" * 32})])
    async with asyncio.timeout(60), app.node(address):
        with pytest.raises(PayloadUnreadable):
            await app.run(run.run_id).result()


@pytest.mark.contract("SEC-2")
async def test_artifacts_are_encrypted_where_payloads_are(variant: EngineVariant, tmp_path: Path) -> None:
    folder = tmp_path / "artifacts"
    app, workflows = build(hf.Artifacts(folder), codecs=[hf.Encryption({"k1": KEY})])
    async with variant.node(app, **OPTIONS):
        run = await app.start(workflows["make"], 2)
        artifact, size = await run.result()
        assert (size, artifact.size_bytes) == (2 * MIB, 2 * MIB)
        received = b"".join([chunk async for chunk in app.open_artifact(artifact)])
        assert received == b"\0" * MIB + b"\1" * MIB
    contents = [file.read_bytes() for file in files_in(folder)]
    assert len(contents) == 2
    assert not any(b"\1" * 100 in content or b"measured" in content for content in contents)


@pytest.mark.contract("SEC-2")
async def test_a_value_of_another_run_cannot_be_named(tmp_path: Path) -> None:
    """A reference has no address: a value is looked for among those of the run."""
    folder, path = tmp_path / "artifacts", tmp_path / "shop.db"
    app, workflows = build(hf.Artifacts(folder))
    async with asyncio.timeout(60), app.node(f"sqlite:///{path}"):
        one = await app.start(workflows["child"], LARGE)
        two = await app.start(workflows["child"], "small")
        await one.result(), await two.result()
    with closing(sqlite3.connect(path)) as db, db:
        of = "WHERE event_type = 'RunCompleted' AND run_no = (SELECT run_no FROM runs WHERE run_id = ?)"
        [data] = db.execute(f"SELECT data FROM events {of}", (one.run_id,)).fetchone()
        db.execute(f"UPDATE events SET data = ? {of}", (data, two.run_id))
    app, workflows = build(hf.Artifacts(folder))
    async with asyncio.timeout(60), app.node(f"sqlite:///{path}"):
        assert await app.run(one.run_id).result() == LARGE
        with pytest.raises(PayloadUnreadable):
            await app.run(two.run_id).result()


@pytest.mark.contract("SEC-2")
async def test_a_crash_between_the_value_and_its_commit_leaves_nothing_for_ever(tmp_path: Path) -> None:
    """What a lost turn has written stays as long as its run, and goes with it."""
    folder, path = tmp_path / "artifacts", tmp_path / "shop.db"
    artifacts = hf.Artifacts(folder)

    class Failing(StoreProxy):
        """Loses the commit of a large result."""

        async def commit(self, turns: Sequence[Turn]) -> list[Committed | CommitConflict]:
            large = any(b"offload" in bytes(getattr(event.data, "result", b"")) for t in turns for event in t.events)
            if large:
                lost.set()
                await asyncio.Event().wait()
            answers: list[Committed | CommitConflict] = await self.inner.commit(turns)
            return answers

    lost = asyncio.Event()
    store = await hf.SqliteStore.open(path)
    await store.migrate()
    app, workflows = build(artifacts)
    try:
        started: list[str] = []

        async def crash() -> None:
            async with asyncio.timeout(2), app.node(Failing(store), options=hf.NodeOptions(drain_s=0.1)):
                started.append((await app.start(workflows["grow"], LARGE)).run_id)
                await lost.wait()
                await asyncio.sleep(60)

        with pytest.raises(TimeoutError):
            await crash()
        assert len(files_in(folder)) >= 2, "the input, and the result that was lost"
        app, workflows = build(artifacts)
        async with asyncio.timeout(60), app.node(store):
            await app.run(started[0]).signal("more", "small")
            assert (await app.run(started[0]).result())[0] == 2 * len(LARGE)
            later = await store.now() + 2 * 3_600_000_000
            assert await artifacts.sweep(Later(store, later)) == 0, "the run is there"
            await store.purge(hf.PurgePolicy(finished_run_ms=0))
            assert await artifacts.sweep(Later(store, later)) > 0
        assert files_in(folder) == []
    finally:
        await store.close()


class Later(StoreProxy):
    """A store some time later."""

    def __init__(self, inner: Any, now: int) -> None:
        super().__init__(inner)
        self._now = now

    async def now(self) -> int:
        return self._now


@pytest.mark.contract("SEC-2")
async def test_a_turn_waits_for_an_artifact_store_that_is_away(tmp_path: Path) -> None:
    class Away(hf.FolderArtifacts):
        is_away = False
        refused = 0

        async def put(self, key: str, chunks: AsyncIterator[bytes]) -> None:
            if self.is_away:
                self.refused += 1
                raise StoreUnavailable("the bucket is away")
            await super().put(key, chunks)

    folder = Away(tmp_path / "artifacts")
    app, workflows = build(hf.Artifacts(folder))
    async with asyncio.timeout(60), app.node(f"sqlite:///{tmp_path}/shop.db"):
        folder.is_away = True
        with pytest.raises(StoreUnavailable):
            await app.start(workflows["grow"], LARGE)
        run = await app.start(workflows["grow"], LARGE[: 200 * KIB])
        while folder.refused < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        folder.is_away = False
        await run.signal("more", "small")
        assert (await run.result())[0] == 400 * KIB


@pytest.mark.contract("SEC-2")
async def test_many_large_results_take_no_more_memory_than_a_few(tmp_path: Path) -> None:
    """Short form of `bench/artifacts.py`."""
    app, workflows = build(hf.Artifacts(tmp_path / "artifacts"))
    megabyte = "m" * MIB

    async def measure(runs: int) -> int:
        with traced_memory() as memory:
            for _ in range(runs):
                run = await app.start(workflows["child"], megabyte)
                assert len(await run.result()) == MIB
            return memory()[1]

    options = hf.NodeOptions(cached_runs=5)
    async with asyncio.timeout(120), app.node(f"sqlite:///{tmp_path}/shop.db", options=options):
        await measure(5)
        few, many = await measure(10), await measure(50)
    assert many < few + 15 * MIB


async def test_settings_name_the_artifact_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_ARTIFACTS__STORE", f"file://{tmp_path}/artifacts")
    app, workflows = build(None)
    async with asyncio.timeout(60), app.node(f"sqlite:///{tmp_path}/shop.db", options=hf.NodeOptions(queues=("slow",))):
        artifact, size = await (await app.start(workflows["make"], 1)).result()
        assert size == MIB
        assert await (await app.start(workflows["child"], LARGE)).result() == LARGE
    assert len(files_in(tmp_path / "artifacts")) == 4
    assert "/artifacts/" in artifact.uri
    monkeypatch.setenv("HOLDFAST_ARTIFACTS__STORE", "ftp://elsewhere")
    with pytest.raises(InvalidInput):
        async with app.node(f"sqlite:///{tmp_path}/shop.db"):
            pass


@pytest.mark.contract("SEC-2", "OWN-4")
async def test_a_node_sweeps_and_a_bucket_holds_the_same(tmp_path: Path) -> None:
    """One node at a time does: that which has the lock."""
    bucket = hf.ObjectArtifacts(Bucket())
    artifacts = hf.Artifacts(bucket, retention={"film": timedelta(milliseconds=1)})
    app, workflows = build(artifacts)
    options = hf.NodeOptions(queues=("slow",), artifact_sweep_s=0.5)
    async with asyncio.timeout(60), app.node(f"sqlite:///{tmp_path}/shop.db", options=options):
        run = await app.start(workflows["make"], 1)
        artifact, _ = await run.result()
        while await bucket.stat(artifact.uri.removeprefix("artifact:")) is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        with pytest.raises(ArtifactMissing):
            _ = [chunk async for chunk in app.runtime().open_artifact(artifact)]
        kinds = [found.key.split("/")[-2] async for found in bucket.list()]
        assert kinds == ["log"]
        assert [lock.name for lock in await app.runtime().store.find_locks()] == [f"artifacts of {app.name}"]


@pytest.mark.contract("FMT-2", "SEC-2")
@pytest.mark.parametrize("way", ["retention", "delete"])
async def test_artifacts_stay_while_a_fork_refers_to_them_and_go_after_the_last(
    variant: EngineVariant, tmp_path: Path, way: str
) -> None:
    folder = tmp_path / "artifacts"
    artifacts = hf.Artifacts(folder)
    app, workflows = build(artifacts)

    async with variant.node(app, **OPTIONS) as node, Client(app) as client:
        run = await app.start(workflows["make"], 1)
        artifact, size = await run.result()
        fork = await run.fork(at=4)
        assert size == MIB
        assert (await fork.result())[1] == MIB
        again = await fork.fork()
        assert len((await again.snapshot()).artifacts) == 1, "the fork of the fork has it too"
        await again.result()
        for gone in (run, fork):
            if way == "delete":
                await client.runs.delete(gone.run_id)
            else:
                await node.store.purge(hf.PurgePolicy(run_ids=(gone.run_id,), finished_run_ms=0))
            await artifacts.sweep(Later(node.store, await node.store.now() + 2 * 3_600_000_000))
            assert sum([len(chunk) async for chunk in app.open_artifact(artifact)]) == MIB
        await node.store.purge(hf.PurgePolicy(finished_run_ms=0))
        await artifacts.sweep(Later(node.store, await node.store.now() + 2 * 3_600_000_000))
    assert files_in(folder) == []


@pytest.mark.contract("FMT-2", "SEC-2")
@pytest.mark.parametrize("way", ["fork", "retry", "plan"])
async def test_an_artifact_stays_however_often_its_run_was_forked_or_retried(
    variant: EngineVariant, tmp_path: Path, way: str
) -> None:
    """A run has no tags of all that it descends from, but it has those of the runs whose artifacts it has."""
    artifacts = hf.Artifacts(tmp_path / "artifacts")
    app, seen = hf.App("shop", artifacts=artifacts), list[hf.Artifact]()

    @app.activity
    async def film() -> hf.Artifact:
        return await hf.put_artifact(b"x" * KIB, kind="film")

    @app.activity(retry=hf.Retry(max_attempts=1))
    async def rate(film: hf.Artifact) -> None:
        seen.append(film)
        raise ValueError("nobody likes it")

    @app.workflow
    async def show() -> None:
        await rate(await film())

    steps = [
        {"id": "film", "activity": "film"},
        {"id": "rate", "activity": "rate", "input": {"film": "${steps.film.output}"}},
    ]
    async with variant.node(app) as node:
        plan = {"plan": "show", "version": "1", "steps": steps}
        run: hf.RunHandle[Any] = await (app.plans.start(plan) if way == "plan" else app.start(show))
        for _ in range(ANCESTORS + 2):
            with pytest.raises(RunFailed):
                await run.result()
            run = await (run.fork() if way == "fork" else run.retry_run())
        with pytest.raises(RunFailed):
            await run.result()
        [artifact] = set(seen[-ANCESTORS:])
        others = [head.run_id for head in await node.store.find(RunQuery()) if head.run_id != run.run_id]
        await node.store.purge(hf.PurgePolicy(run_ids=tuple(others), finished_run_ms=0))
        await artifacts.sweep(Later(node.store, await node.store.now() + 2 * 3_600_000_000))
        assert sum([len(chunk) async for chunk in app.open_artifact(artifact)]) == KIB
