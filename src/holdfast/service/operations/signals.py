"""Signals: sending and tracking them, and listing the waits for them."""

from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar

from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core.events import NULL
from holdfast.core.instants import Instant
from holdfast.core.keys import RESERVED_PREFIX
from holdfast.core.messages import AcceptedSignalResult, Signal, SignalRequest
from holdfast.core.state import RunStatus
from holdfast.engine.history import head_of
from holdfast.engine.inbox.signals import FirstSignal, Outgoing, result_of
from holdfast.errors import (
    CallerError,
    Conflict,
    HoldfastError,
    NotFound,
    NotPermitted,
    NotWaiting,
    Overloaded,
    PayloadTooLarge,
    RateLimited,
    RunTerminal,
    SignalAcceptanceIndeterminate,
)
from holdfast.service.auth.tenancy import heads_of
from holdfast.service.context import RequestContext
from holdfast.service.http.problems import Problem, problem_of
from holdfast.service.operations.runs import StartRun, start_run
from holdfast.service.paging import Cursor, PageSize, read_page, time_of
from holdfast.service.registry import OF_A_RUN, Name, Request, RunId, SignalId, StepId, given, operation
from holdfast.service.views import AcceptedSignal, RunStarted, WaitView, accepted_signal, shown, wait_view
from holdfast.store.decisions import no_such_run
from holdfast.store.port import MailboxQuery, WaitQuery

REFUSALS: tuple[type[HoldfastError], ...] = (
    NotFound,
    Conflict,
    RunTerminal,
    NotWaiting,
    RateLimited,
    PayloadTooLarge,
    SignalAcceptanceIndeterminate,
)


class SendSignal(Request, frozen=True, kw_only=True):
    """A signal: to the oldest wait of its name, or with `step_id` to exactly that wait.

    With `require_waiting` it is refused unless a wait would take it now.
    """

    run_id: RunId
    name: Name
    payload: Any = None
    signal_id: SignalId | UnsetType = UNSET
    step_id: StepId | None = None
    require_waiting: bool = False


@operation(
    "signals.send",
    "POST /v1/runs/{run_id}/signals/{name}",
    scope="signals:write",
    status=202,
    errors=REFUSALS,
    audit="its commit",
)
async def send(context: RequestContext, request: SendSignal) -> AcceptedSignal:
    """Send a signal to a run. When this answers the signal is durable.

    With a `signal_id` a retry is recognised and answered as the first time, with another payload by `Conflict`.
    """
    await context.require_run(request.run_id)
    signal = SignalRequest(
        run_id=request.run_id,
        name=request.name,
        payload=codec.encode(request.payload),
        signal_id=given(request.signal_id),
        step_id=request.step_id,
        require_waiting=request.require_waiting,
    )
    return accepted_signal(await context.runtime.signal(signal, caller=context.principal))


class SendSignals(Request, frozen=True, kw_only=True):
    """Signals to any runs."""

    signals: Annotated[list[SendSignal], Meta(min_length=1, max_length=500)]


class Sent(Struct, frozen=True, kw_only=True):
    """How one of many signals was answered: accepted, or refused and why."""

    result: AcceptedSignal | None = None
    problem: Problem | None = None


class SentSignals(Struct, frozen=True):
    """How each signal was answered, in the order of the request."""

    items: list[Sent]


@operation(
    "signals.send_many", "POST /v1/signals", scope="signals:write", errors=(PayloadTooLarge,), audit="its commit"
)
async def send_many(context: RequestContext, request: SendSignals) -> SentSignals:
    """Send many signals. Each is accepted or refused independently."""
    own = await _own_runs(context, [signal.run_id for signal in request.signals])
    outgoing = [_outgoing(signal) for signal in request.signals if signal.run_id in own]
    sent = iter(await context.runtime.signal_many(outgoing, context.principal))
    answers = [next(sent) if signal.run_id in own else no_such_run(signal.run_id) for signal in request.signals]
    for answer in answers:
        if isinstance(answer, NotPermitted):
            context.log_refusal("signals.send_many", answer, is_counted=True)
    return SentSignals([_sent(context, answer) for answer in answers])


async def _own_runs(context: RequestContext, run_ids: list[str]) -> set[str]:
    if context.principal.tenant is None:
        return set(run_ids)
    return set(await heads_of(context.store, run_ids))


def _outgoing(signal: SendSignal) -> Outgoing:
    return {
        "run_id": signal.run_id,
        "name": signal.name,
        "payload": signal.payload,
        "signal_id": given(signal.signal_id),
        "step_id": signal.step_id,
        "require_waiting": signal.require_waiting,
    }


