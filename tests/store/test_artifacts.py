"""Artifact stores: a folder, and what `obstore` reaches. One suite for all of them."""

from __future__ import annotations

import asyncio
import gc
import os
import stat
import threading
import warnings
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from obstore.store import LocalStore
from obstore.store import MemoryStore as Bucket

from holdfast.clock import SystemClock
from holdfast.core.events import ArtifactRef
from holdfast.errors import ArtifactCorrupt, ArtifactMissing, InvalidInput, PayloadUnreadable, StoreUnavailable
from holdfast.limits import Limits
from holdfast.store.artifacts import (
    GRACE_MS,
    Artifacts,
    ArtifactStore,
    FolderArtifacts,
    artifact_key,
    open_artifacts,
    place_of,
    run_of_key,
    run_path,
)
from holdfast.store.encryption import FRAME_BYTES, Encryption
from holdfast.store.memory import MemoryStore
from holdfast.store.object_artifacts import PART_BYTES, ObjectArtifacts
from holdfast.store.proxy import StoreProxy
from holdfast.testing import VirtualClock
from holdfast.testing.samples import new_run
from tests.process_state import traced_memory
from tests.s3_server import S3Server

MIB = 1024 * 1024
PLACE = "0a1b"


@pytest.fixture(params=["folder", "bucket", "local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ArtifactStore:
    """Return an empty artifact store."""
    if request.param == "s3":
        server: S3Server = request.getfixturevalue("s3_server")
        return ObjectArtifacts(server.store(server.make_bucket()))
    if request.param == "folder":
        return FolderArtifacts(tmp_path / "artifacts")
    return ObjectArtifacts(Bucket() if request.param == "bucket" else LocalStore(tmp_path))


async def chunks_of(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def read(store: ArtifactStore, key: str) -> bytes:
    return b"".join([chunk async for chunk in store.read(key)])


async def keys(store: ArtifactStore, prefix: str = "") -> list[str]:
    return sorted([found.key async for found in store.list(prefix)])


@pytest.mark.contract("STO-1")
@pytest.mark.parametrize("doing", ["reads", "writes"])
async def test_a_caller_that_is_cancelled_while_a_file_is_opened_leaves_nothing_open(
    doing: str, tmp_path: Path
) -> None:
    store, busy = FolderArtifacts(tmp_path), threading.Event()
    await store.put("a/b", chunks_of(b"whole"))
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    thread = asyncio.create_task(asyncio.to_thread(busy.wait))
    with warnings.catch_warnings(record=True) as unclosed:
        warnings.simplefilter("always", ResourceWarning)
        task = asyncio.create_task(read(store, "a/b") if doing == "reads" else _put(store, "a/c"))
        await asyncio.sleep(0.01)  # it waits for the only thread
        task.cancel()
        await asyncio.sleep(0.01)
        busy.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await thread
        del task
        gc.collect()
    assert [str(each.message) for each in unclosed] == []
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["b"]


async def _put(store: ArtifactStore, key: str) -> None:
    await store.put(key, chunks_of(b"other"))


@pytest.mark.contract("FMT-2")
async def test_a_part_of_an_object_is_read_without_the_rest(store: ArtifactStore) -> None:
    await store.put("a/b", _chunks_of(b"0123456789"))
    assert await store.read_part("a/b", 3, 4) == b"3456"
    assert await store.read_part("a/b", 8, 2) == b"89"
    with pytest.raises(ArtifactMissing):
        await store.read_part("a/nothing", 0, 1)


async def _chunks_of(data: bytes) -> AsyncIterator[bytes]:
    yield data


@pytest.mark.contract("SEC-2")
async def test_what_is_put_is_read_measured_listed_and_deleted(store: ArtifactStore) -> None:
    await store.put("a/one", chunks_of(b"12", b"", b"345"))
    await store.put("a/b/two", chunks_of())
    await store.put("a/one", chunks_of(b"another"))
    assert await read(store, "a/one") == b"another"
    assert await read(store, "a/b/two") == b""
    found = await store.stat("a/one")
    assert found is not None
    assert (found.key, found.size_bytes) == ("a/one", 7)
    assert await keys(store) == ["a/b/two", "a/one"]
    assert await keys(store, "a/b") == ["a/b/two"]
    await store.delete("a/one")
    await store.delete("a/one")
    assert await keys(store) == ["a/b/two"]
    assert await store.stat("a/one") is None
    with pytest.raises(ArtifactMissing):
        await read(store, "a/one")


@pytest.mark.contract("SEC-2")
async def test_an_interrupted_write_leaves_nothing_under_the_name(store: ArtifactStore) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"x" * (2 * PART_BYTES)
        raise RuntimeError("the activity was cancelled")

    await store.put("a/kept", chunks_of(b"before"))
    for key in ("a/new", "a/kept"):
        with pytest.raises(RuntimeError):
            await store.put(key, broken())
    assert await read(store, "a/kept") == b"before"
    assert await store.stat("a/new") is None
    assert await keys(store, "a") == ["a/kept"]


@pytest.mark.contract("SEC-2")
async def test_a_large_artifact_passes_in_chunks(store: ArtifactStore, request: pytest.FixtureRequest) -> None:
    """Short form of `bench/artifacts.py`: the memory in use does not grow with the size."""
    artifacts, size = Artifacts(store), 48 * MIB

    def source() -> AsyncIterator[bytes]:
        return chunks_of(*([os.urandom(16) * 65_536] * (size // MIB)))

    is_in_memory = request.node.callspec.params["store"] == "bucket"
    with traced_memory() as memory:
        artifact = await artifacts.put(PLACE, "run-1", source(), "film", 0)
        seen = 0
        async for chunk in artifacts.open(artifact):
            assert len(chunk) <= 4 * MIB
            seen += len(chunk)
        peak = memory()[1]
    assert seen == size == artifact.size_bytes
    if not is_in_memory:
        assert peak < 3 * PART_BYTES


@pytest.mark.contract("SEC-2")
@pytest.mark.parametrize("is_async", [False, True])
async def test_small_chunks_are_written_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    store, sizes = FolderArtifacts(tmp_path), list[int]()
    put = store.put

    async def noting(key: str, chunks: AsyncIterator[bytes]) -> None:
        async def noted() -> AsyncIterator[bytes]:
            async for chunk in chunks:
                sizes.append(len(chunk))
                yield chunk

        await put(key, noted())

    monkeypatch.setattr(store, "put", noting)
    small = [b"abc"] * 5_001
    artifact = await Artifacts(store).put(PLACE, "run-1", chunks_of(*small) if is_async else small, "log", 0)
    assert sizes == [3_000] * 5 + [3]
    assert artifact.sha256 == sha256(b"abc" * 5_001).hexdigest()


@pytest.mark.contract("SEC-2")
async def test_bytes_are_checked_when_they_are_read(store: ArtifactStore) -> None:
    artifacts = Artifacts(store, retention={"report": timedelta(days=1)})
    artifact = await artifacts.put(PLACE, "a/b%c", b"content", "report", 5)
    assert artifact.kind == "report"
    assert artifact.sha256 == sha256(b"content").hexdigest()
    assert artifact.size_bytes == 7
    assert artifact.expires_at == 5 + 86_400_000_000
    assert b"".join([chunk async for chunk in artifacts.open(artifact)]) == b"content"
    await store.put(artifact.uri.removeprefix("artifact:"), chunks_of(b"changed"))
    with pytest.raises(ArtifactCorrupt):
        _ = [chunk async for chunk in artifacts.open(artifact)]
    await store.delete(artifact.uri.removeprefix("artifact:"))
    with pytest.raises(ArtifactMissing):
        _ = [chunk async for chunk in artifacts.open(artifact)]


KEYS = {"k1": b"1" * 32}


@pytest.mark.contract("SEC-2")
@pytest.mark.parametrize("size", [0, 1, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1, 3 * FRAME_BYTES])
async def test_with_keys_an_artifact_is_encrypted_as_it_streams(store: ArtifactStore, size: int) -> None:
    artifacts = Artifacts(store).passed_through([Encryption(KEYS)])
    plain = (b"holdfast " * (size // 9 + 1))[:size]
    artifact = await artifacts.put(PLACE, "run-1", chunks_of(plain[:7], plain[7:]), "report", 0)
    stored = await read(store, artifact.uri.removeprefix("artifact:"))
    assert artifact.uri.endswith(".aes-gcm")
    assert (artifact.size_bytes, artifact.sha256) == (size, sha256(stored).hexdigest())
    assert b"holdfast holdfast" not in stored
    assert b"".join([chunk async for chunk in artifacts.open(artifact)]) == plain
    later = Artifacts(store).passed_through([Encryption({"k2": b"2" * 32, **KEYS})])
    assert b"".join([chunk async for chunk in later.open(artifact)]) == plain
    for without in (Artifacts(store), Artifacts(store).passed_through([Encryption({"k2": b"2" * 32})])):
        with pytest.raises(PayloadUnreadable):
            _ = [chunk async for chunk in without.open(artifact)]


@pytest.mark.contract("SEC-2")
async def test_what_was_stored_before_there_were_keys_and_while_they_only_read_is_plain(store: ArtifactStore) -> None:
    keys = Encryption(KEYS)
    before = await Artifacts(store).put(PLACE, "run-1", b"aes-gcm", "report", 0)
    reads = await Artifacts(store).passed_through([Encryption(KEYS, encrypts=False)]).put(PLACE, "r", b"two", "log", 0)
    artifacts = Artifacts(store).passed_through([keys])
    assert [chunk async for chunk in artifacts.open(before)] == [b"aes-gcm"]
    assert [chunk async for chunk in artifacts.open(reads)] == [b"two"]


@pytest.mark.contract("SEC-2")
async def test_an_encrypted_artifact_that_was_changed_is_not_opened_whatever_its_digest(tmp_path: Path) -> None:
    store = FolderArtifacts(tmp_path)
    artifacts = Artifacts(store).passed_through([Encryption(KEYS)])
    artifact = await artifacts.put(PLACE, "run-1", os.urandom(2 * FRAME_BYTES + 100), "report", 0)
    unchecked = ArtifactRef(artifact.uri, "report")
    path = tmp_path / artifact.uri.removeprefix("artifact:")
    stored, head, frame = path.read_bytes(), len("k1:") + 32, FRAME_BYTES + 16
    changed = {
        "a bit": stored[:-1] + bytes([stored[-1] ^ 1]),
        "the salt": stored[:5] + bytes([stored[5] ^ 1]) + stored[6:],
        "cut in a frame": stored[:-50],
        "cut between frames": stored[: head + 2 * frame],
        "only a head": stored[:head],
        "nothing": b"",
        "exchanged": stored[:head] + stored[head + frame : head + 2 * frame] + stored[head:][:frame] + stored[-116:],
        "more": stored + stored[head:][:frame],
        "plain": b"a forged report",
    }
    for how, content in changed.items():
        path.write_bytes(content)
        with pytest.raises((ArtifactCorrupt, PayloadUnreadable)):
            print(how, [len(chunk) async for chunk in artifacts.open(unchecked)])
    path.write_bytes(stored)
    moved = tmp_path / PLACE / "artifacts" / "=run-2" / "report" / path.name
    moved.parent.mkdir(parents=True)
    moved.write_bytes(stored)
    assert sum([len(chunk) async for chunk in artifacts.open(unchecked)]) == artifact.size_bytes
    elsewhere = ArtifactRef(f"artifact:{moved.relative_to(tmp_path)}", "report")
    with pytest.raises(ArtifactCorrupt):
        _ = [chunk async for chunk in artifacts.open(elsewhere)]


async def test_only_artifacts_are_opened_by_their_address(store: ArtifactStore) -> None:
    artifacts = Artifacts(store)
    for uri in (
        "artifact:0a/values/=run-1/abc",
        "artifact:0a/artifacts/../values/x",
        "file:///etc/passwd",
        "artifact:",
    ):
        with pytest.raises((InvalidInput, ArtifactMissing)):
            _ = [chunk async for chunk in artifacts.open(ArtifactRef(uri, "x"))]
    with pytest.raises(InvalidInput):
        await artifacts.put(PLACE, "run-1", b"", "../kind", 0)
    for wrong in ("text", 7, [1, 2], None):
        with pytest.raises(InvalidInput):
            await artifacts.put(PLACE, "run-1", wrong, "kind", 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("run_id", ["run-1", "a/b", "..", "é" * 100, "x" * 255, "=+/"])
def test_the_run_of_an_object_is_known_from_its_key(run_id: str) -> None:
    key = artifact_key(PLACE, run_id, "report", "0198")
    assert run_of_key(key) == run_id
    assert run_of_key(f"{PLACE}/values/{run_path(run_id)}/abc") == run_id
    assert all(len(part) <= 255 for part in key.split("/"))


@pytest.mark.contract("SEC-2")
async def test_a_sweep_deletes_what_no_run_owns_and_what_has_expired(store: ArtifactStore) -> None:
    clock = VirtualClock()
    runs = MemoryStore(clock)
    await runs.create([new_run("run-1")])
    artifacts = Artifacts(store, retention={"log": timedelta(hours=2)})
    now = await runs.now()
    place = await place_of(runs)
    kept = await artifacts.put(place, "run-1", b"report", "report", now)
    log = await artifacts.put(place, "run-1", b"log", "log", now)
    orphan = await artifacts.put(place, "run-2", b"orphan", "report", now)
    other = await artifacts.put(PLACE, "run-2", b"of another store", "report", now)
    found = await store.stat(kept.uri.removeprefix("artifact:"))
    assert found is not None
    clock.advance(ms=max(0, (found.modified_at - now) // 1_000))  # the two clocks agree
    assert await artifacts.sweep(runs) == 0, "a start may be under way"
    clock.advance(ms=GRACE_MS + 60_000)
    assert await artifacts.sweep(runs) == 1
    assert await keys(store, place) == sorted(each.uri.removeprefix("artifact:") for each in (kept, log))
    with pytest.raises(ArtifactMissing):
        _ = [chunk async for chunk in artifacts.open(orphan)]
    clock.advance(ms=GRACE_MS)
    assert await artifacts.sweep(runs) == 1
    assert await keys(store, place) == [kept.uri.removeprefix("artifact:")]
    assert await artifacts.delete_run(runs, "run-1") == 1
    assert await keys(store) == [other.uri.removeprefix("artifact:")]


@pytest.mark.contract("SEC-2")
async def test_a_folder_is_private_and_forgets_what_was_interrupted(tmp_path: Path) -> None:
    folder = tmp_path / "artifacts"
    store = FolderArtifacts(folder)
    await store.put("a/b", chunks_of(b"1"))
    for path in (folder, folder / "a"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "a" / "b").stat().st_mode) == 0o600
    left = folder / ".incomplete" / "by-a-crash"
    left.write_bytes(b"half")
    os.utime(left, (0, 0))
    runs = MemoryStore()
    await runs.create([new_run("run-1")])
    artifact = await Artifacts(store).put(PLACE, "run-1", b"whole", "report", 0)
    await store.delete("a/b")
    assert await Artifacts(store).sweep(runs) == 1
    assert await keys(store) == [artifact.uri.removeprefix("artifact:")]
    for wrong in ("../x", "a//b", "", "a/./b", "a\0b"):
        with pytest.raises(InvalidInput):
            await store.put(wrong, chunks_of(b"1"))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreUnavailable):
        await FolderArtifacts(tmp_path / "file").put("a", chunks_of(b"1"))


async def test_a_failed_or_cancelled_write_closes_its_own_file_and_no_other(tmp_path: Path) -> None:
    """A number of a file that was closed may be another file's by then."""
    store = FolderArtifacts(tmp_path)
    await store.put("taken", chunks_of(b"a file where a folder should be"))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(StoreUnavailable):
            await store.put("taken/below", chunks_of(b"1"))
    waiting, stop = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"x" * MIB
        waiting.set()
        await stop.wait()

    task = asyncio.create_task(store.put("slow", slow()))
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(os.listdir("/proc/self/fd")) == before
    assert await keys(store) == ["taken"]


async def test_writes_and_sweeps_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    """An empty folder is removed while another file is put into it."""
    store = FolderArtifacts(tmp_path)

    async def put_and_delete(number: int) -> None:
        for _ in range(30):
            await store.put(f"a/b/{number}", chunks_of(b"1"))
            await store.delete(f"a/b/{number}")

    await asyncio.gather(*(put_and_delete(number) for number in range(8)))
    assert await keys(store) == []


def test_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert isinstance(open_artifacts(f"file://{tmp_path}"), FolderArtifacts)
    assert isinstance(open_artifacts("s3://bucket/prefix"), ObjectArtifacts)
    for wrong in ("", "folder", "file://relative", "ftp://x"):
        with pytest.raises(InvalidInput):
            open_artifacts(wrong)
    artifact = ArtifactRef("artifact:0a/artifacts/=r/k/i", "k", "0" * 64, 1)
    assert replace(artifact, size_bytes=2) != artifact


@pytest.mark.contract("SEC-2")
async def test_a_sweep_deletes_nothing_of_runs_that_a_store_names_on_a_later_page(store: ArtifactStore) -> None:
    clock = VirtualClock()
    runs = MemoryStore(clock, Limits(page_items=2))
    artifacts, place = Artifacts(store), await place_of(runs)
    for number in range(5):
        await runs.create([new_run(f"run-{number}")])
        await artifacts.put(place, f"run-{number}", b"kept", "report", 0)
    await artifacts.put(place, "run-9", b"an orphan", "report", 0)
    clock.advance(ms=max(0, SystemClock().now() - await runs.now()) // 1_000 + GRACE_MS + 60_000)
    assert await artifacts.sweep(runs) == 1
    assert len(await keys(store)) == 5


@pytest.mark.contract("SEC-2")
async def test_what_is_written_again_while_a_sweep_looks_for_its_run_is_kept(tmp_path: Path) -> None:
    """A start that was lost an hour ago is sent again: its input has the same key."""
    store = FolderArtifacts(tmp_path)
    inner = MemoryStore()
    key = artifact_key(await place_of(inner), "run-1", "report", "1")
    await store.put(key, chunks_of(b"lost"))
    os.utime(tmp_path / key, (0, 0))

    class WrittenAgain(StoreProxy):
        async def find(self, query: Any) -> Any:
            await store.put(key, chunks_of(b"lost"))
            return await self.inner.find(query)

    assert await Artifacts(store).sweep(WrittenAgain(inner)) == 0
    os.utime(tmp_path / key, (0, 0))
    assert await Artifacts(store).sweep(inner) == 1
