"""Runs: starting, finding, inspecting and querying them."""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.admission import RunLimit
from holdfast.core.call_limits import CallLimit
from holdfast.core.debounce import Debounce
from holdfast.core.events import NULL
from holdfast.core.keys import fork_tag, retry_tag
from holdfast.core.messages import cancelled_text
from holdfast.core.plans import is_plan
from holdfast.core.search import parse_order, parse_query
from holdfast.core.state import FAILED, TERMINAL, RunStatus
from holdfast.engine.history import head_of
from holdfast.engine.inbox.signals import FirstSignal
from holdfast.engine.observe.logs import escaped
from holdfast.engine.plans import load_plan
from holdfast.engine.start.requests import StartOptions
from holdfast.errors import (
    Conflict,
    InvalidInput,
    NotFound,
    NotPermitted,
    Overloaded,
    PayloadTooLarge,
    QueryFailed,
    RateLimited,
    RunError,
    RunTerminal,
    UpdateFailed,
)
from holdfast.limits import COUNTED_ROWS, SEARCH_CHARS, SEARCH_WORDS, TAGS, WHERE_CHARS
from holdfast.program.definitions import NO_TIMEOUTS, run_timeouts
from holdfast.program.flow.definition import FlowDefinition
from holdfast.service.auth.tenancy import check_chosen_id
from holdfast.service.context import RequestContext
from holdfast.service.live.projections import Drawable
from holdfast.service.operations.workflows import Handled
from holdfast.service.paging import Cursor, PageSize, read_ordered, read_page, time_of
from holdfast.service.registry import OF_A_RUN, Name, Request, RunId, SignalId, WaitSeconds, given, operation
from holdfast.service.views import (
    TASK_CONTENTS,
    EventView,
    Failure,
    GraphView,
    Moment,
    PlaceView,
    RunStarted,
    RunView,
    SnapshotView,
    event_view,
    failure_of,
    graph_view,
    instant_of,
    run_view,
    shown,
    snapshot_view,
)
from holdfast.store.payloads import concealed
from holdfast.store.port import Delivered, Index, PlaceInLine, PlaceQuery, ReusePolicy, RunCountQuery, RunHead, RunQuery

HEAD_BYTES = 1_000
"""About how large a run is in a list, without its error."""

SHOWN_CHARS = 200
"""How much of an error that a query raised is logged."""

MOST_EXPANDED = 100
"""How many groups of a graph one request may name."""

logger = logging.getLogger("holdfast.service")


AttributesGiven = Annotated[
    dict[str, Any], Meta(description="Search attributes, of the types that the app declares; instants as texts.")
]


ContextGiven = Annotated[
    dict[str, str], Meta(description="Small texts, such as the user, for the run, its activities and its children.")
]


Seconds = Annotated[float, Meta(gt=0, le=10**9)]


StartsAt = Annotated[Moment, Meta(description="When it starts; until then it is PENDING.")]
StartsAfter = Annotated[float, Meta(gt=0, le=10**9, description="Or in how many seconds.")]

Reused = Annotated[
    ReusePolicy, Meta(description="What becomes of a run_id that is taken; the last takes runs:control.")
]


DebounceKey = Annotated[
    Name, Meta(description="Starts with the same key are one run, with the input of the last, until it begins.")
]
DebounceQuiet = Annotated[Seconds, Meta(description="It begins when none has come for so long.")]
DebounceAtMost = Annotated[Seconds, Meta(description="And so long after the first at the latest.")]


class StartRun(Request, frozen=True, kw_only=True):
    """The start of a run. `input` has the workflow's arguments by name."""

    workflow: Annotated[Name, Meta(description="The workflow's name.")]
    input: dict[str, Any] = field(default_factory=dict)
    workflow_version: Annotated[Name, Meta(description="Else the version that was registered last.")] | None = None
    request_id: Annotated[str, Meta(max_length=255, description="The same request again gives the same run.")] = ""
    run_id: Annotated[RunId, Meta(description="Else a fresh one.")] | None = None
    tenant: Annotated[Name, Meta(description="Whose it is, where the token does not say so.")] = "default"
    project: Name = "default"
    environment: Name = "default"
    reference_key: Name | None = None
    tags: Annotated[tuple[Name, ...], Meta(max_length=TAGS)] = ()
    priority: Annotated[int, Meta(ge=-100, le=100, description="Higher goes first where runs wait for room.")] = 0
    at: StartsAt | None = None
    after_s: StartsAfter | None = None
    execution_timeout_s: Annotated[Seconds, Meta(description="How long the whole run may take.")] | None = None
    run_timeout_s: Annotated[Seconds, Meta(description="How long each stretch between rotations may take.")] | None = (
        None
    )
    cleanup_timeout_s: Annotated[Seconds, Meta(description="How long it may clean up then: 600.")] | None = None
    context: ContextGiven = field(default_factory=dict)
    reference_parts: dict[str, str] = field(default_factory=dict)
    attributes: AttributesGiven = field(default_factory=dict)
    reuse: Reused | None = None
    debounce_key: DebounceKey | None = None
    debounce_quiet_s: DebounceQuiet | None = None
    debounce_at_most_s: DebounceAtMost | None = None


