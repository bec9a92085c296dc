"""Streams: ordered chunks that a run's activities and workflow write while they work, for readers outside.

A stream is named within its run. Its chunks are numbered from 1 by the store. They are kept in
*segments*, a JSON array of many chunks each, and are no events: a run never reads its streams, and no replay does.

An activity writes as one attempt of one step. It says how many chunks of this attempt were stored before (`position`),
so a batch that is sent again is recognised, and one that is missing is noticed. An attempt after another one begins
the step's part of the stream anew, which the first of its segments says (`restarted_from`), unless it resumes it.

A workflow writes with the commit of its turn, which is there once by itself.

What a stream takes is bounded. What is written to a full one is dropped and counted.
"""

from msgspec import Raw, Struct
from msgspec.structs import replace

from holdfast.core.instants import Instant
from holdfast.errors import Conflict

OF_WORKFLOW = ""
"""The step of chunks that a workflow wrote."""


class StreamChunks(Struct, frozen=True, kw_only=True, gc=False):
    """What a turn appends to a stream: a JSON array of `count` chunks. With `closes` the stream is closed after it."""

    name: str
    count: int
    body: Raw
    closes: bool = False


class StreamAppend(Struct, frozen=True, kw_only=True, gc=False):
    """What an attempt of an activity appends to a stream.

    `position` is how many chunks this attempt has appended before. With `resumes` there are no chunks: the attempt goes
    on where the last one of its step ended, and the answer says how many chunks are there. `epoch` is that of the run's
    lease for an activity that the owner of the run executes; None for one from a queue, which the node has acquired.
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

    `restarted_from`: the chunks that the same step has written from this number on are begun anew with this segment.
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
    """How far a stream goes: the number of its last chunk, its bytes, and how many chunks it had no room for."""

    last_seq: int = 0
    size: int = 0
    dropped: int = 0
    is_closed: bool = False


class NamedStream(Struct, frozen=True, kw_only=True, gc=False):
    """A stream of a run, and how far it goes."""

    run_id: str
    name: str
    head: StreamHead


class StreamWriter(Struct, frozen=True, kw_only=True, gc=False):
    """The last attempt of a step that wrote to a stream: how many chunks are there of it, from which number on."""

    attempt: int
    epoch: int
    first_seq: int
    count: int


class StreamRead(Struct, frozen=True, kw_only=True, gc=False):
    """Which part of a stream to read: chunks after a number, in whole segments of so many bytes, but at least one."""

    run_id: str
    name: str
    after: int = 0
    most_bytes: int = 1024 * 1024


class StreamPage(Struct, frozen=True, kw_only=True):
    """A part of a stream. The first segment may begin with chunks that were asked for to be left out.

    `is_finished` is whether the run had finished before the segments were read: then no chunk comes after `head`.
    """

    run_id: str
    name: str
    head: StreamHead
    segments: tuple[StreamSegment, ...] = ()
    is_finished: bool = False


class Appended(Struct, frozen=True, gc=False):
    """The chunks are stored, by this call or by an earlier one. `position` counts those of the step that are there."""

    position: int
    head: StreamHead


class Decided(Struct, frozen=True):
    """What an append changes: nothing, if its `writer` is None and it has no segment and no other head."""

    head: StreamHead
    writer: StreamWriter | None = None
    segment: StreamSegment | None = None


class WholeStream(Struct, frozen=True, kw_only=True):
    """A stream with everything that is stored of it, for a copy of its run."""

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
    """Decide what an attempt appends to a stream, or why it does not."""
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
        if writer is not None and not given.count:  # it only closes the stream: what the last attempt wrote stands
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
