"""Artifacts: bytes that are stored outside the store, and the references to them in histories.

An *artifact* is written by an activity, as a stream, and belongs to its run. Workflows and histories hold only a
reference: uri, kind, sha256, size, and when it expires. The bytes are checked against the reference when they are read.
Offloaded values (`Offload`) are kept in the same artifact store. If payloads are encrypted, artifacts are too: they
pass through the codec (`StreamCodec`), whose name ends the artifact's id, and the digest covers the stored bytes.

**Keys.** `{place}/artifacts/{run}/{kind}/{id}` and `{place}/values/{run}/{sha256}`, where `{run}` is the run's id and
`{place}` differs between stores with runs. So the key of every object names its owner, and deletion needs no list of
references: it deletes objects of runs that the store does not have, and artifacts older than the retention of their
kind.

**Nothing leaks.** An object is written before the commit that refers to it. If that commit is lost, the object stays as
long as its run. If there is no such run, the next `sweep` deletes the object once it is older than `GRACE_MS`, which is
how long a start may take.

An `ArtifactStore` keeps objects under keys: `FolderArtifacts` here, `ObjectArtifacts` for S3 and similar services.
"""

import asyncio
import os
import re
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from copy import copy
from datetime import timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar
from urllib.parse import quote, unquote

import msgspec
from msgspec import Struct

from holdfast.clock import Ids, SystemIds, SystemSecrets
from holdfast.core.events import ArtifactRef
from holdfast.core.instants import Instant
from holdfast.core.keys import fork_tag, retry_tag
from holdfast.errors import (
    ArtifactCorrupt,
    ArtifactMissing,
    InvalidInput,
    PayloadUnreadable,
    StoreFull,
    StoreUnavailable,
)
from holdfast.settings import ArtifactSettings
from holdfast.store.payloads import Payload, PayloadCodec, StreamCodec
from holdfast.store.port import RunQuery, Store
from holdfast.store.queries import pages

T = TypeVar("T")

CHUNK_BYTES = 1024 * 1024
"""How many bytes are read or written in one operation."""

SMALL_CHUNKS = 1_000
"""How many small chunks are combined into one write at most."""

GRACE_MS = 3_600_000
"""How long an object without a run is kept: the commit that refers to it may still be in progress."""

OFFLOAD_BYTES = 256 * 1024
"""From which size, by default, values are stored outside the store."""

RACES = 100
"""How often to try again when another process removes an empty folder at the same moment."""

SWEEP_RUNS = 500
FETCHES = 8
KIND = re.compile(r"[A-Za-z0-9_.-]{1,64}")
SCHEME = "artifact:"

_PLACE = "artifacts"
_PLACE_CHARS = 12
_IS_ARTIFACT = re.compile(r"[0-9a-f]+/artifacts/")
_PART_CHARS = 200
_TEMPORARY = ".incomplete"

Source = bytes | Iterable[bytes] | AsyncIterable[bytes] | Path
"""Where the bytes of an artifact come from."""


class StoredObject(Struct, frozen=True):
    """An object in an artifact store."""

    key: str
    """Its name in the store."""
    size_bytes: int
    """How many bytes it has."""
    modified_at: Instant
    """When it was written."""


class ArtifactStore(Protocol):
    """Stores objects under keys, which are paths. Every verb is safe to repeat."""

    async def put(self, key: str, chunks: AsyncIterator[bytes]) -> None:
        """Store an object, completely or not at all. It replaces an object with the same key, and is durable on
        return."""
        ...

    def read(self, key: str) -> AsyncIterator[bytes]:
        """Yield the bytes of an object. Raise `ArtifactMissing` if there is none."""
        ...

    async def read_part(self, key: str, offset: int, size_bytes: int) -> bytes:
        """Return some bytes of an object, fewer if it ends earlier. Raise `ArtifactMissing` if there is none."""
        ...

    async def stat(self, key: str) -> StoredObject | None:
        """Return the size and modification time of an object; None if there is none."""
        ...

    async def delete(self, key: str) -> None:
        """Delete an object, if it exists."""
        ...

    def list(self, prefix: str = "") -> AsyncIterator[StoredObject]:
        """Yield the objects whose keys begin with these parts, in any order, including leftovers of an interrupted
        `put`."""
        ...