def debounce_of(key: str | None, quiet_s: float | None, at_most_s: float | None) -> Debounce | None:
    """Return how a start is debounced, if it is."""
    if key is None and quiet_s is None and at_most_s is None:
        return None
    if key is None or quiet_s is None or at_most_s is None:
        problem = "a debounced start has debounce_key, debounce_quiet_s and debounce_at_most_s: all three"
        raise InvalidInput(problem, field="debounce_key")
    return Debounce(key, quiet_s, at_most_s)


def after_ms(after_s: float | None) -> int | None:
    """Return after how many milliseconds a run starts, if it starts later."""
    return None if after_s is None else max(1, round(after_s * 1_000))


async def start_run(
    context: RequestContext, request: StartRun, with_signal: FirstSignal | None = None
) -> tuple[RunStarted, tuple[Delivered, ...]]:
    """Start a run, and return the answers to its first signals."""
    if request.run_id is not None:
        check_chosen_id(context.principal.tenant, request.run_id)
    if request.reuse == "terminate-and-restart":
        context.principal.require("runs:control")
    tenant, project, environment = context.within(request.tenant, request.project, request.environment)
    registry = context.runtime.registry
    newest = registry.newest.get(request.workflow) if request.workflow_version is None else None
    definition = newest or registry.workflow(request.workflow, request.workflow_version)
    bounds = (request.execution_timeout_s, request.run_timeout_s, request.cleanup_timeout_s)
    options = StartOptions(
        request_id=request.request_id,
        run_id=request.run_id,
        tenant=tenant,
        project=project,
        environment=environment,
        reference_key=request.reference_key,
        tags=request.tags,
        priority=request.priority,
        with_signal=with_signal,
        names_version=request.workflow_version is not None,
        at=None if request.at is None else instant_of(request.at),
        after_ms=after_ms(request.after_s),
        reference_parts=request.reference_parts,
        attributes=request.attributes,
        timeouts=None if bounds == NO_TIMEOUTS else run_timeouts(*bounds),
        reuse=request.reuse,
        context=request.context,
        debounce=debounce_of(request.debounce_key, request.debounce_quiet_s, request.debounce_at_most_s),
    )
    packed = definition.signature.pack((), request.input)
    started = await context.runtime.start(definition, packed, options, context.principal)
    answer = RunStarted(
        run_id=started.run_id,
        workflow=definition.name,
        workflow_version=started.workflow_version,
        is_reused=started.is_reused,
    )
    return answer, started.signals


@operation(
    "runs.start",
    "POST /v1/runs",
    scope="runs:write",
    status=201,
    errors=(NotFound, Conflict, Overloaded, RateLimited, PayloadTooLarge),
    audit="its commit",
)
async def start(context: RequestContext, request: StartRun) -> RunStarted:
    """Start a run. When this answers the run is durable.

    With a `request_id` a retry is recognised, by tenant, project, environment and workflow, and by the version where
    one is named: it is answered as the first time, and with `Conflict` if its input differs. A retry that names no
    version gets its run although another version would be started by now.

    `reuse` says what becomes of a `run_id` that is taken: `return` its latest run, `reject` the start,
    `restart-if-finished`, `terminate-and-restart`. A restart has the id with its number behind it.

    With a `debounce_key` a start whose run has not begun gives it another input, and puts it off; `is_reused` is true
    then.
    """
    return (await start_run(context, request))[0]


class OfRun(Request, frozen=True, kw_only=True):
    """Which run is meant."""

    run_id: RunId


@operation("runs.get", "GET /v1/runs/{run_id}", scope="runs:read", errors=OF_A_RUN)
async def get(context: RequestContext, request: OfRun) -> RunView:
    """Return a run without its history."""
    head = await head_of(context.store, request.run_id)
    if head.status is FAILED:
        return run_view(head, done_again_by=await done_again_by(context.store, head.run_id))
    [view] = await _views(context, [head], is_list=False)
    return view


