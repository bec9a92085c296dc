"""The event bus: sinks and their status, replays, and dead letters."""

from datetime import datetime
from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta, Struct
from msgspec.structs import replace

from holdfast.core.bus import BusDeadLetter, OutboxReplay, Sink, SinkStatus
from holdfast.core.dead_letters import Settlement
from holdfast.core.instants import Instant
from holdfast.engine.history import find_event
from holdfast.errors import Conflict, InvalidInput, NotFound
from holdfast.service.auth.roles import ADMIN
from holdfast.service.context import RequestContext
from holdfast.service.paging import Cursor, PageSize, read_page
from holdfast.service.registry import Name, Request, RunId, operation
from holdfast.service.views import instant_of, moment
from holdfast.store.decisions import no_such_sink
from holdfast.store.port import Refused
from holdfast.store.queries import BusDeadLetterQuery, SinkQuery

SinkName = Annotated[Name, Meta(description="The sink's name. That of a tenant's begins with the tenant and a colon.")]
Names = Annotated[tuple[Name, ...], Meta(max_length=100)]

BATCH = 1_000
"""How many runs are requeued by one call of the store."""


class SinkView(Struct, frozen=True, kw_only=True):
    """A sink and its status. Of its address only the server is shown."""

    name: str
    kind: str
    server: str
    tenant: str | None
    workflows: tuple[str, ...]
    event_types: tuple[str, ...]
    alerts: bool
    payloads: str
    is_paused: bool
    created_by: str
    created_at: datetime
    backlog: int
    """How many entries wait for it. Each entry is some events of one run. Up to 10,000 are counted."""
    oldest_at: datetime | None
    failures: int
    """How often it has failed in a row."""
    next_at: datetime | None
    """When it is retried, if it has failed."""
    error: str
    delivered: int
    delivered_at: datetime | None
    dead_letters: int


def _view(status: SinkStatus) -> SinkView:
    sink, parts = status.sink, urlsplit(status.sink.address)
    return SinkView(
        name=sink.name,
        kind=sink.kind,
        server=f"{parts.scheme}://{parts.hostname}" if parts.hostname else "",
        tenant=sink.tenant,
        workflows=sink.workflows,
        event_types=sink.event_types,
        alerts=sink.alerts,
        payloads=sink.payloads,
        is_paused=sink.is_paused,
        created_by=sink.created_by,
        created_at=moment(sink.created_at),
        backlog=status.backlog,
        oldest_at=None if status.oldest_at is None else moment(status.oldest_at),
        failures=status.failures,
        next_at=moment(status.due_at) if status.due_at else None,
        error=status.error,
        delivered=status.delivered,
        delivered_at=None if status.delivered_at is None else moment(status.delivered_at),
        dead_letters=status.dead_letters,
    )


class ListSinks(Request, frozen=True, kw_only=True):
    """From where to list sinks."""

    cursor: Cursor = ""
    limit: PageSize = 100


class SinkPage(Struct, frozen=True):
    """Some sinks. `next` is the cursor of the page behind it, if there is more."""

    items: list[SinkView]
    next: str | None = None


@operation("sinks.list", "GET /v1/sinks", scope="letters:read")
async def list_(context: RequestContext, request: ListSinks) -> SinkPage:
    """Return the sinks of the event bus, in order of their names, with what waits for each."""
    rows, following = await read_page(
        context,
        "sinks",
        context.store.find,
        SinkQuery(counted=True),
        lambda status: status.sink.name,
        cursor=request.cursor,
        limit=request.limit,
    )
    return SinkPage([_view(status) for status in rows], following)


