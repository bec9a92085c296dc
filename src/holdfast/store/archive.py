"""The archive: histories of finished runs, kept as files before retention deletes them from the store.

An *object* of the archive holds many runs of one tenant, as JSON Lines compressed with gzip. Each run is a separate
gzip member: `{"run": …}` in the first line, then one event in each line, as the store has it. So `zcat` shows a whole
object, and one run can be read by its offset and size without the others. The store records these (`ArchivedRun`) in
the commit that deletes the run, and the last member of an object repeats them (`{"index": …}`), for an archive that has
lost its store.

**Nothing is lost.** An object is durable before its runs are deleted. If the process ends in between, the runs are
still in the store and are archived again: the archive may have them twice, and the store knows the last location.

**Keys.** `{place}-archive/{tenant}/{day}/{digest}.jsonl.gz`, where `{place}` differs between stores, the day is that on
which the first of its runs ended, and the digest covers the runs: archiving the same runs again replaces the object.

**Sealed values stay sealed**: they are read from the store unchanged, and opened when an archived run is shown. Only
values that are stored outside the store (offloaded) are fetched, because they are deleted with their run.
"""

import asyncio
import gzip
import logging
import zlib
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec import Raw, Struct

from holdfast.core import codec
from holdfast.core.bus import first_missing
from holdfast.core.events import Event
from holdfast.core.instants import Instant
from holdfast.errors import ArtifactCorrupt, ArtifactMissing, HistoryGap, StoreCorrupt
from holdfast.store.artifacts import ArtifactStore, open_artifacts, place_of
from holdfast.store.payloads import SealingStore
from holdfast.store.port import ArchivedRun, RunHead, Store

FORMAT = 1
"""The version of the archive's format."""

OBJECT_BYTES = 8 * 1024 * 1024
"""The approximate maximum size of a compressed object; one run is never divided."""

PAGE_EVENTS = 1_000
PAGE_BYTES = 4 * 1024 * 1024
LEVEL = 6

logger = logging.getLogger("holdfast.retention")


class ArchivedHead(Struct, frozen=True, kw_only=True):
    """The facts about an archived run, in its first line."""

    run_id: str
    tenant: str
    project: str
    environment: str
    plan_id: str
    plan_version: str
    run_request_id: str
    parent_run_id: str | None
    reference_key: str | None
    tags: tuple[str, ...]
    status: str
    version: int
    created_at: Instant
    finished_at: Instant
    format: int = FORMAT


class ArchivedHistory(Struct, frozen=True):
    """An archived run with its whole history."""

    head: ArchivedHead
    events: list[Event]


class _FirstLine(Struct, frozen=True):
    run: ArchivedHead


class _Line(Struct, frozen=True, kw_only=True):
    """One event, as the store has it."""

    run_seq: int
    event_id: str
    event_type: str
    step_id: str | None
    engine_attempt_id: int | None
    logical_attempt_id: int | None
    data: Raw
    idempotency_key: str
    emitted_at: Instant
    persisted_at: Instant
    adapter_version: str
    engine_run_ref: Raw
    caused_by_signal_id: str | None
    parent_event_id: str | None
    schema_version: int


_lines = msgspec.json.Decoder(_Line)
_first_lines = msgspec.json.Decoder(_FirstLine)
_PLAIN = [field for field in _Line.__struct_fields__ if field not in ("data", "engine_run_ref")]