async def done_again_by(store: Index, run_id: str) -> str | None:
    """Return the newest run that retries or continues this one, if there is one."""
    queries = [RunQuery(tag=tag, newest=True, limit=1) for tag in (fork_tag(run_id), retry_tag(run_id))]
    found = [head for query in queries for head in await store.find(query)]
    return max(found, key=lambda head: head.created_at).run_id if found else None


async def _views(context: RequestContext, heads: Sequence[RunHead], *, is_list: bool = True) -> list[RunView]:
    """Return runs as callers see them, with the queue positions of waiting runs: one query for all.

    In a list, positions are only queried for queued runs, and for runs that wait for an activity before all else.
    """
    waiting = [head.run_id for head in heads if head.finished_at is None and (not is_list or _may_wait(head))]
    if not waiting:
        return [run_view(head) for head in heads]
    found = await context.store.find(PlaceQuery(run_ids=tuple(waiting), limit=len(waiting)))
    places = {place.run_id: _place_view(context, place) for place in found}
    return [run_view(head, places.get(head.run_id)) for head in heads]


def _may_wait(head: RunHead) -> bool:
    is_at_activity = head.snapshot is not None and head.snapshot.waiting_kind == "activity"
    return head.queued_at is not None or is_at_activity


def _place_view(context: RequestContext, place: PlaceInLine) -> PlaceView:
    registry = context.runtime.registry
    numbers: CallLimit | RunLimit | None = registry.call_limits.get(place.limit)
    if not place.step_id:
        workflow = registry.workflow_limits.get(place.limit)
        numbers = None if workflow is None else workflow.limit
    return shown(
        PlaceView,
        place,
        step_id=place.step_id or None,
        in_line=place.before + 1,
        at_once=None if numbers is None else numbers.at_once,
        per_key=None if numbers is None else numbers.per_key,
    )


_WORDS = (
    f"Up to {SEARCH_WORDS} words, each a part of the run's id, workflow, reference, a tag, or what it last failed with."
)


_WHERE = (
    'Conditions with spaces between: cents>1000 region=eu city="New York" city=New* vip=* due!=*; also status:failed, '
    "workflow:order, tag:web, reference:o-7, parent:RUN-ID, created_at>=2026-01-31, finished_at<2026-02-01"
)


class RunFilter(Request, frozen=True, kw_only=True):
    """Which runs to select. A field that is omitted matches everything."""

    workflow: str | None = None
    status: RunStatus | None = None
    reference_key: str | None = None
    tag: str | None = None
    parent_run_id: str | None = None
    roots: Annotated[bool, Meta(description="Leave out runs that another run has started.")] = False
    retrying: Annotated[bool, Meta(description="Only runs of which an activity has failed and is tried again.")] = False
    created_from: Moment | None = None
    created_until: Moment | None = None
    finished_from: Moment | None = None
    finished_until: Moment | None = None
    where: Annotated[str, Meta(max_length=WHERE_CHARS, description=_WHERE)] = ""
    text: Annotated[str, Meta(min_length=1, max_length=SEARCH_CHARS, description=_WORDS)] | None = None


class ListRuns(RunFilter, frozen=True, kw_only=True):
    """Which runs to list, and in which order."""

    order: Annotated[Literal["id", "newest"], Meta(description="By their ids, or the newest first.")] = "id"
    order_by: Annotated[
        str,
        Meta(
            max_length=100,
            description="Instead: an attribute, created_at or finished_at; `cents desc` from the greatest.",
        ),
    ] = ""
    cursor: Cursor = ""
    limit: PageSize = 100


def run_query(context: RequestContext, request: RunFilter) -> RunQuery:
    """Return the store's query for a filter."""
    parsed = parse_query(request.where, context.runtime.registry.attributes)
    query = RunQuery(
        workflow=request.workflow,
        status=request.status,
        reference_key=request.reference_key,
        tag=request.tag,
        parent_run_id=request.parent_run_id,
        roots=request.roots,
        retrying=request.retrying,
        created_from=instant_of(request.created_from),
        created_until=instant_of(request.created_until),
        finished_from=instant_of(request.finished_from),
        finished_until=instant_of(request.finished_until),
        where=parsed.conditions,
        text=request.text,
    )
    return replace(query, **{field: _asked_once(query, field, value) for field, value in parsed.fields.items()})


