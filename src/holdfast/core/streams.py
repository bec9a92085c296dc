"""Streams: ordered chunks that a run's activities and workflow write while they work, for readers outside.

A stream has a name within its run. The store numbers its chunks from 1. They are kept in *segments*, each a JSON array
of many chunks, and are not events: neither a run nor a replay ever reads the streams.

An activity writes as one attempt of one step. It passes how many chunks of this attempt were stored before
(`position`), so a repeated batch is recognised, and a missing one is detected. A later attempt starts the step's part
of the stream again, unless it resumes it; its first segment records that (`restarted_from`).

A workflow writes with the commit of its turn, so its chunks are stored exactly once.

The size of a stream is limited. Chunks for a full stream are dropped and counted.
"""

from msgspec import Raw, Struct
from msgspec.structs import replace

from holdfast.core.instants import Instant
from holdfast.errors import Conflict

OF_WORKFLOW = ""
"""The step id of chunks that a workflow wrote."""


class StreamChunks(Struct, frozen=True, kw_only=True, gc=False):
    """What a turn appends to a stream: a JSON array of `count` chunks. With `closes` the stream is then closed."""

    name: str
    count: int
    body: Raw
    closes: bool = False


class StreamAppend(Struct, frozen=True, kw_only=True, gc=False):
    """What an attempt of an activity appends to a stream.

    `position` is how many chunks this attempt has appended before. With `resumes` there are no chunks: the attempt
    continues where the last attempt of its step ended, and the answer has the number of its chunks. `epoch` is that of
    the run's lease if the owner of the run executes the activity; None if a node acquired it from a queue.
    """

    run_id: str
    name: str
    step_id: str
    attempt: int
    node: str
    epoch: int | None = None
    position: int = 0
    count: int = 0
    body: Raw = Raw(b"[]")
    closes: bool = False
    resumes: bool = False


class StreamSegment(Struct, frozen=True, kw_only=True, gc=False):
    """Chunks that were stored together: the first has the number `first_seq`. `body` is a JSON array of them.

    `restarted_from`: with this segment the step starts its chunks from this number on again, which makes them obsolete.
    """

    run_id: str
    first_seq: int
    count: int
    step_id: str
    attempt: int
    at: Instant
    restarted_from: int | None
    body: Raw


class StreamHead(Struct, frozen=True, kw_only=True, gc=False):
    """The end of a stream: the number of its last chunk, its bytes, and how many chunks were dropped."""

    last_seq: int = 0
    size: int = 0
    dropped: int = 0
    is_closed: bool = False


class NamedStream(Struct, frozen=True, kw_only=True, gc=False):
    """A stream of a run, and its end."""

    run_id: str
    name: str
    head: StreamHead


class StreamWriter(Struct, frozen=True, kw_only=True, gc=False):
    """The last attempt of a step that wrote to a stream: how many chunks it has there, and from which number on."""

    attempt: int
    epoch: int
    first_seq: int
    count: int


class StreamRead(Struct, frozen=True, kw_only=True, gc=False):
    """The part of a stream to read: chunks after a number, in whole segments up to this size, but at least one."""

    run_id: str
    name: str
    after: int = 0
    most_bytes: int = 1024 * 1024


class StreamPage(Struct, frozen=True, kw_only=True):
    """A part of a stream. The first segment may begin with chunks before the requested ones.

    `is_finished` is whether the run had finished before the segments were read: then no chunk follows `head`.
    """

    run_id: str
    name: str
    head: StreamHead
    segments: tuple[StreamSegment, ...] = ()
    is_finished: bool = False


class Appended(Struct, frozen=True, gc=False):
    """The chunks are stored, by this call or an earlier one. `position` counts the stored chunks of the step."""

    position: int
    head: StreamHead


class Decided(Struct, frozen=True):
    """The changes of an append: none, if `writer` and the segment are None and the head is the same."""

    head: StreamHead
    writer: StreamWriter | None = None
    segment: StreamSegment | None = None


class WholeStream(Struct, frozen=True, kw_only=True):
    """A stream with all of its stored data, for a copy of its run."""

    name: str
    head: StreamHead
    writers: dict[str, StreamWriter]
    segments: tuple[StreamSegment, ...]


def decide_chunks(head: StreamHead, run_id: str, given: StreamChunks, most_bytes: int, now: Instant) -> Decided:
    """Decide what a turn appends to a stream."""
    return _appended(head, run_id, given, OF_WORKFLOW, 0, None, most_bytes, now)


def decide_append(
    head: StreamHead, writer: StreamWriter | None, given: StreamAppend, most_bytes: int, now: Instant
) -> Decided | Conflict:
    """Decide what an attempt appends to a stream, or why it is refused."""
    epoch = given.epoch or 0
    if writer is not None and (given.attempt, epoch) < (writer.attempt, writer.epoch):
        return Conflict(
            f"step {given.step_id!r}: attempt {given.attempt} writes to stream {given.name!r} no more: attempt "
            f"{writer.attempt} does",
            step_id=given.step_id,
            attempt=writer.attempt,
        )
    is_present = writer is not None and (given.attempt, epoch) == (writer.attempt, writer.epoch)
    if given.resumes:
        if writer is None:
            writer = StreamWriter(attempt=given.attempt, epoch=epoch, first_seq=head.last_seq + 1, count=0)
        return Decided(head=head, writer=replace(writer, attempt=given.attempt, epoch=epoch))
    there = writer.count if writer is not None and is_present else 0
    if is_present and given.count and given.position + given.count == there:
        return Decided(head=head)  # the same chunks again
    if given.count and given.position != there:
        return Conflict(
            f"step {given.step_id!r}: the store has {there} chunks of attempt {given.attempt} in stream "
            f"{given.name!r}, and the next are those after {given.position}",
            step_id=given.step_id,
            position=there,
        )
    restarted_from = None
    if writer is not None and is_present:
        after = replace(writer, count=there + given.count)
    else:
        restarted_from = writer.first_seq if writer is not None and writer.count and given.count else None
        if writer is not None and not given.count:  # it only closes the stream: the chunks of the last attempt remain
            after = replace(writer, attempt=given.attempt, epoch=epoch)
        else:
            after = StreamWriter(attempt=given.attempt, epoch=epoch, first_seq=head.last_seq + 1, count=given.count)
    step = given.step_id, given.attempt, restarted_from
    return replace(_appended(head, given.run_id, given, *step, most_bytes, now), writer=after)


def _appended(
    head: StreamHead,
    run_id: str,
    given: StreamChunks | StreamAppend,
    step_id: str,
    attempt: int,
    restarted_from: int | None,
    most_bytes: int,
    now: Instant,
) -> Decided:
    is_closed = given.closes or (head.is_closed and not given.count)
    if not given.count:
        return Decided(head=replace(head, is_closed=is_closed))
    if head.size + len(given.body) > most_bytes:
        return Decided(head=replace(head, dropped=head.dropped + given.count, is_closed=is_closed))
    segment = StreamSegment(
        run_id=run_id,
        first_seq=head.last_seq + 1,
        count=given.count,
        step_id=step_id,
        attempt=attempt,
        at=now,
        restarted_from=restarted_from,
        body=given.body,
    )
    after = StreamHead(
        last_seq=head.last_seq + given.count,
        size=head.size + len(given.body),
        dropped=head.dropped,
        is_closed=is_closed,
    )
    return Decided(head=after, segment=segment)