class FolderArtifacts:
    """An `ArtifactStore` in a folder that belongs to the user who runs the node. Nodes on several machines share it."""

    def __init__(self, folder: str | Path, ids: Ids | None = None) -> None:
        self._folder = Path(folder)
        self._ids = ids or SystemIds()

    async def put(self, key: str, chunks: AsyncIterator[bytes]) -> None:
        """Write to a temporary file, synchronise it, and rename it."""
        path, temporary = self._path(key), self._path(f"{_TEMPORARY}/{self._ids.new_id()}")
        try:
            await self._write(path, temporary, chunks)
        except (FileNotFoundError, NotADirectoryError) as problem:
            raise StoreUnavailable(f"the folder of artifacts: {problem.strerror}") from problem

    async def _write(self, path: Path, temporary: Path, chunks: AsyncIterator[bytes]) -> None:
        file = await _in_thread(lambda: _created(temporary), lambda file: _discard(file, temporary))
        try:
            async for chunk in chunks:
                await _in_thread(partial(file.write, chunk))
            await _in_thread(lambda: _finish(file, temporary, path, self._folder))
        except BaseException:
            await _in_thread(lambda: _discard(file, temporary))
            raise

    async def read(self, key: str) -> AsyncIterator[bytes]:
        """Yield the file's bytes."""
        path = self._path(key)
        try:
            file = await _in_thread(lambda: path.open("rb"), lambda file: file.close())
        except (FileNotFoundError, NotADirectoryError):
            raise missing(key) from None
        try:
            while chunk := await _in_thread(lambda: file.read(CHUNK_BYTES)):
                yield chunk
        finally:
            file.close()

    async def read_part(self, key: str, offset: int, size_bytes: int) -> bytes:
        """Return some of the file's bytes."""
        path = self._path(key)

        def read() -> bytes:
            with path.open("rb") as file:
                file.seek(offset)
                return file.read(size_bytes)

        try:
            return await _in_thread(read)
        except (FileNotFoundError, NotADirectoryError):
            raise missing(key) from None

    async def stat(self, key: str) -> StoredObject | None:
        """Return the size and modification time of the file."""
        path = self._path(key)

        def look() -> StoredObject | None:
            try:
                found = path.stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            return StoredObject(key, found.st_size, found.st_mtime_ns // 1_000)

        return await _in_thread(look)

    async def delete(self, key: str) -> None:
        """Delete the file, and the folders that this leaves empty."""
        path = self._path(key)

        def remove() -> None:
            path.unlink(missing_ok=True)
            with suppress(OSError):  # it is not empty
                for folder in path.parents:
                    if folder == self._folder:
                        break
                    folder.rmdir()

        await _in_thread(remove)

    async def list(self, prefix: str = "") -> AsyncIterator[StoredObject]:
        """Yield the files, folder by folder."""
        top = self._path(prefix) if prefix else self._folder
        waiting = [top]
        while waiting:
            folder = waiting.pop()
            files, folders = await _in_thread(partial(_entries, folder))
            waiting += folders
            for path, size, modified_at in files:
                yield StoredObject(path.relative_to(self._folder).as_posix(), size, modified_at)

    def _path(self, key: str) -> Path:
        return self._folder.joinpath(*check_key(key).split("/"))


def _entries(folder: Path) -> tuple[list[tuple[Path, int, Instant]], list[Path]]:
    files: list[tuple[Path, int, Instant]] = []
    folders: list[Path] = []
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(Path(entry.path))
            else:
                with suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    files.append((Path(entry.path), found.st_size, found.st_mtime_ns // 1_000))
    return files, folders


def _created(path: Path) -> BinaryIO:
    return _in_folder(path.parent, lambda: open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)))


def _in_folder(folder: Path, work: Callable[[], T]) -> T:
    """Create the folder and do something in it; again if another process has just removed it as empty."""
    for _ in range(RACES - 1):
        with suppress(FileNotFoundError):
            _make_private(folder)
            return work()
    _make_private(folder)
    return work()


def _make_private(folder: Path) -> None:
    """Create a folder, and its missing parents, for this user only."""
    if not folder.exists():
        _make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def _discard(file: BinaryIO, temporary: Path) -> None:
    file.close()
    temporary.unlink(missing_ok=True)


def _finish(file: BinaryIO, temporary: Path, path: Path, top: Path) -> None:
    """Make a file durable under its final name, including the folders above it."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    _in_folder(path.parent, lambda: temporary.replace(path))
    for folder in (path.parent, *path.parent.parents):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        if folder == top:
            break


async def _in_thread(work: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
    """Do something in a thread. A cancelled caller waits for the thread, whose file must not be closed while in use.

    `undo` gets the result that a cancelled caller does not get.
    """
    doing = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        while not doing.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([doing])
        # The caller no longer waits for the result, nor for a failure.
        if not doing.cancelled() and doing.exception() is None and undo is not None:
            undo(doing.result())
        raise
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as problem:
        kind = StoreFull if problem.errno in (28, 122) else StoreUnavailable  # ENOSPC, EDQUOT
        raise kind(f"the folder of artifacts: {problem.strerror}") from problem


# --- keys and references -----------------------------------------------------------------------------------------


def check_key(key: str) -> str:
    """Return a valid key; refuse one with empty parts, or with parts that lead elsewhere."""
    parts = key.split("/")
    if not all(parts) or any(part in (".", "..") or "\0" in part for part in parts):
        raise InvalidInput(f"{key!r} is not the key of an artifact", field="key")
    return key


def missing(key: str) -> ArtifactMissing:
    """Return the error of an object that does not exist."""
    return ArtifactMissing(f"there is no artifact {key!r}: it has expired, or was deleted", uri=SCHEME + key)


def run_path(run_id: str) -> str:
    """Return a run's id as parts of a key, each short enough for the name of a folder."""
    text = quote(run_id, safe="")
    parts = [text[start : start + _PART_CHARS] for start in range(0, len(text), _PART_CHARS)]
    return "/".join([*(f"+{part}" for part in parts[:-1]), f"={parts[-1]}"])


def run_of_key(key: str) -> str | None:
    """Return the run to which an object belongs, or None if it belongs to no run."""
    text = ""
    for part in key.split("/")[2:]:
        text += part[1:]
        if part[:1] == "=":
            return unquote(text)
    return None


def runs_of_artifacts(uris: Iterable[str]) -> set[str]:
    """Return the runs that created these artifacts."""
    owners = {run_of_key(uri.removeprefix(SCHEME)) for uri in uris if uri.startswith(SCHEME)}
    return {run_id for run_id in owners if run_id is not None}


async def place_of(store: Store) -> str:
    """Return the prefix of a store's object keys. It is as old as the store, and part of its backups."""
    key = await store.get_key(_PLACE) or await store.put_key(_PLACE, SystemSecrets().new_secret())
    return key[:_PLACE_CHARS]


def artifact_key(place: str, run_id: str, kind: str, artifact_id: str) -> str:
    """Return the key of a run's artifact."""
    for name in (kind, artifact_id):
        if not KIND.fullmatch(name) or name in (".", ".."):
            raise InvalidInput(
                f"{name!r}: kinds and ids of artifacts are 1 to 64 letters, digits and _ . -", field="kind"
            )
    return f"{place}/artifacts/{run_path(run_id)}/{kind}/{artifact_id}"


def _kind_of(key: str) -> str | None:
    return key.split("/")[-2] if _IS_ARTIFACT.match(key) else None


def key_of(artifact: ArtifactRef) -> str:
    """Return the key of a referenced artifact."""
    scheme, key = artifact.uri[: len(SCHEME)], artifact.uri[len(SCHEME) :]
    if scheme != SCHEME or not _IS_ARTIFACT.match(key):
        raise InvalidInput(f"{artifact.uri!r} is not the address of an artifact of this installation", field="uri")
    return key


class Artifacts:
    """Where an app keeps artifacts and large values, and for how long."""

    def __init__(
        self,
        store: ArtifactStore | str | Path,
        *,
        offload_bytes: int | None = OFFLOAD_BYTES,
        retention: Mapping[str, timedelta] | None = None,
        ids: Ids | None = None,
    ) -> None:
        """`store` may be an address: `file:///var/lib/shop`, `s3://bucket/prefix`.

        Values of more than `offload_bytes` are kept there instead of in the store; None keeps them in the store.
        `retention` is how long artifacts of a kind are kept; other kinds stay as long as their run.
        """
        self.store = open_artifacts(store) if isinstance(store, str | Path) else store
        self._stream_codecs: tuple[StreamCodec, ...] = ()
        self.offload_bytes = offload_bytes
        self.retention = dict(retention or {})
        self._ids = ids or SystemIds()
        periods: Mapping[str, Any] = self.retention
        for kind, kept in periods.items():
            if not KIND.fullmatch(kind) or not isinstance(kept, timedelta) or kept <= timedelta():
                raise InvalidInput("retention is a dict of kinds and how long they are kept", field="retention")
        if offload_bytes is not None and (type(offload_bytes) is not int or offload_bytes < 1):
            raise InvalidInput(f"offload_bytes is a whole number from 1, not {offload_bytes!r}", field="offload_bytes")

    @classmethod
    def from_settings(cls, settings: ArtifactSettings) -> "Artifacts | None":
        """Return the artifacts that the settings name, or None if they name no artifact store."""
        if not settings.store:
            return None
        try:
            kept = {kind: timedelta(days=days) for kind, days in settings.retention_days.items()}
        except (OverflowError, ValueError) as problem:
            raise InvalidInput(f"retention_days: {problem}", field="artifacts.retention_days") from problem
        return cls(settings.store, offload_bytes=settings.offload_bytes or None, retention=kept)

    @property
    def codecs(self) -> "tuple[PayloadCodec, ...]":
        """The codec that stores large values there, unless they stay in the store."""
        return () if self.offload_bytes is None else (Offload(self.store, self.offload_bytes),)

    def passed_through(self, codecs: "Iterable[PayloadCodec | StreamCodec]") -> "Artifacts":
        """Return the same artifacts, passed through those of the codecs that accept streams."""
        passed = copy(self)
        passed._stream_codecs = tuple(each for each in codecs if isinstance(each, StreamCodec))
        return passed

    async def put(self, place: str, run_id: str, source: Source, kind: str, now: Instant) -> ArtifactRef:
        """Store an artifact of a run, and return its reference, with the digest of the stored bytes."""
        artifact_id = self._ids.new_id()
        key = artifact_key(place, run_id, kind, artifact_id)
        digest, size = sha256(), 0

        async def measured() -> AsyncIterator[bytes]:
            nonlocal size
            async for chunk in _chunks(source):
                size += len(chunk)
                yield chunk

        stored: AsyncIterator[bytes] = measured()
        for each in self._stream_codecs:
            encoded_key = artifact_key(place, run_id, kind, f"{artifact_id}.{each.name}")
            encoded = each.encode_stream(encoded_key, stored)
            if encoded is not None:
                key, stored = encoded_key, encoded
                break

        async def digested() -> AsyncIterator[bytes]:
            async for chunk in stored:
                digest.update(chunk)
                yield chunk

        await self.store.put(key, digested())
        kept = self.retention.get(kind)
        expires_at = None if kept is None else now + kept // timedelta(microseconds=1)
        return ArtifactRef(SCHEME + key, kind, digest.hexdigest(), size, expires_at)

    async def open(self, artifact: ArtifactRef) -> AsyncIterator[bytes]:
        """Yield the bytes of an artifact. `ArtifactCorrupt` is raised, at the end, if they are not what was stored."""
        digest, size, key = sha256(), 0, key_of(artifact)

        async def digested() -> AsyncIterator[bytes]:
            async with aclosing(self.store.read(key)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    digest.update(chunk)
                    yield chunk

        async with aclosing(digested()) as stored, aclosing(self._decoded(key, stored)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                size += len(chunk)
                yield chunk
        is_same = artifact.sha256 in (None, digest.hexdigest()) and artifact.size_bytes in (None, size)
        if not is_same:
            raise ArtifactCorrupt(f"artifact {artifact.uri!r} is not what was stored: {size} bytes", uri=artifact.uri)

    def _decoded(self, key: str, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Return an artifact as it was before the codec that its key names encoded it."""
        name = key.rpartition("/")[2].partition(".")[2]
        if not name:
            return chunks
        for each in self._stream_codecs:
            if each.name == name:
                return each.decode_stream(key, chunks)
        raise PayloadUnreadable(
            f"artifact {key!r} has passed through the codec {name!r}, which this process does not have"
        )

    async def delete_run(self, store: Store, run_id: str) -> int:
        """Delete everything that belongs to a run of this store, and return the number of objects.

        Artifacts that descendant runs refer to are left for the sweep after the last of those runs.
        """
        count, place = 0, await place_of(store)
        for top in ("values",) if await _has_descendants(store, run_id) else ("artifacts", "values"):
            async for found in self.store.list(f"{place}/{top}/{run_path(run_id)}"):
                await self.store.delete(found.key)
                count += 1
        return count

    async def sweep(self, store: Store) -> int:
        """Delete what no run in this store owns, and what has expired; return the number of objects."""
        now, count = await store.now(), 0
        async for found in self.store.list(_TEMPORARY):  # leftovers of interrupted writes, for any store
            if found.modified_at < now - GRACE_MS * 1_000:
                await self.store.delete(found.key)
                count += 1
        waiting: dict[str, list[str]] = {}
        async for found in self.store.list(await place_of(store)):
            kept = self.retention.get(_kind_of(found.key) or "")
            run_id = run_of_key(found.key)
            if kept is not None and found.modified_at < now - kept // timedelta(microseconds=1):
                await self.store.delete(found.key)
                count += 1
            elif run_id is not None and found.modified_at < now - GRACE_MS * 1_000:
                waiting.setdefault(run_id, []).append(found.key)
                if len(waiting) >= SWEEP_RUNS:
                    count += await self._delete_orphans(store, waiting, now)
                    waiting = {}
        return count + await self._delete_orphans(store, waiting, now)

    async def _delete_orphans(self, store: Store, waiting: Mapping[str, Sequence[str]], now: Instant) -> int:
        """Delete the objects of runs that do not exist, unless they have been written again in the meantime."""
        if not waiting:
            return 0
        there: set[str] = set()
        query = RunQuery(run_ids=tuple(waiting), limit=len(waiting))
        async for page in pages(store.find, query, lambda head: head.run_id):  # a store may return fewer at a time
            there |= {head.run_id for head in page} | set(page.unreadable)
        count = 0
        for run_id in waiting.keys() - there:
            is_referred_to = await _has_descendants(store, run_id)
            for key in waiting[run_id]:
                if is_referred_to and _kind_of(key) is not None:
                    continue
                again = await self.store.stat(key)
                if again is not None and again.modified_at < now - GRACE_MS * 1_000:
                    await self.store.delete(key)
                    count += 1
        return count


async def _has_descendants(store: Store, run_id: str) -> bool:
    """Return whether there are runs that began with this run's recorded steps, and so with its artifacts."""
    tags = (fork_tag(run_id), retry_tag(run_id))
    return any([await store.find(RunQuery(tag=tag, limit=1)) for tag in tags])


def open_artifacts(address: str | Path) -> ArtifactStore:
    """Return the artifact store at an address: a folder, or a bucket."""
    if isinstance(address, Path):
        return FolderArtifacts(address)
    scheme, separator, rest = address.partition("://")
    if separator and scheme == "file" and rest.startswith("/") and len(rest) > 1:
        return FolderArtifacts(unquote(rest))
    if separator and scheme in ("s3", "gs", "az"):
        from holdfast.store.object_artifacts import ObjectArtifacts  # the package is an extra

        return ObjectArtifacts.at(address)
    raise InvalidInput("artifacts are kept at file:///absolute/folder or s3://bucket/prefix", field="artifacts")


async def _chunks(source: Any) -> AsyncIterator[bytes]:
    """Yield the bytes of a source, in chunks of a bounded size."""
    if isinstance(source, bytes | bytearray | memoryview):
        for chunk in cut(source):
            yield chunk
    elif isinstance(source, Path):
        with await asyncio.to_thread(source.open, "rb") as file:
            while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
                yield chunk
    elif isinstance(source, AsyncIterable | Iterable) and not isinstance(source, str):
        small, size = list[bytes](), 0  # each chunk costs a call of the store, so small ones are combined
        async for given in _each(source):
            for chunk in cut(given):
                small.append(chunk)
                size += len(chunk)
                if size >= CHUNK_BYTES // 2 or len(small) >= SMALL_CHUNKS:
                    yield b"".join(small)
                    small, size = [], 0
        if small:
            yield b"".join(small)
    else:
        raise InvalidInput(f"an artifact is made of bytes, chunks of them or a Path, not {type(source).__qualname__}")


async def _each(source: AsyncIterable[Any] | Iterable[Any]) -> AsyncIterator[Any]:
    if isinstance(source, AsyncIterable):
        async for given in source:
            yield given
    else:
        for given in source:
            yield given


def cut(data: Any) -> Iterator[bytes]:
    """Yield bytes in chunks of a bounded size."""
    try:
        view = memoryview(data).cast("B")
    except TypeError:
        raise InvalidInput(f"a chunk of an artifact is bytes, not {type(data).__qualname__}") from None
    for start in range(0, len(view), CHUNK_BYTES):
        yield bytes(view[start : start + CHUNK_BYTES])


# --- large values ------------------------------------------------------------------------------------------------


class _Reference(Struct, frozen=True):
    """What is stored in place of a large value."""

    place: str
    sha256: str
    size_bytes: int


class Offload:
    """A `PayloadCodec` that puts large values into an artifact store, under their digest, and stores references.

    It is the last codec, so what it puts there is encrypted if there are keys.
    """

    name = "offload"

    def __init__(self, artifacts: ArtifactStore, most_bytes: int) -> None:
        self._artifacts = artifacts
        self._most_bytes = most_bytes
        self._place = ""

    async def open(self, store: Store) -> None:
        """Determine where the values of this store are kept."""
        self._place = await place_of(store)

    async def encode(self, payloads: Sequence[Payload]) -> list[bytes | None]:
        """Put each value over the limit into the artifact store, and return a reference to it."""
        made: list[bytes | None] = [None] * len(payloads)
        large = [place for place, payload in enumerate(payloads) if self._is_large(payload)]

        async def keep(place: int) -> None:
            payload = payloads[place]
            reference = _Reference(self._place, sha256(payload.data).hexdigest(), len(payload.data))
            await self._artifacts.put(_value_key(payload.scope, reference), _chunks(payload.data))
            made[place] = msgspec.json.encode(reference)

        await _few_at_once([keep(place) for place in large])
        return made

    def _is_large(self, payload: Payload) -> bool:
        return len(payload.data) > self._most_bytes and payload.is_of_run

    async def decode(self, payloads: Sequence[Payload]) -> list[bytes | str]:
        """Fetch each value, and verify that it is the one that was put."""
        made: list[bytes | str] = [""] * len(payloads)

        async def fetch(place: int) -> None:
            scope, data = payloads[place]
            try:
                reference = msgspec.json.decode(data, type=_Reference)
                parts = [chunk async for chunk in self._artifacts.read(_value_key(scope, reference))]
            except msgspec.MsgspecError:
                made[place] = "the reference to its content cannot be read"
                return
            except ArtifactMissing as problem:
                made[place] = problem.message
                return
            value = b"".join(parts)
            is_same = sha256(value).hexdigest() == reference.sha256
            made[place] = value if is_same else "its content is not what was stored"

        await _few_at_once([fetch(place) for place in range(len(payloads))])
        return made

    def fingerprint(self, scope: str, sha256: str) -> str:
        """Return the digest unchanged: it covers the value, wherever that is kept."""
        return sha256


def _value_key(run_id: str, reference: _Reference) -> str:
    if not re.fullmatch("[0-9a-f]{64}", reference.sha256) or not re.fullmatch("[0-9a-f]+", reference.place):
        raise ArtifactMissing("the reference to a value is malformed")
    return f"{reference.place}/values/{run_path(run_id)}/{reference.sha256}"


async def _few_at_once(work: Sequence[Any]) -> None:
    """Await all, a few at a time. The first error is raised after the others that were running have ended."""
    for start in range(0, len(work), FETCHES):
        results = await asyncio.gather(*work[start : start + FETCHES], return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                for unbegun in work[start + FETCHES :]:
                    unbegun.close()
                raise result
