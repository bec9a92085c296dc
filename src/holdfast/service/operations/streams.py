"""Event streams: events of a run, chunks of its streams, and changes of lists, live."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Annotated, Any, Literal

from msgspec import Meta

from holdfast.core.dead_letters import Reason
from holdfast.core.messages import Actor
from holdfast.core.search import matches
from holdfast.core.state import TERMINAL, RunStatus
from holdfast.core.tasks import is_effective
from holdfast.engine.history import head_of
from holdfast.engine.stream_reading import StreamPart
from holdfast.errors import InvalidInput, NotPermitted, RateLimited
from holdfast.limits import WHERE_CHARS
from holdfast.service.auth.tenancy import belongs_to
from holdfast.service.context import RequestContext
from holdfast.service.live.changefeed import ChangeFeed, FollowedRun
from holdfast.service.live.sse import HEARTBEAT, MEDIA_TYPE, OPENING, frame
from holdfast.service.live.subscriptions import ListChange, ListSubscription
from holdfast.service.operations.run_streams import (
    OF_A_RUNS_STREAM,
    After,
    ChunkView,
    StreamName,
    chunk_view,
    part_of,
)
from holdfast.service.operations.runs import RunFilter, run_query
from holdfast.service.registry import OF_A_RUN, ActorName, Request, RunId, operation
from holdfast.service.views import EventView, RunView
from holdfast.store.port import RunHead, RunQuery

STOPPED = frame({}, event="stopped")
"""The service is stopping: continue with another process, or here when it is back."""

CHUNK_BYTES = 64 * 1024
SHARED_CHUNKS = 5_000
"""How many chunks are kept encoded for other readers of the same part of a stream. If there are more, each reader
encodes its own.
"""
OF_A_STREAM = (*OF_A_RUN, RateLimited)
KINDS = {"runs": "runs:read", "tasks": "tasks:read", "letters": "letters:read"}
"""What can be watched, and the scope that it requires."""


class FollowRun(Request, frozen=True, kw_only=True):
    """Which run to follow, and from where. A `Last-Event-ID` stands above `after`."""

    run_id: RunId
    after: Annotated[int, Meta(ge=0, lt=2**53, description="The run_seq behind which to begin.")] = 0


class RunStream:
    """One run's history, from a number on and as it grows, to its end."""

    def __init__(self, context: RequestContext, watcher: ChangeFeed, head: RunHead, after: int) -> None:
        self.wake = asyncio.Event()
        self.is_closed = False
        self._call = context
        self._watcher = watcher
        self._heartbeat_s = context.service.options.heartbeat_s
        self._status = head.status
        self._seq = after
        self._followed = watcher.follow(head, self.wake)
        self._is_finished = head.status in TERMINAL and after >= head.version

    async def pieces(self) -> AsyncIterator[bytes]:
        followed = self._followed
        try:
            yield OPENING
            await self._watcher.begun()
            is_reported = False
            while not self._is_finished and not self.is_closed and not self._watcher.is_over:
                self.wake.clear()
                chunk = await self._next(followed)
                if chunk:
                    is_reported = False
                    yield chunk
                elif followed.is_stale and not is_reported:
                    is_reported = True
                    yield frame({"last_event_seq": self._seq}, event="stale")
                elif not await woken(self.wake, self._heartbeat_s):
                    yield HEARTBEAT
            yield self._ending() if self._is_finished else STOPPED
        finally:
            self._watcher.unfollow(followed, self.wake)

    async def _next(self, followed: FollowedRun) -> bytes:
        size, texts = 0, []
        frames = await followed.after(self._seq)
        redacted = await self._call.redacted_steps(followed.run_id, (each.task_step_id for each in frames))
        for each in frames:
            self._seq, self._is_finished = each.seq, each.is_last
            texts.append(each.redacted if each.task_step_id in redacted else each.text)
            size += len(texts[-1])
            if size >= CHUNK_BYTES:
                break
        return b"".join(texts)

    def _ending(self) -> bytes:
        return frame({"last_event_seq": self._seq}, event="end", id=f"{self._seq}-end")


async def woken(wake: asyncio.Event, seconds: float) -> bool:
    """Wait for the event; return False if that takes too long."""
    try:
        async with asyncio.timeout(seconds):
            await wake.wait()
    except TimeoutError:
        return False
    return True