def _asked_once(query: RunQuery, field: str, value: Any) -> Any:
    """Return the value that the text of a query sets, unless the filter sets the same field to another value."""
    if field == "status":
        if value not in RunStatus.__members__:
            known = ", ".join(status.lower() for status in RunStatus)
            raise InvalidInput(f"where: status:{value.lower()} is none of {known}", field="where")
        value = RunStatus(value)
    if getattr(query, field) not in (None, value):
        raise InvalidInput(f"where: {field} is also given beside it, as another", field="where")
    return value


class RunPage(Struct, frozen=True):
    """Some runs. `next` is the cursor of the page behind it, if there is more.

    `unreadable` names runs whose rows are damaged: they are left out.
    """

    items: list[RunView]
    next: str | None = None
    unreadable: tuple[str, ...] = ()
    as_of: str | None = None
    """The time of the list, by the store's clock, if the store's lists may be outdated (S3)."""


@operation("runs.list", "GET /v1/runs", scope="runs:read")
async def list_(context: RequestContext, request: ListRuns) -> RunPage:
    """Find runs by workflow, status, reference, attributes, tag, parent, times of creation and end, and text.

    A cursor goes with the order that it was given out for. A search looks at so many runs at a time: an answer with
    `next` may have few items, or none, and there may be more behind it all the same. A search with `where` has the
    newest runs first unless `order_by` says otherwise; runs that lack what that names are left out.
    """
    query = run_query(context, request)
    query = replace(query, newest=request.order == "newest" or bool(request.where))
    if request.order_by:
        query = replace(query, order=parse_order(request.order_by, context.runtime.registry.attributes))
        found, next_page = await read_ordered(
            context, query, request.order_by, cursor=request.cursor, limit=request.limit
        )
        return RunPage(await _views(context, found), next_page, found.unreadable, time_of(found))
    kind, place_of, place = ("newest runs", _birth_of, "before") if query.newest else ("runs", _id_of, "after")
    rows, following = await read_page(
        context,
        kind,
        context.store.find,
        query,
        place_of,
        cursor=request.cursor,
        limit=request.limit,
        place=place,
        size_of=_head_bytes,
    )
    return RunPage(await _views(context, rows), following, rows.unreadable, time_of(rows))


class RunCounts(Struct, frozen=True, kw_only=True):
    """The number of runs. If `is_whole` is false there may be more: counting stopped at a limit.

    Runs that are not completed are counted apart from the others, so it is known how many have failed.
    """

    total: int
    by_status: dict[str, int]
    by_workflow: dict[str, int]
    is_whole: bool