class Archive:
    """The archive for the runs of one store."""

    def __init__(self, address: str | Path | ArtifactStore, store: Store) -> None:
        """`address` is a folder or a bucket: `file:///var/lib/shop/archive`, `s3://bucket/prefix`."""
        self._objects = open_artifacts(address) if isinstance(address, str | Path) else address
        self._sealing = store if isinstance(store, SealingStore) else None
        self._store = store.inner if isinstance(store, SealingStore) else store
        self._place = ""

    async def put(self, heads: Sequence[RunHead]) -> list[ArchivedRun]:
        """Archive finished runs, and return the location of each. They are durable when this returns."""
        archived: list[ArchivedRun] = []
        for tenant in sorted({head.tenant for head in heads}):
            waiting = [head for head in heads if head.tenant == tenant]
            while waiting:
                made, waiting = await self._put_object(tenant, waiting)
                archived += made
        return archived

    async def read(self, run: ArchivedRun) -> ArchivedHistory:
        """Return an archived run. Values that cannot be opened stay sealed."""
        return await self._read(run, 0, run.version)

    async def read_events(self, run: ArchivedRun, after: int, limit: int) -> list[Event]:
        """Return some events of an archived run, starting after this one."""
        return (await self._read(run, after, limit)).events

    async def export(self, run: ArchivedRun) -> bytes:
        """Return an archived run as JSON Lines, as they are in the archive."""
        return await self._lines(run)

    async def delete_tenant(self, tenant: str) -> int:
        """Delete everything archived for a tenant, and return the number of objects."""
        count = 0
        async for found in self._objects.list(await self._folder(tenant)):
            await self._objects.delete(found.key)
            count += 1
        return count

    # --- writing

    async def _put_object(self, tenant: str, heads: list[RunHead]) -> tuple[list[ArchivedRun], list[RunHead]]:
        """Archive as many of these runs as fit into one object; return their locations, and the remaining runs."""
        members: list[bytes] = []
        places: list[tuple[RunHead, int, int]] = []
        size, seen = 0, 0
        for head in heads:
            seen += 1
            try:
                member = await self._member(head)
            except (StoreCorrupt, HistoryGap):
                logger.exception("run %s cannot be archived and is not deleted", head.run_id)
                continue
            members.append(member)
            places.append((head, size, len(member)))
            size += len(member)
            if size >= OBJECT_BYTES:
                break
        if not places:
            return [], []
        digest = sha256()
        for head, _, _ in places:
            digest.update(f"{head.run_id}\0{head.created_at}\0{head.version}\0".encode())
        day = datetime.fromtimestamp((places[0][0].finished_at or 0) // 1_000_000, UTC).date().isoformat()
        key = f"{await self._folder(tenant)}/{day}/{digest.hexdigest()[:32]}.jsonl.gz"
        runs = [_archived(head, key, offset, length) for head, offset, length in places]
        members.append(_compressed([msgspec.json.encode({"index": runs, "format": FORMAT})]))

        async def chunks() -> AsyncIterator[bytes]:
            for member in members:
                yield member

        await self._objects.put(key, chunks())
        return runs, heads[seen:]

    async def _member(self, head: RunHead) -> bytes:
        """Return one run as a gzip member. Raise `HistoryGap` if events are missing: it could not be read back."""
        shared = {field: getattr(head, field) for field in ArchivedHead.__struct_fields__ if field != "format"}
        lines, after = [msgspec.json.encode(_FirstLine(ArchivedHead(**shared)))], 0
        while page := await self._store.read_events(head.run_id, after, PAGE_EVENTS, PAGE_BYTES):
            _check_whole(head, page, after)
            after = page[-1].run_seq
            whole = page if self._sealing is None else await self._sealing.fetched(page)
            lines += [_line(event) for event in whole]
            await asyncio.sleep(0)
        if after < head.version:
            _check_whole(head, (), after)
        return await asyncio.to_thread(_compressed, lines)

    async def _folder(self, tenant: str) -> str:
        if not self._place:
            self._place = await place_of(self._store)
        return f"{self._place}-archive/{quote(tenant, safe='') or '='}"

    # --- reading

    async def _lines(self, run: ArchivedRun) -> bytes:
        try:
            data = await self._objects.read_part(run.object_key, run.offset, run.size_bytes)
        except ArtifactMissing as problem:
            raise ArtifactMissing(
                f"run {run.run_id} was archived in {run.object_key!r}, which is not there any more", run_id=run.run_id
            ) from problem
        try:
            return await asyncio.to_thread(gzip.decompress, data)
        except (OSError, EOFError, ValueError, zlib.error) as problem:
            raise _corrupt(run) from problem

    async def _read(self, run: ArchivedRun, after: int, limit: int) -> ArchivedHistory:
        data = await self._lines(run)
        history = await asyncio.to_thread(_parsed, run, data, after, limit)
        if self._sealing is None:
            return history
        return ArchivedHistory(history.head, await self._sealing.opened_events(history.events, history.head))


def _parsed(run: ArchivedRun, data: bytes, after: int, limit: int) -> ArchivedHistory:
    """Return some events of a run as they are in the archive."""
    first, *rest = data.splitlines() or [b""]
    try:
        head = _first_lines.decode(first).run
        events = [_event(head.run_id, _lines.decode(line)) for line in rest[after : after + limit]]
    except (msgspec.MsgspecError, ValueError) as problem:
        raise _corrupt(run) from problem
    if (head.run_id, head.created_at, len(rest)) != (run.run_id, run.created_at, run.version):
        raise _corrupt(run)
    return ArchivedHistory(head, events)


def _check_whole(head: RunHead, page: Sequence[Event], after: int) -> None:
    """Refuse events with a gap after this one or between them."""
    missing = first_missing(page, after + 1) if page else after + 1
    if missing is not None:
        raise HistoryGap(f"run {head.run_id}: event {missing} is missing", run_id=head.run_id, run_seq=missing)


def _archived(head: RunHead, key: str, offset: int, length: int) -> ArchivedRun:
    return ArchivedRun(
        run_id=head.run_id,
        tenant=head.tenant,
        project=head.project,
        environment=head.environment,
        plan_id=head.plan_id,
        plan_version=head.plan_version,
        status=head.status,
        version=head.version,
        created_at=head.created_at,
        finished_at=head.finished_at or 0,
        object_key=key,
        offset=offset,
        size_bytes=length,
    )


def _line(event: Event) -> bytes:
    plain: dict[str, Any] = {field: getattr(event, field) for field in _PLAIN}
    body, ref = Raw(codec.encode_body(event.data).encode()), Raw(codec.encode_ref(event.engine_run_ref).encode())
    return msgspec.json.encode(_Line(**plain, data=body, engine_run_ref=ref))


def _event(run_id: str, line: _Line) -> Event:
    plain: dict[str, Any] = {field: getattr(line, field) for field in _PLAIN}
    body = codec.decode_body(line.event_type, line.schema_version, bytes(line.data))
    return Event(run_id=run_id, **plain, data=body, engine_run_ref=codec.decode_ref(bytes(line.engine_run_ref)))


def _compressed(lines: Sequence[bytes]) -> bytes:
    return gzip.compress(b"\n".join([*lines, b""]), LEVEL, mtime=0)


def _corrupt(run: ArchivedRun) -> ArtifactCorrupt:
    return ArtifactCorrupt(
        f"run {run.run_id} is not in the archive as it was stored: {run.object_key!r}", run_id=run.run_id
    )