@operation("runs.stream", "GET /v1/runs/{run_id}/stream", scope="runs:read", errors=OF_A_STREAM, media=MEDIA_TYPE)
async def follow_run(context: RequestContext, request: FollowRun) -> EventView:
    """Follow a run: its events as server-sent events, in the order of `run_seq`, each once, to the end of the run.

    The id of an event is its `run_seq`; a reader that comes back with it as `Last-Event-ID` misses nothing. `end` comes
    last, when the run has finished. At `stale` events are missing: fetch the snapshot, and wait for them. At `stopped`
    the service stops: come back.
    """
    head = await head_of(context.store, request.run_id)
    if request.after > head.version:  # otherwise it would skip events of another history
        raise InvalidInput(f"after: the run has {head.version} events, and none of this number", field="after")
    return RunStream(context, context.service.change_feeds.of(context.runtime), head, request.after)  # type: ignore[return-value]


class FollowStream(Request, frozen=True, kw_only=True):
    """Which stream of which run to follow, and from where. A `Last-Event-ID` stands above `after`."""

    run_id: RunId
    name: StreamName
    after: After = 0


class ChunkStream:
    """A stream that a run writes, from a chunk on and as it grows, until it is closed or the run has finished."""

    def __init__(self, context: RequestContext, request: FollowStream) -> None:
        self.wake = asyncio.Event()
        self.is_closed = False
        self._hub = context.runtime.streams
        self._service = context.service
        self._request = request
        self._seq = request.after

    async def pieces(self) -> AsyncIterator[bytes]:
        request, heartbeat_s = self._request, self._service.options.heartbeat_s
        self._hub.enter(self.wake)
        stopping = asyncio.create_task(self._end_with_service(), name="reader of a stream")
        try:
            yield OPENING
            while not self.is_closed:
                self.wake.clear()
                part = await self._hub.read(request.run_id, request.name, self._seq)
                for block in blocks_of(part):
                    yield block
                self._seq = part.last_seq
                if part.is_last:
                    ending = {"last_seq": self._seq, "dropped": part.head.dropped}
                    yield frame(ending, event="end", id=f"{self._seq}-end")
                    return
                if not part.count and not await woken(self.wake, heartbeat_s):
                    yield HEARTBEAT
            yield STOPPED
        finally:
            stopping.cancel()
            self._hub.leave(self.wake)

    async def _end_with_service(self) -> None:
        await self._service.stopping.wait()
        self.is_closed = True
        self.wake.set()


def blocks_of(part: StreamPart) -> Iterable[bytes]:
    """Return the chunks in wire format, many together. They are encoded once, for all readers of a part."""
    if part.derived is not None:
        shared: list[bytes] = part.derived
        return shared
    if part.count <= SHARED_CHUNKS:
        part.derived = list(_encoded(part))
        return part.derived  # type: ignore[no-any-return]
    return _encoded(part)


def _encoded(part: StreamPart) -> Iterator[bytes]:
    frames: list[bytes] = []
    size = 0
    for chunk in part.chunks():
        frames.append(frame(chunk_view(chunk), id=str(chunk.seq)))
        size += len(frames[-1])
        if size >= CHUNK_BYTES:
            yield b"".join(frames)
            size = 0
            frames.clear()
    if frames:
        yield b"".join(frames)


@operation(
    "streams.follow",
    "GET /v1/runs/{run_id}/streams/{name}/follow",
    scope="runs:read",
    errors=(*OF_A_RUNS_STREAM, RateLimited),
    media=MEDIA_TYPE,
)
async def follow_stream(context: RequestContext, request: FollowStream) -> ChunkView:
    """Follow a stream that a run writes: its chunks as server-sent events, in order, each once.

    The id of an event is the chunk's number; a reader that comes back with it as `Last-Event-ID` misses nothing. `end`
    comes last, when the stream is closed or the run has finished. At `stopped` the service stops: come back.
    """
    await part_of(context, request.run_id, request.name, request.after)
    return ChunkStream(context, request)  # type: ignore[return-value]


