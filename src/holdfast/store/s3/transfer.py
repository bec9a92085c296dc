"""Export and import of complete runs of a bucket.

A run is imported in the order in which one is created: first its request, which names it, then segments with its older
events, its head last. An interrupted import is repeated.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from msgspec.structs import replace

from holdfast.clock import Secrets
from holdfast.core.audit import AuditEntry
from holdfast.core.instants import Instant
from holdfast.store import port
from holdfast.store.s3.bucket import Bucket
from holdfast.store.s3.create import RequestRecord
from holdfast.store.s3.documents import Objects
from holdfast.store.s3.head import StoredRun, encode_run
from holdfast.store.s3.heads import Heads
from holdfast.store.s3.mirror import Held, Mirror
from holdfast.store.s3.retention import Retention
from holdfast.store.s3.streams import StoredStreams, StreamParts
from holdfast.store.transfer import WholeRun

ALL = 1 << 40


class S3Transfer:
    """The `Transfer` of a bucket."""

    def __init__(
        self,
        bucket: Bucket,
        mirror: Mirror,
        heads: Heads,
        objects: Objects,
        retention: Retention,
        secrets: Secrets,
        now: Callable[[], Awaitable[Instant]],
        settle: Callable[[Instant], Awaitable[None]],
    ) -> None:
        self._bucket = bucket
        self._parts = StreamParts(bucket)
        self._mirror = mirror
        self._heads = heads
        self._objects = objects
        self._retention = retention
        self._secrets = secrets
        self._now = now
        self._settle = settle

    async def settle(self) -> None:
        """Relay what runs send to each other, and accept the signals in the bucket."""
        await self._settle(await self._now())

    async def read_runs(self, run_ids: Sequence[str]) -> list[WholeRun | None]:
        """Return complete runs."""
        await self._mirror.follow(await self._now())
        held = await asyncio.gather(*map(self._mirror.fetch, run_ids))
        return list(await asyncio.gather(*map(self._whole, held)))

    async def _whole(self, held: Held | None) -> WholeRun | None:
        if held is None:
            return None
        run = held.run
        return WholeRun(
            head=run.head,
            request_key=run.request_key,
            input_sha256=run.input_sha256,
            plan_sha256=run.plan_sha256,
            last_accepted_at=run.last_accepted_at,
            events=tuple(await self._heads.events(run, 0, ALL)),
            messages=tuple(run.messages.values()),
            signals=tuple(run.signals),
            acceptances=tuple(run.acceptances.values()),
            waits=tuple(run.waits.values()),
            tasks=tuple(run.tasks.values()),
            records=tuple(run.records.values()),
            work=dict(run.work),
            letters=tuple(run.letters.values()),
            attributes=run.attributes,
            has_place=run.admission is not None and not run.is_finished,
            streams=await self._parts.whole(run.head.run_id, run.streams),
        )

    async def write_runs(self, runs: Sequence[WholeRun]) -> None:
        """Write runs unchanged."""
        now = await self._now()
        await self._mirror.follow(now)
        first = self._mirror.next_order(now)
        await asyncio.gather(*(self._write(run.released(now), first + place) for place, run in enumerate(runs)))
        await self._heads.announce()

    async def _write(self, whole: WholeRun, order: int) -> None:
        there = await self._mirror.fetch(whole.head.run_id)
        if there is not None:
            await self._heads.delete(there.run, ())
        run = stored_run(whole, order if there is None else there.run.order)
        mark = self._secrets.new_secret()[:24]
        while (cut := run.with_segment(mark)) is not None:
            segment, events = cut
            await self._bucket.put(segment.key, events)
        for key, chunks in run.streams.cut(whole.head.run_id, mark):
            await self._bucket.put(key, chunks)
        record = RequestRecord(whole.head.run_id, run.input_sha256, encode_run(run.copy(), mark).decode(), mark)
        await self._bucket.put(f"requests/{run.request_key}", msgspec.json.encode(record))
        await self._heads.create(run)

    async def write_audit(self, entries: Sequence[AuditEntry]) -> None:
        """Write entries of the audit log with their original times: an existing entry is written again."""
        await self._objects.append_audit(entries)

    async def write_archived(self, runs: Sequence[port.ArchivedRun]) -> None:
        """Write archive locations of deleted runs."""
        await self._retention.note_archived(runs)


def stored_run(whole: WholeRun, order: int) -> StoredRun:
    """Return a run as its head holds it."""
    run = StoredRun.__new__(StoredRun)
    run.order, run.segments, run.older, run.marks, run.writes = order, (), None, (), 0
    run.outgoing, run.sent, run.seen, run.started_by, run.audit, run.admission = (), 0, {}, None, (), None
    run.request_key, run.input_sha256, run.plan_sha256 = whole.request_key, whole.input_sha256, whole.plan_sha256
    run.head, run.attributes = whole.head, whole.attributes
    run.events = list(whole.events)
    run._by_key = {event.idempotency_key: event for event in run.events}
    run.messages = {message.signal_id: (due_at, message) for due_at, message in whole.messages}
    run.signals = list(whole.signals)
    run.acceptances = {(each.signal_name, each.signal_id): each for each in whole.acceptances}
    run.last_accepted_at = whole.last_accepted_at
    run.received = [signal.received_at or signal.accepted_at for signal in whole.signals]
    run.waits = {wait.step_id: wait for wait in whole.waits}
    run.tasks = {task.task_id: task for task in whole.tasks}
    run.records = {(each.activity_name, each.step_id, each.idempotency_key): each for each in whole.records}
    run.work = {
        step_id: replace(work, visible_at=0) if work.job is None else work for step_id, work in whole.work.items()
    }
    run.letters = {letter.letter_id: letter for letter in whole.letters}
    run._streams = StoredStreams()
    for stream in whole.streams:
        run.streams.add_whole(stream)
    return run