def _sent(context: RequestContext, answer: AcceptedSignalResult | CallerError) -> Sent:
    if isinstance(answer, CallerError):
        return Sent(problem=problem_of(answer, context.correlation_id))
    return Sent(result=accepted_signal(answer))


class StartWithSignal(StartRun, frozen=True, kw_only=True):
    """A run to start, and the signal that is in its mailbox from its beginning."""

    signal_name: Name
    signal_payload: Any = None
    signal_id: SignalId | UnsetType = UNSET


class StartedWithSignal(Struct, frozen=True):
    """The run, and the result of its signal."""

    run: RunStarted
    signal: AcceptedSignal


@operation(
    "signals.start_with",
    "POST /v1/signals/start",
    scope="signals:write",
    status=201,
    errors=(*REFUSALS, Overloaded),
    audit="its commit",
)
async def start_with(context: RequestContext, request: StartWithSignal) -> StartedWithSignal:
    """Start a run and send it a signal, both or neither. If the run exists already, only send the signal."""
    context.principal.require("runs:write")
    signal: FirstSignal = {
        "name": request.signal_name,
        "payload": request.signal_payload,
        "signal_id": given(request.signal_id),
    }
    run, (delivered,) = await start_run(context, request, signal)
    return StartedWithSignal(run, accepted_signal(result_of(delivered)))


class FollowSignal(Request, frozen=True, kw_only=True):
    """Which signal to follow. The storage key, from its receipt, distinguishes signals that had the same id."""

    run_id: RunId
    name: Name
    signal_id: SignalId
    signal_storage_key: str | None = None


class ReceiptView(Struct, frozen=True, kw_only=True):
    """What has become of a signal. `consumed_at_event` is the number of the event that took it."""

    status: Literal["accepted", "consumed", "expired", "dead-lettered"]
    consumed_at_event: int | None = None
    reason: str | None = None


@operation(
    "signals.receipt",
    "GET /v1/runs/{run_id}/signals/{name}/{signal_id}",
    scope="signals:read",
    errors=OF_A_RUN,
)
async def receipt(context: RequestContext, request: FollowSignal) -> ReceiptView:
    """Return what became of a signal: waiting, consumed by which event, expired, or dead-lettered and why."""
    await context.require_run(request.run_id)
    found = await context.runtime.receipt(request.run_id, request.name, request.signal_id, request.signal_storage_key)
    return ReceiptView(status=found.status, consumed_at_event=found.consumed_at_event, reason=found.reason)


class ListWaits(Request, frozen=True, kw_only=True):
    """Which open waits to list: for a signal's name, or all."""

    name: str | None = None
    cursor: Cursor = ""
    limit: PageSize = 100


class WaitPage(Struct, frozen=True):
    """Some open waits. `next` is the cursor of the page behind it, if there is more."""

    items: list[WaitView]
    next: str | None = None
    as_of: str | None = None
    """The time of the list, by the store's clock, if the store's lists may be outdated (S3)."""


@operation("signals.waiting", "GET /v1/waits", scope="signals:read")
async def waiting(context: RequestContext, request: ListWaits) -> WaitPage:
    """Find the runs that wait for a signal, in the order of run and step."""
    return await _waits(context, WaitQuery(name=request.name), request.cursor, request.limit)


class ListWaitsOfRun(ListWaits, frozen=True, kw_only=True):
    """Which open waits of a run to list."""

    run_id: RunId


@operation("signals.waits", "GET /v1/runs/{run_id}/waits", scope="signals:read", errors=OF_A_RUN)
async def waits(context: RequestContext, request: ListWaitsOfRun) -> WaitPage:
    """Return the signals that a run waits for."""
    await head_of(context.store, request.run_id)
    return await _waits(context, WaitQuery(run_id=request.run_id, name=request.name), request.cursor, request.limit)


async def _waits(context: RequestContext, query: WaitQuery, cursor: str, limit: int) -> WaitPage:
    rows, following = await read_page(
        context,
        "waits",
        context.store.find,
        query,
        lambda wait: (wait.run_id, wait.step_id),
        cursor=cursor,
        limit=limit,
    )
    heads = await heads_of(context.store, (wait.run_id for wait in rows))
    views = [wait_view(wait, heads[wait.run_id]) for wait in rows if wait.run_id in heads]
    return WaitPage(views, following, time_of(rows))


class ReadMailbox(Request, frozen=True, kw_only=True):
    """Which part of a run's mailbox to read."""

    run_id: RunId
    name: str | None = None
    cursor: Cursor = ""
    limit: PageSize = 100