class PutSink(Request, frozen=True, kw_only=True):
    """A sink to store, or to replace."""

    name: SinkName
    kind: Literal["webhook", "nats", "redis"] = "webhook"
    address: Annotated[str, Meta(min_length=1, max_length=2_000, description="A URL without a password.")]
    secret: Annotated[str, Meta(max_length=255, description="The name of a secret, never its value.")] = ""
    tenant: Annotated[str | None, Meta(description="Whose runs; null: all, where the token allows it.")] = None
    workflows: Names = ()
    event_types: Names = ()
    alerts: bool = False
    payloads: Literal["concealed", "opened"] = "concealed"
    allow_private: bool = False
    max_attempts: Annotated[int, Meta(ge=1, le=10_000)] = 25


@operation("sinks.put", "POST /v1/sinks", scope=ADMIN, errors=(Conflict,), audit="its commit")
async def put(context: RequestContext, request: PutSink) -> SinkView:
    """Store a sink, which gets events from now on, or replace it, and try it at once.

    A token with a tenant makes webhooks to public addresses, with names that begin with the tenant and a colon.
    """
    given = {name: getattr(request, name) for name in PutSink.__struct_fields__}
    sink = Sink(**{**given, "tenant": context.principal.tenant or request.tenant}, created_by=context.name())
    await context.store.put_sink(sink, context.audit(subject=sink.name))
    return _view(await _status(context, sink.name))


class OfSink(Request, frozen=True, kw_only=True):
    """Which sink is meant."""

    sink: SinkName


async def _status(context: RequestContext, name: str) -> SinkStatus:
    found = await context.store.find(SinkQuery(name=name, counted=True))
    if not found:
        raise no_such_sink(name)
    return found[0]


async def _set_paused(context: RequestContext, name: str, *, is_paused: bool) -> SinkView:
    sink = (await _status(context, name)).sink
    await context.store.put_sink(replace(sink, is_paused=is_paused), context.audit(subject=name))
    return _view(await _status(context, name))


@operation("sinks.pause", "POST /v1/sinks/{sink}/pause", scope=ADMIN, errors=(NotFound,), audit="its commit")
async def pause(context: RequestContext, request: OfSink) -> SinkView:
    """Pause a sink. Its entries are kept."""
    return await _set_paused(context, request.sink, is_paused=True)


@operation("sinks.resume", "POST /v1/sinks/{sink}/resume", scope=ADMIN, errors=(NotFound,), audit="its commit")
async def resume(context: RequestContext, request: OfSink) -> SinkView:
    """Send to a sink again at once, even if it has failed."""
    return await _set_paused(context, request.sink, is_paused=False)


class RemovedSink(Struct, frozen=True):
    """The sink is removed."""

    name: str


@operation("sinks.remove", "POST /v1/sinks/{sink}/remove", scope=ADMIN, errors=(NotFound,), audit="its commit")
async def remove(context: RequestContext, request: OfSink) -> RemovedSink:
    """Remove a sink, with what still waits for it and its dead letters."""
    if not await context.store.remove_sink(request.sink, context.audit(subject=request.sink)):
        raise no_such_sink(request.sink)
    return RemovedSink(request.sink)


class ReplaySink(OfSink, frozen=True, kw_only=True):
    """Which events a sink gets again: all from an instant on, those of one run, or all from one event of a run on."""

    since: datetime | None = None
    run_id: RunId | None = None
    from_seq: Annotated[int, Meta(ge=1, le=2**53, description="With a run: from which event on.")] = 1
    event_id: Annotated[
        str, Meta(max_length=100, description="With its run, the event's subject: all runs' events from this one on.")
    ] = ""


class ReplayedSink(Struct, frozen=True):
    """Of how many runs the sink gets events again."""

    name: str
    runs: int


