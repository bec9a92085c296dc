"""Streams of runs: listing and reading them. Following one live is in `streams`."""

from datetime import datetime
from typing import Annotated, Any

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from holdfast.core import codec
from holdfast.core.streams import NamedStream
from holdfast.engine.history import head_of
from holdfast.engine.stream_reading import StreamChunk, StreamPart
from holdfast.errors import CheckpointOwnershipCapabilityError, InvalidInput, NotFound
from holdfast.service.context import RequestContext
from holdfast.service.paging import Cursor, PageSize, read_page
from holdfast.service.registry import OF_A_RUN, Name, Request, RunId, operation
from holdfast.service.views import moment
from holdfast.store.payloads import concealed
from holdfast.store.port import StreamQuery
from holdfast.store.types import STREAMS

OF_A_RUNS_STREAM = (*OF_A_RUN, CheckpointOwnershipCapabilityError)
StreamName = Annotated[Name, Meta(description="The stream's name, as the code of the run has it.")]
After = Annotated[int, Meta(ge=0, lt=2**53, description="The number of the chunk behind which to begin.")]
ChunkCount = Annotated[int, Meta(ge=1, le=5_000, description="The most chunks to answer with.")]

CHUNK_ROOM = 300
"""About how many bytes of a response a chunk takes in addition to its value."""


class StreamView(Struct, frozen=True, kw_only=True):
    """A stream of a run: the number of its last chunk, its bytes, and how many chunks it had no room for."""

    name: str
    last_seq: int
    size: int
    dropped: int
    is_closed: bool


class ListStreams(Request, frozen=True, kw_only=True):
    """Which run's streams to list."""

    run_id: RunId
    cursor: Cursor = ""
    limit: PageSize = 100


class StreamsPage(Struct, frozen=True):
    """Some streams of a run. `next` is the cursor of the page behind it, if there is more."""

    items: list[StreamView]
    next: str | None = None


@operation("streams.list", "GET /v1/runs/{run_id}/streams", scope="runs:read", errors=OF_A_RUN)
async def list_streams(context: RequestContext, request: ListStreams) -> StreamsPage:
    """List the streams that a run has written to, in the order of their names."""
    await head_of(context.store, request.run_id)
    if STREAMS in context.store.capabilities.lacking:
        return StreamsPage([])
    rows, following = await read_page(
        context,
        "streams",
        context.store.find,
        StreamQuery(run_id=request.run_id),
        lambda row: row.name,
        cursor=request.cursor,
        limit=request.limit,
    )
    return StreamsPage([_stream_view(row) for row in rows], following)


def _stream_view(row: NamedStream) -> StreamView:
    head = row.head
    return StreamView(
        name=row.name, last_seq=head.last_seq, size=head.size, dropped=head.dropped, is_closed=head.is_closed
    )


class ChunkView(Struct, frozen=True, kw_only=True):
    """A chunk of a stream, and its writer: an attempt of an activity, or the workflow, for which the step is empty.

    With `restarted_from` the step has begun anew with this chunk: its chunks from that number on do not count any more.
    """

    seq: int
    value: Any
    step_id: str
    attempt: int
    at: datetime
    restarted_from: int | UnsetType = UNSET


def chunk_view(chunk: StreamChunk) -> ChunkView:
    """Return a chunk as callers see it. Of an encrypted value that cannot be opened here, only that fact is shown."""
    value: Raw = chunk.value
    return ChunkView(
        seq=chunk.seq,
        value=concealed(value) if codec.is_sealed(value) else value,
        step_id=chunk.step_id,
        attempt=chunk.attempt,
        at=moment(chunk.at),
        restarted_from=UNSET if chunk.restarted_from is None else chunk.restarted_from,
    )


class ReadStream(Request, frozen=True, kw_only=True):
    """Which stream of a run to read, and from where."""

    run_id: RunId
    name: StreamName
    after: After = 0
    limit: ChunkCount = 1_000


class ChunkPage(Struct, frozen=True, kw_only=True):
    """Chunks of a stream. Go on after `last_seq`, unless `is_last`: then the stream is closed, or its run has finished.

    `last_seq` is the number of the last chunk here, `dropped` how many the stream had no room for.
    """

    items: list[ChunkView]
    last_seq: int
    is_last: bool
    dropped: int


@operation("streams.read", "GET /v1/runs/{run_id}/streams/{name}", scope="runs:read", errors=OF_A_RUNS_STREAM)
async def read_stream(context: RequestContext, request: ReadStream) -> ChunkPage:
    """Read the chunks of a stream after a number; ask again for later ones.

    There may be more although fewer than `limit` are answered.
    """
    part = await part_of(context, request.run_id, request.name, request.after)
    items: list[ChunkView] = []
    last_seq, room = request.after, context.page_bytes
    for chunk in part.chunks():
        room -= len(bytes(chunk.value)) + CHUNK_ROOM
        if len(items) == request.limit or (items and room < 0):
            break
        items.append(chunk_view(chunk))
        last_seq = chunk.seq
    is_last = part.is_last and last_seq == part.last_seq
    return ChunkPage(items=items, last_seq=last_seq, is_last=is_last, dropped=part.head.dropped)


async def part_of(context: RequestContext, run_id: str, name: str, after: int) -> StreamPart:
    """Return the part of a stream after a chunk, if the caller's tenant has the run."""
    if "\0" in name:
        raise NotFound(f"run {run_id} has no such stream", run_id=run_id)
    await head_of(context.store, run_id)
    part = await context.runtime.streams.read(run_id, name, after)
    if after > part.head.last_seq:  # waiting for more would skip chunks that another stream has at these numbers
        raise InvalidInput(f"after: the stream has {part.head.last_seq} chunks, and none of this number", field="after")
    return part