@operation("runs.count", "GET /v1/run-counts", scope="runs:read", reads_much=True)
async def count(context: RequestContext, request: RunFilter) -> RunCounts:
    """Count the runs that a search finds, by status and by workflow."""
    runs = run_query(context, request)
    look = min(COUNTED_ROWS // 4 if runs.where else COUNTED_ROWS, context.service.options.search_rows)
    query = RunCountQuery(runs=runs, look=look, limit=500)
    found = await context.store.find(query)
    by_status: Counter[str] = Counter()
    by_workflow: Counter[str] = Counter()
    for each in found:
        by_status[each.status] += each.count
        by_workflow[each.workflow] += each.count
    return RunCounts(
        total=by_status.total(),
        by_status=dict(by_status),
        by_workflow=dict(by_workflow),
        is_whole=found.cursor is None and len(found) < query.limit,
    )


def _head_bytes(head: RunHead) -> int:
    error = head.snapshot.last_error if head.snapshot is not None else None
    return HEAD_BYTES + (len(error.message) + len(error.traceback) if error is not None else 0)


def _id_of(head: RunHead) -> Any:
    return head.run_id


def _birth_of(head: RunHead) -> Any:
    return head.created_at, head.run_id


class ReadEvents(OfRun, frozen=True, kw_only=True):
    """From where to read a history."""

    after: Annotated[int, Meta(ge=0, lt=2**53, description="The run_seq behind which to begin.")] = 0
    limit: PageSize = 100


class EventPage(Struct, frozen=True, kw_only=True):
    """A part of a history. `last_event_seq` is the number of the run's last event: there is more until it is here."""

    items: list[EventView]
    last_event_seq: int
    status: RunStatus


@operation("runs.events", "GET /v1/runs/{run_id}/events", scope="runs:read", errors=OF_A_RUN)
async def events(context: RequestContext, request: ReadEvents) -> EventPage:
    """Return a part of a run's history, in the order of `run_seq`, which has no gaps.

    A reader that sees a gap knows that its view is stale: it fetches the snapshot, and goes on behind it. What a task
    asks, and what was answered, is left out for callers whom it does not concern (`is_redacted`). A page of large
    events ends before `limit`; of one that is too large for an answer `data` is left out (`data_bytes`).
    """
    head = await head_of(context.store, request.run_id)
    page = await context.store.read_events(request.run_id, request.after, request.limit, context.page_bytes)
    asked = (event.step_id for event in page if isinstance(event.data, TASK_CONTENTS))
    redacted = await context.redacted_steps(request.run_id, asked)
    return EventPage(
        items=[event_view(event, redacted, context.item_bytes) for event in page],
        last_event_seq=max(head.version, page[-1].run_seq if page else 0),
        status=head.status,
    )


@operation("runs.snapshot", "GET /v1/runs/{run_id}/snapshot", scope="runs:read", errors=OF_A_RUN, reads_much=True)
async def snapshot(context: RequestContext, request: OfRun) -> SnapshotView:
    """Return a run with its steps, projected from its events; for a flow, also its present state."""
    projection = await context.service.projections.of(context.store, request.run_id)
    state = await _state_of(context, request.run_id)
    return snapshot_view(projection.snapshot, projection.is_stale, state)


async def _state_of(context: RequestContext, run_id: str) -> Raw:
    """Return the state of a flow's run; null if it is not a flow, is not known here, or has not begun."""
    head = await head_of(context.store, run_id)
    definition = context.runtime.registry.workflows.get((head.plan_id, head.plan_version))
    if not isinstance(definition, FlowDefinition) or head.status in (RunStatus.PENDING, RunStatus.APPROVED):
        return NULL
    try:
        return await context.runtime.query(run_id, "state", codec.encode({}), context.principal)
    except (Conflict, NotFound, NotPermitted, RunError):  # the rest of the snapshot is useful anyway
        return NULL


class DrawRun(OfRun, frozen=True, kw_only=True):
    """Which groups of a run's graph to expand, in addition to those that are expanded by default."""

    expand: Annotated[
        tuple[Name, ...], Meta(max_length=MOST_EXPANDED, description="Groups to expand, or steps to show in theirs.")
    ] = ()
    collapse: Annotated[tuple[Name, ...], Meta(max_length=MOST_EXPANDED, description="Groups not to expand.")] = ()


@operation("runs.graph", "GET /v1/runs/{run_id}/graph", scope="runs:read", errors=OF_A_RUN, reads_much=True)
async def graph(context: RequestContext, request: DrawRun) -> GraphView:
    """Return the steps of a flow or a plan with their states in a run, as a graph that is small enough to be drawn.

    What is too large is folded into groups with counts, which `expand` shows. Groups and their names stay the same for
    the same definition. A workflow in code has no graph.
    """
    definition = await _definition_of(context, await head_of(context.store, request.run_id))
    projection = await context.service.projections.of(context.store, request.run_id)
    drawn = await context.service.graph_folds.of_run(definition, projection.snapshot, request.expand, request.collapse)
    return graph_view(projection, drawn)


async def _definition_of(context: RequestContext, head: RunHead) -> Drawable:
    """Return the definition of a run: a workflow that is registered here, or a plan that is in the store."""
    registry = context.runtime.registry
    if not is_plan(head.plan_id):
        return registry.workflow(head.plan_id, head.plan_version)
    for event in await context.store.read_events(head.run_id, 0, 1):
        if isinstance(event.data, e.RunQueued) and event.data.plan is not None:
            return await load_plan(registry, context.runtime.store, head.tenant, event.data.plan.sha256)
    raise NotFound(f"run {head.run_id} has no plan that could be drawn", run_id=head.run_id)


class AwaitResult(OfRun, frozen=True, kw_only=True):
    """How long to wait for a run to finish."""

    wait_s: WaitSeconds = 0.0


class RunOutcome(Struct, frozen=True, kw_only=True):
    """How a run stands, and, once it has finished, what it returned or why it did not."""

    run_id: str
    status: RunStatus
    is_finished: bool
    result: Raw
    error: Failure | None = None
    is_timed_out: bool = False
    """It took longer than allowed."""
    reason: str = ""
    """Why it was cancelled, if it was and a reason was given."""


@operation("runs.result", "GET /v1/runs/{run_id}/result", scope="runs:read", errors=OF_A_RUN)
async def result(context: RequestContext, request: AwaitResult) -> RunOutcome:
    """Return the result of a run, or its error. With `wait_s` wait for it; if it does not come, ask again."""
    head = await head_of(context.store, request.run_id)
    if head.status in TERMINAL:
        last = await context.runtime.wait_finished(request.run_id)
    elif request.wait_s > 0:
        found = await context.wait_for(context.runtime.wait_finished(request.run_id), request.wait_s)
        if found is None:
            head = await head_of(context.store, request.run_id)
            return RunOutcome(run_id=request.run_id, status=head.status, is_finished=False, result=NULL)
        last = found
    else:
        return RunOutcome(run_id=request.run_id, status=head.status, is_finished=False, result=NULL)
    return _outcome(request.run_id, last.data)


def _outcome(run_id: str, body: e.Body) -> RunOutcome:
    if isinstance(body, e.RunCompleted):
        return RunOutcome(run_id=run_id, status=RunStatus.COMPLETED, is_finished=True, result=concealed(body.result))
    if isinstance(body, e.RunFailed):
        return RunOutcome(
            run_id=run_id,
            status=RunStatus.FAILED,
            is_finished=True,
            result=NULL,
            error=failure_of(body.error),
            is_timed_out=body.timeout != "",
        )
    reason = getattr(body, "reason", "")
    error = Failure("RunCancelled", cancelled_text(run_id, reason))
    return RunOutcome(
        run_id=run_id, status=RunStatus.CANCELLED, is_finished=True, result=NULL, error=error, reason=reason
    )


class AskRun(OfRun, frozen=True, kw_only=True):
    """What to ask a run: the name of a query that it answers, and its arguments by their names."""

    name: Name
    input: dict[str, Any] = field(default_factory=dict)


class Answered(Struct, frozen=True):
    """What a run has answered."""

    result: Raw


@operation(
    "runs.query",
    "POST /v1/runs/{run_id}/queries/{name}",
    scope="runs:read",
    errors=(NotFound, QueryFailed, RunError, PayloadTooLarge, RateLimited),
    audit="nothing",
)
async def query(context: RequestContext, request: AskRun) -> Answered:
    """Ask a run about its present state. Nothing is recorded; a run that has finished answers too.

    A run that is not in memory is replayed to answer. So queries count as lists do, and only some are asked at once.
    """
    await context.require_run(request.run_id)
    principal, read_limiter = context.principal, context.service.read_limiter
    caller = principal.token_id or principal.name
    read_limiter.charge(caller, principal.tenant, 1)
    try:
        async with read_limiter.slot(f"{caller if principal.tenant is None else principal.tenant} queries"):
            answer = await context.runtime.query(request.run_id, request.name, codec.encode(request.input), principal)
            return Answered(answer)
    except QueryFailed as problem:
        logger.info("run %s: %s", escaped(request.run_id), escaped(problem.message[:SHOWN_CHARS]))
        raise


class HandlersView(Struct, frozen=True):
    """The queries and updates that a run has said it answers."""

    queries: dict[str, Handled]
    updates: dict[str, Handled]


@operation(
    "runs.handlers",
    "GET /v1/runs/{run_id}/handlers",
    scope="runs:read",
    errors=(NotFound, RunError, RateLimited),
    reads_much=True,
)
async def handlers(context: RequestContext, request: OfRun) -> HandlersView:
    """Return the queries and updates that a run offers. Without the run's code here, a node that has it is asked."""
    await context.require_run(request.run_id)
    return codec.decode(await context.runtime.handlers(request.run_id), HandlersView)


class UpdateRun(AskRun, frozen=True, kw_only=True):
    """What to ask of a run: the name of an update that it takes, and its arguments by their names."""

    update_id: SignalId | UnsetType = UNSET


@operation(
    "runs.update",
    "POST /v1/runs/{run_id}/updates/{name}",
    scope="runs:write",
    errors=(NotFound, Conflict, RunTerminal, UpdateFailed, RateLimited, PayloadTooLarge),
    is_answered_by_run=True,
    audit="its commit",
)
async def update(context: RequestContext, request: UpdateRun) -> Answered:
    """Ask a run for something and wait for its answer. With an `update_id` a retry gets the first answer."""
    await context.require_run(request.run_id)
    answer = await context.runtime.update(
        request.run_id, request.name, request.input, given(request.update_id), context.principal
    )
    return Answered(answer)