class MailView(Struct, frozen=True, kw_only=True):
    """A signal that no wait has taken, and for how long it has been there.

    `payload_bytes` is how large its payload is, if it was left out because no answer has room for it.
    """

    name: str
    signal_id: str
    accepted_at: datetime
    age_ms: int
    payload: Raw
    step_id: str | None = None
    payload_bytes: int | None = None


Mail = TypeVar("Mail", bound=MailView)


def mail_view(kind: type[Mail], signal: Signal, now: Instant, most_bytes: int, **more: Any) -> Mail:
    """Return a signal that no wait has taken as callers see it."""
    if len(signal.payload) > most_bytes:
        more = {**more, "payload": NULL, "payload_bytes": len(signal.payload)}
    return shown(kind, signal, age_ms=max(0, now - signal.accepted_at) // 1_000, **more)


class MailPage(Struct, frozen=True):
    """Some signals of a mailbox. `next` is the cursor of the page behind it, if there is more."""

    items: list[MailView]
    next: str | None = None
    as_of: str | None = None
    """The time of the list, by the store's clock, if the store's lists may be outdated (S3)."""


@operation("signals.mailbox", "GET /v1/runs/{run_id}/mailbox", scope="signals:read", errors=OF_A_RUN)
async def mailbox(context: RequestContext, request: ReadMailbox) -> MailPage:
    """Return the signals of a run that no wait has consumed, oldest first."""
    await head_of(context.store, request.run_id)
    rows, following = await read_page(
        context,
        "mailbox",
        context.store.find,
        MailboxQuery(run_id=request.run_id, name=request.name),
        lambda signal: signal.inbox_seq,
        cursor=request.cursor,
        limit=request.limit,
        size_of=lambda signal: len(signal.payload),
    )
    now = await context.store.now()
    own = [signal for signal in rows if not signal.name.startswith(RESERVED_PREFIX)]
    items = [mail_view(MailView, signal, now, context.item_bytes) for signal in own]
    return MailPage(items, following, time_of(rows))


class ListUnconsumed(Request, frozen=True, kw_only=True):
    """Which signals to list; with `finished` also those of runs that have finished, which no wait will ever take."""

    name: str | None = None
    finished: bool = False
    cursor: Cursor = ""
    limit: PageSize = 100


class UnconsumedView(MailView, frozen=True, kw_only=True):
    """A signal that no wait has taken, and the run in whose mailbox it is."""

    run_id: str
    workflow: str
    run_status: RunStatus
    reference_key: str | None = None


class UnconsumedPage(Struct, frozen=True):
    """Some signals that no wait has taken. `next` is the cursor of the page behind it, if there is more."""

    items: list[UnconsumedView]
    next: str | None = None
    as_of: str | None = None
    """The time of the list, by the store's clock, if the store's lists may be outdated (S3)."""


class _Place(Struct, frozen=True):
    """The query with its position in one field, as pages require."""

    query: MailboxQuery
    limit: int = 1
    after: tuple[str, int] = ("", 0)


@operation("signals.unconsumed", "GET /v1/signals", scope="signals:read")
async def unconsumed(context: RequestContext, request: ListUnconsumed) -> UnconsumedPage:
    """Find the signals of all runs that no wait has consumed, in the order in which the runs were created."""

    async def find(place: _Place) -> list[Signal]:
        run_id, inbox_seq = place.after
        query = replace(
            place.query, after_run=run_id, after=inbox_seq, limit=place.limit, most_bytes=context.page_bytes
        )
        return await context.store.find(query)

    rows, following = await read_page(
        context,
        "unconsumed signals",
        find,
        _Place(MailboxQuery(name=request.name, unfinished=not request.finished)),
        lambda signal: (signal.run_id, signal.inbox_seq),
        cursor=request.cursor,
        limit=request.limit,
        size_of=lambda signal: len(signal.payload),
    )
    heads = await heads_of(context.store, (signal.run_id for signal in rows))
    now = await context.store.now()
    items = [
        mail_view(
            UnconsumedView,
            signal,
            now,
            context.item_bytes,
            run_id=signal.run_id,
            workflow=heads[signal.run_id].plan_id,
            run_status=heads[signal.run_id].status,
            reference_key=heads[signal.run_id].reference_key,
        )
        for signal in rows
        if signal.run_id in heads and not signal.name.startswith(RESERVED_PREFIX)
    ]
    return UnconsumedPage(items, following, time_of(rows))
