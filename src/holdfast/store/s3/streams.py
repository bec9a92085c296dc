"""Streams in a bucket: their last chunks are in the head of their run, earlier ones in *parts*.

Appending replaces the head, so what fences a turn also fences a stream, and an append that was stored but not answered
is recognised. A head with many chunks moves them into a part, an object that never changes and is written before the
head that names it. Parts are stored next to the segments of the history, and are deleted with them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
from msgspec import Raw, Struct

from holdfast.core.instants import Instant
from holdfast.core.keys import storage_key
from holdfast.core.streams import (
    Appended,
    StreamAppend,
    StreamHead,
    StreamPage,
    StreamRead,
    StreamSegment,
    StreamWriter,
    WholeStream,
)
from holdfast.errors import StoreCorrupt
from holdfast.limits import Limits
from holdfast.store import decisions, port
from holdfast.store.memory.streams import Streams, bounded
from holdfast.store.s3.bucket import Bucket
from holdfast.store.streams import EMPTY, PAGE_SEGMENTS

HEAD_BYTES = 64 * 1024
"""How many bytes of streams a head holds before it moves them into a part."""

PART_BYTES = 1024 * 1024
"""How many bytes a part has at most, except for its last segment."""

SEGMENT_BYTES = 100
"""The approximate size of a segment without its chunks."""

PARTS_KEPT = 16
"""How many parts a process caches. They never change."""

FenceOf = Callable[[str], decisions.StreamFence]
"""Returns what an append by a step is checked against."""


class SegmentRecord(Struct, frozen=True, array_like=True, gc=False):
    """A segment in its stored form."""

    first_seq: int
    count: int
    step_id: str
    attempt: int
    at: Instant
    restarted_from: int | None
    body: Raw


class WriterRecord(Struct, frozen=True, array_like=True, gc=False):
    """The last attempt of a step that wrote to a stream, in its stored form."""

    attempt: int
    epoch: int
    first_seq: int
    count: int


class Part(Struct, frozen=True, array_like=True, gc=False):
    """The chunks of a stream that are in a separate object, and the last part of its key."""

    first: int
    last: int
    file: str


class StreamRecord(Struct, frozen=True, omit_defaults=True):
    """A stream as the head of its run holds it."""

    head: StreamHead
    writers: dict[str, WriterRecord] = {}
    parts: tuple[Part, ...] = ()
    segments: tuple[SegmentRecord, ...] = ()


class StoredStreams(Streams):
    """The streams of one run, without the chunks that are in parts."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: dict[str, tuple[Part, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self._heads or self._writers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoredStreams) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def copy(self) -> "StoredStreams":
        """Return streams that can be changed while these stay as they are."""
        made = StoredStreams()
        made._heads, made._writers, made._parts = dict(self._heads), dict(self._writers), dict(self._parts)
        made._segments = {name: list(segments) for name, segments in self._segments.items()}
        return made

    # --- as the head holds them

    def records(self) -> dict[str, StreamRecord]:
        """Return the streams in their stored form, including one whose writer has written nothing yet."""
        writers: dict[str, dict[str, WriterRecord]] = {}
        for (name, step_id), by in self._writers.items():
            record = WriterRecord(by.attempt, by.epoch, by.first_seq, by.count)
            writers.setdefault(name, {})[step_id] = record
        return {
            name: StreamRecord(
                self.head_of(name),
                writers.get(name, {}),
                self._parts.get(name, ()),
                tuple(map(_to_record, self._segments.get(name, ()))),
            )
            for name in (*self._heads, *(name for name in writers if name not in self._heads))
        }

    def add(self, run_id: str, name: str, record: StreamRecord) -> None:
        """Add a stream from its stored form."""
        if record.head != EMPTY:
            self._heads[name] = record.head
        for step_id, by in record.writers.items():
            self._writers[name, step_id] = StreamWriter(
                attempt=by.attempt, epoch=by.epoch, first_seq=by.first_seq, count=by.count
            )
        if record.parts:
            self._parts[name] = record.parts
        if record.segments:
            self._segments[name] = [_from_record(run_id, segment) for segment in record.segments]

    def add_whole(self, stream: WholeStream) -> None:
        """Add a stream with all its chunks."""
        self._heads[stream.name] = stream.head
        self._writers |= {(stream.name, step_id): writer for step_id, writer in stream.writers.items()}
        self._segments[stream.name] = list(stream.segments)

    # --- parts

    def cut(self, run_id: str, mark: str) -> Iterator[tuple[str, bytes]]:
        """Move all chunks into parts if there are many: yield the key and the content of each."""
        sizes = [len(each.body) + SEGMENT_BYTES for segments in self._segments.values() for each in segments]
        if sum(sizes) <= HEAD_BYTES:
            return
        number, size = 0, 0
        moved: dict[str, list[StreamSegment]] = {}
        for name, segments in self._segments.items():
            for segment in segments:
                moved.setdefault(name, []).append(segment)
                size += len(segment.body) + SEGMENT_BYTES
                if size >= PART_BYTES:
                    yield self._part(run_id, f"stream-{mark}-{number}", moved)
                    number, size, moved = number + 1, 0, {}
        if moved:
            yield self._part(run_id, f"stream-{mark}-{number}", moved)
        self._segments = {}

    def _part(self, run_id: str, key: str, moved: Mapping[str, Sequence[StreamSegment]]) -> tuple[str, bytes]:
        for name, segments in moved.items():
            part = Part(segments[0].first_seq, _last(segments[-1]), key)
            self._parts[name] = (*self._parts.get(name, ()), part)
        held = {name: tuple(map(_to_record, segments)) for name, segments in moved.items()}
        return part_key(run_id, key), msgspec.json.encode(held)

    def parts_after(self, name: str, after: int) -> list[Part]:
        """Return the parts that have chunks of a stream after a number."""
        return [part for part in self._parts.get(name, ()) if part.last > after]

    def segments_after(self, name: str, after: int) -> list[StreamSegment]:
        """Return the segments of a stream in the head that have chunks after a number."""
        return [segment for segment in self._segments.get(name, ()) if _last(segment) > after]

    def head_of(self, name: str) -> StreamHead:
        """Return how far a stream has grown."""
        return self._heads.get(name, EMPTY)

    def whole(self, name: str, segments: Sequence[StreamSegment]) -> WholeStream:
        """Return a stream with all its chunks."""
        writers = {step_id: writer for (of, step_id), writer in self._writers.items() if of == name}
        return WholeStream(name=name, head=self._heads[name], writers=writers, segments=tuple(segments))

    @property
    def names(self) -> list[str]:
        """The names of the streams."""
        return list(self._heads)