@operation("bus.replay", "POST /v1/sinks/{sink}/replay", scope=ADMIN, errors=(NotFound,), audit="its commit")
async def replay(context: RequestContext, request: ReplaySink) -> ReplayedSink:
    """Send events to a sink again, as far as the store still has them.

    With an `event_id`, what was stored in the same instant is sent again too.
    """
    if (request.since is None) == (request.run_id is None):
        raise InvalidInput("since: name an instant, or a run_id, and not both", field="since")
    since, run_id, from_seq = instant_of(request.since) or 0, request.run_id, request.from_seq
    if run_id is None and (request.event_id or from_seq != 1):
        raise InvalidInput("run_id: an event is named with its run", field="run_id")
    if run_id is not None:
        await context.require_run(run_id)
    if run_id is not None and request.event_id:
        since, run_id, from_seq = await _stored_at(context, run_id, request.event_id), None, 1
    after, runs = -1, 0
    while True:
        entry = context.audit(subject=request.sink) if after == -1 else None
        asked = OutboxReplay(request.sink, since, run_id, from_seq, after, BATCH)
        done = await context.store.replay_outbox(asked, entry)
        runs += done.runs
        if done.after is None:
            return ReplayedSink(request.sink, runs)
        after = done.after


async def _stored_at(context: RequestContext, run_id: str, event_id: str) -> Instant:
    event, _ = await find_event(context.store, run_id, 0, lambda event: event.event_id == event_id)
    if event is None:
        raise NotFound(f"run {run_id} has no event {event_id!r}", run_id=run_id)
    return event.persisted_at


class BusLetterView(Struct, frozen=True, kw_only=True):
    """Events of a run that a sink did not get. Those of no run are alerts."""

    letter_id: str
    sink: str
    run_id: str
    from_seq: int
    to_seq: int
    attempts: int
    detail: str
    died_at: datetime


def _letter(letter: BusDeadLetter) -> BusLetterView:
    fields = ("letter_id", "sink", "run_id", "from_seq", "to_seq", "attempts", "detail")
    return BusLetterView(**{name: getattr(letter, name) for name in fields}, died_at=moment(letter.died_at))


class ListBusLetters(Request, frozen=True, kw_only=True):
    """Which dead letters of the bus to list."""

    sink: str | None = None
    run_id: str | None = None
    cursor: Cursor = ""
    limit: PageSize = 100


class BusLetterPage(Struct, frozen=True):
    """Some dead letters of the bus. `next` is the cursor of the page behind it, if there is more."""

    items: list[BusLetterView]
    next: str | None = None


@operation("bus.letters", "GET /v1/bus/dead-letters", scope="letters:read")
async def letters(context: RequestContext, request: ListBusLetters) -> BusLetterPage:
    """Return the dead letters of sinks, the oldest first."""
    rows, following = await read_page(
        context,
        "bus letters",
        context.store.find,
        BusDeadLetterQuery(sink=request.sink, run_id=request.run_id),
        lambda letter: (letter.died_at, letter.letter_id),
        cursor=request.cursor,
        limit=request.limit,
    )
    return BusLetterPage([_letter(letter) for letter in rows], following)


class OfBusLetter(Request, frozen=True, kw_only=True):
    """Which dead letter of the bus is meant."""

    letter_id: Name


class SettledBusLetter(Struct, frozen=True):
    """The dead letter is settled, and gone."""

    letter_id: str
    settled: Settlement


async def _settle(context: RequestContext, letter_id: str, action: Settlement) -> SettledBusLetter:
    [answer] = await context.store.settle_bus_dead_letters([letter_id], action, context.audit(subject=letter_id))
    if isinstance(answer, Refused):
        raise answer.error
    return SettledBusLetter(letter_id, action)


@operation(
    "bus.requeue",
    "POST /v1/bus/dead-letters/{letter_id}/requeue",
    scope="letters:write",
    errors=(NotFound,),
    audit="its commit",
)
async def requeue(context: RequestContext, request: OfBusLetter) -> SettledBusLetter:
    """Send a dead letter to its sink again."""
    return await _settle(context, request.letter_id, "requeue")


@operation(
    "bus.drop",
    "POST /v1/bus/dead-letters/{letter_id}/drop",
    scope="letters:write",
    errors=(NotFound,),
    audit="its commit",
)
async def drop(context: RequestContext, request: OfBusLetter) -> SettledBusLetter:
    """Drop a dead letter of a sink for good."""
    return await _settle(context, request.letter_id, "drop")