class WatchLists(Request, frozen=True, kw_only=True):
    """What to watch. A field that is omitted matches everything. Filters of runs also apply to tasks and letters."""

    kinds: Annotated[str, Meta(description="Of `runs`, `tasks` and `letters`, with commas between.")] = "runs"
    workflow: str | None = None
    reference_key: str | None = None
    tag: str | None = None
    parent_run_id: str | None = None
    roots: bool = False
    retrying: bool = False
    run_id: str | None = None
    status: RunStatus | None = None
    task_status: Literal["OPEN", "COMPLETED", "CANCELLED"] | None = None
    role: str | None = None
    assignee: str | None = None
    mine: bool = False
    actor: ActorName = ""
    reason: Reason | None = None
    settled: bool = False
    where: Annotated[str, Meta(max_length=WHERE_CHARS, description="Which runs, as in a search.")] = ""

    def names(self, head: RunHead) -> bool:
        """Return whether a run is among the watched ones, whatever its status."""
        return (
            self.workflow in (None, head.plan_id)
            and self.reference_key in (None, head.reference_key)
            and (self.tag is None or self.tag in head.tags)
            and self.parent_run_id in (None, head.parent_run_id)
            and not (self.roots and head.parent_run_id is not None)
            and self.run_id in (None, head.run_id)
        )

    def lists(self, change: ListChange, actor: Actor | None) -> bool:
        """Return whether an item in its current state is in the watched lists."""
        record: Any = change.record
        if change.kind == "runs":
            return self.status in (None, record.status) and not (self.retrying and record.retrying is None)
        if change.kind == "letters":
            return self.reason in (None, record.reason) and (self.settled or record.settled is None)
        return (
            self.task_status in (None, record.status)
            and self.assignee in (None, record.assignee)
            and (self.role is None or self.role in record.roles)
            and (actor is None or is_effective(record.assignee, record.roles, actor))
        )


class ListStream:
    """The changes of lists."""

    def __init__(self, context: RequestContext, watcher: ChangeFeed, listing: ListSubscription) -> None:
        self.is_closed = False
        self.wake = listing.wake
        self._watcher = watcher
        self._options = context.service.options
        self._listing = listing
        watcher.subscribe(listing)

    async def pieces(self) -> AsyncIterator[bytes]:
        try:
            yield OPENING
            await self._watcher.begun()
            while not self.is_closed and not self._watcher.is_over:
                self.wake.clear()
                chunk = self._listing.take()
                if chunk:
                    yield chunk
                    await asyncio.sleep(self._options.list_rest_s)
                elif not await woken(self.wake, self._options.heartbeat_s):
                    yield HEARTBEAT
            yield STOPPED
        finally:
            self._watcher.unsubscribe(self._listing)


def _is_found(head: RunHead, query: RunQuery) -> bool:
    """Return whether a run matches the text of a query: its conditions, and fields such as `created_from`."""
    attributes = {} if head.snapshot is None else head.snapshot.attributes
    ended = head.finished_at
    return (
        all(matches(attributes, condition) for condition in query.where)
        and query.status in (None, head.status)
        and query.workflow in (None, head.plan_id)
        and query.reference_key in (None, head.reference_key)
        and query.parent_run_id in (None, head.parent_run_id)
        and (query.tag is None or query.tag in head.tags)
        and (query.created_from is None or head.created_at >= query.created_from)
        and (query.created_until is None or head.created_at < query.created_until)
        and (query.finished_from is None or (ended is not None and ended >= query.finished_from))
        and (query.finished_until is None or (ended is not None and ended < query.finished_until))
    )


@operation("lists.stream", "GET /v1/stream", scope=None, errors=(NotPermitted, RateLimited), media=MEDIA_TYPE)
async def watch_lists(context: RequestContext, request: WatchLists) -> RunView:
    """Watch what changes in lists of runs, tasks and dead letters: `run`, `task` and `letter`, as the lists show them.

    At `reset`, which comes first, read the lists: what changes from then on is sent. It is repeated if too much has
    changed at once. `run_left`, `task_left` and `letter_left` say that an item is not in the list any more. A reader
    that has a newer state, by its `last_event_seq`, keeps that. Each kind needs the scope of its list.
    """
    kinds = frozenset(kind.strip() for kind in request.kinds.split(","))
    if not kinds <= KINDS.keys():
        raise InvalidInput(f"kinds: known are {', '.join(KINDS)}", field="kinds")
    for kind in kinds:
        context.principal.require(KINDS[kind])
    actor = context.actor(request.actor) if request.mine or not context.principal.is_admin else None
    query = run_query(context, RunFilter(where=request.where))
    listing = ListSubscription(
        kinds,
        lambda head: belongs_to(context.principal, head) and request.names(head),
        lambda change: request.lists(change, actor) and (change.kind != "runs" or _is_found(change.head, query)),
    )
    return ListStream(context, context.service.change_feeds.of(context.runtime), listing)  # type: ignore[return-value]