class StreamParts:
    """The parts of streams in the bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._known: dict[str, dict[str, list[StreamSegment]]] = {}

    async def page(self, run_id: str, streams: StoredStreams, asked: StreamRead, is_finished: bool) -> StreamPage:
        """Return a part of a stream, as of this head."""
        segments: list[StreamSegment] = []
        for part in streams.parts_after(asked.name, asked.after):
            if len(segments) >= PAGE_SEGMENTS or sum(len(each.body) for each in segments) >= asked.most_bytes:
                break
            read = (await self._read(run_id, part.file)).get(asked.name, [])
            segments += [each for each in read if _last(each) > asked.after]
        segments += streams.segments_after(asked.name, asked.after)
        return StreamPage(
            run_id=run_id,
            name=asked.name,
            head=streams.head_of(asked.name),
            segments=tuple(bounded(segments, asked.most_bytes)),
            is_finished=is_finished,
        )

    async def whole(self, run_id: str, streams: StoredStreams) -> tuple[WholeStream, ...]:
        """Return all streams of a run, with all chunks."""
        return tuple([await self._whole(run_id, streams, name) for name in streams.names])

    async def _whole(self, run_id: str, streams: StoredStreams, name: str) -> WholeStream:
        parts = [await self._read(run_id, part.file) for part in streams.parts_after(name, 0)]
        segments = [segment for part in parts for segment in part.get(name, [])]
        return streams.whole(name, [*segments, *streams.segments_after(name, 0)])

    async def _read(self, run_id: str, file: str) -> dict[str, list[StreamSegment]]:
        key = part_key(run_id, file)
        if key not in self._known:
            found = await self._bucket.get(key)
            if found is None:
                raise StoreCorrupt(f"the part {key} of a stream is missing", key=key)
            while len(self._known) >= PARTS_KEPT:
                del self._known[next(iter(self._known))]
            self._known[key] = _decode(run_id, found.data, key)
        return self._known[key]


def append_all(
    streams: StoredStreams, items: Sequence[StreamAppend], fence_of: FenceOf, limits: Limits, now: Instant
) -> list[Appended | port.Refused]:
    """Append what attempts of activities of one run write, each separately."""

    def append(given: StreamAppend) -> Appended | port.Refused:
        refusal = decisions.fenced(given, fence_of(given.step_id))
        return streams.append(given, limits.stream_bytes, now) if refusal is None else port.Refused(refusal)

    return [append(given) for given in items]


def part_key(run_id: str, file: str) -> str:
    """Return the key of a part of streams of a run."""
    return storage_key("events", run_id, file)


def _last(segment: StreamSegment) -> int:
    return segment.first_seq + segment.count - 1


def _to_record(segment: StreamSegment) -> SegmentRecord:
    return SegmentRecord(
        *(segment.first_seq, segment.count, segment.step_id, segment.attempt, segment.at),
        *(segment.restarted_from, segment.body),
    )


def _from_record(run_id: str, record: SegmentRecord) -> StreamSegment:
    return StreamSegment(run_id=run_id, **{name: getattr(record, name) for name in SegmentRecord.__struct_fields__})


_decoder = msgspec.json.Decoder(dict[str, tuple[SegmentRecord, ...]])


def _decode(run_id: str, data: bytes, key: str) -> dict[str, list[StreamSegment]]:
    try:
        held = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeError) as problem:
        raise StoreCorrupt(f"the part {key} of a stream cannot be read", key=key) from problem
    return {name: [_from_record(run_id, record) for record in records] for name, records in held.items()}
