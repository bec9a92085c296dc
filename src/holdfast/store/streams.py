"""Appends to streams, shared by all stores: read the present state, decide in order, and write together."""

from msgspec import Raw

from holdfast.core.instants import Instant
from holdfast.core.streams import (
    Appended,
    NamedStream,
    StreamAppend,
    StreamChunks,
    StreamHead,
    StreamSegment,
    StreamWriter,
    decide_append,
    decide_chunks,
)
from holdfast.errors import Conflict
from holdfast.store.types import Refused

Key = tuple[int, str]
"""The number of a run, and the name of one of its streams."""

PAGE_SEGMENTS = 64
"""How many segments one read of a stream returns at most."""

EMPTY = StreamHead()


class StreamBatch:
    """The streams that a call appends to: first as they were read, then as they are to be written."""

    def __init__(self, most_bytes: int, now: Instant) -> None:
        self._most_bytes = most_bytes
        self._now = now
        self.heads: dict[Key, StreamHead] = {}
        self.writers: dict[tuple[Key, str], StreamWriter] = {}
        self.changed_heads: dict[Key, None] = {}
        self.changed_writers: dict[tuple[Key, str], None] = {}
        self.segments: list[tuple[Key, StreamSegment]] = []

    def append(self, run_no: int, given: StreamAppend) -> Appended | Refused:
        """Append what an attempt writes, if it continues the stream."""
        key = run_no, given.name
        head, writer = self.heads.get(key, EMPTY), self.writers.get((key, given.step_id))
        decided = decide_append(head, writer, given, self._most_bytes, self._now)
        if isinstance(decided, Conflict):
            return Refused(decided)
        if decided.writer is not None:
            writer = self.writers[key, given.step_id] = decided.writer
            self.changed_writers[key, given.step_id] = None
        self._set(key, decided.head, decided.segment)
        return Appended(0 if writer is None else writer.count, decided.head)

    def write(self, run_no: int, run_id: str, given: StreamChunks) -> None:
        """Append what a turn writes."""
        key = run_no, given.name
        head = self.heads.get(key, EMPTY)
        decided = decide_chunks(head, run_id, given, self._most_bytes, self._now)
        self._set(key, decided.head, decided.segment)

    def _set(self, key: Key, head: StreamHead, segment: StreamSegment | None) -> None:
        if segment is not None:
            self.segments.append((key, segment))
        if head != self.heads.get(key, EMPTY):
            self.heads[key] = head
            self.changed_heads[key] = None

    # --- rows, for all databases

    def head_rows(self) -> list[tuple[int, str, int, int, int, bool]]:
        """Return the rows of `streams` to write."""
        return [head_row(*key, self.heads[key]) for key in self.changed_heads]

    def writer_rows(self) -> list[tuple[int, str, str, int, int, int, int]]:
        """Return the rows of `stream_writers` to write."""
        return [writer_row(*key, step_id, self.writers[key, step_id]) for key, step_id in self.changed_writers]

    def segment_rows(self) -> list[tuple[int, str, int, int, str, int, Instant, int | None, str]]:
        """Return the new rows of `stream_segments`."""
        return [segment_row(*key, segment) for key, segment in self.segments]


HEAD = "name, last_seq, size, dropped, is_closed"
WRITER = "name, step_id, attempt, epoch, first_seq, count"
SEGMENT = "name, first_seq, count, step_id, attempt, at, restarted_from, body"


def head_row(run_no: int, name: str, head: StreamHead) -> tuple[int, str, int, int, int, bool]:
    """Return a row of `streams`."""
    return run_no, name, head.last_seq, head.size, head.dropped, head.is_closed


def writer_row(run_no: int, name: str, step_id: str, by: StreamWriter) -> tuple[int, str, str, int, int, int, int]:
    """Return a row of `stream_writers`."""
    return run_no, name, step_id, by.attempt, by.epoch, by.first_seq, by.count


def segment_row(
    run_no: int, name: str, segment: StreamSegment
) -> tuple[int, str, int, int, str, int, Instant, int | None, str]:
    """Return a row of `stream_segments`."""
    return (
        *(run_no, name, segment.first_seq, segment.count, segment.step_id, segment.attempt, segment.at),
        *(segment.restarted_from, bytes(segment.body).decode()),
    )


def head_of(last_seq: int, size: int, dropped: int, is_closed: int) -> StreamHead:
    """Return a stream from the columns of its row after the name."""
    return StreamHead(last_seq=last_seq, size=size, dropped=dropped, is_closed=bool(is_closed))


def named_stream_of(run_id: str, name: str, *head: int) -> NamedStream:
    """Return a stream from its row."""
    return NamedStream(run_id=run_id, name=name, head=head_of(*head))


def writer_of(attempt: int, epoch: int, first_seq: int, count: int) -> StreamWriter:
    """Return a writer from the columns of its row after the step."""
    return StreamWriter(attempt=attempt, epoch=epoch, first_seq=first_seq, count=count)


def segment_of(
    run_id: str, first_seq: int, count: int, step_id: str, attempt: int, at: Instant, restarted: int | None, body: str
) -> StreamSegment:
    """Return a segment from the columns of its row after the stream's name."""
    return StreamSegment(
        run_id=run_id,
        first_seq=first_seq,
        count=count,
        step_id=step_id,
        attempt=attempt,
        at=at,
        restarted_from=restarted,
        body=Raw(body.encode()),
    )
